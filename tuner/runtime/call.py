"""One call of the runtime as a frozen object: the contract that `serving` reads.

An operation of the runtime is one class, a `NamedTuple` because it is made in each call. It says
which tensors a kernel gets, which calls are alike, the problem, and PyTorch's answer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch

from tuner.runtime.plan import Plan, Posed
from tuner.runtime.refusal import Refusal

Told = tuple[str, tuple[Any, ...]]
"""Operation and arguments as the C++ dispatcher takes them (`dispatch.put`)."""


class Call(Protocol):
    """One call: tensors and options."""

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Tensors that a kernel gets, in the order of the problem's operands."""

    @property
    def aligned(self) -> int:
        """Count of the leading `inputs` that start at a multiple of 16 bytes."""

    @property
    def told(self) -> Told | None:
        """The call as the C++ dispatcher takes it; None: it knows no such calls."""

    def refusal(self) -> Refusal | None:
        """Reason why no kernel takes the call, whatever the store says; else None."""

    def kind(self) -> Hashable:
        """Key of the call: equal keys pose equal problems and share a plan."""

    def pose(self) -> Posed:
        """The problem of the call.

        Raises:
            ConfigError: when no tuned kernel has such types, sizes or strides.
        """

    def run(self, plan: Plan) -> torch.Tensor | Refusal:
        """The plan's output, or the reason why this call cannot have it."""

    def by_pytorch(self) -> torch.Tensor:
        """PyTorch's answer to the call."""
