"""Starting and ending processes: this one by signals, Pythons and compilers as its children."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import site
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tuner.base import forks
from tuner.errors import CompileError

_NICE = 10
"""A compiler must not disturb the kernel that is being timed beside it."""
_ENDS_WITH_ITS_STARTER = """\
trap '' HUP INT TERM
exec 3<&0 </dev/null
{ read -r _ <&3; kill -KILL 0; } 2>/dev/null &
"$@" 3<&-
status=$?
{ kill -KILL $!; wait; } 2>/dev/null
[ $status -le 128 ] || kill -$((status - 128)) $$ 2>/dev/null
exit $status
"""
"""Shell script around a command, which ends the whole process group with its starter.

The script's input is a pipe that nobody writes to. The kernel closes it when the starter dies, in
whatever way, and the reader kills the group. PR_SET_PDEATHSIG would not do. It reaches nvcc but not
the cicc that nvcc's shell starts, and it comes when the starting thread ends.

The group
ignores the signals that end a service, so that the compiler is not blamed for them. A command that
a signal ended ends the script with the same signal.
"""
_PACKAGES = Path(__file__).resolve().parents[2]
"""Folder of the package `tuner`."""


_AGAIN_S = 0.05
_THREADS_S = 0.5
"""Seconds in which a thread ends that waits for nothing."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Requests to end, with one answer: Ctrl-C, service managers, a terminal that is closed."""


class Interrupted(KeyboardInterrupt):
    """Arrival of one of `ENDING_SIGNALS`; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def exit_code(ended_by: int | KeyboardInterrupt) -> int:
    """Exit code of a process that a signal ended in order: 128 and its number, as in shells.

    Args:
        ended_by: the signal's number, or what it raised; Python's own is SIGINT's.
    """
    if isinstance(ended_by, KeyboardInterrupt):
        ended_by = ended_by.number if isinstance(ended_by, Interrupted) else signal.SIGINT
    return 128 + ended_by


class ForcedEnd:
    """End of this process some time after a signal, whatever its threads wait for.

    Args:
        seconds: seconds that it has to end by itself.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None

    def begin(self, number: int) -> None:
        """Begin the wait, at the first signal of several."""
        if self._timer is None:
            self._timer = threading.Timer(self._seconds, self._end, [number])
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """End the wait, unless the interpreter would wait for a thread that does not end."""
        if self._timer is None:
            return
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                thread.join(_THREADS_S)
                if thread.is_alive():
                    return
        self._timer.cancel()

    def _end(self, number: int) -> None:
        os.write(2, f"tuner: what it waits for did not end in {self._seconds:g} s\n".encode())
        os._exit(exit_code(number))


class EndingSignals:
    """Context in which `ENDING_SIGNALS` call a function of the signal's number.

    Acts in the main thread and does nothing in another. SIGHUP stays ignored where it was, which
    is how ``nohup`` starts a command. A forked child raises `Interrupted`.
    """

    def __init__(self, handle: Callable[[int], None]) -> None:
        self._handle = handle
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        owner = os.getpid()

        is_answering = False

        def answer(number: int, frame: FrameType | None) -> None:
            nonlocal is_answering
            if is_answering and number != signal.SIGINT:
                return  # answers to a flood would nest until the stack ends
            if os.getpid() != owner:
                raise Interrupted(number)
            is_answering = True
            try:
                if number == signal.SIGHUP:
                    _silence_closed_outputs()
                self._handle(number)
            finally:
                is_answering = False

        for number in ENDING_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, answer)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ignore_from_now_on(self) -> None:
        """Ignore SIGTERM and SIGHUP while a process that was interrupted shuts down.

        The interpreter restores the defaults before it is gone. One more signal would then cost
        the exit code.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            if self._previous.pop(number, None) is not None:
                signal.signal(number, signal.SIG_IGN)


class RaisesInterrupted(EndingSignals):
    """Context that `ENDING_SIGNALS` end by raising `Interrupted`.

    SIGTERM and SIGHUP raise once: they are often sent twice, and the second must not cut short the
    clean-up that the first began. Ctrl-C raises each time. If Python drops the exception, as in a
    ``__del__``, the signal is sent again.
    """

    def __init__(self) -> None:
        super().__init__(self._raise)
        self._first: int | None = None
        self._is_raised = False
        self._hook = sys.unraisablehook

    def __enter__(self) -> Self:
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._on_dropped
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        sys.unraisablehook = self._hook
        super().__exit__(*error)

    def _raise(self, number: int) -> None:
        if self._first is None:
            self._first = number
        if not self._is_raised or number == signal.SIGINT:
            self._is_raised = True
            raise Interrupted(self._first)

    def _on_dropped(self, dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Interrupted):
            self._hook(dropped)
            return
        self._is_raised = False
        # Not at once: this is still the place that drops exceptions.
        again = threading.Timer(_AGAIN_S, os.kill, [os.getpid(), dropped.exc_value.number])
        again.daemon = True
        again.start()


def _silence_closed_outputs() -> None:
    """Redirect output to the null device if its terminal or pipe was closed. A failed write would
    end the command before it stored its results.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # that the other side has gone is reported in any case
    for descriptor, events in poll.poll(0):
        if events & (select.POLLHUP | select.POLLERR):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def python_command(*arguments: str) -> list[str]:
    """Command line of this interpreter; every Python of this package is started by it.

    ``-P`` keeps the working folder out of the module path: a ``tuner/__init__.py`` or a
    ``json.py`` that lies there is not run. Goes with `python_environment`.
    """
    return [sys.executable, "-P", *arguments]


def python_environment() -> dict[str, str]:
    """Environment of a process that is to import this same package.

    If the package is not installed, as in a checkout, its folder comes first in
    ``PYTHONPATH``. An empty entry there means the working folder and is left out. A relative one
    is resolved here, because the process may have another working folder.
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [] if _is_installed() else [str(_PACKAGES)]
    path += [str(Path(entry).absolute()) for entry in entries if entry]
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {**variables, "PYTHONPATH": os.pathsep.join(path)} if path else variables


def _is_installed() -> bool:
    """True where an interpreter finds the package by itself."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    return _PACKAGES in {Path(folder).resolve() for folder in folders}


class ProcessGroup:
    """Command in a process group of its own, which ends with this process, however that ends. A
    forked child of this process neither keeps it alive nor ends it.

    Args:
        command: program and arguments.
        options: arguments of `subprocess.Popen`, other than `stdin` and `start_new_session`.

    Raises:
        OSError: when the shell that starts it cannot be started.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        theirs, ours = os.pipe()
        self._ours, self._owner = forks.Descriptor(ours), os.getpid()
        try:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                ["/bin/sh", "-c", _ENDS_WITH_ITS_STARTER, "tuner", *command],
                stdin=theirs,
                start_new_session=True,
                **options,
            )
        except OSError:
            self.release()
            raise
        finally:
            os.close(theirs)

    def release(self) -> None:
        """Close the pipe that keeps the group alive: what is left of it is killed."""
        self._ours.close()

    def end(self) -> None:
        """Kill what is left of the group, and wait for the command; once or more often."""
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.release()


@contextlib.contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Command that ends with this process, however that ends, with everything that it started.

    The context waits for the command. An exception in the context kills it at once.

    Args:
        command: program and arguments.
        options: as of `ProcessGroup`.

    Raises:
        OSError: as `ProcessGroup`.
    """
    group = ProcessGroup(command, **options)
    try:
        yield group.process
        # Wait without reaping: until then the group's id cannot come to mean another.
        if group.process.returncode is None:
            os.waitid(os.P_PID, group.process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        group.end()
        with group.process:  # closes its pipes
            pass


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
    """The compiler processes of one owner; `run` and `kill` from any thread.

    They also end with this process, however it ends. In a forked child of it the pool is empty.
    """

    _lock: threading.Lock

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        forks.add_lock(self)
        forks.in_child(self, ProcessPool._forget)
        self._groups: dict[int, ProcessGroup] = {}
        """Process groups by their leader."""
        self._folders: dict[int, Path] = {}
        """Working folder of each group."""
        self._killed = False
        self._killed_folders: set[Path] = set()

    def run(self, command: Sequence[str], folder: Path, nice: int = _NICE) -> Finished:
        """Run `command` in its own process group and wait for it.

        Its working folder, its temporary files and its log are in `folder`, so that whoever
        removes that removes everything.

        Raises:
            CompileError: when the program cannot be started.
        """
        log = folder / "log.txt"
        started = time.monotonic()
        with log.open("wb") as output:
            pid = self._start(command, folder, output.fileno(), nice)
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
                self._groups.pop(pid).release()
                del self._folders[pid]
                _, status, usage = os.wait4(pid, 0)
        return Finished(
            returncode=os.waitstatus_to_exitcode(status),
            cpu_s=usage.ru_utime + usage.ru_stime,
            wall_s=time.monotonic() - started,
            timed_out=expired.is_set(),
            log=log.read_text(encoding="utf-8", errors="replace"),
        )

    def _forget(self) -> None:
        self._groups.clear()
        self._folders.clear()

    def kill(self, folder: Path | None = None) -> None:
        """Kill every process group now and any that would still be started.

        Args:
            folder: only groups with this working folder; default: all.
        """
        with self._lock:
            if folder is None:
                self._killed = True
            else:
                self._killed_folders.add(folder)
            groups = [pid for pid in self._groups if folder in (None, self._folders[pid])]
        for pid in groups:
            self._kill_group(pid)

    def _start(self, command: Sequence[str], folder: Path, output: int, nice: int) -> int:
        if shutil.which(command[0]) is None:
            reason = errno.EACCES if Path(command[0]).exists() else errno.ENOENT
            raise CompileError(f"{command[0]} cannot be started: {os.strerror(reason)}")
        with self._lock:
            try:
                group = ProcessGroup(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={**python_environment(), "TMPDIR": str(folder)},
                )
            except OSError as exc:
                raise CompileError(f"{command[0]} cannot be started: {exc.strerror}") from exc
            process = group.process
            process.returncode = 0  # reaped by wait4 in `run`, not by Popen
            self._groups[process.pid], self._folders[process.pid] = group, folder
            killed = self._killed or folder in self._killed_folders
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PGRP, process.pid, nice)
        if killed:
            self._kill_group(process.pid)
        return process.pid

    def _kill_group(self, pid: int) -> None:
        with self._lock:
            if pid in self._groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
