"""Kernels of domains that were not measured, with the time models of related domains (donors).

`Transfer` is made for a GPU and its measured domains. Candidates of the nearest measured donor
(`Domain.donors`) are carried over: as they are called in the new domain, where that is legal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from tuner.config import Config
from tuner.families.attention_work import PACKING
from tuner.hardware import Gpu
from tuner.selection.candidates import Candidate, DomainModels, Spread
from tuner.selection.domains import AnyDomain, AttentionDomain

MASK_US: Mapping[str, float] = {"aligned_mask_steps": 0.25, "mask_steps": 0.70}
"""Microseconds that a mask of booleans adds to each key step of a round, in decoding.

With them expected times of 131 candidates at 24 problems of D = 64 and 128 on an H200 are 10 % off
in the mean, at problems left out. Without them they are 35 % off (27 November 2026,
``cache/recordings``).
"""


def _unpacked(one: Candidate) -> Candidate:
    """The candidate with one head (no packing) in the rows of a tile."""
    params = {name: value for name, value in one.config.params.items() if name not in PACKING}
    return replace(one, config=Config(one.config.family, params, one.config.stages))


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
        found: list[Candidate] = []
        source: DomainModels | None = None
        for kernel in domain.named_kernels:
            is_short = kernel["warp_groups"] == 1 or "pads_heads" in kernel.params
            like = (
                domain if is_short else domain._replace(phase="prompt")
            )  # the others are for them
            clustered = ("cluster",) if kernel["warp_groups"] == 1 else ()
            ways = (*clustered, "kernel") if is_short and not kernel["persistent"] else ()
            for combine in (None, *ways):
                for other in like.donors:
                    models = self.measured.get(other)
                    one = None if models is None else _like(kernel, combine, models.candidates)
                    if one is not None:
                        more = {} if combine is None else {"combine": combine}
                        config = Config(kernel.family, {**kernel.params, **more})
                        rates = one.rates
                        if is_short and (factor := domain.short_factor) != 1:
                            rates = {term: us * factor for term, us in rates.items()}
                        found.append(replace(one, config=config, rates=rates))
                        source = source or models
                        break
        if source is None:
            return None
        # All schedules of a kernel compete, whatever sizes their rates were measured at.
        spread = Spread.over(one.spread for one in found)
        transferred = [replace(one, spread=spread) for one in found]
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
            transferred = list(self._transferred(domain, models))
            if isinstance(domain, AttentionDomain) and domain.operand == "bool":
                transferred = list(self._masked(domain, other, transferred))
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

    def _masked(
        self, domain: AttentionDomain, donor: AnyDomain, found: Sequence[Candidate]
    ) -> Iterator[Candidate]:
        """Candidates with the time of a mask of booleans, and those of the other phase."""
        known = {one.config: one for one in found}
        for other in donor.of_times if domain.shares_phases else ():
            if (models := self.measured.get(other)) is not None:
                for one in self._transferred(domain, models):
                    known.setdefault(one.config, one)
        for one in known.values():
            yield replace(one, rates={**one.rates, **MASK_US}) if domain.phase != "prompt" else one

    def timed_here(self, theirs: DomainModels) -> DomainModels:
        """Transferred candidates with the rates of this GPU where it measured the donor."""
        domain, donor = theirs.domain, theirs.donor
        here = None if donor is None else self.measured.get(donor)
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
        return replace(
            here, domain=domain, candidates=candidates, margin=margin, donor=donor, ratios=None
        )

    def _transferred(self, domain: AnyDomain, models: DomainModels) -> Iterator[Candidate]:
        """Own candidates of a donor as they are called in `domain`, best first."""
        own = [one for one in models.candidates if not one.is_vendor]
        if isinstance(domain, AttentionDomain) and not domain.takes_padding:
            own = [one for one in own if "pads_heads" not in one.config.params]
        own.sort(key=lambda one: "packed_heads" in one.config.params)
        if domain.donors_split:
            yield from self._divided(domain, own)
            return
        if domain.donor_kernels is not None:
            every = (self._carried(domain, one, (1,)) for one in own)
            yield from islice((one for one in every if one is not None), domain.donor_kernels)
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
            # By the rates of the whole kernel where it was measured.
            one = min(ways, key=lambda way: "combine" in way.config.params)
            params = {name: v for name, v in one.config.params.items() if name != "combine"}
            whole = replace(one, config=Config(one.config.family, params))
            carried = self._carried(domain, whole, (1,))
            splits = [one for one in ways if "combine" in one.config.params]
            if carried is None or packed in taken or (taken and not splits):
                continue
            taken.add(packed)
            yield carried
            several = (self._carried(domain, one) for one in splits)
            yield from (one for one in several if one is not None)
            if domain.donor_kernels is not None:
                return

    def _carried(
        self, domain: AnyDomain, one: Candidate, splits: Sequence[int] | None = None
    ) -> Candidate | None:
        """A candidate of a donor as it is called in another domain.

        Args:
            domain: domain without measurements.
            one: candidate of its donor.
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
