"""Products with factors of blocks, and narrow ones, timed: the cases, errors and the reports."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import call_times, child, e4m3, narrow, scaled
from tuner.bench.suites import BLOCK_SCALED, BLOCK_SCALED_TOKENS
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families
from tuner.families.block_scaled_gemm import rule as block_scaled
from tuner.hardware import GPUS
from tuner.problem import GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

CHILD = """
import json, sys
for line in sys.stdin:
    {0}
    print(json.dumps(found), flush=True)
"""


def test_the_report_compares_the_rules_kernel_with_the_fastest_peer() -> None:
    row = {
        **{"m": 64, "n": 7168, "k": 2048},
        "us": {"deep_gemm": 20.0, "scaled_mm": 25.0, "64x128 u4": 16.0, "128x64 u4": 10.0},
        "errors": {"deep_gemm": 2e-3, "64x128 u4": 1e-3, "128x64 u4": 2e-3},
        "estimates": {"256x64 u4": 1.0, "64x128 u4": 2.0, "128x64 u4": 3.0},
    }
    rows = [row, {**row, "m": 128, "us": {**row["us"], "64x128 u4": 40.0}}, {**row, "us": {}}]  # type: ignore[dict-item]
    text = scaled.report({"environment": {"gpu": "a GPU"}, "products": rows})
    assert "M up to 64: mean 1.250, worst 1.250 of 1" in text
    assert "M over 64: mean 0.500" in text and "all, best kernel: mean 2.000" in text
    assert "0.500" in text.splitlines()[4], "the error over DeepGEMM's"


def test_the_error_is_against_exact_factors() -> None:
    layer = scaled.Layer(264, 400, [8], with_all=False, unproven=False)
    torch.manual_seed(0)
    a = torch.randn(8, 400).to(torch.float8_e4m3fn)
    b = torch.randn(264, 400).to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(8, 4) + 0.5, torch.rand(3, 4) + 0.5
    layer._weights = [(b, scale_b)]
    left = a.double() * scale_a.double().repeat_interleave(128, 1)[:, :400]
    right = scale_b.double().repeat_interleave(128, 0)[:264].repeat_interleave(128, 1)[:, :400]
    exact = left @ (right * b.double()).t()
    assert layer._error(exact, a, scale_a) < 1e-12
    assert layer._error(1.5 * exact, a, scale_a) == pytest.approx(0.5)


def test_rows_are_timed_after_all_layers_have_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "found = dict(said=['no nvcc']) if line == '0\\n' else dict(m=int(line))"
    command = [sys.executable, "-c", CHILD.format(text)]
    monkeypatch.setattr(scaled, "python_command", lambda *_: command)
    found = list(scaled.measured([(64, 64), (128, 64)], [1, 16], []))
    assert [row["m"] for row in found] == [1, 1, 2, 2]
    assert capsys.readouterr().err.count("no nvcc") == 2


def test_each_way_is_called_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ways(self: scaled.Layer, m: int, copies: int) -> Any:
        yield "", None, None, ""
        yield "deep_gemm", None, None, "not here" * (copies - 1)
        yield "64x32", None, 1e-3, ""

    monkeypatch.setattr(scaled.Layer, "_ways", ways)
    monkeypatch.setattr(scaled, "environment", dict)
    assert scaled.main(["--once", "--layers", "64x128", "--rows", "1,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"M={m},N=64,K=128: {x}" for m in (1, 16) for x in ("deep_gemm", "64x32")]


def test_kernels_have_names_of_their_own() -> None:
    names = {scaled.scaled_name(config) for config in block_scaled.KERNELS}
    assert len(names) == len(block_scaled.KERNELS)


@pytest.mark.parametrize("options", [["--layers", "7168"], ["--rows", "many"]])
def test_wrong_sizes_are_named(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="--layers or --rows"):
        scaled.main(options)
    if options[0] == "--rows":
        with pytest.raises(ConfigError, match="--rows many"):
            narrow.main(options)
        for sizes in ("8192x4096", "many", "8x8x8x8"):
            with pytest.raises(ConfigError, match="--sizes"):
                e4m3.main(["--sizes", sizes])


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(narrow, "compiled", lambda *_: {})
    for bench in (scaled, narrow, e4m3):
        with pytest.raises(BenchmarkError, match="no GPU found"):
            bench.main([])


def test_narrow_products_are_those_of_ten_layers() -> None:
    problems = list(narrow.problems(narrow.ROWS))
    assert len(problems) == len(set(problems)) == 50
    kernels = narrow.ranked(narrow.FAMILY, problems[0], GPUS["H100"])
    assert kernels and all(config["pdl"] for config in kernels)
    names = [narrow.name_of(config) for config in kernels]
    assert len(set(names)) == len(names)


def test_the_narrow_report_takes_the_fastest_of_the_library() -> None:
    def row(m: int, **us: float) -> dict[str, Any]:
        return {"m": m, "n": 4096, "k": 4096, "us": us}

    lists = {"cublaslt 0": 12.0, "cublaslt 7": 10.0}
    rows = [
        row(64, **lists, cublas=11.0, own=8.0, other=9.0, served=20.0),
        row(96, **{**lists, "cublas": 9.0}, own=10.0),
        row(96, own=10.0),
    ]
    text = narrow.report({"environment": {}, "products": rows})
    assert "M=64: mean 1.250" in text and "M=96: mean 0.900" in text
    assert "served: mean 0.500, worst 0.500 of 1" in text and "worst 0.900 of 2" in text


def test_built_kernels_of_e4m3_come_by_estimates_each_with_its_band(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, gpu = e4m3.problem_of("fast, rows", e4m3.SIZES[0]), GPUS["H200"]
    asked: list[Any] = []

    def artifacts(kernels: Any) -> Any:
        asked.append(kernels)
        return "a kernel is not built" if len(asked) == 1 else {name: "key" for name in kernels}

    monkeypatch.setattr(e4m3, "built_artifacts", artifacts)
    found = list(e4m3.built(problem, gpu))
    configs = [config for config, _ in found]
    ranked = e4m3.ranked("gemm", problem, gpu)
    assert configs[0] == ranked[1] and ranked[0] not in configs
    assert len(asked) <= 1 + e4m3.KERNELS and len(set(configs)) == len(configs) > 1
    assert any(config["max_swizzle_size"] == e4m3.BAND for config in configs)
    assert all(set(keys.values()) == {"key"} for _, keys in found)


def test_the_fastest_of_either_side_are_timed_again() -> None:
    us = {f"{side} {i}": 1.0 + i for i in range(9) for side in ("peer", "own")}
    found = narrow.finalists(us, lambda name: name.startswith("peer"))
    assert found == {f"{side} {i}" for i in range(narrow.FINALISTS) for side in ("peer", "own")}


def test_an_inexact_own_kernel_of_e4m3_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {
        **{"scaled_mm": 2e-3, "cublaslt 0": 0.5, "cublaslt 1": float("nan")},
        **{"gemm a": 2.1e-3, "gemm b": 2.3e-3, "gemm c": float("nan")},
    }

    class Calls:
        copies, before = 1, None

        def __init__(self, problem: GemmProblem) -> None:
            self.problem = problem

        def vendors(self) -> Any:
            return ((name, name) for name in errors if not name.startswith("gemm"))

        def own(self, config: Any, artifacts: Any) -> Any:
            if config == "gemm d":
                raise BenchmarkError("no such launch")
            return config

        def error(self, call: Any) -> float:
            return errors[call]

    runs: list[list[str]] = []

    def timed(ways: Any, *_: Any) -> Any:
        runs.append([way.name for way in ways])
        return call_times.Times({way.name: 1.0 for way in ways}, {})

    own: list[tuple[str, dict[str, str]]] = [(f"gemm {name}", {}) for name in "abcd"]
    for name, found in (
        *(("Calls", Calls), ("time_calls", timed)),
        *(("name_with_band", str), ("built", lambda *_: own)),
    ):
        monkeypatch.setattr(e4m3, name, found)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("tuner.runtime.call.devices.gpu_of", lambda _: GPUS["H200"])
    row = e4m3.timed("fast, rows", (64, 64, 64))
    assert list(row["us"]) == ["scaled_mm", "cublaslt 0", "cublaslt 1", "gemm a"]
    assert runs == [list(row["us"])] * 2, "the fastest are timed again"
    assert row["failed"]["gemm b"] == "relative error 2.30e-03, of a peer 2.00e-03"
    assert set(row["failed"]) == {"gemm b", "gemm c", "gemm d"} and "gemm b" in row["errors"]
    assert set(e4m3.inexact({"gemm a": float("nan")})) == {"gemm a"}


def test_every_kind_of_e4m3_product_has_own_kernels_by_estimates() -> None:
    gpu, supported = GPUS["H200"], {}
    for kind in e4m3.KINDS:
        problem = e4m3.problem_of(kind, e4m3.SIZES[0])
        supported[kind] = [x for x in e4m3.FAMILIES if not families()[x].supports(problem, gpu)]
        assert e4m3.ranked("gemm", problem, gpu)
    assert {kind for kind, found in supported.items() if len(found) == 2} == {
        "promoted, tensors",
        "promoted, rows",
    }


def test_the_e4m3_report_takes_the_fastest_of_either_side() -> None:
    def row(kind: str, **us: float) -> dict[str, Any]:
        return {"kind": kind, "m": 8, "n": 16, "k": 32, "us": us}

    rows = [
        row("fast, rows", **{"cublaslt 3": 9.0, "gemm tile_m=64": 10.0, "gemm tile_m=128": 8.0}),
        row("fast, rows", **{"scaled_mm": 8.0, "gemm tile_m=64": 10.0}),
        row("promoted, rows", **{"scaled_mm": 8.0}),
    ]
    text = e4m3.report({"environment": {}, "products": rows})
    assert "fast, rows: mean 0.949, worst 0.800 of 2" in text
    assert "promoted, rows: mean" not in text


def test_the_products_of_the_suite_are_timed() -> None:
    assert all(
        block_scaled.serves(
            GemmProblem(m, n, k, dtype="float8_e4m3fn", scales="block"), GPUS["H100"]
        )
        for n, k in BLOCK_SCALED
        for m in BLOCK_SCALED_TOKENS
    )


def test_benches_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "gpu"
    with child.turn(None), child.turn(path), path.open() as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
