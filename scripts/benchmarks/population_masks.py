"""`tuner.sparse_attention` beside compiled FlexAttention, and SDPA with a dense mask.

Few and many tiles, grouped heads, every compiled head dimension and soft caps, under masks that are
functions of the places. An answer of FlexAttention in place of an own kernel says why.
"""

from __future__ import annotations

import functools
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, Row
from tuner.problem import AttentionProblem

DOCUMENT, WINDOW, PREFIX = 512, 1024, 512
#: True where query q sees key k; of numbers, and of tensors of them.
MASKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "causal": lambda q, k: k <= q,
    "documents": lambda q, k: q // DOCUMENT == k // DOCUMENT,
    "window": lambda q, k: (k <= q) & (q - k < WINDOW),
    "prefix": lambda q, k: (k <= q) | (k < PREFIX),
}
ALL_MASKS = ("B=4,H=16,S=4096,D=64", "B=4,H=16,S=4096,D=128")
"""Problems under every mask, all bf16."""
TWO_MASKS = (
    "B=1,H=8,S=256,D=64",
    "B=1,H=16,S=1024,D=64",
    "B=2,H=32,HKV=8,S=2048,D=64",
    "B=1,H=16,S=16384,D=64",
    "B=4,H=16,S=1024,D=64,softcap=50",
    "B=1,H=8,S=256,D=128",
    "B=1,H=16,S=1024,D=128",
    "B=2,H=32,HKV=8,S=2048,D=128",
    "B=1,H=32,HKV=8,S=8192,D=128",
    "B=4,H=16,S=1024,D=128,softcap=50",
    "B=1,H=17,S=1024,D=96",
    "B=2,H=16,S=4096,D=96",
    "B=1,H=8,S=512,D=256",
    "B=2,H=16,S=4096,D=256",
    "B=2,H=8,HKV=4,S=4096,D=256,softcap=50",
)
"""Problems under the first two."""
MAX_DENSE = 4096
"""Longest sequence that takes part with a dense mask."""
MAX_DIFFERENCE = 1e-2
"""Largest relative difference from FlexAttention's output."""


@dataclass(frozen=True)
class Masked:
    """One problem under one mask."""

    shape: str
    mask: str

    @functools.cached_property
    def problem(self) -> AttentionProblem:
        return AttentionProblem.parse(f"{self.shape},dtype=bf16,block_mask=1")

    @property
    def group(self) -> str:
        return self.mask

    @property
    def label(self) -> str:
        return f"{self.mask} {self.shape}"


MASKED = (
    *(Masked(shape, mask) for shape in ALL_MASKS for mask in MASKS),
    *(Masked(shape, mask) for shape in TWO_MASKS for mask in list(MASKS)[:2]),
)
SMOKE = Masked("H=2,S=256,D=16", "causal")


def masked_measured(case: Masked, _: Namespace) -> Row:
    """Times of all ways, and how far the answer is from FlexAttention's."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    import tuner

    problem, cap = case.problem, case.problem.softcap
    sees, length = MASKS[case.mask], problem.seqlen_q
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(operand.shape, device="cuda", dtype=torch.bfloat16)
        for operand in problem.matrices[:3]
    )
    source = query.clone()
    block_mask = create_block_mask(
        lambda b, h, q, k: sees(q, k), None, None, length, length, device="cuda"
    )
    is_grouped = problem.heads_q != problem.heads_kv
    options: dict[str, Any] = {"block_mask": block_mask, "enable_gqa": is_grouped}
    if cap:
        options["score_mod"] = lambda score, *_: cap * torch.tanh(score / cap)
    compiled = torch.compile(flex_attention, dynamic=False)
    ways = [
        Contender("flex", lambda _: compiled(query, key, value, **options)),
        Contender(
            "tuner", lambda _: tuner.sparse_attention(query, key, value, block_mask, softcap=cap)
        ),
    ]
    with torch.inference_mode():
        wanted = ways[0].call(0)
        tuner.stats(reset=True)
        difference = harness.distance(ways[1].call(0), wanted)
        stats = tuner.stats(reset=True)
        del wanted
        if length <= MAX_DENSE and not cap:
            at = torch.arange(length, device="cuda")
            mask = sees(at[:, None], at[None])
            ways.append(
                Contender(
                    "pytorch",
                    lambda _: scaled_dot_product_attention(
                        query, key, value, mask, enable_gqa=is_grouped
                    ),
                )
            )
            ways[2].call(0)
        times = harness.time_calls(ways, lambda _: torch.add(source, 0.0, out=query), 1)
    return {
        **{"us": times.us, "failed": times.failed, "errors": {"tuner": difference}},
        "answered": "own" if stats.hits else f"refused: {', '.join(stats.fallbacks)}",
        "wrong": [] if difference <= MAX_DIFFERENCE else ["tuner"],
    }
