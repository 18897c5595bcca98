"""Background compilation of kernels that the runtime misses: ``TUNER_BUILD_ON_MISS=1``.

Off by default: serving compiles nothing. Switched on, ``tuner build`` compiles the missing kernel
of a measured entry (imported, shipped or pruned). It is a process of its own that outlives this
one; a machine runs one at a time. Servers that miss the same kernel, as forked ones do, share one
build: the others wait for it in the background. The calling thread never waits, and nothing is
tuned.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Collection

from tuner import settings
from tuner.base import document
from tuner.compile.artifacts import ArtifactCache
from tuner.errors import TunerError
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem

_log = logging.getLogger("tuner.runtime")

_LOG_CHARACTERS = 500

_Wanted = tuple[Problem, str]
"""Problem and GPU name, the arguments of ``tuner build``."""
_Queue = queue.SimpleQueue[tuple[_Wanted, tuple[str, ...]]]
"""Problems to build, and the keys of their missing artifacts."""


class Builder:
    """Builds the kernels of one problem after the other, each at most once. A process has one
    builder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked: set[_Wanted] = set()
        self._queue: _Queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def request(self, missing: Measurement) -> bool:
        """Start building the kernels of an entry, and return at once. The caller looks them up
        again later.

        Args:
            missing: measurement whose artifacts are missing.

        Returns:
            True if this call started the build. False if building is switched off, the measurement
            may not be served, or the problem was requested before.
        """
        if not settings.build_on_miss() or missing.provenance is not Provenance.MEASURED:
            return False
        wanted = (missing.problem, missing.gpu.name)
        with self._lock:
            if wanted in self._asked:
                return False
            self._asked.add(wanted)
            self._queue.put((wanted, tuple(missing.artifacts.values())))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, daemon=True, name="tuner-build-on-miss"
                )
                self._thread.start()
        return True

    def _work(self) -> None:
        while True:
            (problem, gpu), keys = self._queue.get()
            label = f"{problem.op} {problem.label()}"
            _log.info("building the kernels of %s in the background", label)
            try:
                fault = _build_once(problem, gpu, keys)
            except (TunerError, *document.FAULTS) as exc:
                fault = str(exc)
            if fault:
                _log.warning("the kernels of %s were not built: %s", label, fault)


def _build_once(problem: Problem, gpu: str, keys: Collection[str]) -> str:
    """As `build`, unless another process has built the artifacts; waits for one that is at it.

    Raises:
        StoreError: when the cache cannot be written.
    """
    cache = ArtifactCache()
    name = hashlib.sha256(f"{problem.key} {gpu}".encode()).hexdigest()[:32]
    with cache.lock(f"build_{name}"):
        if keys and all(cache.find(key) for key in keys):
            return ""
        return build(problem, gpu)


def build(problem: Problem, gpu: str) -> str:
    """Run ``tuner build`` for a problem and wait. Returns its error text, empty on success."""
    from tuner.base.processes import python_command, python_environment  # not in a first call

    command = python_command("-m", "tuner", "build", "--op", problem.op)
    command += ["--shape", problem.label(), "--gpu", gpu]
    # An own log file and session: neither this process's end nor its Ctrl-C stops the build.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=python_environment(),
                start_new_session=True,
                check=False,
            )
        except OSError as exc:
            return f"{command[0]} cannot be started: {exc.strerror}"
        said.seek(0)
        text = said.read().strip()[-_LOG_CHARACTERS:]
        return "" if done.returncode == 0 else text or f"it ended with {done.returncode}"


_builder = Builder()


def request(missing: Measurement) -> bool:
    """`Builder.request` of this process's builder."""
    return _builder.request(missing)


def _after_fork() -> None:
    """Reset after a fork: the child has no thread, and may need its parent's problems."""
    global _builder
    _builder = Builder()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
