"""Choice among a domain's candidates: the vendor's kernel, and own ones that beat it clearly."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tuner.config import Config
from tuner.families import family
from tuner.families.by_operation import MAX_SIZE_FACTOR, AnyDomain, AttentionDomain
from tuner.families.schedules import PagedBatch
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem, Problem
from tuner.selection.candidates import (
    DomainModels,
    DomainTimes,
    Estimate,
    Legality,
    Regret,
    pytorchs_choice,
)
from tuner.selection.ratios import Ratios

_FAR = f"no kernel was measured within {MAX_SIZE_FACTOR} times these sizes"
_WHOLE = "the time is that of a mask that hides nothing: what a block mask hides is not known"
#: Time of a persistent kernel over that of others at decoding of up to so many queries over pages.
PERSISTENT_AT_DECODING, MAX_DECODED = 3.2, 8
#: Parameters of the heads in a tile.
HEADS = "packed_heads", "pads_heads"
#: Heads that the kernels of one group pad to.
PADDED_HEADS = 8, 16, 32
#: Tiles of 128 rows take up to 1.5 times as long as the lowest tiles, where there are as many of
#: both (an H200, 29 November 2026).
HALF_EMPTY, LOWEST_ROWS = 1.5, 64
#: Microseconds of a persistent kernel beside its tiles: a kernel before it clears the counter of
#: tiles, which are looked for. At 10 short batches 3 to 7 more than expected (an H200, 29 November
#: 2026).
PERSISTENT_US = 3.5
#: The same for at most so many keys, which take less than what begins and ends a tile: 1.1 to 1.7.
SHORT_TALL, MAX_SHORT_KEYS = (1.25, 1.1), 1024
#: Time of a chunk's kernel with as many whole queries as a tile's rows hold, over what the rates
#: say, beside kernels of single heads: 0.55 to 1.2, 0.74 in the geometric mean of 10 drawn batches
#: (an H200, 29 November 2026).
FILLED = 0.7
#: Time of kernels that split keys at prompts over that of their schedules, which are of decoding.
DIVIDED = 1.15
#: The same as `PERSISTENT_AT_DECODING` of such a kernel for at most `MAX_SHORT_KEYS`, of D to 128
#: and above.
FILLED_AT_SHORT = 1.7, 1.3
#: Time of a kernel whose blocks take equal parts of all keys over the best of the others, for at
#: least so many sequences of so many keys at most, of unlike lengths.
STREAMED, MIN_STREAMED, MIN_STREAMED_KEYS = 0.8, 64, 32768
#: Time of a kernel whose blocks take counted parts of a sequence's keys over the same kernel's with
#: equally many splits of all: the least of those of unlike lengths. For so many tiles at most.
COUNTED, MAX_COUNTED_TILES = 0.9, 600
VENDOR_MARGIN = 0.25
"""Share of its time by which another kernel of PyTorch's must beat PyTorch's own choice."""


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
    usual_us, best = expected[number], None
    for other, (number, _) in legal.items():  # as `preferred`, and short: rarely one is that fast
        us = expected[number]
        if us * (1 + VENDOR_MARGIN) < usual_us and (best is None or (us, other) < best):
            if times.is_vendor_near(number, times.models.domain.sizes(problem)):
                best = us, other
    if best is None:
        return usual_us, config, name
    us, name = best
    return us, legal[name][1], name


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
    peers: tuple[tuple[float, Config], ...] = ()
    """Kernels of peers that are expected to be faster yet: microseconds and config, best first."""

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
        donor = self.times.models.donor
        notes = [] if donor is None else [f"the rates are those of {donor.label()}"]
        if (made_on := self.times.models.made_on) is not None:
            notes.insert(0, f"made on {made_on.name}, rescaled to {self.times.gpu.name}")
        if isinstance(self.domain, AttentionDomain) and self.domain.is_sparse:
            notes.append(_WHOLE)
        return tuple(notes) if self.is_near else (*notes, _FAR)

    @property
    def is_trusted(self) -> bool:
        """False where a vendor's kernel is chosen that was not measured near these sizes."""
        sizes = self.domain.sizes(self.problem)
        return all(
            self.times.is_vendor_near(number, sizes)
            for number, one in enumerate(self.times.vendors)
            if one.config.get("kernel") == self.config.get("kernel")
        )

    @property
    def source(self) -> str:
        """Reason for this kernel, for people."""
        return f"{self.domain.label()}: expected {self.expected_text}"

    @property
    def expected_text(self) -> str:
        """Expected times of the first answer and of the vendor's kernel, for people."""
        us, config = self.first
        versus = f", {self.vendor} {self.vendor_us:.1f}" if self.vendor else ""
        by = f" by {config['kernel']}, else {self.expected_us:.1f}" if self.peers else ""
        return f"{us:.1f} us{by}{versus}"

    def own(self) -> Iterator[tuple[float, Config]]:
        """Own kernels that are expected to beat the vendor's by the margin, best first.

        Yields:
            Expected microseconds and config, which is made on demand.
        """
        return _legal(self.times, self.problem, self.facts, sorted(self.estimates), self.bound_us)

    def ranked(self) -> Iterator[tuple[float, Config]]:
        """As `own`, for all own kernels."""
        return _legal(self.times, self.problem, self.facts, sorted(self.estimates), math.inf)

    @property
    def first(self) -> tuple[float, Config]:
        """Expected microseconds and config of the first answer."""
        return self.peers[0] if self.peers else (self.expected_us, self.config)


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


def _bound_us(
    ratios: Ratios, times: DomainTimes, problem: Problem, first: Estimate, vendor_us: float
) -> float:
    """`Selection.bound_us` by ratios that were measured near a call.

    Args:
        ratios: measured ratios.
        times: times of the domain.
        problem: problem of the call.
        first: estimate of the best own kernel.
        vendor_us: expected microseconds of PyTorch's.
    """
    domain = times.models.domain
    cautious_us, us, place, _ = first
    if domain.pytorchs_factor(problem) != 1:  # not among the measured calls
        return vendor_us
    error, expected = times.models.candidates[place].p90_error, math.log(vendor_us / us)
    bound_us = cautious_us * math.exp(ratios.lead(domain.sizes(problem), expected, error))
    return min(bound_us, vendor_us) if ratios.is_elsewhere else bound_us


def page_readings(problem: Any, config: Config) -> int:
    """Times that a kernel reads each key when it decodes over pages.

    A tile may hold a part of a KV head's query heads, or of few queries whose heads it pads. 1 for
    other calls, whose rates count them.
    """
    if not (isinstance(problem, AttentionProblem) and problem.is_paged and problem.is_decoding):
        return 1
    group, packed = problem.heads_q // problem.heads_kv, int(config.get("packed_heads", 1))
    if not config.get("pads_heads"):
        return group // math.gcd(packed, group)
    if (queries := problem.seqlen_q) > MAX_DECODED:
        return 1
    rows = group if config.get("fills_rows") else packed
    return -(-queries // max(1, family(config.family).tile_rows(config) // rows))


def _decoding_pages(
    times: DomainTimes, problem: Any, estimates: Iterable[Estimate]
) -> list[Estimate]:
    """Estimates of decoding over pages, longer by what the rates of dense kernels leave out.

    - `page_readings`: at 100 drawn batches kernels that read once took 0.55 of the others' time in
      the geometric mean, and at most 1.07.
    - Tall tiles of padded heads that would fit half of them are slower (`HALF_EMPTY`).
    - Persistent kernels split no keys. At 109 batches of 2 to 8 queries they took 3.2 times the
      others' time in the geometric mean, and at least 1.05 times.
    - Blocks that take equal parts of all keys (`STREAMED`), or counted parts of a sequence's
      (`COUNTED`), are for unlike lengths.

    Source: ``tests/assets/fits/paged.jsonl.gz``.
    """
    whole = PERSISTENT_AT_DECODING if problem.seqlen_q <= MAX_DECODED else 1.0
    group = problem.heads_q // problem.heads_kv
    packed = next((heads for heads in PADDED_HEADS if heads >= group), group)
    lowest = -(-problem.seqlen_q // max(1, LOWEST_ROWS // packed))
    is_short = problem.seqlen_kv <= MAX_SHORT_KEYS

    def factor(config: Config) -> float:
        if config["persistent"]:
            is_filled = is_short and whole > 1 and config.get("fills_rows")
            slower = FILLED_AT_SHORT[problem.head_dim > 128] if is_filled else whole
            return page_readings(problem, config) * slower * _filled(config, group)
        if config.get("fills_rows") and is_short:
            return 1.0
        slower = 1.0
        if config.get("pads_heads") and config["warp_groups"] > 1:
            queries = family(config.family).tile_rows(config) // int(config["packed_heads"])
            is_half = -(-problem.seqlen_q // queries) >= lowest
            short = SHORT_TALL[problem.head_dim > 128]
            slower = HALF_EMPTY if is_half else short if is_short else 1.0
        return page_readings(problem, config) * slower

    candidates = times.models.candidates
    factors = [factor(one.config) for one in candidates]
    weighed, streaming = list[Estimate](), list[int]()
    for cautious_us, us, place, splits in estimates:
        if "stream_k" in candidates[place].config.params:
            streaming.append(place)
        else:
            ratio, more = factors[place], PERSISTENT_US * candidates[place].config["persistent"]
            weighed.append((cautious_us * ratio + more, us * ratio + more, place, splits))
    if not (problem.is_varlen and weighed):
        return weighed
    is_long = problem.batch >= MIN_STREAMED and problem.seqlen_kv >= MIN_STREAMED_KEYS
    base = min(weighed)
    form = _form(candidates[base[2]].config, problem.seqlen_q)
    is_counted = problem.batch * problem.heads_kv <= MAX_COUNTED_TILES
    for place in streaming:
        config = candidates[place].config
        if config["persistent"] and is_long:
            weighed.append((base[0] * STREAMED, base[1] * STREAMED, place, 1))
        elif is_counted and not config["persistent"] and _form(config, problem.seqlen_q) == form:
            weighed.append((base[0] * COUNTED, base[1] * COUNTED, place, 1))
    return weighed


def _filled(config: Config, group: int) -> float:
    """Factor of a kernel's time by `FILLED`: packs of four heads divide other groups."""
    return FILLED if config.get("fills_rows") and group % 4 else 1.0


def _prompts_over_pages(
    times: DomainTimes, problem: Any, estimates: Iterable[Estimate]
) -> list[Estimate]:
    """Estimates of prompts over pages, with the factor of `_filled`, and of kernels that split keys
    by the times of their schedules.
    """
    group, candidates = problem.heads_q // problem.heads_kv, times.models.candidates
    factors = [_filled(one.config, group) for one in candidates]
    batch = PagedBatch.of(problem, times.gpu.sm_count)
    divided = [family(one.config.family).paged_us(one.config, batch) for one in candidates]
    found = list[Estimate]()
    for cautious_us, us, place, splits in estimates:
        if (whole := divided[place]) is None:
            ratio = factors[place]
            found.append((cautious_us * ratio, us * ratio, place, splits))
        else:
            found.append((whole * DIVIDED, whole * DIVIDED, place, splits))
    return found


def _form(config: Config, queries: int) -> Hashable:
    """Parameters of a kernel but for those of how blocks share and copy keys; of one query also but
    for those of the heads in a tile.
    """
    others = "stream_k", "splits", "combine", "box_rows", "whole_rows", "copy_warps"
    others += "own_first", "leaves_cluster", *(HEADS if queries == 1 else ())
    return frozenset((name, v) for name, v in config.params.items() if name not in others)


def choose(problem: Problem, models: DomainModels, gpu: Gpu) -> Selection | None:
    """The kernel with the least expected time, the vendor's unless an own one wins clearly.

    Args:
        problem: problem to choose for.
        models: candidates of its domain.
        gpu: GPU that it runs on.

    Returns:
        The selection; None if no candidate takes the problem.
    """
    times = models.times(gpu)
    estimates, vendors_us, is_near = times.estimates(problem)
    if isinstance(models.domain, AttentionDomain) and models.domain.is_paged:
        weigh = _decoding_pages if models.domain.decodes_pages else _prompts_over_pages
        estimates = weigh(times, problem, estimates)
    facts = times.legality(problem)
    vendor_us, vendor, name = _vendors_best(times, problem, vendors_us, facts)
    vendor_us *= models.domain.pytorchs_factor(problem)
    is_trusted = is_near or vendor is None or models.domain.extrapolates
    bound_us = vendor_us if is_trusted else 0.0
    if models.ratios is not None and vendor is not None and is_trusted and estimates:
        bound_us = _bound_us(models.ratios, times, problem, min(estimates), vendor_us)
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
