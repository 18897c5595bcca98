"""Masks as operands on the GPU: proofs of such kernels, and `tuner.attention` with masks as models
have them against PyTorch's own answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fused_configs import maker
from proving import attention_target, faults
from runtime_gpu import call_path, forget, fresh_store, store, this_gpu

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(400)]
own_store, path = fresh_store, call_path

FAMILY = family("fused_attention")
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


def lowest(problem: AttentionProblem) -> Any:
    """The lowest number of the type hides, as in Transformers' eager masks."""
    seen = padding(problem)
    dtype = getattr(torch, problem.dtype)
    bias = torch.zeros(seen.shape, dtype=dtype, device="cuda")
    return bias.masked_fill_(~seen, torch.finfo(dtype).min)


def mask_of(problem: AttentionProblem, name: str, is_boolean: bool) -> Any:
    """A mask as booleans, or normal where it is true and -inf elsewhere."""
    if name == "lowest":
        return lowest(problem)
    seen = MASKS[name](problem)
    if is_boolean:
        return seen
    bias = torch.randn(seen.shape, device="cuda").mul_(3).masked_fill_(~seen, -math.inf)
    made = torch.empty_strided(
        seen.shape, seen.stride(), dtype=getattr(torch, problem.dtype), device="cuda"
    )
    return made.copy_(bias)


SERVED = [
    *((name, is_boolean, "attention") for name in MASKS for is_boolean in (True, False)),
    ("lowest", False, "attention"),
    *((name, True, "enabled") for name in ("padding", "padded_rows")),
    ("of_heads", False, "enabled"),
]


@pytest.mark.parametrize(("name", "is_boolean", "through"), SERVED)
def test_a_model_is_served_with_its_mask(
    name: str, is_boolean: bool, through: str, own_store: None, path: str, compiler: Compiler
) -> None:
    """Rows are what PyTorch's operations make of them, and zero where they see no key.

    cuDNN's kernel leaves the mask away there, and does not take every mask.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import tuner
    from tuner.runtime.attention.attention_call import pose
    from tuner.runtime.attention.bias import as_operand
    from tuner.runtime.attention.composed import Extras

    usual = AttentionProblem.parse("B=3,H=4,SQ=300,SKV=320,D=64")
    shapes = [operand.shape for operand in usual.matrices[:3]]
    tensors = [torch.randn(shape, device="cuda").half() for shape in shapes]
    mask = mask_of(usual, name, is_boolean)
    operand = as_operand(mask, *tensors[:2], False)
    problem = pose(*tensors, False, usual.head_dim**-0.5, True, Extras(), mask=operand).problem
    config = make(2, 128, persistent=True, stages_output=True)
    [(_, future)] = compiler.submit([FAMILY.kernels(problem, config)["attention"]])
    plain = torch.nn.functional.scaled_dot_product_attention

    def composed(mask: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return plain(*tensors, mask)

    wanted = composed(mask)

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
    out, wanted = tuner.attention(*tensors, other), composed(other)
    assert agrees(out, wanted, other)
    assert tuner.stats(reset=True).hits == 1
    asked = mask.float() if mask.dtype == torch.bool else mask.clone().requires_grad_()
    tuner.attention(*tensors, asked)
    assert tuner.stats(reset=True).hits == 0
