"""Comparison of two sets of decisions: faster, slower and changed winners.

Times of two runs drift by some percent with clocks and temperature, and each has its own noise.
Only a difference beyond both counts (`limit`). `Pair.drift` is the change of the vendors' kernels
that both measured, which do not change with this program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tuner.errors import ConfigError
from tuner.measurement import Measurement, Provenance, deviation, is_tie, latency, speedup_text
from tuner.runners import recording, recording_archive
from tuner.search.ranking import rank
from tuner.selection.describe import short_name
from tuner.selection.reader import Entry, shipped
from tuner.selection.reader import entries as stored_entries
from tuner.selection.shipped import SHIPPED
from tuner.store import open_store
from tuner.store.exchange import load, read
from tuner.store.reading import sqlite_file

TOLERANCE = 0.03
"""Minimum relative difference that counts. The same kernel differed by up to 2.1 % between two
sweeps of one H200 (cudnn at (1,16,1024,64): 14.4 and 14.1 us, November 2026)."""


class Change(StrEnum):
    """Change of a time beyond the noise."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"


@dataclass(frozen=True)
class Pair:
    """One problem on one GPU and regime in both sets."""

    a: Entry
    b: Entry
    tolerance: float = TOLERANCE
    is_relative: bool = False
    """True to judge times relative to the vendors' that both measured."""

    @property
    def drift(self) -> float | None:
        """Geometric mean of B's over A's times of the vendors' kernels of both; None without."""
        ratios = [
            latency(self.b.vendors[name]) / latency(measurement)
            for name, measurement in self.a.vendors.items()
            if name in self.b.vendors
        ]
        return geometric_mean(ratios) if ratios else None

    @property
    def served(self) -> tuple[Measurement, Measurement]:
        return self.a.winner, self.b.winner

    @property
    def own(self) -> tuple[Measurement, Measurement] | None:
        """The best own kernels; None unless both have one."""
        mine, other = self.a.best_own, self.b.best_own
        return None if mine is None or other is None else (mine, other)

    def ratio(self, pair: tuple[Measurement, Measurement]) -> float:
        """B's time over A's, without the drift if requested."""
        plain = latency(pair[1]) / latency(pair[0])
        return plain / self.drift if self.is_relative and self.drift else plain

    def speed(self, pair: tuple[Measurement, Measurement]) -> str:
        """A's time over B's in words, above 1 where B is faster; slower beyond the limit only."""
        is_slower = self.change(pair) is Change.SLOWER
        return speedup_text(1 / self.ratio(pair), is_slower=is_slower)

    @property
    def drift_text(self) -> str:
        """A's over B's times of the vendors' kernels of both; ``-`` without."""
        return "-" if self.drift is None else speedup_text(1 / self.drift, is_slower=False)

    def limit(self, pair: tuple[Measurement, Measurement]) -> float:
        """Relative difference up to which two times count as equal."""
        return max(self.tolerance, math.hypot(deviation(pair[0]), deviation(pair[1])))

    def change(self, pair: tuple[Measurement, Measurement]) -> Change:
        """Change between two times, if it is beyond noise."""
        ratio, limit = self.ratio(pair), 1 + self.limit(pair)
        if ratio > limit:
            return Change.SLOWER
        return Change.FASTER if ratio * limit < 1 else Change.SAME

    @property
    def new_winner(self) -> str:
        """B's winner if it replaces A's; empty if A's is still as good in B."""
        before, after = self.served
        if before.config == after.config:
            return ""
        again = next((m for m in self.b.ranking if m.config == before.config), None)
        if again is not None and is_tie(again, after):
            return ""
        return f"{short_name(before)} -> {short_name(after)}"

    @property
    def is_slower(self) -> bool:
        """True if the served kernel or the best own kernel became slower."""
        pairs = [self.served, *([self.own] if self.own else [])]
        return any(self.change(pair) is Change.SLOWER for pair in pairs)

    def to_json(self) -> dict[str, Any]:
        """The pair as one JSON object."""
        return {
            "op": self.a.problem.op,
            "shape": self.a.problem.label(),
            "problem": self.a.problem.to_json(),
            "gpu": self.a.gpu.name,
            "regime": str(self.a.regime),
            "served": self._times(self.served),
            "own": None if self.own is None else self._times(self.own),
            "drift": self.drift,
            "new_winner": self.new_winner or None,
            "slower": self.is_slower,
        }

    def _times(self, pair: tuple[Measurement, Measurement]) -> dict[str, Any]:
        return {
            "a_us": pair[0].latency_us,
            "b_us": pair[1].latency_us,
            "a_config": pair[0].config.to_json(),
            "b_config": pair[1].config.to_json(),
            "ratio": self.ratio(pair),
            "limit": self.limit(pair),
            "change": self.change(pair).value,
        }


@dataclass(frozen=True)
class DecisionComparison:
    """Pairs that two sets share, and problems that only one has."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Entry, ...]
    only_b: tuple[Entry, ...]
    environment: Mapping[str, tuple[str, str]]
    """Facts that differ between the newest measurements of the two: A's and B's."""

    def to_json(self) -> dict[str, Any]:
        """The comparison as one JSON object."""
        return {
            "pairs": [pair.to_json() for pair in self.pairs],
            "only_a": [_label(entry) for entry in self.only_a],
            "only_b": [_label(entry) for entry in self.only_b],
            "environment": {name: list(values) for name, values in self.environment.items()},
            "slower": sum(pair.is_slower for pair in self.pairs),
        }


def _label(entry: Entry) -> str:
    return f"{entry.problem.op} {entry.problem.label()} on {entry.gpu.name}, {entry.regime}"


def load_entries(text: str) -> list[Entry]:
    """Measured decisions of a source.

    Args:
        text: a store (SQLAlchemy URL or SQLite file), an exported file (``.json``), a recording
            (``.json.gz``), a folder of recordings, or ``shipped``.

    Raises:
        ConfigError: when it does not exist, cannot be read, or has no measured decision.
        StoreError: when a database cannot be read.
    """
    path = Path(text)
    if text == SHIPPED:
        entries: Iterable[Entry] = shipped()
    elif "://" in text:
        entries = _stored(text)
    elif not path.exists():
        raise ConfigError(
            f"'{text}' does not exist (allowed: a store, an exported .json, a recording .json.gz, "
            f"a folder of recordings, '{SHIPPED}')"
        )
    elif path.is_dir():
        entries = [_recorded(source) for source in recording_archive.sources(path)]
    elif path.name.endswith(recording.SUFFIX):
        entries = [_recorded(path)]
    elif path.suffix == ".json":
        try:
            measurements, decisions = read(load(path))
        except ConfigError as exc:
            raise ConfigError(str(exc) if str(path) in str(exc) else f"{path}: {exc}") from exc
        entries = [decision.entry(measurements.__getitem__) for decision in decisions]
    else:
        entries = _stored(text)
    measured = [e for e in entries if e.provenance is Provenance.MEASURED]
    if not measured:
        raise ConfigError(f"'{text}' holds nothing that was measured and decided")
    return measured


def _stored(url: str) -> list[Entry]:
    file = sqlite_file(url)
    if file is None:
        with open_store(url) as store:
            return store.entries()
    if not file.exists():
        raise ConfigError(f"store {file} does not exist")
    # Read only: opening it as a store would upgrade a file that an older version made.
    return [entry for entry in stored_entries(file) if entry.origin != SHIPPED]


def _recorded(path: recording.Source) -> Entry:
    sweep = recording.read(path)
    finals = rank([m for m in sweep.measurements if m.is_final])
    if not finals:
        raise ConfigError(f"recording {path} has no final pass: nothing was decided")
    return Entry.of(finals)


def compare(
    a: Sequence[Entry],
    b: Sequence[Entry],
    *,
    tolerance: float = TOLERANCE,
    is_relative: bool = False,
) -> DecisionComparison:
    """Compare what two sets decided for the same problems, GPUs and regimes.

    Args:
        a: decisions before.
        b: decisions after.
        tolerance: minimum relative difference that counts.
        is_relative: True to judge times relative to the vendors' that both measured.

    Raises:
        ConfigError: when the two share no problem.
    """
    before, after = _keyed(a), _keyed(b)
    common = sorted(set(before) & set(after))
    pairs = tuple(Pair(before[key], after[key], tolerance, is_relative) for key in common)
    if not pairs:
        raise ConfigError(
            f"nothing to compare: A holds {_labels(before.values())}; "
            f"B holds {_labels(after.values())}"
        )
    return DecisionComparison(
        pairs,
        tuple(before[key] for key in sorted(set(before) - set(after))),
        tuple(after[key] for key in sorted(set(after) - set(before))),
        _environment(pairs),
    )


def _keyed(entries: Iterable[Entry]) -> dict[tuple[str, str, str], Entry]:
    return {(e.problem.op + e.problem.key, e.gpu.identity, str(e.regime)): e for e in entries}


def _labels(entries: Iterable[Entry]) -> str:
    return "; ".join(_label(entry) for entry in entries)


def _environment(pairs: Sequence[Pair]) -> dict[str, tuple[str, str]]:
    newest = (max((p.served[i] for p in pairs), key=lambda m: m.created_at) for i in (0, 1))
    old, other = (measurement.environment.facts for measurement in newest)
    return {
        name: (str(old.get(name, "-")), str(other.get(name, "-")))
        for name in sorted({*old, *other})
        if json.dumps(old.get(name)) != json.dumps(other.get(name))
    }
