"""The sizes that a family counts work from, by operation (`Family.work`)."""

from __future__ import annotations

from typing import Any

from tuner.families import attention_work, product_work
from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem

Sizes = attention_work.Sizes | product_work.Sizes


def kind_of(problem: Problem) -> type[Sizes]:
    """The kind of sizes that a problem has.

    Raises:
        TypeError: of an operation whose work no family counts.
    """
    if isinstance(problem, AttentionProblem):
        return attention_work.Sizes
    if isinstance(problem, GemmProblem | SwigluProblem):
        return product_work.Sizes
    raise TypeError(f"no family counts the work of {problem.op}")


def sizes_of(problem: Problem) -> Sizes:
    """The sizes of a problem.

    Raises:
        TypeError: of an operation whose work no family counts.
    """
    kind: Any = kind_of(problem)
    found: Sizes = kind.of(problem)
    return found
