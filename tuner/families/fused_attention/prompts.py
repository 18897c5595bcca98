"""Further kernels of prompts that no domain was measured for: with a window, a soft cap or packed
sequences, and short ones. Their domains have a donor's kernel, which seldom suits all lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

from tuner.config import Config, Value
from tuner.families.fused_attention.packing import NAME

#: Levers of the kernel of long prompts, by the instance.
_LONG: dict[int, dict[str, Value]] = {
    64: {"tile_n": 128, "warp_groups": 3, "stages_output": True},
    96: {"tile_n": 128, "stages_output": True},
    128: {"tile_n": 128, "stages_output": True, "rescale": "lazy", "turn_ends": "scores"},
    192: {"tile_n": 112},
    256: {"tile_n": 80, "rescale": "lazy"},
}
#: The same under a causal mask, where nothing else hides keys.
_SKIPPING: dict[int, dict[str, Value]] = {
    128: {"skips_masked": "halves"},
    256: {"skips_masked": "blocks", "tile_n": 64},
}
#: Keys of a tile at which two blocks of one group fit on a multiprocessor, by the instance.
_PACKING_TILES = {64: 64, 96: 64, 128: 64, 192: 48}


def long(head_dim: int, mask: str, *, is_varlen: bool, has_softcap: bool) -> Iterator[Config]:
    """The kernel of most queries to a tile, where a donor's is another.

    Args:
        head_dim: the instance.
        mask: full, causal or windowed.
        is_varlen: packed sequences.
        has_softcap: a soft cap.
    """
    levers = _LONG[head_dim]
    if is_varlen:
        yield _turning(**levers, searches=True)
    elif has_softcap:
        skipping = _SKIPPING.get(head_dim, {}) if mask == "causal" else {}
        yield _turning(**{**levers, **skipping})
    elif head_dim != 256 and not (mask == "full" and head_dim == 128):
        yield _turning(**levers)


def narrow(head_dim: int) -> Iterator[Config]:
    """A kernel of small tiles, which a narrow window leaves less of, where a donor's has others."""
    if head_dim == 96:
        single: dict[str, Value] = {"warp_groups": 1, "tile_n": 64, "blocks_per_sm": 2}
        yield _kernel(**single, persistent=True, stages_output=True)


def packing(head_dim: int, heads: int, *, is_varlen: bool) -> Config:
    """A kernel whose tile holds few queries of all query heads of a KV head.

    Args:
        head_dim: the instance.
        heads: most query heads.
        is_varlen: packed sequences.
    """
    packed: dict[str, Value] = {"packed_heads": heads, "pads_heads": True}
    packed |= {"searches": True} if is_varlen else {}
    if head_dim not in _PACKING_TILES:  # a thread lacks the registers of a second block
        return _turning(tile_n=64, **packed)
    if head_dim <= 128:
        packed["stages_output"] = True
    single: dict[str, Value] = {
        **{"warp_groups": 1, "tile_n": _PACKING_TILES[head_dim], "blocks_per_sm": 2},
        **{"persistent": is_varlen, "q_in_registers": head_dim == 96},
    }
    return _kernel(**single, **packed)


def _turning(**more: Value) -> Config:
    """Groups that take turns, in blocks that take one tile after the other."""
    return _kernel(**{"warp_groups": 2, "persistent": True, "ping_pong": True, **more})


def _kernel(**more: Value) -> Config:
    params: dict[str, Value] = {
        **{"kv_stages": 2, "score_buffers": 1, "early_exp": 0, "q_in_registers": False},
        **{"blocks_per_sm": 1, "pdl": True},
    }
    return Config(NAME, {**params, **more})
