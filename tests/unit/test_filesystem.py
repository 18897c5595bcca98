"""Faults of file systems: what the checks say, and that messages name the cause."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tuner.base import filesystem, scratch
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import StoreBusyError, StoreError
from tuner.store.faults import store_error


def failing(number: int) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks, as some network mounts."""
    for name in ("flock", "lockf"):
        monkeypatch.setattr(filesystem.fcntl, name, failing(errno.ENOLCK))


def test_a_sound_folder_has_no_fault_and_is_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    checks = (filesystem.write_fault, filesystem.lock_fault, filesystem.load_fault)
    assert [check(folder) for check in checks] == ["", "", ""]
    assert filesystem.write_fault(folder, 1 << 20) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["flock", "lockf"])
@pytest.mark.parametrize("number", filesystem.LOCKLESS)
def test_locks_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(filesystem.fcntl, name, failing(number))
    assert "is on a file system without locks" in filesystem.lock_fault(tmp_path)


def test_a_mount_without_execution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem.mmap, "mmap", failing(errno.EPERM))
    assert "is mounted noexec: libraries there cannot be" in filesystem.load_fault(tmp_path)


@pytest.mark.parametrize("number", filesystem.FULL)
def test_a_full_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(filesystem.os, "posix_fallocate", failing(number))
    wanted = f"{tmp_path} is full: it has no room for 64 MB"
    assert filesystem.write_fault(tmp_path, 64_000_000) == wanted


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written (Not a directory)" in filesystem.write_fault(tmp_path / "file")


def busy() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    return error


@pytest.mark.usefixtures("lockless")
def test_a_store_without_locks_is_not_locked_by_another(tmp_path: Path) -> None:
    """SQLite reports both as busy; to wait would not help."""
    error = store_error(str(tmp_path / "store.sqlite"), busy())
    assert not isinstance(error, StoreBusyError)
    assert "is on a file system without locks (No locks available)" in str(error)
    assert "another program" not in str(error)


def test_a_store_that_another_has_locked_is_said_so(tmp_path: Path) -> None:
    error = store_error(str(tmp_path / "store.sqlite"), busy())
    assert isinstance(error, StoreBusyError) and "is locked by another program" in str(error)


@pytest.mark.usefixtures("lockless")
def test_a_cache_without_locks(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    with pytest.raises(StoreError, match="is on a file system without locks"), cache.lock("a"):
        pass
    with pytest.raises(StoreError, match="is on a file system without locks"), cache.workspace():
        pass


@pytest.mark.usefixtures("lockless")
def test_a_folder_that_cannot_be_locked_is_removed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No locks"), scratch.held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
