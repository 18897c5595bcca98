"""Replays a recorded sweep: real measurements, no GPU. Everything it answers is *replayed*."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from tuner.config import Config
from tuner.families.base import Family
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem
from tuner.runners.base import Building
from tuner.runners.recording import Recording
from tuner.store.entry import is_vendor


class ReplayRunner:
    """A runner over one recording and the recordings of its stages."""

    def __init__(self, recording: Recording) -> None:
        self.gpu = recording.gpu
        self.regime = recording.regime
        self.environment = recording.environment
        self.provenance = Provenance.REPLAYED
        self.capacity = self.compiles = 1
        self.building = 0
        self._quick: dict[tuple[str, str], Measurement] = {}
        self._final: dict[tuple[str, str], Measurement] = {}
        self._configs: dict[tuple[str, str], list[Config]] = {}
        self._queue: deque[list[Measurement]] = deque()
        for part in recording.walk():
            self._add(part)

    def _add(self, part: Recording) -> None:
        measured = [m.but(provenance=self.provenance) for m in part.measurements]
        problem = part.problem.key
        # A recording of a final pass only answers the quick one with it.
        quick = [m for m in measured if not m.is_final] or [m.but(is_final=False) for m in measured]
        self._final |= {(problem, m.config.digest): m for m in measured if m.is_final}
        self._quick |= {(problem, m.config.digest): m for m in quick}
        for config in dict.fromkeys(m.config for m in quick):
            self._configs.setdefault((problem, config.family), []).append(config)

    def candidates(self, problem: Problem, family: Family, space: Sequence[Config]) -> list[Config]:
        """The members of `space` that were recorded. If there are none (a composite family whose
        best stages were others), or a library listed them: every recorded candidate that is
        still legal.
        """
        recorded = self._configs.get((problem.key, family.name), [])
        members = set(recorded)
        kept = [] if family.is_listed else [config for config in space if config in members]
        return kept or [c for c in recorded if family.accepts(problem, c, self.gpu)]

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """All: a recorded one is not compiled."""
        return space

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        """Nothing to compile."""

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        """Queue a group; a candidate that was not recorded does not exist."""
        self._queue.append([self._quick[problem.key, config.digest] for config in group])

    def under_way(self, problem: Problem) -> list[Building]:
        """None: nothing compiles."""
        return []

    def abandon(self, problem: Problem) -> None:
        """Drop what was submitted."""
        self._queue.clear()

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        return self._queue.popleft()

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        """Times of one pass: of the finalists in the recorded final pass. When no own one passed
        there, of all in the quick pass (`is_final` is then false).

        Quick and final times never come together: a final pass runs longer, beside the vendors'
        kernels, and at lower clocks.
        """
        own = [config for config in finalists if not is_vendor(config)]
        final = self._of(self._final, problem, finalists)
        if any(m.ok for m in self._of(self._final, problem, own or finalists)):
            return final
        return self._of(self._quick, problem, finalists)

    def kernel_times(self, problem: Problem, configs: Sequence[Config]) -> list[Measurement]:
        """None: no kernel runs."""
        return []

    def cancel(self) -> None:
        """Nothing here ever waits."""

    def close(self) -> None:
        self._queue.clear()

    @staticmethod
    def _of(
        known: Mapping[tuple[str, str], Measurement], problem: Problem, configs: Sequence[Config]
    ) -> list[Measurement]:
        keys = [(problem.key, config.digest) for config in configs]
        return [known[key] for key in keys if key in known]
