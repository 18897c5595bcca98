"""Rules in the place of a portfolio: for an operation a few kernels, and a choice among them by
expected time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from tuner.config import Config
from tuner.families.target import Target
from tuner.hardware import Gpu
from tuner.measurement import Regime


class RuleSelection(NamedTuple):
    """The kernels for a problem by a rule."""

    expected: tuple[tuple[float, Config], ...]
    """Expected microseconds and config of each kernel that takes the problem, best first."""
    regime: Regime
    """Regime of the measurements that the rule is made of."""
    doubts: tuple[str, ...]
    """As of `tuner.selection.choice.Selection`."""

    @classmethod
    def of(cls, expected: Iterable[tuple[float, Config]], doubt: str) -> RuleSelection | None:
        """A selection of kernels in any order; None without one."""
        ranked = tuple(sorted(expected, key=lambda pair: pair[0]))
        return cls(ranked, Regime(), (doubt,)) if ranked else None

    @property
    def source(self) -> str:
        """Reason for the first kernel, for people."""
        return f"expected {self.expected[0][0]:.1f} us" if self.expected else "timed here"

    def own(self) -> Iterator[tuple[float, Config]]:
        """All kernels, best first."""
        yield from self.expected


class Rule(Protocol):
    """Interface of the families' modules ``rule``."""

    def serves(self, problem: Any, gpu: Gpu) -> bool:
        """True for problems that have kernels, on a GPU that runs them."""

    def select(self, problem: Any, gpu: Gpu) -> RuleSelection | None:
        """The rule's kernels for a problem; None when none takes it."""

    def targets(self) -> tuple[Target, ...]:
        """The kernels, to be built and proven."""
