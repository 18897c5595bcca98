"""Products as `scripts/bench products` times them: exact results, own kernels, the second pass."""

from __future__ import annotations

from typing import Any

import pytest
from bench_device import on_the_cpu, time_calls

from benchmarks import harness, products
from benchmarks.products_ways import Tensors, name_of, ranked
from tuner.hardware import GPUS
from tuner.problem import E4M3, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("scales", ["block", "row", "tensor"])
def test_the_error_is_against_exact_factors(scales: str) -> None:
    problem = GemmProblem(8, 264, 400, dtype=E4M3, scales=scales)
    with on_the_cpu():
        tensors = Tensors(problem)
        weight, scale_b = tensors.weights[0]
        left, right = tensors.rows.double(), weight.double()
        scale_a, *others = tensors.factors
        if scales == "block":
            left *= scale_a.double().repeat_interleave(128, 1)[:, :400]
            wide = scale_b.double().repeat_interleave(128, 0)[:264]
            right *= wide.repeat_interleave(128, 1)[:, :400]
        else:
            left, right = left * scale_a, right * others[0].t()
        exact = left @ right.t()
        assert tensors.error(exact) < 1e-12
        assert tensors.error(1.5 * exact) == pytest.approx(0.5)


def test_narrow_kernels_have_names_of_their_own() -> None:
    problems = {case.problem for case in products.NARROW}
    assert len(problems) == len(products.NARROW) == 50
    kernels = ranked("cluster_gemm", products.NARROW[0].problem, GPUS["H100"])
    names = [name_of(config) for config in kernels]
    assert kernels and len(set(names)) == len(names)


def test_an_inexact_kernel_is_left_out_and_the_fastest_are_timed_again(monkeypatch: Any) -> None:
    monkeypatch.setattr(harness, "time_calls", time_calls)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with on_the_cpu():
        tensors = Tensors(GemmProblem(8, 16, 32, dtype="bfloat16"))
        ways = [("pytorch", lambda: lambda i: tensors.wanted)]
        ways += [(f"tuner {i}", lambda: lambda i: tensors.wanted) for i in range(6)]
        ways += [("tuner wrong", lambda: lambda i: 2 * tensors.wanted)]
        row = products.measured(tensors, ways, "tuner 5")  # type: ignore[arg-type]
    assert row["inexact"] == ["tuner wrong"] and row["wrong"] == []
    names = [name for name in row["us"] if name.startswith("tuner ")]
    assert len(names) == products.FINALISTS + 1 and "tuner 5" in names
    assert row["us"]["tuner"] == row["us"]["tuner 5"] and row["us"]["control"] == 10.0


@pytest.mark.parametrize(
    ("dtype", "error", "is_inexact"),
    [("bfloat16", 0.02, True), ("bfloat16", 0.008, False), (E4M3, 0.0023, True),
     (E4M3, 0.0021, False), (E4M3, float("nan"), True)],
)  # fmt: skip
def test_errors_are_judged_beside_the_peers(dtype: str, error: float, is_inexact: bool) -> None:
    errors = {"pytorch": 0.002, "tuner a": error}
    assert products.inexact(errors, dtype) == ["tuner a"] * is_inexact


def test_the_table_also_has_the_best_own_kernel() -> None:
    us = {"pytorch": 20.0, "tuner a": 16.0, "tuner b": 10.0, "control": 20.0, "tuner": 16.0}
    row = {"case": "x", "group": "M up to 64", "us": us, "failed": {}}
    lines = products.table([row])
    assert any(line.startswith("| M up to 64 | 1 | 1 | 1.250 ") for line in lines)
    assert any(line.startswith("| M up to 64, best kernel | 1 | 1 | 2.000 ") for line in lines)
