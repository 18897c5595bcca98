"""Packed sequences of unlike lengths on the GPU against float64: our own kernel with its
log-sum-exp, FlashAttention-2, the gate, and `tuner.attention_varlen` with and without a kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fused_configs import maker
from runtime_gpu import forget, fresh_store, store, this_gpu

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Status
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]
own_store = fresh_store

FAMILY = family("fused_attention")
LIMITS = {"float16": 6e-4, "bfloat16": 5e-3}
#: Queries and keys of each sequence.
LENGTHS = {
    "equal": ((65, 0, 1000, 7, 1, 63), (65, 0, 1000, 7, 1, 63)),
    "unequal": ((1000, 1, 65, 0, 7, 63, 1), (63, 1000, 0, 7, 65, 1, 1000)),
    "one": ((129,), (127,)),
    "many": ((1, 65, 7) * 50, (63, 7, 300) * 50),
}
#: Many queries, few keys: blocks that take tile after tile of little work. A race between the
#: tiles of one block showed in 5 of 9600 launches of these.
FEW_KEYS = ((1024, 3, 700, 0, 511, 64, 1, 900), (4, 4, 1, 2, 0, 3, 4, 2))
REPEATS = 3000
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


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [spec(text, config) for text, config in KERNELS.values()]


def posed(text: str, queries: int = 1000, keys: int = 1000, batch: int = 3) -> AttentionProblem:
    return AttentionProblem.parse(f"B={batch},SQ={queries},SKV={keys},{text},varlen=1")


def spec(text: str, config: Config) -> KernelSpec:
    return FAMILY.kernels(posed(text), config)["attention"]


def compiled(compiler: Compiler, name: str) -> LoadedKernel:
    [(_, future)] = compiler.submit([spec(*KERNELS[name])])
    return load(future.result())


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
) -> tuple[Any, Any]:
    """(total_q, H, D) and (H, total_q) in float64, at the default scale."""
    outs, sums = [], []
    query, keys, values = (t.double().transpose(0, 1) for t in tensors)
    group = problem.heads_q // problem.heads_kv
    keys, values = (t.repeat_interleave(group, 0) for t in (keys, values))
    parts = (query.split(of_queries, 1), keys.split(of_keys, 1), values.split(of_keys, 1))
    for q, k, v in zip(*parts, strict=True):
        scores = q @ k.mT * problem.head_dim**-0.5
        if problem.is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
            scores = scores.masked_fill(~seen, -math.inf)
        outs.append(scores.softmax(-1) @ v)
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs, 1).transpose(0, 1), torch.cat(sums, 1)


def check(kernel: LoadedKernel, text: str, config: Config, lengths: Any, launches: int = 2) -> None:
    """One launch into poisoned memory, and others that must leave the same bits."""
    of_queries, of_keys = lengths
    problem = posed(text, max(of_queries), max(of_keys), len(of_queries))
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    tensors = inputs(problem, of_queries, of_keys)
    (launch,) = FAMILY.launches(problem, config, problem.head_dim**-0.5)
    integers = (*launch.integers[:-2], sum(of_queries), sum(of_keys))
    size = max(1, kernel.workspace_bytes(integers))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    given = [starts(of_queries), starts(of_keys)]
    first = None
    for _ in range(launches):
        # A row more on either side, which belongs to no sequence.
        out = torch.full_like(torch.nn.functional.pad(tensors[0], (0, 0, 0, 0, 1, 1)), math.nan)
        lse = torch.full((problem.heads_q, sum(of_queries)), math.nan, device="cuda")
        addresses = [t.data_ptr() for t in (*tensors, out[1:], lse, *given)]
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(addresses, integers, launch.scalars, workspace.data_ptr(), stream)
        if first is None:
            first = out, lse
        assert torch.equal(out[1:-1], first[0][1:-1]) and torch.equal(lse, first[1])
    assert out[0].isnan().all() and out[-1].isnan().all(), "rows of no sequence were written"
    wanted, wanted_lse = expected(problem, tensors, of_queries, of_keys)
    at = 0
    for queries, keys in zip(of_queries, of_keys, strict=True):
        rows, what = slice(at, at + queries), f"{problem.label()}: {queries} queries, {keys} keys"
        part, reference = out[1:-1][rows].double(), wanted[rows]
        at += queries
        if not keys:
            assert (part == 0).all() and (lse[:, rows] == -math.inf).all(), what
        elif queries:
            error = float((part - reference).norm() / reference.norm())
            assert error <= LIMITS[problem.dtype], f"{what}: error {error:.1e}"
            assert (lse[:, rows].double() - wanted_lse[:, rows]).abs().max() <= 1e-4, what


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", KERNELS)
def test_each_sequence_is_attention_of_its_own(name: str, lengths: str, compiler: Compiler) -> None:
    check(compiled(compiler, name), *KERNELS[name], LENGTHS[lengths])


def test_many_launches_leave_the_same_bits(compiler: Compiler) -> None:
    name = "causal, two blocks"
    check(compiled(compiler, name), *KERNELS[name], FEW_KEYS, REPEATS)


def test_flash2_computes_the_same() -> None:
    problem = AttentionProblem.parse("B=4,H=4,HKV=2,S=300,D=64,causal=1,varlen=1")
    member, config = family("vendor_sdpa"), Config("vendor_sdpa", {"kernel": "flash2"})
    call = member.vendor_call(problem, config, problem.head_dim**-0.5)
    assert not isinstance(call, str), call
    lengths = problem.lengths_q, problem.lengths_kv
    tensors = inputs(problem, *lengths)
    wanted, _ = expected(problem, tensors, *lengths)
    batch_of_one = (t.transpose(0, 1)[None] for t in tensors)
    out = call(*batch_of_one, *map(starts, lengths))[0].transpose(0, 1)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 1e-3


def test_a_call_is_served_with_and_without_a_tuned_kernel(
    own_store: None, compiler: Compiler
) -> None:
    import tuner

    text, config = KERNELS["causal"]
    lengths = LENGTHS["equal"]
    problem = posed(text, 1024, 1024, 8)  # what 6 sequences up to 1000 are looked up by
    tensors = inputs(problem, *lengths)
    wanted, _ = expected(problem, tensors, *lengths)

    def error() -> float:
        given = *tensors, *map(starts, lengths), 1000, 1000
        out = tuner.attention_varlen(*given, is_causal=True)
        return float((out.double() - wanted).norm() / wanted.norm())

    assert error() < 1e-3  # PyTorch's, one sequence after the other
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}

    [(_, future)] = compiler.submit([spec(text, config)])
    store(problem, this_gpu(), config, artifacts={"attention": future.result().key})
    forget()
    for _ in range(2):
        assert error() < 1e-3
    assert tuner.stats(reset=True).hits == 2


def test_the_gate_passes_the_kernel_and_sees_a_sequence_that_ends_early(
    compiler: Compiler,
) -> None:
    from tuner.measure.device import Device
    from tuner.measure.gate import REFERENCE, Gate
    from tuner.measure.gate.inputs import KINDS, scale_of

    text, config = KERNELS["full, packed"]
    [(_, reference), (_, future)] = compiler.submit([REFERENCE, spec(text, config)])
    kernel, problem = load(future.result()), posed(text, 300, 200, 5)
    short = replace(problem, seqlen_q=128)  # the tiles of longer sequences' ends are not launched
    device = Device(torch.cuda.current_device())
    gate = Gate(device, load(reference.result()))
    gate.open(problem, 7)
    try:
        for launched, passes in ((problem, True), (short, False)):
            for kind in KINDS[problem.op]:
                gate.load(kind)
                gate.arm()
                (launch,) = FAMILY.launches(launched, config, scale_of(problem, kind))
                totals = problem.total_q, problem.total_kv
                integers = (*launch.integers[:-2], *totals)
                addresses = [gate.pointers.get(ref.operand, 0) for ref in launch.tensors]
                kernel.launch(addresses, integers, launch.scalars, 0, device.stream)
                verdict = gate.examine()
                assert (verdict.status is Status.OK) == passes, f"{kind}: {verdict.log}"
    finally:
        gate.close()
