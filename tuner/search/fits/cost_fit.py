"""Fit of the families' cost models to recordings.

A family's constants are fitted to the logarithm of the recorded quick times, over all problems at
once; the order within a problem counts most. Problems are shuffled into `FOLDS` parts, and each is
judged by a fit without its part. `Family.constants` reads the fit to all, ``cache/cost/NAME.json``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from tuner.base import resources
from tuner.errors import ConfigError
from tuner.families import families, families_of
from tuner.families.base import Family
from tuner.families.fitting import Constants, FitGroup, least_squares
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem, Problem
from tuner.runners import recording_archive
from tuner.runners.recording import Recording, read
from tuner.search.fits.refit import Refit

#: Deviation, in natural logarithms, from which a time counts as an outlier; of a problem's mean;
#: and of a constant from where its fit starts.
SCATTER, BIAS, PRIOR = 0.05, 0.1, 0.3
#: Measurements of a problem that are fitted to, at most: those of the smallest digests, which is a
#: draw. More would not give it more weight.
FULL_WEIGHT = 50
#: Evaluations at most, and the share of the loss that the last one saves: a fit takes 5 to 15.
STEPS, SETTLED = 40, 1e-3
#: Parts of the problems, each left out in turn; of so many problems or fewer each one alone.
FOLDS = 16


def recordings(places: Sequence[Path]) -> list[Recording]:
    """Recordings of files and folders, the shipped ones where none is named.

    Raises:
        ConfigError: when there is none, or one is damaged.
    """
    folders = [
        recording_archive.sources(place) if place.is_dir() else [place]
        for place in places or [recording_archive.folder()]
    ]
    if not all(folders):
        named = ", ".join(map(str, places))
        raise ConfigError(f"{named}: no recording (tuner develop record makes them)")
    return [read(source) for sources in folders for source in sources]


def quick_pass(part: Recording) -> list[Measurement]:
    """The quick measurements of own candidates that are legal still."""
    own = {name: f for name, f in families().items() if not f.is_vendor}
    return [
        m
        for m in part.measurements
        if not m.is_final
        and (family := own.get(m.config.family)) is not None
        and family.accepts(part.problem, m.config, part.gpu)
    ]


def estimated(problem: Problem) -> Regime:
    """Regime that estimates of a problem stand for: chained, as the shipped recordings are.

    Inputs are the operation's usual ones, but cold caches for decoding, whose keys no other kernel
    has just written.
    """
    if isinstance(problem, AttentionProblem) and problem.is_decoding:
        return Regime("chained", "cold")
    return Regime.default(problem.op).chained


def measured(family: str, part: Recording) -> list[Measurement]:
    """Quick times of one family at a problem; only candidates that passed."""
    return [m for m in part.measurements if m.ok and m.config.family == family]


class CostFits:
    """The fits of one set of recordings, each done once.

    An estimate stands for one regime of a problem, `estimated`, and is fitted and judged in that
    alone: a GEMM whose inputs are in the L2 is another thing.

    Args:
        recordings: recordings, whose stages count too.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        widest: dict[tuple[str, str], Recording] = {}
        for part in (part for r in recordings for part in r.walk()):
            key = part.problem.key, part.gpu.identity
            if part.regime == estimated(part.problem) and (
                key not in widest or len(part.measurements) > len(widest[key].measurements)
            ):
                widest[key] = part
        quick = (replace(r, measurements=tuple(quick_pass(r))) for r in widest.values())
        self.parts = list(quick)
        """The widest recording of each problem, its quick pass only."""
        self.folds = cache(self._folds)
        self._constants = cache(self._fit)

    def constants(self, family: Family, without: Recording | None = None) -> dict[str, float]:
        """Constants of a fit to all problems, or to the folds without a problem."""
        fold = None if without is None else self.folds(family.name).get(without.problem.key)
        return self._constants(family.name, fold)

    def without(self, part: Recording) -> list[Family]:
        """The own families that were recorded of a problem, fitted without it."""
        recorded = {m.config.family for m in part.measurements}
        return [
            family.refitted(self.constants(family, part)) if family.cost_constants else family
            for name, family in families_of(part.problem.op).items()
            if name in recorded
        ]

    def of(self, family: str) -> list[Recording]:
        """The parts that a family was measured at."""
        return [part for part in self.parts if measured(family, part)]

    def _folds(self, family: str) -> dict[str, int]:
        """The fold of each problem that a family was measured at, by the problem's key."""
        keys = {part.problem.key for part in self.of(family)}
        shuffled = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
        return {key: i % FOLDS for i, key in enumerate(shuffled)}

    def _fit(self, name: str, left_out: int | None) -> dict[str, float]:
        folds = self.folds(name)
        parts = [r for r in self.of(name) if folds[r.problem.key] != left_out]
        return fitted(families()[name], parts)


def fitted(family: Family, parts: Sequence[Recording]) -> dict[str, float]:
    """Constants of a family by its measurements at some problems."""
    start, name = family.cost_constants, family.name
    used = [
        (part, sorted(measured(name, part), key=lambda m: m.config.digest)[:FULL_WEIGHT])
        for part in parts
    ]

    def residuals(constants: Constants) -> list[float]:
        refitted = family.refitted(constants)
        away = [math.log(value / start[key]) / PRIOR for key, value in constants.items()]
        for part, times in used:
            errors = _errors(refitted, part, times)
            mean = fmean(errors)
            away += [*((error - mean) / SCATTER for error in errors), mean / BIAS]
        return away

    options: dict[str, Any] = {"diff_step": 1e-2, "ftol": SETTLED, "max_nfev": STEPS}
    return least_squares(residuals, start, 4, **options) if used else dict(start)


def _errors(family: Family, part: Recording, times: Sequence[Measurement]) -> list[float]:
    """Estimates over measured times, as logarithms."""
    return [
        math.log(family.predict_us(part.problem, m.config, part.gpu) / m.latency_us)
        for m in times
        if m.latency_us
    ]


def deviation(family: Family, part: Recording, constants: Constants) -> float:
    """Deviation of the estimate's error at a problem around its mean there."""
    return pstdev(_errors(family.refitted(constants), part, measured(family.name, part)))


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Fit the constants of families: those in `only`, by default all that were measured.

    Raises:
        ConfigError: when a family has no constants, or a recording is wrong.
    """
    members = {name: f for name, f in families().items() if f.cost_constants}
    if unknown := set(only) - set(members):
        allowed = ", ".join(members)
        raise ConfigError(f"family '{min(unknown)}' has no fit (allowed: {allowed})")
    fits, folder = CostFits(recordings(files)), resources.cache() / "cost"
    result = Refit(str(folder))
    for name in only or members:
        family, folds = members[name], fits.folds(name)
        if folds:
            best = result.fit(
                FitGroup(
                    name,
                    fits.of(name),
                    family.constants,
                    partial(fitted, family),
                    partial(deviation, family),
                    lambda part, folds=folds: folds[part.problem.key],  # type: ignore[misc]
                )
            )
            content = {"fit": "tuner fit cost", "constants": best, "errors": result.errors[-1]}
            result.documents[folder / f"{name}.json"] = content
    return result
