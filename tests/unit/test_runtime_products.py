"""`linear` and `matmul`: what problem a product poses, and what stays PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.lookup import Answer, Entry
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import GemmProblem, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

A = torch.randn(8, 32).half()
B = torch.randn(32, 16).half()


def col(tensor: Any) -> Any:
    """The same values, stored by columns."""
    return tensor.mT.contiguous().mT


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (A, B, "M=8,N=16,K=32,layout_b=row"),
        (A, col(B), "M=8,N=16,K=32"),
        (col(A), B, "M=8,N=16,K=32,layout_a=col,layout_b=row"),
        (A.view(2, 4, 32), col(B), "M=8,N=16,K=32"),
        (A.expand(3, 8, 32).contiguous(), B.expand(3, 32, 16).contiguous(),
         "M=8,N=16,K=32,B=3,layout_b=row"),
        (A.expand(2, 3, 8, 32).contiguous(), col(B.expand(2, 3, 32, 16)), "M=8,N=16,K=32,B=6"),
        (A[:1], col(B), "M=1,N=16,K=32"),
        (A.bfloat16(), col(B).bfloat16(), "M=8,N=16,K=32,dtype=bf16"),
    ],
)  # fmt: skip
def test_a_problem_is_read_off_its_matrices(
    runtime: SimpleNamespace, a: Any, b: Any, wanted: str
) -> None:
    problem = runtime.products.problem_of(a, b)
    assert problem == GemmProblem.parse(wanted)
    assert torch.matmul(a, b).numel() == problem.output.elements


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (A[0], B, "not matrices"),
        (A[:, :0], B[:0], "empty"),
        (A, B.bfloat16(), "differ in device or type"),
        (A.float(), B.float(), "is not tuned"),
        (A.expand(3, 8, 32), B, "not contiguous"),
        (A.expand(3, 8, 32).contiguous(), B.expand(1, 32, 16), "broadcasts"),
        (A, B.expand(3, 32, 16).contiguous(), "broadcasts"),
        (A[:, ::2], B[:16], "dense neither"),
        (A[:, :16], B[:16], "dense neither"),
    ],
)
def test_what_poses_no_problem(runtime: SimpleNamespace, a: Any, b: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        runtime.products.problem_of(a, b)


def test_what_is_not_covered_is_pytorch_s(on_cpu: SimpleNamespace) -> None:
    linear, matmul = on_cpu.products.linear, on_cpu.products.matmul
    bias, out = torch.randn(16).half(), torch.empty(8, 16).half()
    weight = B.t().contiguous()
    assert torch.equal(linear(A, weight, bias), torch.nn.functional.linear(A, weight, bias))
    assert matmul(A, B, out=out) is out and torch.equal(out, A @ B)
    assert torch.equal(matmul(A[0], B), A[0] @ B)
    assert torch.equal(linear(A, weight), A @ weight.t())
    assert on_cpu.counters.stats().fallbacks == {
        "a bias is given": 1,
        "out is given": 1,
        "no kernel takes such tensors": 1,
        "no measured winner": 1,
    }
    with pytest.raises(RuntimeError):
        matmul(A, A)


def test_gradients_are_pytorch_s(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: Any) -> Any:
        return on_cpu.plan.VendorPlan(
            GemmProblem(m=8, n=16, k=32),
            Config("own", {}),
            -1,
            False,
            lambda a, b: a.new_zeros(8, 16),
        )

    monkeypatch.setattr(on_cpu.table.table, "find_out", plan)
    weight = B.t().clone().requires_grad_()
    on_cpu.products.linear(A, weight).sum().backward()
    assert weight.grad is not None and weight.grad.any()
    with torch.no_grad():
        assert not on_cpu.products.linear(A, weight).any(), "the plan ran"


def test_where_cublas_won_pytorch_s_own_call_answers(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = GemmProblem(m=8, n=16, k=32, layout_b="row")

    def made(family: str, latency_us: float) -> Measurement:
        return Measurement(
            problem=problem,
            config=Config(family, {"kernel": "cublas"}),
            gpu=DEFAULT_GPU,
            regime=Regime.default("gemm"),
            status=Status.OK,
            latency_us=latency_us,
            is_final=True,
        )

    def lookup(asked: Problem, *, gpu: Any, path: Any) -> Answer:
        assert asked == problem
        return Answer(Entry.of([made("vendor_blas", 1.0), made("gemm", 2.0)]), exact=True)

    monkeypatch.setattr(on_cpu.table, "lookup", lookup)
    assert torch.equal(on_cpu.products.matmul(A, B), A @ B)
    assert on_cpu.counters.stats().fallbacks == {on_cpu.plan.PYTORCHS: 1}
