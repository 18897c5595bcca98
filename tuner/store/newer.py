"""Rows that a newer program wrote into a store: they are left out, and named once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from tuner.base.printable import one_line
from tuner.errors import ConfigError, NewerRowError
from tuner.problem import problem_from_json

_LOG = logging.getLogger("tuner.store")
_Row = TypeVar("_Row")
_Made = TypeVar("_Made")


def readable(where: str, rows: Iterable[_Row], make: Callable[[_Row], _Made]) -> list[_Made]:
    """Objects made of rows, without rows of a newer program.

    Args:
        where: the store's path, or its URL without the password.
        rows: stored rows.
        make: makes one; it raises `NewerRowError`.
    """
    made = []
    for row in rows:
        try:
            made.append(make(row))
        except NewerRowError as exc:
            say_left_out(where, str(exc))
    return made


@lru_cache(256)
def say_left_out(where: str, reason: str) -> None:
    """Log that rows are left out, once for each reason in a process."""
    _LOG.warning(
        "store %s: rows of another version are left out: %s (that version reads them)",
        where,
        reason,
    )


def without_unknown(document: Any) -> tuple[Any, list[str]]:
    """A document without problems that this program does not know, and a reason for each decision
    that is left out with them.

    Args:
        document: parsed JSON, not checked yet.
    """
    rows = document.get("measurements") if isinstance(document, Mapping) else None
    decisions = document.get("entries") if isinstance(document, Mapping) else None
    if not isinstance(rows, list) or not isinstance(decisions, list):
        return document, []
    unknown = {number: reason for number, row in enumerate(rows) if (reason := _unknown(row))}
    if not unknown:
        return document, []
    left = [number for number in range(len(rows)) if number not in unknown]
    places: dict[Any, int] = {number: place for place, number in enumerate(left)}
    taken, reasons = [], []
    for decision in decisions:
        numbers = decision.get("ranking") if isinstance(decision, Mapping) else None
        if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
            taken.append(decision)  # whoever checks it refuses it
            continue
        pinned = decision.get("pinned")
        pins = [pinned] if type(pinned) is int else []
        if newer := [unknown[number] for number in [*numbers, *pins] if number in unknown]:
            reasons.append(newer[0])
            continue
        ranking = [places.get(number, number) for number in numbers]
        pinned = places.get(pinned, pinned) if pins else pinned
        taken.append({**decision, "ranking": ranking, "pinned": pinned})
    measurements = [rows[number] for number in left]
    return {**document, "measurements": measurements, "entries": taken}, reasons


def _unknown(row: Any) -> str:
    """Reason why a row's problem is not known; empty where it is, or is none at all."""
    problem = row.get("problem") if isinstance(row, Mapping) else None
    if not isinstance(problem, Mapping) or not isinstance(problem.get("op"), str):
        return ""
    try:
        problem_from_json(problem)
    except ConfigError as exc:
        return f"{problem['op']}: {one_line(str(exc))}"
    return ""
