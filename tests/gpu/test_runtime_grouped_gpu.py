"""`tuner.grouped_mm` on the GPU: a compiled kernel against float64, also in a CUDA graph."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from runtime_gpu import compiled, first_kernels, fresh_store, served_gpu, store

from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import GroupedGemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_store")]

own_store, gpu = fresh_store, served_gpu

EXPERTS = GroupedGemmProblem(6, 512, 256, 128, dtype="bfloat16")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return first_kernels(EXPERTS, "grouped_gemm")


def error(out: Any, a: Any, b: Any, offsets: Any) -> float:
    """Relative Frobenius error against one product after the other in float64."""
    ends = itertools.pairwise(offsets.tolist())
    products = [a[s:e].double() @ one.double().T for (s, e), one in zip(ends, b, strict=True)]
    wanted = torch.cat(products)
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.compile
def test_experts_are_served_whatever_rows_they_have(compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    config, artifacts = compiled(compiler, EXPERTS, gpu, "grouped_gemm")
    store(EXPERTS, gpu, config, artifacts=artifacts)
    b = torch.randn(6, 256, 128, device="cuda").bfloat16()
    for rows in ((0, 100, 3, 0, 197, 1), (400, 0, 0, 0, 0, 7)):
        a = torch.randn(sum(rows), 128, device="cuda").bfloat16()
        offsets = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
        assert error(tuner.grouped_mm(a, b, offsets), a, b, offsets) < 8e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tuner.grouped_mm(a, b, offsets)
    offsets.copy_(torch.tensor([0, 50, 60, 60, 200, 200, 407]))
    graph.replay()
    assert error(out, a, b, offsets) < 8e-3
    assert tuner.stats().fallbacks == {}


def test_pytorch_answers_where_nothing_was_tuned(gpu: Gpu) -> None:
    import tuner

    rows = (0, 100, 3, 0, 197, 1)
    offsets = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.randn(sum(rows), 128, device="cuda").to(dtype)
        b = torch.randn(6, 256, 128, device="cuda").to(dtype)
        assert error(tuner.grouped_mm(a, b, offsets), a, b, offsets) < 8e-3
    assert tuner.stats().hits == 0
