"""Measure again what is stored: in another environment, and around the shape that was tuned.

Neither searches. `revalidate` times the stored best configs and the vendors' kernels side by side
and decides anew. `widen` checks the stored best at the shapes that `nearest.drawn` names, so that
they may serve what nobody tuned. Each entry, and each shape, is stored before the next begins.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.families import families_of
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.search import ranking
from tuner.search.study import effort
from tuner.selection import nearest
from tuner.store import Store
from tuner.store.entry import Entry, is_vendor
from tuner.tuning.outcome import summary

LENDERS = 3
"""Own configs of an entry that `widen` checks."""
RIVALS = 2
"""PyTorch's own kernels that it times beside them."""


@dataclass(frozen=True)
class Revalidation:
    """Result for one entry."""

    before: Entry
    after: Entry
    failed: tuple[Measurement, ...]
    """Own configs of the entry that passed once and do not any more."""

    @property
    def is_replaced(self) -> bool:
        """True when another config wins now; a pin is not the tuner's to replace."""
        return self.before.ranking[0].config != self.after.ranking[0].config


def revalidate(entry: Entry, runner: Runner, store: Store) -> Revalidation:
    """Time an entry's own configs and every vendor's kernel again, and store the new decision.

    Args:
        entry: measured on the runner's GPU.
        runner: of the entry's regime.
        store: where the decision goes; an imported or shipped entry becomes the store's own.

    Raises:
        NoValidConfigError: when nothing passed; the entry stays as it was.
        StoreError: when the store cannot be written.
    """
    problem = entry.problem
    stored = [m for m in entry.ranked if nearest.fits(problem, m)]
    vendors = _vendors(problem, runner)
    configs = list(dict.fromkeys([*(m.config for m in stored), *vendors]))
    finals, ranked = _time(problem, configs, runner)
    store.add([m for m in finals if not m.ok])
    if not ranked:
        raise NoValidConfigError(
            f"nothing passed for {problem.op} {problem.label()}, its entry stays: "
            + (summary(finals) or "its configs are not legal any more, and no vendor serves it")
        )
    store.decide(problem, runner.gpu, entry.regime, ranked, finals[0].sweep)
    after = store.entries(
        problem=problem, gpu=runner.gpu, regime=entry.regime, provenance=runner.provenance
    )
    failed = tuple(m for m in finals if not m.ok and not is_vendor(m.config))
    return Revalidation(entry, after[0], failed)


def _vendors(problem: Problem, runner: Runner) -> list[Config]:
    """Every vendor's kernel; of a library's list the fastest of a quick pass."""
    found: list[Config] = []
    for member in families_of(problem.op).values():
        if not member.is_vendor or member.supports(problem, runner.gpu) or member.lacks():
            continue
        space = member.space(problem, runner.gpu)
        if member.is_listed:
            space = runner.candidates(problem, member, space)
        if len(space) > ranking.MAX_LISTED and member.is_listed:
            runner.submit(problem, space)
            passed = ranking.finalists(runner.collect(), 0, lambda config: config.digest)
            space = [m.config for m in passed]
        found += space
    return found


def _time(
    problem: Problem, configs: Sequence[Config], runner: Runner
) -> tuple[list[Measurement], list[Measurement]]:
    """All final measurements and the ranking of those that passed."""
    if not configs:
        return [], []
    sweep = uuid.uuid4().hex[:16]
    timed = runner.retime(problem, configs, effort("quick").rounds)
    finals = [_signed(m, sweep) for m in timed]
    return finals, ranking.rank(finals)


@dataclass(frozen=True)
class Lender:
    """How one own config of an entry did at the shapes drawn around it."""

    measurement: Measurement
    """At the tuned problem."""
    passed: int
    failed: tuple[Measurement, ...]
    over_pytorch: float | None
    """Geometric mean of its time over the fastest of PyTorch's; None where none was timed."""

    @property
    def lends(self) -> bool:
        """True when it may serve shapes that nobody tuned (`tuner.selection.nearest`)."""
        return nearest.may_serve(self.passed, len(self.failed))


def widen(
    entry: Entry,
    runner: Runner,
    store: Store,
    progress: Callable[[int, int], None] = lambda done, goal: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Lender]:
    """Check an entry's best own configs, and time them beside PyTorch's, at drawn shapes.

    Measurements in the store from this environment are not repeated.

    Args:
        entry: measured on the runner's GPU.
        runner: of the entry's regime.
        store: where the measurements go; `tuner.selection.nearest` reads them there.
        progress: told how many of the shapes are done.
        stopped: asked before each shape whether to leave it at what is known.

    Raises:
        NoValidConfigError: when the entry's kernels are others than those that are built here.
        StoreError: when the store cannot be written.
    """
    lenders = [m for m in nearest.lenders(entry) if nearest.fits(entry.problem, m)][:LENDERS]
    rivals = [m for m in entry.ranking if nearest.is_pytorchs(m.config)][:RIVALS]
    shapes = nearest.drawn(entry.problem) if lenders else ()
    sweep = uuid.uuid4().hex[:16]
    seen: list[Measurement] = []
    for done, problem in enumerate(shapes):
        progress(done, len(shapes))
        if stopped():
            return [_lender(m, seen) for m in lenders]
        fitting = [m for m in lenders if nearest.fits(problem, m)]
        wanted = {m.config.digest: m for m in (*fitting, *(rivals if fitting else ()))}
        known = _known(store, runner, entry, problem, list(wanted.values()))
        missing = [m.config for digest, m in wanted.items() if digest not in known]
        if missing:
            measured = _measure(problem, missing, runner, store, sweep)
            _check_kernels(measured, wanted)
            known |= {m.config.digest: m for m in measured}
        seen += known.values()
    progress(len(shapes), len(shapes))
    return [_lender(m, seen) for m in lenders]


def _measure(
    problem: Problem, configs: Sequence[Config], runner: Runner, store: Store, sweep: str
) -> list[Measurement]:
    """One measurement a config, stored. What is left over of other requests comes before it: of a
    sweep whose time was over, or that was given up. That is kept, nothing more.
    """
    runner.submit(problem, configs)
    while True:
        measured = [_signed(m, sweep) for m in runner.collect()]
        store.add(measured)
        if not measured or [(m.problem, m.config) for m in measured] == [
            (problem, config) for config in configs
        ]:
            return measured


def _known(
    store: Store,
    runner: Runner,
    entry: Entry,
    problem: Problem,
    wanted: Sequence[Measurement],
) -> dict[str, Measurement]:
    """Measurements in the store of these kernels at a drawn shape, from this environment."""
    artifacts = {m.config.digest: dict(m.artifacts) for m in wanted}
    found = store.measurements(
        problem=problem,
        gpu=runner.gpu,
        regime=entry.regime,
        environment=runner.environment.digest,
        provenance=runner.provenance,
        final=False,
    )
    return {
        m.config.digest: m
        for m in found
        if m.config.digest in artifacts and dict(m.artifacts) == artifacts[m.config.digest]
    }


def _check_kernels(measured: Sequence[Measurement], wanted: dict[str, Measurement]) -> None:
    for m in measured:
        if m.ok and dict(m.artifacts) != dict(wanted[m.config.digest].artifacts):
            stored = wanted[m.config.digest].problem
            raise NoValidConfigError(
                f"the stored kernels of {stored.op} {stored.label()} were built by another "
                f"compiler: `tuner revalidate --op {stored.op} --shape {stored.label()}` first"
            )


def _lender(measurement: Measurement, seen: Sequence[Measurement]) -> Lender:
    mine = [m for m in seen if m.config == measurement.config]
    logs = []
    for m in mine:
        theirs = [r.latency_us for r in seen if r.problem == m.problem and is_vendor(r.config)]
        fastest = min((us for us in theirs if us is not None), default=None)
        if m.latency_us is not None and fastest is not None:
            logs.append(math.log(m.latency_us / fastest))
    return Lender(
        measurement,
        passed=sum(m.ok for m in mine),
        failed=tuple(m for m in mine if m.is_fault),
        over_pytorch=math.exp(sum(logs) / len(logs)) if logs else None,
    )


def _signed(measurement: Measurement, sweep: str) -> Measurement:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return measurement.but(sweep=sweep, created_at=measurement.created_at or now)
