"""The result of a rule (`tuner.selection.rules`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tuner.config import Config
from tuner.measurement import Regime


class RuleSelection(NamedTuple):
    """The kernels for a problem by a rule."""

    expected: tuple[tuple[float, Config], ...]
    """Expected microseconds and config of each kernel that takes the problem, best first."""
    regime: Regime
    """Regime of the measurements that the rule is made of."""
    doubts: tuple[str, ...]
    """As of `tuner.selection.choice.Selection`."""

    @property
    def source(self) -> str:
        """Reason for the first kernel, for people."""
        return f"expected {self.expected[0][0]:.1f} us"

    def own(self) -> Iterator[tuple[float, Config]]:
        """All kernels, best first."""
        yield from self.expected
