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
from statistics import fmean

from tuner.families.by_operation import AnyDomain, AttentionDomain
from tuner.problem import AttentionProblem
from tuner.selection.ratios import Ratios

EngineRatios = Mapping[AnyDomain, Ratios]
"""By domain; of paged caches."""
WIDTH_OCTAVES = 0.7
CAPTURED = 1, 4, 16
"""Parts of a captured step's longest length: most of its replays have fewer keys, and there own
kernels lead by more."""
NARROW = 64
"""Head dimensions up to this: engines answered prompts as fast by tuned kernels."""


def sizes_of(problem: AttentionProblem, part: int = 1) -> tuple[int, ...]:
    """Sizes that ratios are told apart by: keys of all KV heads, and rows that share one.

    Args:
        problem: a call.
        part: its keys are divided by this.
    """
    group = problem.heads_q // problem.heads_kv
    keys = max(1, problem.seqlen_kv // part)
    return problem.batch * problem.heads_kv * keys, group * problem.seqlen_q


def is_engines(
    problem: AttentionProblem, measured: EngineRatios, *, is_captured: bool = False
) -> bool | None:
    """True if the engine's own kernel answers a call; None where its kind was not measured.

    Windows, soft caps and sinks go by plain calls where they were not.

    Args:
        problem: the call.
        measured: ratios by domain.
        is_captured: True for a captured step, whose keys are as many as the problem's or fewer.
    """
    ratios = _ratios_of(problem, measured)
    if ratios is None:
        return None
    parts = CAPTURED if is_captured else CAPTURED[:1]
    return fmean(ratios.lead(sizes_of(problem, part), *ratios.prior) for part in parts) < 0


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
