"""The database of measurements and decisions.

Importing this package needs the standard library only. `open_store` loads SQLAlchemy; reading an
SQLite store does not (`tuner.selection.reader`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.store.entry import Entry

if TYPE_CHECKING:
    from tuner.store.base import ImportReport, Store, SweepRecord

__all__ = ["Entry", "ImportReport", "Store", "SweepRecord", "open_store"]


def open_store(url: str | None = None, *, create: bool = True) -> Store:
    """Open a store for reading and writing; makes or upgrades its tables where needed.

    Args:
        url: an SQLAlchemy URL or the path of an SQLite file; default: `settings.store_url()`.
        create: False refuses an SQLite file that does not exist.

    Raises:
        ConfigError: when the URL cannot be read or its driver is not installed.
        StoreError: when the database cannot be opened or holds something else.
    """
    from tuner.store.sql import SqlStore

    return SqlStore(url or settings.store_url(), create=create)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module("tuner.store.base"), name)
