"""Kernels of fixed parts: each row's sum is divided at the same keys, whatever the call.

One block adds all parts of a tile, or each part has a block and a second kernel adds them in the
same order. The bits are equal, so a call takes what is faster. At D = 128 O does not fit twice into
the registers: the sum so far lies in shared memory, as in prompts at D = 64. The kernels serve the
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
TILE_KEYS = 128
"""Keys of a tile."""
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
    **{"tile_n": TILE_KEYS, "split_keys": KEYS, "splits": 1, "score_buffers": 1},
    **{"q_in_registers": False, "pdl": True},
}
_WIDE: Mapping[str, Value] = {"carries_parts": True, "rescale": "lazy", "blocks_per_sm": 1}
DECODING: Mapping[int, Mapping[str, Value]] = {
    64: {"blocks_per_sm": 2},
    128: {**_WIDE, "kv_stages": 2},
}
"""Parameters of kernels of decoding, by the head dimensions that have such kernels."""
PROMPTS: Mapping[int, Mapping[str, Value]] = {
    64: {"carries_parts": True, "warp_groups": 3, "blocks_per_sm": 1},
    128: {**_WIDE, "warp_groups": 2},
}
"""Those of prompts."""


def is_served(problem: AttentionProblem) -> bool:
    """True for plain attention over dense tensors or pages, in fp16 or bf16."""
    is_packed = problem.is_varlen and not problem.is_paged
    is_plain = not (problem.modifiers or problem.is_windowed or problem.value_dim)
    is_plain &= not (problem.has_sinks or problem.softcap or is_packed)
    return is_plain and problem.dtype != E4M3 and problem.head_dim in DECODING


def configs(problem: AttentionProblem, gpu: Gpu) -> Iterator[Config]:
    """Kernels for a problem, the one that is expected to be faster first."""
    if not is_served(problem):
        return
    group = problem.heads_q // problem.heads_kv
    prompt = _prompt(problem, _packed_rows(problem))
    is_padded = 1 < group <= MOST_PADDED and group != 4
    packed = MOST_PADDED if is_padded else 4 if group % 4 == 0 else 1
    decoding = _decoding(problem, packed, is_padded)
    tiles = _tiles(problem, decoding)
    if 2 * tiles <= gpu.sm_count * int(decoding["blocks_per_sm"]) * 0.9:
        if problem.seqlen_kv > KEYS:  # whole tiles would leave most of the GPU idle
            decoding = Config(NAME, {**decoding.params, "combine": "kernel"})
    elif tiles > gpu.sm_count and problem.head_dim > 64:
        decoding = _decoding(problem, packed, is_padded, persistent=True)
    is_prompt = problem.seqlen_q * packed >= MOST_QUERIES * 2
    yield from (prompt, decoding) if is_prompt else (decoding, prompt)


def _tiles(problem: AttentionProblem, config: Config) -> int:
    """Tiles of rows of a kernel."""
    packed = int(config.get("packed_heads", 1))
    heads = problem.heads_kv if "pads_heads" in config.params else problem.heads_q // packed
    queries = 64 * int(config["warp_groups"]) // packed
    return problem.batch * heads * -(-problem.seqlen_q // queries)


def _packed_rows(problem: AttentionProblem) -> int:
    """Query heads to a KV head whose prompts share a tile: of D = 64 over pages it is faster."""
    is_faster = problem.is_paged and problem.head_dim == 64
    return 4 if is_faster and problem.heads_q // problem.heads_kv % 4 == 0 else 1


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
    excluded = "split_keys", "carries_parts"
    params = {name: value for name, value in config.params.items() if name not in excluded}
    if "combine" in params:
        params["splits"] = min(MAX_SPLITS, -(-problem.seqlen_kv // KEYS))
    return Config(config.family, params)


def built(dtype: DType) -> Iterator[tuple[Config, AttentionProblem]]:
    """Every kernel of this module for a type, and a small problem of its calls."""
    for head_dim, is_paged in product(DECODING, (False, True)):
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
            for persistent in (False, True)[: 1 + (head_dim > 64)]:
                yield _decoding(heads, packed, pads, persistent=persistent), heads
        for is_causal in (True,) if is_paged else (False, True):
            prompt = replace(plain, is_causal=is_causal)
            yield _prompt(prompt, 1), prompt
            grouped = replace(prompt, heads_q=16)
            if (packed := _packed_rows(grouped)) > 1:
                yield _prompt(grouped, packed), grouped


def _decoding(
    problem: AttentionProblem, packed: int, pads: bool, *, persistent: bool = False
) -> Config:
    packing: dict[str, Value] = {"packed_heads": packed} if packed > 1 or _grouped(problem) else {}
    return _config(
        problem,
        {
            **{"warp_groups": 1, "kv_stages": 3 if problem.is_paged else 2, "early_exp": 0},
            **{"persistent": persistent, **packing, **({"pads_heads": True} if pads else {})},
            **DECODING[problem.head_dim],
        },
    )


def _prompt(problem: AttentionProblem, packed: int) -> Config:
    params: dict[str, Value] = {"kv_stages": 2, "persistent": True, "ping_pong": True}
    params["early_exp"] = 50 if problem.is_paged and problem.head_dim > 64 else 0
    if _grouped(problem):
        params["packed_heads"] = packed
    if problem.is_paged:
        params |= {"longest_first": True, **({"copy_warps": 3} if problem.head_dim > 64 else {})}
    else:
        params["stages_output"] = True
        if problem.is_causal:
            params["skips_masked"] = "halves" if problem.head_dim > 64 else "blocks"
    return _config(problem, {**params, **PROMPTS[problem.head_dim]})


def _config(problem: AttentionProblem, params: Mapping[str, Value]) -> Config:
    paging: dict[str, Value] = {}
    if problem.is_paged:
        paging = {"box_rows": BOX}
        if problem.head_dim in WHOLE_ROWS:
            paging["whole_rows"] = True
    return Config(NAME, {**_COMMON, **params, **paging})


def _grouped(problem: AttentionProblem) -> bool:
    return problem.heads_q > problem.heads_kv
