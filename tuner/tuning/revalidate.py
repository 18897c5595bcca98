"""Revalidation of stored decisions: in another environment or regime, or with other machine code.
Nothing is searched. The stored best configs, the portfolio's most promising kernels and the
vendors' kernels are timed interleaved, and a new decision is made.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.families import families, families_of
from tuner.families.base import KernelSpec, group_by_kernels
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.search import ranking
from tuner.search.study import effort
from tuner.selection import portfolio
from tuner.store import Store
from tuner.store.entry import Entry, is_vendor
from tuner.tuning.outcome import summary

PROMISING = 3
"""Number of the shipped portfolio's kernels that are timed beside an entry's own."""
MAX_OWN = 6
"""Most own configs of the final pass of a wider revalidation: the fastest of a quick pass."""


@dataclass(frozen=True)
class Revalidation:
    """Result of revalidating one entry."""

    before: Entry
    after: Entry
    failed: tuple[Measurement, ...]
    """Own configs of the entry that passed before and now fail."""

    @property
    def is_replaced(self) -> bool:
        """True if another config wins now. A pin is never replaced."""
        return self.before.ranking[0].config != self.after.ranking[0].config


def revalidate(
    entry: Entry,
    runner: Runner,
    store: Store,
    *,
    compiled_only: bool = False,
    beside: Sequence[Entry] = (),
    more: int = 0,
) -> Revalidation:
    """Time an entry's own configs, the portfolio's and every vendor's kernel, and store the new
    decision under the runner's regime.

    Args:
        entry: entry measured on the runner's GPU, under any regime.
        runner: runner that times.
        store: store for the decision. An imported or shipped entry becomes the store's own.
        compiled_only: True to leave out own configs whose kernels are not compiled.
        beside: other entries of the problem, of any GPU and regime, whose configs are timed too.
        more: number of further own kernels, the best by the families' estimates.

    Raises:
        NoValidConfigError: when no candidate passed. The entry is then unchanged.
        StoreError: when the store cannot be written.
    """
    problem = entry.problem
    own = candidates(entry, runner.gpu, beside, more)
    if compiled_only:
        own = [
            config
            for config in own
            if runner.compiled(problem, families()[config.family], [config])
        ]
    slow: list[Measurement] = []
    if (beside or more) and len(own) > MAX_OWN:
        own, slow = _fastest(problem, own, runner)
    configs = list(dict.fromkeys([*own, *_vendors(problem, runner)]))
    finals, ranked = _time(problem, configs, runner)
    finals = [*finals, *slow]
    store.add([m for m in finals if not m.ok])
    if not ranked:
        raise NoValidConfigError(
            f"nothing passed for {problem.op} {problem.label()}, its entry stays: "
            + (summary(finals) or "its configs are not legal any more, and no vendor serves it")
        )
    store.decide(problem, runner.gpu, runner.regime, ranked, finals[0].sweep)
    after = store.entries(
        problem=problem, gpu=runner.gpu, regime=runner.regime, provenance=runner.provenance
    )
    failed = tuple(m for m in finals if not m.ok and not is_vendor(m.config))
    return Revalidation(entry, after[0], failed)


def candidates(entry: Entry, gpu: Gpu, beside: Sequence[Entry] = (), more: int = 0) -> list[Config]:
    """Own configs to time again: the entry's, the portfolio's most promising ones, and those of
    other entries. Further kernels come by the families' estimates.

    Args:
        entry: entry to revalidate.
        gpu: GPU that times.
        beside: other entries of the problem.
        more: number of kernels by estimate, of the families of all these configs.
    """
    stored = [m.config for m in entry.ranked if _fits(m)]
    likely = (c for _, c in islice(portfolio.promising(entry.problem, gpu), PROMISING))
    beside_them = (m.config for e in beside for m in e.ranked if _fits(m))
    configs = list(dict.fromkeys([*stored, *likely, *beside_them]))
    return [*configs, *islice(_estimated(entry.problem, gpu, configs), more)]


def _estimated(problem: Problem, gpu: Gpu, configs: Sequence[Config]) -> Iterator[Config]:
    """The configs with the best estimates, one for each compiled kernel beside those of known
    configs.

    Args:
        problem: problem to compute.
        gpu: GPU to estimate for.
        configs: own configs; their families are searched.
    """
    estimates: list[tuple[float, str, Config]] = []
    for name in dict.fromkeys(config.family for config in configs):
        member = families()[name]
        timed = {member.compile_digest(config) for config in configs if config.family == name}
        for group in group_by_kernels(member, member.space(problem, gpu)):
            if member.compile_digest(group[0]) not in timed:
                estimates.append(
                    min((member.predict_us(problem, c, gpu), c.digest, c) for c in group)
                )
    yield from (config for _, _, config in sorted(estimates))


def _fastest(
    problem: Problem, own: Sequence[Config], runner: Runner
) -> tuple[list[Config], list[Measurement]]:
    """The fastest own configs of a quick pass, and the measurements of those that failed."""
    runner.submit(problem, own)
    timed = runner.collect()
    passed = sorted((m for m in timed if m.ok), key=ranking.by_latency)
    return [m.config for m in passed[:MAX_OWN]], [m for m in timed if not m.ok]


def recompiled(entry: Entry, cached: Callable[[KernelSpec], Artifact | None]) -> list[str]:
    """Digests of an entry's own configs whose machine code differs from the timed one.

    A measurement keeps the hash of the machine code of each kernel. An edit of a template that
    leaves the code as it was leaves the measurement valid, although the artifact has another key.
    Configs are left out whose kernels are not compiled here, or whose code was not kept.

    Args:
        entry: a decision.
        cached: the compiled kernel of a spec, None where there is none.
    """
    specs: dict[str, None] = {}
    for m in entry.ranked:
        if not _fits(m):
            continue
        for name, spec in families()[m.config.family].kernels(entry.problem, m.config).items():
            timed, built = m.resources.get(name), cached(spec)
            now = built.resources if built else None
            if timed and now and timed.code and now.code and timed.code != now.code:
                specs[m.config.digest] = None
    return list(specs)


def _vendors(problem: Problem, runner: Runner) -> list[Config]:
    """Every vendor's kernel. From a library's list, the fastest of a quick pass."""
    vendors: list[Config] = []
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
        vendors += space
    return vendors


def _time(
    problem: Problem, configs: Sequence[Config], runner: Runner
) -> tuple[list[Measurement], list[Measurement]]:
    """Run the final pass. Returns all measurements, and the ranking of those that passed."""
    if not configs:
        return [], []
    sweep = uuid.uuid4().hex[:16]
    timed = runner.retime(problem, configs, effort("quick").rounds)
    finals = [_signed(m, sweep) for m in timed]
    return finals, ranking.rank(finals)


def _fits(measurement: Measurement) -> bool:
    """True if a stored config is an own one of this version's families and legal."""
    member = families().get(measurement.config.family)
    if member is None or member.is_vendor:
        return False
    return member.accepts(measurement.problem, measurement.config, measurement.gpu)


def _signed(measurement: Measurement, sweep: str) -> Measurement:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return measurement.but(sweep=sweep, created_at=measurement.created_at or now)
