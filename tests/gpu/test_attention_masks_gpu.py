"""Sliding windows and soft caps on the GPU against float64: our own kernel, its log-sum-exp, the
vendors' kernels that have them, and `tuner.attention` with and without a tuned kernel."""

from __future__ import annotations

import itertools
import math
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
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile]
own_store = fresh_store

FAMILY = family("fused_attention")
LIMITS = {"float16": 6e-4, "bfloat16": 5e-3}
LENGTHS = [(1, 1), (7, 300), (63, 65), (129, 127), (300, 40), (1000, 1000), (1337, 999)]
SIDES = (0, 1, 7, 64, 100, 1000)
CAPS = (15.0, 30.0, 50.0)
#: Standard deviation of the scaled scores.
SPREADS = (1.0, 30.0)
make = maker(early_exp=50, ping_pong=True)

#: Heads, head dimension, type and mask of a problem (what a kernel is compiled for), and a config.
WINDOWED = {
    "causal": (
        "B=2,H=3,D=64,causal=1", make(2, 128, 1, persistent=True)
    ),
    "full, packed": (
        "B=2,H=8,HKV=2,D=64,layout=bshd", make(2, 96, 2, packed_heads=4)
    ),
    "full, padded": ("B=2,H=14,HKV=2,D=64", make(1, 64, packed_heads=8, pads_heads=True)),
    "causal, packed, capped": (
        "B=1,H=4,HKV=2,D=128,causal=1,softcap=30,dtype=bf16",
        make(2, 80, 1, packed_heads=2, key_groups=2, ping_pong=False),
    ),
}  # fmt: skip
CAPPED = {
    "full": ("B=2,H=2,D=64", make(2, 128, 2)),
    "causal": ("B=2,H=2,D=128,causal=1", make(2, 128, 1, persistent=True)),
}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    found = [spec(f"S=4096,{text},window=9", config) for text, config in WINDOWED.values()]
    return found + [spec(f"S=4096,{text},softcap=9", config) for text, config in CAPPED.values()]


def spec(text: str, config: Config) -> KernelSpec:
    return FAMILY.kernels(AttentionProblem.parse(text), config)["attention"]


def compiled(compiler: Compiler, text: str, config: Config) -> LoadedKernel:
    [(_, future)] = compiler.submit([spec(text, config)])
    return load(future.result())


def inputs(problem: AttentionProblem, spread: float = 1.0) -> list[Any]:
    """Normal (B, H, S, D) views; queries times `spread`."""
    generator = torch.Generator("cuda").manual_seed(problem.pairs)
    made = []
    for operand in problem.operands[:-1]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device="cuda"
        )
        made.append(tensor.copy_(torch.randn(operand.shape, generator=generator, device="cuda")))
    made[0] *= spread
    return made


def expected(problem: AttentionProblem, tensors: list[Any]) -> tuple[Any, Any]:
    """Output and log-sum-exp in float64, at the default scale."""
    query, key, value = (t.double() for t in tensors)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * problem.head_dim**-0.5
    if problem.softcap:
        scores = problem.softcap * (scores / problem.softcap).tanh()
    left, right = problem.visible
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril(right).triu(-left)
    scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0) @ value, scores.logsumexp(-1)


def term_sizes(problem: AttentionProblem, tensors: list[Any]) -> Any:
    """Of each query the largest sum of its products' sizes with a key: the tensor cores add them
    up with some 22 bits, whatever is left of them in the end.
    """
    query, key = (t.double().abs() for t in tensors[:2])
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query @ key.mT).amax(-1) * problem.head_dim**-0.5


def check(kernel: LoadedKernel, problem: AttentionProblem, config: Config, spread: float) -> None:
    """One launch into poisoned memory, and a second one that must leave the same bits."""
    assert FAMILY.violations(problem, config, DEFAULT_GPU) == []
    tensors = inputs(problem, spread)
    output = problem.output
    (launch,) = FAMILY.launches(problem, config, problem.head_dim**-0.5)
    size = max(1, kernel.workspace_bytes(launch.integers))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    results = []
    for _ in range(2):
        out = torch.empty_strided(
            output.shape, output.strides, dtype=getattr(torch, output.dtype), device="cuda"
        ).fill_(math.nan)
        lse = torch.full(output.shape[:3], math.nan, device="cuda")
        addresses = [t.data_ptr() for t in (*tensors, out, lse)]
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(addresses, launch.integers, launch.scalars, workspace.data_ptr(), stream)
        results.append((out, lse))
    (out, lse), again = results
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    wanted, wanted_lse = expected(problem, tensors)
    norm = wanted.norm()
    error = float((out.double() - wanted).norm() / norm)
    what = f"{problem.label()}, spread {spread:g}"
    assert error <= LIMITS[problem.dtype], f"{what}: error {error:.1e}"
    unseen = wanted_lse == -math.inf
    assert (out[unseen] == 0).all(), f"{what}: a query without keys is not zero"
    assert torch.equal(lse == -math.inf, unseen), what
    wrong = (lse.double() - wanted_lse)[~unseen].abs()
    allowed = torch.clamp(term_sizes(problem, tensors)[~unseen] * 2**-20, min=1e-4)
    assert (wrong <= allowed).all(), f"{what}: log-sum-exp off by {float(wrong.max()):.1e}"


@pytest.mark.parametrize("name", WINDOWED)
def test_windows(name: str, compiler: Compiler) -> None:
    text, config = WINDOWED[name]
    kernel = compiled(compiler, f"S=4096,{text},window=9", config)
    is_causal, count = "causal" in text, 0
    for (queries, keys), left in itertools.product(LENGTHS, (-1, *SIDES)):
        for right in (-1,) if is_causal else (-1, 7, left):
            shape = f"SQ={queries},SKV={keys},{text},left={left},right={right}"
            problem = AttentionProblem.parse(shape)
            # What hides nothing, or nothing but what a causal mask does, is another kernel's.
            if problem.is_windowed and problem.is_causal == is_causal:
                check(kernel, problem, config, SPREADS[count % 2])
                count += 1
    assert count > 20


@pytest.mark.parametrize("name", ["full, packed", "causal, packed, capped"])
def test_a_window_over_split_keys(name: str, compiler: Compiler) -> None:
    """Some splits of a tile have no keys of its window; with 40, most have none."""
    text, config = WINDOWED[name]
    kernel = compiled(compiler, f"S=4096,{text},window=9", config)
    for (queries, keys), left, splits in itertools.product(LENGTHS, (0, 64, 1000), (2, 7, 40)):
        split = Config(config.family, {**config.params, "splits": splits, "combine": "kernel"})
        right = "" if "causal" in text else ",right=7"
        problem = AttentionProblem.parse(f"SQ={queries},SKV={keys},{text},left={left}{right}")
        if problem.is_windowed:
            check(kernel, problem, split, SPREADS[splits % 2])


@pytest.mark.parametrize("name", CAPPED)
def test_soft_caps(name: str, compiler: Compiler) -> None:
    text, config = CAPPED[name]
    kernel = compiled(compiler, f"S=4096,{text},softcap=9", config)
    for (queries, keys), softcap, spread in itertools.product(LENGTHS, CAPS, SPREADS):
        problem = AttentionProblem.parse(f"SQ={queries},SKV={keys},{text},softcap={softcap}")
        check(kernel, problem, config, spread)


def test_a_soft_cap_over_split_keys(compiler: Compiler) -> None:
    text, config = CAPPED["full"]
    kernel = compiled(compiler, f"S=4096,{text},softcap=9", config)
    split = Config(config.family, {**config.params, "splits": 3, "combine": "kernel"})
    for softcap, spread in itertools.product(CAPS, SPREADS):
        problem = AttentionProblem.parse(f"SQ=65,SKV=1000,{text},softcap={softcap}")
        check(kernel, problem, split, spread)


def test_tanh_of_every_size(compiler: Compiler) -> None:
    """Scores from far below the cap to far above it, infinite powers of two among them."""
    text, config = CAPPED["full"]
    kernel = compiled(compiler, f"S=4096,{text},softcap=9", config)
    for spread in (1e-3, 0.1, 300.0, 3000.0):
        problem = AttentionProblem.parse(f"S=300,{text},softcap=2")
        check(kernel, problem, config, spread)


@pytest.mark.parametrize("kernel", ["flash2", "naive"])
@pytest.mark.parametrize("window", ["causal=1,left=100", "left=64,right=7", "right=100"])
def test_vendors_compute_the_same_window(kernel: str, window: str) -> None:
    problem = AttentionProblem.parse(f"B=2,H=4,HKV=2,S=600,D=64,{window}")
    call = family("vendor_sdpa").vendor_call(
        problem, Config("vendor_sdpa", {"kernel": kernel}), problem.head_dim**-0.5
    )
    assert not isinstance(call, str), call
    tensors = inputs(problem)
    wanted, _ = expected(problem, tensors)
    assert float((call(*tensors).double() - wanted).norm() / wanted.norm()) < 1e-3


def test_a_model_is_served_with_and_without_a_tuned_kernel(
    own_store: None, compiler: Compiler
) -> None:
    import tuner

    text, config = WINDOWED["causal"]
    problem = AttentionProblem.parse(f"S=1000,{text},window=100")
    tensors = inputs(problem)
    wanted, _ = expected(problem, tensors)
    plain, _ = expected(AttentionProblem.parse(f"S=1000,{text}"), tensors)

    def error(reference: Any, **options: Any) -> float:
        out = tuner.attention(*tensors, is_causal=True, **options)
        return float((out.double() - reference).norm() / reference.norm())

    assert error(wanted, window=(100, 0)) < 1e-3  # composed
    assert tuner.stats(reset=True).fallbacks == {"no measured winner": 1}

    [(_, future)] = compiler.submit([spec(problem.label(), config)])
    store(problem, this_gpu(), config, artifacts={"attention": future.result().key})
    forget()
    for _ in range(2):
        assert error(wanted, window=(100, 0)) < 1e-3
    assert tuner.stats(reset=True).hits == 2
    assert error(plain) < 1e-3  # a plain call is not given the windowed kernel
