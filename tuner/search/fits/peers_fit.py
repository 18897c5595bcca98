"""Fit of peers' rates at the problems that portfolios are made from (`scripts/bench population
--preset peers`).

Each kernel of a peer gets a time model for each domain that it has enough times in, as own kernels
get. Its errors are those at models left out. The candidate keeps the build that was timed: another
one does not answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.base import document, resources
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.peers import ANSWERS
from tuner.hardware import Gpu
from tuner.problem import problem_from_json
from tuner.search.fits.refit import Refit, rows, text_of
from tuner.search.judge import Judge
from tuner.search.timed import Point, timed_kernels
from tuner.selection import portfolio_json
from tuner.selection.candidates import Candidate, DomainModels
from tuner.selection.domains import AnyDomain, AttentionDomain, domain_of
from tuner.selection.portfolio import shipped

FAMILY = "vendor_sdpa"


def points(found: Sequence[Mapping[str, Any]]) -> dict[AnyDomain, list[Point]]:
    """Times of peers' kernels by domain; of attention only."""
    by_domain: dict[AnyDomain, list[Point]] = defaultdict(list)
    for row in found:
        problem = problem_from_json(row["problem"])
        domain = domain_of(problem)
        if isinstance(domain, AttentionDomain):
            for kernel in ANSWERS.keys() & row.get("us", {}).keys():
                config = Config(FAMILY, {"kernel": kernel})
                by_domain[domain].append(Point(problem, config, row["us"][kernel]))
    return by_domain


def candidates(
    models: DomainModels, timed: Sequence[Point], builds: Mapping[str, str], gpu: Gpu
) -> list[Candidate]:
    """Candidates of a domain's peers whose expected times are near the measured ones.

    Args:
        models: the domain's candidates that ship.
        timed: times of peers in the domain.
        builds: the peers' builds, by word of TUNER_ANSWERS.
        gpu: GPU of the measurements.
    """
    kernels = timed_kernels(models.domain, timed)
    judge = Judge(models.domain, models.regime, kernels, gpu)
    return [
        judge.candidate(kernel, builds[ANSWERS[str(kernel.config["kernel"])]])
        for kernel in kernels
        if judge.is_known(kernel)
    ]


def refit(files: Sequence[Path], gpu: Gpu, only: Sequence[str] = ()) -> Refit:
    """Fit the peers of a GPU's portfolio of attention.

    Raises:
        ConfigError: when a file is wrong or names no build, or no portfolio ships for the GPU.
    """
    builds = _builds(files)
    ships = next((p for p in shipped() if p.op == AttentionDomain.op and p.gpu == gpu), None)
    if ships is None:
        raise ConfigError(f"no portfolio of attention ships for {gpu.name}")
    result = Refit("cache/portfolio")
    domains = {}
    by_domain = points(rows(files))
    for domain, models in ships.domains.items():
        peers = candidates(models, by_domain.get(domain, ()), builds, gpu)
        for one in peers:
            title = f"{domain.label()}, {one.config['kernel']}"
            errors = f"{one.median_error:.1%}, ninth decile {one.p90_error:.1%}"
            result.errors.append(f"{title}: {one.points} measured; median error left out {errors}")
        rest = [one for one in models.candidates if not one.build]
        domains[domain] = replace(models, candidates=[*rest, *peers])
    name = f"{gpu.name.lower().replace(' ', '-')}-{AttentionDomain.op}.json"
    path = resources.cache() / "portfolio" / name
    result.documents[path] = portfolio_json.text(replace(ships, domains=domains).to_json())
    return result


def _builds(files: Sequence[Path]) -> dict[str, str]:
    """Builds of the peers by the files' headings.

    Raises:
        ConfigError: when two files name unlike builds, or a heading cannot be read.
    """
    found: dict[str, str] = {}
    for path in files:
        try:
            head = document.parse(text_of(path).partition("\n")[0])
            builds = {word: str(head[word]) for word in set(ANSWERS.values()) if word in head}
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(f"{path} has no heading of a bench: {exc!r}") from exc
        for word, build in builds.items():
            if found.setdefault(word, build) != build:
                raise ConfigError(f"{path} times {word} of {build}, another file {found[word]}")
    return found
