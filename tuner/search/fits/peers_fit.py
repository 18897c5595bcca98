"""Ratios of `tuner.selection.peer_ratios`, from the problems that portfolios are made from
(`scripts/bench population --preset peers`).

A row has the problem and the microseconds of ``tuner``, which no peer answered, and of peers'
kernels. A kernel is kept in a domain where it is the answer to some call, by the ratios of other
models' calls. The builds are those of the files' headings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tuner.base import document
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.by_operation import AnyDomain, AttentionDomain
from tuner.families.peers import ANSWERS, BUILDS
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import AttentionProblem, problem_from_json
from tuner.search.fits.refit import Refit, attention_portfolio, portfolio_file, rows, text_of
from tuner.selection import portfolio_json
from tuner.selection.peer_ratios import MIN_LEAD, WIDTH_OCTAVES, PeerRatios, sizes_of
from tuner.selection.ratios import Ratios

FAMILY = "vendor_sdpa"
MIN_CALLS = 6
"""Fewest calls of a kernel in a domain."""
Measured = tuple[AttentionProblem, float]
"""A call, and the time of the tuner's answer over a peer's kernel's."""


def measured(
    documents: Iterable[Mapping[str, Any]], gpu: Gpu = DEFAULT_GPU
) -> dict[tuple[AnyDomain, str], list[Measured]]:
    """Calls by domain and peer's kernel that takes them."""
    calls: dict[tuple[AnyDomain, str], list[Measured]] = defaultdict(list)
    for row in documents:
        problem, us = problem_from_json(row["problem"]), row.get("us", {})
        if not isinstance(problem, AttentionProblem) or "tuner" not in us:
            continue
        if (domain := AttentionDomain.holding(problem)) is not None:
            for kernel in ANSWERS.keys() & us.keys():
                if family(FAMILY).accepts(problem, Config(FAMILY, {"kernel": kernel}), gpu):
                    calls[domain, kernel].append((problem, us["tuner"] / us[kernel]))
    return {key: some for key, some in calls.items() if len(some) >= MIN_CALLS}


def peer_of(kernel: str, build: str, some: Iterable[Measured]) -> PeerRatios:
    """A kernel with the ratios of calls."""
    ratios = Ratios.of(((sizes_of(problem), ratio) for problem, ratio in some), WIDTH_OCTAVES)
    return PeerRatios(Config(FAMILY, {"kernel": kernel}), build, ratios)


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Collect the ratios of a GPU's portfolio of attention.

    Raises:
        ConfigError: when a file is wrong or names no build, or no portfolio ships for the GPU.
    """
    builds = builds_of(files)
    ships = attention_portfolio(gpu)
    result = Refit("cache/portfolio")
    peers: dict[AnyDomain, tuple[PeerRatios, ...]] = {}
    for (domain, kernel), some in sorted(measured(rows(files), gpu).items()):
        build = builds[BUILDS.get(kernel, ANSWERS[kernel])]
        logs = [math.log(ratio) for ratio in _by_others(domain, kernel, some)]
        text = f"{domain.label()}, {kernel}: {len(some)} calls, answers {len(logs)}"
        if logs:
            mean, least = math.exp(fmean(logs)), math.exp(min(logs))
            text += f", there {mean:.3f} times as fast as the tuner, at the worst {least:.3f}"
            peers[domain] = (*peers.get(domain, ()), peer_of(kernel, build, some))
        result.errors.append(text)
    path = portfolio_file(gpu, "attention")
    result.documents[path] = portfolio_json.text(replace(ships, peers=peers).to_json())
    return result


def _by_others(domain: AnyDomain, kernel: str, some: Sequence[Measured]) -> Iterable[float]:
    """Ratios of the calls that a kernel answers by the ratios of other models' calls."""
    for problem, ratio in some:
        model = domain.group(problem)
        apart = [c for c in some if domain.group(c[0]) != model]
        if len(apart) > 1 and peer_of(kernel, "", apart).lead(sizes_of(problem)) >= MIN_LEAD:
            yield ratio


def builds_of(files: Sequence[Path]) -> dict[str, str]:
    """Builds of the peers by the files' headings.

    Raises:
        ConfigError: when two files name unlike builds, or a heading cannot be read.
    """
    by_peer: dict[str, str] = {}
    for path in files:
        try:
            head = document.parse(text_of(path).partition("\n")[0])
            names = {*ANSWERS.values(), *BUILDS.values()}
            builds = {name: str(head[name]) for name in names if name in head}
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(f"{path} has no heading of a bench: {exc!r}") from exc
        for word, build in builds.items():
            if by_peer.setdefault(word, build) != build:
                raise ConfigError(f"{path} times {word} of {build}, another file {by_peer[word]}")
    return by_peer
