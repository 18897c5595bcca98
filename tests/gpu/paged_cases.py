"""Kernels of paged attention that the GPU tests draw problems for, and the sanitizer watches."""

from __future__ import annotations

from fused_configs import maker

from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.problem import AttentionProblem

FAMILY = family("fused_attention")
make = maker(early_exp=50, ping_pong=True)
#: One query of packed heads, two blocks a multiprocessor.
DECODING = {"packed_heads": 4, "blocks_per_sm": 2, "pdl": True}
#: Blocks that take equal parts of all keys.
STREAM_K = {"persistent": True, "stream_k": True, "blocks_per_sm": 2, "pdl": True}
#: Blocks that take one part of a sequence's keys each.
COUNTED = {**STREAM_K, "persistent": False}

#: What is compiled in, sizes of pages that its copies divide, most queries, and a config.
KERNELS: dict[str, tuple[str, tuple[int, ...], int, Config]] = {
    "decoding": (
        "H=32,HKV=8,D=128,dtype=bf16", (16, 48), 1, make(1, 64, **DECODING),
    ),
    "decoding, persistent": (
        "H=32,HKV=8,D=128,dtype=bf16", (16, 48), 1, make(1, 64, persistent=True, **DECODING),
    ),
    "decoding, wide": (
        "H=32,HKV=8,D=128,dtype=bf16", (64, 192), 1, make(1, 128, packed_heads=4, pdl=True),
    ),
    "few": (
        "H=8,HKV=2,D=128,causal=1,dtype=bf16", (16, 80), 16, make(1, 64, kv_stages=3, **DECODING),
    ),
    "chunk": (
        "H=8,HKV=2,D=128,causal=1,dtype=bf16", (16, 48), 600,
        make(2, 128, packed_heads=4, persistent=True, pdl=True),
    ),
    "chunk, whole rows": (
        "H=8,HKV=2,D=128,causal=1,dtype=bf16", (16, 48), 600,
        make(2, 128, packed_heads=4, persistent=True, pdl=True, whole_rows=True, copy_warps=3),
    ),
    "chunk, longest first": (
        "H=8,HKV=2,D=128,causal=1,dtype=bf16", (16, 48), 600,
        make(2, 128, packed_heads=4, persistent=True, pdl=True, longest_first=True),
    ),
    "chunk, one tile a block": (
        "H=8,HKV=2,D=128,causal=1,dtype=bf16", (64, 320), 600,
        make(2, 128, packed_heads=4, pdl=True),
    ),
    "chunk, wide pages": (
        "H=6,D=64,causal=1", (128, 256), 600, make(2, 128, 2, q_in_registers=False),
    ),
    "three groups": (
        "H=8,HKV=4,D=64,causal=1", (32, 160), 400,
        make(3, 96, packed_heads=2, persistent=True),
    ),
    "no mask": ("H=4,HKV=2,D=96", (16, 112), 300, make(2, 80, packed_heads=2, persistent=True)),
    "sinks and window": (
        "H=16,HKV=2,D=64,causal=1,window=40,sinks=1,dtype=bf16", (16, 48), 300,
        make(1, 64, packed_heads=8, blocks_per_sm=2),
    ),
    "sinks, soft cap": (
        "H=8,HKV=1,D=64,causal=1,softcap=20,sinks=1", (64, 128), 5, make(1, 64, packed_heads=8),
    ),
    "decoding, e4m3": (
        "H=32,HKV=8,D=128,dtype=e4m3", (16, 48), 1, make(1, 64, kv_stages=3, **DECODING),
    ),
    "few, e4m3": (
        "H=16,HKV=4,D=64,causal=1,dtype=e4m3", (16, 48), 16, make(1, 128, kv_stages=3, **DECODING),
    ),
    "chunk, e4m3": (
        "H=8,HKV=2,D=128,causal=1,dtype=e4m3", (16, 48), 600,
        make(2, 128, packed_heads=4, persistent=True, pdl=True),
    ),
    "no mask, e4m3": (
        "H=4,HKV=2,D=96,dtype=e4m3", (16, 48), 300, make(2, 96, packed_heads=2, persistent=True),
    ),
    "stream-K": (
        "H=32,HKV=8,D=128,dtype=bf16", (16, 48), 1, make(1, 64, packed_heads=4, **STREAM_K),
    ),
    "stream-K, few, padded": (
        "H=10,HKV=2,D=128,causal=1", (16, 48), 16,
        make(1, 64, packed_heads=8, pads_heads=True, **STREAM_K),
    ),
    "stream-K, window, sinks": (
        "H=16,HKV=2,D=64,causal=1,window=40,sinks=1,softcap=20,dtype=bf16", (16, 48), 24,
        make(1, 64, packed_heads=8, **STREAM_K),
    ),
    "stream-K, e4m3": (
        "H=16,HKV=4,D=64,causal=1,dtype=e4m3", (16, 48), 16,
        make(1, 128, kv_stages=3, packed_heads=4, **STREAM_K),
    ),
    "stream-K, whole rows": (
        "H=8,HKV=2,D=128,causal=1,dtype=bf16", (16, 48), 5,
        make(1, 64, packed_heads=4, whole_rows=True, copy_warps=3, **STREAM_K),
    ),
    "stream-K, two groups, padded": (
        "H=20,HKV=2,D=128,causal=1,dtype=bf16", (16, 48), 8,
        make(2, 128, packed_heads=16, pads_heads=True, whole_rows=True, copy_warps=3,
             persistent=True, stream_k=True, pdl=True),
    ),
    "counted": (
        "H=32,HKV=8,D=128,dtype=bf16", (16, 48), 1, make(1, 64, packed_heads=4, **COUNTED),
    ),
    "counted, few, padded": (
        "H=10,HKV=2,D=128,causal=1", (16, 48), 16,
        make(1, 64, packed_heads=8, pads_heads=True, copy_warps=3, **COUNTED),
    ),
    "counted, window, sinks": (
        "H=16,HKV=2,D=64,causal=1,window=40,sinks=1,softcap=20,dtype=bf16", (16, 48), 24,
        make(1, 64, packed_heads=8, **COUNTED),
    ),
    "counted, e4m3": (
        "H=16,HKV=4,D=64,causal=1,dtype=e4m3", (16, 48), 16,
        make(1, 128, kv_stages=3, packed_heads=4, **COUNTED),
    ),
    "counted, two groups, padded": (
        "H=20,HKV=2,D=128,causal=1,dtype=bf16", (16, 48), 8,
        make(2, 128, packed_heads=16, pads_heads=True, stream_k=True, pdl=True),
    ),
    "32 padded heads": (
        "H=40,HKV=2,D=128,dtype=bf16", (16, 48), 1,
        make(1, 64, packed_heads=32, pads_heads=True, blocks_per_sm=2, pdl=True),
    ),
    "few, two groups, padded": (
        "H=24,HKV=2,D=80,causal=1,dtype=bf16", (16, 48), 8,
        make(2, 64, packed_heads=16, pads_heads=True, pdl=True),
    ),
    "few, two groups, 32 padded heads": (
        "H=17,HKV=1,D=256,causal=1", (16, 48), 8,
        make(2, 64, packed_heads=32, pads_heads=True, pdl=True),
    ),
    "few, e4m3, padded": (
        "H=10,HKV=2,D=128,causal=1,dtype=e4m3", (16, 48), 8,
        make(1, 64, kv_stages=3, packed_heads=8, pads_heads=True, blocks_per_sm=2, pdl=True),
    ),
    "wide heads": (
        "H=4,HKV=2,D=256,causal=1,dtype=bf16", (16, 48), 200, make(2, 80, packed_heads=2),
    ),
}  # fmt: skip


def posed(name: str, size: int, queries: int, keys: int, batch: int) -> AttentionProblem:
    text = f"B={batch},SQ={queries},SKV={keys},{KERNELS[name][0]},page_size={size}"
    return AttentionProblem.parse(text)


def spec(name: str) -> KernelSpec:
    _, sizes, queries, config = KERNELS[name]
    return FAMILY.kernels(posed(name, sizes[0], queries, 1000, 1), config)["attention"]
