"""The decisions that ship with the package, under ``cache/tuned/``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from tuner import resources
from tuner.errors import StoreError
from tuner.measurement import Measurement, Regime
from tuner.problem import Problem
from tuner.store.entry import Entry, sort_key
from tuner.store.exchange import trusted_entries

SHIPPED = "shipped"
"""`Entry.origin` of the decisions under ``cache/tuned/``."""


def _tuned() -> Path:
    return resources.cache() / "tuned"


@cache
def shipped() -> tuple[Entry, ...]:
    """The decisions that ship with the package, under ``cache/tuned/``.

    Raises:
        StoreError: when such a file is damaged.
    """
    found: list[Entry] = []
    for path in sorted(_tuned().glob("*.json")):
        try:
            found += trusted_entries(json.loads(path.read_text(encoding="utf-8")), SHIPPED)
        except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
            raise StoreError(f"the shipped file {path} cannot be read: {exc}") from exc
    return tuple(found)


@cache
def shipped_index() -> Mapping[tuple[Problem, Regime], list[Entry]]:
    """What ships, by problem and regime."""
    index: dict[tuple[Problem, Regime], list[Entry]] = {}
    for entry in shipped():
        index.setdefault((entry.problem, entry.regime), []).append(entry)
    return index


def with_shipped(
    stored: Iterable[Entry], builds: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None
) -> list[Entry]:
    """A store's entries and the shipped ones that it lacks, in a fixed order.

    Args:
        stored: the store's.
        builds: artifacts made here of shipped configs, by problem key and config digest.
    """
    found = {
        sort_key(entry): entry
        for one in shipped()
        for entry in with_builds([one], (builds or {}).get(one.problem.key, {}))
    }
    found.update((sort_key(entry), entry) for entry in stored)
    return [found[key] for key in sorted(found)]


def with_builds(found: Iterable[Entry], builds: Mapping[str, Mapping[str, str]]) -> list[Entry]:
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
        for entry in found
    ]
