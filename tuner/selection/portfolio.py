"""A portfolio: the few kernels that serve every shape of an operation, and the time of each.

Correctness belongs to a kernel: sizes, strides and counts of heads are arguments of a launch, so a
kernel that was proven over its domain (`Proof`) may serve any shape of it. Speed belongs to a
selection: a *time model* for each kernel, the microseconds of each amount of work that
`Family.work` counts, fitted to measurements (`tuner.search.portfolio`). `Portfolio.select` adds the
terms up for each candidate, and chooses an own kernel only where it is expected to be faster than
the vendor's even if its model errs: by the domain's margin times the error found of that model.

What ships lies under ``cache/portfolio/``. Needs the standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import islice
from operator import itemgetter, mul
from pathlib import Path
from typing import Any, NamedTuple

from tuner.base import document, output, resources
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, Family
from tuner.families.fused_attention import paged
from tuner.families.vendor.sdpa import BACKENDS
from tuner.families.work import Sizes, sizes_of
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.selection.domains import DOMAINS, AnyDomain, AttentionDomain, Domain

FORMAT = "cutlass-tuner portfolio"
VERSION = 2
REACH = 2
"""Factor by which a size may exceed the measured ones: beyond it a time model is not trusted."""
_FAR = f"no kernel was measured within {REACH} times these sizes"
VENDOR_MARGIN = 0.25
"""Share of its time by which another of PyTorch's kernels has to beat PyTorch's choice."""
#: Rates of a time model are written with as many digits.
_DIGITS = 5


class Spread(NamedTuple):
    """Smallest and largest sizes that a kernel was measured at."""

    bounds: tuple[tuple[int, int], ...]
    """Bounds of each of the domain's `axes`."""

    @classmethod
    def of(cls, sizes: Iterable[tuple[int, ...]]) -> Spread:
        """The spread of problems' `Domain.sizes`."""
        return cls(tuple((min(each), max(each)) for each in zip(*sizes, strict=True)))

    @classmethod
    def over(cls, spreads: Iterable[Spread]) -> Spread:
        """The smallest that holds all of some."""
        axes = zip(*(one.bounds for one in spreads), strict=True)
        return cls(tuple((min(low for low, _ in axis), max(high for _, high in axis))
                         for axis in axes))  # fmt: skip

    @property
    def reached(self) -> tuple[tuple[float, float], ...]:
        """The bounds within `REACH` times the measured sizes."""
        return tuple((low / REACH, high * REACH) for low, high in self.bounds)

    def holds(self, sizes: tuple[int, ...]) -> bool:
        """True when none is beyond `REACH` times the measured ones."""
        return _is_near(self.reached, sizes)


@dataclass(frozen=True)
class Candidate:
    """A kernel of a domain with its time model."""

    config: Config
    """Without the parameters that `Family.scheduled` chooses for a shape."""
    rates: Mapping[str, float]
    """Microseconds of one unit of each of the family's `work_terms`; a missing one is 0."""
    points: int
    """Measurements that the rates were fitted to."""
    median_error: float
    """Median of |expected / measured - 1| at problems left out of the fit."""
    p90_error: float
    spread: Spread

    @cached_property
    def family(self) -> Family | None:
        """None for a family that this version does not have."""
        return families().get(self.config.family)

    @cached_property
    def is_vendor(self) -> bool:
        return self.family is not None and self.family.is_vendor

    @cached_property
    def priced(self) -> tuple[float, ...]:
        """The rate of each of the family's work terms."""
        terms = self.family.work_terms if self.family else ()
        return tuple(self.rates.get(term, 0.0) for term in terms)


Estimate = tuple[float, float, int, int]
"""A candidate as it may be called for a problem: its expected microseconds with the margin times
the model's error, and without; its place in the domain, of equal times the first is taken; splits.
"""


@dataclass(frozen=True)
class Regret:
    """How selections did at problems whose models were left out when the rates were fitted; the
    kernels and the margin were chosen with them.
    """

    problems: int
    mean: float
    """Time of the chosen kernel over the fastest measured one, less 1."""
    worst: float
    over_vendor: float
    """Geometric mean of the fastest vendor's time over the chosen kernel's."""
    least_over_vendor: float
    own_share: float
    """Share of the problems at which an own kernel was chosen."""

    def text(self) -> str:
        """For people, in one line."""
        return (
            f"left out: mean {100 * self.mean:.1f} %, worst {100 * self.worst:.1f} % over "
            f"{self.problems} problems; {self.over_vendor:.2f}x the fastest vendor, "
            f"{self.least_over_vendor:.2f}x at the worst"
        )


@dataclass(frozen=True)
class DomainModels:
    """The candidates of one domain, and how well they are known."""

    domain: AnyDomain
    regime: Regime
    candidates: Sequence[Candidate]
    margin: float
    """An own kernel is chosen that is expected to beat the vendor's by so many times its model's
    `Candidate.p90_error`, at least."""
    regret: Regret
    kin: AnyDomain | None = None
    """Domain whose rates these are, where this one was not measured."""
    _legal: dict[Hashable, bool] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Results of `config` by candidate, splits and `Family.legality_facts`."""

    @property
    def vendors(self) -> list[Candidate]:
        """The vendors' kernels among the candidates."""
        return [one for one in self.candidates if one.is_vendor]

    @cached_property
    def _own(self) -> Sequence[_Alike]:
        return _alike(self.candidates, self.margin, is_vendor=False)

    @cached_property
    def _vendors(self) -> Sequence[_Alike]:
        return _alike(self.candidates, 0.0, is_vendor=True)

    @cached_property
    def _shared(self) -> tuple[tuple[float, float], ...]:
        """The sizes that all own candidates were measured near."""
        reached = [one.bounds for alike in self._own for one in alike.members]
        return tuple(
            (max(low for low, _ in each), min(high for _, high in each))
            for each in zip(*reached, strict=True)
        )

    def estimates(self, problem: Problem, gpu: Gpu) -> tuple[list[Estimate], list[Estimate], bool]:
        """Own kernels and vendor's, fastest first, legal or not; and whether an own one was
        measured near: else all are here.
        """
        sizes, measured = sizes_of(problem), self.domain.sizes(problem)
        are_near = bool(self._own) and _is_near(self._shared, measured)
        own = _estimated(self._own, problem, sizes, None if are_near else measured, gpu)
        vendors = _estimated(self._vendors, problem, sizes, None, gpu)
        is_near = bool(own)
        if not is_near:
            own = _estimated(self._own, problem, sizes, None, gpu)
        own.sort()
        vendors.sort()
        return own, vendors, is_near

    def config(self, problem: Problem, estimate: Estimate, gpu: Gpu) -> Config | None:
        """The config of an estimate; None where it is not legal for the problem."""
        _, _, place, splits = estimate
        one = self.candidates[place]
        if one.family is None:
            return None
        config = one.family.called(problem, one.config, splits)
        key = place, splits, gpu.identity, one.family.legality_facts(problem)
        is_legal = self._legal.get(key)
        if is_legal is None:
            is_legal = self._legal[key] = one.family.accepts(problem, config, gpu)
        return config if is_legal else None


class _Priced(NamedTuple):
    """A candidate as its time is added up."""

    place: int
    bounds: tuple[tuple[float, float], ...]
    """Sizes within `REACH` of the measured ones."""
    used: Callable[[Sequence[float]], Sequence[float]]
    """Selects the amounts of work that have a rate."""
    rates: tuple[float, ...]
    doubt: float
    """Factor of the margin."""


class _Alike(NamedTuple):
    """Candidates of equal work: they cut the problem alike, and are launched in several ways."""

    family: Family
    config: Config
    """One of them."""
    tilings: dict[int, Any]
    """By splits."""
    splits: Sequence[int] | None
    """None: the problem's."""
    members: list[_Priced]


def _alike(candidates: Sequence[Candidate], margin: float, *, is_vendor: bool) -> list[_Alike]:
    """Own candidates, or the vendors', that this version has a family for."""
    found: dict[Hashable, _Alike] = {}
    for place, one in enumerate(candidates):
        family, config = one.family, one.config
        if family is None or family.is_vendor != is_vendor:
            continue
        tiling, is_scheduled = family.tiling(config), family.is_scheduled(config)
        splits = None if is_scheduled else (1,) if tiling is None else (tiling.splits,)
        tilings = _Tilings(tiling)
        # Those with a schedule may have unlike ones.
        key = family.name, tiling, config if is_scheduled else None
        alike = found.setdefault(key, _Alike(family, config, tilings, splits, []))
        # At least two, so that what is taken is a tuple.
        used = [place for place, us in enumerate(one.priced) if us]
        used = used if len(used) > 1 else [0, 1]
        rates, doubt = tuple(one.priced[term] for term in used), 1 + margin * one.p90_error
        alike.members.append(_Priced(place, one.spread.reached, itemgetter(*used), rates, doubt))
    return list(found.values())


class _Tilings(dict[int, Any]):
    """Tilings that differ in their splits, each made once."""

    def __init__(self, one: Any) -> None:
        super().__init__({1 if one is None else one.splits: one})
        self._one = one

    def __missing__(self, splits: int) -> Any:
        self[splits] = found = self._one._replace(splits=splits)
        return found


def _estimated(
    groups: Sequence[_Alike],
    problem: Problem,
    sizes: Sizes,
    measured: tuple[int, ...] | None,
    gpu: Gpu,
) -> list[Estimate]:
    """The estimates of candidates that were measured near some sizes; of all without those."""
    found = []
    for family, config, tilings, splits, members in groups:
        near = members
        if measured is not None:
            near = [one for one in members if _is_near(one.bounds, measured)]
            if not near:
                continue
        for count in family.splits(problem, config, gpu) if splits is None else splits:
            amounts = family.amounts(sizes, tilings[count], gpu)
            for place, _, used, rates, doubt in near:
                us = sum(map(mul, rates, used(amounts)))
                found.append((us * doubt, us, place, count))
    return found


def _is_near(bounds: tuple[tuple[float, float], ...], sizes: tuple[int, ...]) -> bool:
    for (low, high), size in zip(bounds, sizes, strict=True):
        if not low <= size <= high:
            return False
    return True


def _unpacked(one: Candidate) -> Candidate:
    """The candidate with one head in the rows of a tile."""
    params = {name: value for name, value in one.config.params.items() if name != "packed_heads"}
    return replace(one, config=Config(one.config.family, params, one.config.stages))


def preferred(expected: Mapping[str, float], near: Collection[str] | None = None) -> str:
    """The vendor's kernel to leave a call to: PyTorch's own choice, unless another is expected to
    be faster by `VENDOR_MARGIN`.

    Args:
        expected: microseconds by kernel; one at least.
        near: kernels whose expectations are trusted at these sizes; None: all.
    """
    usual = next((name for name in BACKENDS if name in expected), min(expected))
    trusted = [name for name in expected if name == usual or near is None or name in near]
    best = min(trusted, key=lambda name: (expected[name], name))
    return best if expected[best] * (1 + VENDOR_MARGIN) < expected[usual] else usual


def _doubts(models: DomainModels, is_near: bool) -> Iterator[str]:
    if models.kin is not None:
        yield f"the rates are those of {models.kin.label()}"
    if not is_near:
        yield _FAR


def _like(kernel: Config, combine: str | None, candidates: Iterable[Candidate]) -> Candidate | None:
    """The own kernel most like another, with a way to combine splits; None where none has it."""
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


@dataclass(frozen=True)
class Selection:
    """The kernel chosen for a shape, and why."""

    config: Config
    expected_us: float
    vendor: str
    """The vendor's fastest kernel, by expectation; empty where none has a time model."""
    vendor_us: float
    domain: AnyDomain
    regime: Regime
    regret: Regret
    doubts: tuple[str, ...] = ()
    own: Callable[[], Iterator[tuple[float, Config]]] = field(
        default=lambda: iter(()), compare=False, repr=False
    )
    """Own kernels that are expected to beat the vendor's by the margin, with their expected
    microseconds, the most promising first; their configs are made one by one."""
    ranked: Callable[[], Iterator[tuple[float, Config]]] = field(
        default=lambda: iter(()), compare=False, repr=False
    )
    """All own kernels, likewise."""

    @property
    def source(self) -> str:
        """Why this kernel, for people."""
        versus = f", {self.vendor} {self.vendor_us:.1f}" if self.vendor else ""
        return f"{self.domain.label()}: expected {self.expected_us:.1f} us{versus}"


@dataclass(frozen=True)
class Portfolio:
    """The candidates of an operation on one GPU, by domain."""

    op: str
    gpu: Gpu
    domains: Mapping[AnyDomain, DomainModels]
    origin: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """First and last day of the measurements (``days``), and versions of the machines."""
    _found: dict[AnyDomain, DomainModels | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def models_of(self, domain: AnyDomain | None) -> DomainModels | None:
        """The candidates of a domain; one that was not measured, with a window, say, or a bias, has
        the best of its kin's (`Domain.kin`).
        """
        if domain is None:
            return None
        if domain not in self._found:
            self._found[domain] = self.domains.get(domain) or self._kin_of(domain)
        return self._found[domain]

    def served(self) -> Iterator[tuple[AnyDomain, DomainModels]]:
        """The domains that were measured, and those of their kin, in a fixed order."""
        for domain, models in sorted(self.domains.items()):
            yield domain, models
            for one in domain.varied:
                if one not in self.domains and (kin := self.models_of(one)) is not None:
                    yield one, kin
        for one in DOMAINS[self.op].others():
            if one not in self.domains and (kin := self.models_of(one)) is not None:
                yield one, kin

    def _paged_of(self, domain: AttentionDomain) -> DomainModels | None:
        """The kernels of a paged domain, each schedule with the rates of the dense kernel that is
        most like it. None are made for other domains.
        """
        if domain not in tuple(domain.others()):
            return None
        is_plain = domain.mask != "windowed" and not domain.has_sinks
        found: list[Candidate] = []
        donor: DomainModels | None = None
        for kernel in paged.kernels(domain.head_dim, domain.phase, is_plain=is_plain):
            is_short = kernel["warp_groups"] == 1  # others are for prompts, whoever else comes
            like = domain if is_short else domain._replace(phase="prompt")
            for combine in (None, "cluster", "kernel") if is_short else (None,):
                for other in like.kin:
                    models = self.domains.get(other)
                    one = None if models is None else _like(kernel, combine, models.candidates)
                    if one is not None:
                        more = {} if combine is None else {"combine": combine}
                        config = Config(kernel.family, {**kernel.params, **more})
                        found.append(replace(one, config=config))
                        donor = donor or models
                        break
        if donor is None:
            return None
        # All schedules of a kernel compete: none is left out for the sizes its rates are from.
        spread = Spread.over(one.spread for one in found)
        lent = [replace(one, spread=spread) for one in found]
        return replace(donor, domain=domain, candidates=lent, margin=0.0, kin=donor.domain)

    def _kin_of(self, domain: AnyDomain) -> DomainModels | None:
        if isinstance(domain, AttentionDomain) and domain.is_paged:
            return self._paged_of(domain)
        for other in domain.kin:
            models = self.domains.get(other)
            if models is None:
                continue
            lent = list(islice(self._lent(domain, models), domain.kin_kernels))
            candidates, margin = lent, 0.0
            if domain.has_rival_kin:
                candidates, margin = [*lent, *models.vendors], models.margin
            if candidates:
                return replace(
                    models, domain=domain, candidates=candidates, margin=margin, kin=other
                )
        return None

    def _lent(self, domain: AnyDomain, models: DomainModels) -> Iterator[Candidate]:
        """Own candidates as they are called in a domain of the kin, the most wanted first."""
        own = [one for one in models.candidates if not one.is_vendor]
        own.sort(key=lambda one: "packed_heads" in one.config.params)
        if domain.kin_kernels is not None:
            for one in own:
                if (carried := self._carried(domain, one, (1,))) is not None:
                    yield carried
            return
        kinds = set[Hashable]()
        for one in (*own, *map(_unpacked, own)):
            kind = one.config.get("packed_heads", 1), "combine" in one.config.params
            if kind not in kinds and (carried := self._carried(domain, one)) is not None:
                kinds.add(kind)
                yield carried

    def _carried(
        self, domain: AnyDomain, one: Candidate, splits: Sequence[int] | None = None
    ) -> Candidate | None:
        """A candidate as it is called in a domain of its kin.

        Args:
            domain: that of the kin.
            one: a candidate.
            splits: counts of splits that it may be called with; None: those of its family.

        Returns:
            None where it is legal with none of these counts.
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

    def select(self, problem: Problem, gpu: Gpu | None = None) -> Selection | None:
        """The kernel that is expected to be fastest.

        Args:
            problem: of this operation.
            gpu: where it runs; default: the portfolio's.

        Returns:
            None where neither the problem's domain nor its kin was measured, or no candidate takes
            the problem.
        """
        models = self.models_of(Domain.of(problem))
        if models is None:
            return None
        target = gpu or self.gpu
        own, vendors, is_near = models.estimates(problem, target)
        known = {
            str(config["kernel"]): (estimate[1], config)
            for estimate in vendors
            if (config := models.config(problem, estimate, target)) is not None
        }
        vendor_us, vendor = math.inf, None
        if known:
            sizes = models.domain.sizes(problem)
            near = {str(one.config["kernel"]) for one in models.vendors if one.spread.holds(sizes)}
            vendor_us, vendor = known[
                preferred({name: us for name, (us, _) in known.items()}, near)
            ]

        def ranked(bound: float = math.inf) -> Iterator[tuple[float, Config]]:
            for estimate in own:
                cautious_us, us, *_ = estimate
                if cautious_us > bound:
                    return
                if (config := models.config(problem, estimate, target)) is not None:
                    yield us, config

        is_trusted = is_near or vendor is None or models.domain.reaches_far
        faster = partial(ranked, vendor_us if is_trusted else 0.0)
        best = next(faster(), None)
        if best is not None:
            chosen_us, chosen = best
        elif vendor is not None:
            chosen_us, chosen = vendor_us, vendor
        else:
            return None
        return Selection(
            chosen,
            chosen_us,
            "" if vendor is None else str(vendor["kernel"]),
            vendor_us,
            models.domain,
            models.regime,
            models.regret,
            tuple(_doubts(models, is_near)),
            faster,
            ranked,
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
    def from_json(cls, data: Any) -> Portfolio:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when it is another format or version, or a value is wrong.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise ConfigError(f"it is not a portfolio (allowed: format '{FORMAT}')")
        if data.get("version") != VERSION:
            raise ConfigError(f"version {data.get('version')!r} is not known (allowed: {VERSION})")
        try:
            if data["op"] not in DOMAINS:
                allowed = ", ".join(DOMAINS)
                raise ConfigError(f"op {data['op']!r} has no portfolio (allowed: {allowed})")
            models = [_models_from(DOMAINS[data["op"]], row) for row in data["domains"]]
            gpu = Gpu(**document.checked(Gpu, data["gpu"]))
            origin = {str(name): list(map(str, values)) for name, values in data["origin"].items()}
            return cls(data["op"], gpu, {each.domain: each for each in models}, origin)
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
    """The portfolios that ship with the package, under ``cache/portfolio/``.

    Raises:
        StoreError: when such a file is damaged.
    """
    try:
        return tuple(Portfolio.read(path) for path in sorted(_folder().glob("*.json")))
    except ConfigError as exc:
        raise StoreError(f"a shipped file cannot be read: {exc}") from exc


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
    later = "is_paged", "has_sinks", "operand"
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
    family = families().get(config.family)
    rates = {str(term): _number(us) for term, us in row["rates"].items()}
    if family is not None and (unknown := set(rates) - set(family.work_terms)):
        raise ConfigError(f"{config.family} counts no '{sorted(unknown)[0]}'")
    errors = _number(row["median_error"]), _number(row["p90_error"])
    bounds = tuple((int(low), int(high)) for low, high in (row["spread"][x] for x in kind.axes))
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
