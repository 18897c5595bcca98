"""Rules in the place of a portfolio: for an operation a few kernels, and a rule that chooses among
them by expected time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tuner.hardware import Gpu
from tuner.problem import AttentionBackwardProblem, GroupedGemmProblem
from tuner.selection import backward, grouped
from tuner.selection.by_rule import RuleSelection
from tuner.selection.kernels import Target


class Rule(Protocol):
    """Interface of the modules."""

    def serves(self, problem: Any, gpu: Gpu) -> bool:
        """True for problems that have kernels, on a GPU that runs them."""

    def select(self, problem: Any, gpu: Gpu) -> RuleSelection | None:
        """The rule's kernels for a problem; None when none takes it."""

    def targets(self) -> tuple[Target, ...]:
        """The kernels, to be built and proven."""


RULES: Mapping[str, Rule] = {AttentionBackwardProblem.op: backward, GroupedGemmProblem.op: grouped}
"""The rules by operation."""
