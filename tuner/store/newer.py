"""Rows that a newer program wrote into a store: they are left out, and named once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TypeVar

from tuner.errors import NewerRowError

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
        "store %s: rows of a newer cutlass-tuner are left out: %s (update this one to read them)",
        where,
        reason,
    )
