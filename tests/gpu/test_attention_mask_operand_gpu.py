"""Masks as operands on the GPU: the numerics gate's proof of such kernels, masks as models have
them against float64, and `tuner.attention` with them against PyTorch's own answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fused_configs import maker
from proving import attention_target, faults
from runtime_gpu import call_path, forget, fresh_store, store, this_gpu

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(400)]
own_store, path = fresh_store, call_path

FAMILY = family("fused_attention")
LIMITS = {"float16": 6e-4, "bfloat16": 5e-3}
LENGTHS = [
    (1, 1),
    (1, 1000),
    (1, 4097),
    (5, 800),
    (64, 64),
    (129, 127),
    (300, 40),
    (257, 1024),
    (1337, 999),
]
make = maker(early_exp=50, ping_pong=True)

#: What a kernel is compiled for, and a config: D from 64 to 256, both types and kinds, packed
#: heads, splits, key groups, both loops, the causal flag and the soft cap.
KERNELS: dict[str, tuple[str, Config]] = {
    "bool, D=64": ("B=2,H=4,D=64,mask=1", make(2, 128, persistent=True, stages_output=True)),
    "additive, D=64": (
        "B=2,H=4,D=64,bias=1,dtype=bf16,layout=bshd",
        make(2, 128, persistent=True, stages_output=True),
    ),
    "additive, two buffers": ("B=1,H=3,D=56,bias=1", make(2, 96, 2)),
    "bool, packed, split": (
        "B=3,H=8,HKV=2,D=128,mask=1,dtype=bf16",
        make(2, 64, packed_heads=4, key_groups=2, ping_pong=False, splits=3),
    ),
    "additive, packed, cluster": (
        "B=2,H=16,HKV=1,D=128,bias=1",
        make(1, 80, packed_heads=16, splits=2, combine="cluster"),
    ),
    "bool, padded, split": (
        "B=3,H=14,HKV=2,D=128,mask=1,dtype=bf16",
        make(1, 64, packed_heads=8, pads_heads=True, splits=3),
    ),
    "additive, padded": (
        "B=2,H=10,HKV=2,D=64,bias=1",
        make(2, 64, packed_heads=8, pads_heads=True),
    ),
    "bool, D=256": ("B=2,H=2,D=256,mask=1,dtype=bf16", make(2, 64)),
    "additive, D=192": ("B=2,H=2,D=160,bias=1,dtype=bf16", make(1, 64)),
    "bool, causal, soft cap": (
        "B=2,H=4,HKV=2,D=80,causal=1,softcap=20,mask=1",
        make(1, 64, packed_heads=2),
    ),
    "additive, causal, soft cap": (
        "B=2,H=2,D=64,causal=1,softcap=20,bias=1",
        make(2, 128, persistent=True),
    ),
}


def spec(text: str, config: Config) -> KernelSpec:
    return FAMILY.kernels(AttentionProblem.parse(f"S=512,{text}"), config)["attention"]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec(text, config) for text, config in KERNELS.values())]


def compiled(compiler: Compiler, name: str) -> LoadedKernel:
    [(_, future)] = compiler.submit([spec(*KERNELS[name])])
    return load(future.result())


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    """Rows that see no key are among the problems."""
    target = attention_target(*KERNELS[name])
    assert faults(compiler, worker, tmp_path / "kernels.json", target) == []


def visible(rows: int, keys: int) -> Any:
    """(rows, keys) along the diagonal that ends at the last of both."""
    seen = torch.ones(rows, keys, dtype=torch.bool, device="cuda")
    return seen.tril(keys - rows)


def lengths(batch: int, keys: int) -> Any:
    """(B, 1, 1, keys): each sequence has its own number of keys, the first all."""
    counts = torch.tensor([max(1, keys - 37 * i % keys) for i in range(batch)], device="cuda")
    return (torch.arange(keys, device="cuda") < counts[:, None])[:, None, None]


def padding(problem: AttentionProblem) -> Any:
    return lengths(problem.batch, problem.seqlen_kv)


def padded_rows(problem: AttentionProblem) -> Any:
    """Padding on the left beside a causal mask, every row written out; the first see nothing."""
    b, m, n = problem.batch, problem.seqlen_q, problem.seqlen_kv
    return (lengths(b, n).flip(-1) & visible(m, n)).expand(b, 1, m, n).contiguous()


def bottom_right(problem: AttentionProblem) -> Any:
    return visible(problem.seqlen_q, problem.seqlen_kv)


def of_static_cache(problem: AttentionProblem) -> Any:
    """Whole rows of a longer cache, of which the problem's keys are cut out."""
    b, m, n = problem.batch, problem.seqlen_q, problem.seqlen_kv
    wide = torch.ones(b, 1, m, n + 64, dtype=torch.bool, device="cuda")
    wide[..., :n] = visible(m, n)
    return wide[..., :n]


def of_heads(problem: AttentionProblem) -> Any:
    b, h, m, n = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_kv)
    return torch.rand(b, h, m, n, device="cuda") < 0.3


def no_keys(problem: AttentionProblem) -> Any:
    """Every third query sees nothing."""
    m, n = problem.seqlen_q, problem.seqlen_kv
    seen = torch.rand(m, n, device="cuda") < 0.5
    seen[1::3] = False
    return seen


def of_queries(problem: AttentionProblem) -> Any:
    """(B, 1, SQ, 1): a query sees all keys or none."""
    return torch.rand(problem.batch, 1, problem.seqlen_q, 1, device="cuda") < 0.7


def transposed(problem: AttentionProblem) -> Any:
    return (torch.rand(problem.seqlen_kv, problem.seqlen_q, device="cuda") < 0.7).mT


MASKS: dict[str, Callable[[AttentionProblem], Any]] = {
    function.__name__: function
    for function in (
        *(padding, padded_rows, bottom_right, of_static_cache),
        *(of_heads, no_keys, of_queries, transposed),
    )
}


def mask_of(problem: AttentionProblem, name: str) -> Any:
    """A mask of the problem's kind: as booleans, or normal where it is true and -inf elsewhere."""
    seen = MASKS[name](problem)
    if problem.mask:
        return seen
    bias = torch.randn(seen.shape, device="cuda").mul_(3).masked_fill_(~seen, -math.inf)
    made = torch.empty_strided(
        seen.shape, seen.stride(), dtype=getattr(torch, problem.dtype), device="cuda"
    )
    return made.copy_(bias)


def inputs(problem: AttentionProblem, spread: float) -> list[Any]:
    """Normal (B, H, S, D) views; queries times `spread`."""
    made = []
    for operand in problem.matrices[:3]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device="cuda"
        )
        made.append(tensor.copy_(torch.randn(operand.shape, device="cuda")))
    made[0] *= spread
    return made


def expected(problem: AttentionProblem, tensors: list[Any], mask: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64, at the default scale."""
    query, key, value = (t.double() for t in tensors)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * problem.head_dim**-0.5
    if problem.softcap:
        scores = problem.softcap * (scores / problem.softcap).tanh()
    is_boolean = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, -math.inf) if is_boolean else scores + mask.double()
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0) @ value, scores.logsumexp(-1)


def check(
    kernel: LoadedKernel, problem: AttentionProblem, config: Config, name: str, spread: float
) -> None:
    """One launch into poisoned memory, and a second one that must leave the same bits."""
    from tuner.runtime.attention.attention_call import pose
    from tuner.runtime.attention.bias import as_operand
    from tuner.runtime.attention.composed import Extras

    tensors, mask = inputs(problem, spread), mask_of(problem, name)
    operand = as_operand(mask, *tensors[:2], False)
    assert isinstance(operand, torch.Tensor)
    scale, extras = problem.head_dim**-0.5, Extras(softcap=problem.softcap)
    posed = pose(*tensors, problem.is_causal, scale, True, extras, mask=operand)
    if not problem.is_causal:
        assert bool(posed.problem.mask) == bool(problem.mask)
    assert FAMILY.violations(posed.problem, config, DEFAULT_GPU) == []
    assert FAMILY.kernels(posed.problem, config) == FAMILY.kernels(problem, config)
    launches = FAMILY.strided_launches(posed.problem, config, scale, posed.strides)
    assert not isinstance(launches, str), launches
    (launch,) = launches
    size = max(1, kernel.workspace_bytes(launch.integers))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    results = []
    for _ in range(2):
        out = torch.full_like(tensors[0], math.nan)
        lse = torch.full(out.shape[:3], math.nan, device="cuda")
        addresses = [t.data_ptr() for t in (*tensors, out, lse, operand)]
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(addresses, launch.integers, launch.scalars, workspace.data_ptr(), stream)
        results.append((out, lse))
    (out, lse), again = results
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    wanted, wanted_lse = expected(problem, tensors, mask)
    what = f"{posed.problem.label()}, {name}, spread {spread:g}"
    error = float((out.double() - wanted).norm())
    assert error <= LIMITS[problem.dtype] * float(wanted.norm()), f"{what}: error {error:.1e}"
    unseen = wanted_lse == -math.inf
    assert (out[unseen] == 0).all(), f"{what}: a query without keys is not zero"
    assert torch.equal(lse == -math.inf, unseen), what
    wrong = (lse.double() - wanted_lse)[~unseen].abs()
    assert wrong.numel() == 0 or float(wrong.max()) < 1e-3 * spread, what


@pytest.mark.parametrize("name", KERNELS)
def test_masks_of_models(name: str, compiler: Compiler) -> None:
    text, config = KERNELS[name]
    kernel, count = compiled(compiler, name), 0
    for (queries, keys), mask in itertools.product(LENGTHS, MASKS):
        problem = AttentionProblem.parse(f"SQ={queries},SKV={keys},{text}")
        check(kernel, problem, config, mask, (1.0, 8.0)[count % 2])
        count += 1
    assert count == len(LENGTHS) * len(MASKS) >= 60


def test_large_biases_hide_as_infinite_ones_do(compiler: Compiler) -> None:
    """The lowest number of the type, as Transformers' eager masks have it."""
    text, config = KERNELS["additive, D=64"]
    kernel = compiled(compiler, "additive, D=64")
    problem = AttentionProblem.parse(f"SQ=130,SKV=200,{text}")
    tensors = inputs(problem, 1.0)
    seen = lengths(2, 200)
    lowest = torch.finfo(torch.bfloat16).min
    bias = torch.zeros(seen.shape, device="cuda").masked_fill_(~seen, lowest).bfloat16()
    (launch,) = FAMILY.launches(replace(problem, bias="bk"), config, problem.head_dim**-0.5)
    out, lse = torch.full_like(tensors[0], math.nan), torch.empty(2, 4, 130, device="cuda")
    addresses = [t.data_ptr() for t in (*tensors, out, lse, bias)]
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(addresses, launch.integers, launch.scalars, workspace.data_ptr(), stream)
    wanted, _ = expected(problem, tensors, seen)
    assert float((out.double() - wanted).norm() / wanted.norm()) < LIMITS["bfloat16"]


SERVED = {
    "bool": ("B=3,H=4,SQ=300,SKV=300,D=64,mask=bk", padding),
    "bool rows": ("B=3,H=4,SQ=300,SKV=300,D=64,mask=b", padded_rows),
    "additive": ("B=3,H=4,SQ=256,SKV=256,D=64,bias=bh", of_heads),
}


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("through", ["attention", "enabled"])
def test_a_model_is_served_with_its_mask(
    name: str, through: str, own_store: None, path: str, compiler: Compiler
) -> None:
    """Rows are what PyTorch's own kernel makes of them, and zero where they see no key: there
    cuDNN's kernel leaves the mask away.
    """
    import tuner

    text, _ = SERVED[name]
    problem = AttentionProblem.parse(text)
    config = make(2, 128, persistent=True, stages_output=True)
    [(_, future)] = compiler.submit([FAMILY.kernels(problem, config)["attention"]])
    tensors, mask = inputs(problem, 1.0), mask_of(problem, SERVED[name][1].__name__)
    plain = torch.nn.functional.scaled_dot_product_attention
    wanted = plain(*tensors, mask)

    def agrees(out: Any, wanted: Any, mask: Any) -> bool:
        seen = (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1)
        seen = seen.expand(out.shape[:3])
        away = (out - wanted)[seen].float().norm() / wanted[seen].float().norm()
        return bool(away < 2e-3 and (out[~seen] == 0).all())

    store(problem, this_gpu(), config, artifacts={"attention": future.result().key})
    forget()
    if through == "enabled" and path == "python":
        pytest.skip("without the dispatcher masks do not pass the overridden operators")
    for _ in range(3):
        if through == "attention":
            out = tuner.attention(*tensors, mask)
        else:
            with tuner.enabled():
                out = plain(*tensors, mask)
        assert agrees(out, wanted, mask)
    assert tuner.stats(reset=True).hits == 3
    # Another mask of the same kind is another launch of the same plan.
    other = mask.roll(1, 0)
    out, wanted = tuner.attention(*tensors, other), plain(*tensors, other)
    assert agrees(out, wanted, other)
    assert tuner.stats(reset=True).hits == 1
    asked = mask.float() if mask.dtype == torch.bool else mask.clone().requires_grad_()
    tuner.attention(*tensors, asked)
    assert tuner.stats(reset=True).hits == 0
