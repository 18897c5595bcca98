"""`tuner.attention`, `linear` and `matmul` on the GPU: compiled kernels and the vendors', against
float64; through Python and through the C++ dispatcher; in graphs and after errors.

The entries are written into a store of the test's own, so the decision is known; the kernels are
real. The compiled one is the cheapest legal candidate by estimate of each own family.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
from runtime_gpu import (
    OWN,
    SHAPES,
    TOLERANCE,
    call_path,
    compiled,
    error,
    first_kernels,
    fresh_store,
    grouped,
    inputs,
    part,
    served_gpu,
    store,
)

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_store")]

own_store, path, gpu = fresh_store, call_path, served_gpu

VENDORS = ("cudnn", "flash2", "efficient", "flash3", "flash4")
PRODUCTS = ["M=512,N=768,K=256", "M=256,N=512,K=512,layout_b=row,B=3"]
GATED = SwigluProblem(300, 768, 256)
SCALED_SHAPE = "M=300,N=768,K=256,dtype=e4m3,scales={}"
SCALED = ["tensor,fast_accum=1", "row,fast_accum=0"]
LAYERS = ["M=300,N=768,K=256,epilogue=bias", "M=300,N=768,K=256,dtype=bf16,epilogue=bias_gelu"]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    needed: list[KernelSpec] = []
    for name, shape in itertools.product(OWN, SHAPES):
        needed += first_kernels(AttentionProblem.parse(shape), name)
    for shape in (*PRODUCTS, *LAYERS, *map(SCALED_SHAPE.format, SCALED)):
        needed += first_kernels(GemmProblem.parse(shape), "gemm")
    return list(dict.fromkeys([*needed, *first_kernels(GATED, "gemm_swiglu")]))


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OWN)
def test_an_own_kernel_is_launched_and_right(
    name: str, shape: str, path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = AttentionProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, name)
    store(problem, gpu, config, artifacts=artifacts)
    for scale in (problem.head_dim**-0.5, 0.05):
        tensors = inputs(problem)
        for _ in range(2):
            out = tuner.attention(*tensors, scale=scale, **grouped(problem))
        assert tuner.stats(reset=True).hits == 2, tuner.stats()
        assert out.shape == problem.output.shape and out.stride() == problem.output.strides
        seen = error(out, problem, tensors, scale)
        assert seen < TOLERANCE[problem.dtype], f"{config.to_json()}: error {seen}"


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
def test_the_log_sum_exp_is_natural_and_single(shape: str, compiler: Compiler, gpu: Gpu) -> None:
    names = [name for name in OWN if family(name).writes_lse]
    if not names:
        pytest.skip("no family writes the log-sum-exp")
    problem = AttentionProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, names[0])
    store(problem, gpu, config, artifacts=artifacts)
    query, key, value = inputs(problem)
    plan = part("attention.attention_call").find_plan(query, key, value, problem.is_causal, 0.1)
    assert not isinstance(plan, str), plan
    assert plan.has_lse
    out, lse = plan.run_with_lse(query, key, value)
    assert torch.equal(out, plan.run(query, key, value))
    repeats = problem.heads_q // problem.heads_kv
    scores = 0.1 * query.double() @ key.double().repeat_interleave(repeats, 1).mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    assert (lse.shape, lse.dtype) == (scores.shape[:3], torch.float32)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=2e-3, rtol=1e-4)


@pytest.mark.compile
@pytest.mark.parametrize("shape", PRODUCTS)
def test_a_product_is_launched_and_right(
    shape: str, path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = GemmProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, "gemm")
    store(problem, gpu, config, artifacts=artifacts)
    a, b = inputs(problem)
    if problem.batch == 1:
        a, b = a[0], b[0]
    for _ in range(2):
        out = tuner.matmul(a, b)
    wanted = a.double() @ b.double()
    assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    if problem.batch == 1:
        assert torch.equal(tuner.linear(a, b.t()), out)
    assert tuner.stats().fallbacks == {}


@pytest.mark.compile
@pytest.mark.parametrize("shape", LAYERS)
def test_a_layer_is_launched_and_right(shape: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    problem = GemmProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, "gemm")
    store(problem, gpu, config, artifacts=artifacts)
    a, b, bias = inputs(problem)
    activation = problem.activation or None
    for _ in range(2):
        out = tuner.linear(a.view(3, 100, -1), b[0].t(), bias, activation=activation)
    wanted = a.double() @ b.double() + bias.double()
    wanted = torch.nn.functional.gelu(wanted) if activation else wanted
    assert out.shape == (3, 100, problem.n)
    error = (out.double() - wanted.view_as(out)).norm() / wanted.norm()
    assert error < (8e-3 if problem.dtype == "bfloat16" else 1e-3)
    assert tuner.stats().fallbacks == {}


@pytest.mark.compile
@pytest.mark.parametrize("scales", SCALED)
def test_a_scaled_product_is_launched_and_right(scales: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    problem = GemmProblem.parse(SCALED_SHAPE.format(scales))
    config, artifacts = compiled(compiler, problem, gpu, "gemm")
    store(problem, gpu, config, artifacts=artifacts)
    a, b, scale_a, scale_b = inputs(problem)
    given = a[0], b[0], scale_a.view(-1, 1), scale_b.view(1, -1)
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": problem.fast_accum}
    out = tuner.scaled_mm(*given, **options)
    assert tuner.stats().fallbacks == {} and tuner.stats().hits == 1
    wanted = given[2].double() * (given[0].double() @ given[1].double()) * given[3].double()
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3
    peer = torch._scaled_mm(*given, **options)
    assert (out.double() - peer.double()).norm() / wanted.norm() < 8e-3


@pytest.mark.compile
def test_a_gated_layer_is_launched_and_right(compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    config, artifacts = compiled(compiler, GATED, gpu, "gemm_swiglu")
    store(GATED, gpu, config, artifacts=artifacts)
    a = torch.randn(3, 100, GATED.k, device="cuda").half()
    gate, up = (torch.randn(GATED.n, GATED.k, device="cuda").half() / 16 for _ in range(2))
    out = tuner.swiglu(a, tuner.interleave(gate, up))
    wanted = torch.nn.functional.silu(a.double() @ gate.double().T) * (a.double() @ up.double().T)
    assert out.shape == wanted.shape
    assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    assert tuner.stats().fallbacks == {}


@pytest.mark.compile
def test_an_own_kernel_inside_a_graph_on_a_stream_of_its_own(
    path: str, compiler: Compiler, gpu: Gpu
) -> None:
    import tuner

    problem = AttentionProblem.parse(SHAPES[0])
    config, artifacts = compiled(compiler, problem, gpu, OWN[0])
    store(problem, gpu, config, artifacts=artifacts)
    tensors = inputs(problem)
    tuner.attention(*tensors)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tuner.attention(*tensors)
    assert tuner.stats().hits == 2
    for _ in range(3):
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert error(out, problem, tensors, 0.125) < TOLERANCE["float16"]


@pytest.mark.compile
def test_a_refused_launch_is_answered_by_pytorch(
    path: str, compiler: Compiler, gpu: Gpu, planted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tuner

    problem = GemmProblem.parse(PRODUCTS[0])
    config = planted.faulty("refused")
    monkeypatch.setattr(part("call.plan"), "family", lambda name: planted.Planted())
    specs = planted.Planted().kernels(problem, config)
    ((_, future),) = compiler.submit(list(specs.values()))
    store(problem, gpu, config, artifacts={"main": future.result().key})
    a, b = (matrix[0] for matrix in inputs(problem))
    for _ in range(3):
        assert torch.equal(tuner.matmul(a, b), torch.matmul(a, b))
    assert tuner.stats().errors == {"a launch was refused": 1}
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", VENDORS)
def test_a_vendor_that_won_is_called_and_right(kernel: str, shape: str, gpu: Gpu) -> None:
    import tuner

    problem = AttentionProblem.parse(shape)
    config = Config("vendor_sdpa", {"kernel": kernel})
    call = family("vendor_sdpa").vendor_call(problem, config, 0.1)
    if isinstance(call, str):
        pytest.skip(call)
    store(problem, gpu, config)
    tensors = inputs(problem)
    out = tuner.attention(*tensors, scale=0.1, **grouped(problem))
    assert (tuner.stats().hits, tuner.stats().fallbacks) == (1, {})
    assert error(out, problem, tensors, 0.1) < TOLERANCE[problem.dtype]


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_nothing_unmeasured_is_launched(
    provenance: Provenance, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    import tuner

    problem = AttentionProblem.parse("H=3,S=200,D=64")  # far from everything that ships
    store(problem, gpu, Config("vendor_sdpa", {"kernel": "efficient"}), provenance=provenance)
    tensors = inputs(problem)
    with caplog.at_level(logging.INFO, "tuner.runtime"):
        out = tuner.attention(*tensors)
    assert "not measured" in caplog.text
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(*tensors))


def test_environment_names_the_libraries() -> None:
    assert family("vendor_sdpa").environment()["cudnn"].count(".") >= 2
    assert family("vendor_blas").environment()["cublas"].count(".") >= 2
