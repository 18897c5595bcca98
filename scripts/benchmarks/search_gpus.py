"""A job on several GPUs against the same job on one: trials a minute, and agreement of the times.

The order of the candidates is fixed, so that both measure the same ones. Each job runs twice, and
the second run counts: the first one compiles missing kernels, starts the workers and lets the
vendors' libraries plan. Stores are temporary.
"""

from __future__ import annotations

import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Row
from benchmarks.rows import markdown
from tuner.bench.suites import SUITES
from tuner.errors import BenchmarkError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.problem import Problem
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.search.family_search import FamilySearch
from tuner.search.study import effort
from tuner.store import open_store
from tuner.tuning.job import Job, JobOptions, JobResult
from tuner.tuning.outcome import Outcome
from tuner.tuning.sweep import SweepOptions

FAMILY, TRIALS = "fused_attention", 16
PROBLEMS: tuple[Problem, ...] = tuple(SUITES["acceptance"].problems)[:12]


@dataclass(frozen=True)
class GpuJob:
    """The job on all GPUs of ``--device``, or on the first."""

    is_lone: bool
    trials: int = TRIALS
    """Groups of a problem."""
    problems: tuple[Problem, ...] = PROBLEMS
    group = "job"

    @property
    def label(self) -> str:
        """Number of GPUs."""
        return "one GPU" if self.is_lone else "all GPUs"

    @property
    def options(self) -> JobOptions:
        """Options of both jobs; they alone determine the order of the candidates."""
        return JobOptions(SweepOptions(families=(FAMILY,), trials=self.trials, sampler="cost"))


CASES = GpuJob(is_lone=False), GpuJob(is_lone=True)
SMOKE = GpuJob(is_lone=True, trials=1, problems=PROBLEMS[:1])


def kernels(job: GpuJob) -> list[KernelSpec]:
    """Kernels of both jobs, without duplicates."""
    member, options = family(FAMILY), job.options.sweep
    specs: dict[KernelSpec, None] = {}
    for problem in job.problems:
        search = FamilySearch(
            member,
            problem,
            DEFAULT_GPU,
            member.space(problem, DEFAULT_GPU),
            seeds=effort(options.effort).seeds,
            sampler=options.sampler or "",
            seed=options.seed,
        )
        for key in search.open[: options.trials]:
            specs |= dict.fromkeys(member.kernels(problem, search.groups[key][0]).values())
    return list(specs)


def compile_all(_: Namespace) -> None:
    """Compile the jobs' kernels. One that nvcc refuses is left to the job.

    Raises:
        CompileError: when the compiler is missing.
    """
    with Runners(Machine(), _note) as runners:
        futures = [future for _, future in runners.compiler().submit(kernels(CASES[0]))]
        print(f"{sum(one.exception() is None for one in futures)} kernels are compiled")


def measure(job: GpuJob, args: Namespace) -> Row:
    """Pace of the second of two equal runs.

    Raises:
        BenchmarkError: when a problem failed, or fewer than two GPUs are here.
    """
    with Runners(Machine(parse_devices(args.device)), _note) as runners:
        devices = runners.devices
    if not job.is_lone and len(devices) < 2:
        raise BenchmarkError(f"two GPUs of a kind are needed, {len(devices)} found")
    used = devices[:1] if job.is_lone else devices
    with Runners(Machine(tuple(used)), _note) as runners:
        _swept(job, runners)
        return {"devices": len(used), **_swept(job, runners)}


def _swept(job: GpuJob, runners: Runners) -> dict[str, Any]:
    """Run the job into a store of its own; its trials are groups of candidates, and baselines."""
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/store.sqlite") as store:
        started = time.monotonic()
        result: JobResult = Job(list(job.problems), runners, store, job.options).run()
        wall_s = time.monotonic() - started
    for problem, error in result.failed:
        raise BenchmarkError(f"{problem.label()}: {error}")
    trials = sum(outcome.kernels + len(_vendors(outcome)) for outcome in result.outcomes)
    pace = {"trials": trials, "wall_s": round(wall_s, 3), "trials_a_minute": 60 * trials / wall_s}
    return {"figures": pace, "final_us": {o.problem.label(): _finals(o) for o in result.outcomes}}


def _vendors(outcome: Outcome) -> set[str]:
    vendors = outcome.entry.vendors if outcome.entry else {}
    return {*outcome.unavailable, *vendors}


def _finals(outcome: Outcome) -> dict[str, float]:
    """Times of the final pass, best first, by family and digest."""
    return {
        f"{m.config.family} {m.config.digest}": m.latency_us
        for m in outcome.ranking
        if m.latency_us is not None
    }


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def line(row: Row) -> str:
    """The pace."""
    pace = row["figures"]
    return f"{row['case']} ({row['devices']}): {pace['trials_a_minute']:.1f} trials a minute"


def table(rows: Sequence[Row]) -> list[str]:
    """Several GPUs' pace over one's, and how far the times of the same candidates differ."""
    done = {row["case"]: row for row in rows if "figures" in row}
    paces = [("job", "GPUs", "trials", "seconds", "trials a minute")]
    for label, row in done.items():
        pace = row["figures"]
        cells = str(pace["trials"]), f"{pace['wall_s']:.0f}", f"{pace['trials_a_minute']:.1f}"
        paces.append((label, str(row["devices"]), *cells))
    if len(done) < len(CASES):
        return markdown(paces)
    every, lone = (done[case.label]["final_us"] for case in CASES)
    lines = [("problem", "winner", "its time over the lone GPU's", "worst of the same candidates")]
    for label, alone in lone.items():
        together = every.get(label, {})
        ratios = [together[name] / alone[name] for name in alone.keys() & together.keys()]
        winner = "same" if next(iter(alone), "") == next(iter(together), "") else "another"
        best = f"{min(together.values()) / min(alone.values()):.3f}" if together else ""
        worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=float("nan"))
        lines.append((label, winner, best, f"{worst:.3f}"))
    return [*markdown(paces), "", *markdown(lines)]
