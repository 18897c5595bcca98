"""Database of measurements and decisions.

Importing this package needs only the standard library. `open_store` imports SQLAlchemy. Reading an
SQLite store does not (`tuner.selection.reader`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tuner import settings
from tuner.store.entry import Entry

if TYPE_CHECKING:
    from tuner.store.records import ImportReport, SweepRecord
    from tuner.store.sql import Store

__all__ = ["Entry", "ImportReport", "Store", "SweepRecord", "open_store"]


def open_store(url: str | None = None, *, create: bool = True) -> Store:
    """Open a store for reading and writing. Creates or upgrades its tables if necessary.

    Args:
        url: an SQLAlchemy URL or the path of an SQLite file; default: `settings.store_url()`.
        create: False refuses an SQLite file that does not exist.

    Raises:
        ConfigError: when the URL cannot be parsed or its driver is not installed.
        StoreError: when the database cannot be opened or is not a store.
    """
    from tuner.store.sql import Store

    return Store(url or settings.store_url(), create=create)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module = "sql" if name == "Store" else "records"
    return getattr(importlib.import_module(f"tuner.store.{module}"), name)
