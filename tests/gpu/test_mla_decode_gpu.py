"""Latent attention's decoding by its kernels: through the gate, and as models call them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from gating import Gated
from latent_calls import drawn, is_close, quantised, wanted

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families.base import KernelSpec
from tuner.families.mla_decode import LATENT, MlaDecode, rule
from tuner.hardware import DEFAULT_GPU
from tuner.measure.gate import REFERENCE
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

FAMILY = MlaDecode()
#: Lengths, queries, heads, slots of a page.
CASES = (
    ((70,), 1, 1, 64),
    ((5000,), 1, 64, 64),
    ((1, 0, 63, 64, 65, 1000, 300, 4097), 1, 128, 64),
    ((3, 0, 700, 129), 4, 16, 16),
    ((100, 1, 777, 2000), 3, 20, 48),
    (tuple(37 * i % 900 for i in range(150)), 2, 128, 128),
    ((300, 40), 2, 200, 16),
)
GATED = (
    "B=3,H=16,SQ=1,SKV=1000,page_size=64,dtype=bf16",
    "B=5,H=128,SQ=2,SKV=333,causal=1,page_size=48,dtype=bf16",
    "B=8,H=20,SQ=4,SKV=129,causal=1,page_size=16,dtype=fp16",
    "B=17,H=64,SQ=1,SKV=700,varlen=1,page_size=128,dtype=fp16",
    "B=5,H=128,SQ=2,SKV=333,causal=1,page_size=48,dtype=bf16,cache=e4m3",
    "B=1,H=16,SQ=1,SKV=9000,page_size=64,dtype=bf16,cache=e4m3",
    "B=8,H=20,SQ=4,SKV=129,causal=1,page_size=16,dtype=bf16,cache=e4m3_blocks",
    "B=17,H=64,SQ=1,SKV=700,varlen=1,page_size=128,dtype=bf16,cache=e4m3_blocks",
)


def problem_of(text: str) -> AttentionProblem:
    return AttentionProblem.parse(f"{text},{LATENT}")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec for one in rule.targets() for spec in one.kernels.values())]


@pytest.mark.parametrize("config", rule.KERNELS, ids=str)
@pytest.mark.parametrize("text", GATED)
def test_the_gate_passes_it(gated: Gated, text: str, config: Config) -> None:
    problem = problem_of(text)
    config = FAMILY.called(problem, config, 1)
    if FAMILY.violations(problem, config, DEFAULT_GPU):
        pytest.skip("a pair of blocks, and one block of rows")
    gated.passes(problem, config)


@pytest.fixture
def mla(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`tuner.runtime.attention.mla` with the rule's first kernel of the tests' cache."""
    module = pytest.importorskip("tuner.runtime.attention.mla", reason="torch is missing")
    from tuner.runtime.call import proven_kernels, table

    built = {spec: f.result().key for spec, f in compiler.submit(kernels()[1:])}
    monkeypatch.setattr("tuner.runtime.call.plan.ArtifactCache", lambda: compiler.artifacts)
    monkeypatch.setattr(
        proven_kernels.lists,
        "proven",
        lambda specs, _: {name: built[spec] for name, spec in specs.items()},
    )
    table.table.renew()
    yield module
    table.table.renew()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"H={case[2]},SQ={case[1]},page={case[3]}")
def test_it_computes_what_pytorch_s_operations_do(
    mla: Any, case: tuple[Any, ...], dtype: str
) -> None:
    import torch

    from tuner.runtime.call import counters

    lengths, queries, heads, size = case
    call = drawn(dtype, "cuda", (size, queries, heads), lengths)
    counters.stats(reset=True)
    out, lse = mla.mla_decode(**call, return_lse=True)
    assert counters.stats().hits == 1, counters.stats()
    assert is_close(out, lse, wanted(call))
    again, _ = mla.mla_decode(**call, return_lse=True)
    assert torch.equal(out, again)


@pytest.mark.parametrize("form", ["e4m3", "e4m3_blocks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"H={case[2]},SQ={case[1]},page={case[3]}")
def test_it_reads_quantised_rows(mla: Any, case: tuple[Any, ...], form: str) -> None:
    import torch

    from tuner.runtime.call import counters

    lengths, queries, heads, size = case
    call = quantised(drawn("bfloat16", "cuda", (size, queries, heads), lengths), form)
    counters.stats(reset=True)
    out, lse = mla.mla_decode(**call, return_lse=True)
    assert counters.stats().hits == 1, counters.stats()
    assert is_close(out, lse, wanted(call))
    assert torch.equal(out, mla.mla_decode(**call))


def test_a_captured_call_follows_the_lengths(mla: Any) -> None:
    import torch

    call = drawn("bfloat16", "cuda", (64, 1, 64), (40, 900, 3))
    out = mla.mla_decode(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla.mla_decode(**call, out=out)
    call["lengths"].copy_(torch.tensor([7, 511, 0]))
    graph.replay()
    torch.cuda.synchronize()
    assert is_close(out, None, wanted(call))


def test_views_of_larger_tensors(mla: Any) -> None:
    import torch

    call = drawn("bfloat16", "cuda", (64, 2, 32), (333, 64))
    wide = torch.randn(2, 32, 2, 640, device="cuda").bfloat16()
    call["query"] = wide.transpose(1, 2)[..., :576]
    out = torch.full((2, 2, 40, 512), torch.nan, device="cuda").bfloat16()[:, :, 4:36]
    mla.mla_decode(**call, out=out)
    assert is_close(out, None, wanted(call))
