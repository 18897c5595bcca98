"""A child process with a time limit for each of its answers: what hangs or dies costs one row."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Self

from benchmarks.gpu import need_gpu
from tuner.base.processes import python_environment


class Worker:
    """A child process that answers one index at a time, started anew after each that it lost.

    Args:
        command: reads indices, a line each, and answers each with a line of JSON.
        limit_s: seconds until an answer; then the child is killed, with all that it started.
        gpu: index of the only GPU that it sees; None: it sees this process's.
    """

    def __init__(self, command: Sequence[str], limit_s: float, gpu: str | None = None) -> None:
        self._command, self._limit_s = list(command), limit_s
        self._variables = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def ask(self, index: int, limit_s: float | None = None) -> dict[str, Any]:
        """The child's answer, or ``{"lost": reason}`` when it did not.

        Args:
            index: number of the case to measure.
            limit_s: seconds for this answer, if not the worker's.
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        try:
            line = self._asked(index, limit_s)
        except TimeoutError:
            return {"lost": f"no answer after {limit_s:g} s"}
        except OSError as exc:
            self.end()
            return {"lost": f"the worker ended: {exc}"}
        found: dict[str, Any] = json.loads(line)
        if "lost" in found:  # the device is of no use to this process any more
            self.end()
        return found

    def _asked(self, index: int, limit_s: float) -> bytes:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{index}\n".encode())
        process.stdin.flush()
        deadline, line = time.monotonic() + limit_s, b""
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.end()
                    raise TimeoutError
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise BrokenPipeError(f"code {process.wait()}")
                line += part
        return line

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**python_environment(), **self._variables},
                start_new_session=True,
                bufsize=0,
            )
        return self._process

    def end(self) -> None:
        """Kill the child, with all that it started; the next question starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def answer_indices(measure: Callable[[int], dict[str, Any]], needs_gpu: bool = True) -> int:
    """Be such a child: measure what the indices on standard input say.

    Answers alone go to the standard output that the process was started with; what others print
    goes to its errors. After an error it says ``lost`` and ends, since the device may be of no use
    any more. A crash prints the Python stack.

    Args:
        measure: makes the answer of an index.
        needs_gpu: False of a measurement without one; else its memory is given back after each.

    Raises:
        BenchmarkError: without a GPU that is needed.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from benchmarks.call_times import FAILURES, first_line

    if needs_gpu:
        need_gpu()
    for line in sys.stdin:
        faulthandler.disable()  # a library that was loaded since may have put a handler of its own
        faulthandler.enable(2)
        try:
            answer = measure(int(line))
            if needs_gpu:
                import torch

                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except FAILURES as exc:
            traceback.print_exc()
            answer = {"lost": first_line(exc)}
        print(json.dumps(answer), file=answers, flush=True)
        if "lost" in answer:
            return 1
    return 0
