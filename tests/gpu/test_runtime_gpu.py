"""`tuner.attention` on the GPU: a compiled kernel and the vendors', against float64.

The entries are written into a store of the test's own, so the decision is known; the kernels are
real. The compiled one is the cheapest legal candidate by estimate of each own family.
"""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tuner.compiler import Compiler
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families import families_of, family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.gpu

SHAPES = [
    "S=1024,D=64",
    "B=2,H=4,S=512,D=128,causal=1,dtype=bf16,layout=bshd",
    "B=2,H=8,HKV=2,S=512,D=64",
]
VENDORS = ("cudnn", "flash2", "efficient", "flash3", "flash4")
OWN = [name for name, member in families_of("attention").items() if not member.is_vendor]
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    needed: list[KernelSpec] = []
    if torch.cuda.is_available():
        for name, shape in itertools.product(OWN, SHAPES):
            problem = AttentionProblem.parse(shape)
            for config in promising(problem, this_gpu(), name)[:1]:
                needed += family(name).kernels(problem, config).values()
    return list(dict.fromkeys(needed))


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of the test's own beside the shared artifacts, and a process that knows nothing."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    monkeypatch.setenv("TUNER_STORE", f"sqlite:///{tmp_path / 'store.sqlite'}")
    monkeypatch.delenv("TUNER_DISABLE", raising=False)
    dispatch = importlib.import_module("tuner.runtime.attention")
    for part in (dispatch._known, dispatch._withdrawn, dispatch._said):
        part.clear()
    yield


@pytest.fixture
def gpu() -> Gpu:
    return this_gpu()


def this_gpu() -> Gpu:
    return importlib.import_module("tuner.runtime.attention").gpu_of(torch.cuda.current_device())


def inputs(problem: AttentionProblem) -> list[Any]:
    made = []
    for operand in problem.operands[:3]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device="cuda"
        )
        made.append(tensor.copy_(torch.randn(operand.shape, device="cuda")))
    return made


def error(out: Any, problem: AttentionProblem, tensors: list[Any], scale: float) -> float:
    """Relative Frobenius error against attention written out in float64."""
    query, key, value = (t.double() for t in tensors)
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = scale * query @ key.mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1) @ value
    return float((out.double() - wanted).norm() / wanted.norm())


def store(problem: AttentionProblem, gpu: Gpu, config: Config, **changes: Any) -> None:
    """Decide that `config` won."""
    from tuner.store import open_store

    base = Measurement(
        problem=problem,
        config=config,
        gpu=gpu,
        regime=Regime.default("attention"),
        status=Status.OK,
        latency_us=1.0,
        rounds=20,
        is_final=True,
        created_at="2026-01-01T00:00:00+00:00",
    ).but(**changes)
    with open_store() as opened:
        opened.decide(problem, gpu, base.regime, [base], "test")


@cache
def promising(problem: AttentionProblem, gpu: Gpu, name: str) -> list[Config]:
    """The three most promising candidates of a family, its stages' own best in them."""
    member = family(name)
    if stages := member.stages(problem):
        best: dict[str, list[Config]] = {}
        for stage, part in stages.items():
            own = [f for f in families_of(part.op).values() if not f.is_vendor]
            best[stage] = own[0].seeds(part, gpu, own[0].space(part, gpu), 1)
        member = member.with_stages(best)
    space = member.space(problem, gpu)
    return member.seeds(problem, gpu, space, 3) if space else []


def compiled(
    compiler: Compiler, problem: AttentionProblem, gpu: Gpu, name: str
) -> tuple[Config, dict[str, str]]:
    """The most promising config of a family that compiles, and its artifacts."""
    candidates = promising(problem, gpu, name)
    if not candidates:
        pytest.skip(f"{name} has no candidate for {problem.label()}")
    for config in candidates:
        specs = family(name).kernels(problem, config)
        futures = compiler.submit(list(specs.values()))
        try:
            keys = [future.result().key for _, future in futures]
        except CompileError:
            continue
        return config, dict(zip(specs, keys, strict=True))
    pytest.fail(f"none of {name}'s three most promising candidates compiles")


@pytest.mark.compile
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OWN)
def test_an_own_kernel_is_launched_and_right(
    name: str, shape: str, compiler: Compiler, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    import tuner

    problem = AttentionProblem.parse(shape)
    config, artifacts = compiled(compiler, problem, gpu, name)
    store(problem, gpu, config, artifacts=artifacts)
    for scale in (problem.head_dim**-0.5, 0.05):
        tensors = inputs(problem)
        with caplog.at_level(logging.INFO, "tuner.runtime"):
            out = tuner.attention(*tensors, is_causal=problem.is_causal, scale=scale)
        assert not caplog.records, f"{config.to_json()}: {caplog.text}"
        assert out.shape == problem.output.shape and out.stride() == problem.output.strides
        seen = error(out, problem, tensors, scale)
        assert seen < TOLERANCE[problem.dtype], f"{config.to_json()}: error {seen}"


@pytest.mark.compile
def test_an_own_kernel_inside_a_graph_on_a_stream_of_its_own(compiler: Compiler, gpu: Gpu) -> None:
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
    for _ in range(3):
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, device="cuda"))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert error(out, problem, tensors, 0.125) < TOLERANCE["float16"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", VENDORS)
def test_a_vendor_that_won_is_called_and_right(
    kernel: str, shape: str, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    import tuner

    problem = AttentionProblem.parse(shape)
    config = Config("vendor_sdpa", {"kernel": kernel})
    call = family("vendor_sdpa").vendor_call(problem, config, 0.1)
    if isinstance(call, str):
        pytest.skip(call)
    store(problem, gpu, config)
    tensors = inputs(problem)
    with caplog.at_level(logging.INFO, "tuner.runtime"):
        out = tuner.attention(*tensors, is_causal=problem.is_causal, scale=0.1)
    assert not caplog.records, caplog.text
    assert error(out, problem, tensors, 0.1) < TOLERANCE[problem.dtype]


@pytest.mark.parametrize("kernel", VENDORS)
def test_a_vendor_can_be_captured(kernel: str) -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    config = Config("vendor_sdpa", {"kernel": kernel})
    call = family("vendor_sdpa").vendor_call(problem, config, 0.125)
    if isinstance(call, str):
        pytest.skip(call)
    tensors = inputs(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call(*tensors)
    tensors[0].copy_(torch.randn(tensors[0].shape, device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, problem, tensors, 0.125) < TOLERANCE["float16"]


@pytest.mark.parametrize("kernel", ["cublas", "cublaslt"])
@pytest.mark.parametrize(
    "shape", ["M=512,N=768,K=256", "M=512,N=768,K=256,layout_a=col,layout_b=row,B=3,dtype_d=fp32"]
)
def test_blas_is_right_in_a_graph(kernel: str, shape: str) -> None:
    from tuner.problem import GemmProblem

    problem = GemmProblem.parse(shape)
    call = family("vendor_blas").vendor_call(
        problem, Config("vendor_blas", {"kernel": kernel}), 1.0
    )
    assert not isinstance(call, str), call
    a, b = (
        torch.empty_strided(o.shape, o.strides, dtype=torch.float16, device="cuda").copy_(
            torch.randn(o.shape, device="cuda")
        )
        for o in problem.operands[:2]
    )
    before = torch.backends.cuda.preferred_blas_library()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call(a, b)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    wanted = a.double() @ b.double()
    assert (out.double() - wanted).norm() / wanted.norm() < 1e-3
    assert torch.backends.cuda.preferred_blas_library() == before


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_nothing_unmeasured_is_launched(
    provenance: Provenance, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    import tuner

    problem = AttentionProblem.parse("S=1024,D=64")
    store(problem, gpu, Config("vendor_sdpa", {"kernel": "efficient"}), provenance=provenance)
    tensors = inputs(problem)
    with caplog.at_level(logging.INFO, "tuner.runtime"):
        out = tuner.attention(*tensors)
    assert "not measured" in caplog.text or "no measured winner" in caplog.text
    assert torch.equal(out, torch.nn.functional.scaled_dot_product_attention(*tensors))


def test_environment_names_the_libraries() -> None:
    assert family("vendor_sdpa").environment()["cudnn"].count(".") >= 2
    assert family("vendor_blas").environment()["cublas"].count(".") >= 2
