"""Temporary folders that go with their process, by processes that end in each way."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from programs import ran

from tuner.base import scratch
from tuner.base.processes import python_command, python_environment

MAKE = "import os, sys\nfrom tuner.base import scratch\nprint(scratch.held_until_exit('p-'))\n"


def folder_of_another(parent: Path, ending: str) -> Path:
    """The folder of a process that made it and has ended."""
    done = ran(
        *python_command("-c", MAKE + ending), env={**python_environment(), "TMPDIR": str(parent)}
    )
    return Path(done.stdout.split()[0])


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_SWEEP_AGE_S", -1.0)
    return tmp_path


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What this process would do at its end."""
    made: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", made.append)
    return made


def test_it_goes_with_its_process_and_not_with_a_forked_child(parent: Path) -> None:
    ending = (
        "sys.stdout.flush()\nchild = os.fork()\nif child == 0: sys.exit()\n"
        "os.waitpid(child, 0)\nassert os.listdir(os.environ['TMPDIR'])"
    )
    folder = folder_of_another(parent, ending)
    assert folder.parent == parent and not folder.exists()


def test_a_process_that_was_cut_short_is_swept_after(
    parent: Path, at_exit: list[Callable[[], None]]
) -> None:
    left = folder_of_another(parent, "sys.stdout.flush(); os._exit(0)")
    (left / "store.sqlite").write_text("x")
    (other := parent / "q-other").mkdir()
    with scratch.held(parent) as alive:
        alive_too = scratch.held_until_exit("p-")
        assert not left.exists()
        assert other.exists()
        scratch.sweep(parent)
        assert alive.exists() and alive_too.exists() and not other.exists()
    assert not alive.exists()
    for act in at_exit:
        act()
    assert list(parent.iterdir()) == []


def test_a_young_one_and_a_link_are_left(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (young := parent / "p-young").mkdir()
    (link := parent / "p-link").symlink_to(young)
    monkeypatch.setattr(scratch, "_SWEEP_AGE_S", 60.0)
    scratch.sweep(parent, "p-")
    assert young.exists()
    monkeypatch.setattr(scratch, "_SWEEP_AGE_S", -1.0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    scratch.sweep(parent, "p-")
    assert young.exists(), "it belongs to another user"
    monkeypatch.undo()
    monkeypatch.setattr(scratch, "_SWEEP_AGE_S", -1.0)
    scratch.sweep(parent, "p-")
    assert not young.exists() and link.is_symlink()
