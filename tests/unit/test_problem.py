"""Problems: what is parsed, what is refused and how, and what they count."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import ConfigError
from tuner.problem import (
    ACTIVATIONS,
    E4M3,
    EPILOGUES,
    PAIRINGS,
    PROBLEMS,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Pairing,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
    problem_from_json,
)

EXAMPLES: list[Problem] = [
    AttentionProblem.parse("S=1024,D=64"),
    AttentionProblem.parse("B=2,H=8,HKV=2,SQ=384,SKV=1536,D=128,causal=1,dtype=bf16,layout=bshd"),
    AttentionProblem.parse("S=256,D=64,layout=bshd_bhsd"),
    AttentionProblem.parse("H=8,HKV=2,S=256,D=80,layout=bshd,dtype=e4m3"),
    AttentionProblem.parse("S=4096,D=128,causal=1,window=1024"),
    AttentionProblem.parse("S=512,D=64,window=64,softcap=30"),
    AttentionProblem.parse("S=512,D=64,left=7,right=100,softcap=12.5,layout=bshd"),
    AttentionProblem.parse("SQ=100,SKV=512,D=64,right=7"),
    AttentionProblem.parse("B=5,H=8,HKV=2,SQ=100,SKV=512,D=64,varlen=1,causal=1"),
    AttentionProblem.parse("B=2,H=8,HKV=2,SQ=1,SKV=512,D=64,page_size=16"),
    AttentionProblem.parse(
        "B=5,SQ=9,SKV=512,D=64,varlen=1,causal=1,window=100,softcap=30,page_size=48,sinks=1"
    ),
    AttentionProblem.parse("S=512,D=64,page_size=64,layout=bshd"),
    AttentionProblem.parse("S=512,D=64,bias=1"),
    AttentionProblem.parse("B=2,S=512,D=64,mask=bk"),
    AttentionProblem.parse("B=2,H=8,HKV=2,SQ=100,SKV=512,D=64,causal=1,softcap=30,bias=bh"),
    GemmProblem.parse("M=4096,N=512,K=64"),
    GemmProblem.parse("M=8,N=16,K=24,B=3,dtype=bf16,dtype_d=fp32,layout_a=col,layout_b=row"),
    GemmProblem.parse("M=8,N=16,K=24,epilogue=bias_gelu_tanh"),
    GemmProblem.parse("M=8,N=16,K=24,dtype=bf16,dtype_d=fp32,scales=row"),
    GemmProblem.parse("M=8,N=16,K=32,dtype=e4m3"),
    GemmProblem.parse("M=8,N=16,K=32,dtype=e4m3,dtype_d=fp16,scales=row,fast_accum=0"),
    SwigluProblem.parse("M=8,N=64,K=24"),
    GroupedGemmProblem.parse("G=8,M=100,N=16,K=24"),
    GroupedGemmProblem.parse("G=3,M=8,N=16,K=24,sizes=zipf,dtype=bf16"),
    SwigluProblem.parse("M=8,N=64,K=24,dtype=bf16,weights=concatenated"),
    SoftmaxProblem.parse("M=64,N=128,B=2,SQ=32,causal=true"),
]


@pytest.mark.parametrize("problem", EXAMPLES, ids=lambda p: p.label())
def test_text_and_json_lead_back(problem: Problem) -> None:
    assert type(problem).parse(problem.label()) == problem
    assert problem_from_json(problem.to_json()) == problem
    assert problem.key == problem_from_json(problem.to_json()).key


def test_defaults() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    assert (problem.batch, problem.heads_q, problem.heads_kv) == (1, 16, 16)
    assert (problem.seqlen_q, problem.seqlen_kv, problem.is_causal) == (1024, 1024, False)
    assert (problem.dtype, problem.layout) == ("float16", "bhsd")
    gemm = GemmProblem.parse("M=1,N=2,K=3")
    assert (gemm.dtype_d, gemm.layout_a, gemm.layout_b) == ("float16", "row", "col")


@pytest.mark.parametrize(
    ("op", "text", "named", "allowed"),
    [
        ("attention", "S=0,D=64", "S=0", "1 to"),
        ("attention", "S=-1,D=64", "S=-1", "1 to"),
        ("attention", "S=1024,D=63", "D=63", "multiples of 8"),
        ("attention", "S=1024,D=520", "D=520", "512"),
        ("attention", "S=1024,D=64,Q=1", "'Q'", "HKV"),
        ("attention", "S=1024,S=512,D=64", "'S'", "twice"),
        ("attention", "S=1024,SQ=512,D=64", "S and SQ", "one of them"),
        ("attention", "H=10,HKV=3,S=64,D=64", "HKV=3", "1, 2, 5, 10"),
        ("attention", "HKV=0,S=64,D=64", "HKV=0", "1 to"),
        ("attention", "S=many,D=64", "S=many", "whole number"),
        ("attention", "S=1_024,D=64", "S=1_024", "whole number"),
        ("attention", "S=\u0661\u0660,D=64", "S=", "whole number"),
        ("attention", "S=1.5,D=64", "S=1.5", "whole number"),
        ("attention", "S=64,D=64,causal=maybe", "causal=maybe", "true"),
        ("attention", "S=64,D=64,dtype=fp8", "dtype=fp8", "fp16, bf16, e4m3"),
        ("attention", "S=64,D=72,dtype=e4m3", "D=72", "multiples of 16"),
        ("attention", "S=64,D=64,window=8,dtype=e4m3", "no sliding window", "bf16"),
        ("attention", "S=64,D=64,softcap=8,dtype=e4m3", "no soft cap", "bf16"),
        ("attention", "S=64,D=64,varlen=1,dtype=e4m3", "no variable lengths", "bf16"),
        ("attention", "S=64,D=64,varlen=1,window=8", "no sliding window", "neither"),
        ("attention", "S=64,D=64,varlen=1,softcap=8", "no soft cap", "neither"),
        ("attention", "S=64,D=64,varlen=1,bias=1", "no additive bias", "neither"),
        ("attention", "S=64,D=64,bias=h,dtype=e4m3", "no additive bias", "bf16"),
        ("attention", "S=64,D=64,bias=hb", "bias=hb", "0, 1, b, h, bh"),
        ("attention", "S=64,D=64,alibi=1", "'alibi' of attention was removed", "bias=h"),
        ("attention", "S=64,D=64,varlen=1,layout=bshd_bhsd", "layout=bshd_bhsd", "bshd"),
        ("attention", "S=64,D=64,page_size=24", "page_size=24", "multiples of 16"),
        ("attention", "S=64,D=64,page_size=-16", "page_size=-16", "0 to"),
        ("attention", "S=64,D=64,page_size=16,softcap=9,dtype=e4m3", "no soft cap", "bf16"),
        ("attention", "S=64,D=64,page_size=16,bias=1", "no additive bias", "neither"),
        ("attention", "S=64,D=64,page_size=16,mask=1", "no boolean mask", "neither"),
        ("attention", "S=64,D=64,page_size=16,layout=bshd_bhsd", "layout=bshd_bhsd", "bshd"),
        ("attention", "S=64,D=64,sinks=1", "sinks=1", "with page_size"),
        ("gemm", "M=16,N=16,K=16,dtype=fp32", "dtype=fp32", "e4m3"),
        ("gemm", "M=16,N=16,K=16,dtype=e4m3,dtype_d=fp32", "dtype_d=fp32", "bf16"),
        ("gemm", "M=16,N=16,K=16,dtype=e4m3,layout_a=col", "layout_a=col", "row"),
        ("gemm", "M=16,N=16,K=16,dtype=e4m3,layout_b=row", "layout_b=row", "col"),
        ("gemm", "M=16,N=16,K=16,scales=column", "scales=column", "tensor, row, block"),
        ("gemm", "M=16,N=16,K=16,scales=row,epilogue=bias", "no epilogue", "neither"),
        ("gemm", "M=16,N=16,K=16,dtype=e4m3,B=2", "no batch", "neither"),
        ("gemm", "M=16,N=16,K=16,fast_accum=0", "fast_accum=0", "allowed: 1"),
        ("attention", "S=64,D=64,layout=bsd", "layout=bsd", "bshd"),
        ("attention", "S=64,D=64,window=-2", "window=-2", "-1 to"),
        ("attention", "S=64,D=64,left=-2", "left=-2", "-1 to"),
        ("attention", "S=64,D=64,left=4,right=-2", "right=-2", "-1 to"),
        ("attention", "S=64,D=64,window=8,left=4", "window and left", "one of them"),
        ("attention", "S=64,D=64,softcap=-1", "softcap=-1", "or more"),
        ("attention", "S=64,D=64,softcap=nan", "softcap=nan", "or more"),
        ("attention", "S=64,D=64,softcap=inf", "softcap=inf", "or more"),
        ("attention", "S=64,D=64,softcap=large", "softcap=large", "as in softcap=50"),
        ("attention", "S,D=64", "'S'", "KEY=VALUE"),
        ("attention", "D=64", "needs S", "SKV"),
        ("attention", "SQ=1,D=64", "needs SKV", "SKV"),
        ("attention", "", "needs S and D", "SKV"),
        ("gemm", "M=1,N=1", "needs K", "layout_a"),
        ("gemm", "M=1,N=1,K=1,dtype_d=bf16", "dtype_d=bf16", "fp32"),
        ("gemm", "M=1,N=1,K=1,epilogue=bias_elu", "epilogue=bias_elu", "bias_gelu"),
        ("gemm", "M=1,N=1,K=1,epilogue=relu_bias", "epilogue=relu_bias", "bias_relu"),
        ("gemm", "M=1,N=1,K=1,epilogue=", "epilogue=", "KEY=VALUE"),
        ("attention", "S=64,D=64,cache=int8", "cache=int8", "(allowed: e4m3, e4m3_blocks)"),
        ("swiglu", "M=1,N=16,K=8", "N=16", "multiples of 32"),
        ("swiglu", "M=1,N=32,K=8,weights=mixed", "weights=mixed", "interleaved"),
        ("grouped_gemm", "M=1,N=16,K=8", "needs G", "allowed keys: G, M"),
        ("grouped_gemm", "G=2,M=1,N=8,K=8,sizes=odd", "sizes=odd", "uniform, zipf, sparse"),
        ("grouped_gemm", f"G={2**20},M=1,N=4096,K=8", "columns together", "N to 2047"),
        ("softmax", "M=10,N=4,SQ=3", "SQ=3", "divide"),
    ],
)
def test_bad_text_is_one_line_that_names_it(op: str, text: str, named: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PROBLEMS[op].parse(text)
    message = str(caught.value)
    assert named in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"op": "conv"},
        {"op": "gemm", "m": 1, "n": 1},
        {"op": "gemm", "m": 1, "n": 1, "k": "1"},
        {"op": "gemm", "m": True, "n": 1, "k": 1},
        {"op": "gemm", "m": 1, "n": 1, "k": 1, "extra": 1},
    ],
)
def test_bad_json_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        problem_from_json(data)


def test_what_is_off_leaves_no_trace_in_a_key() -> None:
    """Stored keys from before there were windows, soft caps and biases stay what they were."""
    plain = AttentionProblem.parse("S=1024,D=64,window=-1,softcap=0,bias=0")
    assert plain == AttentionProblem.parse("S=1024,D=64")
    assert plain.key == (
        '{"batch":1,"dtype":"float16","head_dim":64,"heads_kv":16,"heads_q":16,"is_causal":false,'
        '"layout":"bhsd","op":"attention","seqlen_kv":1024,"seqlen_q":1024}'
    )
    both = AttentionProblem.parse("S=1024,D=64,causal=1,window=100,softcap=30").to_json()
    assert (both["window_left"], both["softcap"]) == (100, 30.0)
    assert not {"window_right", "bias"} & {*both}
    biased = AttentionProblem.parse("B=2,S=1024,D=64,bias=h").to_json()
    assert biased["bias"] == "h"
    with pytest.raises(ConfigError, match=r"field 'is_alibi' of attention was removed: .*bias=h"):
        problem_from_json({**biased, "is_alibi": True})


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("S=64,D=64,causal=1,window=8", "S=64,D=64,causal=1,left=8"),
        ("S=64,D=64,causal=1,window=8", "S=64,D=64,left=8,right=0"),
        ("S=64,D=64,right=0", "S=64,D=64,causal=1"),
        ("S=64,D=64,window=63", "S=64,D=64"),
        ("SQ=64,SKV=16,D=64,left=62,right=15", "SQ=64,SKV=16,D=64,left=62"),
        ("SQ=1,SKV=16,D=64,window=15", "SQ=1,SKV=16,D=64"),
        ("S=1,D=64,window=0", "S=1,D=64,causal=1"),
    ],
)
def test_equal_masks_are_equal_problems(text: str, same: str) -> None:
    assert AttentionProblem.parse(text) == AttentionProblem.parse(same)


@pytest.mark.parametrize(
    ("text", "extras"),
    [
        ("S=64,D=64,causal=1", ""),
        ("S=64,D=64,causal=1,window=64", ""),
        ("S=64,D=64,right=3", "sliding window"),
        ("S=64,D=64,softcap=1", "soft cap"),
        ("S=64,D=64,window=0,softcap=1", "sliding window or soft cap"),
        ("S=64,D=64,varlen=1", "variable lengths"),
        ("S=64,D=64,page_size=16,sinks=1", "paged cache or sinks"),
        ("S=64,D=64,bias=1", "additive bias"),
        ("S=64,D=64,right=3,bias=h", "sliding window or additive bias"),
    ],
)
def test_what_a_plain_kernel_lacks(text: str, extras: str) -> None:
    assert AttentionProblem.parse(text).extras == extras


@pytest.mark.parametrize(
    ("text", "shape", "steps"),
    [
        ("bias=1", (1, 1, 5, 7), (0, 0, 7)),
        ("bias=b", (2, 1, 5, 7), (35, 0, 7)),
        ("bias=h", (1, 3, 5, 7), (0, 35, 7)),
        ("bias=bh", (2, 3, 5, 7), (105, 35, 7)),
        ("bias=bk", (2, 1, 1, 7), (7, 0, 0)),
        ("bias=hk", (1, 3, 1, 7), (0, 7, 0)),
    ],
)
def test_a_bias_lies_densely_and_is_read_by_its_strides(
    text: str, shape: tuple[int, ...], steps: tuple[int, ...]
) -> None:
    problem = AttentionProblem.parse(f"B=2,H=3,SQ=5,SKV=7,D=64,dtype=bf16,{text}")
    bias, _ = problem.operands[3:]
    assert (bias.name, bias.shape, bias.dtype) == ("bias", shape, "bfloat16")
    matrix = shape[2] * 7
    assert bias.strides == (shape[1] * matrix, matrix, 7, 1)
    assert problem.mask_strides == steps
    plain = AttentionProblem.parse("B=2,H=3,SQ=5,SKV=7,D=64")
    assert plain.mask_strides == (0, 0, 0)
    assert problem.bytes == plain.bytes + bias.bytes
    assert problem.flops == plain.flops


@pytest.mark.parametrize(
    ("text", "same"),
    [("H=4,bias=bh", "h"), ("H=4,bias=b", "1"), ("B=2,H=1,bias=bh", "b"), ("H=1,bias=bh", "1"),
     ("H=4,bias=bhk", "hk"), ("B=2,H=4,SQ=1,bias=bk", "b"), ("SQ=1,bias=k", "1")],
)  # fmt: skip
def test_a_bias_has_no_axis_of_one_element(text: str, same: str) -> None:
    size = "SKV=64" if "SQ" in text else "S=64"
    assert AttentionProblem.parse(f"{size},D=64,{text}").bias == same
    assert AttentionProblem.parse(f"{size},D=64,{text.replace('bias', 'mask')}").mask == same


def test_a_boolean_mask_is_an_operand_of_bytes() -> None:
    problem = AttentionProblem.parse("B=2,H=3,SQ=5,SKV=7,D=64,mask=bk")
    mask = problem.operands[3]
    assert (mask.name, mask.shape, mask.dtype, mask.bytes) == ("mask", (2, 1, 1, 7), "bool", 14)
    assert problem.mask_strides == (7, 0, 0)
    assert problem.extras == "boolean mask"
    assert problem.bytes == AttentionProblem.parse("B=2,H=3,SQ=5,SKV=7,D=64").bytes + 14
    assert "mask" not in AttentionProblem.parse("S=64,D=64,bias=1").to_json()


@given(
    queries=st.integers(1, 12),
    keys=st.integers(1, 12),
    left=st.integers(-1, 14),
    right=st.integers(-1, 14),
    is_causal=st.booleans(),
)
def test_a_window_counts_the_pairs_that_it_lets_through(
    queries: int, keys: int, left: int, right: int, is_causal: bool
) -> None:
    problem = AttentionProblem(
        queries, keys, 8, 1, 2, is_causal=is_causal, window_left=left, window_right=right
    )
    seen = {
        (i, j)
        for i in range(queries)
        for j in range(keys)
        if (left < 0 or j >= i - left)
        and (right < 0 or j <= i + right)
        and not (is_causal and j > i)
    }
    assert problem.pairs == len(seen)
    if problem.is_windowed:
        assert problem.flops == 4 * 2 * 8 * len(seen)
    for i in range(queries):
        assert set(problem.keys_of(i, i)) == {j for row, j in seen if row == i}
    assert {j for _, j in seen} <= set(problem.keys_of(0, queries + 5))


def test_counts() -> None:
    full = AttentionProblem.parse("B=2,H=4,S=128,D=64")
    assert full.flops == 4 * 2 * 4 * 128 * 128 * 64
    assert AttentionProblem.parse("B=2,H=4,S=128,D=64,causal=1").flops == full.flops // 2
    assert full.bytes == 4 * (2 * 4 * 128 * 64) * 2
    gemm = GemmProblem.parse("M=2,N=3,K=5,B=7,dtype_d=fp32")
    assert gemm.flops == 2 * 7 * 2 * 3 * 5
    assert gemm.bytes == 7 * (2 * (2 * 5 + 5 * 3) + 4 * 2 * 3)


@given(
    batch=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 6]),
    seqlen=st.integers(1, 9),
    layout=st.sampled_from(["bhsd", "bshd", "bshd_bhsd"]),
)
def test_operands_are_dense(batch: int, heads: int, seqlen: int, layout: str) -> None:
    problem = AttentionProblem.parse(f"B={batch},H={heads},S={seqlen},D=8,layout={layout}")
    for operand in problem.operands:
        last = sum((n - 1) * s for n, s in zip(operand.shape, operand.strides, strict=True))
        assert last == math.prod(operand.shape) - 1 == operand.elements - 1
    assert [o.is_output for o in problem.operands] == [False, False, False, True]


def test_a_layout_of_the_queries_and_one_of_the_keys() -> None:
    mixed, bshd, bhsd = (
        AttentionProblem.parse(f"B=2,H=4,S=16,D=8,layout={layout}").operands
        for layout in ("bshd_bhsd", "bshd", "bhsd")
    )
    assert mixed == (bshd[0], bhsd[1], bhsd[2], bshd[3])


def test_gemm_majors() -> None:
    a, b, d = GemmProblem.parse("M=2,N=3,K=5,layout_a=col,layout_b=row").operands
    assert (a.strides, b.strides, d.strides) == ((10, 1, 2), (15, 3, 1), (6, 3, 1))


def test_quantised_tensors_come_with_factors_and_give_bf16() -> None:
    problem = AttentionProblem.parse("B=2,H=8,HKV=4,SQ=16,SKV=32,D=64,dtype=e4m3")
    *inputs, out = problem.operands
    assert [operand.name for operand in inputs] == [
        *("query", "key", "value", "descale_q", "descale_k", "descale_v")
    ]
    assert {operand.dtype for operand in inputs[:3]} == {"float8_e4m3fn"}
    assert [operand.shape for operand in inputs[3:]] == [(2, 8), (2, 4), (2, 4)]
    assert {operand.dtype for operand in inputs[3:]} == {"float32"}
    assert (out.dtype, out.is_output, problem.output) == ("bfloat16", True, problem.matrices[3])
    half = AttentionProblem.parse("B=2,H=8,HKV=4,SQ=16,SKV=32,D=64")
    assert half.operands == half.matrices
    assert problem.bytes == sum(o.bytes for o in half.operands[:3]) // 2 + 4 * 32 + out.bytes
    assert (problem.flops, problem.tensor_rate) == (half.flops, 2 * half.tensor_rate)


@given(batch=st.integers(1, 40), queries=st.integers(1, 500), keys=st.integers(1, 500))
def test_lengths_are_spread_from_a_quarter_to_the_whole(
    batch: int, queries: int, keys: int
) -> None:
    problem = AttentionProblem(queries, keys, 64, batch, 2, is_varlen=True)
    for longest, lengths, total in (
        (queries, problem.lengths_q, problem.total_q),
        (keys, problem.lengths_kv, problem.total_kv),
    ):
        assert (len(lengths), max(lengths), sum(lengths)) == (batch, longest, total)
        assert min(lengths) >= longest / 4
    assert problem.lengths_q == AttentionProblem(queries, 7, 64, batch, is_varlen=True).lengths_q
    if queries == keys:
        assert problem.lengths_q == problem.lengths_kv


def test_packed_sequences_are_a_batch_of_one_with_their_starts() -> None:
    problem = AttentionProblem.parse("B=3,H=4,HKV=2,SQ=8,SKV=16,D=64,varlen=1,causal=1")
    assert sorted(problem.lengths_q) == [2, 5, 8]
    assert sorted(problem.lengths_kv) == [4, 10, 16]
    query, key, value, starts_q, starts_kv, out = problem.operands
    assert (query.shape, query.strides) == ((1, 4, 15, 64), (15 * 256, 64, 256, 1))
    assert (key.shape, key.strides) == ((1, 2, 30, 64), (30 * 128, 64, 128, 1))
    assert (value.shape, out.shape) == (key.shape, query.shape)
    assert [o.name for o in (starts_q, starts_kv)] == ["cu_seqlens_q", "cu_seqlens_kv"]
    assert {(o.shape, o.dtype, o.bytes) for o in (starts_q, starts_kv)} == {((4,), "int32", 16)}
    assert problem.matrices == (query, key, value, out)
    alone = problem.sequences
    assert [(one.seqlen_q, one.seqlen_kv) for one in alone] == list(
        zip(problem.lengths_q, problem.lengths_kv, strict=True)
    )
    assert {(one.batch, one.is_varlen, one.is_causal) for one in alone} == {(1, False, True)}
    assert problem.flops == sum(one.flops for one in alone)
    assert problem.bytes == sum(one.bytes for one in alone) + 2 * 16
    assert problem.evened == AttentionProblem.parse(
        "B=3,H=4,HKV=2,SQ=5,SKV=10,D=64,causal=1,layout=bshd"
    )
    assert problem.evened.evened == problem.evened


def test_a_paged_cache_has_pages_for_every_sequence() -> None:
    text = "B=3,H=4,HKV=2,SQ=8,SKV=40,D=64,varlen=1,causal=1,page_size=16"
    problem = AttentionProblem.parse(text)
    assert sorted(problem.lengths_kv) == [10, 25, 40] and sorted(problem.pages) == [1, 2, 3]
    query, key, value, table, used, starts, out = problem.operands
    assert (query.shape, query.strides) == ((1, 4, 15, 64), (15 * 256, 64, 256, 1))
    assert (key.shape, key.strides) == ((6, 2, 16, 64), (2048, 1024, 64, 1))
    assert (value.shape, out.shape) == (key.shape, query.shape)
    assert [o.name for o in (table, used, starts)] == ["page_table", "seqused_k", "cu_seqlens_q"]
    assert [o.shape for o in (table, used, starts)] == [(3, 3), (3,), (4,)]
    assert {o.dtype for o in (table, used, starts)} == {"int32"}
    by_slot = AttentionProblem.parse(text + ",layout=bshd").matrices[1]
    assert (by_slot.shape, by_slot.strides) == (key.shape, (2048, 64, 128, 1))
    sinks = AttentionProblem.parse(text + ",sinks=1").operands[-2]
    assert (sinks.name, sinks.shape, sinks.dtype) == ("sinks", (4,), "float32")


@given(
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    left=st.integers(-1, 40),
    right=st.integers(-1, 40),
    is_causal=st.booleans(),
)
def test_masks_of_pages_are_bottom_right(
    queries: int, keys: int, left: int, right: int, is_causal: bool
) -> None:
    problem = AttentionProblem(
        queries, keys, 64, 2, 4, page_size=16, window_left=left, window_right=right,
        is_causal=is_causal,
    )  # fmt: skip
    right = 0 if is_causal else right

    def seen(query: int) -> set[int]:
        at = query + keys - queries
        first, last = (at - left if left >= 0 else 0), (at + right if right >= 0 else keys - 1)
        return {key for key in range(keys) if first <= key <= last}

    assert all(set(problem.keys_of(i, i)) == seen(i) for i in range(queries))
    assert problem.pairs == sum(len(seen(i)) for i in range(queries))
    if problem.is_causal or problem.is_windowed:
        assert problem.flops == 4 * 2 * 4 * 64 * problem.pairs


def test_packed_sequences_have_one_layout() -> None:
    packed = AttentionProblem.parse("S=64,D=64,varlen=1")
    assert packed == AttentionProblem.parse("S=64,D=64,varlen=1,layout=bshd")
    assert packed != AttentionProblem.parse("S=64,D=64,layout=bshd")
    assert packed.to_json()["is_varlen"] is True
    assert "is_varlen" not in AttentionProblem.parse("S=64,D=64,varlen=0").to_json()


def test_a_plain_gemm_reads_as_it_did_before_there_were_epilogues() -> None:
    problem = GemmProblem.parse("M=1,N=2,K=3")
    assert problem.key == (
        '{"batch":1,"dtype":"float16","dtype_d":"float16","k":3,"layout_a":"row",'
        '"layout_b":"col","m":1,"n":2,"op":"gemm"}'
    )
    assert problem.label() == "M=1,N=2,K=3,dtype=fp16"
    assert (problem.has_bias, problem.has_residual, problem.activation) == (False, False, "")


@pytest.mark.parametrize(("scales", "sizes"), [("tensor", (1, 1)), ("row", (2, 3))])
@pytest.mark.parametrize("dtype", ["fp16", "e4m3"])
def test_factors_follow_the_matrices(dtype: str, scales: str, sizes: tuple[int, int]) -> None:
    problem = GemmProblem.parse(f"M=2,N=3,K=5,dtype={dtype},scales={scales}")
    a, b, *factors, d = problem.operands
    assert [(o.name, o.shape, o.dtype) for o in factors] == [
        (f"scale_{name}", (size,), "float32") for name, size in zip("ab", sizes, strict=True)
    ]
    assert {a.dtype, b.dtype} == {problem.dtype}
    width = 1 if dtype == "e4m3" else 2
    assert (
        problem.bytes
        == width * (2 * 5 + 5 * 3) + 4 * sum(sizes) + 2 * 2 * 3
        == sum(o.bytes for o in (a, b, *factors, d))
    )


def test_e4m3_has_factors_by_itself_and_a_key_for_each_accumulation() -> None:
    problem = GemmProblem(1, 2, 3, dtype=E4M3)
    assert (problem.scales, problem.dtype_d, problem.fast_accum) == ("tensor", "bfloat16", True)
    summed = replace(problem, fast_accum=False)
    for one, number in ((problem, 1), (summed, 0)):
        assert one.label() == f"M=1,N=2,K=3,dtype=e4m3,scales=tensor,fast_accum={number}"
        assert GemmProblem.parse(one.label()) == one
    assert "fast_accum" not in replace(problem, scales="block").label()
    assert "fast_accum" not in problem.to_json(), "documents without it keep their meaning"
    assert summed.key != problem.key
    half = GemmProblem.parse("M=1,N=2,K=3")
    assert (problem.flops, problem.tensor_rate) == (half.flops, 2 * half.tensor_rate)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_an_epilogue_names_its_parts_and_operands(epilogue: str) -> None:
    problem = GemmProblem.parse(f"M=2,N=3,K=5,B=7,dtype=bf16,dtype_d=fp32,epilogue={epilogue}")
    parts = [
        *(["bias"] if problem.has_bias else []),
        *([problem.activation] if problem.activation else []),
        *(["residual"] if problem.has_residual else []),
    ]
    assert "_".join(parts) == epilogue
    others = {operand.name: operand for operand in problem.operands[2:-1]}
    assert list(others) == [part for part in parts if part not in ACTIVATIONS]
    if problem.has_bias:
        assert (others["bias"].shape, others["bias"].dtype) == ((3,), "bfloat16")
    if problem.has_residual:
        assert replace(others["residual"], name="d", is_output=True) == problem.output
    plain = replace(problem, epilogue="")
    extra = (3 * 2 if problem.has_bias else 0) + (7 * 2 * 3 * 4 if problem.has_residual else 0)
    assert problem.bytes == plain.bytes + extra and problem.flops == plain.flops


@pytest.mark.parametrize("weights", PAIRINGS)
def test_pairs_of_weights_cover_their_memory_once(weights: Pairing) -> None:
    problem = SwigluProblem(8, 96, 5, weights=weights)
    _, operand, out = problem.operands
    places = {
        sum(i * s for i, s in zip(index, operand.strides, strict=True))
        for index in product(*map(range, operand.shape))
    }
    assert places == set(range(operand.elements)) and operand.elements == 2 * 96 * 5
    assert (out.shape, problem.flops) == ((8, 96), 2 * 2 * 8 * 96 * 5)
    # Gate and up of output column 41: group 1, lane 1, chunk 1.
    gate = sum(i * s for i, s in zip((0, 1, 1, 1, 0), operand.strides, strict=True)) // 5
    up = sum(i * s for i, s in zip((1, 1, 1, 1, 0), operand.strides, strict=True)) // 5
    assert (gate, up) == ((74, 75) if weights == "interleaved" else (41, 41 + 96))


HOSTILE = [
    *(None, True, -1, 0, 1, 64, 2**31 - 1, 2**31, 2**64, 10**63, 10**307, 10**400, -(10**400)),
    *(1.5, -0.0, math.nan, math.inf, 1e308, 5e-324, [], [1], {"a": 1}, b"x", "", "1", "1_0"),
    *("0x10", "1e999", "nan", "\ud800", "\0", "x" * 300, "1" * 64, "\u0661", "8\n", "fp16", "bias"),
]


def test_of_hostile_values_comes_a_problem_or_a_config_error(long_mode: bool) -> None:
    """Whatever a list, a request or a snapshot has for each key of each operation."""
    generator = random.Random(22)
    made = 0
    for _ in range(300_000 if long_mode else 10_000):
        example = generator.choice(EXAMPLES)
        text = dict(part.split("=") for part in example.label().split(","))
        keys = generator.choices(list(example.keys), k=generator.randint(1, 3))
        values = {**text, **{key: generator.choice(HOSTILE) for key in keys}}
        try:
            problem = type(example).from_keys(values)
        except ConfigError as exc:
            assert str(exc)
            continue
        made += 1
        assert problem.label()
        assert problem_from_json(problem.to_json()) == problem
        assert problem.bytes > 0
    assert made > 100


def test_parts_of_unlike_sizes_have_a_limit() -> None:
    for op, text in (
        (AttentionProblem, "B={},S=64,D=64,varlen=1"),
        (GroupedGemmProblem, "G={},M=64,N=8,K=8"),
    ):
        assert op.parse(text.format(1 << 16)).bytes > 0
        with pytest.raises(
            ConfigError, match=re.escape("=65537 is out of range (allowed: 1 to 65")
        ):
            op.parse(text.format((1 << 16) + 1))
    assert AttentionProblem.parse("B=65537,S=64,D=64").batch == 65537


def test_divisors_of_many_heads_are_not_searched() -> None:
    with pytest.raises(ConfigError, match=re.escape("HKV must divide H (allowed: 1, 2, 3, 6)")):
        AttentionProblem.parse("S=64,D=64,H=6,HKV=4")
    with pytest.raises(ConfigError, match=re.escape("must divide H (allowed: a divisor of H)")):
        AttentionProblem.parse(f"S=64,D=64,H={2**31 - 1},HKV=2")


@pytest.mark.parametrize("softcap", [30.0, 0.1, 1 / 3, 1234567.25, 1e-7, 2e22])
def test_a_label_says_the_soft_cap_exactly(softcap: float) -> None:
    problem = AttentionProblem(64, 64, 64, softcap=softcap)
    assert AttentionProblem.parse(problem.label()) == problem
    assert "softcap=30," in AttentionProblem(64, 64, 64, softcap=30.0).label()
