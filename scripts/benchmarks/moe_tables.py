"""Points of the tables that vLLM ships for its Triton kernel of experts on an H200.

A table names experts, their inner size and a type. Hidden sizes and experts of a token are those of
the models that the tables were made for. The peer is vLLM's kernel with the table's entry, which
vLLM looks up by itself.
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from benchmarks.moe_layers import Case, Product, Sizes
from benchmarks.moe_peers import Peer
from tuner.problem import GroupedGemmProblem

TABLES: Mapping[str, Mapping[Sizes, tuple[int, ...]]] = {
    "bf16": {
        Sizes(8, 2, 4096, 0): (1792, 3584, 7168, 14336),  # Mixtral-8x7B
        Sizes(8, 2, 6144, 0): (2048, 4096, 8192),  # Mixtral-8x22B
        Sizes(16, 1, 5120, 0): (1024, 2048),  # Llama-4-Scout
        Sizes(64, 8, 3584, 0): (320, 640, 1280, 2560),  # Qwen2-57B-A14B
        Sizes(128, 8, 2048, 0): (192, 384, 768),  # Qwen3-30B-A3B
        Sizes(128, 1, 5120, 0): (512, 1024),  # Llama-4-Maverick
        Sizes(512, 10, 2048, 0): (64, 128, 256, 512),  # Qwen3-Next-80B-A3B
    },
    "e4m3": {  # with factors of blocks of 128 x 128
        Sizes(8, 2, 6144, 0): (2048,),
        Sizes(16, 1, 5120, 0): (4096,),
        Sizes(32, 8, 7168, 0): (2048,),  # DeepSeek-V3, experts over eight ranks
        Sizes(128, 8, 2048, 0): (384, 768),
        Sizes(128, 1, 5120, 0): (512,),
        Sizes(256, 8, 7168, 0): (256, 512),
        Sizes(384, 8, 7168, 0): (128,),  # Kimi-K2
    },
}
"""Inner sizes of the tables by type and by the model's other sizes, vLLM 0.26."""
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Tokens of a table's entries."""
POINTS = 200


def cases(args: Namespace) -> list[Case]:
    """Points drawn from all tables; those of a layer are neighbours."""
    layers = [
        (dtype, Sizes(sizes.experts, sizes.top_k, sizes.hidden, inner))
        for dtype, tables in TABLES.items()
        for sizes, inners in tables.items()
        for inner in inners
    ]
    every = list(product(layers, TOKENS))
    drawn = sorted(random.Random(args.seed).sample(range(len(every)), min(POINTS, len(every))))
    return [_case(*every[at][0], every[at][1]) for at in drawn]


def problems(args: Namespace) -> Iterator[GroupedGemmProblem]:
    """Both products of each point."""
    for case in cases(args):
        for part in ("up", "down"):
            yield Product(**vars(case), part=part).problem


def _case(dtype: str, sizes: Sizes, tokens: int) -> Case:
    name = f"E={sizes.experts},N={sizes.inner}"
    return Case(name, sizes, dtype, tokens * sizes.top_k, "uniform")


def peers_of(dtype: str) -> Mapping[str, Peer]:
    """Kernel of vLLM; none where it is not installed."""
    try:
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    except ImportError:
        return {}

    def run(hidden: Any, experts: Any, weights: Any, gate_up: Any, down: Any, *scales: Any) -> Any:
        config = None
        if dtype == "e4m3":
            config = fp8_w8a8_moe_quant_config(*scales, block_shape=[128, 128])
        by = weights.float(), experts.int()
        return fused_experts(hidden, gate_up, down, *by, quant_config=config)

    return {"vllm": run}
