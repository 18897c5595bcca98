"""Amounts of work of attention over packed sequences."""

from __future__ import annotations

import pytest

from tuner.families.attention_work import TERMS, AttentionSizes, AttentionTiling, work
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem
from tuner.problem.packed import PackedProblem

TILES = (
    AttentionTiling(64, 64),
    AttentionTiling(128, 128, packed=2),
    AttentionTiling(64, 48, resident=2, packed=32, pads_heads=True, fills_rows=True),
)


def amounts(problem: AttentionProblem, tiling: AttentionTiling) -> dict[str, float]:
    return dict(zip(TERMS, work(AttentionSizes.of(problem), tiling, DEFAULT_GPU), strict=True))


def packed(lengths: list[int], more: str = "") -> PackedProblem:
    text = f"B=1,H=8,HKV=2,S=64,D=64,dtype=bf16,varlen=1{more}"
    return PackedProblem.of(AttentionProblem.parse(text), lengths)


@pytest.mark.parametrize("tiling", TILES)
def test_sequences_of_equal_lengths_are_those_of_a_dense_call(tiling: AttentionTiling) -> None:
    dense = AttentionProblem.parse("B=5,H=8,HKV=2,S=1000,D=64,dtype=bf16")
    assert amounts(packed([1000] * 5), tiling) == pytest.approx(amounts(dense, tiling))


@pytest.mark.parametrize("tiling", TILES)
@pytest.mark.parametrize("more", ["", ",causal=1"])
def test_short_sequences_take_tiles_and_few_keys(tiling: AttentionTiling, more: str) -> None:
    long, equal = (amounts(packed(lengths, more), tiling) for lengths in ([4096], [4096] * 9))
    unlike = amounts(packed([4096, *(3 + 2 * i for i in range(8))], more), tiling)
    for term in ("blocks", "mean_steps", "memory"):
        assert long[term] < unlike[term] < 1.3 * long[term] < equal[term]
    assert unlike["longest_steps"] == long["longest_steps"] == -(-4096 // tiling.keys)


def test_a_call_is_known_by_sizes_of_few_kinds() -> None:
    problem = packed([1200, 800, 61]).stepped
    assert (problem.batch, problem.seqlen_q, problem.seqlen_kv) == (3, 1280, 1280)
    assert problem.total_q == problem.total_kv == 2560
    sizes = {packed([size]).stepped.total_q for size in range(1024, 2049)}
    assert sizes == {1024, 1280, 1536, 1792, 2048}
