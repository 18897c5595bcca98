"""Packed sequences of unlike lengths on the GPU: our own kernels' proofs, FlashAttention-2, and
`tuner.attention_varlen` with and without a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fused_configs import maker
from gating import Gated
from proving import attention_target, faults
from runtime_gpu import forget, fresh_store, store, this_gpu

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]
own_store = fresh_store

#: Lengths of a call's sequences.
LENGTHS = (65, 0, 1000, 7, 1, 63)
make = maker(early_exp=50, ping_pong=True)

#: What a kernel is compiled for, and a config: one block a tile, persistent, dynamic.
KERNELS = {
    "full": ("H=3,D=64", make(2, 128, 1, persistent=True)),
    "full, packed": ("H=8,HKV=2,D=64", make(2, 96, 2, packed_heads=4)),
    "causal": ("H=3,D=64,causal=1", make(2, 128, 1, persistent=True)),
    "causal, packed": (
        "H=4,HKV=2,D=128,causal=1,dtype=bf16", make(1, 80, 1, packed_heads=2)
    ),
    "causal, two blocks": (
        "H=9,D=64,causal=1", make(1, 128, 1, persistent=True, blocks_per_sm=2, q_in_registers=True)
    ),
}  # fmt: skip


TARGETS = {
    name: attention_target(f"B=3,{text},varlen=1", config)
    for name, (text, config) in KERNELS.items()
}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(target.kernels["attention"] for target in TARGETS.values())]


def posed(text: str, queries: int = 1000, keys: int = 1000, batch: int = 3) -> AttentionProblem:
    return AttentionProblem.parse(f"B={batch},SQ={queries},SKV={keys},{text},varlen=1")


def starts(lengths: Sequence[int]) -> Any:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def inputs(problem: AttentionProblem, of_queries: Sequence[int], of_keys: Sequence[int]) -> Any:
    """Normal (total, H, D) tensors."""
    generator = torch.Generator("cuda").manual_seed(len(of_queries))

    def drawn(lengths: Sequence[int], heads: int) -> Any:
        shape = (sum(lengths), heads, problem.head_dim)
        made = torch.randn(shape, generator=generator, device="cuda")
        return made.to(getattr(torch, problem.dtype))

    query = drawn(of_queries, problem.heads_q)
    return [query, *(drawn(of_keys, problem.heads_kv) for _ in range(2))]


def expected(
    problem: AttentionProblem,
    tensors: Sequence[Any],
    of_queries: Sequence[int],
    of_keys: Sequence[int],
) -> Any:
    """(total_q, H, D) in float64, at the default scale."""
    query, keys, values = (t.double().transpose(0, 1) for t in tensors)
    group = problem.heads_q // problem.heads_kv
    keys, values = (t.repeat_interleave(group, 0) for t in (keys, values))
    parts = (query.split(of_queries, 1), keys.split(of_keys, 1), values.split(of_keys, 1))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=problem.is_causal)
    return torch.cat([attend(*part) for part in zip(*parts, strict=True)], 1).transpose(0, 1)


@pytest.mark.parametrize("name", TARGETS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    assert faults(compiler, worker, tmp_path / "kernels.json", TARGETS[name]) == []


def test_many_launches_leave_the_same_bits(gated: Gated) -> None:
    """Many queries, few keys: blocks that take tile after tile of little work. A race between the
    tiles of one block showed in 5 of 9600 such launches.
    """
    text, config = KERNELS["causal, two blocks"]
    gated.repeats(posed(text, 1024, 4, 8), config, count=1500)


def test_flash2_computes_the_same() -> None:
    problem = AttentionProblem.parse("B=4,H=4,HKV=2,S=300,D=64,causal=1,varlen=1")
    member, config = family("vendor_sdpa"), Config("vendor_sdpa", {"kernel": "flash2"})
    call = member.vendor_call(problem, config, problem.head_dim**-0.5)
    assert not isinstance(call, str), call
    lengths = problem.lengths_q, problem.lengths_kv
    tensors = inputs(problem, *lengths)
    wanted = expected(problem, tensors, *lengths)
    batch_of_one = (t.transpose(0, 1)[None] for t in tensors)
    out = call(*batch_of_one, *map(starts, lengths))[0].transpose(0, 1)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-3


def test_a_call_is_served_with_and_without_a_tuned_kernel(
    own_store: None, compiler: Compiler
) -> None:
    import tuner

    text, config = KERNELS["causal"]
    lengths = LENGTHS, LENGTHS
    problem = posed(text, 1024, 1024, 8)  # what 6 sequences up to 1000 are looked up by
    tensors = inputs(problem, *lengths)
    wanted = expected(problem, tensors, *lengths)

    def error() -> float:
        given = *tensors, *map(starts, lengths), 1000, 1000
        out = tuner.attention_varlen(*given, is_causal=True)
        return float((out.double() - wanted).norm() / wanted.norm())

    assert error() < 1e-3  # PyTorch's, one sequence after the other
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}

    [(_, future)] = compiler.submit([TARGETS["causal"].kernels["attention"]])
    store(problem, this_gpu(), config, artifacts={"attention": future.result().key})
    forget()
    for _ in range(2):
        assert error() < 1e-3
    assert tuner.stats(reset=True).hits == 2
