"""The one seam where a database's errors become `StoreError`. Standard library only."""

from __future__ import annotations

import sqlite3

from tuner.errors import StoreError

_LOCKED = "is locked by another program; nothing was written: try again when it is done"
_KEPT = "it was left as it is: move it aside or put a copy back, then run again"

#: Primary result codes of SQLite (sqlite.org/rescode.html) and what they mean to a user.
_SQLITE: dict[int, str] = {
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
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
    """One clear line for a database error.

    Args:
        where: the store's path, or its URL without the password.
        error: the driver's error, or an error met while a stored row was read.
    """
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # The low byte is the primary code; the others refine it.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _SQLITE:
        return StoreError(f"store {where} {_SQLITE[code]} ({first_line})")
    return StoreError(f"store {where} failed: {first_line}")


def newer_schema(where: str, revision: str, known: str) -> StoreError:
    """The store was written by a newer program."""
    return StoreError(
        f"store {where} has schema {revision}, newer than this program knows ({known}): "
        "install a newer cutlass-tuner or name another store; it was left as it is"
    )


def unreadable_row(where: str, error: BaseException) -> StoreError:
    """A row that this program cannot read back."""
    return StoreError(
        f"store {where} holds a row that cannot be read ({type(error).__name__}: {error}); "
        "it was left as it is: put a copy back, or `tuner forget` the problem"
    )
