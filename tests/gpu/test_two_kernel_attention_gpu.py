"""Attention as two kernels on the GPU, through the gate: at lengths that cut tiles and launches, in
chunks, with soft caps and biases, the latter beside vendors' kernels; and served.
"""

from __future__ import annotations

import pytest
from gating import Gated, kernels_of, specs_of
from runtime_gpu import forget, fresh_store, inputs, store, this_gpu
from two_kernel_cases import CASES, LENGTHS, problems, variants

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.two_kernel_attention import chunk_sizes
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]

own_store = fresh_store
FAMILY = family("two_kernel_attention")


def long(text: str) -> AttentionProblem:
    return AttentionProblem.parse(f"S=4096,{text}")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(long(text), config) for text, config in CASES.values()])


@pytest.mark.parametrize("name", CASES)
def test_kernels_pass_the_gate(name: str, gated: Gated) -> None:
    text, config = CASES[name]
    for problem in problems(text, LENGTHS):
        for variant in variants(problem, config):
            gated.passes(problem, variant)


@pytest.mark.parametrize("name", ["causal", "all"])
def test_launches_leave_the_same_bits(name: str, gated: Gated) -> None:
    text, config = CASES[name]
    problem = AttentionProblem.parse(f"SQ=300,SKV=203,{text}")
    for variant in variants(problem, config):
        gated.repeats(problem, variant, count=3)


@pytest.mark.parametrize("text", ["bias=h", "bias=b,causal=1"])
@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "naive"])
def test_vendors_modify_scores_so_too(kernel: str, text: str, gated: Gated) -> None:
    """Or say why they do not."""
    problem = AttentionProblem.parse(f"B=2,H=4,S=640,D=64,{text}")
    gated.passes(problem, Config("vendor_sdpa", {"kernel": kernel}), ["random"])


def test_a_mask_that_is_added_is_served(own_store: None, compiler: Compiler) -> None:
    """By PyTorch, then by the tuned kernel; a boolean one, which nobody tuned, by PyTorch still."""
    import tuner

    text, config = CASES["bias"]
    problem = AttentionProblem.parse(f"SQ=300,SKV=1000,{text}")
    *qkv, mask = inputs(problem)
    attend = torch.nn.functional.scaled_dot_product_attention
    wanted = attend(*(t.double() for t in qkv), mask.double(), enable_gqa=True)

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
    """The smallest launches worth trying at 32768 keys."""
    text, config = CASES["causal"]
    problem = AttentionProblem.parse(f"S=32768,{text}")
    heads, rows = chunk_sizes(problem)[-1]
    chunk = {"heads_per_launch": heads, "rows_per_launch": rows}
    gated.passes(problem, Config(config.family, {**config.params, **chunk}), ["random"])
