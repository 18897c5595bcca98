"""The sizes that a family counts work from, by operation (`Family.work`)."""

from __future__ import annotations

from tuner.families import attention_work, product_work
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem

Sizes = attention_work.Sizes | product_work.Sizes


def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem.

    Raises:
        TypeError: of an operation whose work no family counts.
    """
    if isinstance(problem, AttentionProblem):
        return attention_work.Sizes.of(problem)
    if isinstance(problem, GemmProblem | SwigluProblem):
        return product_work.Sizes.of(problem)
    raise TypeError(f"no family counts the work of {problem.op}")
