"""Rows of a tile, and the query heads that share them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tuner.config import Value
from tuner.problem import E4M3, AttentionProblem

NAME = "fused_attention"
"""Name of the family."""
#: Query heads that share a tile's rows at most.
MAX_PACKED = 32
#: The same of dense tensors in e4m3.
MAX_PACKED_E4M3 = 8


def tile_m(params: Mapping[str, Value]) -> int:
    """Rows of Q a block works on at once."""
    sharing = int(params.get("key_groups", 1)) * int(params.get("column_groups", 1))
    return 64 * int(params["warp_groups"]) // sharing


def packings(problem: AttentionProblem) -> tuple[tuple[int, bool], ...]:
    """Choices of `packed_heads` and `pads_heads`: 1, the most that divide the heads, or with
    padding the next power of two.
    """
    group = problem.heads_q // problem.heads_kv
    most = math.gcd(group, max_packed(problem))
    padded = 1 << (group - 1).bit_length()
    ways = [(1, False)]
    if most > 1:
        ways.append((most, False))
    if most < group <= MAX_PACKED and may_pad(problem):
        ways.append((padded, True))
    return tuple(ways)


def max_packed(problem: AttentionProblem) -> int:
    """Query heads that share a tile's rows at most."""
    is_dense_e4m3 = problem.dtype == E4M3 and not problem.is_paged
    return MAX_PACKED_E4M3 if is_dense_e4m3 else MAX_PACKED


def is_held(group: int, packed: int, pads: bool) -> bool:
    """True if packs of `packed` heads hold the `group` query heads of a KV head: with padding in
    one pack, else in whole packs.
    """
    return 1 < group <= packed if pads else group % packed == 0


def may_pad(problem: AttentionProblem) -> bool:
    """True if rows of heads that a KV head lacks may be computed."""
    return max_packed(problem) == MAX_PACKED and not problem.block_mask


def packs(problem: AttentionProblem, packed: int, pads: bool) -> int:
    """Packs of query heads of all sequences."""
    return problem.batch * (problem.heads_kv if pads else problem.heads_q // packed)
