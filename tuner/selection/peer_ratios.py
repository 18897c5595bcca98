"""Measured ratios of the tuner's answers to kernels of peers, which answer where they are faster.

A peer's kernel has no time model. It was timed beside the answers of own kernels and PyTorch at the
problems that portfolios are made from; the ratios are `tuner.selection.ratios`. They hold for one
build of the peer's package. The ratio expected at a call is that of the domain, corrected by those
near the call.

No peer ships. At 231 calls (``tests/assets/fits/peers.jsonl.gz``), each by other models' ratios,
FlashAttention-3 answers none: it is clearly faster at no kind of call. Time models of it gained
0.5 % at 262 calls and lost at five (replayed).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tuner.config import Config
from tuner.families.by_operation import AnyDomain
from tuner.families.peers import installed, may_answer
from tuner.problem import AttentionProblem
from tuner.selection.ratios import Ratios

WIDTH_OCTAVES = 0.7
MIN_LEAD = 0.04
"""Least logarithm by which a peer must win: its calls cost the host more than those of own kernels,
which the dispatcher launches."""


def is_here(config: Config, build: str) -> bool:
    """True if this machine has a build of a peer's kernel, and it may answer.

    Raises:
        ConfigError: when TUNER_ANSWERS has an unknown word.
    """
    kernel = str(config["kernel"])
    return installed.build_of(kernel) == build and may_answer(kernel)


class PeerRatios(NamedTuple):
    """Ratios of one domain's answers to a peer's kernel."""

    config: Config
    build: str
    """The build that was timed (`installed.build_of`)."""
    ratios: Ratios

    @property
    def answers_here(self) -> bool:
        """`is_here` of it."""
        return is_here(self.config, self.build)

    def expected(self, sizes: Sequence[int]) -> float:
        """Logarithm by which the peer's kernel is expected to be faster."""
        return self.ratios.near(sizes, *self.ratios.prior)[0]

    def lead(self, sizes: Sequence[int]) -> float:
        """Logarithm by which the peer's kernel is expected to be faster, less its error."""
        return self.ratios.lead(sizes, *self.ratios.prior)


Peers = Mapping[AnyDomain, Sequence[PeerRatios]]
"""Peers' kernels by domain."""


def sizes_of(problem: AttentionProblem) -> tuple[int, ...]:
    """Sizes that ratios are told apart by: rows of the scores, keys, query heads to a KV head."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return rows, problem.seqlen_kv, problem.heads_q // problem.heads_kv


def faster(
    problem: AttentionProblem, peers: Sequence[PeerRatios]
) -> Iterator[tuple[float, Config]]:
    """Peers' kernels that are expected to be faster than the tuner's answer, best first.

    Args:
        problem: a call.
        peers: peers of its domain.

    Yields:
        The expected ratio of times, and the config.
    """
    sizes = sizes_of(problem)
    leads = ((peer.lead(sizes), peer) for peer in peers if peer.answers_here)
    for lead, peer in sorted(leads, key=lambda pair: -pair[0]):
        if lead >= MIN_LEAD:
            yield math.exp(peer.expected(sizes)), peer.config
