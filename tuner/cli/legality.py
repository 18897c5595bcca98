"""``tuner develop legality``: a family's legality predicate beside the compiler and the GPU."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base import output
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import PROBLEMS, Problem

if TYPE_CHECKING:
    from tuner.runners.base import Runner

#: Folders before a file name in a compiler's messages.
_FOLDERS = re.compile(r"/[A-Za-z][\w.+-]*/(?:[\w.+-]+/)*")
#: Problems to draw from: every mask, data type and layout of each operation, with lengths that
#: leave partial tiles.
SHAPES: dict[str, tuple[str, ...]] = {
    "attention": (
        "S=1024,D=64",
        "S=1024,D=64,causal=1",
        "B=2,H=4,S=1000,D=64,dtype=bf16",
        "B=2,H=8,S=512,D=128,layout=bshd",
        "B=1,H=8,SQ=384,SKV=1536,D=128,causal=1",
        "B=2,H=4,S=640,D=256",
        "B=2,H=4,S=768,D=32",
        "B=2,H=8,HKV=4,S=700,D=128,dtype=e4m3",
        "B=2,H=8,HKV=2,S=1000,D=64,left=100,right=64",
        "S=1024,D=128,causal=1,window=256,softcap=50",
        "B=3,H=8,HKV=2,S=1000,D=64,varlen=1",
        "B=2,H=8,HKV=2,S=1000,D=128,causal=1,bias=h",
        "B=2,H=8,HKV=2,S=1000,D=64,block_mask=b",
        "B=3,H=128,HKV=1,SQ=1,SKV=900,D=576,DV=512,page_size=64,dtype=bf16",
        "B=5,H=48,HKV=1,SQ=1,SKV=333,D=576,DV=512,page_size=16",
    ),
    "attention_backward": (
        "S=1024,D=64",
        "B=2,H=8,HKV=2,S=1000,D=128,causal=1,dtype=bf16",
        "B=2,H=4,SQ=384,SKV=700,D=128,layout=bshd",
        "B=2,H=4,S=640,D=96,dtype=bf16",
        "B=2,H=8,HKV=2,S=1000,D=64,left=100,right=64",
        "B=2,H=4,S=1024,D=64,causal=1,deterministic=1",
    ),
    "gemm": (
        "M=4096,N=4096,K=4096",
        "M=2048,N=1536,K=1024,layout_a=row,layout_b=row",
        "M=1024,N=2048,K=512,layout_a=col,layout_b=col,dtype=bf16",
        "M=512,N=768,K=256,layout_a=col,layout_b=row,B=4",
        "M=1024,N=1024,K=64,B=16,dtype_d=fp32",
        "M=16,N=4096,K=4096",
        "M=3,N=1000,K=4104,B=2,dtype=bf16,epilogue=bias_silu",
        "M=1000,N=1016,K=1032",
        "M=1024,N=768,K=512,epilogue=bias_gelu",
        "M=64,N=768,K=512,dtype=bf16,epilogue=bias_residual",
        "M=1024,N=768,K=512,scales=row",
        "M=1000,N=1016,K=1040,dtype=e4m3,fast_accum=1",
        "M=16,N=4096,K=4096,dtype=e4m3,scales=row,fast_accum=1",
        "M=2048,N=1536,K=1024,dtype=e4m3,scales=row,fast_accum=0",
        "M=512,N=2048,K=1024,dtype=e4m3,dtype_d=e4m3,fast_accum=1",
        "M=1000,N=1544,K=1040,dtype=e4m3,scales=block",
        "M=16,N=4096,K=4096,dtype=e4m3,scales=block",
    ),
    "swiglu": ("M=4096,N=14336,K=4096", "M=200,N=96,K=136,dtype=bf16"),
    "grouped_gemm": (
        "G=8,M=4096,N=14336,K=4096,dtype=bf16",
        "G=64,M=300,N=1408,K=2048,sizes=zipf",
        "G=64,M=300,N=1408,K=2048,sizes=zipf,dtype=e4m3",
    ),
    "softmax": (
        "M=1024,N=1024,B=16",
        "M=1024,N=1024,B=16,causal=1",
        "M=512,N=4096,B=4,dtype=bf16",
        "M=333,N=1000,B=3",
        "M=2048,N=130,B=2,SQ=1024,causal=1",
    ),
}
_MAX_DRAWS = 100_000
#: Kernels in a unit. Most rejected configs fail, and the rest of their unit would be compiled
#: again.
_UNIT, _REJECTED_UNIT = 4, 1
#: Time-out of a compile, seconds. A rejected config whose accumulators spill takes ptxas minutes; a
#: legal kernel takes 15 to 30 s alone. One that takes longer counts as not compiling.
REJECTED_TIMEOUT_S = 60.0
_PROGRESS_EVERY = 10


@dataclass(frozen=True)
class SampledConfig:
    """Drawn config with the predicate's result."""

    problem: Problem
    config: Config
    violations: tuple[str, ...]


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "legality",
        help="measure how well a family's legality predicate predicts the compiler and the GPU",
    )
    parser.add_argument("--family", required=True, help="a kernel family that is compiled")
    parser.add_argument(
        "--legal", type=int, default=60, help="legal configs to sample (default 60)"
    )
    parser.add_argument(
        "--rejected", type=int, default=40, help="rejected configs to sample (default 40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default 0)")
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument("--jobs", type=int, default=None, help="parallel compiles")
    parser.add_argument("--output", type=Path, help="write every sample's outcome as JSON")
    parser.set_defaults(run=run)


def draw(
    family: Family, gpu: Gpu, legal: int, rejected: int, rng: random.Random
) -> tuple[list[SampledConfig], list[SampledConfig]]:
    """Draw distinct configs until there are enough legal and enough rejected ones.

    Stops with fewer after 100,000 draws, because a small space may not have more.
    """
    problems = [PROBLEMS[family.op].parse(text) for text in SHAPES[family.op]]
    spaces = [(p, space) for p in problems if (space := family.space(p, gpu))]
    accepted: dict[str, SampledConfig] = {}
    refused: dict[str, SampledConfig] = {}
    for _ in range(_MAX_DRAWS if spaces else 0):
        if len(accepted) >= legal and len(refused) >= rejected:
            break
        problem, space = rng.choice(spaces)
        config = family.draw(problem, gpu, space, rng)
        sample = SampledConfig(problem, config, tuple(family.violations(problem, config, gpu)))
        pool, goal = (refused, rejected) if sample.violations else (accepted, legal)
        if len(pool) < goal:
            pool.setdefault(problem.key + config.digest, sample)
    return list(accepted.values()), list(refused.values())


def evaluate(
    runner: Runner, draws: Sequence[SampledConfig]
) -> Iterator[tuple[SampledConfig, Measurement]]:
    """Compile, check and time every draw. Each is yielded when it is done, in the runner's
    order.
    """
    by_identity = {d.problem.key + d.config.digest: d for d in draws}
    waiting = list(by_identity.values())
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < runner.capacity:
            item = waiting.pop(0)
            runner.submit(item.problem, [item.config])
            in_flight += 1
        collected = runner.collect()
        in_flight -= 1
        for measurement in collected:
            yield by_identity[measurement.problem.key + measurement.config.digest], measurement


def summary(outcomes: Sequence[tuple[SampledConfig, Measurement]]) -> dict[str, Any]:
    """Counts, and the shares that a predicate is judged by."""
    legal = [m for d, m in outcomes if not d.violations]
    refused = [m for d, m in outcomes if d.violations]
    compiled = [m for m in legal if m.status != "compile_error"]
    passed = [m for m in compiled if m.ok]
    worked = [m for m in refused if m.ok]
    return {
        "legal": len(legal),
        "compiled": len(compiled),
        "compiled_share": len(compiled) / len(legal) if legal else None,
        "passed": len(passed),
        "passed_share": len(passed) / len(compiled) if compiled else None,
        "rejected": len(refused),
        "rejected_that_work": len(worked),
        "rejected_that_work_share": len(worked) / len(refused) if refused else None,
        # Rejected configs that worked by spilling, and are many times slower for it.
        "rejected_that_spill": sum(map(_spills, worked)),
        "legal_that_spill": sum(map(_spills, passed)),
        "legal_statuses": dict(Counter(m.status.value for m in legal)),
        "rejected_statuses": dict(Counter(m.status.value for m in refused)),
    }


def _spills(m: Measurement) -> bool:
    return any(used.spill_store_bytes + used.spill_load_bytes > 0 for used in m.resources.values())


def report(
    family: Family,
    gpu: Gpu,
    seed: int,
    drawn: int,
    outcomes: Sequence[tuple[SampledConfig, Measurement]],
) -> dict[str, Any]:
    """JSON document of the command: `summary`, and every outcome of `drawn` so far."""
    return {
        "family": family.name,
        "gpu": gpu.name,
        "seed": seed,
        "drawn": drawn,
        **summary(outcomes),
        "draws": [
            {
                "problem": d.problem.label(),
                "config": d.config.to_json(),
                "violations": list(d.violations),
                "status": m.status.value,
                "error": m.error,
                "log": without_folders(m.log)[-400:] if not m.ok else "",
            }
            for d, m in outcomes
        ],
    }


def without_folders(log: str) -> str:
    """Log with file names instead of paths, which mean nothing on another machine."""
    return _FOLDERS.sub("", log)


def save(path: Path, content: dict[str, Any]) -> None:
    """Write the file atomically, so that an interrupted run leaves its last state."""
    output.write(path, json.dumps(content, indent=1) + "\n")


def progress(outcomes: Sequence[tuple[SampledConfig, Measurement]], drawn: int) -> str:
    """One line, as ``20 of 100: 17 ok, 3 compile_error``."""
    counts = Counter(m.status.value for _, m in outcomes).most_common()
    return f"{len(outcomes)} of {drawn}: " + ", ".join(f"{n} {status}" for status, n in counts)


def run(args: argparse.Namespace) -> int:
    """Draw, evaluate and print the shares, which do not affect the exit code."""
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import NVCC_TIMEOUT_S, Compiler, find_toolchain
    from tuner.families import family as find_family
    from tuner.measure.device import detect
    from tuner.runners.local import LocalRunner

    family = find_family(args.family)
    if family.is_vendor:
        raise ConfigError(f"{family.name} is a vendor's kernel: nothing is compiled")
    gpu = detect(args.device)
    if gpu is None:
        raise BenchmarkError("no GPU found: legality is measured on a GPU")
    legal, rejected = draw(family, gpu, args.legal, args.rejected, random.Random(args.seed))
    drawn = len(legal) + len(rejected)
    outcomes: list[tuple[SampledConfig, Measurement]] = []
    if args.output:  # written at once, so that a wrong path fails before the run
        save(args.output, report(family, gpu, args.seed, drawn, outcomes))
    parts = ((legal, _UNIT, NVCC_TIMEOUT_S), (rejected, _REJECTED_UNIT, REJECTED_TIMEOUT_S))
    for draws, unit, timeout_s in parts:
        tools, cache = find_toolchain(), ArtifactCache()
        capability = gpu.compute_capability
        with Compiler(tools, cache, args.jobs, unit, timeout_s, capability) as compiler:
            runner = LocalRunner(args.device, Regime.default(family.op), compiler)
            try:
                for outcome in evaluate(runner, draws):
                    outcomes.append(outcome)
                    if len(outcomes) % _PROGRESS_EVERY == 0:
                        print(progress(outcomes, drawn), file=sys.stderr, flush=True)
                    if args.output:
                        save(args.output, report(family, gpu, args.seed, drawn, outcomes))
            finally:
                runner.close()
    result = report(family, gpu, args.seed, drawn, outcomes)
    shown = {key: value for key, value in result.items() if key != "draws"}
    sys.stdout.write(json.dumps(shown, indent=1) + "\n")
    return 0
