"""Fit of the families' cost models to recordings.

A family's constants are fitted to the logarithm of the recorded quick times, over all problems at
once; the order within a problem counts most. A cross-validation judges the fit: problems are
shuffled into `FOLDS` parts, and each is judged by a fit without its part. `Family.constants` reads
the fit to all problems, ``cache/cost/FAMILY.json``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from tuner.base import resources
from tuner.errors import ConfigError
from tuner.families import families, families_of
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem, Problem
from tuner.runners import recording_archive
from tuner.runners.recording import Recording, read
from tuner.search.fits.refit import Constants, Refit, least_squares

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
#: Measurements from which on a problem's rank correlation says something, and the one aimed at.
RANKED, AIM = 10, 0.8


def recordings(places: Sequence[Path]) -> list[Recording]:
    """Every recording of files and folders, in the order of their names; the shipped ones where
    none is named.

    Raises:
        ConfigError: when there is none, or one is damaged.
    """
    found: list[Recording] = []
    for place in places or [recording_archive.folder()]:
        sources = recording_archive.sources(place) if place.is_dir() else [place]
        found += map(read, sources)
        if not sources:
            raise ConfigError(f"{place} holds no recording (wanted: some of tuner record)")
    return found


def quick_pass(part: Recording) -> list[Measurement]:
    """The quick measurements of own candidates that are legal still."""
    own = {name: one for name, one in families().items() if not one.is_vendor}
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
        for part in (part for one in recordings for part in one.walk()):
            key = part.problem.key, part.gpu.identity
            if part.regime == estimated(part.problem) and (
                key not in widest or len(part.measurements) > len(widest[key].measurements)
            ):
                widest[key] = part
        self.parts = [
            replace(part, measurements=tuple(quick_pass(part))) for part in widest.values()
        ]
        """The widest recording of each problem, its quick pass only."""
        self._folds = cache(self._assigned)
        self._constants = cache(self._fit)

    def constants(self, family: Family, without: Recording | None = None) -> dict[str, float]:
        """Constants of a fit to all problems, or to the folds without a problem."""
        fold = None if without is None else self._folds(family.name).get(without.problem.key)
        return self._constants(family.name, fold)

    def without(self, part: Recording) -> list[Family]:
        """The own families that were recorded of a problem, fitted without it."""
        recorded = {m.config.family for m in part.measurements}
        return [
            family.refitted(self.constants(family, part)) if family.cost_constants else family
            for name, family in families_of(part.problem.op).items()
            if name in recorded
        ]

    def _assigned(self, name: str) -> dict[str, int]:
        """The part of each problem that a family was measured at, by the problem's key."""
        keys = {part.problem.key for part in self.parts if measured(name, part)}
        shuffled = sorted(keys, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
        return {key: i % FOLDS for i, key in enumerate(shuffled)}

    def _fit(self, name: str, left_out: int | None) -> dict[str, float]:
        family, folds = families()[name], self._folds(name)
        start = family.cost_constants
        used = [
            (part, sorted(times, key=lambda m: m.config.digest)[:FULL_WEIGHT])
            for part in self.parts
            if (times := measured(name, part))
            and (left_out is None or folds[part.problem.key] != left_out)
        ]

        def residuals(constants: Constants) -> list[float]:
            fitted = family.refitted(constants)
            away = [math.log(value / start[key]) / PRIOR for key, value in constants.items()]
            for part, times in used:
                errors = _errors(fitted, part, times)
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


def rank_correlation(family: Family, part: Recording, times: Sequence[Measurement]) -> float | None:
    """Spearman's, of predicted and measured times; None where too few were measured."""
    if len(times) < RANKED:
        return None
    from scipy.stats import spearmanr

    predicted = [family.predict_us(part.problem, m.config, part.gpu) for m in times]
    return float(spearmanr(predicted, [m.latency_us for m in times]).statistic)


def judged(fits: CostFits, family: Family) -> list[dict[str, Any]]:
    """Errors of a family's estimate at each problem, by a fit without it: the rank correlation,
    the mean, and the deviation around it.
    """
    rows = []
    for part in fits.parts:
        if times := measured(family.name, part):
            fitted = family.refitted(fits.constants(family, part))
            errors = _errors(fitted, part, times)
            values = {
                "spearman": rank_correlation(fitted, part, times),
                "bias": math.exp(fmean(errors)) - 1,
                "error": pstdev(errors),
            }
            rounded = {key: None if v is None else round(v, 4) for key, v in values.items()}
            name = f"{part.problem.op} {part.problem.label()}"
            rows.append({"problem": name, "measurements": len(times), **rounded})
    return rows


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Fit the constants of families: those in `only`, by default all that have some.

    Raises:
        ConfigError: when a family has no constants, or a recording is wrong.
    """
    members = {name: one for name, one in families().items() if one.cost_constants}
    for name in only:
        if name not in members:
            raise ConfigError(f"family '{name}' has no fit (allowed: {', '.join(members)})")
    fits, folder = CostFits(recordings(files)), resources.cache() / "cost"
    result = Refit(str(folder))
    for name in only or members:
        rows, family = judged(fits, members[name]), members[name]
        ranks = [row["spearman"] for row in rows if row["spearman"] is not None]
        if not ranks:
            continue
        constants = fits.constants(family)
        result.note(name, family.constants, constants)
        result.errors.append(
            f"{name}: {len(rows)} problems left out, deviation of the error "
            f"{median(row['error'] for row in rows):.1%} in the median; rank correlation "
            f"{median(ranks):.2f}, {sum(one >= AIM for one in ranks)} of {len(ranks)} at {AIM} "
            "or more"
        )
        document = {"fit": "tuner fit cost", "constants": constants, "judged_left_out": rows}
        result.documents[folder / f"{name}.json"] = document
    return result
