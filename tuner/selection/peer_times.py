"""Expected times of peers' kernels over dense and packed sequences, by rates as of own kernels.

Own kernels and FlashAttention-3 are each the faster one at some sizes of nearly every domain. So
ratios near a call say less than times by the work that it has (`attention_work.peer_work`). Rates
hold for one build of the peer's package.

At 192 drawn calls of an H200 that no rate was fitted to, 12.5 % were below 0.97 of the fastest
kernel with FlashAttention-3 as an answer. Without it 22.4 % were (replayed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tuner.config import Config
from tuner.families.attention_work import TERMS, AttentionSizes, peer_work
from tuner.families.by_operation import AnyDomain
from tuner.families.work import floor_us
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem
from tuner.selection.peer_ratios import MIN_LEAD, is_here


class PeerTimes(NamedTuple):
    """A peer's kernel in one domain."""

    config: Config
    build: str
    """The build that was timed (`installed.build_of`)."""
    rates: Mapping[str, float]
    """Microseconds for one unit of each of `attention_work.TERMS`; a missing one is 0."""

    def us(self, amounts: Sequence[float]) -> float:
        """Expected microseconds of amounts of work."""
        return sum(self.rates.get(term, 0.0) * of for term, of in zip(TERMS, amounts, strict=True))


Times = Mapping[AnyDomain, Sequence[PeerTimes]]
"""Peers' kernels by domain."""


def faster(
    problem: AttentionProblem,
    peers: Sequence[PeerTimes],
    gpu: Gpu,
    own_us: float,
    is_cold: bool,
) -> Iterator[tuple[float, Config]]:
    """Peers' kernels of this machine that are expected to be faster by `peer_ratios.MIN_LEAD`.

    Args:
        problem: a call.
        peers: peers of its domain.
        gpu: GPU that it runs on.
        own_us: expected microseconds without peers.
        is_cold: True if the domain's inputs are not in L2: then no time is below their reading's.

    Yields:
        Expected microseconds and config.
    """
    here = [peer for peer in peers if is_here(peer.config, peer.build)]
    amounts = peer_work(problem, gpu) if here else ()
    least_us = floor_us(AttentionSizes.of(problem), gpu, is_cold) or 0.0
    for peer in here:
        us = max(peer.us(amounts), least_us)
        if us * math.exp(MIN_LEAD) < own_us:
            yield us, peer.config
