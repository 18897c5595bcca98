"""Output files, written aside and then put in place whole."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tuner.base import ownership
from tuner.errors import ConfigError, StoreError

_NAME_LENGTH = 40
"""Characters of a file's name that the one beside it begins with: names end at 255 bytes."""


def check_place(path: Path | None) -> None:
    """See before a run, not after it, that its results have a place.

    Raises:
        ConfigError: names the folder that is not there, or what cannot be written.
    """
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    folder = _target(path).parent
    if not folder.is_dir():
        raise ConfigError(f"{path}: there is no folder {folder}")
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: no permission to write in {folder}")


@contextlib.contextmanager
def replacing(path: Path, *, is_own: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that takes the path's place at the end, and leaves it alone on any error.

    A symbolic link stays and its target is replaced. A device or a FIFO also stays, and is
    given the content at the end.

    Args:
        path: the file.
        is_own: True for a file that no other user can write, whatever the umask.

    Raises:
        StoreError: names the path that cannot be written, and why.
    """
    try:
        with _through(path) if _is_special(path) else _aside(path, is_own) as file:
            yield file
    except OSError as exc:
        raise StoreError(f"{path} cannot be written: {exc.strerror or exc}") from exc


def write(
    path: Path, content: str | bytes, *, make_folder: bool = False, is_own: bool = False
) -> int:
    """Write all of a file, as `replacing` does; text as UTF-8. Returns its bytes.

    Raises:
        StoreError: names the path that cannot be written, and why.
    """
    data = content.encode() if isinstance(content, str) else content
    if make_folder:
        _make(path.parent, is_own)
    with replacing(path, is_own=is_own) as file:
        return file.write(data)


def _make(folder: Path, is_own: bool) -> None:
    try:
        if is_own:
            ownership.make_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"folder {folder} cannot be made: {exc.strerror}") from exc


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_special(path: Path) -> bool:
    """True when the path is a device or a FIFO, which a regular file must not replace."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _aside(path: Path, is_own: bool) -> Iterator[IO[bytes]]:
    target, most = _target(path), 0o7755 if is_own else 0o7777
    partial = target.with_name(f".{target.name[:_NAME_LENGTH]}.{os.urandom(4).hex()}.partial")
    with open(
        partial, "x+b", opener=lambda name, flags: os.open(name, flags, most & 0o666)
    ) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                partial.chmod(stat.S_IMODE(target.stat().st_mode) & most)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _through(path: Path) -> Iterator[IO[bytes]]:
    import shutil
    import tempfile

    if path.is_dir():
        raise IsADirectoryError(None, "it is a folder")
    with tempfile.NamedTemporaryFile() as file:
        yield file
        file.seek(0)
        with path.open("wb") as target:
            shutil.copyfileobj(file, target)
