"""Rules in the place of a portfolio: for an operation a few kernels, and a rule that chooses among
them by expected time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

from tuner.hardware import Gpu
from tuner.problem import AttentionBackwardProblem, GemmProblem, GroupedGemmProblem, Problem
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


WITHOUT_PORTFOLIO = (AttentionBackwardProblem.op, GroupedGemmProblem.op)
"""The operations that have a rule for all problems, and no portfolio."""
OPERATIONS = (*WITHOUT_PORTFOLIO, GemmProblem.op)
"""The operations that have a rule."""


def rule_of(problem: Problem) -> Rule | None:
    """The rule for a problem; None for problems that portfolios serve."""
    if isinstance(problem, GemmProblem) and problem.scales != "block":
        return None
    return next(rules({problem.op}), None)


def rules(operations: Collection[str] = OPERATIONS) -> Iterator[Rule]:
    """The rules of some operations; portfolios answer the others.

    A rule's module is imported when it is needed: other first calls do not load its families.
    """
    if AttentionBackwardProblem.op in operations:
        from tuner.selection import backward

        yield backward
    if GroupedGemmProblem.op in operations:
        from tuner.selection import grouped

        yield grouped
    if GemmProblem.op in operations:
        from tuner.selection import block_scaled

        yield block_scaled
