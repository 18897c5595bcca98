"""Ranks by the families' own estimates where no GPU is. Everything it answers is *predicted*."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tuner.config import Config
from tuner.families import family as family_by_name
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.runners.base import OfflineRunner


class PredictRunner(OfflineRunner):
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
        super().__init__()
        self.gpu, self.regime, self._catalogue = gpu, regime, catalogue
        self.provenance, self.environment = Provenance.PREDICTED, Environment()

    def candidates(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """Vendors' kernels cannot be estimated, only measured."""
        return [] if family.is_vendor else space

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        """The estimates again; there is nothing to time."""
        return [self._answer(problem, config).but(is_final=True) for config in finalists]

    def _answer(self, problem: Problem, config: Config) -> Measurement:
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
