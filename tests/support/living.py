"""Processes that a test started, or that such a one started: alive or dead."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.base.processes import python_environment

TOP = Path(__file__).resolve().parents[2]

CHILD_S = 30
"""Seconds after which a child that hangs is ended by a signal."""


def exit_of_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child that does some work: 0, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_S)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def benchmarks_environment() -> dict[str, str]:
    """Environment of a Python that imports the package and ``benchmarks``."""
    variables = python_environment()
    path = [str(TOP), str(TOP / "scripts"), *filter(None, [variables.get("PYTHONPATH")])]
    return {**variables, "PYTHONPATH": os.pathsep.join(path)}


def is_alive(pid: int) -> bool:
    """False of a process that is gone, or that nobody has reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def until_dead(pid: int, seconds: float = 60) -> None:
    """Wait for a process's end: a busy machine takes its time to deliver SIGKILL."""
    deadline = time.monotonic() + seconds
    while is_alive(pid):
        if time.monotonic() > deadline:
            pytest.fail(f"process {pid} is alive after {seconds:g} s")
        time.sleep(0.01)


def pid_in(path: Path, seconds: float = 60) -> int:
    """The number in a file that a process writes in one step, once it is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            pytest.fail(f"{path.name} was not written within {seconds:g} s")
        time.sleep(0.01)
    return int(path.read_text())
