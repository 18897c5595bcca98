"""Trials for a kernel's proof: problems drawn by a seed from its whole domain, with planted edge
cases.

Sizes, strides and head counts are launch arguments, so a kernel's domain covers all of them. Each
*axis* has values at which errors are likely:

- attention: one query, one key, lengths beside a tile's edge
- heads: dimensions below the compiled one, odd counts, every legal ratio; the most splits
- gradients of attention: as attention
- products: one row, extents beside a tile's edge, odd multiples of the alignment, a vocabulary's
  columns, rows that lie apart
- grouped products: one group, more than a warp's lanes and than rows, groups of unlike rows, empty
  ones

Each value is in at least one trial, and the other values are drawn. A trial is bounded in memory
and time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from tuner.hardware import Gpu
from tuner.problem import AttentionBackwardProblem, AttentionProblem, GroupedGemmProblem
from tuner.selection.kernels import Target
from tuner.tuning.trials.attention import AttentionDraw, BackwardDraw
from tuner.tuning.trials.base import (
    MAX_ATTEMPTS,
    MAX_BYTES,
    MAX_FLOPS,
    MAX_MASK_PAIRS,
    Draw,
    Fact,
    Trial,
)
from tuner.tuning.trials.products import (
    GroupedDraw,
    ProductDraw,
    ScaledDraw,
    has_block_factors,
    tile_of,
)

__all__ = [
    "MAX_BYTES",
    "MAX_FLOPS",
    "MAX_MASK_PAIRS",
    "Fact",
    "Trial",
    "draw_of",
    "tile_of",
    "trials",
]


def trials(target: Target, gpu: Gpu, count: int, seed: int) -> list[Trial]:
    """At least `count` trials of a kernel; more if the planted values need them.

    Args:
        target: kernel to prove.
        gpu: GPU that it runs on.
        count: minimum number of trials.
        seed: random seed; equal seeds draw equal trials.
    """
    draw = draw_of(target, gpu, seed)
    found: dict[Trial, None] = {}
    seen: set[Fact] = set()
    for name, values in draw.axes.items():
        for value in values:
            if (name, value) not in seen and (trial := draw.one({name: value})) is not None:
                found[trial] = None
                seen |= draw.facts(trial)
    for _ in range(MAX_ATTEMPTS):
        if len(found) >= count:
            break
        if (trial := draw.one({})) is not None:
            found[trial] = None
    return list(found)


def draw_of(target: Target, gpu: Gpu, seed: int) -> Draw:
    """Draw of a kernel's trials; arguments as of `trials`."""
    kinds: Mapping[str, type[Draw]]
    kinds = {
        AttentionProblem.op: AttentionDraw,
        AttentionBackwardProblem.op: BackwardDraw,
        GroupedGemmProblem.op: GroupedDraw,
    }
    kind = kinds.get(target.problem.op, ProductDraw)
    if has_block_factors(target.problem):
        kind = ScaledDraw
    # Equal for both types, so that a failure in one can be compared with the other.
    return kind(target, gpu, random.Random(f"{seed}:{target.config.digest}"))
