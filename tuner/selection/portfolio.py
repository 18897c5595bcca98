"""A portfolio: the few kernels that serve every shape of an operation, and the time of each.

Correctness belongs to a kernel: sizes, strides and counts of heads are arguments of a launch, so a
kernel that was proven over its domain (`Proof`) may serve any shape of it. Speed belongs to a
selection: a *time model* for each kernel, the microseconds of each amount of work that
`Family.work` counts, fitted to measurements (`tuner.search.portfolio`). `Portfolio.select` adds the
terms up for each candidate, and chooses an own kernel only where it is expected to be faster than
the vendor's by the domain's margin.

What ships lies under ``cache/portfolio/``. Needs the standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from tuner.base import document, output, resources
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.attention_work import Sizes, Tiling
from tuner.families.base import FOREIGN, Family
from tuner.families.fused_attention import instance
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import E4M3, AttentionProblem, DType, Problem

FORMAT = "cutlass-tuner portfolio"
VERSION = 1
REACH = 2
"""Factor by which a size may exceed the measured ones: beyond it a time model is not trusted."""
_FAR = f"no kernel was measured within {REACH} times these sizes"
PYTORCHS_ORDER = ("cudnn", "flash2", "efficient")
"""PyTorch's kernels in the order in which it chooses them on Hopper (torch 2.11)."""
VENDOR_MARGIN = 0.25
"""Share of its time by which another of PyTorch's kernels has to beat PyTorch's choice."""
#: Rates of a time model are written with as many digits.
_DIGITS = 5

Mask = Literal["full", "causal", "windowed"]
Phase = Literal["prompt", "few", "one"]
"""Prompts; decoding with several queries, fewer than a tile has rows; decoding with one."""
Operand = Literal["", "bool", "additive"]
"""Kind of a mask that is an operand; empty: none."""


class Domain(NamedTuple):
    """What is compiled into a kernel, or changes which resource binds it."""

    head_dim: int
    """Columns that the kernels compute: the smallest instance that holds D."""
    mask: Mask
    phase: Phase
    has_softcap: bool = False
    is_varlen: bool = False
    operand: Operand = ""

    @classmethod
    def of(cls, problem: Problem) -> Domain | None:
        """The domain of a problem; None of those that no portfolio is made for."""
        if not isinstance(problem, AttentionProblem):
            return None
        if problem.dtype == E4M3 or problem.is_alibi:
            return None
        operand: Operand = "bool" if problem.mask else "additive" if problem.bias else ""
        mask: Mask = "causal" if problem.is_causal else "full"
        phase: Phase = "few" if problem.is_decoding else "prompt"
        return cls(
            instance(problem.head_dim),
            "windowed" if problem.is_windowed else mask,
            "one" if problem.is_decoding and problem.seqlen_q == 1 else phase,
            problem.softcap > 0,
            problem.is_varlen,
            operand,
        )

    @property
    def kin(self) -> Iterator[Domain]:
        """Domains whose kernels do the same work but for what PyTorch's fast kernels lack: windows,
        soft caps, packed sequences, masks as operands. Nearest first.
        """
        masks: tuple[Mask, ...] = ("causal", "full") if self.mask == "windowed" else (self.mask,)
        phases = (self.phase, *_OTHER_PHASES[self.phase]) if self.operand else (self.phase,)
        for phase, mask in product(phases, masks):
            plain = Domain(self.head_dim, mask, phase)
            if plain != self:
                yield plain

    def problems(self, dtype: DType) -> tuple[AttentionProblem, ...]:
        """A small problem for each kernel that a config needs in this domain and type: a windowed
        one has two, of which one is causal.
        """
        both = (False, True) if self.mask == "windowed" else (self.mask == "causal",)
        return tuple(
            AttentionProblem(
                seqlen_q=256,
                seqlen_kv=512,
                head_dim=self.head_dim,
                is_causal=is_causal,
                dtype=dtype,
                layout="bshd" if self.is_varlen else "bhsd",
                window_left=64 if self.mask == "windowed" else -1,
                softcap=50.0 if self.has_softcap else 0.0,
                is_varlen=self.is_varlen,
                mask="1" if self.operand == "bool" else "",
                bias="1" if self.operand == "additive" else "",
            )
            for is_causal in both
        )

    def label(self) -> str:
        """Short text for people."""
        more = (", soft cap" if self.has_softcap else "") + (", packed" if self.is_varlen else "")
        more += f", {self.operand} mask" if self.operand else ""
        phase = {"prompt": "prompts", "few": "few queries", "one": "one query"}[self.phase]
        return f"D={self.head_dim}, {self.mask}{more}, {phase}"


#: Phases whose kernels a mask as an operand may have where its own has none, nearest first.
_OTHER_PHASES: Mapping[Phase, tuple[Phase, ...]] = {
    "prompt": (),
    "few": ("one", "prompt"),
    "one": ("few", "prompt"),
}


class Spread(NamedTuple):
    """Smallest and largest sizes that a kernel was measured at."""

    rows: tuple[int, int]
    """Rows of scores: sequences times query heads times queries."""
    keys: tuple[int, int]

    @classmethod
    def of(cls, problems: Iterable[AttentionProblem]) -> Spread:
        sizes = [_sizes(problem) for problem in problems]
        rows, keys = ((min(each), max(each)) for each in zip(*sizes, strict=True))
        return cls(rows, keys)

    def holds(self, rows: int, keys: int) -> bool:
        """Whether neither is beyond `REACH` times the measured ones."""
        (least, most), (fewest, longest) = self
        return (
            least <= REACH * rows
            and rows <= REACH * most
            and fewest <= REACH * keys
            and keys <= REACH * longest
        )


def _sizes(problem: AttentionProblem) -> tuple[int, int]:
    return problem.batch * problem.heads_q * problem.seqlen_q, problem.seqlen_kv


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
    """Of problems left out of the fit: the median of |expected / measured - 1|."""
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

    @cached_property
    def tiling(self) -> Tiling:
        """The kernel's, of one split."""
        return Tiling(128, 128) if self.family is None else self.family.tiling(self.config)

    @cached_property
    def split_tilings(self) -> Mapping[int, Tiling]:
        """The kernel's, by its splits."""
        return _SplitTilings(self.tiling)


class _SplitTilings(dict[int, Tiling]):
    """Tilings that differ in their splits, each made once."""

    def __init__(self, one: Tiling) -> None:
        super().__init__()
        self._one = one

    def __missing__(self, splits: int) -> Tiling:
        self[splits] = found = self._one._replace(splits=splits)
        return found


class Estimate(NamedTuple):
    """A candidate as it may be called for a problem, and the time that is expected of it."""

    us: float
    place: int
    """Of the candidate in its domain; of equal times the first is taken."""
    splits: int


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

    domain: Domain
    regime: Regime
    candidates: Sequence[Candidate]
    margin: float
    """Share of its own time by which an own kernel is expected to beat the vendor's, at least."""
    regret: Regret
    kin: Domain | None = None
    """Domain whose rates these are, where this one was not measured."""
    _legal: dict[Hashable, bool] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """What `config` found out, by candidate, splits and `Family.legality_facts`."""

    def estimates(
        self, problem: AttentionProblem, gpu: Gpu
    ) -> tuple[list[Estimate], list[Estimate], bool]:
        """Own kernels and vendor's, fastest first, legal or not; and whether an own one was
        measured near: else all are here.
        """
        sizes = Sizes.of(problem)
        rows, keys = sizes.heads * sizes.seqlen_q, sizes.seqlen_kv
        own: list[Estimate] = []
        vendors: list[Estimate] = []
        closed: dict[str, tuple[float, ...]] = {}
        far, is_near = [], False
        for place, one in enumerate(self.candidates):
            family = one.family
            if family is None:
                continue
            if one.is_vendor:
                if family.name not in closed:  # the same for each of its kernels
                    closed[family.name] = family.amounts(sizes, one.tiling, gpu)
                us = sum(map(mul, one.priced, closed[family.name]))
                vendors.append(Estimate(us, place, 1))
            elif one.spread.holds(rows, keys):
                is_near = True
                own += _own_estimates(place, one, problem, sizes, gpu)
            else:
                far.append((place, one))
        if not is_near:
            for place, one in far:
                own += _own_estimates(place, one, problem, sizes, gpu)
        own.sort()
        vendors.sort()
        return own, vendors, is_near

    def config(self, problem: Problem, estimate: Estimate, gpu: Gpu) -> Config | None:
        """The config of an estimate; None where it is not legal for the problem."""
        one = self.candidates[estimate.place]
        if one.family is None:
            return None
        config = one.family.called(problem, one.config, estimate.splits)
        key = estimate.place, estimate.splits, gpu.identity, one.family.legality_facts(problem)
        is_legal = self._legal.get(key)
        if is_legal is None:
            is_legal = self._legal[key] = one.family.accepts(problem, config, gpu)
        return config if is_legal else None


def _unpacked(one: Candidate) -> Candidate:
    """The candidate with one head in the rows of a tile."""
    params = {name: value for name, value in one.config.params.items() if name != "packed_heads"}
    return replace(one, config=Config(one.config.family, params, one.config.stages))


def preferred(expected: Mapping[str, float]) -> str:
    """The vendor's kernel to leave a call to: PyTorch's own choice, unless another is expected to
    be faster by `VENDOR_MARGIN`.

    Args:
        expected: microseconds by kernel; one at least.
    """
    usual = next((name for name in PYTORCHS_ORDER if name in expected), min(expected))
    best = min(expected, key=lambda name: (expected[name], name))
    return best if expected[best] * (1 + VENDOR_MARGIN) < expected[usual] else usual


def _doubts(models: DomainModels, is_near: bool) -> Iterator[str]:
    if models.kin is not None:
        yield f"the rates are those of {models.kin.label()}"
    if not is_near:
        yield _FAR


def _own_estimates(
    place: int, one: Candidate, problem: AttentionProblem, sizes: Sizes, gpu: Gpu
) -> list[Estimate]:
    """One for each schedule of a kernel."""
    family, priced, tilings = one.family, one.priced, one.split_tilings
    assert family is not None
    return [
        Estimate(sum(map(mul, priced, family.amounts(sizes, tilings[splits], gpu))), place, splits)
        for splits in family.splits(problem, one.config, gpu)
    ]


@dataclass(frozen=True)
class Selection:
    """The kernel chosen for a shape, and why."""

    config: Config
    expected_us: float
    vendor: str
    """The vendor's fastest kernel, by expectation; empty where none has a time model."""
    vendor_us: float
    domain: Domain
    regime: Regime
    regret: Regret
    doubts: tuple[str, ...] = ()
    own: Callable[[], Iterator[tuple[float, Config]]] = field(
        default=lambda: iter(()), compare=False, repr=False
    )
    """Own kernels that are expected to beat the vendor's by the margin, by microseconds, fastest
    first; their configs are made one by one."""
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
    domains: Mapping[Domain, DomainModels]
    origin: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """First and last day of the measurements (``days``), and versions of the machines."""
    _found: dict[Domain, DomainModels | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def models_of(self, domain: Domain | None) -> DomainModels | None:
        """The candidates of a domain. One with a window, a soft cap, packed sequences or a mask as
        an operand that was not measured has its kin's best kernel: PyTorch composes such a call of
        operations, or has its slowest kernel for it, which takes several times as long.
        """
        if domain is None:
            return None
        if domain not in self._found:
            self._found[domain] = self.domains.get(domain) or self._kin_of(domain)
        return self._found[domain]

    def served(self) -> Iterator[tuple[Domain, DomainModels]]:
        """The domains that were measured, and those of their kin, in a fixed order."""
        for domain, models in sorted(self.domains.items()):
            yield domain, models
            if domain.mask != "causal" and domain.phase == "prompt":
                varied = [domain._replace(has_softcap=True), domain._replace(is_varlen=True)]
            else:
                windowed = domain._replace(mask="windowed")
                varied = [windowed, windowed._replace(has_softcap=True)]
                varied += [domain._replace(has_softcap=True)]
                varied += [domain._replace(is_varlen=True)] * (domain.phase == "prompt")
            for one in varied:
                if one not in self.domains and (kin := self.models_of(one)) is not None:
                    yield one, kin
        # PyTorch takes no causal flag beside a mask.
        sizes = sorted({domain.head_dim for domain in self.domains})
        operands = get_args(Operand)[1:]
        for head_dim, phase, operand in product(sizes, get_args(Phase), operands):
            one = Domain(head_dim, "full", phase, operand=operand)
            if one not in self.domains and (kin := self.models_of(one)) is not None:
                yield one, kin

    def _kin_of(self, domain: Domain) -> DomainModels | None:
        """The best kernel of the nearest kin. For a mask as an operand, which models have at all
        sizes, the best of each count of packed heads, one among them, with and without splits.
        """
        for other in domain.kin:
            models = self.domains.get(other)
            if models is None:
                continue
            own = sorted(models.candidates, key=lambda one: "packed_heads" in one.config.params)
            if domain.operand:
                own += [_unpacked(one) for one in own]
            lent: dict[Hashable, Candidate] = {}
            for one in own:
                kind = one.config.get("packed_heads", 1), "combine" in one.config.params
                if kind not in lent and (found := self._lent(domain, one)) is not None:
                    lent[kind] = found
                    if not domain.operand:
                        break
            if lent:
                candidates = list(lent.values())
                return replace(models, domain=domain, candidates=candidates, margin=0.0, kin=other)
        return None

    def _lent(self, domain: Domain, one: Candidate) -> Candidate | None:
        """A candidate as it is called in a domain of its kin; None where it is not legal there."""
        if one.family is None or one.is_vendor:
            return None
        (problem, *_) = domain.problems("float16")
        grouped = replace(problem, heads_q=int(one.config.get("packed_heads", 1)), heads_kv=1)
        config = one.family.carried(grouped, one.config)
        counts = one.family.splits(grouped, config, self.gpu) if domain.operand else (1,)
        called = (one.family.called(grouped, config, count) for count in counts)
        is_legal = any(one.family.accepts(grouped, config, self.gpu) for config in called)
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
        if models is None or not isinstance(problem, AttentionProblem):
            return None
        target = gpu or self.gpu
        own, vendors, is_near = models.estimates(problem, target)
        known = {
            str(config["kernel"]): (estimate.us, config)
            for estimate in vendors
            if (config := models.config(problem, estimate, target)) is not None
        }
        vendor_us, vendor = math.inf, None
        if known:
            vendor_us, vendor = known[preferred({name: us for name, (us, _) in known.items()})]
        bound = vendor_us / (1 + models.margin)

        def ranked(bound: float = math.inf) -> Iterator[tuple[float, Config]]:
            for estimate in own:
                if estimate.us > bound:
                    return
                if (config := models.config(problem, estimate, target)) is not None:
                    yield estimate.us, config

        faster = partial(ranked, bound)
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
            if data["op"] != AttentionProblem.op:
                raise ConfigError(f"op {data['op']!r} has no portfolio (allowed: attention)")
            models = [_models_from(row) for row in data["domains"]]
            gpu = Gpu(**document.checked(Gpu, data["gpu"]))
            origin = {str(name): list(map(str, values)) for name, values in data["origin"].items()}
            return cls(data["op"], gpu, {each.domain: each for each in models}, origin)
        except ConfigError:
            raise
        except (*FOREIGN, ValueError) as exc:
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
        "domain": models.domain._asdict(),
        "regime": models.regime.key,
        "margin": models.margin,
        "regret": asdict(models.regret),
        "candidates": [_candidate_json(candidate) for candidate in models.candidates],
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    rates = {term: float(f"{us:.{_DIGITS}g}") for term, us in candidate.rates.items() if us}
    return {
        **candidate.config.to_json(),
        "rates": rates,
        "points": candidate.points,
        "median_error": round(candidate.median_error, 4),
        "p90_error": round(candidate.p90_error, 4),
        "spread": candidate.spread._asdict(),
    }


def _models_from(row: Mapping[str, Any]) -> DomainModels:
    domain, margin = Domain(**row["domain"]), _number(row["margin"])
    return DomainModels(
        domain,
        Regime.parse(row["regime"]),
        [_candidate_from(one) for one in row["candidates"]],
        margin,
        Regret(**document.checked(Regret, row["regret"])),
    )


def _candidate_from(row: Mapping[str, Any]) -> Candidate:
    config = Config.from_json({"family": row["family"], "params": row["params"]})
    family = families().get(config.family)
    rates = {str(term): _number(us) for term, us in row["rates"].items()}
    if family is not None and (unknown := set(rates) - set(family.work_terms)):
        raise ConfigError(f"{config.family} counts no '{sorted(unknown)[0]}'")
    errors = _number(row["median_error"]), _number(row["p90_error"])
    spread = {name: (int(low), int(high)) for name, (low, high) in row["spread"].items()}
    return Candidate(config, rates, int(row["points"]), *errors, Spread(**spread))


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
