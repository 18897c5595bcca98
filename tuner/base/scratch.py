"""Temporary folders that are removed with their process, however it ends.

A folder stays locked while a process that made or inherited it lives. One whose lock is free
belongs to a dead process, and `sweep` removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_SWEEP_AGE_S = 10.0
"""`sweep` leaves younger folders: between its mkdir and its lock a live one looks dead."""


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock.

    Raises:
        OSError: when it cannot be made or locked.
    """
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        os.close(lock)
        folder.rmdir()
        raise
    return folder, lock


@contextlib.contextmanager
def held(parent: Path) -> Iterator[Path]:
    """Context of a new folder under a parent, removed at the end.

    Raises:
        OSError: when it cannot be made or locked.
    """
    folder, lock = _make(parent, "")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def held_until_exit(prefix: str) -> Path:
    """A new folder in the system's temporary folder, removed when this process exits.

    Folders of the same prefix that dead processes left are swept first. A forked child may use
    the folder, and leaves it to its parent.

    Raises:
        OSError: when it cannot be made or locked.
    """
    parent = Path(tempfile.gettempdir())
    sweep(parent, prefix)
    folder, _ = _make(parent, prefix)
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def sweep(parent: Path, prefix: str = "") -> None:
    """Remove this user's folders under a parent whose processes are dead."""
    try:
        abandoned = [entry for entry in parent.iterdir() if entry.name.startswith(prefix)]
    except OSError:
        return
    for folder in abandoned:
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = os.fstat(lock)
            is_old = time.time() - facts.st_mtime > _SWEEP_AGE_S
            if is_old and facts.st_uid == os.geteuid():
                shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
