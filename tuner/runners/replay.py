"""Replays a recorded sweep: real measurements, no GPU. Everything it answers is *replayed*."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tuner.config import Config
from tuner.families.base import Family
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem
from tuner.recording import Recording


class ReplayRunner:
    """A runner over one recording and the recordings of its stages."""

    def __init__(self, recording: Recording) -> None:
        self.gpu = recording.gpu
        self.environment = recording.environment
        self.provenance = Provenance.REPLAYED
        self.capacity = 1
        self.building = 0
        self._quick: dict[tuple[str, str], Measurement] = {}
        self._final: dict[tuple[str, str], Measurement] = {}
        self._configs: dict[tuple[str, str], list[Config]] = {}
        self._queue: deque[list[Measurement]] = deque()
        for part in recording.walk():
            for measurement in part.measurements:
                self._add(measurement.but(provenance=self.provenance))

    def _add(self, measurement: Measurement) -> None:
        problem, config = measurement.problem.key, measurement.config
        known = self._final if measurement.is_final else self._quick
        known[problem, config.digest] = measurement
        listed = self._configs.setdefault((problem, config.family), [])
        if config not in listed:
            listed.append(config)

    def restrict(self, problem: Problem, family: Family, space: Sequence[Config]) -> list[Config]:
        """The members of `space` that were recorded; when there is none (a composite family
        whose best stages were others), every recorded candidate that is still legal.
        """
        recorded = self._configs.get((problem.key, family.name), [])
        members = set(recorded)
        kept = [config for config in space if config in members]
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
        self._queue.append([self._quick_of(problem, config) for config in group])

    def collect(self) -> list[Measurement]:
        return self._queue.popleft()

    def retime(
        self, problem: Problem, finalists: Sequence[Config], rounds: int
    ) -> list[Measurement]:
        """The recorded final pass. A finalist that was none in the recording keeps its quick
        time and is flagged ``quick``: it was not timed beside the others.
        """
        measured = []
        for config in finalists:
            final = self._final.get((problem.key, config.digest))
            if final is None:
                quick = self._quick_of(problem, config)
                final = quick.but(is_final=True, flags=(*quick.flags, "quick"))
            measured.append(final)
        return measured

    def cancel(self) -> None:
        """Nothing here ever waits."""

    def close(self) -> None:
        self._queue.clear()

    def _quick_of(self, problem: Problem, config: Config) -> Measurement:
        key = (problem.key, config.digest)
        quick = self._quick.get(key)
        return quick if quick is not None else self._final[key].but(is_final=False)
