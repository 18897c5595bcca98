"""``scripts/bench select``: CPU time of choosing a portfolio's kernel for a new shape.

Microseconds of one `Portfolio.select` at sizes that are not cached, as the median of several
rounds. For each domain of the shipped portfolios, or of those that serve on ``--gpu``, rescaled
where it has none of its own. The part in which times are added up is stated beside it. Needs no
GPU.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import file_head
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.families.gemm.domains import MAX_TALL_COLUMNS
from tuner.problem import AttentionProblem, Problem
from tuner.selection.describe import table
from tuner.selection.domains import (
    AnyDomain,
    AttentionDomain,
    GatedDomain,
    ProductDomain,
    domain_of,
)
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu

LIMIT_US = 10.0
"""The aim."""
HEADS = ((16, 16), (32, 8), (28, 4), (71, 1))
LENGTHS = {"prompt": (64, 8192), "few": (2, 32), "one": (1, 1)}
ROWS = {"few": (1, 16), "narrow": (17, 256), "wide": (257, 16384), "tall": (257, 16384)}
WIDTHS = (1024, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 11008, 14336, 28672)


def main(argv: Sequence[str]) -> int:
    """Measure and print a line for each domain; 0."""
    parser = Parser(prog="scripts/bench select", description=__doc__)
    parser.add_argument(
        "--shapes", type=int, default=500, help="shapes of each domain (default 500)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="over unlike shapes (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shapes (default 0)")
    parser.add_argument(
        "--gpu", help="select for this GPU, as H100 (default: each portfolio's own)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    args = parser.parse_args(argv)
    if args.json:
        check_place(args.json)
    known = serving(shipped(), find_gpu(args.gpu)) if args.gpu else shipped()
    rows = [
        measure(one, domain, args.shapes, args.rounds, args.seed)
        for one in known
        for domain in sorted(one.domains)
    ]
    about = environment()
    if args.json:
        write_json(args.json, {"environment": file_head.complete(about), "rows": rows})
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(report(rows))
    return 0


def environment() -> dict[str, Any]:
    """The processor, its load, and Python."""
    names = Path("/proc/cpuinfo")
    lines = names.read_text().splitlines() if names.exists() else []
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }


def measure(
    portfolio: Portfolio, domain: AnyDomain, count: int, rounds: int, seed: int
) -> dict[str, Any]:
    """Microseconds of a domain's selections, and of adding up times in them.

    Args:
        portfolio: portfolio to select from.
        domain: one of its domains.
        count: shapes of a round.
        rounds: rounds over unlike shapes.
        seed: seed of the shapes.
    """
    problems = shapes(domain, count * rounds, seed)
    models = portfolio.models_of(domain)
    assert models is not None
    return {
        "gpu": portfolio.gpu.name,
        "domain": domain.label(),
        "kernels": len(models.candidates),
        "us": median_us(portfolio.select, problems, rounds),
        "times_us": median_us(models.times(portfolio.gpu).estimates, problems, rounds),
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each domain."""
    lines = [("GPU", "domain", "kernels", "us a selection", "of it, times", "aim")]
    for row in rows:
        times = f"{row['us']:.1f}", f"{row['times_us']:.1f}", f"{LIMIT_US:.0f}"
        lines.append((row["gpu"], row["domain"], str(row["kernels"]), *times))
    return table(lines, right=frozenset({2, 3, 4, 5}))


def shapes(domain: AnyDomain, count: int, seed: int) -> list[Problem]:
    """Unlike problems of a domain."""
    rng, found = random.Random(f"{seed}:{domain}"), dict[Problem, None]()
    while len(found) < count:
        if isinstance(domain, AttentionDomain):
            problem: Problem = attention(domain, rng)
        else:
            problem = product(domain, rng)
        if domain_of(problem) == domain:
            found[problem] = None
    return list(found)


def attention(domain: AttentionDomain, rng: random.Random) -> AttentionProblem:
    """A problem of a model's heads."""
    (usual, *_) = domain.problems("bfloat16")
    heads_q, heads_kv = rng.choice(HEADS)
    return AttentionProblem(
        seqlen_q=rng.randint(*LENGTHS[domain.phase]),
        seqlen_kv=rng.randint(256, 65536),
        head_dim=domain.head_dim,
        batch=rng.randint(1, 16),
        heads_q=heads_q,
        heads_kv=heads_kv,
        is_causal=usual.is_causal,
        dtype=usual.dtype,
        window_left=usual.window_left,
        softcap=usual.softcap,
        is_varlen=usual.is_varlen,
    )


def product(domain: ProductDomain | GatedDomain, rng: random.Random) -> Problem:
    """A layer of a model's widths, of any number of rows; other widths near them, for variety."""
    (usual, *_) = domain.problems("bfloat16")
    n, k = (rng.choice(WIDTHS) + 64 * rng.randrange(-4, 5) for _ in range(2))
    if domain.rows == "tall":
        n = rng.randrange(8, MAX_TALL_COLUMNS + 1, 8)
    return replace(usual, m=rng.randint(*ROWS[domain.rows]), n=n, k=k)


def median_us(call: Callable[[Any], Any], problems: Sequence[Problem], rounds: int) -> float:
    """CPU time of one call, microseconds: the median of the rounds' means."""
    each = len(problems) // rounds
    found = []
    for number in range(rounds):
        chosen = problems[number * each : (number + 1) * each]
        start = time.process_time_ns()
        for problem in chosen:
            call(problem)
        found.append((time.process_time_ns() - start) / 1e3 / len(chosen))
    return statistics.median(found)
