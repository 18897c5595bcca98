"""`tune_linear_` on the GPU: a model served by a compiled kernel against float64, and restored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from runtime_gpu import call_path, compiled, first_kernels, fresh_store, served_gpu, store

from tuner.compile.compiler import Compiler
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_store")]

own_store, path, gpu = fresh_store, call_path, served_gpu

#: Of one kernel: what is compiled for the first serves the second.
UP = GemmProblem.parse("M=300,N=768,K=256,epilogue=bias")
DOWN = GemmProblem.parse("M=300,N=256,K=768,epilogue=bias")
OF_INPUT = GemmProblem.parse("M=304,N=256,K=768,layout_b=row")
OF_WEIGHT = GemmProblem.parse("M=768,N=256,K=304,layout_a=col,layout_b=row")
"""The gradients of a layer from 256 to 768 columns, on 304 rows."""


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [spec for one in (UP, OF_INPUT, OF_WEIGHT) for spec in first_kernels(one, "gemm")]


def mlp() -> Any:
    layers = (torch.nn.Linear(256, 768), torch.nn.GELU(), torch.nn.Linear(768, 256))
    return torch.nn.Sequential(*layers).half().cuda()


@pytest.mark.compile
def test_a_model_is_served_and_restored_bit_by_bit(path: str, compiler: Compiler, gpu: Gpu) -> None:
    import tuner

    config, artifacts = compiled(compiler, UP, gpu, "gemm")
    assert family("gemm").violations(DOWN, config, gpu) == []
    model, x = mlp(), torch.randn(3, 100, 256, device="cuda").half()
    before = [(m, type(m), vars(m).copy()) for m in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        plain = model(x)
        wanted = copy.deepcopy(model).double()(x.double())
        done = tuner.tune_linear_(model, [x])
        assert (done.replaced, list(done.calls.problems)) == (("0", "2"), [UP, DOWN])
        for problem in done.calls.problems:
            store(problem, gpu, config, artifacts=artifacts)
        for _ in range(2):
            out = model(x)
        stats = tuner.stats(reset=True)
        assert (stats.hits, stats.fallbacks) == (4, {})
        error = (out.double() - wanted).norm() / wanted.norm()
        assert error < 2e-3, error
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, out)
        assert tuner.restore_linear_(model) == done.replaced
        tuner.stats(reset=True)
        assert torch.equal(model(x), plain) and tuner.stats().calls == 0
    assert [(m, type(m), vars(m)) for m in model.modules()] == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.compile
def test_a_training_step_s_three_products(path: str, compiler: Compiler, gpu: Gpu) -> None:
    """Gradients as near to float64 as PyTorch's, eager, accumulated, and in a captured graph."""
    import tuner

    output = GemmProblem.parse("M=304,N=768,K=256,epilogue=bias")
    for problem, alike in ((output, UP), (OF_INPUT, OF_INPUT), (OF_WEIGHT, OF_WEIGHT)):
        config, artifacts = compiled(compiler, alike, gpu, "gemm")
        assert family("gemm").violations(problem, config, gpu) == []
        store(problem, gpu, config, artifacts=artifacts)
    layer = torch.nn.Linear(256, 768).half().cuda()
    x = torch.randn(2, 152, 256, device="cuda").half().requires_grad_()
    grad = torch.randn(2, 152, 768, device="cuda").half()
    leaves = [x, layer.weight, layer.bias]

    def errors(found: Any) -> list[float]:
        return [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)
        ]

    wide = copy.deepcopy(layer).double()
    doubled = x.detach().double().requires_grad_()
    exact = torch.autograd.grad(wide(doubled), (doubled, wide.weight, wide.bias), grad.double())
    plain = errors(torch.autograd.grad(layer(x), leaves, grad))
    tuner.tune_linear_(layer)
    tuner.stats(reset=True)
    for _ in range(3):
        found = errors(torch.autograd.grad(layer(x), leaves, grad))
    stats = tuner.stats(reset=True)
    assert (stats.hits, stats.fallbacks) == (9, {})
    assert all(a <= 1.1 * b + 1e-5 for a, b in zip(found, plain, strict=True)), (found, plain)
    for _ in range(2):
        layer(x).backward(grad)
    assert max(errors([tensor.grad / 2 for tensor in leaves])) < 2e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(layer(x), leaves, grad)
    for tensor in captured:
        tensor.fill_(float("nan"))
    graph.replay()
    assert errors(captured) == found
    assert tuner.stats().hits == 9
