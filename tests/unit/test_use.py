"""The commands and Python lines of a report's "Use it", and its glossary."""

from __future__ import annotations

import ast
import inspect
import shlex

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import tuner.runtime
from tuner import cli
from tuner.families import families
from tuner.hardware import GPUS
from tuner.problem import PROBLEMS
from tuner.report.glossary import MEANINGS, meanings
from tuner.report.use import use

SHAPES = (
    ("attention", "S=1024,D=64", "tuner.attention(q, k, v)"),
    (
        "attention",
        "S=512,D=128,H=32,HKV=8,causal=1,softcap=30",
        "tuner.attention(q, k, v, is_causal=True, enable_gqa=True, softcap=30)",
    ),
    ("attention", "S=512,D=64,window=128", "tuner.attention(q, k, v, window=(128, 128))"),
    ("attention", "S=512,D=64,bias=h", "tuner.attention(q, k, v, attn_mask=bias)"),
    (
        "attention",
        "S=512,D=64,dtype=e4m3",
        "tuner.attention(q, k, v, descale_q=descale_q, descale_k=descale_k, descale_v=descale_v)",
    ),
    (
        "attention",
        "S=512,D=64,varlen=1,causal=1",
        "tuner.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_kv, 512, 512, is_causal=True)",
    ),
    (
        "attention",
        "B=2,SQ=1,SKV=512,D=64,page_size=16",
        "tuner.paged_attention(q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, "
        "max_seqlen_q=1, max_seqlen_k=512, causal=False)",
    ),
    (
        "attention",
        "B=2,SQ=7,SKV=512,D=64,causal=1,window=99,softcap=30,page_size=16,sinks=1",
        "tuner.paged_attention(q, k_cache, v_cache, page_table, seqused_k, cu_seqlens_q, "
        "max_seqlen_q=7, max_seqlen_k=512, window=(99, -1), softcap=30, sinks=sinks)",
    ),
    (
        "attention",
        "B=2,H=16,HKV=1,SQ=1,SKV=512,D=576,DV=512,page_size=16",
        "tuner.mla_decode(q, cache, page_table, lengths, scale=scale)",
    ),
    ("gemm", "M=64,N=128,K=256", "tuner.linear(x, weight)"),
    (
        "gemm",
        "M=64,N=128,K=256,epilogue=bias_gelu_tanh",
        'tuner.linear(x, weight, bias, activation="gelu_tanh")',
    ),
    ("gemm", "M=64,N=128,K=256,epilogue=silu", 'tuner.linear(x, weight, activation="silu")'),
    ("gemm", "M=64,N=128,K=256,layout_b=row", "tuner.matmul(a, b)"),
    ("gemm", "M=64,N=128,K=256,B=4", "tuner.matmul(a, b)"),
    (
        "gemm",
        "M=64,N=128,K=256,dtype=e4m3,fast_accum=1",
        "tuner.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)",
    ),
    (
        "gemm",
        "M=64,N=128,K=256,dtype=e4m3,scales=block",
        "tuner.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)",
    ),
    ("swiglu", "M=64,N=128,K=256", "tuner.swiglu(x, tuner.interleave(gate, up))"),
    (
        "grouped_gemm",
        "G=4,M=64,N=128,K=256,sizes=zipf",
        'tuner.grouped_mm(a, b, offsets, sizes="zipf")',
    ),
    (
        "grouped_gemm",
        "G=4,M=64,N=128,K=256,dtype=e4m3",
        'tuner.grouped_mm(a, b, offsets, sizes="uniform", scale_a=scale_a, scale_b=scale_b)',
    ),
)
UNSERVED = (
    ("gemm", "M=64,N=128,K=256,epilogue=residual"),
    ("gemm", "M=64,N=128,K=256,dtype_d=fp32"),
    ("softmax", "M=64,N=128"),
)


@pytest.mark.parametrize(("op", "shape", "call"), SHAPES)
def test_a_call_that_the_runtime_takes(op: str, shape: str, call: str) -> None:
    found = use(PROBLEMS[op].parse(shape), GPUS["H200"])
    assert found.call == call
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute)
    called = getattr(tuner.runtime, expression.func.attr)
    names = {keyword.arg: None for keyword in expression.keywords}
    inspect.signature(called).bind(*expression.args, **names)
    assert found.python.startswith("import tuner\n# ")


@pytest.mark.parametrize(("op", "shape"), UNSERVED)
def test_what_the_runtime_has_no_call_for_is_left_out(op: str, shape: str) -> None:
    found = use(PROBLEMS[op].parse(shape), GPUS["H200"])
    assert (found.call, found.python) == ("", "")


@pytest.mark.parametrize(("op", "shape"), [*((op, shape) for op, shape, _ in SHAPES), *UNSERVED])
def test_the_build_command_is_read_as_it_stands(op: str, shape: str) -> None:
    problem = PROBLEMS[op].parse(shape)
    command, *arguments = shlex.split(use(problem, GPUS["H200"]).build)
    args = cli.parser().parse_args(arguments)
    assert (command, args.command) == ("tuner", "build")
    assert PROBLEMS[args.op or "attention"].parse(args.shape) == problem
    assert args.gpu == "NVIDIA H200"


def test_every_parameter_of_every_own_family_is_explained() -> None:
    """Of a vendor's library there are names besides that only the library explains."""
    own, every = set(), set()
    for member in families().values():
        every |= {*member.domains}
        own |= set() if member.is_vendor else {*member.domains}
    assert own <= {*MEANINGS} <= every
    assert [*MEANINGS] == sorted(MEANINGS)
    assert meanings(["tile_n", "later", "pdl", "pdl"]) == [
        ("pdl", MEANINGS["pdl"]),
        ("tile_n", MEANINGS["tile_n"]),
    ]
