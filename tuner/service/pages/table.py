"""The cache as a table: which decisions match some words, in which order, and one page of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from tuner.selection.describe import kernel_name, where_from
from tuner.selection.reader import Entry
from tuner.service.decisions import DecisionTable

ROWS = 100
"""Rows of one page."""

Order = Literal["problem", "us", "-tflops", "-speed", "speed", "-decided"]
"""A leading minus begins with the largest."""
Outcome = Literal["ahead", "tied", "behind", "alone"]
"""Own kernels beside the fastest vendor's: faster, equal within noise, slower, not compared."""


@dataclass(frozen=True)
class Filter:
    """Filter of entries; an empty field filters nothing."""

    op: str = ""
    gpu: str = ""
    provenance: str = ""
    standing: str = ""

    def lets(self, entry: Entry) -> bool:
        """True when an entry has all of it."""
        return (
            self.op in ("", entry.problem.op)
            and self.gpu in ("", entry.gpu.name)
            and self.provenance in ("", str(entry.provenance))
            and self.standing in ("", standing_of(entry))
        )


NO_FILTER = Filter()


def standing_of(entry: Entry) -> str:
    """Outcome of the best own kernel against the fastest vendor's, or ``alone``."""
    return entry.standing.outcome if entry.standing else "alone"


_KEYS: dict[str, Callable[[Entry], tuple[float | str, ...]]] = {
    "us": lambda entry: (entry.winner.latency_us or math.inf,),
    "tflops": lambda entry: (entry.winner.tflops or 0.0,),
    "speed": lambda entry: (entry.standing.ratio if entry.standing else 0.0,),
    "decided": lambda entry: (entry.decided_at,),
}


@dataclass(frozen=True)
class TablePage:
    """One page of what matches."""

    entries: Sequence[Entry]
    total: int
    first: int
    """Position of the page's first entry, from 0."""

    @property
    def last(self) -> int:
        return self.first + len(self.entries)


def find_entries(
    table: DecisionTable,
    words: str,
    *,
    order: Order,
    first: int = 0,
    only: Filter = NO_FILTER,
) -> TablePage:
    """The entries whose text contains every word, regardless of case.

    Args:
        table: all served entries.
        words: parts of the operation, shape, GPU, regime, winner or origin.
        order: column to sort by.
        first: number of entries to skip.
        only: further conditions.
    """
    terms = words.casefold().split()
    rows = [
        entry for text, entry in _texts(table) if all(w in text for w in terms) and only.lets(entry)
    ]
    name = order.removeprefix("-")
    if name in _KEYS:
        rows.sort(key=_KEYS[name], reverse=order != name)
    return TablePage(rows[first : first + ROWS], len(rows), first)


@lru_cache(1)
def _texts(table: DecisionTable) -> list[tuple[str, Entry]]:
    return [(_text(entry), entry) for entry in table.entries]


def _text(entry: Entry) -> str:
    parts = (
        entry.problem.op,
        entry.problem.label(),
        entry.gpu.name,
        str(entry.regime),
        kernel_name(entry.winner),
        str(entry.winner.config),
        where_from(entry),
    )
    return " ".join(parts).casefold()
