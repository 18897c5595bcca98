"""``scripts/sanitize``: the proof's kernels on tiny problems under compute-sanitizer."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from tuner.artifacts import Artifact, ArtifactCache
from tuner.compiler import Compiler
from tuner.config import Config
from tuner.device import detect
from tuner.errors import ConfigError, TunerError
from tuner.families import family
from tuner.families.base import Family, KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem
from tuner.processes import ProcessPool
from tuner.toolchain import find_toolchain

from .binding import libraries
from .cases import drawn
from .parent import build, say
from .plan import MOST_SETTINGS, Kernel, everything, specs, trials

TOOLS = ("memcheck", "racecheck", "synccheck")
#: Ends in the middle of tiles of queries and keys; heads in groups that packings up to 8 divide,
#: one of 16; twice more tiles than multiprocessors, so that a persistent block takes a second one.
TINY = (
    "B=1,H=2,SQ=200,SKV=330",
    "B=1,H=16,HKV=1,SQ=45,SKV=1100,layout=bshd",
    "B=9,H=128,HKV=16,SQ=6,SKV=130,layout=bshd",
    "B=1,H=136,SQ=70,SKV=130",
)
#: Bytes that memcheck keeps free behind each allocation.
PADDING = 4096
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


@dataclass(frozen=True)
class Run:
    """One tool on one kernel."""

    tool: str
    kernel: Kernel
    launches: tuple[tuple[AttentionProblem, Config], ...]
    halved: bool = False
    """A control: the output's memory is half as large as it should be, which must be seen."""


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


def tiny(member: Family, gpu: Gpu, kernel: Kernel) -> tuple[tuple[AttentionProblem, Config], ...]:
    """The tiny problems with the variants of `kernel` that compute them."""
    head_dim, causal, dtype = kernel.combination
    found, draw = [], random.Random(describe(kernel, kernel.members[0]))
    for index, text in enumerate(TINY):
        width = head_dim - 8 * (index % 2)  # the instance's own, and padded
        problem = AttentionProblem.parse(f"{text},D={width},causal={causal},dtype={dtype}")
        legal = [config for config in kernel.members if not member.violations(problem, config, gpu)]
        found += [
            (problem, config) for config in draw.sample(legal, min(len(legal), MOST_SETTINGS))
        ]
    return tuple(found)


def judge(log: str, halved: bool) -> tuple[str, int]:
    """The status and the number of errors of a finished log; the last summary counts."""
    summaries = _SUMMARY.findall(log)
    if not summaries:
        return "failed", 0
    errors = int(summaries[-1])
    if halved:
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
    ) -> None:
        self._program, self._libraries = program, libraries(built)
        self._pool = ProcessPool(timeout_s)
        self._end = time.monotonic() + budget_s
        self._timer = threading.Timer(budget_s, self._pool.kill)
        self._timer.daemon = True

    def run(self, runs: Sequence[Run], jobs: int) -> list[Seen]:
        self._timer.start()
        try:
            with ThreadPoolExecutor(jobs) as threads:
                return list(threads.map(self._one, runs))
        finally:
            self._timer.cancel()
            self._pool.kill()

    def _one(self, run: Run) -> Seen:
        name = describe(run.kernel, run.launches[0][1])
        name = f"output half as large, {name}" if run.halved else name
        if time.monotonic() > self._end:
            return Seen(run.tool, name, "not run", 0, 0.0, "the budget was spent")
        plan = {
            "libraries": self._libraries,
            "launches": [
                {"problem": p.to_json(), "config": c.to_json(), "halved": run.halved}
                for p, c in run.launches
            ],
        }
        command = [self._program, f"--tool={run.tool}", "--launch-timeout=60"]
        command += ["--show-backtrace=no", "--print-limit=20"]
        if run.tool == "memcheck":  # what a call returns, its caller checks
            command += [f"--padding={PADDING}", "--report-api-errors=no"]
        command += [sys.executable, "-m", "fused_attention_proof.tiny"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            path.write_text(json.dumps(plan))
            done = self._pool.run([*command, str(path)], Path(folder))
        status, errors = judge(done.log, run.halved)
        if done.timed_out or done.returncode == -signal.SIGKILL:  # its own time, or everyone's
            status = "timeout"
        elif status == "clean" and done.returncode:
            status = "failed"
        seen = Seen(
            run.tool, name, status, errors, done.wall_s, done.log if status != "clean" else ""
        )
        say(f"{seen.tool} {seen.status} {seen.seconds:.0f} s {seen.kernel}")
        return seen


def describe(kernel: Kernel, config: Config) -> str:
    head_dim, causal, dtype = kernel.combination
    words = " ".join(f"{name}={value}" for name, value in sorted(config.params.items()))
    return f"D={head_dim} {'causal' if causal else 'full'} {dtype} {words}"


def table(seen: Sequence[Seen]) -> str:
    """What is not clean, then a line a tool."""
    lines = [f"{s.tool} {s.status} {s.errors} {s.kernel}" for s in seen if s.status != "clean"]
    for tool in dict.fromkeys(s.tool for s in seen):
        of_tool = [s for s in seen if s.tool == tool]
        counts = {s.status: sum(o.status == s.status for o in of_tool) for s in of_tool}
        words = ", ".join(f"{count} {status}" for status, count in counts.items())
        lines.append(f"{tool}: {words}; {sum(s.seconds for s in of_tool):.0f} s of processes")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/sanitize",
        description="compute-sanitizer over the fused attention kernels that the GPU tests prove",
    )
    parser.add_argument("--list", action="store_true", help="print the kernels and end")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile what this and tests/gpu/test_fused_attention_gpu.py need, and end; no GPU",
    )
    parser.add_argument("--tools", default=",".join(TOOLS), help="default: %(default)s")
    parser.add_argument("--configs", type=Path, help="JSON file of further configs")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time (%(default)s)")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one (%(default)s)")
    parser.add_argument("--budget-s", type=float, default=330.0, help="of all (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to write everything that was seen")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        raise ConfigError(f"--tools {sorted(unknown)[0]} is unknown (allowed: {', '.join(TOOLS)})")
    member, gpu = family("fused_attention"), detect() or DEFAULT_GPU
    cases = drawn()
    kernels = everything(member, gpu, cases, options.configs)
    if options.list:
        for kernel in kernels:
            print(kernel.origin, describe(kernel, kernel.members[0]))
        return 0
    launches = {kernel: tiny(member, gpu, kernel) for kernel in kernels}
    wanted = [pair for found in launches.values() for pair in found]
    if options.compile_only:
        wanted += [(t.case.problem, t.config) for t in trials(member, gpu, kernels, cases)]
    with Compiler(find_toolchain(), ArtifactCache()) as compiler:
        built, failed = build(compiler, specs(member, wanted))
    if options.compile_only:
        print(f"{len(built)} kernels compiled, {len(failed)} do not compile")
        return 1 if failed else 0
    for kernel, found in launches.items():
        launches[kernel] = tuple(
            pair for pair in found if not failed.keys() & specs(member, [pair])
        )
    program = find_sanitizer()
    runs = [Run(t, k, found) for (k, found), t in product(launches.items(), tools) if found]
    if "memcheck" in tools:
        runs.insert(0, Run("memcheck", runs[0].kernel, runs[0].launches[:1], halved=True))
    sanitizer = Sanitizer(program, built, options.timeout_s, options.budget_s)
    seen = sanitizer.run(runs, options.jobs)
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in seen], indent=1) + "\n")
    print(table(seen))
    for reason in failed.values():
        print(f"does not compile: {reason}")
    return 0 if not failed and all(s.passed for s in seen) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TunerError as exc:
        print(f"scripts/sanitize: {exc}", file=sys.stderr)
        sys.exit(2)
