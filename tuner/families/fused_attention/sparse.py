"""Kernels that serve block-sparse masks over any shape: one for each head dimension.

Those of 64 and 128 were the fastest, or within 1 % of it, under each of four masks on an H200
(24 November 2026). The others have as many of the same stages and
keys as the shared memory holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.config import Config, Value
from tuner.families.fused_attention.packing import NAME

HEAD_DIMS = (64, 96, 128, 256)
"""Instances that have a kernel."""
MIN_TILES: Mapping[int, int] = {96: 132}
"""Tiles of 128 queries that an instance needs to be served: one for each multiprocessor of an H100
or H200. At D = 96 the kernel took up to 1.05 of FlexAttention's time with 32, and at most 0.56 with
1024 (an H100, 25 November 2026).
"""
#: Keys of a tile, stages, and an output tile in shared memory, by head dimension.
_TILES: Mapping[int, tuple[int, int, bool]] = {
    64: (128, 3, True),
    96: (128, 3, True),
    128: (128, 2, True),
    256: (64, 2, False),
}


def kernels(head_dim: int) -> tuple[Config, ...]:
    """The kernel of an instance, for all heads: blocks take one tile of queries after the other."""
    keys, stages, is_staged = _TILES[head_dim]
    params: dict[str, Value] = {
        "warp_groups": 2,
        "tile_n": keys,
        "kv_stages": stages,
        "score_buffers": 1,
        "early_exp": 0,
        "ping_pong": True,
        "q_in_registers": False,
        "persistent": True,
        "blocks_per_sm": 1,
        "pdl": True,
    }
    return (Config(NAME, {**params, "stages_output": True} if is_staged else params),)
