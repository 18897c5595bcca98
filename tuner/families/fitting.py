"""Groups of constants that a family fits: `tuner develop fit` reads the rows, and reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tuner.base.install import extra_command
from tuner.errors import ConfigError

Constants = Mapping[str, float]


class FitGroup(NamedTuple):
    """Constants that are fitted together."""

    title: str
    items: Sequence[Any]
    """Measurements."""
    ships: Constants
    fitted: Callable[[Any], Constants]
    """Constants of a list of items."""
    loss: Callable[[Any, Constants], float]
    """Error of constants at an item."""
    part: Callable[[Any], Any] | None = None
    """Part of an item; those of each are also judged by a fit to the others."""


def least_squares(
    residuals: Callable[[Constants], Sequence[float]],
    start: Constants,
    digits: int,
    loss: str = "soft_l1",
    **options: Any,
) -> dict[str, float]:
    """Positive constants of the least residuals, which move from a start by factors.

    Further options are those of `scipy.optimize.least_squares`; by default outliers weigh less.

    Raises:
        ConfigError: when scipy is not installed.
    """
    try:
        from scipy import optimize
    except ImportError as exc:
        raise ConfigError(f"a fit needs scipy ({exc}): {extra_command('fit')}") from exc

    def moved(steps: Sequence[float]) -> dict[str, float]:
        return {n: v * math.exp(s) for (n, v), s in zip(start.items(), steps, strict=True)}

    solution = optimize.least_squares(
        lambda steps: residuals(moved(steps)), [0.0] * len(start), loss=loss, **options
    )
    return {name: float(f"{v:.{digits}g}") for name, v in moved(solution.x).items()}


def nonnegative(rows: Any, goal: Any) -> Any:
    """Numbers, not negative, of the least squares of rows times them less a goal.

    Raises:
        ConfigError: when scipy is not installed.
    """
    try:
        from scipy import optimize
    except ImportError as exc:
        raise ConfigError(f"a fit needs scipy ({exc}): {extra_command('fit')}") from exc
    return optimize.nnls(rows, goal)[0]
