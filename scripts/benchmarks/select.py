"""``scripts/bench select``: what choosing a portfolio's kernel for a new shape costs, on the CPU.

Microseconds of CPU time of one `Portfolio.select`, at sizes that were not asked before: the median
of several rounds, for each domain of the shipped portfolios. Needs no GPU.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Sequence

from tuner.problem import AttentionProblem
from tuner.selection.describe import table
from tuner.selection.portfolio import Domain, Portfolio, shipped

LIMIT_US = 10.0
"""The aim."""
HEADS = ((16, 16), (32, 8), (28, 4), (71, 1))
LENGTHS = {"prompt": (64, 8192), "few": (2, 32), "one": (1, 1)}


def main(argv: Sequence[str]) -> int:
    """Measure and print a line for each domain; 0."""
    parser = argparse.ArgumentParser(prog="scripts/bench select", description=__doc__)
    parser.add_argument("--shapes", type=int, default=500, help="of each domain (default 500)")
    parser.add_argument("--rounds", type=int, default=5, help="over unlike shapes (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (default 0)")
    args = parser.parse_args(argv)
    rows = [
        (one.gpu.name, domain.label(), f"{median:.1f}", f"{LIMIT_US:.0f}")
        for one in shipped()
        for domain in sorted(one.domains)
        for median in [
            selection_us(one, shapes(domain, args.shapes * args.rounds, args.seed), args.rounds)
        ]
    ]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(table([("GPU", "domain", "us a selection", "aim"), *rows], right=frozenset({2, 3})))
    return 0


def shapes(domain: Domain, count: int, seed: int) -> list[AttentionProblem]:
    """Unlike problems of a domain."""
    rng, found = random.Random(f"{seed}:{domain}"), dict[AttentionProblem, None]()
    (usual, *_) = domain.problems("bfloat16")
    least, most = LENGTHS[domain.phase]
    while len(found) < count:
        heads_q, heads_kv = rng.choice(HEADS)
        problem = AttentionProblem(
            seqlen_q=rng.randint(least, most),
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
        if Domain.of(problem) == domain:
            found[problem] = None
    return list(found)


def selection_us(portfolio: Portfolio, problems: Sequence[AttentionProblem], rounds: int) -> float:
    """CPU time of one selection, microseconds: the median of the rounds' means."""
    each = len(problems) // rounds
    found = []
    for number in range(rounds):
        chosen = problems[number * each : (number + 1) * each]
        start = time.process_time_ns()
        for problem in chosen:
            portfolio.select(problem)
        found.append((time.process_time_ns() - start) / 1e3 / len(chosen))
    return statistics.median(found)
