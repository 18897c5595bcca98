"""Kernels of fixed parts: each row's sum is divided at the same keys, whatever the call.

One block adds all parts of a tile, or each part has a block and a second kernel adds them in the
same order. The bits are equal, so a call takes what is faster. The kernels serve the
batch-invariant mode alone (`tuner.selection.invariant`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from tuner.config import Config, Value
from tuner.families.fused_attention.legality import MAX_SPLITS, WHOLE_ROWS
from tuner.families.fused_attention.packing import NAME
from tuner.hardware import Gpu
from tuner.problem import E4M3, AttentionProblem, DType

KEYS = 512
"""Keys of a part."""
TILE_KEYS: Mapping[int, int] = {64: 128, 128: 64}
"""Keys of a tile, by the head dimensions that have such kernels: wider accumulators do not fit
twice into the registers.
"""
BOX = 16
"""Slots of a page that one copy brings: pages of any multiple are served."""
PACKS = ((1, False), (4, False), (8, True))
"""Query heads to a KV head that a decoding kernel computes together, and whether any number up to
it is padded.
"""
MOST_PADDED = PACKS[-1][0]
"""Heads of the pack that is filled up: it reads the keys once."""
MOST_QUERIES = 64
"""Queries from which on a call has kernels of prompts."""
_COMMON: Mapping[str, Value] = {
    "score_buffers": 1,
    "q_in_registers": False,
    "splits": 1,
    "split_keys": KEYS,
    "pdl": True,
}


def is_served(problem: AttentionProblem) -> bool:
    """True for plain attention over dense tensors or pages, in fp16 or bf16."""
    is_packed = problem.is_varlen and not problem.is_paged
    is_plain = not (problem.modifiers or problem.is_windowed or problem.value_dim)
    is_plain &= not (problem.has_sinks or problem.softcap or is_packed)
    return is_plain and problem.dtype != E4M3 and problem.head_dim in TILE_KEYS


def configs(problem: AttentionProblem, gpu: Gpu) -> Iterator[Config]:
    """Kernels for a problem, the one that is expected to be faster first."""
    if not is_served(problem):
        return
    group = problem.heads_q // problem.heads_kv
    prompt = _prompt(problem)
    is_padded = 1 < group <= MOST_PADDED and group != 4
    packed = MOST_PADDED if is_padded else 4 if group % 4 == 0 else 1
    decoding = shared(problem, _decoding(problem, packed, is_padded), gpu)
    is_prompt = problem.seqlen_q * packed >= MOST_QUERIES * 2
    yield from (prompt, decoding) if is_prompt else (decoding, prompt)


def shared(problem: AttentionProblem, config: Config, gpu: Gpu) -> Config:
    """The config with a block for each part where whole tiles would leave most of the GPU idle.

    Args:
        problem: a problem that the kernel serves.
        config: a kernel of this module.
        gpu: GPU that it runs on.
    """
    if config["persistent"] or problem.seqlen_kv <= KEYS:
        return config
    packed = int(config.get("packed_heads", 1))
    heads = problem.heads_kv if "pads_heads" in config.params else problem.heads_q // packed
    queries = 64 * int(config["warp_groups"]) // packed
    tiles = problem.batch * heads * -(-problem.seqlen_q // queries)
    if 2 * tiles > gpu.sm_count * int(config["blocks_per_sm"]) * 0.9:
        return config
    return Config(config.family, {**config.params, "combine": "kernel"})


def blocks(problem: AttentionProblem, config: Config) -> int:
    """Blocks that share the keys of a tile.

    With `split_keys` and `combine` each has a part, and there are as many as the longest sequence
    needs. Without `combine` one block has all parts.
    """
    keys = int(config.get("split_keys", 0))
    if keys and "combine" in config.params:
        return max(1, -(-problem.seqlen_kv // keys))
    return int(config["splits"])


def reduction(config: Config) -> Mapping[str, Any]:
    """Fields of the class of a kernel with `split_keys`."""
    keys = int(config.get("split_keys", 0))
    return {"splits": 0, "step": keys, "merge": "order"} if keys else {}


def usual(problem: AttentionProblem, config: Config) -> Config:
    """The config of the kernel that divides the keys evenly, into as many parts."""
    params = {name: value for name, value in config.params.items() if name != "split_keys"}
    if "combine" in params:
        params["splits"] = min(MAX_SPLITS, -(-problem.seqlen_kv // KEYS))
    return Config(config.family, params)


def built(dtype: DType) -> Iterator[tuple[Config, AttentionProblem]]:
    """Every kernel of this module for a type, and a small problem of its calls."""
    for head_dim, is_paged in product(TILE_KEYS, (False, True)):
        plain = AttentionProblem(
            seqlen_q=256,
            seqlen_kv=256,
            head_dim=head_dim,
            heads_q=4,
            heads_kv=4,
            dtype=dtype,
            layout="bshd" if is_paged else "bhsd",
            page_size=64 if is_paged else 0,
            is_causal=is_paged,  # of pages a single query has a causal mask, too
        )
        for packed, pads in PACKS:
            heads = replace(plain, heads_q=4 * (packed - pads), seqlen_q=1)
            yield _decoding(heads, packed, pads), heads
        for is_causal in (True,) if is_paged else (False, True):
            yield _prompt(plain), replace(plain, is_causal=is_causal)


def _decoding(problem: AttentionProblem, packed: int, pads: bool) -> Config:
    packing: dict[str, Value] = {"packed_heads": packed} if packed > 1 or _grouped(problem) else {}
    return _config(
        problem,
        {
            **{"warp_groups": 1, "kv_stages": 3 if problem.is_paged else 2, "early_exp": 0},
            **{"blocks_per_sm": 2, "persistent": False, **packing},
            **({"pads_heads": True} if pads else {}),
        },
    )


def _prompt(problem: AttentionProblem) -> Config:
    packing: dict[str, Value] = {"packed_heads": 1} if _grouped(problem) else {}
    return _config(
        problem,
        {
            **{"warp_groups": 2, "kv_stages": 4, "early_exp": 50, "ping_pong": True},
            **{"blocks_per_sm": 1, "persistent": True, **packing},
        },
    )


def _config(problem: AttentionProblem, params: Mapping[str, Value]) -> Config:
    paging: dict[str, Value] = {}
    if problem.is_paged:
        paging = {"box_rows": BOX}
        if problem.head_dim in WHOLE_ROWS:
            paging["whole_rows"] = True
    return Config(NAME, {**_COMMON, "tile_n": TILE_KEYS[problem.head_dim], **params, **paging})


def _grouped(problem: AttentionProblem) -> bool:
    return problem.heads_q > problem.heads_kv
