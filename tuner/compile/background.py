"""Background compilation of kernels that the runtime misses; ``TUNER_BUILD_ON_MISS=0`` ends it.

A miss is a measured entry whose kernels are not here (imported, shipped or pruned), or a kernel of
a portfolio whose proof ships. ``tuner build`` compiles it, at a low priority and on half of the
cores. It is a process of its own that outlives this one; a machine runs one at a time.

Servers that miss the same kernel, as forked ones do, share one build: the others wait for it in the
background. The calling thread never waits, and nothing is tuned.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tuner import settings
from tuner.base import document
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import CompileError, TunerError
from tuner.problem import Problem, listing

_log = logging.getLogger("tuner.runtime")

GATHER_S = 1.0
"""Time in which further misses join the same build."""
MAX_ASKED = 4096
"""Problems that a process asks for, at most, so that a server of ever new shapes stays small."""
_LOG_CHARACTERS = 500


class Miss(NamedTuple):
    """A problem whose kernel is missing."""

    problem: Problem
    gpu: str
    """Name of the GPU."""
    is_wanted: Callable[[], bool]
    """False where the kernel is here by now, or must not be built; called in the background."""


class Builder:
    """Builds the kernels of missed problems, each at most once. A process has one builder."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: set[tuple[Problem, str]] = set()
        self._queue: queue.SimpleQueue[Miss] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_off = False
        """True without a compiler."""

    def request(self, miss: Miss) -> bool:
        """Start building the kernels of a problem, and return at once. The caller looks them up
        again later.

        Returns:
            True if this call queued the problem. False if building is switched off, there is no
            compiler, or the problem was requested before.
        """
        if not settings.build_on_miss():
            return False
        with self._lock:
            is_full = self._is_off or len(self._asked) >= MAX_ASKED
            if is_full or (miss.problem, miss.gpu) in self._asked:
                return False
            self._asked.add((miss.problem, miss.gpu))
            self._queue.put(miss)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, daemon=True, name="tuner-build-on-miss"
                )
                self._thread.start()
        return True

    def _work(self) -> None:
        reported = set[str]()
        while True:
            misses = [self._queue.get(), *self._further()]
            for gpu in dict.fromkeys(miss.gpu for miss in misses):
                try:
                    fault = _build_once([miss for miss in misses if miss.gpu == gpu], gpu)
                except CompileError as exc:
                    _log.info("missing kernels are not built here: %s", exc)
                    self._is_off = True
                    return
                except (TunerError, *document.FAULTS) as exc:
                    fault = str(exc)
                if fault and fault not in reported:
                    reported.add(fault)
                    _log.warning("missing kernels were not built: %s", fault)

    def _further(self) -> Iterator[Miss]:
        """Misses of the next `GATHER_S`."""
        end = time.monotonic() + GATHER_S
        while (left_s := end - time.monotonic()) > 0:
            try:
                yield self._queue.get(timeout=left_s)
            except queue.Empty:
                return


def _build_once(misses: Sequence[Miss], gpu: str) -> str:
    """As `build`, of what no other process has built; waits for one that is at it.

    Raises:
        CompileError: when there is no compiler.
        StoreError: when the cache cannot be written.
    """
    from tuner.compile.toolchain import find_toolchain  # not in a first call

    with ArtifactCache().lock("build_on_miss"):
        problems = [miss.problem for miss in misses if miss.is_wanted()]
        if not problems:
            return ""
        find_toolchain()
        first = f"{problems[0].op} {problems[0].label()}"
        _log.info("building the kernels of %d calls, the first %s", len(problems), first)
        return build(problems, gpu)


def build(problems: Sequence[Problem], gpu: str, *, in_background: bool = True) -> str:
    """Run ``tuner build`` for problems and wait. Returns its error text, empty on success.

    Args:
        problems: problems whose kernels are missing; one that stands there several times counts so
            often.
        gpu: name of the GPU.
        in_background: at a low priority and without output; else as from a shell.
    """
    from tuner.base.processes import python_command, python_environment  # not in a first call

    options = ["--background"] if in_background else []
    with (
        tempfile.TemporaryDirectory(prefix="tuner-missing-") as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
    ):
        listed = Path(folder) / "problems.json"
        listed.write_text(listing(problems), encoding="utf-8")
        command = python_command("-m", "tuner", "build", "--problems", str(listed), "--gpu", gpu)
        try:
            # An own session: neither this process's end nor its Ctrl-C stops the build.
            done = subprocess.run(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if in_background else None,
                env=python_environment(),
                start_new_session=in_background,
                check=False,
            )
        except OSError as exc:
            return f"{command[0]} cannot be started: {exc.strerror}"
        log.seek(0)
        text = log.read().strip()[-_LOG_CHARACTERS:]
        return "" if done.returncode == 0 else text or f"it ended with {done.returncode}"


_builder = Builder()


def request(problem: Problem, gpu: str, is_wanted: Callable[[], bool]) -> bool:
    """`Builder.request` of this process's builder; arguments as of `Miss`."""
    return _builder.request(Miss(problem, gpu, is_wanted))


def _after_fork() -> None:
    """Reset after a fork: the child has no thread, and may need its parent's problems."""
    global _builder
    _builder = Builder()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
