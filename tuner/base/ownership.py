"""Files that only this user and root can have written, and their hashes.

For what is loaded into a process, and for lists that say what may be loaded. The rule is
PostgreSQL's for its data folder. A cache on a shared volume is trusted by ``TUNER_TRUST_CACHE``:
members of that group count as this user for what the group owns.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from io import BufferedReader
from pathlib import Path

from tuner import settings

OWN_FOLDER = "set TUNER_CACHE_DIR to a folder of your own"
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


def _remedy(path: Path, facts: os.stat_result, way: str) -> str:
    """Ways to mend what `open_to_others` refuses.

    Args:
        path: the file or folder.
        facts: its facts.
        way: the one that holds for any of its kind.
    """
    ways = [way]
    if facts.st_uid == os.geteuid():
        ways.insert(0, f"`chmod -R go-w {path}`")
    if not facts.st_mode & stat.S_IWOTH and facts.st_gid in (os.getegid(), *os.getgroups()):
        ways.append(f"set TUNER_TRUST_CACHE={facts.st_gid} to trust the members of its group")
    return ", or ".join(ways)


def distrust(path: Path, name: str, way: str = OWN_FOLDER) -> str:
    """Reason not to trust a file or folder, with the remedy; empty when it can be trusted or does
    not exist.

    Args:
        path: the file or folder.
        name: its name in the message, as ``artifact cache``.
        way: remedy for all of its kind; the default is for those of the tuner's cache.
    """
    try:
        facts = path.stat()
    except OSError:
        return ""
    reason = open_to_others(facts)
    if not reason:
        return ""
    return f"the {name} {path} {reason}, and its libraries are run: {_remedy(path, facts, way)}"


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, none of which others can write, whatever the umask.

    Raises:
        ConfigError: when ``TUNER_TRUST_CACHE`` is not a group.
        OSError: when it cannot be created.
    """
    mode = 0o755 if settings.trusted_group() is None else 0o775
    for folder in reversed(path.parents):
        if not folder.exists():
            folder.mkdir(mode, exist_ok=True)
    path.mkdir(mode, exist_ok=True)


def opened(path: Path) -> BufferedReader:
    """A file to read. Only a regular one, since another user's pipe would never be ready.

    Raises:
        OSError: when it cannot be opened, or is not a regular file.
    """
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, f"{path} is not a file")
    return file


def trusted_text(path: Path) -> str:
    """Text of a file that only this user and root can have written, read through one descriptor.

    Raises:
        OSError: when it cannot be read, or others can write it.
    """
    with opened(path) as file:
        if reason := open_to_others(os.fstat(file.fileno())):
            raise PermissionError(errno.EPERM, f"{path} {reason}")
        return file.read().decode()


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
    remembered = _hashes.get(_state(path.stat()))
    if remembered is not None:
        return remembered
    with opened(path) as file:
        before = os.fstat(file.fileno())
        if reason := open_to_others(before):
            raise PermissionError(errno.EPERM, f"{path} {reason}")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _state(os.fstat(file.fileno())) == _state(before):
            _hashes[_state(before)] = digest
    return digest


def _state(facts: os.stat_result) -> _State:
    return facts.st_dev, facts.st_ino, facts.st_ctime_ns, facts.st_size
