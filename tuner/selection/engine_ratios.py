"""Measured ratios of an engine's own attention over pages to tuned kernels.

They are `tuner.selection.ratios` at prompts, chunks of them and decoding, beside FlashAttention-3's
serving build. The engine's kernel has no time model: the ratio expected at a call is that of the
domain, corrected by those near the call.

At 263 batches (``tests/assets/fits/engines.jsonl.gz``), each by the others, 7 are below 0.97 of the
engine's in place of 13. Tuned kernels answer 237, and the mean is 1.228 in place of 1.235
(replayed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.families.by_operation import AnyDomain, AttentionDomain
from tuner.problem import AttentionProblem
from tuner.selection.ratios import Ratios

EngineRatios = Mapping[AnyDomain, Ratios]
"""By domain; of paged caches."""
WIDTH_OCTAVES = 0.7
NARROW = 64
"""Head dimensions up to this: engines answered prompts as fast by tuned kernels."""


def sizes_of(problem: AttentionProblem) -> tuple[int, ...]:
    """Sizes that ratios are told apart by: keys of all KV heads, and rows that share one."""
    group = problem.heads_q // problem.heads_kv
    return problem.batch * problem.heads_kv * problem.seqlen_kv, group * problem.seqlen_q


def is_engines(problem: AttentionProblem, measured: EngineRatios) -> bool | None:
    """True if the engine's own kernel answers a call; None where its kind was not measured.

    Windows, soft caps and sinks go by plain calls where they were not.
    """
    ratios = _ratios_of(problem, measured)
    if ratios is None:
        return None
    return ratios.lead(sizes_of(problem), *ratios.prior) < 0


def ratio(problem: AttentionProblem, measured: EngineRatios) -> float | None:
    """Expected time of the engine's own kernel over the tuned one's; None as of `is_engines`."""
    ratios = _ratios_of(problem, measured)
    if ratios is None:
        return None
    return math.exp(ratios.near(sizes_of(problem), *ratios.prior)[0])


def is_wide_chunk(problem: AttentionProblem) -> bool:
    """True for chunks of prompts above D = `NARROW`, which are the engine's where nothing was
    measured.
    """
    domain = AttentionDomain.holding(problem)
    return domain is not None and domain.phase == "prompt" and problem.head_dim > NARROW


def _ratios_of(problem: AttentionProblem, measured: EngineRatios) -> Ratios | None:
    domain = AttentionDomain.holding(problem)
    if domain is None:
        return None
    plain = AttentionDomain(
        domain.head_dim,
        "full" if domain.phase == "one" else "causal",
        domain.phase,
        is_paged=True,
        is_e4m3=domain.is_e4m3,
    )
    return measured.get(domain) or measured.get(plain)
