"""Views that models give attention and products, served where they lie: by Python and by C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runtime_gpu import (
    TOLERANCE,
    call_path,
    compiled,
    error,
    first_kernels,
    fresh_store,
    served_gpu,
    store,
)

from tuner.compile.compiler import Compiler
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.usefixtures("own_store"),
]

own_store, path, gpu = fresh_store, call_path, served_gpu

B, H, HKV, S, D = 2, 8, 2, 640, 64
SIZES = f"B={B},H={H},S={S},D={D},causal=1"
GROUPED = f"{SIZES},HKV={HKV}"


def half(*shape: int) -> Any:
    return torch.randn(shape, device="cuda").half()


def split() -> list[Any]:
    parts = half(B, S, 3 * H * D).split(H * D, dim=2)
    return [t.view(B, S, H, D).transpose(1, 2) for t in parts]


def grouped_split() -> list[Any]:
    parts = half(B, S, (H + 2 * HKV) * D).split((H * D, HKV * D, HKV * D), dim=2)
    return [t.unflatten(2, (-1, D)).transpose(1, 2) for t in parts]


def interleaved() -> list[Any]:
    return [t.transpose(1, 2) for t in half(B, S, 3, H, D).unbind(2)]


def in_cache() -> list[Any]:
    return [half(B, H, S, D), *half(2, B, H, 2 * S, D)[..., :S, :]]


def tokens_first() -> list[Any]:
    return [half(S, B, H, D).permute(1, 2, 0, 3) for _ in range(3)]


def one_head() -> list[Any]:
    return [half(B, H, S, D), *half(2, B, 1, S, D).expand(2, B, H, S, D)]


#: Tensors, and the problem that they pose.
VIEWS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "split": (split, f"{SIZES},layout=bshd"),
    "grouped split": (grouped_split, f"{GROUPED},layout=bshd"),
    "interleaved": (interleaved, f"{SIZES},layout=bshd"),
    "in a cache": (in_cache, SIZES),
    "tokens first": (tokens_first, f"{SIZES},layout=bshd"),
    "one head": (one_head, f"{SIZES},HKV=1"),
}
PRODUCTS = {"gemm": GemmProblem(512, 768, 256), "gemv": GemmProblem(8, 768, 256)}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    needed: list[KernelSpec] = []
    for shape in {shape for _, shape in VIEWS.values()}:
        needed += first_kernels(AttentionProblem.parse(shape), "fused_attention")
    for name, problem in PRODUCTS.items():
        needed += first_kernels(problem, name)
    return list(dict.fromkeys(needed))


def decide(shape: str, compiler: Compiler, gpu: Gpu, **changes: Any) -> AttentionProblem:
    """The most promising kernel wins; `changes` are made to its parameters."""
    problem = AttentionProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, "fused_attention")
    if changes:
        member = family("fused_attention")
        config = next(
            c
            for c in member.space(problem, gpu)
            if all(c.get(name) == value for name, value in changes.items())
        )
        specs = member.kernels(problem, config)
        keys = [future.result().key for _, future in compiler.submit(list(specs.values()))]
        artifacts = dict(zip(specs, keys, strict=True))
    store(problem, gpu, config, artifacts=artifacts)
    return problem


def check(tensors: list[Any], problem: AttentionProblem) -> None:
    import tuner

    for _ in range(2):
        grouped = problem.heads_kv != problem.heads_q
        out = tuner.attention(*tensors, is_causal=True, enable_gqa=grouped)
        assert error(out, problem, tensors, D**-0.5) < TOLERANCE["float16"]
        assert out.stride() == torch.empty_like(tensors[0]).stride()
    assert tuner.stats(reset=True).hits == 2, tuner.stats()


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_served_where_it_lies(name: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    made, shape = VIEWS[name]
    tensors, problem = made(), decide(shape, compiler, gpu)
    if name == "one head":  # the error is of the expanded keys
        check(tensors, AttentionProblem.parse(SIZES))
    else:
        check(tensors, problem)


@pytest.mark.parametrize("name", ["split", "in a cache", "tokens first"])
def test_an_output_that_is_staged(name: str, compiler: Compiler, gpu: Gpu) -> None:
    made, shape = VIEWS[name]
    check(made(), decide(shape, compiler, gpu, stages_output=True))


@pytest.mark.parametrize("name", VIEWS)
def test_gradients_of_a_view(name: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    made, shape = VIEWS[name]
    problem = decide(shape, compiler, gpu)
    tensors = [t.detach() for t in made()]
    grad = half(B, H, S, D)
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    given = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    views = [t.requires_grad_() for t in tensors]
    found = torch.autograd.grad(
        tuner.attention(*views, is_causal=True, enable_gqa=grouped), views, grad
    )
    assert tuner.stats().hits == 1, (problem.label(), tuner.stats())
    wanted = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(
            *(t.float() for t in given), is_causal=True, enable_gqa=grouped
        ),
        given,
        grad.float(),
    )
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other.float()).norm() / other.float().norm() < 5e-3


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_a_wider_tensor(name: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    problem = PRODUCTS[name]
    config, artifacts = compiled(compiler, problem, gpu, name)
    store(problem, gpu, config, artifacts=artifacts)
    wide, weights = half(problem.m, 3 * problem.k), half(problem.n, 2 * problem.k)
    for a, w in (
        (wide[:, problem.k : 2 * problem.k], weights[:, : problem.k].contiguous()),
        (wide[:, : problem.k], weights[:, problem.k :]),
        (half(problem.m, 5, problem.k)[:, -1], weights[:, problem.k :]),
    ):
        for _ in range(2):
            out = tuner.linear(a, w)
        wanted = a.double() @ w.double().t()
        assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    assert tuner.stats().hits == 6, tuner.stats()


def test_compiled_models_reach_tuned_kernels(compiler: Compiler, gpu: Gpu) -> None:
    """GPT-2's views, in Inductor's graph."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import tuner
    import tuner.runtime.engines.transformers

    decide(f"{SIZES},layout=bshd", compiler, gpu)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=512, n_embd=H * D, n_layer=2, n_head=H, n_positions=S, attn_pdrop=0.0
    )
    logits = []
    ids = torch.randint(0, 512, (B, S), device="cuda")
    model = transformers.GPT2LMHeadModel(config).eval().half().cuda()
    for implementation in ("tuner", "sdpa"):
        torch._dynamo.reset()
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits.append(torch.compile(model)(ids, use_cache=False).logits.float())
    assert tuner.stats().hits == 2, tuner.stats()
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < 1e-2
