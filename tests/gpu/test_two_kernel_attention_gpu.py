"""Attention as two kernels on the GPU against float64: at lengths that cut tiles and launches, in
chunks, with scores scaled by 30, and with soft caps and biases, the latter beside vendors'
kernels and through the gate too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from gating import Gated, kernels_of, specs_of
from runtime_gpu import forget, fresh_store, store, this_gpu
from two_kernel_cases import CASES, LENGTHS, problems, variants

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel
from tuner.config import Config
from tuner.families import family
from tuner.families.base import LSE, SCRATCH, KernelSpec
from tuner.families.two_kernel_attention import chunk_sizes
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]

own_store = fresh_store
FAMILY = family("two_kernel_attention")
#: Relative Frobenius norm: the fused kernel's.
LIMITS = {"float16": 6e-4, "bfloat16": 5e-3}
#: Standard deviation of the scaled scores.
SPREADS = (1.0, 30.0)


#: Elements between a multiple of 16 bytes and a bias: its rows are read in other ways.
OFFSETS = (0, 1)


def long(text: str) -> AttentionProblem:
    return AttentionProblem.parse(f"S=4096,{text}")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(long(text), config) for text, config in CASES.values()])


def inputs(problem: AttentionProblem, spread: float, offset: int = 0) -> dict[str, Any]:
    """Normal (B, H, S, D) views; queries and biases times `spread`. A bias lies
    among NaNs, `offset` elements behind a multiple of 16 bytes.
    """
    generator = torch.Generator("cuda").manual_seed(problem.pairs)
    made = {}
    for operand in problem.operands[:-1]:
        shift = 8 + offset if operand.name == "bias" else 0
        size, dtype = operand.elements + 2 * shift, getattr(torch, operand.dtype)
        tensor = torch.full((size,), math.nan, dtype=dtype, device="cuda").as_strided(
            operand.shape, operand.strides, shift
        )
        noise = torch.randn(operand.shape, generator=generator, device="cuda")
        made[operand.name] = tensor.copy_(noise)
    for name in {"query", "bias"} & {*made}:
        made[name] *= spread
    return made


def expected(problem: AttentionProblem, tensors: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Output, log-sum-exp, and the largest sum of the sizes of a score's parts, in float64."""
    query, key, value = (tensors[name].double() for name in ("query", "key", "value"))
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scale = problem.head_dim**-0.5
    scores = query @ key.mT * scale
    if problem.softcap:
        scores = problem.softcap * (scores / problem.softcap).tanh()
    sizes = (query.abs() @ key.abs().mT).amax(-1) * scale
    if problem.bias:
        scores = scores + tensors["bias"].double()
        sizes = sizes + tensors["bias"].double().abs().amax(-1)
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1), sizes


def run(
    loaded: Mapping[str, LoadedKernel],
    problem: AttentionProblem,
    config: Config,
    tensors: Mapping[str, Any],
) -> tuple[Any, Any]:
    """One call into poisoned memory."""
    output = problem.output
    out = torch.empty_strided(
        output.shape, output.strides, dtype=getattr(torch, output.dtype), device="cuda"
    ).fill_(math.nan)
    lse = torch.full(output.shape[:3], math.nan, device="cuda")
    size = FAMILY.scratch_bytes(problem, config)
    scratch = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    named = {**tensors, output.name: out, LSE: lse, SCRATCH: scratch}
    stream = torch.cuda.current_stream().cuda_stream
    for launch in FAMILY.launches(problem, config, problem.head_dim**-0.5):
        addresses = [named[ref.operand].data_ptr() + ref.offset_bytes for ref in launch.tensors]
        loaded[launch.kernel].launch(addresses, launch.integers, launch.scalars, 0, stream)
    return out, lse


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, gated: Gated) -> None:
    text, config = CASES[name]
    loaded = gated.loaded(long(text), config)
    for problem in problems(text, LENGTHS):
        for spread, offset in zip(SPREADS, OFFSETS, strict=True):
            tensors = inputs(problem, spread, offset)
            wanted, wanted_lse, sizes = expected(problem, tensors)
            for variant in variants(problem, config):
                assert FAMILY.violations(problem, variant, DEFAULT_GPU) == []
                out, lse = run(loaded, problem, variant, tensors)
                again, lse_again = run(loaded, problem, variant, tensors)
                what = f"{problem.label()}, spread {spread:g}, {variant.params}"
                assert torch.equal(out, again) and torch.equal(lse, lse_again), what
                error = float((out.double() - wanted).norm() / wanted.norm())
                assert error <= LIMITS[problem.dtype], f"{what}: error {error:.1e}"
                wrong = (lse.double() - wanted_lse).abs()
                assert (wrong <= torch.clamp(sizes * 2**-20, min=1e-4)).all(), what


@pytest.mark.parametrize("name", ["bias", "all"])
def test_the_gate_passes_what_modifies_scores(name: str, gated: Gated) -> None:
    text, config = CASES[name]
    for lengths in ("S=640", "SQ=300,SKV=203"):
        problem = AttentionProblem.parse(f"{lengths},{text}")
        gated.passes(problem, variants(problem, config)[0])


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        *((kernel, "bias=h") for kernel in ("cudnn", "efficient", "naive")),
        *((kernel, "bias=b,causal=1") for kernel in ("cudnn", "efficient", "naive")),
    ],
)
def test_vendors_modify_scores_so_too(kernel: str, text: str) -> None:
    """Or say why they do not."""
    problem = AttentionProblem.parse(f"B=2,H=4,S=640,D=64,{text}")
    vendor = family("vendor_sdpa")
    config = Config(vendor.name, {"kernel": kernel})
    call = vendor.vendor_call(problem, config, problem.head_dim**-0.5)
    if isinstance(call, str):
        pytest.skip(call)
    tensors = inputs(problem, 1.0)
    wanted, _, _ = expected(problem, tensors)
    error = float((call(*tensors.values()).double() - wanted).norm() / wanted.norm())
    assert error < 1e-3


def test_a_mask_that_is_added_is_served(own_store: None, compiler: Compiler) -> None:
    """By PyTorch, then by the tuned kernel; a boolean one, which nobody tuned, by PyTorch still."""
    import tuner

    text, config = CASES["bias"]
    problem = AttentionProblem.parse(f"SQ=300,SKV=1000,{text}")
    tensors = inputs(problem, 1.0)
    wanted, _, _ = expected(problem, tensors)
    *qkv, mask = tensors.values()

    def error() -> float:
        out = tuner.attention(*qkv, mask, enable_gqa=True)
        return float((out.double() - wanted).norm() / wanted.norm())

    assert error() < 1e-3
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}
    named = kernels_of(long(text), config)
    futures = dict(compiler.submit(list(named.values())))
    artifacts = {stage: futures[spec].result().key for stage, spec in named.items()}
    store(problem, this_gpu(), variants(problem, config)[0], artifacts=artifacts)
    forget()
    for _ in range(2):
        assert error() < 1e-3
    assert tuner.stats(reset=True).hits == 2
    tuner.attention(*qkv, mask > 0, enable_gqa=True)
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}


def test_chunks_of_long_rows(gated: Gated) -> None:
    """The smallest launches worth trying at 32768 keys, beside the fused operator of PyTorch."""
    text, config = CASES["causal"]
    problem = AttentionProblem.parse(f"S=32768,{text}")
    loaded = gated.loaded(problem, config)
    heads, rows = chunk_sizes(problem)[-1]
    chunk = {"heads_per_launch": heads, "rows_per_launch": rows}
    variant = Config(config.family, {**config.params, **chunk})
    assert FAMILY.violations(problem, variant, DEFAULT_GPU) == []
    tensors = inputs(problem, 1.0)
    out, _ = run(loaded, problem, variant, tensors)
    wanted = torch.nn.functional.scaled_dot_product_attention(*tensors.values(), is_causal=True)
    error = float((out.float() - wanted.float()).norm() / wanted.float().norm())
    assert error <= 2 * LIMITS[problem.dtype]
