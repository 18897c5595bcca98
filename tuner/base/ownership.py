"""Files that only this user and root can have written, and their hashes.

For what is loaded into a process. The rule is PostgreSQL's for its data folder. A cache on a shared
volume is trusted by ``TUNER_TRUST_CACHE``: members of that group count as this user for what the
group owns.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

from tuner import settings

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_State = tuple[int, int, int, int]
"""Device, inode, time of the last change in ns, size: equal while nobody changed a file."""
_hashes: dict[_State, str] = {}


def open_to_others(facts: os.stat_result) -> str:
    """Reason why others than this user and root can have written a file; empty if they cannot. The
    only check of that.

    Raises:
        ConfigError: when ``TUNER_TRUST_CACHE`` is not a group.
    """
    is_trusted = facts.st_gid == settings.trusted_group()
    if facts.st_uid not in (0, os.geteuid()) and not is_trusted:
        return f"belongs to another user ({facts.st_uid})"
    if facts.st_mode & (stat.S_IWOTH if is_trusted else _OTHERS_WRITE):
        return f"can be written by others (mode {stat.S_IMODE(facts.st_mode):04o})"
    return ""


def remedy(path: Path, facts: os.stat_result) -> str:
    """Ways to mend what `open_to_others` refuses.

    Args:
        path: file or folder under the cache folder.
        facts: its facts.
    """
    ways = ["set TUNER_CACHE_DIR to a folder of your own"]
    if facts.st_uid == os.geteuid():
        ways.insert(0, f"`chmod -R go-w {path}`")
    if not facts.st_mode & stat.S_IWOTH and facts.st_gid in (os.getegid(), *os.getgroups()):
        ways.append(f"set TUNER_TRUST_CACHE={facts.st_gid} to trust the members of its group")
    return ", or ".join(ways)


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
