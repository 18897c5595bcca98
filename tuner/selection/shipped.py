"""The decisions that ship with the package, under ``cache/tuned/``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

from tuner.base import resources
from tuner.errors import StoreError
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import Problem
from tuner.store.entry import Entry, sort_key
from tuner.store.exchange import Decision
from tuner.store.trusted import PlaceKey, Trusted, place_key

SHIPPED = "shipped"
"""`Entry.origin` of the decisions under ``cache/tuned/``."""


def _tuned() -> Path:
    return resources.cache() / "tuned"


class Shipped:
    """A decision that ships; its entry is built on demand.

    Args:
        path: file of the decision.
        document: contents of the file.
        decision: decision within the document.
    """

    def __init__(self, path: Path, document: Trusted, decision: Decision) -> None:
        self._path, self._document, self._decision = path, document, decision

    @cached_property
    def _place(self) -> tuple[Problem, Gpu, Regime]:
        with _reading(self._path):
            return self._document.place(self._decision.ranking[0])

    @property
    def problem(self) -> Problem:
        return self._place[0]

    @property
    def gpu(self) -> Gpu:
        return self._place[1]

    @property
    def regime(self) -> Regime:
        return self._place[2]

    @cached_property
    def entry(self) -> Entry:
        """The whole decision.

        Raises:
            StoreError: when it is damaged.
        """
        with _reading(self._path):
            return self._document.entry(self._decision, SHIPPED)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise StoreError(f"the shipped file {path} cannot be read: {exc}") from exc


class _Index(Mapping[tuple[Problem, Regime], list[Shipped]]):
    """Decisions by problem and regime. A problem is parsed when one with its sizes is looked up."""

    def __init__(self) -> None:
        self._alike: dict[PlaceKey, list[Shipped]] = {}
        for path in sorted(_tuned().glob("*.json")):
            with _reading(path):
                document = Trusted(path.read_bytes())
                for decision in document.decisions:
                    key = document.place_key(decision.ranking[0])
                    self._alike.setdefault(key, []).append(Shipped(path, document, decision))

    def __getitem__(self, place: tuple[Problem, Regime]) -> list[Shipped]:
        problem, regime = place
        alike = self._alike[place_key(problem, regime)]
        if decisions := [decision for decision in alike if decision.problem == problem]:
            return decisions
        raise KeyError(place)

    @cached_property
    def _places(self) -> dict[tuple[Problem, Regime], None]:
        every = (decision for alike in self._alike.values() for decision in alike)
        return dict.fromkeys((decision.problem, decision.regime) for decision in every)

    def __iter__(self) -> Iterator[tuple[Problem, Regime]]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@cache
def shipped_index() -> Mapping[tuple[Problem, Regime], list[Shipped]]:
    """Shipped decisions by problem and regime, without building entries.

    Raises:
        StoreError: when a file is damaged.
    """
    return _Index()


@cache
def shipped() -> tuple[Entry, ...]:
    """Entries of all decisions that ship with the package, under ``cache/tuned/``.

    Use `shipped_index` for single decisions.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    return tuple(decision.entry for same in shipped_index().values() for decision in same)


def with_shipped(
    stored: Iterable[Entry], builds: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None
) -> list[Entry]:
    """A store's entries and the shipped ones that it lacks, in a fixed order.

    Args:
        stored: entries of the store.
        builds: artifacts built here of shipped configs, by problem key and config digest.
    """
    entries_by_key = {
        sort_key(entry): entry
        for decision in shipped()
        for entry in with_builds([decision], (builds or {}).get(decision.problem.key, {}))
    }
    entries_by_key.update((sort_key(entry), entry) for entry in stored)
    return [entries_by_key[key] for key in sorted(entries_by_key)]


def in_use(entries: Iterable[Entry]) -> list[Entry]:
    """Entries that a lookup may return.

    A chained entry is left out if the same problem, GPU, inputs and provenance have one in a
    stream.
    """
    all_entries = list(entries)

    def place(entry: Entry, regime: Regime) -> tuple[Problem, str, Regime, str]:
        return entry.problem, entry.gpu.identity, regime, entry.provenance.value

    streams = {place(e, e.regime.chained) for e in all_entries if e.regime.launch == "stream"}
    return [e for e in all_entries if place(e, e.regime) not in streams]


def with_builds(entries: Iterable[Entry], builds: Mapping[str, Mapping[str, str]]) -> list[Entry]:
    """Shipped entries with the artifacts that were built here (`Store.record_build`)."""

    def built(m: Measurement) -> Measurement:
        artifacts = builds.get(m.config.digest)
        return m if artifacts is None else m.but(artifacts=artifacts)

    return [
        replace(
            entry,
            winner=built(entry.winner),
            ranking=tuple(map(built, entry.ranking)),
            best_own=built(entry.best_own) if entry.best_own else None,
        )
        for entry in entries
    ]
