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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from operator import mul
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tuner.base import document, output, resources
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import families
from tuner.families.base import FOREIGN, Family
from tuner.families.fused_attention import instance
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import E4M3, AttentionProblem, Problem

FORMAT = "cutlass-tuner portfolio"
VERSION = 1
REACH = 2
"""Factor by which a size may exceed the measured ones: beyond it a time model is not trusted."""
#: Rates of a time model are written with as many digits.
_DIGITS = 5

Phase = Literal["prompt", "few", "one"]
"""Prompts; decoding with several queries, fewer than a tile has rows; decoding with one."""


class Domain(NamedTuple):
    """What is compiled into a kernel, or changes which resource binds it."""

    head_dim: int
    """Columns that the kernels compute: the smallest instance that holds D."""
    mask: Literal["full", "causal", "windowed"]
    phase: Phase
    has_softcap: bool = False
    is_varlen: bool = False

    @classmethod
    def of(cls, problem: Problem) -> Domain | None:
        """The domain of a problem; None of those that no portfolio is made for."""
        if not isinstance(problem, AttentionProblem):
            return None
        if problem.dtype == E4M3 or problem.modifiers:
            return None
        mask: Literal["full", "causal", "windowed"] = "causal" if problem.is_causal else "full"
        phase: Phase = "few" if problem.is_decoding else "prompt"
        return cls(
            instance(problem.head_dim),
            "windowed" if problem.is_windowed else mask,
            "one" if problem.is_decoding and problem.seqlen_q == 1 else phase,
            problem.softcap > 0,
            problem.is_varlen,
        )

    def label(self) -> str:
        """Short text for people."""
        more = (", soft cap" if self.has_softcap else "") + (", packed" if self.is_varlen else "")
        phase = {"prompt": "prompts", "few": "few queries", "one": "one query"}[self.phase]
        return f"D={self.head_dim}, {self.mask}{more}, {phase}"


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

    def holds(self, problem: AttentionProblem) -> bool:
        """Whether no size is beyond `REACH` times the measured ones."""
        (least, most), (fewest, longest) = self
        rows, keys = _sizes(problem)
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
    def _rates(self) -> tuple[float, ...]:
        terms = self.family.work_terms if self.family else ()
        return tuple(self.rates.get(term, 0.0) for term in terms)

    def expected_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Expected time, microseconds.

        Args:
            problem: of the domain that the model was made for.
            config: the candidate's, as `scheduled` gives it.
            gpu: the one that was measured.
        """
        if self.family is None:
            return math.inf
        return sum(map(mul, self._rates, self.family.work(problem, config, gpu)), 0.0)

    def timed(self, problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
        """Expected microseconds of each schedule, of which not each need be legal."""
        if self.family is not None:
            for config in self.family.scheduled(problem, self.config, gpu):
                yield self.expected_us(problem, config, gpu), config


@dataclass(frozen=True)
class Regret:
    """How selections did at problems whose models were left out when the rates were fitted."""

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
    alternatives: tuple[tuple[float, Config], ...] = field(default=(), compare=False)
    """Own kernels by expected microseconds, fastest first."""

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

    def select(self, problem: Problem, gpu: Gpu | None = None) -> Selection | None:
        """The kernel that is expected to be fastest.

        Args:
            problem: of this operation.
            gpu: where it runs; default: the portfolio's.

        Returns:
            None where the problem's domain was not measured, or no candidate takes the problem.
        """
        domain = Domain.of(problem)
        models = None if domain is None else self.domains.get(domain)
        if models is None or not isinstance(problem, AttentionProblem):
            return None
        target, doubts = gpu or self.gpu, []
        near = [one for one in models.candidates if one.is_vendor or one.spread.holds(problem)]
        if all(one.is_vendor for one in near):
            near = list(models.candidates)
            doubts.append(f"no kernel was measured within {REACH} times these sizes")
        own: list[tuple[float, Config]] = []
        vendor_us, vendor = math.inf, None
        for candidate in near:
            for expected, config in candidate.timed(problem, target):
                if not candidate.is_vendor:
                    own.append((expected, config))
                elif expected < vendor_us and _is_legal(problem, config, target):
                    vendor_us, vendor = expected, config
        own.sort(key=lambda one: one[0])
        best = next((one for one in own if _is_legal(problem, one[1], target)), None)
        if best is None and vendor is None:
            return None
        chosen_us, chosen = vendor_us, vendor
        if best is not None and (vendor is None or best[0] * (1 + models.margin) <= vendor_us):
            chosen_us, chosen = best
        assert chosen is not None
        return Selection(
            chosen,
            chosen_us,
            "" if vendor is None else str(vendor["kernel"]),
            vendor_us,
            models.domain,
            models.regime,
            models.regret,
            tuple(doubts),
            tuple(own),
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


def _is_legal(problem: Problem, config: Config, gpu: Gpu) -> bool:
    family = families().get(config.family)
    return family is not None and family.accepts(problem, config, gpu)


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
