"""Files that only this user and root can have written, and their hashes.

For what is loaded into a process. The rule is PostgreSQL's for its data folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_State = tuple[int, int, int, int]
"""Device, inode, time of the last change in ns, size: equal while nobody changed a file."""
_hashes: dict[_State, str] = {}


def open_to_others(facts: os.stat_result) -> str:
    """Reason why others than this user and root can have written a file; empty if they cannot."""
    if facts.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({facts.st_uid})"
    if facts.st_mode & _OTHERS_WRITE:
        return f"can be written by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""


def close_to_others(path: Path) -> None:
    """Remove the write permission of other users, whatever the umask or a linker set.

    Raises:
        OSError: when the file belongs to another user.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS_WRITE:
        path.chmod(mode & ~_OTHERS_WRITE)


def trusted_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex; computed once for each state of it in this process.

    The file is read through one descriptor. It is read again when the path names another inode,
    or when the size or the time of the last change differs. That time cannot be set.

    Raises:
        OSError: when it cannot be read, or others can write it.
    """
    known = _hashes.get(_state(path.stat()))
    if known is not None:
        return known
    with path.open("rb") as file:
        before = os.fstat(file.fileno())
        if reason := open_to_others(before):
            raise PermissionError(errno.EPERM, f"{path} {reason}")
        found = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(os.fstat(file.fileno())) == _state(before):
            _hashes[_state(before)] = found
    return found


def _state(facts: os.stat_result) -> _State:
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns, facts.st_size
