"""Candidates of a portfolio's domain, and their expected times.

A *time model* gives the microseconds for one unit of each amount of work that `Family.amounts`
counts. `DomainTimes` traces these amounts for all candidates of a domain (`tuner.families.tape`)
and compiles them into one function. Needs the standard library only.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from tuner.config import Config
from tuner.families import find
from tuner.families.attention_work import TERMS
from tuner.families.base import Family
from tuner.families.by_operation import AnyDomain
from tuner.families.peers.sdpa import BACKENDS
from tuner.families.tape import Tape, compiled, larger, names_in, weighted
from tuner.families.work import floor_us, kind_of, memory_gap_us, time_ratio
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.selection.ratios import Ratios

RESCALED_MARGIN = 0.01
"""Additional share of its time by which an own kernel must win if the rates are another GPU's.
Times closer than this are ties even when measured.

Rescaling keeps the order of kernels on an H100. Without this margin, none of 400 calls of models
left out (seed 0) is answered otherwise than on an H200. With 0.01 it leaves 7 of 229 own kernels to
PyTorch's, with 0.05 32. Over the fastest of PyTorch's, own kernels' times of prompts were 2.4 %
above the expected ratio on an H100 (``cache/tuned/``, 50 problems, 22 November 2026).
"""


class Spread(NamedTuple):
    """Smallest and largest sizes that a kernel was measured at."""

    bounds: tuple[tuple[int, int], ...]
    """Bounds of each of the domain's `axes`."""

    @classmethod
    def of(cls, sizes: Iterable[tuple[int, ...]]) -> Spread:
        """The spread of `Domain.sizes` over some problems."""
        return cls(tuple((min(each), max(each)) for each in zip(*sizes, strict=True)))

    @classmethod
    def over(cls, spreads: Iterable[Spread]) -> Spread:
        """The smallest spread that contains all given ones."""
        axes = zip(*(one.bounds for one in spreads), strict=True)
        return cls(tuple((min(low for low, _ in axis), max(high for _, high in axis))
                         for axis in axes))  # fmt: skip

    def trusted(self, domain: AnyDomain) -> tuple[tuple[float, float], ...]:
        """The bounds within which a time model is trusted (`Domain.trusted_above`)."""
        limits = zip(self.bounds, domain.trusted_below, domain.trusted_above, strict=True)
        return tuple((low / below, high * above) for (low, high), below, above in limits)

    def holds(self, sizes: tuple[int, ...], domain: AnyDomain) -> bool:
        """True if every size is within the trusted bounds."""
        return is_near(self.trusted(domain), sizes)


@dataclass(frozen=True)
class Candidate:
    """A kernel of a domain with its time model."""

    config: Config
    """Config without the parameters that `Family.scheduled` chooses for a shape."""
    rates: Mapping[str, float]
    """Microseconds for one unit of each of the family's `work_terms`; a missing rate is 0."""
    points: int
    """Number of measurements that the rates were fitted to."""
    median_error: float
    """Median of |expected / measured - 1| at problems left out of the fit."""
    p90_error: float
    spread: Spread

    @cached_property
    def family(self) -> Family | None:
        """The config's family; None if this version does not have it."""
        return find(self.config.family)

    @cached_property
    def is_vendor(self) -> bool:
        return self.family is not None and self.family.is_vendor

    @cached_property
    def priced(self) -> tuple[float, ...]:
        """The rate of each of the family's work terms."""
        terms = self.family.work_terms if self.family else ()
        return tuple(self.rates.get(term, 0.0) for term in terms)

    def rescaled(self, old: Gpu, new: Gpu) -> Candidate:
        """It with the rates expected on another GPU (`tuner.families.work.time_ratio`)."""
        rates = {term: us * time_ratio(term, old, new) for term, us in self.rates.items()}
        return replace(self, rates=rates)

    def us(self, sizes: Any, tiling: Any, gpu: Gpu, clocks: float = 0.0) -> Any:
        """Expected time, microseconds; may be traced.

        Args:
            sizes: sizes of a problem, as of `tuner.families.work.sizes_of`.
            tiling: result of `Family.tiling`, with the number of splits of the call.
            gpu: GPU that it runs on.
            clocks: the domain's `clocks` of the kernel.
        """
        amounts = self.family.amounts(sizes, tiling, gpu) if self.family else ()
        us = weighted(self.priced, amounts) if amounts else 0.0
        if not (amounts and clocks and gpu.clock_max_mhz):
            return us
        scores = amounts[TERMS.index("mean_steps")] * (tiling.rows * tiling.keys)
        return larger(scores * (clocks / gpu.clock_max_mhz), us)


Estimate = tuple[float, float, int, int]
"""An own candidate at a problem:

- expected microseconds, longer by the margin times the model's error;
- expected microseconds;
- index in the domain, which breaks ties;
- number of splits.
"""


@dataclass(frozen=True)
class Regret:
    """Quality of selections at problems whose models were left out of the fit of the rates.

    The kernels and the margin were chosen with all problems.
    """

    problems: int
    mean: float
    """Mean of the chosen kernel's time over the fastest measured one, less 1."""
    worst: float
    over_vendor: float
    """Geometric mean of the time of PyTorch's fastest kernel over the chosen kernel's."""
    least_over_vendor: float
    own_share: float
    """Share of the problems at which an own kernel was chosen."""

    def text(self) -> str:
        """One line for people."""
        return (
            f"mean {100 * self.mean:.1f} %, worst {100 * self.worst:.1f} %, over {self.problems} "
            "problems left out of the fit"
        )

    def speed_text(self) -> str:
        """One line for people on the speed at the same problems."""
        return (
            f"{self.over_vendor:.2f}x in the mean of these problems, "
            f"{self.least_over_vendor:.2f}x at worst"
        )


@dataclass(frozen=True)
class DomainModels:
    """The candidates of one domain, with margin and regret."""

    domain: AnyDomain
    regime: Regime
    candidates: Sequence[Candidate]
    margin: float
    """Lead over the vendor's expected time that an own kernel needs to be chosen, as a multiple of
    its `Candidate.p90_error`."""
    regret: Regret
    donor: AnyDomain | None = None
    """Domain that the rates were measured in, if not in this one."""
    made_on: Gpu | None = None
    """GPU of the measurements, if the rates are rescaled; None: this one."""
    ratios: Ratios | None = None
    """Ratios measured at calls of the domain; None where there are none."""
    _times: dict[str, DomainTimes] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def rescaled(self, old: Gpu, new: Gpu) -> DomainModels:
        """They with the rates expected on another GPU than the measured one."""
        candidates = [one.rescaled(old, new) for one in self.candidates]
        ratios = self.ratios.elsewhere if self.ratios else None
        return replace(self, candidates=candidates, made_on=old, ratios=ratios)

    def settled(self, gpu: Gpu) -> DomainModels:
        """They with the memory's part of rescaled times among the rates, for cold caches."""
        if self.made_on is None:
            return self
        per_megabyte = 1e3 / gpu.reached_gbs - 1e3 / self.made_on.reached_gbs
        candidates = []
        for one in self.candidates:
            memory = max(0.0, one.rates.get("memory", 0.0) + per_megabyte)
            candidates.append(replace(one, rates={**one.rates, "memory": memory}))
        return replace(self, candidates=candidates, made_on=None)

    @property
    def vendors(self) -> list[Candidate]:
        """The vendors' kernels among the candidates."""
        return [one for one in self.candidates if one.is_vendor]

    def times(self, gpu: Gpu) -> DomainTimes:
        """Expected times of the candidates on a GPU."""
        times = self._times.get(gpu.name)
        if times is None or (times.gpu is not gpu and times.gpu != gpu):
            times = self._times[gpu.name] = DomainTimes(self, gpu)
        return times


Legality = tuple[Hashable, ...]
"""Key of a problem within its domain; problems with equal keys have the same legal configs."""
_LegalVendors = tuple[Mapping[str, tuple[int, Config]], str | None]


class DomainTimes:
    """Expected times of a domain's candidates on one GPU.

    Args:
        models: candidates of the domain.
        gpu: GPU that they run on.
    """

    def __init__(self, models: DomainModels, gpu: Gpu) -> None:
        self.models, self.gpu = models, gpu
        served = [
            (place, one, one.family)
            for place, one in enumerate(models.candidates)
            if one.family is not None
        ]
        self._own = {place: one for place, one, family in served if not family.is_vendor}
        self.vendors = [one for _, one, family in served if family.is_vendor]
        """The vendors' kernels that this version has, in the order of their times."""
        self._vendor_places = [place for place, _, family in served if family.is_vendor]
        self._families = list(dict.fromkeys(family for *_, family in served))
        self._family_at = {place: self._families.index(family) for place, _, family in served}
        self._vendors_trusted = [one.spread.trusted(models.domain) for one in self.vendors]
        self._vendor_facts = [
            number for number, family in enumerate(self._families) if family.is_vendor
        ]
        self._configs: dict[Hashable, Config | None] = {}
        self._legal_vendors: dict[tuple[Hashable, ...], _LegalVendors] = {}
        self._kind: Any = kind_of(models.domain.problems("float16")[0])
        self._sizes_of: Any = self._kind.of
        self._traced = self._compiled()

    def estimates(self, problem: Problem) -> tuple[list[Estimate], Sequence[float], bool]:
        """Estimates of own kernels, legal or not; times of `vendors`; and a flag.

        The flag is true if an own kernel was measured near the problem's sizes. Then the estimates
        hold only such kernels, otherwise all. Times are microseconds.
        """
        expected: tuple[list[Estimate], Sequence[float], bool]
        expected = self._traced(self._sizes_of(problem), problem)
        return expected

    def legality(self, problem: Problem) -> Legality:
        """`Family.legality_facts` of each family of the domain."""
        return tuple([family.legality_facts(problem) for family in self._families])

    def config(self, problem: Problem, place: int, splits: int, facts: Legality) -> Config | None:
        """The full config of a candidate at a problem; None if it is not legal.

        Args:
            problem: problem of the domain.
            place: index of the candidate in the domain.
            splits: number of splits of its estimate.
            facts: the problem's `legality`.
        """
        key = place, splits, facts[self._family_at[place]]
        try:
            return self._configs[key]
        except KeyError:
            one = self.models.candidates[place]
            assert one.family is not None
            config = one.family.called(problem, one.config, splits)
            config = one.family.served(problem, config)
            is_legal = one.family.accepts(problem, config, self.gpu)
            return self._configs.setdefault(key, config if is_legal else None)

    def legal_vendors(self, problem: Problem, facts: Legality) -> _LegalVendors:
        """The `vendors` that take a problem, as index and config by kernel; and PyTorch's choice
        among them, None without one.
        """
        key = tuple([facts[number] for number in self._vendor_facts])
        choice = self._legal_vendors.get(key)
        if choice is None:
            configs = [self.config(problem, place, 1, facts) for place in self._vendor_places]
            legal = {
                str(config["kernel"]): (number, config)
                for number, config in enumerate(configs)
                if config is not None
            }
            choice = legal, pytorchs_choice(legal) if legal else None
            self._legal_vendors[key] = choice
        return choice

    def is_vendor_near(self, number: int, sizes: tuple[int, ...]) -> bool:
        """True if one of `vendors` was measured near some sizes."""
        return is_near(self._vendors_trusted[number], sizes)

    def _compiled(self) -> Any:
        """A compiled function of a problem's sizes and the problem: own estimates, vendors' times,
        and true if all own candidates were measured near the sizes.
        """
        tape, uses = Tape(), Counter[str]()
        sizes = self._sizes_on(tape)
        expected = self._expected_here(sizes)
        blocks = self._own_blocks(tape, sizes, expected, uses)
        rows = blocks[""].rows
        blocks[""].rows = []  # they begin the list of estimates
        written = {condition: block.written(uses) for condition, block in blocks.items()}
        loops = written.pop("")
        for condition, lines in written.items():
            inner = [*(f" {line}" for line in blocks[condition].tape.lines(uses)), *lines]
            loops += [f" if {condition}:", *(f" {line}" for line in inner)]
        nearness = self._nearness(sizes)
        vendors = [
            str(expected.here(expected.bounded(one.us(sizes, self._tiling(one), self.gpu))))
            for one in self.vendors
        ]
        uses.update(names_in(" ".join((*nearness, *vendors))))
        shared, any_near, near = nearness
        lines = [
            "def times(sizes, problem):",
            f" {', '.join(self._kind._fields)} = sizes",
            *(f" {line}" for line in tape.lines(uses)),
            f" own = [{', '.join(rows)}]",
            *loops,
            f" vendors = [{', '.join(vendors)}]",
            f" if own and {shared}:",
            "  return own, vendors, True",
            f" if not ({any_near}):",
            "  return own, vendors, False",
            f" is_near = {{{near}}}",
            " near = [one for one in own if is_near[one[2]]]",
            " return near or own, vendors, bool(near)",
        ]
        return compiled("times", lines, tape.names)

    def _own_blocks(
        self, tape: Tape, sizes: Any, expected: _Expected, uses: Counter[str]
    ) -> dict[str, _Block]:
        """Own candidates, traced, by the condition under which they are estimated. What only some
        problems need is computed where its condition holds; none is the empty text.

        Args:
            tape: tape of all problems.
            sizes: sizes on it.
            expected: expected times from traced ones.
            uses: names that the estimates need are added.
        """
        blocks = {"": _Block(tape, sizes)}
        for place, one in self._own.items():
            family, config = one.family, one.config
            assert family is not None
            tiling, is_scheduled = family.tiling(config), family.is_scheduled(config)
            condition = family.condition(config) if is_scheduled else ""
            if condition not in blocks:
                inner = Tape(tape)
                blocks[condition] = _Block(inner, self._sizes_on(inner))
            block = blocks[condition]
            loop, splits = Tape(block.tape), 1 if tiling is None else tiling.splits
            counts: Any = (1,)
            if is_scheduled:
                counts = family.traced_splits(config, block.sizes, self.gpu)
                if counts is None:
                    tape.names[f"splits_{place}"] = family.splitter(config, self.gpu)
                    counts = f"splits_{place}(problem)"
                splits = loop.argument("count") if counts != (1,) else 1
            if is_scheduled and family.is_split(config):
                tiling = tiling._replace(splits=splits)
            clocks = self.models.domain.clocks(config)
            us = expected.bounded(one.us(block.sizes, tiling, self.gpu, clocks))
            doubt = 1 + self.models.margin * one.p90_error
            least = expected.here(us * doubt) * expected.margin
            row = f"({least}, {expected.here(us)}, {place}, {splits})"
            uses.update(names_in(row))
            if counts == (1,):
                block.rows.append(row)
            else:
                uses.update(names_in(str(counts)))
                block.loops.append((counts, loop, row))
        return blocks

    def _nearness(self, sizes: Any) -> tuple[str, str, str]:
        """Source texts: whether all own candidates were measured near the sizes, whether any was,
        and the items of a dictionary that says so of each by its index.
        """
        trusted = [one.trusted(self.models.domain) for one in self._spreads()]
        if not trusted:
            return "False", "False", ""
        axes = self.models.domain.axes_of(sizes)
        tightest = [_overlap(axis) for axis in zip(*trusted, strict=True)]
        loosest = [_union(axis) for axis in zip(*trusted, strict=True)]
        every = [_within(bounds, axes, loosest) or "True" for bounds in trusted]
        near = ", ".join(f"{place}: {text}" for place, text in zip(self._own, every, strict=True))
        return _within(tightest, axes), _within(loosest, axes), near

    def _spreads(self) -> list[Spread]:
        """Sizes that each own candidate's kernel was measured at, in any of its schedules where the
        domain extrapolates.
        """
        if not self.models.domain.extrapolates:
            return [one.spread for one in self._own.values()]
        kernels = [
            one.family.compile_digest(one.config) for one in self._own.values() if one.family
        ]
        spreads = defaultdict[str, list[Spread]](list)
        for kernel, one in zip(kernels, self._own.values(), strict=True):
            spreads[kernel].append(one.spread)
        return [Spread.over(spreads[kernel]) for kernel in kernels]

    def _sizes_on(self, tape: Tape) -> Any:
        """Sizes to trace on a tape."""
        sizes = self._kind(*map(tape.argument, self._kind._fields))
        return self.models.domain.with_known(sizes)

    def _expected_here(self, sizes: Any) -> _Expected:
        """Expected times from those by the rates.

        Where the rates are another GPU's, all kernels move the same bytes, so all of them take so
        much longer. Rates of memory are not rescaled in its place: a fit takes time in which a
        kernel waits for memory for time of its steps where both grow together, of one kernel more
        than of another.
        """
        made_on, l2 = self.models.made_on, self.models.regime.l2
        least_us = floor_us(sizes, made_on or self.gpu, l2 == "cold")
        bounded = partial(larger, least_us) if least_us is not None else _same
        if made_on is None:
            return _Expected(bounded, _same, 1.0)
        gap_us = memory_gap_us(sizes, made_on, self.gpu, l2 == "warm")
        return _Expected(bounded, lambda us: us + gap_us, 1 + RESCALED_MARGIN)

    @staticmethod
    def _tiling(one: Candidate) -> Any:
        return None if one.family is None else one.family.tiling(one.config)


class _Expected(NamedTuple):
    """Expected times on a GPU, from times by rates; all may be traced."""

    bounded: Callable[[Any], Any]
    """Not less than the least time of the sizes."""
    here: Callable[[Any], Any]
    """On the GPU, if the rates are another's."""
    margin: float
    """Factor by which an own kernel must be faster."""


@dataclass
class _Block:
    """Own candidates that a condition on the sizes holds for, while they are traced."""

    tape: Tape
    sizes: Any
    rows: list[str] = field(default_factory=list)
    """Texts of their estimates."""
    loops: list[tuple[Any, Tape, str]] = field(default_factory=list)
    """The same over counts of splits: the counts, lines of a round, and its estimate."""

    def written(self, uses: Counter[str]) -> list[str]:
        """Lines behind those of the tape; names that they need are added to `uses`."""
        lines = [f" own += ({', '.join(self.rows)},)"] if self.rows else []
        for counts, tape, row in self.loops:
            inner = [f"  {line}" for line in tape.lines(uses)]
            lines += [f" for count in {counts}:", *inner, f"  own.append({row})"]
        return lines


def _same(us: Any) -> Any:
    return us


def is_near(bounds: Iterable[tuple[float, float]], sizes: Sequence[int]) -> bool:
    """True if each size is within its bounds."""
    for (low, high), size in zip(bounds, sizes, strict=True):
        if not low <= size <= high:
            return False
    return True


def _overlap(bounds: Collection[tuple[float, float]]) -> tuple[float, float]:
    return max(low for low, _ in bounds), min(high for _, high in bounds)


def _union(bounds: Collection[tuple[float, float]]) -> tuple[float, float]:
    return min(low for low, _ in bounds), max(high for _, high in bounds)


def _within(
    bounds: Sequence[tuple[float, float]],
    sizes: Sequence[Any],
    known: Sequence[tuple[float, float]] | None = None,
) -> str:
    """Source text of `is_near`; empty where it holds for all sizes within the `known` bounds."""
    conditions = []
    for place, ((low, high), size) in enumerate(zip(bounds, sizes, strict=True)):
        lowest, highest = (None, None) if known is None else known[place]
        above = f" <= {high}" if high not in (highest, math.inf) else ""
        sides = f"{low} <= " if low != lowest else "", above
        if any(sides):
            conditions.append(f"{sides[0]}{size}{sides[1]}")
    return " and ".join(conditions)


def pytorchs_choice(kernels: Collection[str]) -> str:
    """The kernel, among some vendors' kernels, that PyTorch chooses by itself."""
    return next((name for name in BACKENDS if name in kernels), min(kernels))
