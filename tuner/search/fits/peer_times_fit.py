"""Rates of `tuner.selection.peer_times`, from times of FlashAttention-3 at calls beside the tuner's
(`scripts/bench cliffs`).

All calls of a kernel at one instance of the head dimension give common rates. Those of each mask,
soft cap and packing give their own, near the common ones. A kind needs `MIN_CALLS`.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tuner.config import Config
from tuner.families.attention_work import TERMS, peer_work
from tuner.families.by_operation import AnyDomain, AttentionDomain
from tuner.families.peers import BUILDS
from tuner.families.peers.sdpa import SERVING, UNPREPARED
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem
from tuner.search.fits.peers_fit import FAMILY, builds_of
from tuner.search.fits.refit import Refit, attention_portfolio, portfolio_file, problem_of, rows
from tuner.search.fits.shapes_fit import shaped
from tuner.selection import portfolio_json
from tuner.selection.peer_times import PeerTimes

PHASES: tuple[Any, ...] = "prompt", "few", "one"
KERNELS = "flash3", "flash3_splits"
PREPARE_US = 2.0
"""Microseconds in which the serving build prepares a dense call, which a bench leaves out."""
MIN_CALLS, PARTS = 3, 5
"""Fewest calls of a kind; parts of all calls, each of which is also judged by the others' rates."""


class PeerCall(NamedTuple):
    """A peer's time of a call."""

    kernel: str
    domain: AttentionDomain
    amounts: tuple[float, ...]
    us: float

    @property
    def kind(self) -> tuple[str, AttentionDomain]:
        """Kernel, and domain without the number of queries."""
        return self.kernel, self.domain._replace(phase="prompt")


def calls(documents: Iterable[Mapping[str, Any]], gpu: Gpu) -> list[PeerCall]:
    """Times of kernels in domains where they may answer."""
    timed: list[PeerCall] = []
    for row in documents:
        problem = problem_of(row)
        if not isinstance(problem, AttentionProblem) or problem.is_paged or "mask=" in row["case"]:
            continue  # a peer takes no tensor of a mask
        if (domain := AttentionDomain.holding(problem)) is None or domain.operand:
            continue
        amounts = peer_work(problem, gpu)
        for kernel, us in _named(problem, row["us"]).items():
            timed.append(PeerCall(kernel, domain, amounts, us))
    return timed


def _named(problem: AttentionProblem, us: Mapping[str, float]) -> dict[str, float]:
    """Microseconds by the kernel that the runtime calls."""
    if problem.is_varlen:  # packed sequences are timed by the serving build
        return {UNPREPARED: us["flash3"]} if "flash3" in us else {}
    if problem.is_windowed or problem.softcap:
        return {UNPREPARED: us[SERVING] + PREPARE_US} if SERVING in us else {}
    return {kernel: us[kernel] for kernel in KERNELS if kernel in us}


def fitted(some: Sequence[PeerCall]) -> dict[tuple[str, AttentionDomain], list[float]]:
    """Rates by kind of calls."""
    alike: dict[Hashable, list[PeerCall]] = defaultdict(list)
    kinds: dict[tuple[str, AttentionDomain], list[PeerCall]] = defaultdict(list)
    for call in some:
        alike[call.kernel, call.domain.head_dim].append(call)
        kinds[call.kind].append(call)
    common: dict[Hashable, list[float]] = {}
    for key, every in alike.items():
        common[key] = shaped([c.amounts for c in every], [c.us for c in every])
    by_kind: dict[tuple[str, AttentionDomain], list[float]] = {}
    for kind, mine in kinds.items():
        if len(mine) >= MIN_CALLS:
            start = common[mine[0].kernel, mine[0].domain.head_dim]
            by_kind[kind] = shaped([c.amounts for c in mine], [c.us for c in mine], start)
    return by_kind


def error(call: PeerCall, rates: Sequence[float]) -> float:
    """Logarithm of the expected time over the measured one."""
    return math.log(sum(a * b for a, b in zip(call.amounts, rates, strict=True)) / call.us)


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Rates of a GPU's portfolio of attention.

    Raises:
        ConfigError: when a file is wrong or names no build, or no portfolio ships for the GPU.
    """
    builds = builds_of(files)
    ships = attention_portfolio(gpu)
    every = calls(rows(files), gpu)
    result, by_kind = Refit("cache/portfolio"), fitted(every)
    errors: dict[Hashable, list[float]] = defaultdict(list)
    shuffled = random.Random(PARTS).sample(every, len(every))
    for part in range(PARTS):
        others = fitted([call for i, call in enumerate(shuffled) if i % PARTS != part])
        for call in shuffled[part::PARTS]:
            if call.kind in others:
                errors[call.kind].append(abs(error(call, others[call.kind])))
    times: dict[AnyDomain, tuple[PeerTimes, ...]] = {}
    for (kernel, plain), values in sorted(by_kind.items()):
        build = builds[BUILDS.get(kernel, "flash3")]
        rates = {term: us for term, us in zip(TERMS, values, strict=True) if us}
        peer = PeerTimes(Config(FAMILY, {"kernel": kernel}), build, rates)
        for phase in PHASES:
            domain = plain._replace(phase=phase)
            times[domain] = (*times.get(domain, ()), peer)
    for kind, off in sorted(errors.items(), key=str):
        label = next(f"{c.domain.label()}, {c.kernel}" for c in every if c.kind == kind)
        result.errors.append(f"{label}: {len(off)} calls, {median(off):.1%} off by others' rates")
    path = portfolio_file(gpu, AttentionDomain.op)
    document = replace(ships, peer_times=times).to_json()
    result.documents[path] = portfolio_json.text(document)
    return result
