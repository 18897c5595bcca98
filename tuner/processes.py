"""Running compiler processes that can be killed with everything they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.errors import CompileError

_NICE = 10
"""A compiler must not disturb the kernel that is being timed beside it."""
_PACKAGES = str(Path(__file__).resolve().parent.parent)
"""Where the package `tuner` lies."""


@dataclass(frozen=True)
class Finished:
    """How a process ended."""

    returncode: int
    """The exit status, or minus the signal that killed it."""
    cpu_s: float
    """User and system time of the process and of all it waited for."""
    wall_s: float
    timed_out: bool
    log: str
    """Standard output and standard error together."""


class ProcessPool:
    """The compiler processes of one owner; `run` from any thread, `kill` ends them all."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._killed = False

    def run(self, command: Sequence[str], folder: Path) -> Finished:
        """Run `command` in its own process group and wait for it.

        Its working folder, its temporary files and its log are in `folder`, so that whoever
        removes that removes everything.

        Raises:
            CompileError: when the program cannot be started.
        """
        log = folder / "log.txt"
        started = time.monotonic()
        with log.open("wb") as output:
            pid = self._start(command, folder, output.fileno())
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            self._kill_group(pid)

        timer = threading.Timer(self._timeout_s, expire)
        timer.daemon = True
        timer.start()
        try:
            # Wait without reaping: until then the group's id cannot come to mean another.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        finally:
            timer.cancel()
            self._kill_group(pid)  # nothing that it started outlives it
            with self._lock:
                self._groups.discard(pid)
                _, status, usage = os.wait4(pid, 0)
        return Finished(
            returncode=os.waitstatus_to_exitcode(status),
            cpu_s=usage.ru_utime + usage.ru_stime,
            wall_s=time.monotonic() - started,
            timed_out=expired.is_set(),
            log=log.read_text(encoding="utf-8", errors="replace"),
        )

    def kill(self) -> None:
        """Kill every process group now and any that would still be started."""
        with self._lock:
            self._killed = True
            groups = list(self._groups)
        for pid in groups:
            self._kill_group(pid)

    def _start(self, command: Sequence[str], folder: Path, output: int) -> int:
        # A compiler may be a module of this package, which a checkout has nowhere else.
        path = os.pathsep.join(filter(None, (_PACKAGES, os.environ.get("PYTHONPATH"))))
        with self._lock:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": path},
                    start_new_session=True,
                )
            except OSError as exc:
                raise CompileError(f"{command[0]} cannot be started: {exc.strerror}") from exc
            process.returncode = 0  # reaped by wait4 in `run`, not by Popen
            self._groups.add(process.pid)
            killed = self._killed
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, _NICE)
        if killed:
            self._kill_group(process.pid)
        return process.pid

    def _kill_group(self, pid: int) -> None:
        with self._lock:
            if pid in self._groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
