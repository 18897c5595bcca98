"""Driver's side of `worker`: starts it, sends requests, kills it, and reports each candidate's
outcome.

A candidate may hang, corrupt the CUDA context or kill the process. In each case it gets a status,
and the others of its group are measured, in a new process if necessary.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from tuner.base.processes import python_command, python_environment
from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import Strides
from tuner.measure.request import CandidateOutcome
from tuner.measurement import Regime, Status
from tuner.problem import Problem

#: Longest silence of a worker beyond the time that it announced for a phase.
TIMEOUT_S = 20.0
#: Time-out of the start-up: imports and the CUDA context, on a machine that is busy compiling.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a worker's streams: the gate computes sampled chunks side by side, and some
machines set 1."""
START_TIMEOUT_S = 120.0
#: Time within which a killed process with a hung kernel leaves the GPU.
KILL_TIMEOUT_S = 60.0
#: Characters of the worker's output that are kept in a measurement's log.
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True)
class Ask:
    """Request for candidates of one problem."""

    problem: Problem
    regime: Regime
    mode: str
    """Mode of `WorkerRequest`."""
    seed: int
    reference: Artifact
    """Artifact of the gate's kernels."""
    candidates: Sequence[tuple[Config, Mapping[str, Artifact]]]
    rounds: int = 0
    max_workspace: int | None = None
    strides: Strides = field(default_factory=dict)
    """Strides as in `WorkerRequest`."""

    def to_json(self, indices: Sequence[int], careful: bool) -> dict[str, Any]:
        """JSON request for some of the candidates."""
        used = [self.reference]
        for index in indices:
            used += self.candidates[index][1].values()
        return {
            "problem": self.problem.to_json(),
            "regime": self.regime.key,
            "mode": self.mode,
            "seed": self.seed,
            "rounds": self.rounds,
            "careful": careful,
            "max_workspace": self.max_workspace,
            "strides": dict(self.strides),
            "reference": self.reference.key,
            "artifacts": {a.key: [str(a.library), a.sha256] for a in used},
            "candidates": [
                {
                    "index": index,
                    "config": self.candidates[index][0].to_json(),
                    "kernels": {name: a.key for name, a in self.candidates[index][1].items()},
                }
                for index in indices
            ],
        }


@dataclass(frozen=True)
class _Ending:
    """End of an attempt before every candidate had its result."""

    status: Status
    log: str
    culprit: int | None
    """Index of the candidate that was running; None if none was."""


class AnyWorker(Protocol):
    """Worker on one GPU: a process on this machine, or an actor on a cluster."""

    def renew(self) -> None:
        """Begin a request: clear an earlier interruption. Neither waits nor raises."""
        ...

    def measure(self, ask: Ask) -> list[CandidateOutcome]: ...

    def facts(self) -> dict[str, str]: ...

    def listing(self, problem: Problem, family: str, max_workspace: int | None) -> list[Config]: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class WorkerClient:
    """Owner of at most one worker process, which is started on first use. Only one thread may send
    requests at a time. `interrupt` may be called from another thread, and holds until `renew`.

    Args:
        device_index: CUDA device.
        family_modules: Python files with further families, for tests.
        timeout_s: longest silence beyond the time that a phase announces.
        start_timeout_s: seconds until the process must be ready.
        command: command to run instead of this interpreter's ``-m tuner.measure.worker``.
    """

    def __init__(
        self,
        device_index: int = 0,
        *,
        family_modules: Sequence[Path] = (),
        timeout_s: float = TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        command: Sequence[str] | None = None,
    ) -> None:
        self._arguments = ["--device", str(device_index)]
        for path in family_modules:
            self._arguments += ["--family-module", str(path)]
        self._command = list(command or python_command("-m", "tuner.measure.worker"))
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._process: _Process | None = None
        self._lock = threading.Lock()
        self._is_interrupted = False

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None while it is not running."""
        return None if self._process is None else self._process.pid

    def facts(self) -> dict[str, str]:
        """Versions of the vendor families' libraries.

        Raises:
            BenchmarkError: when the worker does not answer.
            concurrent.futures.CancelledError: after `interrupt`.
        """
        facts: dict[str, str] = {}
        ending = None
        for event in self._events({"mode": "environment"}):
            if isinstance(event, _Ending):
                ending = event
            elif event["event"] == "facts":
                facts = dict(event["facts"])
        if ending is not None:
            raise BenchmarkError(f"the worker failed: {ending.log}", status=ending.status)
        return facts

    def listing(self, problem: Problem, family: str, max_workspace: int | None) -> list[Config]:
        """`Family.listing` on the GPU; empty if the library or the worker fails.

        Raises:
            BenchmarkError: when no worker can be started.
            concurrent.futures.CancelledError: after `interrupt`.
        """
        request = {
            "mode": "listing",
            "problem": problem.to_json(),
            "family": family,
            "max_workspace": max_workspace,
        }
        configs: list[Config] = []
        for event in self._events(request):
            if not isinstance(event, _Ending) and event["event"] == "listing":
                configs = [Config.from_json(config) for config in event["configs"]]
        return configs

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        """Measure candidates. Returns one outcome each, in their order.

        Raises:
            BenchmarkError: when no worker can be started, or the gate itself fails.
            concurrent.futures.CancelledError: after `interrupt`.
        """
        outcomes: dict[int, CandidateOutcome] = {}
        careful, blameless = False, 0
        while remaining := [i for i in range(len(ask.candidates)) if i not in outcomes]:
            ending = self._attempt(ask.to_json(remaining, careful), outcomes)
            if ending is None:
                continue
            if ending.culprit is not None:
                outcomes.setdefault(ending.culprit, CandidateOutcome(ending.status, log=ending.log))
                continue
            # No candidate was running: retry in careful mode; if that fails, all candidates fail.
            careful, blameless = True, blameless + 1
            if blameless > 1:
                for index in range(len(ask.candidates)):
                    outcomes.setdefault(index, CandidateOutcome(ending.status, log=ending.log))
        return [outcomes[index] for index in range(len(ask.candidates))]

    def renew(self) -> None:
        with self._lock:
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Kill the worker from another thread. Requests before `renew` end with `CancelledError`.
        The next request starts a new worker.
        """
        with self._lock:
            self._is_interrupted = True
            if self._process is not None and self._process.alive():
                self._process.signal()

    def close(self) -> None:
        """Kill the worker and its children."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _start(self) -> _Process:
        with self._lock:
            if self._is_interrupted:
                raise CancelledError
            self._process = _Process(self._command + self._arguments)
            return self._process

    def _attempt(
        self, request: Mapping[str, Any], outcomes: dict[int, CandidateOutcome]
    ) -> _Ending | None:
        """Send one request. Adds finished outcomes to `outcomes`."""
        indices = [candidate["index"] for candidate in request["candidates"]]
        for event in self._events(request):
            if isinstance(event, _Ending):
                return event
            if event["event"] == "result":
                outcomes[event["index"]] = CandidateOutcome.from_json(event["outcome"])
                if event["fatal"]:
                    self.close()
                    return None
            elif event["event"] == "failed":
                if event["status"] != Status.OUT_OF_MEMORY:
                    raise BenchmarkError(f"the numerics gate failed: {event['log']}")
                for index in indices:
                    outcomes.setdefault(
                        index, CandidateOutcome(Status.OUT_OF_MEMORY, log=event["log"])
                    )
                return None
        missing = [index for index in indices if index not in outcomes]
        if missing:
            self.close()
            return _Ending(Status.WORKER_DIED, "the worker gave no result", None)
        return None

    def _events(self, request: Mapping[str, Any]) -> Iterator[Any]:
        """Send a request and yield its events. The last may be an `_Ending`."""
        process = self._process
        if process is None or not process.alive():
            self.close()
            process = self._start()
            self._await_ready(process)
        culprit, what, allowed = None, "starting the request", 0.0
        try:
            process.send(request)
            while True:
                event = process.receive(self._timeout_s + allowed)
                if event["event"] == "phase":
                    culprit, what, allowed = event["index"], event["what"], event["allow_s"]
                    continue
                if event["event"] == "result":
                    culprit, what, allowed = None, "between candidates", 0.0
                if event["event"] != "done":
                    yield event
                if event["event"] in ("done", "failed"):
                    return
        except TimeoutError:
            text = f"no sign of life for {self._timeout_s + allowed:.0f} s during: {what}"
            ending = _Ending(Status.TIMEOUT, _with_tail(text, process.tail()), culprit)
        except EOFError:
            process.kill()
            if self._is_interrupted:
                self.close()
                raise CancelledError from None
            text = f"the worker {process.death()} during: {what}"
            ending = _Ending(Status.WORKER_DIED, _with_tail(text, process.tail()), culprit)
        self.close()
        yield ending

    def _await_ready(self, process: _Process) -> None:
        try:
            event = process.receive(self._start_timeout_s)
        except TimeoutError:
            self.close()
            raise BenchmarkError(
                f"the worker did not start within {self._start_timeout_s:.0f} s",
                status=Status.TIMEOUT,
            ) from None
        except EOFError:
            process.kill()
            if self._is_interrupted:
                self.close()
                raise CancelledError from None
            text = _with_tail(f"the worker {process.death()} while starting", process.tail())
            self.close()
            raise BenchmarkError(text, status=Status.WORKER_DIED) from None
        if event["event"] != "ready":
            self.close()
            raise BenchmarkError(f"the worker cannot start: {event['log']}", status=event["status"])


def _with_tail(text: str, tail: str) -> str:
    return f"{text}\n{tail}" if tail else text


class _Process:
    """Worker process with its two pipes and its log."""

    def __init__(self, command: Sequence[str]) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        # The log is unlinked at once, and read through its descriptor, also after the process is
        # dead.
        self._log: IO[bytes] = tempfile.TemporaryFile()
        try:
            self._popen = subprocess.Popen(
                [*command, "--requests", str(requests), "--answers", str(answers)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(requests, answers),
                start_new_session=True,
                env={**python_environment(), **QUEUES},
            )
        except OSError as exc:
            self._close_pipes()
            self._log.close()
            raise BenchmarkError(f"the worker cannot be started: {exc}") from exc
        finally:
            os.close(requests)
            os.close(answers)
        self._pending = b""
        self._signalled = self._killed = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    def alive(self) -> bool:
        """True if it can take requests; False once it was sent a signal."""
        return not self._signalled and self._popen.poll() is None

    def send(self, request: Mapping[str, Any]) -> None:
        """Write a request.

        Raises:
            EOFError: when the process is gone.
        """
        data = (json.dumps(request) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._requests, data) :]
        except BrokenPipeError:
            raise EOFError from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the next event.

        Raises:
            TimeoutError: when none arrives in time.
            EOFError: when the process is gone.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise TimeoutError
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                raise EOFError
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        return event

    def signal(self) -> None:
        """Kill the process group. Readers of its answers see the end of the pipe."""
        self._signalled = True
        # The group outlives its leader if the worker has started children.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process group and wait for its end.

        Raises:
            BenchmarkError: when it does not end because the driver holds it.
        """
        if self._killed:
            return
        self._killed = True
        self.signal()
        self._close_pipes()
        try:
            self._popen.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(
                f"the worker (pid {self._popen.pid}) was killed {KILL_TIMEOUT_S:.0f} s ago and is "
                "still there: the GPU driver holds it"
            ) from None

    def close(self) -> None:
        """Kill it and close its log."""
        try:
            self.kill()
        finally:
            self._log.close()

    def death(self) -> str:
        """Description of how the process ended."""
        code = self._popen.returncode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}"

    def tail(self) -> str:
        """Last part of its standard output and error."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()

    def _close_pipes(self) -> None:
        for descriptor in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                os.close(descriptor)
