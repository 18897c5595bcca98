"""Optuna journals that killed processes left locked or with a torn last line.

Optuna's own lock waits without an end, and busily, for a link that leads nowhere. Its readers pass
over a last line without an end, and its writers append to it, which makes the whole journal
unreadable.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from tuner.base.filesystem import not_a_file
from tuner.errors import StoreError

GRACE_S = 30.0
"""Seconds without a change of lock and journal after which a lock is taken for a killed process's,
as in Optuna."""
OLD_S = 300.0
"""Age of a lock, in seconds by the clock, from which it is not waited for."""
_LOOK_S = 0.01


def open_journal(path: Path) -> JournalStorage:
    """The storage of a journal, which need not exist.

    Raises:
        StoreError: when the file is none.
    """
    path = path.resolve()  # Optuna's lock is a link, whose target would be relative to its folder
    if reason := not_a_file(path):
        raise StoreError(f"Optuna storage {path} {reason}")
    if path.exists():
        with path.open("rb") as file:
            if file.read(1) not in (b"", b"{"):
                raise StoreError(
                    f"Optuna storage {path} is not a journal (for SQLite: sqlite:///{path})"
                )
        _whole_bytes(path)
    return JournalStorage(JournalFileBackend(str(path), _Lock(path)))


class _Lock(JournalFileSymlinkLock):  # type: ignore[misc]
    """Optuna's lock of a journal. What it is taken for finds no torn line.

    Args:
        journal: resolved path of the journal.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal, self._link = journal, Path(f"{journal}.lock")

    def acquire(self) -> bool:
        """Take the lock, in place of one that a killed process left.

        Raises:
            OSError: when the folder cannot be written.
            StoreError: as `open_journal`.
        """
        state: tuple[float, float] | None = None
        since = time.monotonic()
        while not self._is_taken():
            if (now := self._state()) != state:
                state, since = now, time.monotonic()
            is_left = time.monotonic() - since >= GRACE_S
            if state is not None and (is_left or time.time() - max(state) >= OLD_S):
                with contextlib.suppress(RuntimeError):  # another process removed it
                    self.release()
            time.sleep(_LOOK_S)
        try:
            size = _whole_bytes(self._journal)
            if size < self._journal.stat().st_size:
                os.truncate(self._journal, size)
        except BaseException:
            self.release()
            raise
        return True

    def _is_taken(self) -> bool:
        try:
            self._link.symlink_to(self._journal)
        except FileExistsError:
            return False
        return True

    def _state(self) -> tuple[float, float] | None:
        """Times of the last changes of lock and journal; None without a lock."""
        try:
            locked = self._link.lstat().st_mtime
        except FileNotFoundError:
            return None
        return locked, self._journal.stat().st_mtime


def _whole_bytes(journal: Path) -> int:
    """Bytes of a journal's lines that have an end: those that Optuna reads.

    Raises:
        StoreError: when no line has one; then it may be any file.
    """
    with journal.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return 0
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return size
        file.seek(0)
        whole = file.read(size).rfind(b"\n") + 1
    if whole == 0:
        raise StoreError(f"Optuna storage {journal} is not a journal: its line has no end")
    return whole
