"""Expected time and loss of a search, by operation, effort and cores, from recordings; and the
part of a surrogate's expected saving that came.

`tuner develop fit stopping` takes the times and losses of simulated searches over the recorded
problems (`scripts/bench tuner --preset recorded`), and what the surrogate expected in them. It
stores both as ``cache/effort/expected.json``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tuner.base import document, resources
from tuner.errors import StoreError


@dataclass(frozen=True)
class Expectation:
    """Time and loss of searches of recorded problems."""

    op: str
    effort: str
    cores: int
    recordings: int
    seconds: float
    """Median of the simulated search time without the final pass, seconds."""
    seconds_p90: float
    loss: float
    """Median, over replayed searches, of the chosen kernel's time over the recorded best, less 1.
    """
    loss_p90: float

    def text(self, cores: int) -> str:
        """One line for people.

        Args:
            cores: number of parallel compiles where the search will run.
        """
        here = "" if cores == self.cores else f" ({cores} here)"
        return (
            f"effort {self.effort}: about {self.seconds:.0f} s of search on {self.cores} "
            f"cores{here}, {self.seconds_p90:.0f} s in one of ten, and a kernel within "
            f"{100 * self.loss:.1f} % of the best, {100 * self.loss_p90:.1f} % in one of ten "
            f"(simulated over {self.recordings} recordings)"
        )

    def to_json(self) -> dict[str, Any]:
        """JSON object of the fields."""
        return asdict(self)


@dataclass(frozen=True)
class Credit:
    """Part of the saving that a surrogate expects of all groups without a result which came in
    recorded searches.
    """

    results: int
    """Least number of groups with a result."""
    share: float
    """Savings that came over those expected, both summed."""
    share_p90: float
    """The same of one search, in one of ten."""
    searches: int
    """Number of searches."""

    def to_json(self) -> dict[str, Any]:
        """JSON object of the fields."""
        return asdict(self)


class Saving(NamedTuple):
    """Share of the best time that the groups without a result are expected to save."""

    promised: float
    """By the surrogate."""
    mean: float
    """Part of it that came in recorded searches."""
    p90: float
    """Part that came in one search of ten."""


def file() -> Path:
    """File in which the expectations ship."""
    return resources.cache() / "effort" / "expected.json"


@cache
def shipped() -> tuple[Expectation, ...]:
    """Every expectation that ships.

    Raises:
        StoreError: when the file is damaged.
    """
    return _read(Expectation, "expected")


@cache
def credits() -> tuple[Credit, ...]:
    """Every credit that ships, by the number of results.

    Raises:
        StoreError: when the file is damaged.
    """
    return _read(Credit, "credits")


def credit(results: int) -> Credit:
    """Credit of a search with so many results; all comes where none was recorded."""
    whole = Credit(0, 1.0, 1.0, 0)
    fitting = (each for each in credits() if each.results <= results)
    return max(fitting, default=whole, key=attrgetter("results"))


_Row = TypeVar("_Row", Expectation, Credit)


def _read(kind: type[_Row], part: str) -> tuple[_Row, ...]:
    try:
        rows = document.parse(file().read_bytes())[part]
        return tuple(kind(**document.checked(kind, row)) for row in rows)
    except FileNotFoundError:
        return ()
    except (OSError, LookupError, TypeError, ValueError) as exc:
        raise StoreError(f"{file()} cannot be read: {exc}") from exc


def expected(op: str, effort: str, cores: int) -> Expectation | None:
    """The expectation for the largest number of cores up to `cores`, or else for the smallest
    number. None for an operation that was not simulated.
    """
    rows = [e for e in shipped() if (e.op, e.effort) == (op, effort)]
    within = [e for e in rows if e.cores <= cores]
    if within:
        return max(within, key=lambda e: e.cores)
    return min(rows, key=lambda e: e.cores, default=None)
