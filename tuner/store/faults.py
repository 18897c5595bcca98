"""Mapping of database errors to `StoreError`, in one place. Standard library only."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tuner.base import filesystem
from tuner.base.printable import printable
from tuner.errors import StoreBusyError, StoreError, StoreLostError

FAULTS = (
    sqlite3.Error,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of sqlite3, json and the making of a stored object on a damaged file. sqlite3
itself raises a UnicodeDecodeError when its message quotes a damaged schema, and a MemoryError."""

_LOCKED = "is locked by another program; nothing was written: try again when it is done"
_KEPT = (
    "it was left as it is: put a backup in its place with `tuner store restore`, or move it aside "
    "together with its -wal and -shm files, then run again"
)

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)

#: Primary result codes of SQLite (sqlite.org/rescode.html) and what they mean to a user.
_SQLITE: dict[int, str] = {
    **dict.fromkeys(_BUSY, _LOCKED),
    sqlite3.SQLITE_READONLY: "cannot be written: give the file and its folder write permission",
    sqlite3.SQLITE_PERM: "cannot be opened: give the file read and write permission",
    sqlite3.SQLITE_AUTH: "cannot be opened: give the file read and write permission",
    sqlite3.SQLITE_IOERR: "cannot be read or written: the disk reports an error",
    sqlite3.SQLITE_FULL: "cannot be written: the disk is full; what was stored before is kept",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: the folder must exist and be writable",
    sqlite3.SQLITE_NOTADB: f"is not an SQLite database, or is damaged; {_KEPT}",
    sqlite3.SQLITE_CORRUPT: f"is damaged; {_KEPT}",
}


def store_error(where: str, error: BaseException) -> StoreError:
    """Convert a database error to a one-line `StoreError`.

    Args:
        where: the store's path, or its URL without the password.
        error: the driver's error, or one of `FAULTS`.
    """
    code = _code(error)
    if isinstance(error, UnicodeDecodeError):
        code = sqlite3.SQLITE_CORRUPT
    if code in _BUSY and (reason := filesystem.lock_fault(Path(where).parent)):
        # SQLite takes a lock that cannot be for one that another holds.
        return StoreError(
            f"store {where}: {reason}; put it on another, with TUNER_STORE or --store"
        )
    if code in _SQLITE:
        kind = StoreBusyError if code in _BUSY else StoreError
        return kind(f"store {where} {_SQLITE[code]} ({_first_line(error)})")
    return StoreError(f"store {where} failed: {_first_line(error)}")


def is_busy(error: BaseException | None) -> bool:
    """True if SQLite's error means that another connection holds a lock."""
    return _code(error) in _BUSY


def _code(error: BaseException | None) -> int:
    """SQLite's primary result code, the low byte of the extended code."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _first_line(error: BaseException) -> str:
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0])


@contextlib.contextmanager
def decoding(where: str) -> Iterator[None]:
    """Context in which objects are made from stored rows.

    Args:
        where: the store's path, or its URL without the password.

    Raises:
        StoreError: when a row is damaged.
    """
    try:
        yield
    except FAULTS as exc:  # ConfigError among them
        raise unreadable_row(where, exc) from exc


def store_lost(where: str, kept: str = "") -> StoreLostError:
    """Error for an open store whose file was removed, replaced or truncated.

    Args:
        where: the file's path.
        kept: sentence that says where its content was saved.
    """
    return StoreLostError(
        f"store {where} was removed, replaced or truncated while it was open{kept and f'; {kept}'}"
    )


def newer_schema(where: str, revision: str, known: str) -> StoreError:
    """Error for a store that was written by a newer program."""
    return StoreError(
        f"store {where} has schema {revision}, newer than this program knows ({known}): "
        "install a newer cutlass-tuner or name another store; it was left as it is"
    )


def unreadable_row(where: str, error: BaseException) -> StoreError:
    """Error for a row that this program cannot read."""
    return StoreError(
        f"store {where} holds a row that cannot be read ({type(error).__name__}: "
        f"{_first_line(error)}); "
        "it was left as it is: `tuner store restore` a backup, or `tuner entries forget` it"
    )
