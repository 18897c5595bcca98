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
    rows_read = []
    for row in rows:
        try:
            rows_read.append(make(row))
        except NewerRowError as exc:
            say_left_out(where, str(exc))
    return rows_read


@lru_cache(256)
def say_left_out(where: str, reason: str) -> None:
    """Log that rows are left out, once for each reason in a process."""
    _LOG.warning(
        "store %s: rows of another version are left out: %s (that version reads them)",
        where,
        reason,
    )


def unknown_problem(row: Any) -> str:
    """Reason why the problem of a document's row is not known; empty where it is, or is none."""
    problem = row.get("problem") if isinstance(row, Mapping) else None
    if not isinstance(problem, Mapping) or not isinstance(problem.get("op"), str):
        return ""
    try:
        problem_from_json(problem)
    except ConfigError as exc:
        return f"{problem['op']}: {one_line(str(exc))}"
    return ""
