"""Agreement of repeated sweeps of one problem: their winners, timed in one pass.

``scripts/bench repeats --shape S=1024,D=64`` sweeps with several seeds, each into an empty store.
Compiled kernels are kept. Then all own winners are timed in one interleaved final pass, which shows
the distance of the worst from the best.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.errors import BenchmarkError
from tuner.measurement import Measurement
from tuner.problem import PROBLEMS, Problem
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.store import open_store
from tuner.tuning.job import Job, JobOptions
from tuner.tuning.outcome import Outcome
from tuner.tuning.sweep import SweepOptions

TIMES = 10
ROUNDS = 40
"""Rounds of the pass that compares the winners."""


def swept(problem: Problem, runners: Runners, options: JobOptions) -> Outcome:
    """One sweep into an empty store.

    Raises:
        BenchmarkError: when it failed, or found no own kernel.
    """
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/store.sqlite") as store:
        result = Job([problem], runners, store, options).run()
    for _, error in result.failed:
        raise BenchmarkError(f"{problem.label()}: {error}")
    if result.interrupted:
        raise KeyboardInterrupt
    (outcome,) = result.outcomes
    if outcome.entry is None or outcome.entry.best_own is None:
        raise BenchmarkError(f"{problem.label()}: no own kernel passed")
    return outcome


def own_winner(outcome: Outcome) -> Measurement:
    """The best own kernel of a sweep's final pass."""
    assert outcome.entry is not None and outcome.entry.best_own is not None
    return outcome.entry.best_own


def compared(
    problem: Problem, runner: Runner, outcomes: Sequence[Outcome], rounds: int = ROUNDS
) -> dict[str, Any]:
    """The sweeps' own winners in one interleaved pass, and each sweep's over the best of them.

    Raises:
        BenchmarkError: when a winner fails that passed before.
    """
    winners = list(dict.fromkeys(own_winner(outcome).config for outcome in outcomes))
    times: dict[str, float] = {}
    for measured in runner.retime(problem, winners, rounds):
        if not measured.ok or measured.latency_us is None:
            raise BenchmarkError(f"{measured.config.digest} failed: {measured.log}")
        times[measured.config.digest] = measured.latency_us
    own = [own_winner(outcome) for outcome in outcomes]
    over_best = [round(times[m.config.digest] / min(times.values()), 4) for m in own]
    sweeps = [
        {
            "winner": m.config.digest,
            "own_us": m.latency_us,
            "over_best": over,
            "kernels": outcome.kernels,
            "elapsed_s": round(outcome.elapsed_s, 1),
        }
        for outcome, m, over in zip(outcomes, own, over_best, strict=True)
    ]
    return {
        "problem": problem.to_json(),
        "gpu": asdict(outcomes[0].gpu),
        "regime": str(outcomes[0].regime),
        "environment": dict(outcomes[0].environment.facts),
        "rounds": rounds,
        "winners": [{**config.to_json(), "us": times[config.digest]} for config in winners],
        "sweeps": sweeps,
        "worst_over_best": max(over_best),
    }


def text(found: dict[str, Any]) -> str:
    """A line a sweep, then what they come to."""
    lines = [
        f"{number}: {sweep['winner'][:6]} {sweep['own_us']:.2f} us, {sweep['over_best']:.4f} of "
        f"the best winner, {sweep['kernels']} sets of kernels in {sweep['elapsed_s']:.0f} s"
        for number, sweep in enumerate(found["sweeps"], 1)
    ]
    return "\n".join(
        [
            *lines,
            f"{len(lines)} sweeps, {len(found['winners'])} winners, the worst "
            f"{found['worst_over_best']:.4f} of the best in one pass of {found['rounds']} rounds",
        ]
    )


def main(argv: Sequence[str]) -> int:
    """Sweep, compare.

    Raises:
        ConfigError: when the shape or the device is wrong.
        BenchmarkError: when there is no GPU, or a sweep fails.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench repeats", description=__doc__)
    parser.add_argument("--shape", required=True, help="as S=1024,D=64")
    parser.add_argument("--op", default="attention", choices=sorted(PROBLEMS))
    parser.add_argument("--times", type=int, default=TIMES, help=f"sweeps (default {TIMES})")
    parser.add_argument("--trials", type=int, default=None, help="groups a sweep, at most")
    parser.add_argument("--family", action="append", default=[], metavar="NAME")
    parser.add_argument("--compiled-only", action="store_true", help="compile nothing")
    parser.add_argument("--device", default="0", metavar="N")
    parser.add_argument("--jobs", type=int, default=None, help="nvcc processes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_place(args.json)
    if args.times < 1:
        parser.error(f"--times {args.times} is below 1")
    problem = PROBLEMS[args.op].parse(args.shape)
    sweep = SweepOptions(
        families=tuple(args.family), trials=args.trials, compiled_only=args.compiled_only
    )
    options = JobOptions(sweep)
    with Runners(Machine(parse_devices(args.device), args.jobs), _note) as runners:
        if runners.gpu is None:
            raise BenchmarkError("no GPU was found: sweeps that agree have to be measured")
        outcomes = []
        for seed in range(args.times):
            outcomes.append(
                swept(problem, runners, replace(options, sweep=replace(sweep, seed=seed)))
            )
            _note(f"{seed + 1} of {args.times}: {own_winner(outcomes[-1]).config.digest[:6]}")
        found = compared(problem, runners.of(problem, options.regime(problem)), outcomes)
    print(text(found))
    if args.json is not None:
        write_json(args.json, found)
    return 0


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
