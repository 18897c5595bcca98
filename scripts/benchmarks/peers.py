"""Libraries at their best: every plan of cuDNN and every algorithm of cuBLASLt, timed.

``scripts/bench peers`` sweeps the vendors' kernels of some problems, into a store of its own. For
each library it prints the number of listed and of passed candidates, and the times of its default
and of the fastest. It also prints the host time of a call of the fastest, beside PyTorch's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import no_gpu
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.errors import BenchmarkError
from tuner.families import families_of, family
from tuner.measurement import Measurement
from tuner.problem import PROBLEMS, Problem
from tuner.runners.choose import Machine, Runners
from tuner.store import open_store
from tuner.tuning.job import Job, JobOptions
from tuner.tuning.outcome import Outcome
from tuner.tuning.sweep import SweepOptions

SHAPES: dict[str, tuple[str, ...]] = {
    "attention": (
        "S=1024,D=64",
        "B=4,S=2048,D=128,causal=1",
        "B=2,H=32,HKV=8,S=4096,D=128,dtype=bf16",
    ),
    "gemm": (
        "M=16,N=4096,K=4096,dtype=bf16",
        "M=128,N=14336,K=4096,dtype=bf16",
        "M=4096,N=4096,K=4096,dtype=bf16",
        "M=512,N=14336,K=4096,epilogue=bias_gelu_tanh",
        "M=4096,N=14336,K=4096,dtype=e4m3,scales=row",
    ),
    "swiglu": ("M=512,N=14336,K=4096,dtype=bf16",),
}
CALLS = 300
"""Timed on the host: fewer than the launches that the driver queues without waiting."""


def of_lists(problem: Problem, measured: Sequence[Measurement]) -> list[dict[str, Any]]:
    """A row for each library: how many candidates it listed, the first and the fastest."""
    rows = []
    for member in families_of(problem.op).values():
        seen = [m for m in measured if m.config.family == member.name and not m.is_final]
        if not member.is_listed or not seen:
            continue
        passed = [m for m in seen if m.latency_us is not None and m.ok]
        best = min(passed, key=lambda m: m.latency_us or 0.0, default=None)
        rows.append(
            {
                "family": member.name,
                "listed": len(seen),
                "passed": len(passed),
                "first_us": seen[0].latency_us,
                "best_us": best.latency_us if best else None,
                "best": best.config.to_json() if best else None,
                "workspace_bytes": best.workspace_bytes if best else None,
                "refused": sorted({m.log.splitlines()[0] for m in seen if not m.ok and m.log}),
            }
        )
    return rows


def host_us(call: Callable[[], Any], synchronize: Callable[[], None]) -> float:
    """Microseconds that the host spends in a call."""
    for _ in range(100):
        call()
    synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begun
    synchronize()
    return 1e6 * spent / CALLS


def of_host(problem: Problem, kernels: Sequence[Measurement]) -> dict[str, float]:
    """Host time of each kernel's call, on inputs that lie still."""
    import torch

    inputs = [
        torch.zeros(o.shape, dtype=torch.float32, device="cuda")
        .to(getattr(torch, o.dtype))
        .as_strided(o.shape, o.strides)
        for o in problem.operands[:-1]
    ]
    found: dict[str, float] = {}
    for m in kernels:
        member = family(m.config.family)
        if member.handed_over(problem, m.config) != problem:
            continue
        with torch.no_grad():
            call = member.vendor_call(problem, m.config, 1.0)
            if isinstance(call, str):
                continue
            name = str(m.config["kernel"])
            us = host_us(partial(call, *inputs), torch.cuda.synchronize)
            found.setdefault(name, round(us, 2))
    return found


def swept(problem: Problem, runners: Runners) -> tuple[Outcome, list[dict[str, Any]]]:
    """The vendors' sweep of a problem, and its lists.

    Raises:
        BenchmarkError: when it failed.
    """
    vendors = tuple(n for n, member in families_of(problem.op).items() if member.is_vendor)
    options = JobOptions(SweepOptions(families=vendors))
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/store.sqlite") as store:
        result = Job([problem], runners, store, options).run()
        for _, error in result.failed:
            raise BenchmarkError(f"{problem.label()}: {error}")
        if result.interrupted:
            raise KeyboardInterrupt
        (outcome,) = result.outcomes
        return outcome, of_lists(problem, store.measurements(problem=problem))


def found_of(outcome: Outcome, lists: list[dict[str, Any]], host: dict[str, float]) -> Any:
    """One problem's part of the file."""
    return {
        "problem": outcome.problem.to_json(),
        "label": outcome.problem.label(),
        "gpu": asdict(outcome.gpu),
        "regime": str(outcome.regime),
        "environment": dict(outcome.environment.facts),
        "lists": lists,
        "final": [
            {**m.config.to_json(), "us": m.latency_us, "std_us": m.std_us} for m in outcome.ranking
        ],
        "unavailable": dict(outcome.unavailable),
        "host_us": host,
        "elapsed_s": round(outcome.elapsed_s, 1),
    }


def text(found: dict[str, Any]) -> str:
    """A problem's lines: its lists, its final pass, the host's time."""
    lines = [f"{found['label']} ({found['elapsed_s']:.0f} s)"]
    for row in found["lists"]:
        first, best = (f"{us:.2f} us" if us else "none" for us in (row["first_us"], row["best_us"]))
        lines.append(
            f"  {row['family']}: {row['passed']} of {row['listed']} passed, first {first}, "
            f"fastest {best}"
        )
    lines += [f"  {m['us']:9.2f} us  {m['params']}" for m in found["final"]]
    lines += [f"  not measured: {name}: {why}" for name, why in found["unavailable"].items()]
    lines += [f"  host: {name} {us:.1f} us a call" for name, us in found["host_us"].items()]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Sweep the vendors, print, write.

    Raises:
        ConfigError: when a shape is wrong.
        BenchmarkError: when there is no GPU, or a sweep fails.
    """
    parser = Parser(prog="scripts/bench peers", description=__doc__)
    parser.add_argument("--op", choices=sorted(SHAPES), default=None, help="default: all")
    parser.add_argument("--shape", action="append", default=[], help="with --op; as S=1024,D=64")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    check_place(args.json)
    if args.shape and args.op is None:
        parser.error("--shape needs --op")
    shapes = {args.op: tuple(args.shape) or SHAPES[args.op]} if args.op else SHAPES
    problems = [PROBLEMS[op].parse(shape) for op, texts in shapes.items() for shape in texts]
    every = []
    with Runners(Machine(), _note) as runners:
        if runners.gpu is None:
            raise no_gpu()
        for problem in problems:
            outcome, lists = swept(problem, runners)
            every.append(found_of(outcome, lists, of_host(problem, outcome.ranking)))
            print(text(every[-1]), flush=True)
            if args.json is not None:
                write_json(args.json, {"problems": every})
    return 0


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
