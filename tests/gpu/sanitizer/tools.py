"""Runs compute-sanitizer's tools and reads what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tuner.base.processes import ProcessPool, python_command
from tuner.compile.artifacts import Artifact
from tuner.errors import ConfigError
from tuner.families.base import KernelSpec

from .binding import libraries
from .targets import Target

TOOLS = ("memcheck", "racecheck", "synccheck")
#: Bytes that memcheck keeps free behind each allocation.
PADDING = 4096
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Run:
    """One tool on one kernel."""

    tool: str
    target: Target
    halved: str = ""
    """A control: the operand whose memory is half as large as it should be, which must be seen."""


@dataclass(frozen=True)
class Seen:
    """What a tool said of a run."""

    tool: str
    kernel: str
    status: str
    """clean, errors, timeout, failed or not run; of a control: seen or not seen."""
    errors: int
    seconds: float
    log: str = ""

    @property
    def passed(self) -> bool:
        return self.status in ("clean", "seen")


def judge(log: str, is_control: bool) -> tuple[str, int]:
    """The status and the number of errors of a finished log; the last summary counts."""
    summaries = _SUMMARY.findall(log)
    if not summaries:
        return "failed", 0
    errors = int(summaries[-1])
    if is_control:
        return ("seen" if errors else "not seen"), errors
    return ("errors" if errors else "clean"), errors


def find_sanitizer() -> str:
    """Where compute-sanitizer is.

    Raises:
        ConfigError: when it is nowhere.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for candidate in ("compute-sanitizer", f"{home}/bin/compute-sanitizer"):
        if found := shutil.which(candidate):
            return found
    raise ConfigError(
        "compute-sanitizer is neither on PATH nor in $CUDA_HOME/bin: it comes with the CUDA "
        "toolkit, and with pip install nvidia-cuda-sanitizer-api"
    )


class Sanitizer:
    """Runs tools, several at a time, each with a time-out and none after the budget is spent."""

    def __init__(
        self,
        program: str,
        built: Mapping[KernelSpec, Artifact],
        timeout_s: float,
        budget_s: float,
        further: Sequence[str] = (),
    ) -> None:
        self._further = further  # options of the tool
        self._program, self._libraries = program, libraries(built)
        self._pool = ProcessPool(timeout_s)
        self._end = time.monotonic() + budget_s
        self._timer = threading.Timer(budget_s, self._pool.kill)
        self._timer.daemon = True

    def run(
        self, runs: Sequence[Run], jobs: int, noted: Callable[[Seen], None] = lambda seen: None
    ) -> list[Seen]:
        """Findings of each run, in order; `noted` is called with each as it ends."""
        lock = threading.Lock()

        def one(run: Run) -> Seen:
            seen = self._one(run)
            with lock:
                noted(seen)
            return seen

        self._timer.start()
        try:
            with ThreadPoolExecutor(jobs) as threads:
                return list(threads.map(one, runs))
        finally:
            self._timer.cancel()
            self._pool.kill()

    def _one(self, run: Run) -> Seen:
        name = run.target.label()
        name = f"{run.halved} half as large, {name}" if run.halved else name
        if time.monotonic() > self._end:
            return Seen(run.tool, name, "not run", 0, 0.0, "the budget was spent")
        plan = {
            "libraries": self._libraries,
            "launches": [
                {"problem": p.to_json(), "config": c.to_json(), "halved": run.halved}
                for p, c in run.target.launches
            ],
        }
        command = [self._program, f"--tool={run.tool}", "--launch-timeout=60"]
        command += ["--show-backtrace=no", *self._further]
        if run.tool == "memcheck":  # what a call returns, its caller checks
            command += [f"--padding={PADDING}", "--report-api-errors=no"]
        command += python_command("-m", "sanitizer.watched")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            path.write_text(json.dumps(plan))
            done = self._pool.run([*command, str(path)], Path(folder))
        status, errors = judge(done.log, bool(run.halved))
        if done.timed_out or done.returncode == -signal.SIGKILL:  # its own time, or everyone's
            status = "timeout"
        elif status == "clean" and done.returncode:
            status = "failed"
        seen = Seen(
            run.tool, name, status, errors, done.wall_s, done.log if status != "clean" else ""
        )
        say(f"{seen.tool} {seen.status} {seen.seconds:.0f} s {seen.kernel}")
        return seen


def table(seen: Sequence[Seen]) -> str:
    """What is not clean, then a line a tool."""
    lines = [f"{s.tool} {s.status} {s.errors} {s.kernel}" for s in seen if s.status != "clean"]
    for tool in dict.fromkeys(s.tool for s in seen):
        of_tool = [s for s in seen if s.tool == tool]
        counts = {s.status: sum(o.status == s.status for o in of_tool) for s in of_tool}
        words = ", ".join(f"{count} {status}" for status, count in counts.items())
        lines.append(f"{tool}: {words}; {sum(s.seconds for s in of_tool):.0f} s of processes")
    return "\n".join(lines)
