"""JSON of portfolios: a document with a line for each candidate."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tuner.base import document
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import find
from tuner.families.by_operation import AnyDomain
from tuner.measurement import Regime
from tuner.selection import peer_ratios, ratios
from tuner.selection.candidates import Candidate, DomainModels, Regret, Spread
from tuner.selection.engine_ratios import WIDTH_OCTAVES, EngineRatios
from tuner.selection.peer_ratios import PeerRatios, Peers
from tuner.selection.peer_times import PeerTimes, Times
from tuner.selection.ratios import SIZES, Ratios

FORMAT = "cutlass-tuner portfolio"
VERSION = 2
#: Significant digits of the rates in a written time model.
_DIGITS = 5


def models_json(models: DomainModels) -> dict[str, Any]:
    """The document that `models_from` reads."""
    return {
        "domain": _domain_json(models.domain),
        "regime": models.regime.key,
        "margin": models.margin,
        "regret": asdict(models.regret),
        **({"ratios": models.ratios.to_json()} if models.ratios else {}),
        "candidates": [_candidate_json(models.domain, c) for c in models.candidates],
    }


def _domain_json(domain: AnyDomain) -> dict[str, Any]:
    """Fields that came after version 2 are present only when they are true."""
    later = "is_paged", "has_sinks", "operand", "is_sparse", "is_e4m3"
    absent = {name for name in later if not getattr(domain, name, True)}
    return {name: value for name, value in domain._asdict().items() if name not in absent}


def _candidate_json(domain: AnyDomain, candidate: Candidate) -> dict[str, Any]:
    rates = {term: float(f"{us:.{_DIGITS}g}") for term, us in candidate.rates.items() if us}
    return {
        **candidate.config.to_json(),
        "rates": rates,
        "points": candidate.points,
        "median_error": round(candidate.median_error, 4),
        "p90_error": round(candidate.p90_error, 4),
        "spread": dict(zip(domain.axes, candidate.spread.bounds, strict=True)),
    }


def models_from(kind: type[AnyDomain], row: Mapping[str, Any]) -> DomainModels:
    """The inverse of `models_json`.

    Args:
        kind: kind of domain.
        row: document of one domain.

    Raises:
        ConfigError: on a wrong value.
    """
    domain, margin = kind(**row["domain"]), _number(row["margin"])
    return DomainModels(
        domain,
        Regime.parse(row["regime"]),
        [_candidate_from(kind, fields) for fields in row["candidates"]],
        margin,
        Regret(**document.checked(Regret, row["regret"])),
        ratios=_ratios_from(row["ratios"], len(kind.axes)) if row.get("ratios") else None,
    )


def engines_json(engines: EngineRatios) -> list[dict[str, Any]]:
    """The document that `engines_from` reads."""
    return [
        {"domain": _domain_json(domain), "ratios": measured.to_json()}
        for domain, measured in sorted(engines.items())
    ]


def engines_from(kind: type[AnyDomain], rows: Any) -> EngineRatios:
    """The inverse of `engines_json`.

    Raises:
        ConfigError: on a wrong value.
    """
    return {kind(**row["domain"]): _ratios_from(row["ratios"], 2, WIDTH_OCTAVES) for row in rows}


def peers_json(peers: Peers) -> list[dict[str, Any]]:
    """The document that `peers_from` reads."""
    return [
        {**_peer_json(domain, peer), "ratios": peer.ratios.to_json()}
        for domain, some in sorted(peers.items())
        for peer in some
    ]


def peers_from(kind: type[AnyDomain], rows: Any) -> Peers:
    """The inverse of `peers_json`.

    Raises:
        ConfigError: on a wrong value.
    """
    peers: dict[AnyDomain, tuple[PeerRatios, ...]] = {}
    for row in rows:
        domain, config, build = _peer_from(kind, row)
        measured = _ratios_from(row["ratios"], 3, peer_ratios.WIDTH_OCTAVES)
        peers[domain] = (*peers.get(domain, ()), PeerRatios(config, build, measured))
    return peers


def times_json(times: Times) -> list[dict[str, Any]]:
    """The document that `times_from` reads."""
    return [
        {**_peer_json(domain, peer), "rates": dict(peer.rates)}
        for domain, some in sorted(times.items())
        for peer in some
    ]


def _peer_json(domain: AnyDomain, peer: PeerRatios | PeerTimes) -> dict[str, Any]:
    return {"domain": _domain_json(domain), **peer.config.to_json(), "build": peer.build}


def _peer_from(kind: type[AnyDomain], row: Any) -> tuple[AnyDomain, Config, str]:
    config = Config.from_json({"family": row["family"], "params": row["params"]})
    return kind(**row["domain"]), config, str(row["build"])


def times_from(kind: type[AnyDomain], rows: Any) -> Times:
    """The inverse of `times_json`.

    Raises:
        ConfigError: on a wrong value.
    """
    times: dict[AnyDomain, tuple[PeerTimes, ...]] = {}
    for row in rows:
        domain, config, build = _peer_from(kind, row)
        rates = {str(term): _number(us) for term, us in row["rates"].items()}
        times[domain] = (*times.get(domain, ()), PeerTimes(config, build, rates))
    return times


def _ratios_from(rows: Any, axes: int, width: float = ratios.WIDTH_OCTAVES) -> Ratios:
    """Sizes and a ratio in each row."""
    count = min(axes, SIZES)
    values = [[_number(value) for value in row] for row in rows]
    if any(len(row) != count + 1 or not all(row) for row in values):
        raise ConfigError(f"a row of ratios is wrong (allowed: {count} sizes and a ratio, above 0)")
    pairs = (([round(size) for size in sizes], ratio) for *sizes, ratio in values)
    return Ratios.of(pairs, width)


def _candidate_from(kind: type[AnyDomain], row: Mapping[str, Any]) -> Candidate:
    config = Config.from_json({"family": row["family"], "params": row["params"]})
    family = find(config.family)
    rates = {str(term): _rate(str(term), us) for term, us in row["rates"].items()}
    if family is not None and (unknown := set(rates) - set(family.work_terms)):
        raise ConfigError(f"{config.family} counts no '{sorted(unknown)[0]}'")
    errors = _number(row["median_error"]), _number(row["p90_error"])
    spread = dict(row["spread"])
    if "work" in kind.axes and "work" not in spread:  # of version 2's first portfolios
        sizes = list(spread.values())
        spread["work"] = tuple(math.prod(counts) for counts in zip(*sizes, strict=True))
    bounds = tuple((int(low), int(high)) for low, high in (spread[x] for x in kind.axes))
    return Candidate(config, rates, int(row["points"]), *errors, Spread(bounds))


def _rate(term: str, value: Any) -> float:
    """A rate; a launch's may be negative (`tuner.search.corrections`)."""
    is_below = term == "launch" and isinstance(value, float) and -math.inf < value < 0
    return value if is_below else _number(value)


def _number(value: Any) -> float:
    """A finite number, not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{value!r} is not a number (allowed: 0 or more)")
    return float(value)


def text(data: Mapping[str, Any]) -> str:
    """JSON with a line for each candidate."""
    head = {name: value for name, value in data.items() if name != "domains"}
    parts = []
    for domain in data["domains"]:
        fields = {name: value for name, value in domain.items() if name != "candidates"}
        lines = ",\n".join(f"   {json.dumps(candidate)}" for candidate in domain["candidates"])
        parts.append(f'  {json.dumps(fields)[:-1]}, "candidates": [\n{lines}\n  ]}}')
    body = ",\n".join(parts)
    return f'{json.dumps(head)[:-1]},\n "domains": [\n{body}\n ]}}\n'
