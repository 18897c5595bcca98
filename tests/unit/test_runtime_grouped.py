"""`grouped_mm`: what problem its calls pose, what a kernel is given, what stays PyTorch's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from noted_kernels import find_kernels
from runtime_machine import decide, measured

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.grouped_gemm import GroupedGemm
from tuner.measurement import Regime
from tuner.problem import GroupedGemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
ROWS = (5, 0, 1, 0, 3)


@pytest.fixture
def grouped_mm(runtime: SimpleNamespace) -> Any:
    return importlib.import_module("tuner.runtime.products.grouped").grouped_mm


def inputs(rows: Sequence[int] = ROWS, dtype: Any = torch.float16, spare: int = 0) -> list[Any]:
    """A, B and offsets; `spare` rows belong to no group."""
    offsets = torch.tensor([0, *rows]).cumsum(0).int()
    a, b = torch.randn(sum(rows) + spare, 32), torch.randn(len(rows), 16, 32)
    return [a.to(dtype), b.to(dtype), offsets]


def expected(a: Any, b: Any, rows: Sequence[int] = ROWS) -> Any:
    """Row by row."""
    groups = [group for group, count in enumerate(rows) for _ in range(count)]
    return torch.stack([b[group] @ row for row, group in zip(a, groups, strict=False)])


def test_pytorch_answers_one_group_after_the_other(
    runtime: SimpleNamespace, grouped_mm: Any
) -> None:
    a, b, offsets = inputs(dtype=torch.float64, spare=2)
    out = grouped_mm(a, b, offsets)
    assert out.shape == (11, 16)
    torch.testing.assert_close(out[:9], expected(a, b))
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 1}
    a.requires_grad_()
    [found] = torch.autograd.grad(grouped_mm(a, b, offsets)[:9].square().sum(), a)
    [wanted] = torch.autograd.grad(expected(a, b).square().sum(), a)
    torch.testing.assert_close(found, wanted)
    assert grouped_mm(*inputs((0, 0), torch.float64)).shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b, o: (a[0], b, o), r"allowed: \(M, K\) and \(G, N, K\)"),
        (lambda a, b, o: (a[:, :16], b, o), "cannot be multiplied"),
        (lambda a, b, o: (a, b[:0], o[:1]), "cannot be multiplied"),
        (lambda a, b, o: (a, b, o[1:]), r"int32 \(5,\) \(allowed: torch.int32 \(6,\)\)"),
        (lambda a, b, o: (a, b, o.long()), "offsets are torch.int64"),
        (lambda a, b, o: (a, b, o + 1), "offsets run from 1 to 10"),
        (lambda a, b, o: (a, b, o.flip(0)), "never decreasing"),
        (lambda a, b, o: (a[:4], b, o), "to 4 at most"),
    ],
)
def test_what_is_no_grouped_product(grouped_mm: Any, change: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        grouped_mm(*change(*inputs(dtype=torch.float32)))


def test_sizes_are_known_ones(grouped_mm: Any) -> None:
    with pytest.raises(ConfigError, match=r"sizes=odd is not known \(allowed: uniform, zipf"):
        grouped_mm(*inputs(), sizes="odd")


def serve(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return find_kernels(on_cpu, monkeypatch, lambda problem: GroupedGemm(), workspace=4096)


def test_a_kernel_is_found_by_a_power_of_two_and_given_the_rows_there_are(
    on_cpu: SimpleNamespace, grouped_mm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(on_cpu, monkeypatch)
    a, b, offsets = inputs()
    out = grouped_mm(a, b, offsets, sizes="zipf")
    assert (out.shape, out.dtype) == ((9, 16), torch.float16)
    [(_, problem)] = served.posed
    assert problem == GroupedGemmProblem(5, 16, 16, 32, sizes="zipf")
    [(tensors, integers, _)] = served.launched
    assert tensors == [t.data_ptr() for t in (a, b, offsets, out)]
    assert integers[:4] == (9, 16, 32, 5)
    assert on_cpu.counters.stats().hits == 1


def test_calls_with_like_rows_are_of_one_kind(
    on_cpu: SimpleNamespace, grouped_mm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(on_cpu, monkeypatch)
    for rows in ((9,), (16,), (17,), (9, 0)):
        grouped_mm(*inputs(rows))
    grouped_mm(*inputs((9,)), sizes="sparse")
    kinds = [kind for kind, _ in served.posed]
    assert kinds[0] == kinds[1] and len(set(kinds)) == 4
    assert [integers[0] for _, integers, _ in served.launched] == [9, 16, 17, 9, 9]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b, o: (a.requires_grad_(), b, o), "a gradient is wanted"),
        (lambda a, b, o: (a.t().contiguous().t(), b, o), "not contiguous"),
        (lambda a, b, o: (a, b[:, ::2], o), "not contiguous"),
        (lambda a, b, o: (a.float(), b.float(), o), "takes such tensors"),
        (lambda a, b, o: (a[:0], b, o * 0), "takes such tensors"),
    ],
)
def test_what_a_kernel_cannot_take_is_pytorch_s(
    on_cpu: SimpleNamespace,
    grouped_mm: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    reason: str,
) -> None:
    served = serve(on_cpu, monkeypatch)
    a, b, offsets = change(*inputs())
    out = grouped_mm(a, b, offsets)
    assert served.launched == [] and out.shape == (len(a), b.shape[1])
    [said] = on_cpu.counters.stats().fallbacks
    assert reason in said


def test_where_pytorch_won_its_own_call_answers(
    on_cpu: SimpleNamespace, grouped_mm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vendor's loop is timed with offsets that it read before; nobody may capture that."""
    problem = GroupedGemmProblem(5, 16, 16, 32)
    config, regime = Config("vendor_grouped_gemm", {"kernel": "mm"}), Regime.default(problem.op)
    won = measured("vendor_grouped_gemm", problem=problem, config=config, regime=regime)
    decide(on_cpu, monkeypatch, won)
    a, b, offsets = inputs()
    torch.testing.assert_close(grouped_mm(a, b, offsets), expected(a, b), atol=1e-2, rtol=1e-2)
    assert on_cpu.counters.stats().fallbacks == {on_cpu.refusal.Kind.VENDOR: 1}
