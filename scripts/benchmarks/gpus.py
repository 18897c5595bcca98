"""A job on several GPUs against the same job on one: trials a minute, and agreement of the times.

``scripts/bench gpus`` sweeps twelve problems of the acceptance suite on all GPUs, then on the first
one. The order of the candidates is fixed, so that both runs measure the same ones. Each job runs
twice, and the second run counts. The first one compiles missing kernels, starts the workers and
lets the vendors' libraries plan. Stores are temporary. ``--compile-only`` fills the artifact cache
ahead of time, also without a GPU.

With ``--compiled-only`` the candidates are those whose kernels are compiled, the portfolio's among
them.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.bench.suites import SUITES
from tuner.cli import Parser
from tuner.errors import BenchmarkError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import Problem
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.search.family_search import FamilySearch
from tuner.search.study import effort
from tuner.store import open_store
from tuner.tuning.job import (
    Job,
    JobOptions,
    JobResult,
    read_problems,
)
from tuner.tuning.outcome import Outcome
from tuner.tuning.sweep import SweepOptions

PROBLEMS = 12
FAMILY = "fused_attention"


def options_of(trials: int, compiled_only: bool = False) -> JobOptions:
    """Options of both jobs; they alone determine the order of the candidates."""
    return JobOptions(
        SweepOptions(families=(FAMILY,), trials=trials, sampler="cost", compiled_only=compiled_only)
    )


def kernels(problems: Sequence[Problem], options: SweepOptions) -> list[KernelSpec]:
    """Kernels of both jobs, without duplicates."""
    member, chosen = family(FAMILY), effort(options.effort)
    found: dict[KernelSpec, None] = {}
    for problem in problems:
        space = member.space(problem, DEFAULT_GPU)
        search = FamilySearch(
            member,
            problem,
            DEFAULT_GPU,
            space,
            seeds=chosen.seeds,
            sampler=options.sampler or "",
            seed=options.seed,
        )
        for key in search.open[: options.trials]:
            found |= dict.fromkeys(member.kernels(problem, search.groups[key][0]).values())
    return list(found)


def compile_all(specs: Sequence[KernelSpec], jobs: int | None) -> int:
    """Have kernels compiled; returns how many there are. One that nvcc refuses is left to the job.

    Raises:
        CompileError: when the compiler is missing.
    """
    with Runners(Machine(jobs=jobs), _note) as runners:
        futures = [future for _, future in runners.compiler().submit(list(specs))]
        return sum(future.exception() is None for future in futures)


def timed(
    devices: Sequence[int], jobs: int | None, problems: Sequence[Problem], options: JobOptions
) -> dict[str, Any]:
    """The pace of the second of two equal jobs on some GPUs.

    Raises:
        BenchmarkError: when a problem of them failed.
    """
    with Runners(Machine(tuple(devices), jobs), _note) as runners:
        swept(problems, runners, options)
        found = swept(problems, runners, options)
    _note(f"{len(devices)} GPUs: {found['trials_per_minute']} trials a minute")
    return found


def swept(problems: Sequence[Problem], runners: Runners, options: JobOptions) -> dict[str, Any]:
    """Run a job into a store of its own; its pace.

    Raises:
        BenchmarkError: when a problem of it failed.
    """
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/store.sqlite") as store:
        started = time.monotonic()
        result = Job(problems, runners, store, options).run()
        wall_s = time.monotonic() - started
    for problem, error in result.failed:
        raise BenchmarkError(f"{problem.label()}: {error}")
    return pace(result, wall_s)


def pace(result: JobResult, wall_s: float) -> dict[str, Any]:
    """Trials are groups of candidates, as the search counts them, and each baseline."""
    trials = sum(outcome.kernels + len(_vendors(outcome)) for outcome in result.outcomes)
    return {
        "trials": trials,
        "wall_s": round(wall_s, 3),
        "trials_per_minute": round(60 * trials / wall_s, 2),
        "final_us": {outcome.problem.label(): _finals(outcome) for outcome in result.outcomes},
    }


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


def compared(one: dict[str, Any], several: dict[str, Any]) -> dict[str, Any]:
    """Several GPUs' pace over one's, and how far the times of the same candidates differ."""
    differences = {}
    for label, alone in one["final_us"].items():
        together = several["final_us"].get(label, {})
        shared = alone.keys() & together.keys()
        differences[label] = {
            "same_winner": next(iter(alone), "") == next(iter(together), ""),
            "winner_over_lone": round(min(together.values()) / min(alone.values()), 4),
            "worst_over_lone": max(
                (round(together[name] / alone[name], 4) for name in shared),
                key=lambda ratio: abs(ratio - 1),
                default=None,
            ),
        }
    ratio = several["trials_per_minute"] / one["trials_per_minute"]
    return {"pace_over_one": round(ratio, 3), "problems": differences}


def main(argv: Sequence[str]) -> int:
    """Time both jobs.

    Raises:
        BenchmarkError: when there are no two GPUs of a kind, or a problem fails.
    """
    parser = Parser(prog="scripts/bench gpus", description=__doc__)
    parser.add_argument("--device", default="all", metavar="N,...", help="as 0,1,2,3 (default all)")
    parser.add_argument("--problems", type=Path, metavar="FILE", help="in place of the suite's")
    parser.add_argument("--trials", type=int, default=16, help="groups a problem (default 16)")
    parser.add_argument("--jobs", type=int, default=None, help="nvcc processes at a time")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--compile-only", action="store_true", help="no GPU is needed for that")
    ways.add_argument("--compiled-only", action="store_true", help="compile nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    suite = list(SUITES["acceptance"].problems)[:PROBLEMS]
    problems = read_problems(args.problems) if args.problems else suite
    options = options_of(args.trials, args.compiled_only)
    if args.compile_only:
        print(f"{compile_all(kernels(problems, options.sweep), args.jobs)} kernels are compiled")
        return 0
    with Runners(Machine(parse_devices(args.device)), _note) as runners:
        devices, gpu = runners.devices, runners.gpu
    if gpu is None or len(devices) < 2:
        raise BenchmarkError(f"two GPUs of a kind are needed, {len(devices)} found")
    several = timed(devices, args.jobs, problems, options)
    one = timed(devices[:1], args.jobs, problems, options)
    found = document(gpu, devices, one, several)
    print(text(found))
    if args.json is not None:
        write_json(args.json, found)
    return 0


def document(
    gpu: Gpu, devices: Sequence[int], one: dict[str, Any], several: dict[str, Any]
) -> dict[str, Any]:
    """All that was seen."""
    both = {"one": one, "several": several, **compared(one, several)}
    return {"gpu": asdict(gpu), "devices": list(devices), **both}


def text(found: dict[str, Any]) -> str:
    """The paces, then a line a problem."""
    lines = [
        f"{len(found['devices'])} of {found['gpu']['name']}: "
        f"{found['several']['trials_per_minute']:.1f} trials a minute, one: "
        f"{found['one']['trials_per_minute']:.1f}, ratio {found['pace_over_one']:.2f}"
    ]
    for label, seen in found["problems"].items():
        winner = "the same winner" if seen["same_winner"] else "another winner"
        lines.append(
            f"  {label}: {winner}, its time {seen['winner_over_lone']:.3f} of the lone GPU's, "
            f"worst of the same candidates {seen['worst_over_lone'] or float('nan'):.3f}"
        )
    return "\n".join(lines)


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
