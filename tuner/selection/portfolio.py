"""Portfolios: a few kernels that serve every shape of an operation, and their time models.

Sizes, strides and numbers of heads are launch arguments. So a kernel that was proven over its
domain (`Proof`) may serve any shape of the domain. Its speed is predicted by a *time model*: the
microseconds for each amount of work that `Family.work` counts, fitted to measurements
(`tuner.search.portfolio`).

`Portfolio.select` adds these terms up for each candidate. It chooses an own kernel only if it is
expected to be faster than the vendor's by the domain's margin times the model's error.

Shipped portfolios lie under ``cache/portfolio/``. A GPU without one uses that of a GPU that shares
its kernels, rescaled by the datasheets' ratios (`serving`). Needs the standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial, reduce
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tuner.base import document, output, resources
from tuner.base.deferred import Deferred
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import find
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS
from tuner.families.fused_attention import paged, sparse
from tuner.families.fused_attention.packing import PACKING
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.selection.candidates import (
    Candidate,
    DomainModels,
    DomainTimes,
    Estimate,
    Legality,
    Regret,
    Spread,
    pytorchs_choice,
)
from tuner.selection.domains import (
    DOMAINS,
    MAX_SIZE_FACTOR,
    AnyDomain,
    AttentionDomain,
    Domain,
    GatedDomain,
    ProductDomain,
)

FORMAT = "cutlass-tuner portfolio"
VERSION = 2
_FAR = f"no kernel was measured within {MAX_SIZE_FACTOR} times these sizes"
_WHOLE = "the time is that of a mask that hides nothing: what a block mask hides is not known"
VENDOR_MARGIN = 0.25
"""Share of its time by which another kernel of PyTorch's must beat PyTorch's own choice."""
#: Significant digits of the rates in a written time model.
_DIGITS = 5


def _unpacked(one: Candidate) -> Candidate:
    """The candidate with one head (no packing) in the rows of a tile."""
    params = {name: value for name, value in one.config.params.items() if name not in PACKING}
    return replace(one, config=Config(one.config.family, params, one.config.stages))


def preferred(expected: Mapping[str, float], near: Collection[str] | None = None) -> str:
    """The vendor's kernel for a call: PyTorch's choice, unless another kernel is expected to be
    faster by `VENDOR_MARGIN`.

    Args:
        expected: expected microseconds by kernel, not empty.
        near: kernels whose expected times are trusted at these sizes; None: all.
    """
    usual = pytorchs_choice(expected)
    trusted = [name for name in expected if name == usual or near is None or name in near]
    best = min(trusted, key=lambda name: (expected[name], name))
    return best if expected[best] * (1 + VENDOR_MARGIN) < expected[usual] else usual


def _vendors_best(
    times: DomainTimes, problem: Problem, expected: Sequence[float], facts: Legality
) -> tuple[float, Config | None, str]:
    """Expected microseconds, config and name of the vendor's kernel for a problem; an infinite time
    if no vendor takes it.
    """
    legal, name = times.legal_vendors(problem, facts)
    if name is None:
        return math.inf, None, ""
    number, config = legal[name]
    usual_us = expected[number]
    for other, _ in legal.values():
        if expected[other] * (1 + VENDOR_MARGIN) < usual_us:
            break
    else:
        return usual_us, config, name
    found = {one: expected[number] for one, (number, _) in legal.items()}
    sizes = times.models.domain.sizes(problem)
    near = [one for one, (number, _) in legal.items() if times.is_vendor_near(number, sizes)]
    name = preferred(found, near)
    return found[name], legal[name][1], name


def named_kernels(domain: AttentionDomain) -> tuple[Config, ...]:
    """The kernels that the family names for a domain."""
    if domain.is_sparse:
        return sparse.kernels(domain.head_dim)
    return paged.kernels(
        domain.head_dim,
        domain.phase,
        is_plain=domain.mask != "windowed" and not domain.has_sinks,
        has_sinks=domain.has_sinks,
        is_e4m3=domain.is_e4m3,
        is_windowed=domain.mask == "windowed",
    )


def _like(kernel: Config, combine: str | None, candidates: Iterable[Candidate]) -> Candidate | None:
    """The own kernel most similar to another that combines splits in this way; None without one."""
    found = [
        one
        for one in candidates
        if one.config.family == kernel.family and one.config.get("combine") == combine
    ]

    def unlike(one: Candidate) -> tuple[bool, bool, bool]:
        config = one.config
        is_packed = config.get("packed_heads", 1) > 1
        return (
            "key_groups" in config.params,
            config["warp_groups"] != kernel["warp_groups"],
            is_packed != (kernel.get("packed_heads", 1) > 1),
        )

    return min(found, key=unlike, default=None)


class Selection(NamedTuple):
    """The kernel chosen for a shape, and the reason."""

    config: Config
    expected_us: float
    vendor: str
    """The vendor's kernel with the least expected time; empty without a time model."""
    vendor_us: float
    problem: Problem
    times: DomainTimes
    """Expected times of the domain's candidates on the GPU."""
    facts: Legality
    """The problem's `DomainTimes.legality`."""
    estimates: Sequence[Estimate]
    """Estimates of own kernels, legal or not."""
    bound_us: float
    """Largest expected time, margin included, at which an own kernel is chosen."""
    is_near: bool
    """True if an own kernel was measured near these sizes."""

    @property
    def domain(self) -> AnyDomain:
        return self.times.models.domain

    @property
    def regime(self) -> Regime:
        """Regime of the measurements."""
        return self.times.models.regime

    @property
    def regret(self) -> Regret:
        """Regret of the domain's selections."""
        return self.times.models.regret

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons why the expected times may be wrong, for people."""
        kin = self.times.models.kin
        found = [] if kin is None else [f"the rates are those of {kin.label()}"]
        if (made_on := self.times.models.made_on) is not None:
            found.insert(0, f"made on {made_on.name}, rescaled to {self.times.gpu.name}")
        if isinstance(self.domain, AttentionDomain) and self.domain.is_sparse:
            found.append(_WHOLE)
        return tuple(found) if self.is_near else (*found, _FAR)

    @property
    def source(self) -> str:
        """Reason for this kernel, for people."""
        versus = f", {self.vendor} {self.vendor_us:.1f}" if self.vendor else ""
        return f"{self.domain.label()}: expected {self.expected_us:.1f} us{versus}"

    def own(self) -> Iterator[tuple[float, Config]]:
        """Own kernels that are expected to beat the vendor's by the margin, best first.

        Yields:
            Expected microseconds and config, which is made on demand.
        """
        return _legal(self.times, self.problem, self.facts, sorted(self.estimates), self.bound_us)

    def ranked(self) -> Iterator[tuple[float, Config]]:
        """As `own`, for all own kernels."""
        return _legal(self.times, self.problem, self.facts, sorted(self.estimates), math.inf)


def _legal(
    times: DomainTimes,
    problem: Problem,
    facts: Legality,
    estimates: Iterable[Estimate],
    bound_us: float,
) -> Iterator[tuple[float, Config]]:
    """Expected microseconds and config of the legal estimates up to a bound."""
    for cautious_us, us, place, splits in estimates:
        if cautious_us > bound_us:
            return
        if (config := times.config(problem, place, splits, facts)) is not None:
            yield us, config


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
            made = Portfolio(self.op, gpu, domains, self.origin, made_on=self.gpu)
            return self._rescaled.setdefault(gpu.identity, made)

    def _rescaled_to(self, gpu: Gpu, domain: AnyDomain) -> DomainModels:
        return self.domains[domain].rescaled(self.gpu, gpu)

    def beside(self, other: Portfolio) -> Portfolio:
        """The portfolio with another GPU's rescaled domains where it has none; made once.

        Products that the other GPU timed in a stream come before this one's chained times. Plain
        ones of few rows do not: they are bound by this GPU's memory. An H100's rates of them were
        15 % too short at 46 drawn calls on an H200 (26 November 2026).
        """
        better = {
            one
            for one in other.in_stream - self.in_stream
            if isinstance(one, GatedDomain)
            or (isinstance(one, ProductDomain) and one.rows != "few")
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
            makers = {one: partial(theirs.__getitem__, one) for one in theirs}
            makers |= {one: partial(held.__getitem__, one) for one, held in ours.items()}
            both = self.in_stream | other.in_stream
            made = Portfolio(
                self.op, self.gpu, Deferred(makers), self.origin, made_on, in_stream=both
            )
            # Both GPUs have the same kernels for what was measured on neither.
            if other._breadth > self._breadth:
                wide = replace(made, domains=_first_of(theirs, self.domains))
                made = replace(made, fallback=wide)
            return self._rescaled.setdefault(key, made)

    def joining(self, serving: Portfolio) -> Portfolio:
        """The kernels that pad heads, beside those that serve the domains now.

        Raises:
            ConfigError: when a domain is not one of decoding from a cold cache.
        """
        joined = dict(self.domains)
        for domain, mine in self.domains.items():
            if mine.regime.l2 != "cold":
                raise ConfigError(f"{domain.label()} cannot be joined (allowed: decoding, cold)")
            if (theirs := serving.domains.get(domain)) is None:
                continue
            padding = [one for one in mine.candidates if "pads_heads" in one.config.params]
            rest = theirs.settled(self.gpu).candidates
            known = {one.config for one in padding}
            candidates = [*padding, *(one for one in rest if one.config not in known)]
            joined[domain] = replace(mine, candidates=candidates, margin=theirs.margin)
        return replace(self, domains=joined)

    @property
    def _breadth(self) -> tuple[int, str]:
        """Order of the portfolios whose kernels others share: by the domains that are kin."""
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
        return Portfolio(self.op, self.gpu, {**self.domains, **newer.domains}, origin)

    def models_of(self, domain: AnyDomain | None) -> DomainModels | None:
        """The candidates of a domain. An unmeasured one, with a window or a bias for instance, gets
        the best candidates of its kin (`Domain.kin`).
        """
        if domain is None:
            return None
        try:
            return self._found[domain]
        except KeyError:
            kin_of = self._kin_of if self.fallback is None else self.fallback.models_of
            found = self.domains.get(domain)
            if found is None and (theirs := kin_of(domain)) is not None:
                found = self._timed_here(theirs)
            return self._found.setdefault(domain, found)

    def served(self) -> Iterator[tuple[AnyDomain, DomainModels]]:
        """The measured domains and the domains of their kin, in a fixed order."""
        for domain, models in sorted(self.domains.items()):
            yield domain, models
            for one in domain.varied:
                if one not in self.domains and (kin := self.models_of(one)) is not None:
                    yield one, kin
        for one in DOMAINS[self.op].others():
            if one not in self.domains and (kin := self.models_of(one)) is not None:
                yield one, kin

    def _named_of(self, domain: AttentionDomain) -> DomainModels | None:
        """Candidates that the family names for a domain of paged caches or block-sparse masks.

        Each schedule has the rates of the most similar dense kernel. None for other domains.
        """
        if domain not in tuple(domain.others()):
            return None
        found: list[Candidate] = []
        donor: DomainModels | None = None
        for kernel in named_kernels(domain):
            is_short = kernel["warp_groups"] == 1  # kernels with more warp groups are for prompts
            like = domain if is_short else domain._replace(phase="prompt")
            for combine in (None, "cluster", "kernel") if is_short else (None,):
                for other in like.kin:
                    models = self.domains.get(other)
                    one = None if models is None else _like(kernel, combine, models.candidates)
                    if one is not None:
                        more = {} if combine is None else {"combine": combine}
                        config = Config(kernel.family, {**kernel.params, **more})
                        rates = one.rates
                        if is_short and domain.is_paged and domain.phase == "prompt":
                            rates = {w: us * paged.SHORT_AT_PROMPTS for w, us in rates.items()}
                        found.append(replace(one, config=config, rates=rates))
                        donor = donor or models
                        break
        if donor is None:
            return None
        # All schedules of a kernel compete, whatever sizes their rates were measured at.
        spread = Spread.over(one.spread for one in found)
        transferred = [replace(one, spread=spread) for one in found]
        return replace(donor, domain=domain, candidates=transferred, margin=0.0, kin=donor.domain)

    def _kin_of(self, domain: AnyDomain) -> DomainModels | None:
        if isinstance(domain, AttentionDomain) and domain.has_named_kernels:
            return self._named_of(domain)
        for other in domain.kin:
            models = self.domains.get(other)
            if models is None:
                continue
            transferred = list(self._transferred(domain, models))
            candidates, margin = transferred, 0.0
            if domain.has_rival_kin:
                candidates, margin = [*transferred, *models.vendors], models.margin
            if candidates:
                return replace(
                    models, domain=domain, candidates=candidates, margin=margin, kin=other
                )
        return None

    def _timed_here(self, theirs: DomainModels) -> DomainModels:
        """Candidates of a domain of kin with the rates of this GPU where it measured the kin."""
        domain, kin = theirs.domain, theirs.kin
        here = None if kin is None else self.domains.get(kin)
        if here is None or here.made_on is not None or theirs.made_on is None:
            return theirs
        if isinstance(domain, AttentionDomain) and domain.has_named_kernels:
            return theirs
        wanted = {one.config for one in theirs.candidates}
        own = [one for one in here.candidates if not one.is_vendor]
        carried = (self._carried(domain, one) for one in (*own, *map(_unpacked, own)))
        timed = {one.config: one for one in carried if one is not None and one.config in wanted}
        if not timed:
            return theirs
        candidates = [*timed.values(), *(here.vendors if theirs.vendors else ())]
        margin = here.margin if theirs.vendors else theirs.margin
        return replace(here, domain=domain, candidates=candidates, margin=margin, kin=kin)

    def _transferred(self, domain: AnyDomain, models: DomainModels) -> Iterator[Candidate]:
        """Own candidates as they are called in a domain of the kin, best first."""
        own = [one for one in models.candidates if not one.is_vendor]
        own.sort(key=lambda one: "packed_heads" in one.config.params)
        if domain.splits_kin:
            yield from self._divided(domain, own)
            return
        if domain.kin_kernels is not None:
            every = (self._carried(domain, one, (1,)) for one in own)
            yield from islice((one for one in every if one is not None), domain.kin_kernels)
            return
        kinds = set[Hashable]()
        for one in (*own, *map(_unpacked, own)):
            kind = one.config.get("packed_heads", 1), "combine" in one.config.params
            if kind not in kinds and (carried := self._carried(domain, one)) is not None:
                kinds.add(kind)
                yield carried

    def _divided(self, domain: AnyDomain, own: Sequence[Candidate]) -> Iterator[Candidate]:
        """The best own kernel that splits the keys, for each number of packed heads if the domain
        takes several: with one split, and in each measured way to combine several. The best of all
        where none splits them.
        """
        of_kernel: dict[str, list[Candidate]] = {}
        for one in own:
            if one.family is not None:
                of_kernel.setdefault(one.family.compile_digest(one.config), []).append(one)
        by_use = sorted(
            of_kernel.values(), key=lambda ways: not any("combine" in w.config.params for w in ways)
        )
        taken = set[Any]()
        for ways in by_use:
            packed = ways[0].config.get("packed_heads", 1)
            params = {name: v for name, v in ways[0].config.params.items() if name != "combine"}
            whole = replace(ways[0], config=Config(ways[0].config.family, params))
            carried = self._carried(domain, whole, (1,))
            splits = [one for one in ways if "combine" in one.config.params]
            if carried is None or packed in taken or (taken and not splits):
                continue
            taken.add(packed)
            yield carried
            several = (self._carried(domain, one) for one in splits)
            yield from (one for one in several if one is not None)
            if domain.kin_kernels is not None:
                return

    def _carried(
        self, domain: AnyDomain, one: Candidate, splits: Sequence[int] | None = None
    ) -> Candidate | None:
        """A candidate as it is called in a domain of its kin.

        Args:
            domain: domain of the kin.
            one: candidate of a measured domain.
            splits: numbers of splits to try; None: those of its family.

        Returns:
            The candidate, or None if it is illegal with all these numbers.
        """
        family = one.family
        if family is None:
            return None
        problem = domain.problem_for(one.config)
        config = family.carried(problem, one.config)
        counts = family.splits(problem, config, self.gpu) if splits is None else splits
        called = (family.called(problem, config, count) for count in counts)
        is_legal = any(family.accepts(problem, config, self.gpu) for config in called)
        return replace(one, config=config) if is_legal else None

    def select(self, problem: Problem) -> Selection | None:
        """The kernel with the least expected time, the vendor's unless an own one wins clearly.

        Args:
            problem: problem of this operation.

        Returns:
            The selection. None if neither the problem's domain nor its kin was measured, or no
            candidate takes the problem.
        """
        models = self.models_of(Domain.of(problem))
        if models is None:
            return None
        times = models.times(self.gpu)
        estimates, vendors_us, is_near = times.estimates(problem)
        facts = times.legality(problem)
        vendor_us, vendor, name = _vendors_best(times, problem, vendors_us, facts)
        is_trusted = is_near or vendor is None or models.domain.reaches_far
        bound_us = vendor_us if is_trusted else 0.0
        # The first is legal most often, so the others are sorted only on demand.
        chosen_us, chosen = vendor_us, vendor
        if estimates and (first := min(estimates))[0] <= bound_us:
            _, us, place, splits = first
            if (config := times.config(problem, place, splits, facts)) is not None:
                chosen_us, chosen = us, config
            else:
                others = _legal(times, problem, facts, sorted(estimates), bound_us)
                chosen_us, chosen = next(others, (vendor_us, vendor))
        if chosen is None:
            return None
        return Selection(
            chosen,
            chosen_us,
            name,
            vendor_us,
            problem,
            times,
            facts,
            estimates,
            bound_us,
            is_near,
        )

    def to_json(self) -> dict[str, Any]:
        """The document that `from_json` reads."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "op": self.op,
            "gpu": asdict(self.gpu),
            "origin": {name: list(values) for name, values in self.origin.items()},
            "domains": [_models_json(models) for _, models in sorted(self.domains.items())],
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
                kind(**row["domain"]): partial(make or _models_from, kind, row)
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
            return cls(data["op"], gpu, domains, origin, in_stream=streamed)
        except ConfigError:
            raise
        except (*INCOMPATIBLE_CONFIG_ERRORS, ValueError) as exc:
            raise ConfigError(f"it cannot be read: {exc!r}") from exc

    def write(self, path: Path) -> None:
        """Write it as JSON, a line for each candidate.

        Raises:
            StoreError: when it cannot be written.
        """
        output.write(path, _text(self.to_json()))

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


def _folder() -> Path:
    return resources.cache() / "portfolio"


@cache
def shipped() -> tuple[Portfolio, ...]:
    """The portfolios that ship with the package, under ``cache/portfolio/``, the default GPU's
    first. One of another GPU may have few domains: `serving` has all that serve there.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    found = []
    for path in sorted(_folder().glob("*.json")):
        try:
            data = document.parse(path.read_text())
            found.append(Portfolio.from_json(data, partial(_shipped_models, path)))
        except (OSError, ValueError, ConfigError) as exc:
            raise _damaged(path, exc) from exc
    return tuple(sorted(found, key=lambda one: one.gpu != DEFAULT_GPU))


def _shipped_models(path: Path, kind: type[AnyDomain], row: Mapping[str, Any]) -> DomainModels:
    """`_models_from` of a shipped file.

    Raises:
        StoreError: when it is damaged.
    """
    try:
        return _models_from(kind, row)
    except (*INCOMPATIBLE_CONFIG_ERRORS, ValueError) as exc:
        raise _damaged(path, exc) from exc


def _damaged(path: Path, exc: Exception) -> StoreError:
    return StoreError(f"a shipped file cannot be read: portfolio {path}: {exc}")


def _first_of(
    ours: Mapping[AnyDomain, DomainModels], theirs: Mapping[AnyDomain, DomainModels]
) -> Mapping[AnyDomain, DomainModels]:
    """The domains of two portfolios, of both those of the first."""
    makers = {key: partial(theirs.__getitem__, key) for key in theirs}
    return Deferred(makers | {key: partial(ours.__getitem__, key) for key in ours})


def serving(known: Iterable[Portfolio], gpu: Gpu) -> list[Portfolio]:
    """The portfolio that serves each operation on a GPU: its own.

    Domains that were not measured there come from GPUs whose kernels it shares, rescaled. The GPU
    with the most domains is first, then the one with the nearest count of multiprocessors.

    Args:
        known: portfolios to choose from.
        gpu: GPU to serve. One that is not in `hardware.GPUS` has no rescaled portfolios: its
            bandwidth is not known everywhere.
    """
    alike: dict[str, list[Portfolio]] = {}
    for one in known:
        if one.gpu.shares_kernels(gpu):
            alike.setdefault(one.op, []).append(one)
    found = []
    for portfolios in alike.values():
        portfolios.sort(key=lambda one: (-len(one.domains), _distance(one.gpu, gpu)))
        own = [one for one in portfolios if one.gpu.identity == gpu.identity]
        others = [one for one in portfolios if one not in own and gpu.is_described]
        if own or others:
            first = own[0] if own else others.pop(0).rescaled(gpu)
            found.append(reduce(Portfolio.beside, others, first))
    return found


def everywhere() -> list[Portfolio]:
    """The portfolios that serve on each GPU that a shipped one was made on.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    known = shipped()
    return [one for gpu in dict.fromkeys(one.gpu for one in known) for one in serving(known, gpu)]


def promising(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Own kernels that the shipped portfolios have for a problem, by expected time.

    Args:
        problem: problem of any operation.
        gpu: GPU that it runs on.

    Raises:
        StoreError: when a shipped file is damaged.
    """
    for one in serving(shipped(), gpu):
        if one.op == problem.op:
            selection = one.select(problem)
            yield from (config for _, config in selection.ranked()) if selection else ()


def _distance(one: Gpu, other: Gpu) -> tuple[bool, int, str]:
    return (
        one.identity != other.identity,
        abs(one.sm_count - other.sm_count),
        one.identity,
    )


def _models_json(models: DomainModels) -> dict[str, Any]:
    return {
        "domain": _domain_json(models.domain),
        "regime": models.regime.key,
        "margin": models.margin,
        "regret": asdict(models.regret),
        "candidates": [_candidate_json(models.domain, one) for one in models.candidates],
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


def _models_from(kind: type[AnyDomain], row: Mapping[str, Any]) -> DomainModels:
    domain, margin = kind(**row["domain"]), _number(row["margin"])
    return DomainModels(
        domain,
        Regime.parse(row["regime"]),
        [_candidate_from(kind, one) for one in row["candidates"]],
        margin,
        Regret(**document.checked(Regret, row["regret"])),
    )


def _candidate_from(kind: type[AnyDomain], row: Mapping[str, Any]) -> Candidate:
    config = Config.from_json({"family": row["family"], "params": row["params"]})
    family = find(config.family)
    rates = {str(term): _number(us) for term, us in row["rates"].items()}
    if family is not None and (unknown := set(rates) - set(family.work_terms)):
        raise ConfigError(f"{config.family} counts no '{sorted(unknown)[0]}'")
    errors = _number(row["median_error"]), _number(row["p90_error"])
    spread = dict(row["spread"])
    if "work" in kind.axes and "work" not in spread:  # of version 2's first portfolios
        sizes = list(spread.values())
        spread["work"] = tuple(math.prod(each) for each in zip(*sizes, strict=True))
    bounds = tuple((int(low), int(high)) for low, high in (spread[x] for x in kind.axes))
    return Candidate(config, rates, int(row["points"]), *errors, Spread(bounds))


def _number(value: Any) -> float:
    """A finite number, not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{value!r} is not a number (allowed: 0 or more)")
    return float(value)


def _text(data: Mapping[str, Any]) -> str:
    """JSON with a line for each candidate."""
    head = {name: value for name, value in data.items() if name != "domains"}
    parts = []
    for domain in data["domains"]:
        rest = {name: value for name, value in domain.items() if name != "candidates"}
        lines = ",\n".join(f"   {json.dumps(one)}" for one in domain["candidates"])
        parts.append(f'  {json.dumps(rest)[:-1]}, "candidates": [\n{lines}\n  ]}}')
    body = ",\n".join(parts)
    return f'{json.dumps(head)[:-1]},\n "domains": [\n{body}\n ]}}\n'
