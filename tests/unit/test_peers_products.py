"""Vendors' products, softmax and gated products agree with fp64; what Inductor compiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peer_cases import (
    forget_peers_fixture,
    needs_torch,
    tensors,
)

from tuner.config import Config
from tuner.families import family
from tuner.families.peers import (
    MAX_AUTOTUNE,
    compiled,
    tried,
)
from tuner.families.peers import sdpa as sdpa
from tuner.families.peers.blas import (
    addmm,
    addmm_activation,
    as_in_a_model,
    matmul,
    scaled_mm,
    unfused,
)
from tuner.families.peers.grouped_gemm import grouped, in_turn
from tuner.families.peers.softmax import softmax
from tuner.families.peers.swiglu import INTERLEAVED, interleaved, swiglu
from tuner.hardware import DEFAULT_GPU
from tuner.problem import (
    E4M3,
    EPILOGUE_SCALES,
    EPILOGUES,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

forget_peers = forget_peers_fixture  # for every test here


@needs_torch
def test_deep_gemm_agrees_with_fp64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_gemm_peer.py").write_text(
        "class module:\n"
        "    def bf16_gemm_nt(a, b, d, c):\n"
        "        assert a.is_contiguous() and b.is_contiguous() and c is None\n"
        "        d.copy_(a @ b.T)\n"
    )
    monkeypatch.setenv("TUNER_PEERS_PATH", str(tmp_path))
    member, problem = family("vendor_blas"), GemmProblem(48, 32, 64, dtype="bfloat16")
    call = member.connect(problem, "deep_gemm", 1.0)  # type: ignore[attr-defined]
    a, b = tensors(problem)
    wanted = a.double() @ b.double()
    out = tried(call, problem, "deep_gemm", "cpu")(a, b)  # type: ignore[operator]
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3
    for change in (
        {"dtype": "float16", "dtype_d": ""},
        {"epilogue": "bias"},
        {"layout_b": "row"},
        {"batch": 2},
    ):
        other = replace(problem, **change)  # type: ignore[arg-type]
        config = Config("vendor_blas", {"kernel": "deep_gemm"})
        assert len(member.violations(other, config, DEFAULT_GPU)) == 1


@needs_torch
@pytest.mark.parametrize(
    "shape",
    [
        "M=48,N=32,K=64",
        "M=48,N=32,K=64,layout_a=col,layout_b=row",
        "M=48,N=32,K=64,layout_a=col,layout_b=col,B=3,dtype=bf16",
        "M=1,N=32,K=64,layout_a=row,layout_b=row,B=2",
    ],
)
def test_matmul_agrees_with_fp64(shape: str) -> None:
    problem = GemmProblem.parse(shape)
    call = tried(matmul(problem), problem, "cublas", "cpu")
    assert not isinstance(call, str), call
    a, b = tensors(problem)
    out = call(a, b)
    wanted = a.double() @ b.double()
    assert out.shape == problem.output.shape
    assert (out.double() - wanted).norm() / wanted.norm() < (8e-3 if "bf16" in shape else 1e-3)


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_every_way_of_an_epilogue_agrees_with_fp64(epilogue: str, dtype: Any) -> None:
    import torch

    problem = GemmProblem(48, 32, 64, dtype=dtype, epilogue=epilogue)
    member = family("vendor_blas")
    ways = {
        "cublas": unfused,
        "addmm": addmm,
        "addmm_activation": addmm_activation,
        "inductor": as_in_a_model,
        "torch_compile": as_in_a_model,
    }
    offered = {config["kernel"] for config in member.space(problem, DEFAULT_GPU)}
    assert ("addmm" in offered) == (problem.has_bias or problem.has_residual)
    assert ("addmm_activation" in offered) == (epilogue in ("bias_relu", "bias_gelu_tanh"))
    if epilogue == "bias_gelu_tanh":
        offered -= {"addmm_activation"}  # cuBLASLt's GELU is by tanh, that of the CPU by erf
    inputs = tensors(problem)
    before = [tensor.clone() for tensor in inputs]
    a, b, *others = (tensor.double() for tensor in inputs)
    functional = torch.nn.functional
    wanted = a @ b + (others[0] if problem.has_bias else 0)
    wanted = {
        "": lambda x: x,
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
    }[problem.activation](wanted)
    wanted = wanted + (others[-1] if problem.has_residual else 0)
    for kernel in (offered | {"inductor"}) & set(ways):
        call = tried(ways[kernel](problem), problem, kernel, "cpu")
        assert not isinstance(call, str), call
        error = (call(*inputs).double() - wanted).norm() / wanted.norm()
        assert error < (8e-3 if dtype == "bfloat16" else 1e-3), kernel
        assert all(map(torch.equal, inputs, before)), f"{kernel} changes its inputs"
    costs = [member.predict_us(problem, c, DEFAULT_GPU) for c in member.space(problem, DEFAULT_GPU)]
    assert costs == sorted(costs, reverse=True), "the fewer kernels, the less time"


@needs_torch
@pytest.mark.parametrize("scales", EPILOGUE_SCALES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", E4M3])
def test_products_with_factors_agree_with_fp64(dtype: Any, scales: Any) -> None:
    import torch

    problem = GemmProblem(48, 32, 64, dtype=dtype, scales=scales)
    offered = {c["kernel"] for c in family("vendor_blas").space(problem, DEFAULT_GPU)}
    wanted = {"scaled_mm"} if dtype == E4M3 else {"cublas", "cublaslt", "torch_compile"}
    assert offered == wanted
    a, b, *factors = tensors(GemmProblem(48, 32, 64, dtype="bfloat16", scales=scales))
    a, b = (matrix.to(getattr(torch, dtype)) for matrix in (a, b))
    wanted = factors[0].double().view(-1, 1) * (a.double() @ b.double()) * factors[1].double()
    for way in (unfused, as_in_a_model):
        call = tried(way(problem), problem, "torch", "cpu")
        assert not isinstance(call, str), call
        error = (call(a, b, *factors).double() - wanted).norm() / wanted.norm()
        assert error < (1e-3 if dtype == "float16" else 8e-3)


@pytest.mark.parametrize("fast_accum", [True, False])
def test_torch_s_scaled_product_has_the_problem_s_accumulation(
    monkeypatch: pytest.MonkeyPatch, fast_accum: bool
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda a, b, *_, **options: given.update(options) or a @ b
    )
    problem = GemmProblem(48, 32, 64, dtype=E4M3, dtype_d="float16", fast_accum=fast_accum)
    scaled_mm(problem)(torch.ones(1, 48, 64), torch.ones(1, 64, 32), *torch.ones(2, 1))
    assert given == {"out_dtype": torch.float16, "use_fast_accum": fast_accum}
    seen: list[Any] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, *given, **_: seen.extend(given) or a @ b)
    small = GemmProblem(48, 32, 64, dtype=E4M3, dtype_d=E4M3)
    scaled_mm(small)(torch.ones(1, 48, 64), torch.ones(1, 64, 32), *torch.tensor([[2.0], [3], [5]]))
    assert [float(factor) for factor in seen] == [10.0, 3.0]


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_swiglu_agrees_with_fp64_on_weights_in_its_own_order(dtype: Any) -> None:
    import torch

    problem = SwigluProblem(24, 64, 48, dtype=dtype)
    member, config = family("vendor_swiglu"), Config("vendor_swiglu", {"kernel": "torch"})
    wanted = member.handed_over(problem, config)
    assert wanted == replace(problem, weights="concatenated")
    assert [o.shape for o in wanted.operands] == [o.shape for o in problem.operands]
    a, weights = tensors(problem)
    theirs = torch.empty_strided(
        wanted.operands[1].shape, wanted.operands[1].strides, dtype=weights.dtype
    ).copy_(weights)
    gate, up = (half.reshape(64, 48).double() for half in weights)
    exact = torch.nn.functional.silu(a.double() @ gate.T) * (a.double() @ up.T)
    as_it_is = Config("vendor_swiglu", {"kernel": INTERLEAVED})
    assert member.handed_over(problem, as_it_is) == problem
    for posed, way, given in ((wanted, swiglu, theirs), (problem, interleaved, weights)):
        call = tried(way(posed), posed, "torch", "cpu")
        assert not isinstance(call, str), call
        out = call(a, given)
        error = (out.double() - exact).norm() / exact.norm()
        assert error < (8e-3 if dtype == "bfloat16" else 1e-3)


@needs_torch
@pytest.mark.parametrize("shape", ["M=64,N=48,B=2", "M=64,N=32,SQ=32,B=2,causal=1,dtype=bf16"])
def test_softmax_agrees_with_fp64(shape: str) -> None:
    import torch

    problem = SoftmaxProblem.parse(shape)
    call = tried(softmax(problem, 0.25, "cpu"), problem, "torch", "cpu")
    assert not isinstance(call, str), call
    (scores,) = tensors(problem)
    before = scores.clone()
    wanted = scores.double() * 0.25
    if problem.is_causal:
        for row in range(problem.rows):
            wanted[:, row, row % problem.query_rows + 1 :] = -torch.inf
    wanted = wanted.softmax(-1)
    out = call(scores)
    assert (out.double() - wanted).norm() / wanted.norm() < (8e-3 if "bf16" in shape else 1e-3)
    assert torch.equal(scores, before)


@needs_torch
@pytest.mark.parametrize("kernel", ["grouped_mm", "mm"])
def test_grouped_products_agree_with_fp64(kernel: str) -> None:
    import torch

    problem = GroupedGemmProblem(5, 23, 32, 48, sizes="sparse", dtype="bfloat16")
    if kernel == "grouped_mm" and not hasattr(torch, "_grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no _grouped_mm")
    calls = {"grouped_mm": grouped, "mm": in_turn(problem)}
    call = tried(calls[kernel], problem, kernel, "cpu")
    assert not isinstance(call, str), call
    a, b, _ = tensors(problem)
    starts = [0, *itertools.accumulate(problem.rows)]
    out = call(a, b, torch.tensor(starts, dtype=torch.int32))
    wanted = torch.cat(
        [
            a[start:end].double() @ one.double().T
            for (start, end), one in zip(itertools.pairwise(starts), b, strict=True)
        ]
    )
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3


@needs_torch
def test_products_with_factors_of_blocks_agree_with_fp64() -> None:
    import torch

    def widened(elements: Any, scale: Any) -> Any:
        return elements.double() * scale.double().repeat_interleave(128, -1)[..., :272]

    problem = GemmProblem(6, 264, 272, dtype=E4M3, scales="block")
    space = family("vendor_blas").space(problem, DEFAULT_GPU)
    assert [config["kernel"] for config in space] == ["cublas", "cublaslt"]
    a, b = torch.randn(1, 6, 272), torch.randn(1, 264, 272)
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(3, 8) + 0.5, torch.rand(3, 3) + 0.5
    call = tried(unfused(problem), problem, "cublas", "cpu")
    assert not isinstance(call, str), call
    wide_b = widened(b[0], scale_b.repeat_interleave(128, 0)[:264])
    wanted = widened(a[0], scale_a[:, :6].t()) @ wide_b.t()
    out = call(a, b.mT, scale_a, scale_b)
    assert (out[0].double() - wanted).norm() / wanted.norm() < 8e-3
    groups = GroupedGemmProblem(2, 6, 264, 272, dtype=E4M3)
    loop, offsets = in_turn(groups), torch.tensor([0, 2, 6], dtype=torch.int32)
    both = torch.cat((b, b)), torch.stack((scale_b, 2 * scale_b))
    out = loop(a[0], both[0], offsets, scale_a, both[1])
    wanted[2:] *= 2
    assert (out.double() - wanted).norm() / wanted.norm() < 8e-3


def test_the_grouped_kernel_of_torch_is_for_bf16() -> None:
    space = family("vendor_grouped_gemm").space(GroupedGemmProblem(4, 64, 32, 48), DEFAULT_GPU)
    assert [config["kernel"] for config in space] == ["mm"]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """torch.compile without Inductor: graphs run as they were traced; the mode of each."""
    import torch

    compile_with, modes = torch.compile, []

    def compile_lightly(function: Any, *, mode: str, **options: Any) -> Any:
        def backend(graph: Any, inputs: Any) -> Any:
            modes.append(mode)
            return graph.forward

        return compile_with(function, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", compile_lightly)
    yield modes
    torch.compiler.reset()


@needs_torch
@pytest.mark.parametrize("name", ["vendor_blas", "vendor_swiglu"])
def test_inductor_compiles_every_problem_of_a_suite(name: str, light: list[str]) -> None:
    """Calls of one function's code in one process: one more than Dynamo compiles by itself."""
    import torch

    member: Any = family(name)
    for k in range(64, 136, 8):
        problem: Problem
        if name == "vendor_blas":
            problem = GemmProblem(16, 32, k, epilogue="bias_gelu")
            eager = as_in_a_model(problem)
        else:
            problem = SwigluProblem(16, 32, k, weights="concatenated")
            eager = swiglu(problem)
        call, inputs = member.connect(problem, "inductor", 1.0), tensors(problem)
        with torch.no_grad():
            assert torch.equal(call(*inputs), eager(*inputs))
            call(*inputs)
    assert light == [MAX_AUTOTUNE] * 9


@needs_torch
def test_compiled_kernels_of_one_request_stay_compiled(light: list[Any]) -> None:
    """Compiling one anew while another is captured would break the capture."""
    import torch

    problem = SwigluProblem(16, 32, 64, weights="concatenated")
    member: Any = family("vendor_swiglu")
    inputs, wanted = tensors(problem), swiglu(problem)
    calls = [member.connect(problem, kernel, 1.0) for kernel in ("torch_compile", "inductor")]
    with torch.no_grad():
        for call in calls * 3:
            assert torch.equal(call(*inputs), wanted(*inputs))
    assert light == [None, MAX_AUTOTUNE]


@needs_torch
def test_what_inductor_cannot_compile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    problem = GemmProblem(16, 32, 64)

    def in_parts(a: Any, b: Any) -> Any:
        torch._dynamo.graph_break()
        return a @ b

    refused = tried(compiled(in_parts), problem, "inductor", "cpu")
    assert isinstance(refused, str) and refused.startswith("inductor refuses: ")

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")

    compile_with = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compile_with(function, backend=broken)
    )
    refused = tried(compiled(unfused(problem)), problem, "inductor", "cpu")
    assert isinstance(refused, str) and "Failed to find C compiler" in refused
    torch.compiler.reset()
