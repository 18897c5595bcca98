"""Compiles the kernels, runs them in children that may hang or die, and gathers a report."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tuner.compile.artifacts import Artifact
from tuner.compile.compiler import Compiler
from tuner.errors import BenchmarkError, TunerError
from tuner.families import family
from tuner.families.base import Family, KernelSpec
from tuner.hardware import Gpu

from .binding import libraries
from .cases import Case
from .plan import Kernel, Trial, specs, trials
from .report import Finding, Report

TOP = Path(__file__).resolve().parents[3]
#: A child is killed when it says nothing for this long; importing torch comes first.
SILENCE_S = 45.0
START_S = 180.0
#: Children that may be lost to a hang or a crash before the rest is given up.
MAX_LOST = 4
#: Children side by side, fewer on few cores: most of a trial is the CPU's work of small launches.
CHILDREN = 8
#: Bytes of operands from which a case's trials are all in the first child: with its float64
#: reference the largest takes half of a GPU's memory.
LARGE_BYTES = 1 << 30
PROGRESS_S = 10.0
#: Python's arguments, before the plan's path.
CHILD = ("-m", "fused_attention_proof.child")

Progress = Callable[[str], None]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build(
    compiler: Compiler, wanted: Sequence[KernelSpec], progress: Progress = say
) -> tuple[dict[KernelSpec, Artifact], dict[KernelSpec, str]]:
    """Compile all at once; returns the artifacts, and the reason of each that has none."""
    started = time.monotonic()
    waiting = {future: spec for spec, future in compiler.submit(wanted)}
    built: dict[KernelSpec, Artifact] = {}
    failed: dict[KernelSpec, str] = {}
    for future in as_completed(waiting):
        try:
            built[waiting[future]] = future.result()
        except (TunerError, CancelledError) as exc:
            failed[waiting[future]] = str(exc) or type(exc).__name__
            progress(f"does not compile: {failed[waiting[future]]}")
        done = len(built) + len(failed)
        progress(f"compiled {done} of {len(waiting)}, {time.monotonic() - started:.0f} s")
    return built, failed


def prove(
    member: Family,
    gpu: Gpu,
    kernels: Sequence[Kernel],
    cases: Sequence[Case],
    compiler: Compiler,
    progress: Progress = say,
) -> Report:
    """Every case on every kernel of its combination.

    Raises:
        BenchmarkError: when a child cannot even start.
    """
    started = time.monotonic()
    wanted = trials(member, gpu, kernels, cases)
    built, failed = build(
        compiler, specs(member, [(t.case.problem, t.config) for t in wanted]), progress
    )
    results: dict[Trial, Finding] = {}
    for trial in wanted:
        for spec in member.kernels(trial.case.problem, trial.config).values():
            if spec in failed:
                results[trial] = Finding(faults=[f"does not compile: {failed[spec]}"])
    shares = divided([t for t in wanted if t not in results], min(CHILDREN, cores() // 2))
    runners = [_Runner(share, libraries(built), progress) for share in shares]
    with ThreadPoolExecutor(max(1, len(runners))) as threads:
        list(threads.map(_Runner.run, runners))
    environment: Mapping[str, Any] = {}
    for runner in runners:
        results |= runner.findings
        environment = runner.environment
    found = [(trial, results[trial]) for trial in wanted]
    return Report(kernels, built, found, environment, time.monotonic() - started)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def divided(wanted: Sequence[Trial], count: int) -> list[list[Trial]]:
    """Trials for each of up to `count` children, those of a case together; none of them is empty.

    Cases with operands of `LARGE_BYTES` or more are all in the first share. The others go to the
    share with the least to do, in order.
    """
    shares: list[list[Trial]] = [[] for _ in range(max(1, count))]
    by_case: dict[Case, list[Trial]] = {}
    for trial in wanted:
        by_case.setdefault(trial.case, []).append(trial)
    for case in [case for case in by_case if case.problem.bytes >= LARGE_BYTES]:
        shares[0] += by_case.pop(case)
    for mine in by_case.values():
        min(shares, key=lambda share: sum(map(_work, share))).extend(mine)
    return [share for share in shares if share]


def _work(trial: Trial) -> float:
    """Work of a trial: a launch's share of the CPU, and passes over the memory of large ones."""
    return 1 + 2 * trial.case.problem.bytes / LARGE_BYTES


class _Runner:
    """Children, one after another, until every trial has a finding."""

    def __init__(
        self, wanted: Sequence[Trial], known: Mapping[str, Any], progress: Progress
    ) -> None:
        self.trials, self.libraries, self.progress = list(wanted), known, progress
        self.findings: dict[Trial, Finding] = {}
        self.environment: dict[str, Any] = {}
        self._doing: tuple[str, Trial] | None = None
        self._said = 0.0

    def run(self) -> None:
        self._started = time.monotonic()
        for _ in range(MAX_LOST):
            left = [trial for trial in self.trials if trial not in self.findings]
            if not left:
                return
            with tempfile.TemporaryDirectory() as folder:
                end = self._child(left, Path(folder))
            if end:
                self._lost(end)
        for trial in self.trials:
            reason = f"not run: {MAX_LOST} processes were lost before it"
            self.findings.setdefault(trial, Finding(faults=[reason]))

    def _child(self, left: Sequence[Trial], folder: Path) -> str:
        """Run one child on what is left; returns how it was lost, or nothing."""
        cases = list(dict.fromkeys(trial.case for trial in left))
        configs = list(dict.fromkeys(trial.config for trial in left))
        case_at = {case: index for index, case in enumerate(cases)}
        config_at = {config: index for index, config in enumerate(configs)}
        plan = {
            "cases": [case.to_json() for case in cases],
            "configs": [config.to_json() for config in configs],
            "libraries": self.libraries,
            "trials": [
                {"index": index, "case": case_at[trial.case], "config": config_at[trial.config]}
                for index, trial in enumerate(left)
            ],
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        command = [sys.executable, *CHILD, str(folder / "plan.json")]
        log = folder / "log.txt"
        ready, self._doing = False, None
        with started(command, log) as (process, lines):
            while True:
                try:
                    line = lines.get(timeout=SILENCE_S if ready else START_S)
                except queue.Empty:
                    return f"no sign of life for {SILENCE_S if ready else START_S:.0f} s"
                if line is None:
                    break
                event = read_event(line)
                ready = ready or event["event"] == "ready"
                self._hear(event, left)
                if event["event"] == "done":
                    return ""
            code = process.wait()
        said = log.read_text(errors="replace").strip().splitlines() or ["nothing in its log"]
        if not ready and not self.findings:
            raise BenchmarkError(f"the child did not start (exit {code}): {said[-1]}")
        return f"its process ended with {code}: {said[-1]}"

    def _hear(self, event: Mapping[str, Any], left: Sequence[Trial]) -> None:
        kind = event["event"]
        if kind == "ready":
            self.environment = event["environment"]
        elif kind in ("case", "trial"):
            self._doing = (kind, left[event["trial"]])
        elif kind == "found":
            trial = left[event["trial"]]
            self.findings[trial] = Finding(**event["finding"])
            now = time.monotonic()
            if now - self._said > PROGRESS_S or self.findings[trial].faults:
                self._said = now
                faulty = sum(bool(found.faults) for found in self.findings.values())
                self.progress(
                    f"checked {len(self.findings)} of {len(self.trials)}, {faulty} with faults, "
                    f"{now - self._started:.0f} s, {trial.case.label()}"
                    + "".join(f"; {fault}" for fault in self.findings[trial].faults)
                )

    def _lost(self, end: str) -> None:
        """What was at work is to blame: a case's inputs, or a kernel, which is not run again."""
        if self._doing is None:
            return
        kind, guilty = self._doing
        self.progress(f"{guilty.case.label()}, {kind}: {end}")
        if kind == "trial":
            found = self.findings.get(guilty, Finding())  # a finding may precede a lost context
            self.findings[guilty] = Finding(
                found.frobenius, found.row, found.lse, found.peer, 0, [*found.faults, end]
            )
        for trial in self.trials:
            if kind == "trial" and _kernels(trial) == _kernels(guilty):
                reason = f"not run: the same kernel was lost on {guilty.case.label()}"
            elif kind == "case" and trial.case == guilty.case:
                reason = f"inputs, reference or peer: {end}"
            else:
                continue
            self.findings.setdefault(trial, Finding(faults=[reason]))


def _kernels(trial: Trial) -> list[KernelSpec]:
    """Equal for trials that launch the same compiled kernels."""
    return specs(family(trial.config.family), [(trial.case.problem, trial.config)])


def read_event(line: str) -> dict[str, Any]:
    """A line of a child; a library's own output is an event without a name."""
    with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict) and "event" in event:
            return event
    return {"event": ""}


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path
) -> Iterator[tuple[subprocess.Popen[str], queue.Queue[str | None]]]:
    """A process group of its own and its lines; None is their end. Killed on the way out."""
    paths = [str(TOP / "tests" / "gpu"), str(TOP), os.environ.get("PYTHONPATH", "")]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=TOP,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            start_new_session=True,
        )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(timeout=10)
        if process.stdout is not None:
            process.stdout.close()
