"""Quick pass over many candidates of a problem."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.config import Config
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.runners.base import Runner

REQUEST = 64
"""Candidates of one request; each request computes its references again."""


def passed(problem: Problem, candidates: Iterable[Config], runner: Runner) -> list[Measurement]:
    """Time each candidate once, and return those that pass the gate, fastest first."""
    by_family: dict[str, list[Config]] = {}
    for config in candidates:
        by_family.setdefault(config.family, []).append(config)
    requests = [
        found[start : start + REQUEST]
        for found in by_family.values()
        for start in range(0, len(found), REQUEST)
    ]
    for request in requests:
        runner.submit(problem, request)
    quick: list[Measurement] = []
    for _ in requests:
        quick += runner.collect()
    return sorted((m for m in quick if m.ok and m.latency_us), key=lambda m: m.latency_us or 0.0)
