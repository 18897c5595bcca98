"""Portfolios: a few kernels that serve every shape of an operation, and their time models.

Sizes, strides and numbers of heads are launch arguments. So a kernel that was proven over its
domain (`Proof`) may serve any shape of the domain. Its speed is predicted by a *time model*: the
microseconds for each amount of work that `Family.work` counts, fitted to measurements
(`tuner.search.portfolio`).

`Portfolio.select` adds these terms up for each candidate. It chooses an own kernel only if it is
expected to be faster than the vendor's by the domain's margin times the model's error.

Shipped portfolios lie under ``cache/portfolio/``. A GPU without one uses that of a GPU that shares
its kernels, rescaled by the ratios of their rates (`serving`). Needs the standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

from tuner.base import document, output, resources
from tuner.base.deferred import Deferred
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS
from tuner.families.by_operation import DOMAINS, AnyDomain, GatedDomain, ProductDomain, domain_of
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, Problem
from tuner.selection import peer_ratios, peer_times
from tuner.selection.candidates import DomainModels
from tuner.selection.choice import Selection, choose
from tuner.selection.engine_ratios import EngineRatios
from tuner.selection.peer_ratios import Peers
from tuner.selection.peer_times import Times
from tuner.selection.portfolio_json import (
    FORMAT,
    VERSION,
    engines_from,
    engines_json,
    models_from,
    models_json,
    peers_from,
    peers_json,
    text,
    times_from,
    times_json,
)
from tuner.selection.transfer import Transfer


@dataclass(frozen=True)
class Portfolio:
    """The candidates of an operation on one GPU, by domain."""

    op: str
    gpu: Gpu
    domains: Mapping[AnyDomain, DomainModels]
    origin: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """First and last day of the measurements (``days``), and versions of the machines."""
    made_on: Gpu | None = None
    """GPU that was measured, where rates are rescaled; of all domains, or of those that were not
    measured on this one (`beside`)."""
    fallback: Portfolio | None = None
    """The same, with the other GPU's domains before this one's: its kernels serve the domains that
    were measured on neither (`beside`)."""
    in_stream: frozenset[AnyDomain] = frozenset()
    """Domains that were timed in a stream, of a portfolio that was read."""
    engines: EngineRatios = field(default_factory=dict)
    """Ratios to an engine's own kernels; of attention."""
    peers: Peers = field(default_factory=dict)
    """Peers' kernels that were measured on this GPU; of attention."""
    peer_times: Times = field(default_factory=dict)
    """The same, by rates."""
    _found: dict[AnyDomain, DomainModels | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _rescaled: dict[str, Portfolio] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Results of `rescaled`, by the other GPU, and of `beside`."""

    def rescaled(self, gpu: Gpu) -> Portfolio:
        """The portfolio rescaled to another GPU of the same compute capability; made once.

        Rates of a multiprocessor's work are rescaled by the clock, and amounts are counted over the
        GPU's multiprocessors. Own and vendors' kernels alike wait longer, or shorter, by the
        difference that the bandwidths make for the call's bytes. Own kernels must win by
        `RESCALED_MARGIN` more.
        """
        try:
            return self._rescaled[gpu.identity]
        except KeyError:
            domains = Deferred({key: partial(self._rescaled_to, gpu, key) for key in self.domains})
            portfolio = Portfolio(
                self.op, gpu, domains, self.origin, made_on=self.gpu, engines=self.engines
            )
            return self._rescaled.setdefault(gpu.identity, portfolio)

    def _rescaled_to(self, gpu: Gpu, domain: AnyDomain) -> DomainModels:
        return self.domains[domain].rescaled(self.gpu, gpu)

    def beside(self, other: Portfolio) -> Portfolio:
        """The portfolio with another GPU's rescaled domains where it has none; made once.

        Products that the other GPU timed in a stream come before this one's chained times. Plain
        ones of few rows do not: they are bound by this GPU's memory. An H100's rates of them were
        15 % too short at 46 drawn calls on an H200 (26 November 2026).
        """
        better = {
            domain
            for domain in other.in_stream - self.in_stream
            if isinstance(domain, GatedDomain)
            or (isinstance(domain, ProductDomain) and domain.rows != "few")
        }
        ours = {key: self.domains for key in self.domains if key not in better}
        if other.domains.keys() <= ours.keys():
            return self
        key = f"beside {other.gpu.identity}"
        try:
            return self._rescaled[key]
        except KeyError:
            theirs = other.rescaled(self.gpu).domains
            made_on = self.made_on or other.gpu
            makers = {domain: partial(theirs.__getitem__, domain) for domain in theirs}
            makers |= {key: partial(_with_ratios, own, theirs, key) for key, own in ours.items()}
            streamed = self.in_stream | other.in_stream
            portfolio = Portfolio(
                *(self.op, self.gpu, Deferred(makers), self.origin, made_on),
                in_stream=streamed,
                engines={**other.engines, **self.engines},
                peers=self.peers,
                peer_times=self.peer_times,
            )
            # Both GPUs have the same kernels for what was measured on neither.
            if other._breadth > self._breadth:
                wide = replace(portfolio, domains=_first_of(theirs, self.domains))
                portfolio = replace(portfolio, fallback=wide)
            return self._rescaled.setdefault(key, portfolio)

    def joining(self, serving: Portfolio) -> Portfolio:
        """The kernels that pad heads or divide K in a cluster, beside those that serve the domains
        now.

        Raises:
            ConfigError: when the inputs of a domain are warm.
        """
        joined = dict(self.domains)
        for domain, mine in self.domains.items():
            if mine.regime.l2 != "cold":
                raise ConfigError(f"{domain.label()} cannot be joined (allowed: cold inputs)")
            if (theirs := serving.domains.get(domain)) is None:
                continue
            joining = [
                own for own in mine.candidates if own.family and own.family.joins(own.config)
            ]
            settled = theirs.settled(self.gpu).candidates
            configs = {own.config for own in joining}
            candidates = [*joining, *(own for own in settled if own.config not in configs)]
            joined[domain] = replace(mine, candidates=candidates, margin=theirs.margin)
        return replace(self, domains=joined)

    @property
    def _breadth(self) -> tuple[int, str]:
        """Order of the portfolios whose kernels others share: by the domains that can be donors."""
        plain = sum(not getattr(domain, "has_softcap", False) for domain in self.domains)
        return plain, self.gpu.identity

    def updated(self, newer: Portfolio) -> Portfolio:
        """The portfolio with the domains of a newer one in place of its own.

        Raises:
            ConfigError: when the newer one is of another operation or GPU.
        """
        if (newer.op, newer.gpu) != (self.op, self.gpu):
            raise ConfigError(
                f"the portfolio is of {self.op} on {self.gpu.name} "
                f"(wanted: {newer.op} on {newer.gpu.name})"
            )
        origin = {
            name: sorted({*self.origin.get(name, ()), *newer.origin.get(name, ())})
            for name in sorted({*self.origin, *newer.origin})
        }
        days = origin.get("days", [])
        origin["days"] = [days[0], days[-1]] if days else []
        domains = {**self.domains, **newer.domains}
        portfolio = Portfolio(self.op, self.gpu, domains, origin)
        carried = {name: getattr(self, name) for name in ("engines", "peers", "peer_times")}
        return replace(portfolio, **carried)

    @property
    def _transfer(self) -> Transfer:
        return Transfer(self.gpu, self.domains)

    def models_of(self, domain: AnyDomain | None) -> DomainModels | None:
        """The candidates of a domain. An unmeasured one, with a window or a bias for instance, gets
        the best candidates of its nearest measured donor (`Domain.donors`).
        """
        if domain is None:
            return None
        try:
            return self._found[domain]
        except KeyError:
            models_of = (
                self._transfer.models_of if self.fallback is None else self.fallback.models_of
            )
            models = self.domains.get(domain)
            if models is not None:
                models = self._transfer.completed(models)
            elif (theirs := models_of(domain)) is not None:
                models = self._transfer.timed_here(theirs)
            return self._found.setdefault(domain, models)

    def served(self) -> Iterator[tuple[AnyDomain, DomainModels]]:
        """The measured domains and those that they are donors of, in a fixed order."""
        for domain in sorted(self.domains):
            if (models := self.models_of(domain)) is not None:
                yield domain, models
            for kin in domain.recipients:
                if kin not in self.domains and (transferred := self.models_of(kin)) is not None:
                    yield kin, transferred
        for recipient in DOMAINS[self.op].other_recipients():
            if (
                recipient not in self.domains
                and (transferred := self.models_of(recipient)) is not None
            ):
                yield recipient, transferred

    def select(self, problem: Problem) -> Selection | None:
        """The kernel with the least expected time, PyTorch's unless another one wins clearly, and
        kernels of peers that are expected to be faster.

        Args:
            problem: problem of this operation.

        Returns:
            The selection. None if neither the problem's domain nor a donor was measured, or no
            candidate takes the problem.
        """
        domain = domain_of(problem)
        models = self.models_of(domain)
        selection = None if models is None else choose(problem, models, self.gpu)
        if selection is None or not isinstance(problem, AttentionProblem) or domain is None:
            return selection
        ratios, times = self.peers.get(domain, ()), self.peer_times.get(domain, ())
        if times and not selection.is_trusted:
            times = ()
        if not (ratios or times):
            return selection
        is_cold = selection.regime.l2 == "cold"
        expected = [
            *((selection.expected_us / one, to) for one, to in peer_ratios.faster(problem, ratios)),
            *peer_times.faster(problem, times, self.gpu, selection.expected_us, is_cold),
        ]
        faster = [
            (us, config)
            for us, config in expected
            if families()[config.family].accepts(problem, config, self.gpu)
        ]
        by_us = sorted(faster, key=lambda peer: peer[0])
        return selection._replace(peers=tuple(by_us)) if by_us else selection

    def to_json(self) -> dict[str, Any]:
        """The document that `from_json` reads."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "op": self.op,
            "gpu": asdict(self.gpu),
            "origin": {name: list(values) for name, values in self.origin.items()},
            **({"engines": engines_json(self.engines)} if self.engines else {}),
            **({"peers": peers_json(self.peers)} if self.peers else {}),
            **({"peer_times": times_json(self.peer_times)} if self.peer_times else {}),
            "domains": [models_json(models) for _, models in sorted(self.domains.items())],
        }

    @classmethod
    def from_json(
        cls,
        data: Any,
        make: Callable[[type[AnyDomain], Mapping[str, Any]], DomainModels] | None = None,
    ) -> Portfolio:
        """The inverse of `to_json`.

        Args:
            data: the document.
            make: makes the candidates of a domain, and raises on a wrong value. It is called when a
                domain is first asked for; None: all are made now.

        Raises:
            ConfigError: on another format or version, or a wrong value.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"it is not a portfolio (allowed: format '{FORMAT}')")
        if data.get("version") != VERSION:
            raise ConfigError(f"version {data.get('version')!r} is not known (allowed: {VERSION})")
        try:
            if data["op"] not in DOMAINS:
                allowed = ", ".join(DOMAINS)
                raise ConfigError(f"op {data['op']!r} has no portfolio (allowed: {allowed})")
            kind = DOMAINS[data["op"]]
            makers = {
                kind(**row["domain"]): partial(make or models_from, kind, row)
                for row in data["domains"]
            }
            domains: Mapping[AnyDomain, DomainModels] = Deferred(makers)
            if make is None:
                domains = dict(domains)
            gpu = Gpu(**document.checked(Gpu, data["gpu"]))
            streamed = frozenset(
                kind(**row["domain"])
                for row in data["domains"]
                if Regime.parse(row["regime"]).launch == "stream"
            )
            origin = {str(name): list(map(str, values)) for name, values in data["origin"].items()}
            new = cls(data["op"], gpu, domains, origin, in_stream=streamed)
            engines = engines_from(kind, data.get("engines", ()))
            peers = peers_from(kind, data.get("peers", ()))
            times = times_from(kind, data.get("peer_times", ()))
            return replace(new, engines=engines, peers=peers, peer_times=times)
        except ConfigError:
            raise
        except (*INCOMPATIBLE_CONFIG_ERRORS, ValueError) as exc:
            raise ConfigError(f"it cannot be read: {exc!r}") from exc

    def write(self, path: Path) -> None:
        """Write it as JSON, a line for each candidate.

        Raises:
            StoreError: when it cannot be written.
        """
        output.write(path, text(self.to_json()))

    @classmethod
    def read(cls, path: Path) -> Portfolio:
        """Read what `write` wrote.

        Raises:
            ConfigError: when it cannot be read.
        """
        try:
            return cls.from_json(document.parse(path.read_text()))
        except (OSError, ValueError, ConfigError) as exc:
            raise ConfigError(f"portfolio {path}: {exc}") from exc


def _with_ratios(
    ours: Mapping[AnyDomain, DomainModels],
    theirs: Mapping[AnyDomain, DomainModels],
    domain: AnyDomain,
) -> DomainModels:
    """Our candidates of a domain; with their measured ratios where we have none."""
    models = ours[domain]
    if models.ratios is not None or domain not in theirs:
        return models
    return replace(models, ratios=theirs[domain].ratios)


def _folder() -> Path:
    return resources.cache() / "portfolio"


@cache
def shipped() -> tuple[Portfolio, ...]:
    """The portfolios that ship with the package, under ``cache/portfolio/``, the default GPU's
    first. One of another GPU may have few domains: `serving` has all that serve there.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    portfolios = []
    for path in sorted(_folder().glob("*.json")):
        try:
            data = document.parse(path.read_text())
            portfolios.append(Portfolio.from_json(data, partial(_shipped_models, path)))
        except (OSError, ValueError, ConfigError) as exc:
            raise _damaged(path, exc) from exc
    return tuple(sorted(portfolios, key=lambda portfolio: portfolio.gpu != DEFAULT_GPU))


@cache
def digest() -> str:
    """Digest of the files that ship: equal ones choose equally."""
    text = b"".join(path.read_bytes() for path in sorted(_folder().glob("*.json")))
    return hashlib.sha256(text).hexdigest()


def _shipped_models(path: Path, kind: type[AnyDomain], row: Mapping[str, Any]) -> DomainModels:
    """`models_from` of a shipped file.

    Raises:
        StoreError: when it is damaged.
    """
    try:
        return models_from(kind, row)
    except (*INCOMPATIBLE_CONFIG_ERRORS, ValueError) as exc:
        raise _damaged(path, exc) from exc


def _damaged(path: Path, exc: Exception) -> StoreError:
    return StoreError(f"a shipped file cannot be read: portfolio {path}: {exc}")


def _first_of(
    ours: Mapping[AnyDomain, DomainModels], theirs: Mapping[AnyDomain, DomainModels]
) -> Mapping[AnyDomain, DomainModels]:
    """The domains of two portfolios; the first one wins where both have a domain."""
    makers = {key: partial(theirs.__getitem__, key) for key in theirs}
    return Deferred(makers | {key: partial(ours.__getitem__, key) for key in ours})


def serving(known: Iterable[Portfolio], gpu: Gpu) -> list[Portfolio]:
    """The portfolio that serves each operation on a GPU: its own.

    Domains that were not measured there come from GPUs whose kernels it shares, rescaled. The GPU
    with the most domains is first, then the one with the nearest count of multiprocessors.

    Args:
        known: portfolios to choose from.
        gpu: GPU to serve. One whose clock or bandwidth is not known has no rescaled portfolios.
    """
    alike: dict[str, list[Portfolio]] = {}
    for portfolio in known:
        if portfolio.gpu.shares_kernels(gpu):
            alike.setdefault(portfolio.op, []).append(portfolio)
    serving_ones = []
    for portfolios in alike.values():
        portfolios.sort(key=lambda p: (-len(p.domains), _distance(p.gpu, gpu)))
        own = [portfolio for portfolio in portfolios if portfolio.gpu.identity == gpu.identity]
        rescalable = [
            portfolio for portfolio in portfolios if portfolio not in own and gpu.has_rates
        ]
        if own or rescalable:
            first = own[0] if own else rescalable.pop(0).rescaled(gpu)
            serving_ones.append(reduce(Portfolio.beside, rescalable, first))
    return serving_ones


def everywhere() -> list[Portfolio]:
    """The portfolios that serve on each GPU that a shipped one was made on.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    ours = shipped()
    return [p for gpu in dict.fromkeys(p.gpu for p in ours) for p in serving(ours, gpu)]


def promising(problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
    """Expected microseconds and configs of the own kernels that the shipped portfolios have for a
    problem, best first.

    Args:
        problem: problem of any operation.
        gpu: GPU that it runs on.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    for portfolio in serving(shipped(), gpu):
        if portfolio.op == problem.op:
            selection = portfolio.select(problem)
            yield from selection.ranked() if selection else ()


def _distance(one: Gpu, other: Gpu) -> tuple[bool, int, str]:
    return (
        one.identity != other.identity,
        abs(one.sm_count - other.sm_count),
        one.identity,
    )
