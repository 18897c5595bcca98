"""Kernels of domains that were not measured, with the time models of related domains (donors).

`Transfer` is made for a GPU and its measured domains. Candidates of the nearest measured donor
(`Domain.donors`) are carried over: as they are called in the new domain, where that is legal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from tuner.config import Config
from tuner.families import attention_work, family
from tuner.families.attention_work import PACKING
from tuner.families.by_operation import AnyDomain, AttentionDomain
from tuner.hardware import Gpu
from tuner.selection.candidates import Candidate, DomainModels, Spread

MASK_US: Mapping[str, float] = {"aligned_mask_steps": 0.25, "mask_steps": 0.70}
"""Microseconds that a mask of booleans adds to each key step of a round, in decoding.

With them expected times of 131 candidates at 24 problems of D = 64 and 128 on an H200 are 10 % off
in the mean, at problems left out. Without them they are 35 % off (27 November 2026,
``cache/recordings``).
"""
STEPS = frozenset(term for term in attention_work.TERMS if term.endswith("_steps"))
"""Terms that grow with the tiles of a step."""
COMBINING = frozenset({"launch", "partials", "splits"})
"""Terms of a second kernel, which combines splits."""
TILES = "blocks_per_sm", "tile_n", "rescale"
"""Parameters that kernels of like rates have in common."""
SHARED = 1.5
"""Time of two blocks that share a multiprocessor, over that of one."""


def _unpacked(one: Candidate) -> Candidate:
    """The candidate with one head (no packing) in the rows of a tile."""
    params = {name: value for name, value in one.config.params.items() if name not in PACKING}
    return replace(one, config=Config(one.config.family, params, one.config.stages))


def _like(kernel: Config, combine: str | None, candidates: Iterable[Candidate]) -> Candidate | None:
    """The own kernel most similar to another that combines splits in this way; None without one."""
    similar = [
        candidate
        for candidate in candidates
        if candidate.config.family == kernel.family and candidate.config.get("combine") == combine
    ]

    def unlike(candidate: Candidate) -> tuple[bool, bool, bool]:
        config = candidate.config
        is_packed = config.get("packed_heads", 1) > 1
        return (
            "key_groups" in config.params,
            config["warp_groups"] != kernel["warp_groups"],
            is_packed != (kernel.get("packed_heads", 1) > 1),
        )

    return min(similar, key=unlike, default=None)


def _differing(kernel: Config, candidate: Candidate) -> int:
    """Number of `TILES` that a candidate has otherwise than a kernel."""
    return sum(kernel.get(name) != candidate.config.get(name) for name in TILES)


def _rated(kernel: Config, like: Candidate) -> Candidate:
    """A kernel with the rates of one of other tiles, whose steps take the longer the larger."""
    assert like.family is not None
    mine, theirs = like.family.tiling(kernel), like.family.tiling(like.config)
    size = mine.rows * mine.keys / (theirs.rows * theirs.keys)
    rates = {term: us * size if term in STEPS else us for term, us in like.rates.items()}
    if mine.resident > theirs.resident:
        rates |= {term: rates[term] * SHARED for term in ("rounds", "round_steps") if term in rates}
    return replace(like, config=kernel, rates=rates)


def _donated(models: DomainModels) -> DomainModels:
    """A donor's models without its `further_kernels`, which other domains have of their own."""
    kernels = models.domain.further_kernels
    further = {family(kernel.family).compile_digest(kernel) for kernel in kernels}
    own = [
        one
        for one in models.candidates
        if one.family is None or one.family.compile_digest(one.config) not in further
    ]
    return replace(models, candidates=own)


@dataclass(frozen=True)
class Transfer:
    """Candidates of unmeasured domains."""

    gpu: Gpu
    measured: Mapping[AnyDomain, DomainModels]

    def _named_of(self, domain: AttentionDomain) -> DomainModels | None:
        """Candidates that the family names for a domain of paged caches or block-sparse masks.

        Each schedule has the rates of the most similar dense kernel. None for other domains.
        """
        if domain not in tuple(domain.other_recipients()):
            return None
        candidates: list[Candidate] = []
        source: DomainModels | None = None
        for kernel in domain.named_kernels:
            is_short = kernel["warp_groups"] == 1 or "pads_heads" in kernel.params
            like = (
                domain if is_short else domain._replace(phase="prompt")
            )  # the others are for them
            clustered = ("cluster",) if kernel["warp_groups"] == 1 else ()
            is_whole = kernel["persistent"] or "stream_k" in kernel.params
            ways = (*clustered, "kernel") if is_short and not is_whole else ()
            for combine in (None, *ways):
                for other in like.donors:
                    models = self.measured.get(other)
                    dense = None if models is None else _like(kernel, combine, models.candidates)
                    if dense is not None:
                        more = {} if combine is None else {"combine": combine}
                        config = Config(kernel.family, {**kernel.params, **more})
                        rates = dense.rates
                        if (factor := domain.donor_factor(kernel)) != 1:
                            rates = {term: us * factor for term, us in rates.items()}
                        candidates.append(replace(dense, config=config, rates=rates))
                        source = source or models
                        break
        if source is None:
            return None
        # All schedules of a kernel compete, whatever sizes their rates were measured at.
        spread = Spread.over(candidate.spread for candidate in candidates)
        transferred = [replace(candidate, spread=spread) for candidate in candidates]
        return replace(
            source,
            domain=domain,
            candidates=transferred,
            margin=0.0,
            donor=source.domain,
            ratios=None,
        )

    def models_of(self, domain: AnyDomain) -> DomainModels | None:
        if isinstance(domain, AttentionDomain) and domain.has_named_kernels:
            return self._named_of(domain)
        for other in domain.donors:
            models = self.measured.get(other)
            if models is None:
                continue
            models = _donated(models)
            transferred = list(self._transferred(domain, models))
            if isinstance(domain, AttentionDomain) and domain.operand == "bool":
                transferred = list(self._masked(domain, other, transferred))
            if isinstance(domain, AttentionDomain) and domain.takes_packs:
                transferred += self._packing_most(domain, models)
            transferred += self._further(domain, transferred)
            candidates, margin = transferred, 0.0
            if domain.has_donor_vendors:
                candidates, margin = [*transferred, *models.vendors], models.margin
            if candidates:
                return replace(
                    models,
                    domain=domain,
                    candidates=candidates,
                    margin=margin,
                    donor=other,
                    ratios=None,
                )
        return None

    def completed(self, models: DomainModels) -> DomainModels:
        """Measured candidates of a domain, and its `further_kernels`."""
        further = self._further(models.domain, models.candidates)
        return replace(models, candidates=[*models.candidates, *further]) if further else models

    def _further(self, domain: AnyDomain, beside: Iterable[Candidate]) -> list[Candidate]:
        """A domain's `further_kernels` that are not among its candidates, in each way to combine
        splits.
        """
        if not isinstance(domain, AttentionDomain):
            return []
        own = [one for one in beside if not one.is_vendor]
        digests = {one.family.compile_digest(one.config) for one in own if one.family}
        spreads, further = [one.spread for one in own], list[Candidate]()
        for kernel in domain.further_kernels:
            if (whole := self._like(kernel, domain.alike_kernels(kernel))) is None:
                continue
            alike = _rated(kernel, whole)
            rated = [replace(alike, rates=domain.further_rates(kernel, alike.rates))]
            ways = self._like(kernel, [domain], "kernel") if domain.splits(kernel) else None
            if ways is not None:
                combining = {name: us for name, us in ways.rates.items() if name in COMBINING}
                config = Config(kernel.family, {**kernel.params, "combine": "kernel"})
                rated.append(
                    replace(rated[0], config=config, rates={**rated[0].rates, **combining})
                )
            for one in rated:
                carried = self._carried(
                    domain, one, None if "combine" in one.config.params else (1,)
                )
                if carried and family(kernel.family).compile_digest(carried.config) not in digests:
                    spread = Spread.over(spreads or [carried.spread])
                    further.append(replace(carried, spread=spread))
        return further

    def _like(
        self, kernel: Config, domains: Iterable[AnyDomain], combine: str | None = None
    ) -> Candidate | None:
        """The most similar kernel of the first measured domain that has one."""
        for domain in domains:
            if (models := self.measured.get(domain)) is not None:
                near = sorted(models.candidates, key=partial(_differing, kernel))
                if (like := _like(kernel, combine, near)) is not None:
                    return like
        return None

    def _masked(
        self, domain: AttentionDomain, donor: AnyDomain, found: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        """Candidates with the time of a mask of booleans, and those of the other phase."""
        by_config = {candidate.config: candidate for candidate in found}
        for other in donor.of_times if domain.shares_phases else ():
            if (models := self.measured.get(other)) is not None:
                for candidate in self._transferred(domain, models):
                    by_config.setdefault(candidate.config, candidate)
        for c in by_config.values():
            yield replace(c, rates={**c.rates, **MASK_US}) if domain.phase != "prompt" else c

    def timed_here(self, theirs: DomainModels) -> DomainModels:
        """Transferred candidates with the rates of this GPU where it measured the donor."""
        domain, donor = theirs.domain, theirs.donor
        here = None if donor is None else self.measured.get(donor)
        if here is None or here.made_on is not None or theirs.made_on is None:
            return theirs
        if isinstance(domain, AttentionDomain) and domain.has_named_kernels:
            return theirs
        configs = {candidate.config for candidate in theirs.candidates}
        own = [candidate for candidate in here.candidates if not candidate.is_vendor]
        carried = (self._carried(domain, candidate) for candidate in (*own, *map(_unpacked, own)))
        timed = {c.config: c for c in carried if c is not None and c.config in configs}
        if not timed:
            return theirs
        candidates = [*timed.values(), *self._further(domain, timed.values())]
        candidates += here.vendors if theirs.vendors else ()
        margin = here.margin if theirs.vendors else theirs.margin
        return replace(
            here, domain=domain, candidates=candidates, margin=margin, donor=donor, ratios=None
        )

    def _transferred(self, domain: AnyDomain, models: DomainModels) -> Iterator[Candidate]:
        """Own candidates of a donor as they are called in `domain`, best first."""
        own = [candidate for candidate in models.candidates if not candidate.is_vendor]
        if isinstance(domain, AttentionDomain):
            own = [candidate for candidate in own if domain.takes(candidate.config)]
        own.sort(key=lambda candidate: "packed_heads" in candidate.config.params)
        if domain.donors_split:
            yield from self._divided(domain, own)
            return
        if domain.donor_kernels is not None:
            every = (self._carried(domain, candidate, (1,)) for candidate in own)
            yield from islice((c for c in every if c is not None), domain.donor_kernels)
            return
        kinds = set[Hashable]()
        for candidate in (*own, *map(_unpacked, own)):
            kind = candidate.config.get("packed_heads", 1), "combine" in candidate.config.params
            if kind not in kinds and (carried := self._carried(domain, candidate)) is not None:
                kinds.add(kind)
                yield carried

    def _packing_most(self, domain: AnyDomain, models: DomainModels) -> Iterator[Candidate]:
        """The donor's kernel that pads the most query heads, in each way to combine splits."""
        padded = [one for one in models.candidates if "pads_heads" in one.config.params]
        most = max((one.config["packed_heads"] for one in padded), default=0)
        widest = (one for one in padded if one.config["packed_heads"] == most)
        carried = (self._carried(domain, candidate) for candidate in widest)
        yield from (candidate for candidate in carried if candidate is not None)

    def _divided(self, domain: AnyDomain, own: Sequence[Candidate]) -> Iterator[Candidate]:
        """The best own kernel that splits the keys, for each number of packed heads if the domain
        takes several: with one split, and in each measured way to combine several. The best of all
        where none splits them.
        """
        of_kernel: dict[str, list[Candidate]] = {}
        for best in own:
            if best.family is not None:
                of_kernel.setdefault(best.family.compile_digest(best.config), []).append(best)
        by_use = sorted(
            of_kernel.values(), key=lambda ways: not any("combine" in w.config.params for w in ways)
        )
        packings = set[Any]()
        for ways in by_use:
            packed = ways[0].config.get("packed_heads", 1)
            # By the rates of the whole kernel where it was measured.
            best = min(ways, key=lambda way: "combine" in way.config.params)
            params = {name: v for name, v in best.config.params.items() if name != "combine"}
            whole = replace(best, config=Config(best.config.family, params))
            carried = self._carried(domain, whole, (1,))
            splits = [way for way in ways if "combine" in way.config.params]
            if carried is None or packed in packings or (packings and not splits):
                continue
            packings.add(packed)
            yield carried
            several = (self._carried(domain, split) for split in splits)
            yield from (candidate for candidate in several if candidate is not None)
            if domain.donor_kernels is not None:
                return

    def _carried(
        self, domain: AnyDomain, candidate: Candidate, splits: Sequence[int] | None = None
    ) -> Candidate | None:
        """A candidate of a donor as it is called in another domain.

        Args:
            domain: domain without measurements.
            candidate: candidate of its donor.
            splits: numbers of splits to try; None: those of its family.

        Returns:
            The candidate, or None if it is illegal with all these numbers.
        """
        family = candidate.family
        if family is None:
            return None
        problem = domain.problem_for(candidate.config)
        config = family.carried(problem, candidate.config)
        counts = family.splits(problem, config, self.gpu) if splits is None else splits
        called = (family.called(problem, config, count) for count in counts)
        is_legal = any(family.accepts(problem, config, self.gpu) for config in called)
        return replace(candidate, config=config) if is_legal else None
