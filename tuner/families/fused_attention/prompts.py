"""Further kernels of prompts and of several queries, beside those of measurements and of donors.

They are for calls where the others trailed (`scripts/bench cliffs`, H200, 29 November 2026).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from tuner.config import Config, Value
from tuner.families.fused_attention.packing import MAX_PACKED, NAME

#: Levers of the kernel of long prompts, by the instance; those without packed sequences.
_LONG: Mapping[int, Mapping[str, Value]] = {
    64: {"tile_n": 128, "warp_groups": 3},
    96: {"tile_n": 128, "rescale": "lazy"},
    128: {"tile_n": 128, "rescale": "lazy", "turn_ends": "scores"},
    192: {"tile_n": 112, "rescale": "lazy"},
    256: {"tile_n": 80, "rescale": "lazy"},
}
_UNPACKED: Mapping[int, Mapping[str, Value]] = {
    64: {"stages_output": True},
    96: {"stages_output": True, "skips_masked": "halves"},
    192: {"skips_masked": "blocks"},
    256: {"skips_masked": "blocks", "tile_n": 64},
}
#: Instances with a kernel of long prompts, by the feature that others lack and the mask.
_HAVE_LONG: Mapping[tuple[str, str], Container[int]] = {
    ("", "causal"): (96, 192),
    ("", "windowed"): (64,),
    ("softcap", "causal"): (192, 256),
    ("varlen", "causal"): (96, 128, 192, 256),
    ("varlen", "full"): (64, 96, 128, 192, 256),
}
#: Instances with a kernel of packed heads: of windows, of few queries, of few tall tiles, and of a
#: soft cap, of few queries or under a causal mask.
_WINDOWED, _FEW, _TALL = (96, 192, 256), 192, (96, 128)
_CAPPED_FEW, _CAPPED = (96, 128, 192, 256), (192,)
#: Keys of a tile at which two blocks of one group fit on a multiprocessor, by the instance; and
#: those of two groups that take turns.
_PACKING_TILES = {64: 64, 96: 64, 128: 64, 192: 48}
_TURNING_TILES = {64: 128, 96: 128, 128: 128, 192: 80, 256: 64}
#: Any number of query heads to a KV head, none of a tile's rows in vain.
_PACKS: Mapping[str, Value] = {"packed_heads": MAX_PACKED, "pads_heads": True, "fills_rows": True}

#: Keys of tiles that are not tall.
_SHORT = 64

WINDOWED, FILLING, SEARCHING = 0.7, 0.65, 0.7
"""Times of steps over those by other domains' rates: under windows, with filled rows, and of
packed sequences without.

Packed sequences without a mask have the last with filled rows too. With these, kernels chosen for
387 calls take 3.5 % longer in the mean than the fastest of each, else 5.7 %.
"""
SEARCH_US = 0.7
"""Microseconds in which a warp finds the first tile of packed sequences."""


def kernels(
    head_dim: int, mask: str, phase: str, *, has_softcap: bool, is_varlen: bool
) -> Iterator[Config]:
    """The further kernels of a domain without a mask operand.

    Args:
        head_dim: the instance.
        mask: full, causal or windowed.
        phase: prompt, few or one.
        has_softcap: a soft cap.
        is_varlen: packed sequences.
    """
    feature = "varlen" if is_varlen else "softcap" if has_softcap else ""
    is_prompt = phase == "prompt"
    if is_prompt and head_dim in _HAVE_LONG.get((feature, mask), ()):
        more = {"searches": True} if is_varlen else _UNPACKED[head_dim]
        yield _turning(**{**_LONG[head_dim], **more})
    if is_varlen:
        yield _packing(head_dim, persistent=True, searches=True)
    elif has_softcap:
        is_few = phase == "few" and mask == "full" and head_dim in _CAPPED_FEW
        is_capped = is_prompt and (mask, head_dim) == ("full", 256)
        if is_few:
            yield _packing(head_dim, persistent=False)
        elif is_capped or (is_prompt and mask == "causal" and head_dim in _CAPPED):
            yield _packing(head_dim)
    elif mask == "windowed":
        if is_prompt and head_dim in _WINDOWED:
            yield _packing(head_dim)
    elif phase != "one":
        yield _turning(**_PACKS, tile_n=_TURNING_TILES[head_dim])
        if phase == "few" and head_dim == _FEW:
            yield _packing(head_dim)
        if phase == "few" and mask == "full" and head_dim in _TALL:
            yield _turning(**_PACKS, tile_n=128, persistent=False)


def rates(kernel: Config, like: Mapping[str, float], mask: str) -> dict[str, float]:
    """Rates of a further kernel of a domain, from those of a kernel like it of another one."""
    if kernel.get("searches"):
        is_filling = mask != "full" and kernel.get("fills_rows")
        factor, more = FILLING if is_filling else SEARCHING, SEARCH_US
    elif mask == "windowed":  # keys that heads read anew stay in the cache
        factor, more, like = WINDOWED, 0.0, {**like, "repeated": 0.0}
    elif kernel.get("fills_rows") and kernel["tile_n"] <= _SHORT:
        factor, more = FILLING, 0.0
    else:
        return dict(like)
    found = {term: us if term == "launch" else factor * us for term, us in like.items() if us}
    return {**found, "launch": found.get("launch", 0.0) + more}


def _packing(head_dim: int, **more: Value) -> Config:
    """A kernel whose tile holds few queries of all query heads of a KV head."""
    if head_dim not in _PACKING_TILES:  # a thread lacks the registers of a second block
        return _turning(**_PACKS, tile_n=64, **more)
    single: dict[str, Value] = {"warp_groups": 1, "blocks_per_sm": 2, "persistent": False}
    single |= {"tile_n": _PACKING_TILES[head_dim], "q_in_registers": head_dim == 96}
    return _kernel(**{**single, **_PACKS, **more})


def _turning(**more: Value) -> Config:
    """Groups that take turns, in blocks that take one tile after the other."""
    return _kernel(**{"warp_groups": 2, "persistent": True, "ping_pong": True, **more})


def _kernel(**more: Value) -> Config:
    params: dict[str, Value] = {
        **{"kv_stages": 2, "score_buffers": 1, "early_exp": 0, "q_in_registers": False},
        **{"blocks_per_sm": 1, "pdl": True},
    }
    return Config(NAME, {**params, **more})
