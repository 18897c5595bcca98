"""Analysis of a sweep's measurements. Every number comes from a measured one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.config import Config, Value
from tuner.families import families
from tuner.measurement import Measurement, latency
from tuner.problem import Problem
from tuner.report.subject import ReportSubject
from tuner.selection.describe import microseconds, short_name
from tuner.selection.served import served_text
from tuner.store.entry import Standing, is_vendor

MIN_CANDIDATES = 20
"""Minimum passed candidates of a family for the importance of its parameters."""
TREES, DEPTH = 16, 6
"""Size of the forest that shares are read from: a tenth of the time of Optuna's 64 and 64. Shares
of the shipped recordings change by less than 0.05."""
#: Axes of a heat map: the first of these that a family has; a family with none is drawn over the
#: two parameters with the most values.
ROWS = ("tile_m", "warp_groups", "rows_per_block", "heads_per_launch")
COLUMNS = ("tile_n", "threads_per_row", "in_place")
PANELS = ("kernel_schedule", "blocks_per_sm", "passes", "pdl")


def verdict(subject: ReportSubject) -> str:
    """The winner and its ratio, in one sentence; before it the decision in a stream, if the sweep
    was timed in another way.
    """
    served = served_text(subject.problem, subject.gpu, subject.regime, subject.known)
    if not served:
        return _own_verdict(subject, f"{subject.problem.op} {subject.problem.label()}")
    own = _own_verdict(subject, "this problem")
    return f"{served} This sweep, timed {subject.regime.launch}: {own}"


def _own_verdict(subject: ReportSubject, name: str) -> str:
    entry = subject.entry
    own, first = entry.best_own, entry.ranking[0]
    if not subject.has_finals:
        return (
            f"Not decided: the sweep of {name} ended before its final pass; the fastest so far is "
            f"{short_name(first)} with {microseconds(first.latency_us)} us."
        )
    if own is None:
        return f"No own kernel passed for {name}; {short_name(first)} takes {_us(first)}."
    if entry.fastest_vendor is None or entry.standing is None:
        return f"{short_name(own)} computes {name} in {_us(own)}; no vendor's kernel was measured."
    (vendor, fastest), stands = entry.fastest_vendor, entry.standing
    count = len(entry.vendors)
    beside = f"{_us(fastest)}, the {f'fastest of {count} vendors' if count > 1 else 'one vendor'}'"
    beside += " kernels" if count > 1 else "s kernel measured"
    if stands.outcome != "behind":
        return f"{short_name(own)} computes {name} in {_us(own)}: {stands.text} ({beside})."
    return (
        f"{vendor} stays the fastest for {name} with {_us(fastest)}; the best own kernel, "
        f"{short_name(own)}, takes {_us(own)}: {stands.text}."
    )


def _us(measurement: Measurement) -> str:
    return f"{microseconds(measurement.latency_us)} us"


def differences(one: Config, other: Config) -> dict[str, tuple[Value | None, Value | None]]:
    """Parameters that differ between two configs of one family; those of a stage are
    ``stage.name``.
    """
    pairs = {
        name: (one.get(name), other.get(name))
        for name in sorted({*one.params, *other.params})
        if one.get(name) != other.get(name)
    }
    for stage in sorted({*one.stages, *other.stages}):
        mine, theirs = (c.stages.get(stage) or Config("") for c in (one, other))
        inner = differences(mine, theirs)
        pairs |= {f"{stage}.{name}": values for name, values in inner.items()}
    return pairs


@dataclass(frozen=True)
class ParameterEffect:
    """Effect of changing only one parameter, by quick times."""

    name: str
    winner: Value | None
    other: Value | None
    ratio: float
    """Time of the changed config over the winner's."""
    measurement: Measurement


def one_change(subject: ReportSubject, winner: Measurement) -> list[ParameterEffect]:
    """Measured candidates that differ from the winner in one parameter, least loss first."""
    quick = {m.config: m for m in subject.quick if m.ok}
    base = quick.get(winner.config)
    if base is None:
        return []
    changes = []
    for config, measurement in quick.items():
        if config.family == winner.config.family:
            changed = differences(winner.config, config)
            if len(changed) == 1:
                ((name, (mine, theirs)),) = changed.items()
                ratio = latency(measurement) / latency(base)
                changes.append(ParameterEffect(name, mine, theirs, ratio, measurement))
    return sorted(changes, key=lambda change: (change.ratio, change.name))


def default_of(subject: ReportSubject, winner: Measurement) -> Measurement | None:
    """Measured candidate of the winner's family with the best cost estimate, which one would use
    without tuning, and its quick time.
    """
    quick: dict[str, tuple[float, Measurement]] = {}
    for m in subject.quick:
        if m.ok and m.config.family == winner.config.family:
            predicted = predicted_us(m)
            if predicted is not None:
                quick[m.config.digest] = predicted, m
    return quick[min(quick, key=lambda digest: (quick[digest][0], digest))][1] if quick else None


def predicted_us(measurement: Measurement) -> float | None:
    """Cost estimate of a config; None if this version's families do not know it."""
    m, member = measurement, families().get(measurement.config.family)
    if member is None:
        return None
    try:
        return member.predict_us(m.problem, m.config, m.gpu)
    except KeyError:  # a parameter of a later version
        return None


def quick_of(subject: ReportSubject, config: Config) -> Measurement | None:
    """A config's quick time: comparable with other candidates' quick times."""
    return next((m for m in subject.quick if m.ok and m.config == config), None)


@dataclass(frozen=True)
class Importance:
    """Share of the spread of a family's times that each parameter explains by itself."""

    family: str
    candidates: int
    shares: dict[str, float]
    """Shares of the variance of the times' logarithm that single parameters explain, largest first.
    They add up to 1.
    """


def importances(subject: ReportSubject) -> list[Importance]:
    """Functional analysis of variance (Optuna's fANOVA) of each family with enough candidates."""
    by_family: dict[str, list[Measurement]] = {}
    for measurement in subject.quick:
        if measurement.ok:
            by_family.setdefault(measurement.config.family, []).append(measurement)
    return [
        Importance(name, len(measured), shares)
        for name, measured in sorted(by_family.items())
        if len(measured) >= MIN_CANDIDATES and (shares := _importance(measured))
    ]


def _importance(measured: Sequence[Measurement]) -> dict[str, float]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    values = {
        name: sorted({_choice(m.config, name) for m in measured}) for name in parameters(measured)
    }
    varied = {name: choices for name, choices in values.items() if len(choices) > 1}
    if not varied:
        return {}
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    distributions: dict[str, Any] = {
        name: optuna.distributions.CategoricalDistribution(choices)
        for name, choices in varied.items()
    }
    trials = [
        optuna.trial.create_trial(
            params={name: _choice(m.config, name) for name in varied},
            distributions=distributions,
            value=math.log(latency(m)),
        )
        for m in measured
    ]
    study.add_trials(trials)
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, max_depth=DEPTH, seed=0)
    shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: float(share) for name, share in shares.items()}


def _choice(config: Config, name: str) -> str:
    """Category of a value. A parameter that does not apply is a category of its own."""
    return str(config.get(name, "-"))


def parameters(measured: Iterable[Measurement]) -> list[str]:
    """Names of all parameters, sorted."""
    return sorted({name for m in measured for name in m.config.params})


@dataclass(frozen=True)
class Cell:
    """Candidates of one place of a heat map."""

    row: Value
    column: Value
    panel: Value | None
    passed: tuple[Measurement, ...]
    """Fastest first."""
    failed: tuple[Measurement, ...]


@dataclass(frozen=True)
class HeatMap:
    """The space of one family over two parameters, a panel for each value of a third."""

    problem: Problem
    family: str
    row: str
    column: str
    panel: str | None
    cells: tuple[Cell, ...]
    best_us: float

    @property
    def panels(self) -> list[Value | None]:
        return sorted({cell.panel for cell in self.cells}, key=str)


def heat_maps(subject: ReportSubject) -> Iterator[HeatMap]:
    """The space of every family of the problem, then of its stages'."""
    for part in subject.recording.walk():
        by_family: dict[str, list[Measurement]] = {}
        for m in part.measurements:
            if not m.is_final and not is_vendor(m.config):
                by_family.setdefault(m.config.family, []).append(m)
        for name, measured in sorted(by_family.items()):
            if grid := _heat_map(part.problem, name, measured):
                yield grid


def _heat_map(problem: Problem, name: str, measured: Sequence[Measurement]) -> HeatMap | None:
    counts = {p: len({_choice(m.config, p) for m in measured}) for p in parameters(measured)}
    varied = sorted((p for p in counts if counts[p] > 1), key=lambda p: (-counts[p], p))
    row = _first(ROWS, varied)
    column = _first(COLUMNS, [p for p in varied if p != row])
    if row is None or column is None:
        return None
    panel = next((p for p in PANELS if p in varied and p not in (row, column)), None)
    places: dict[tuple[Value, Value, Value | None], list[Measurement]] = {}
    for m in measured:
        place = (
            m.config.get(row, "-"),
            m.config.get(column, "-"),
            m.config.get(panel, "-") if panel else None,
        )
        places.setdefault(place, []).append(m)
    cells = tuple(
        Cell(
            *place,
            passed=tuple(sorted((m for m in ms if m.ok), key=latency)),
            failed=tuple(m for m in ms if not m.ok),
        )
        for place, ms in places.items()
    )
    best = min(map(latency, measured))
    return HeatMap(problem, name, row, column, panel, cells, best)


def _first(preferred: Sequence[str], varied: Sequence[str]) -> str | None:
    return next((name for name in preferred if name in varied), next(iter(varied), None))


def standing(subject: ReportSubject) -> list[Standing]:
    """Every measured problem of the operation with both, the least own speed first; under the
    subject's regime, on its GPU. This one's numbers are the subject's own.
    """
    here = (subject.problem.op, subject.gpu.identity, subject.regime)
    entries = {
        e.problem: e for e in subject.known if (e.problem.op, e.gpu.identity, e.regime) == here
    }
    if subject.has_finals:
        entries[subject.problem] = subject.entry
    standings = [
        standings for entry in entries.values() if (standings := entry.standing) is not None
    ]
    return sorted(standings, key=lambda s: (s.ratio, s.own.problem.flops, s.own.problem.key))
