"""Replays a recorded sweep: real measurements, no GPU. Everything it answers is *replayed*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.config import Config
from tuner.families.base import Family
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem
from tuner.runners.base import OfflineRunner
from tuner.runners.recording import Recording
from tuner.store.entry import is_vendor


class ReplayRunner(OfflineRunner):
    """A runner over one recording and the recordings of its stages."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.gpu, self.regime = recording.gpu, recording.regime
        self.environment, self.provenance = recording.environment, Provenance.REPLAYED
        self._quick: dict[tuple[str, str], Measurement] = {}
        self._final: dict[tuple[str, str], Measurement] = {}
        self._configs: dict[tuple[str, str], list[Config]] = {}
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
        legal = [] if family.is_listed else [config for config in space if config in members]
        return legal or [c for c in recorded if family.accepts(problem, c, self.gpu)]

    def _answer(self, problem: Problem, config: Config) -> Measurement:
        """The recorded measurement of one of the recorded candidates."""
        return self._quick[problem.key, config.digest]

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

    @staticmethod
    def _of(
        recorded: Mapping[tuple[str, str], Measurement], problem: Problem, configs: Sequence[Config]
    ) -> list[Measurement]:
        keys = [(problem.key, config.digest) for config in configs]
        return [recorded[key] for key in keys if key in recorded]
