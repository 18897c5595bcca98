"""Two environments against each other: the same problems before and after an update."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tuner.measurement import Environment, Measurement, Provenance
from tuner.report.changes import (
    Change,
    DecisionComparison,
    Pair,
    compare,
)
from tuner.search.ranking import rank
from tuner.selection.reader import Entry, shipped
from tuner.service.pages.trials import Run
from tuner.store import Store
from tuner.store.entry import sort_key


@dataclass(frozen=True)
class Known:
    """An environment that something was decided in."""

    environment: Environment
    newest: str
    """Time of its newest final measurement, UTC."""
    is_shipped: bool
    """True for shipped decisions only."""

    @property
    def digest(self) -> str:
        return self.environment.digest


def known(store: Store) -> list[Known]:
    """Every environment, newest first, the store's before those that ship only.

    Raises:
        StoreError: when the store cannot be read.
    """
    by_digest = {
        record.environment.digest: Known(record.environment, record.newest, is_shipped=False)
        for record in store.environments()
    }
    ours: dict[str, list[Entry]] = defaultdict(list)
    for entry in _shipped():
        ours[entry.winner.environment.digest].append(entry)
    for digest, entries in ours.items():
        newest = max(entry.winner.created_at for entry in entries)
        by_digest.setdefault(digest, Known(entries[0].winner.environment, newest, is_shipped=True))
    ordered = sorted(by_digest.values(), key=lambda e: e.newest, reverse=True)
    return sorted(ordered, key=lambda e: e.is_shipped)


def differing(environments: Sequence[Environment]) -> list[str]:
    """Names of the facts that are not the same in all of them."""
    names = sorted({name for env in environments for name in env.facts})
    return [name for name in names if len({env.facts.get(name) for env in environments}) > 1]


def label(side: Known, names: Iterable[str]) -> str:
    """Differences of an environment from the others: dates, and facts."""
    facts = [f"{name} {side.environment.facts.get(name, '-')}" for name in names]
    marks = [side.newest[:10] or "undated", *(["shipped"] if side.is_shipped else [])]
    return ", ".join([*marks, *facts])


def entries_in(store: Store, digest: str) -> list[Entry]:
    """Ranking of the newest final pass of each problem, GPU and regime in an environment.

    Raises:
        StoreError: when the store cannot be read.
    """
    # A decision of the store is of the newest environment only; final passes stay.
    finals = store.measurements(environment=digest, provenance=Provenance.MEASURED, final=True)
    passes: dict[tuple[str, ...], list[Measurement]] = defaultdict(list)
    for m in finals:
        passes[m.problem.op, m.problem.key, m.gpu.identity, str(m.regime), m.sweep].append(m)
    latest: dict[tuple[str, ...], Entry] = {
        sort_key(entry)[:4]: entry
        for entry in _shipped()
        if entry.winner.environment.digest == digest
    }
    for key, group in sorted(passes.items(), key=lambda item: Run(item[1], "store").newest):
        if ranked := rank(group):
            latest[key[:4]] = Entry.of(ranked)
    return list(latest.values())


def _shipped() -> list[Entry]:
    return [entry for entry in shipped() if entry.provenance is Provenance.MEASURED]


@dataclass(frozen=True)
class Sides:
    """Two environments and how they compare."""

    comparison: DecisionComparison
    pairs: Sequence[Pair]
    """Problems that both measured: slower winners first, then faster ones, the largest change
    first."""
    counts: Mapping[Change, int]
    """How many served winners became slower, faster, or neither."""


def sides(store: Store, a: Known, b: Known, *, is_relative: bool) -> Sides:
    """Compare two environments of a store; the last comparison is kept, to page through it.

    Raises:
        ConfigError: when they have no problem, GPU and regime in common.
        StoreError: when the store cannot be read.
    """
    # The version first: what changes meanwhile is read again.
    return _sides(store, store.decisions_version(), a.digest, b.digest, is_relative)


@lru_cache(1)
def _sides(store: Store, version: int, a: str, b: str, is_relative: bool) -> Sides:
    before, after = (entries_in(store, digest) for digest in (a, b))
    comparison = compare(before, after, is_relative=is_relative)
    order = (Change.SLOWER, Change.FASTER, Change.SAME)
    changes = {id(pair): pair.change(pair.served) for pair in comparison.pairs}
    pairs = sorted(
        comparison.pairs,
        key=lambda pair: (
            order.index(changes[id(pair)]),
            -abs(math.log(pair.ratio(pair.served))),
        ),
    )
    return Sides(comparison, pairs, {change: [*changes.values()].count(change) for change in order})
