"""Worker process that measures: ``python -m tuner.measure.worker``, started and killed by
`worker_client`.

Requests and answers are JSON lines over two separate pipes; standard output and error are the log.
The worker handles one request at a time. Answers are streamed, so that finished results survive a
later hang::

    {"event": "ready"}                                       once
    {"event": "phase", "index": 3 | null, "what": "...", "allow_s": 2.0}
    {"event": "result", "index": 3, "outcome": {...}, "fatal": false}
    {"event": "listing", "configs": [...], "reason": ""}     of a library's candidates
    {"event": "failed", "status": "...", "log": "..."}       the request, not a candidate
    {"event": "done"}

After a `fatal` result the process ends: its CUDA context is lost. It also ends if interleaved
finalists fail and the faulty one is not known. A repeated request in careful mode then identifies
it. When the request pipe closes, as after the driver was killed, the worker ends its whole process
group at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tuner.base import ranges
from tuner.base.processes import EndingSignals
from tuner.compile.loading import load
from tuner.errors import BenchmarkError, GateError, TunerError
from tuner.families import families, families_in
from tuner.families.base import LSE, SCRATCH, Family
from tuner.hardware import Gpu
from tuner.measure import device as device_module
from tuner.measure.bursts import Burst, Sets, count_sets, entrant
from tuner.measure.device import Device, Pool
from tuner.measure.gate import Examination, Gate
from tuner.measure.gate.chunks import LONG_REFERENCE_S
from tuner.measure.gate.inputs import is_reported, kinds_of, scale_of
from tuner.measure.gate.kernels import Guarded, guarded
from tuner.measure.gate.reference import reference_seconds
from tuner.measure.kernel_times import again_text, alone_us, described, device_us
from tuner.measure.log_sum_exp import lse_bytes
from tuner.measure.predecessor import predecessor
from tuner.measure.request import CandidateOutcome, RequestedCandidate, WorkerRequest
from tuner.measure.rounds import Timing
from tuner.measure.stopwatch import Stopwatch
from tuner.measure.subjects import WORKSPACE, CompiledSubject, Subject, VendorSubject, import_torch
from tuner.measure.tolerance import Verdict, too_fast
from tuner.measurement import Status
from tuner.problem import problem_from_json

#: Extra time over a launch for importing torch, loading cuDNN, choosing algorithms and compiling
#: (FlashAttention-4).
VENDOR_ALLOWANCE_S = 120.0
#: Extra time over a launch for a round of many finalists, some of them slow.
_ROUND_ALLOWANCE_S = 10.0

POSITIVE_LOSS = "positive_sums_off_{:.1e}"
"""Flag of e4m3 products whose sums stay in the accumulators: their relative error on all-positive
operands."""
TOGETHER_S = 1.0
"""Value of `reference_seconds` below which all kinds of inputs are checked before one wait. A wait
costs a time slice of each other process of the GPU: with six others, 5,000 waits took a minute."""
LSE_PROBE = "probe_lse"
PROBES = ("probe", LSE_PROBE)
"""Modes that check without timing."""

Emit = Callable[[Mapping[str, Any]], None]


@dataclass
class _Prepared:
    """A candidate ready to run: its subject and its own buffers."""

    index: int
    subject: Subject
    own: Sequence[Guarded]
    verdict: Verdict = field(default_factory=lambda: Verdict(Status.OK))
    doubts: tuple[str, ...] = ()
    """Errors that no limit judges, as flags of the measurement."""
    burst: Burst | None = None
    control: Burst | None = None

    @property
    def buffers(self) -> dict[str, int]:
        return {guarded.name: guarded.pointer for guarded in self.own}

    @property
    def workspace_bytes(self) -> int:
        subject = self.subject
        return subject.scratch_bytes + subject.workspace_bytes + subject.temporary_bytes

    def close(self) -> None:
        for burst in filter(None, (self.burst, self.control)):
            burst.close()
        self.subject.close()

    def outcome(
        self, verdict: Verdict, timing: Timing | None = None, **more: Any
    ) -> CandidateOutcome:
        """Outcome of the candidate; it has a latency only if the verdict is OK."""
        timed = timing is not None and verdict.status is Status.OK
        return CandidateOutcome(
            status=verdict.status,
            latency_us=timing.median_us if timing and timed else None,
            std_us=timing.std_us if timing and timed else None,
            rounds=timing.rounds if timing and timed else 0,
            flags=(*(timing.flags if timing and timed else ()), *self.doubts),
            error=verdict.error,
            workspace_bytes=self.workspace_bytes,
            log=verdict.log,
            **more,
        )


class Worker:
    """Answers requests on one device."""

    def __init__(self, device: Device, gpu: Gpu, members: Mapping[str, Family], emit: Emit) -> None:
        self._device, self._gpu, self._members, self._emit = device, gpu, members, emit
        self._gate: Gate | None = None

    def answer(self, request: Mapping[str, Any]) -> bool:
        """Handle one request to its last event. Returns False if the process has to end."""
        try:
            if request["mode"] == "environment":
                self._emit({"event": "facts", "facts": self._facts()})
                alive = True
            elif request["mode"] == "listing":
                self._emit({"event": "listing", **self._listing(request)})
                alive = self._device.healthy()
            else:
                alive = self._measure(WorkerRequest.from_json(request))
        except BenchmarkError as exc:
            self._emit({"event": "failed", "status": str(exc.status), "log": str(exc)})
            return self._device.healthy()
        if alive:
            self._emit({"event": "done"})
        return alive

    def _facts(self) -> dict[str, str]:
        """Facts of the vendor families about this machine. Imports torch."""
        self._phase(None, "versions of the vendors' libraries", VENDOR_ALLOWANCE_S)
        facts: dict[str, str] = {}
        for member in self._members.values():
            if member.is_vendor:
                facts |= member.environment()
        return facts

    def _listing(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """A library's candidates for a problem, or the reason why it has none."""
        family = self._members[request["family"]]
        self._phase(None, f"candidates of {family.name}", VENDOR_ALLOWANCE_S)
        problem = problem_from_json(request["problem"])
        try:
            import_torch(self._device)
            configs = family.listing(problem, request["max_workspace"])
        except Exception as exc:  # worker's loop: a library may raise anything
            return {"configs": [], "reason": str(exc) or type(exc).__name__}
        return {"configs": [config.to_json() for config in configs], "reason": ""}

    def _phase(self, index: int | None, what: str, allow_s: float = 0.0) -> None:
        self._emit({"event": "phase", "index": index, "what": what, "allow_s": round(allow_s, 3)})

    def _measure(self, job: WorkerRequest) -> bool:
        self._phase(None, f"buffers of {job.problem.label()}")
        if self._gate is None:
            self._gate = Gate(self._device, load(job.reference))
        is_long = reference_seconds(job.problem) > LONG_REFERENCE_S
        is_sampled = is_long and job.mode == "final"
        self._gate.open(job.problem, job.seed, job.strides, is_sampled=is_sampled)
        if job.mode == "final":
            return self._measure_together(job, self._gate)
        with _Rotation(self, job, self._gate) as rotation:
            for candidate in job.candidates:
                with Pool(self._gate.memory) as pool:
                    work = partial(self._one, job, rotation, pool, candidate)
                    with ranges.named(f"{job.mode}: {_name(candidate)}"):
                        if not self._guarded(candidate.index, work):
                            return False
        return True

    def _guarded(self, index: int, work: Callable[[], CandidateOutcome | None]) -> bool:
        """Turn the end of `work`, a failure included, into a result. Returns False when the context
        is lost.

        Raises:
            GateError: when the gate itself fails, which fails the request.
        """
        try:
            outcome = work()
        except GateError:
            raise
        except Exception as exc:  # worker's loop: a candidate may raise anything
            outcome = self._explain(exc)
        healthy = self._device.healthy()
        if outcome is not None or not healthy:
            outcome = outcome or CandidateOutcome(
                Status.ILLEGAL_ACCESS, log="the CUDA context is lost"
            )
            self._result(index, outcome, fatal=not healthy)
        return healthy

    def _result(self, index: int, outcome: CandidateOutcome, fatal: bool = False) -> None:
        self._emit({"event": "result", "index": index, "outcome": asdict(outcome), "fatal": fatal})

    def _explain(self, exc: Exception) -> CandidateOutcome:
        """Status of a failure. An error of the device takes precedence over the caller's: any later
        call of the driver may have met it first.
        """
        try:
            self._device.synchronize()
        except BenchmarkError as sticky:
            log = "\n".join(dict.fromkeys((str(exc), str(sticky))))
            return CandidateOutcome(Status(sticky.status), log=log)
        if isinstance(exc, BenchmarkError):
            return CandidateOutcome(Status(exc.status), log=str(exc))
        if type(exc).__name__ == "OutOfMemoryError":  # torch's
            return CandidateOutcome(Status.OUT_OF_MEMORY, log=str(exc))
        if isinstance(exc, TunerError):
            return CandidateOutcome(Status.LAUNCH_ERROR, log=str(exc))
        return CandidateOutcome(Status.LAUNCH_ERROR, log=traceback.format_exc())

    def _one(
        self, job: WorkerRequest, rotation: _Rotation, pool: Pool, candidate: RequestedCandidate
    ) -> CandidateOutcome:
        """Check one candidate and time it in a quick pass."""
        prepared = self._prepare(job, pool, candidate)
        stopwatch = Stopwatch(self._device, job.regime)
        try:
            if job.mode == "kernels":
                return self._profiled(job, rotation, stopwatch, prepared)
            self._check(job, prepared)
            if prepared.verdict.status is not Status.OK or job.mode in PROBES:
                return prepared.outcome(prepared.verdict)
            prepared.burst = self._burst(job, rotation, stopwatch, prepared)
            timing, clocks = stopwatch.quick(prepared.burst)
            verdict = self._recheck(job, prepared, timing)
            return prepared.outcome(verdict, timing, clocks=clocks)
        finally:
            prepared.close()
            stopwatch.close()

    def _profiled(
        self, job: WorkerRequest, rotation: _Rotation, stopwatch: Stopwatch, prepared: _Prepared
    ) -> CandidateOutcome:
        """Duration of a call's kernels, by the profiler."""
        prepared.burst = self._burst(job, rotation, stopwatch, prepared)
        self._phase(prepared.index, "profiling", VENDOR_ALLOWANCE_S)
        timing = Timing(device_us(self._device, prepared.burst), 0.0, 1)
        return prepared.outcome(prepared.verdict, timing)

    def _prepare(self, job: WorkerRequest, pool: Pool, candidate: RequestedCandidate) -> _Prepared:
        index, config = candidate.index, candidate.config
        family = self._members.get(config.family)
        if family is None:
            raise BenchmarkError(f"the worker has no family '{config.family}'")
        subject: Subject
        if family.is_vendor:
            self._phase(index, "loading the vendor's library", VENDOR_ALLOWANCE_S)
            subject = VendorSubject(self._device, family, job.problem, config)
        else:
            self._phase(index, "loading")
            kernels = {name: load(artifact) for name, artifact in candidate.artifacts.items()}
            scale = scale_of(job.problem)
            subject = CompiledSubject(
                self._device, family, job.problem, config, kernels, scale, job.strides
            )
        needed = subject.scratch_bytes + subject.workspace_bytes
        if job.max_workspace is not None and needed > job.max_workspace:
            raise BenchmarkError(
                f"{needed} bytes of workspace are needed, {job.max_workspace} are allowed",
                status=Status.OUT_OF_MEMORY,
            )
        sizes = {SCRATCH: subject.scratch_bytes, WORKSPACE: subject.workspace_bytes}
        if job.mode == LSE_PROBE:
            sizes[LSE] = lse_bytes(job.problem)
        return _Prepared(index, subject, list(guarded(pool, sizes.items()).values()))

    def _burst(
        self, job: WorkerRequest, rotation: _Rotation, stopwatch: Stopwatch, prepared: _Prepared
    ) -> Burst:
        """Burst of a candidate, ready to be timed."""
        vendor = isinstance(prepared.subject, VendorSubject)
        self._phase(prepared.index, "timing", VENDOR_ALLOWANCE_S if vendor else 0.0)
        scale = scale_of(job.problem)
        entered = entrant(prepared.subject, rotation.sets(), prepared.buffers, scale)
        return stopwatch.prepare(entered)

    def _opened(self) -> Gate:
        if self._gate is None:
            raise BenchmarkError("the worker has no numerics gate yet")
        return self._gate

    def _check(self, job: WorkerRequest, prepared: _Prepared) -> None:
        """Run the candidate on every kind of inputs. Keeps the worst error, or the first fault."""
        worst, vendor = 0.0, isinstance(prepared.subject, VendorSubject)
        kinds = kinds_of(job.problem, is_vendor=vendor)
        is_short = reference_seconds(job.problem) < TOGETHER_S
        for group in [kinds] if is_short else [(kind,) for kind in kinds]:
            for kind, verdict in self._verdicts(job, prepared, group):
                if verdict.status is not Status.OK:
                    prepared.verdict = verdict
                    return
                if is_reported(job.problem, kind):
                    prepared.doubts = (POSITIVE_LOSS.format(verdict.error or 0.0),)
                else:
                    worst = max(worst, verdict.error or 0.0)
        prepared.verdict = Verdict(Status.OK, worst)

    def _verdicts(
        self, job: WorkerRequest, prepared: _Prepared, kinds: Sequence[str]
    ) -> Iterator[tuple[str, Verdict]]:
        """Run the candidate on some kinds of inputs, and wait once. Where a reference is not
        finite, which the candidate may have overwritten, run it again on each kind alone.
        """
        gate = self._opened()
        examinations = [self._run(job, prepared, kind) for kind in kinds]
        gate.collect()
        if len(kinds) > 1 and not all(one.is_sound for one in examinations):
            for kind in kinds:
                yield from self._verdicts(job, prepared, (kind,))
            return
        yield from zip(kinds, map(gate.judge, examinations), strict=True)

    def _run(self, job: WorkerRequest, prepared: _Prepared, kind: str) -> Examination:
        """Run the candidate on one kind of inputs."""
        gate, index = self._opened(), prepared.index
        vendor = isinstance(prepared.subject, VendorSubject)
        lse = next((guarded for guarded in prepared.own if guarded.name == LSE), None)
        allowed_s = reference_seconds(job.problem)
        self._phase(index, f"reference, {kind}", allowed_s)
        gate.load(kind, with_lse=lse is not None)
        if allowed_s >= TOGETHER_S:  # the allowance ends with the phase
            gate.collect()
        self._phase(index, f"check, {kind}", VENDOR_ALLOWANCE_S if vendor else 0.0)
        scale = scale_of(job.problem, kind)
        buffers = {**gate.pointers, **prepared.buffers}
        call = prepared.subject.bind(buffers, scale, deliver=True)
        gate.arm(prepared.own)
        call()
        return gate.watch(prepared.own, lse)

    def _recheck(self, job: WorkerRequest, prepared: _Prepared, timing: Timing) -> Verdict:
        """Check the time against the chip's limit, and the result again after the timed burst."""
        if reason := too_fast(job.problem, self._gpu, timing.median_us):
            return Verdict(Status.TOO_FAST, prepared.verdict.error, reason)
        if prepared.burst is None or isinstance(prepared.subject, VendorSubject):
            return prepared.verdict  # a vendor's output stays in its own memory
        if job.regime.behind == "gemm":
            return prepared.verdict  # its predecessor wrote other inputs
        gate = self._opened()
        self._phase(prepared.index, "check after timing")
        gate.arm(prepared.own)
        prepared.burst.enqueue()
        verdict = gate.examine(prepared.own)
        if verdict.status is Status.OK:
            return prepared.verdict
        return Verdict(verdict.status, verdict.error, f"when launched repeatedly, {verdict.log}")

    def _measure_together(self, job: WorkerRequest, gate: Gate) -> bool:
        """Check all finalists, then time those that pass, interleaved."""
        ready: list[_Prepared] = []
        stopwatch = Stopwatch(self._device, job.regime)
        with (
            Pool(gate.memory) as pool,
            _Rotation(self, job, gate) as rotation,
            ExitStack() as closing,
        ):
            closing.callback(stopwatch.close)

            def enter(candidate: RequestedCandidate) -> CandidateOutcome | None:
                prepared = self._prepare(job, pool, candidate)
                closing.callback(prepared.close)
                self._check(job, prepared)
                if prepared.verdict.status is not Status.OK:
                    return prepared.outcome(prepared.verdict)
                prepared.burst = self._burst(job, rotation, stopwatch, prepared)
                ready.append(prepared)
                return None

            def entered(candidate: RequestedCandidate) -> bool:
                with ranges.named(f"check: {_name(candidate)}"):
                    return self._guarded(candidate.index, partial(enter, candidate))

            alive = all(map(entered, job.candidates)) and (
                not ready or self._interleave(job, gate, rotation, ready, stopwatch)
            )
            if not alive:
                closing.pop_all()  # a lost context cannot close anything; the process ends
        return alive

    def _interleave(
        self,
        job: WorkerRequest,
        gate: Gate,
        rotation: _Rotation,
        ready: Sequence[_Prepared],
        stopwatch: Stopwatch,
    ) -> bool:
        culprit: int | None = None

        def progress(which: int) -> None:
            nonlocal culprit
            # The control is the first finalist, a second time.
            culprit = ready[which % len(ready)].index if which >= 0 else None
            self._phase(culprit, "interleaved timing", _ROUND_ALLOWANCE_S)

        def conclude(prepared: _Prepared, timing: Timing) -> CandidateOutcome:
            verdict = self._recheck(job, prepared, timing)
            if verdict.status is Status.OK and isinstance(prepared.subject, CompiledSubject):
                scale = scale_of(job.problem)
                self._phase(prepared.index, "timing its kernels one by one")
                alone = alone_us(
                    prepared.subject, rotation.sets(), prepared.buffers, scale, stopwatch
                )
                verdict = replace(verdict, log=described(alone, timing.median_us))
            if prepared is ready[0] and verdict.status is Status.OK:
                lines = [again_text(control.median_us), verdict.log]
                verdict = replace(verdict, log="\n".join(filter(None, lines)))
            return prepared.outcome(verdict, timing, clocks=clocks)

        gate.load("random")
        bursts = [prepared.burst for prepared in ready if prepared.burst is not None]
        culprit = ready[0].index
        try:
            # The control: difference of two times of one kernel.
            ready[0].control = self._burst(job, rotation, stopwatch, ready[0])
            bursts.append(ready[0].control)
            progress(-1)  # from here on a fault may be any finalist's
            with ranges.named(f"interleaved timing of {len(ready)}"):
                (*timings, control), clocks = stopwatch.final(
                    bursts, job.rounds, progress, careful=job.careful
                )
        except Exception as exc:  # as in the worker's loop, for the subject whose turn it was
            outcome = self._explain(exc)
            if culprit is None:
                sys.stderr.write(f"{outcome.log}\n")
            else:
                self._result(culprit, outcome, fatal=True)
            return False
        return all(
            self._guarded(prepared.index, partial(conclude, prepared, timing))
            for prepared, timing in zip(ready, timings, strict=True)
        )


class _Rotation:
    """Sets of operands of a request, made when the first candidate is timed."""

    def __init__(self, worker: Worker, job: WorkerRequest, gate: Gate) -> None:
        self._worker, self._job, self._gate = worker, job, gate
        self._sets: Sets | None = None

    def sets(self) -> Sets:
        if self._sets is None:
            device, problem = self._worker._device, self._job.problem
            count = count_sets(problem, self._worker._gpu, self._job.regime, device.free_bytes())
            self._gate.load("random")
            behind = partial(predecessor, self._job.regime, device, self._gate, problem)
            self._sets = Sets(device, problem, self._gate.pointers, count, behind)
        return self._sets

    def __enter__(self) -> _Rotation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sets is not None:
            self._sets.close()


def _name(candidate: RequestedCandidate) -> str:
    return f"{candidate.config.family} {candidate.config.digest[:6]}"


def read_requests(descriptor: int) -> Iterator[Mapping[str, Any]]:
    """Requests from a pipe.

    A thread reads the pipe from now on: when the pipe closes, the process ends.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with os.fdopen(descriptor, encoding="utf-8") as pipe:
            for line in pipe:
                lines.put(line)
        # At once and with its children: a hung kernel prevents an orderly end.
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(0)

    threading.Thread(target=read, daemon=True, name="requests").start()
    return (json.loads(line) for line in iter(lines.get, None))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the pipe of requests closes or the CUDA context is lost.

    Signals are ignored, so that only the driver ends the worker. A signal to every process of a
    service must not look like a candidate that killed the worker.
    """
    parser = argparse.ArgumentParser(prog="python -m tuner.measure.worker")
    parser.add_argument("--requests", type=int, required=True, help="file descriptor to read")
    parser.add_argument("--answers", type=int, required=True, help="file descriptor to write")
    parser.add_argument("--device", type=int, default=0, help="CUDA device")
    parser.add_argument(
        "--family-module", type=Path, action="append", default=[], help="more families"
    )
    options = parser.parse_args(argv)
    with EndingSignals(lambda number: None):
        return _serve(options)


def _serve(options: argparse.Namespace) -> int:
    faulthandler.enable()
    requests = read_requests(options.requests)

    def emit(event: Mapping[str, Any]) -> None:
        data = (json.dumps(event) + "\n").encode()
        while data:
            data = data[os.write(options.answers, data) :]

    try:
        gpu = device_module.detect(options.device)
        if gpu is None:
            raise BenchmarkError(f"CUDA device {options.device} was not found")
        members = dict(families())
        for path in options.family_module:
            members |= families_in(path)
        worker = Worker(Device(options.device), gpu, members, emit)
    except TunerError as exc:
        emit({"event": "failed", "status": Status.UNAVAILABLE, "log": str(exc)})
        return 1
    emit({"event": "ready"})
    for request in requests:
        if not worker.answer(request):
            return 0
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # After a lost context the libraries' clean-up can hang or abort.
    os._exit(code)
