"""CPU time of choosing a portfolio's kernel for a new shape; no GPU."""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import Row
from tuner.families.by_operation import AnyDomain, AttentionDomain, domain_of
from tuner.families.gemm.domains import MAX_TALL_COLUMNS
from tuner.problem import Problem
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu

ROUNDS = 5
HEADS = ((16, 16), (32, 8), (28, 4), (71, 1))
LENGTHS = {"prompt": (64, 8192), "few": (2, 32), "one": (1, 1)}
ROWS = {"few": (1, 16), "narrow": (17, 256), "wide": (257, 16384), "tall": (257, 16384)}
WIDTHS = (1024, 2048, 2560, 3072, 3584, 4096, 5120, 8192, 11008, 14336, 28672)


@dataclass(frozen=True)
class Case:
    """A domain of a portfolio, and how many shapes are drawn."""

    portfolio: Portfolio
    domain: AnyDomain
    count: int = 2500

    @property
    def group(self) -> str:
        return self.portfolio.gpu.name

    @property
    def label(self) -> str:
        return f"{self.group} {self.domain.label()}"


def cases(args: Namespace) -> list[Case]:
    """Domains of the shipped portfolios, or of those that serve on a GPU."""
    portfolios = serving(shipped(), find_gpu(args.gpu)) if args.gpu else shipped()
    return [Case(one, domain) for one in portfolios for domain in sorted(one.domains)]


def measure(case: Case, args: Namespace) -> Row:
    """Microseconds of a selection at sizes that are not cached, and of it adding up times."""
    portfolio, domain = case.portfolio, case.domain
    problems = shapes(domain, case.count, args.seed)
    models = portfolio.models_of(domain)
    assert models is not None
    times = models.times(portfolio.gpu).estimates
    return {
        "figures": {
            "us a selection": _median_us(portfolio.select, problems),
            "of it, times": _median_us(times, problems),
            "kernels": len(models.candidates),
        },
        "goals": {"us a selection": "at most 10"},
    }


def shapes(domain: AnyDomain, count: int, seed: str) -> list[Problem]:
    """Unlike problems of a domain, of any number of rows.

    Attention has a model's heads; products have the widths of a model's layers, and others near
    them for variety.
    """
    rng, drawn = random.Random(f"{seed}:{domain}"), dict[Problem, None]()
    usual: Any = domain.problems("bfloat16")[0]
    while len(drawn) < count:
        if isinstance(domain, AttentionDomain):
            heads_q, heads_kv = rng.choice(HEADS)
            sizes = {
                "seqlen_q": rng.randint(*LENGTHS[domain.phase]),
                "seqlen_kv": rng.randint(256, 65536),
                "batch": rng.randint(1, 16),
                "heads_q": heads_q,
                "heads_kv": heads_kv,
            }
        else:
            n, k = (rng.choice(WIDTHS) + 64 * rng.randrange(-4, 5) for _ in range(2))
            n = rng.randrange(8, MAX_TALL_COLUMNS + 1, 8) if domain.rows == "tall" else n
            sizes = {"m": rng.randint(*ROWS[domain.rows]), "n": n, "k": k}
        problem = replace(usual, **sizes)
        if domain_of(problem) == domain:
            drawn[problem] = None
    return list(drawn)


def _median_us(call: Callable[[Any], Any], problems: Sequence[Problem]) -> float:
    """CPU time of one call, microseconds: the median of the rounds' means."""
    each, means = len(problems) // ROUNDS, []
    for number in range(ROUNDS):
        part = problems[number * each : (number + 1) * each]
        start = time.process_time_ns()
        for problem in part:
            call(problem)
        means.append((time.process_time_ns() - start) / 1e3 / each)
    return statistics.median(means)
