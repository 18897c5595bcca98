"""Calls of prebuilt kernels, in the place of compiling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from tuner.config import Config
from tuner.problem import Problem


class LibraryCalls:
    """Calls of a vendor's or peer's library. The defaults are those of a compiled family."""

    name: ClassVar[str]
    is_vendor: ClassVar[bool] = False
    """True for a vendor's kernels: baselines that are called through `vendor_call` and not
    compiled.
    """
    is_listed: ClassVar[bool] = False
    """True when a library enumerates the candidates on the GPU (`listing`). `space` then has the
    library's default.
    """

    def vendor_call(
        self, problem: Problem, config: Config, scale: float
    ) -> Callable[..., Any] | str:
        """A vendor's kernel as ``call(*inputs) -> output`` over torch tensors of the operands'
        shapes, or the reason why it cannot run here. May import torch.
        """
        return f"{self.name} is compiled, not called"

    def listing(self, problem: Problem, max_workspace: int | None) -> Sequence[Config]:
        """Candidates that a library lists for `problem` on this GPU, in the library's order,
        without duplicates.

        For families with `is_listed`; runs in the measuring process. May import torch, and passes
        on the library's errors.

        Args:
            problem: problem to compute.
            max_workspace: bytes that a candidate may use beside its operands; None: no limit.
        """
        return ()

    def handed_over(self, problem: Problem, config: Config) -> Problem:
        """`problem` in the operand layout of a vendor's kernel; by default its own. Only the layout
        may differ.
        """
        return problem

    def environment(self) -> Mapping[str, str]:
        """Versions that a vendor's time depends on, by name; may import torch."""
        return {}
