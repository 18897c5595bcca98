"""Faults of a folder's file system that programs find late: no space, no locks, no execution."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

LOCKLESS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system without locks, as of some network mounts."""
NO_LOCKS = "is on a file system without locks"
FULL = (errno.ENOSPC, errno.EDQUOT)


def nearest(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def not_a_file(path: Path) -> str:
    """Reason why what a path names is not a file; empty for a file and for nothing."""
    if path.is_dir():
        return "is a folder; name a file in it"
    return "" if path.is_file() or not path.exists() else "is not a file"


def write_fault(folder: Path, size: int = 0) -> str:
    """Reason why no file of `size` bytes can be written there; empty if one can."""
    folder = nearest(folder)
    reason = _fault(folder, partial(_fill, size))
    if reason in FULL:
        return f"{folder} is full: it has no room for {size / 1e6:.0f} MB"
    return f"{folder} cannot be written ({_text(reason)})" if reason else ""


def lock_fault(folder: Path) -> str:
    """Reason why files there cannot be locked; empty if they can, or cannot be made at all."""
    folder = nearest(folder)
    for lock in (fcntl.flock, fcntl.lockf):  # artifacts, and SQLite
        reason = _fault(folder, partial(_try, lock))
        if reason in LOCKLESS:
            return f"{folder} {NO_LOCKS} ({_text(reason)})"
    return ""


def load_fault(folder: Path) -> str:
    """Reason why libraries there cannot be loaded; empty if they can, or cannot be made at all."""
    folder = nearest(folder)
    reason = _fault(folder, _map_executable)
    if reason in (errno.EPERM, errno.EACCES) and not write_fault(folder):
        return f"{folder} is mounted noexec: libraries there cannot be loaded ({_text(reason)})"
    return ""


def _fault(folder: Path, use: Callable[[int], object]) -> int:
    """Error number of the making or the use of a temporary file; 0 without an error."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            use(file.fileno())
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def _try(lock: Callable[[int, int], None], descriptor: int) -> None:
    lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _fill(size: int, descriptor: int) -> None:
    if size:
        os.posix_fallocate(descriptor, 0, size)


def _map_executable(descriptor: int) -> None:
    os.ftruncate(descriptor, mmap.PAGESIZE)
    protection = mmap.PROT_READ | mmap.PROT_EXEC
    mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=protection).close()


def _text(number: int) -> str:
    return os.strerror(number)
