"""Ranks by the families' own estimates where no GPU is. Everything it answers is *predicted*."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import family as family_by_name
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.runners.base import Building


class PredictRunner:
    """Estimates the times of candidates; compiles and measures nothing.

    Args:
        gpu: GPU to estimate for.
        regime: regime that the estimates are stored under; their values do not depend on it.
        catalogue: finds a family by name.
    """

    def __init__(
        self,
        gpu: Gpu,
        regime: Regime,
        catalogue: Callable[[str], Family] = family_by_name,
    ) -> None:
        self.gpu = gpu
        self.provenance = Provenance.PREDICTED
        self.capacity = self.compiles = 1
        self.building = 0
        self.environment = Environment()
        self.regime = regime
        self._catalogue = catalogue
        self._queue: deque[tuple[Problem, list[Config]]] = deque()
        self._is_cancelled = False

    def candidates(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """Vendors' kernels cannot be estimated, only measured."""
        return [] if family.is_vendor else space

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """All: an estimate needs no kernel."""
        return space

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        """Nothing to compile."""

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self._is_cancelled = False
        self._queue.append((problem, list(group)))

    def under_way(self, problem: Problem) -> list[Building]:
        """None: nothing compiles."""
        return []

    def abandon(self, problem: Problem) -> None:
        """Drop what was submitted."""
        self._queue.clear()

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        """The oldest group.

        Raises:
            BenchmarkError: when nothing was submitted.
        """
        try:
            problem, group = self._queue.popleft()
        except IndexError:
            if self._is_cancelled:
                return []
            raise BenchmarkError("nothing was submitted to collect") from None
        return [self._estimate(problem, config) for config in group]

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        """The estimates again; there is nothing to time."""
        return [self._estimate(problem, config).but(is_final=True) for config in finalists]

    def kernel_times(self, problem: Problem, configs: Sequence[Config]) -> list[Measurement]:
        """None: no kernel runs."""
        return []

    def cancel(self) -> None:
        self._is_cancelled = True
        self._queue.clear()

    def close(self) -> None:
        self.cancel()

    def _estimate(self, problem: Problem, config: Config) -> Measurement:
        family = self._catalogue(config.family)
        return Measurement(
            problem,
            config,
            self.gpu,
            self.regime,
            Status.OK,
            self.provenance,
            self.environment,
            latency_us=family.predict_us(problem, config, self.gpu),
            workspace_bytes=family.scratch_bytes(problem, config),
        )
