"""Rules in the place of a portfolio: for an operation a few kernels, and a rule that chooses among
them by expected time.

A rule is a module with `serves`, `select` and `targets`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from tuner.config import Config
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionBackwardProblem, GroupedGemmProblem
from tuner.selection.kernels import Target


class RuleSelection(NamedTuple):
    """The kernels for a problem by a rule."""

    expected: tuple[tuple[float, Config], ...]
    """Expected microseconds and config of each kernel that takes the problem, best first."""
    regime: Regime
    """Regime of the measurements that the rule is made of."""
    doubts: tuple[str, ...]
    """As of `tuner.selection.portfolio.Selection`."""

    @property
    def source(self) -> str:
        """Reason for the first kernel, for people."""
        return f"expected {self.expected[0][0]:.1f} us"

    def own(self) -> Iterator[tuple[float, Config]]:
        """All of them."""
        yield from self.expected


class Rule(Protocol):
    """Interface of the modules."""

    def serves(self, problem: Any, gpu: Gpu) -> bool:
        """True for problems that have kernels, on a GPU that runs them."""

    def select(self, problem: Any, gpu: Gpu) -> RuleSelection | None:
        """The rule's kernels for a problem; None when none takes it."""

    def targets(self) -> tuple[Target, ...]:
        """The kernels, to be built and proven."""


def rules() -> Mapping[str, Rule]:
    """The rules by operation."""
    from tuner.selection import backward, grouped

    return {AttentionBackwardProblem.op: backward, GroupedGemmProblem.op: grouped}
