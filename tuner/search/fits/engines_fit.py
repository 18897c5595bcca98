"""Ratios of `tuner.selection.engine_ratios`, from batches of pages beside FlashAttention-3's
serving build (`scripts/bench paged`).

A row has the problem and the microseconds of ``tuner`` and ``flash3``. The ratios go into the
shipped portfolio of attention.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tuner.errors import ConfigError
from tuner.families.by_operation import AnyDomain, AttentionDomain
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, problem_from_json
from tuner.search.fits.refit import Refit, portfolio_file, rows
from tuner.selection import portfolio_json
from tuner.selection.engine_ratios import WIDTH_OCTAVES, EngineRatios, is_engines, sizes_of
from tuner.selection.portfolio import shipped
from tuner.selection.ratios import Ratios

MIN_CALLS = 4
"""Fewest calls of a domain."""
Measured = tuple[AttentionProblem, float]
"""A call over pages, and the engine's time over the tuned kernel's."""


def measured(documents: Iterable[Mapping[str, Any]]) -> dict[AnyDomain, list[Measured]]:
    """Calls by domain that own kernels answered."""
    by_domain: dict[AnyDomain, list[Measured]] = defaultdict(list)
    for row in documents:
        problem, us = problem_from_json(row["problem"]), row.get("us", {})
        if not isinstance(problem, AttentionProblem) or not {"tuner", "flash3"} <= us.keys():
            continue
        domain = AttentionDomain.holding(problem)
        if domain is not None and row.get("answered", {}).get("tuner", "own") == "own":
            by_domain[domain].append((problem, us["flash3"] / us["tuner"]))
    return {domain: calls for domain, calls in by_domain.items() if len(calls) >= MIN_CALLS}


def ratios_of(calls: Sequence[Measured]) -> Ratios:
    """Ratios of a domain's calls."""
    return Ratios.of(((sizes_of(problem), ratio) for problem, ratio in calls), WIDTH_OCTAVES)


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Collect the ratios of a GPU's portfolio of attention.

    Raises:
        ConfigError: when a file is wrong, or no domain has enough calls.
    """
    ships = next((p for p in shipped() if p.op == AttentionDomain.op and p.gpu == gpu), None)
    by_domain = measured(rows(files))
    if ships is None or not by_domain:
        raise ConfigError(f"no domain of pages has {MIN_CALLS} calls, or no portfolio is of it")
    result = Refit("cache/portfolio")
    engines = {domain: ratios_of(calls) for domain, calls in by_domain.items()}
    for domain, calls in sorted(by_domain.items()):
        result.errors.append(f"{domain.label()}: {_replayed(domain, calls)}")
    path = portfolio_file(gpu, "attention")
    new = replace(ships, engines={**ships.engines, **engines})
    result.documents[path] = portfolio_json.text(new.to_json())
    return result


def _replayed(domain: AnyDomain, calls: Sequence[Measured]) -> str:
    """Each call answered by the ratios of the others."""
    logs, own = [], 0
    for problem, ratio in calls:
        rest_of = [c for c in calls if c[0] != problem]
        ratios: EngineRatios = {domain: ratios_of(rest_of)} if len(rest_of) > 1 else {}
        is_own = is_engines(problem, ratios) is False
        logs.append(math.log(ratio) if is_own else 0.0)
        own += is_own
    every = [math.log(ratio) for _, ratio in calls]
    return (
        f"{len(calls)} calls, tuned kernels {math.exp(fmean(every)):.3f} of the engine's, worst "
        f"{math.exp(min(every)):.3f}; chosen {math.exp(fmean(logs)):.3f}, "
        f"worst {math.exp(min(logs)):.3f}, {own} by tuned kernels"
    )
