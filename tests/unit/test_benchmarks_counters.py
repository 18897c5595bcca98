"""Counters of several calls from one run of Nsight Compute: parts, names, printed lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import counters
from tuner.errors import BenchmarkError, ConfigError
from tuner.measure import nsight
from tuner.measure.profile import KernelCounters, Value

TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio"


def launch(name: str, us: float = 1.0) -> KernelCounters:
    values = {
        "gpu__time_duration.sum": Value(us * 1e3, "ns"),
        "sm__cycles_elapsed.max": Value(us * 1500, "cycle"),
        TENSOR: Value(80.0, "%"),
        STALL: Value(0.5, ""),
    }
    return KernelCounters(name, values)


LAUNCHES = [
    launch(counters.MARK),
    launch("transpose_values", 5.0),
    launch("fused_attention", 80.0),
    launch(counters.MARK),
    launch("cudnn_kernel", 84.0),
]


def test_launches_belong_to_the_mark_before_them() -> None:
    found = counters.parted([launch("stray"), *LAUNCHES], ["own", "cudnn"])
    assert [one.kernel for one in found["own"]] == ["transpose_values", "fused_attention"]
    assert [one.kernel for one in found["cudnn"]] == ["cudnn_kernel"]


@pytest.mark.parametrize("launches", [LAUNCHES[:3], LAUNCHES[:4], []])
def test_a_call_without_launches_is_refused(launches: Sequence[KernelCounters]) -> None:
    with pytest.raises(BenchmarkError, match="2 calls were made"):
        counters.parted(launches, ["own", "cudnn"])


def test_a_name_is_whole_or_a_beginning() -> None:
    known = ["fused_attention a77186", "flash3_splits", "flash3", "cudnn engine 2 kernel_cfg=32"]
    asked = ["flash3", "cudnn engine 2", "fused_attention a7"]
    assert counters.chosen(asked, known) == [known[2], known[3], known[0]]
    with pytest.raises(ConfigError, match=r"call 'flash9' is unknown \(allowed: fused_attention"):
        counters.chosen(["flash9"], known)


def test_products_are_those_of_e4m3_with_factors_of_operands_or_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    problem = counters.problem_of("gemm", "M=64,N=128,K=256,dtype=e4m3,scales=row,fast_accum=0")
    assert (problem.op, problem.scales, problem.fast_accum) == ("gemm", "row", False)
    for shape in ("M=64,N=128,K=256", "M=64,N=128,K=256,dtype=e4m3,scales=block"):
        with pytest.raises(ConfigError, match=r"is not counted \(allowed: scales=tensor"):
            counters.problem_of("gemm", shape)

    class Calls:
        def __init__(self, problem: object) -> None:
            pass

        def vendors(self) -> list[tuple[str, object]]:
            return [("scaled_mm", lambda i: "vendor")]

        def own(self, config: object, artifacts: object) -> object:
            return lambda i: artifacts

    from tuner.runtime.call import devices

    monkeypatch.setattr(devices, "gpu_of", lambda index: None)
    monkeypatch.setattr(counters.e4m3, "Calls", Calls)
    monkeypatch.setattr(counters.e4m3, "built", lambda problem, gpu: [("config", "artifacts")])
    monkeypatch.setattr(counters.e4m3, "name_with_band", lambda config: f"gemm {config}")
    found = counters.calls_of(problem)
    assert {name: call() for name, call in found.items()} == {
        "scaled_mm": "vendor",
        "gemm config": "artifacts",
    }


def test_it_prints_the_longest_launch_and_writes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked: list[Sequence[str]] = []

    def counted(ncu: Path, child: Sequence[str], l2: str) -> tuple[KernelCounters, ...]:
        asked.append(child)
        assert l2 == "warm"
        return tuple(LAUNCHES)

    monkeypatch.setattr(nsight, "find_ncu", lambda given: Path("ncu"))
    monkeypatch.setattr(nsight, "counted", counted)
    monkeypatch.setattr(counters.own_kernels, "environment", lambda: {"gpu": "NVIDIA H200"})
    path = tmp_path / "counters.json"
    given = ["--shape", "S=64,D=64,dtype=e4m3", "--call", "own", "--call", "cudnn"]
    assert counters.main([*given, "--json", str(path)]) == 0
    assert asked[0][-4:] == ["--call", "own", "--call", "cudnn"]
    said = capsys.readouterr().out
    assert "own: 85.0 us in 2 kernels; fused_attention 80.0 us, 120 thousand cycles" in said
    assert "tensor cores 80.0 %" in said and "WGMMA 0.50" in said
    written = json.loads(path.read_text())
    assert written["environment"] == {"gpu": "NVIDIA H200"}
    assert [one["kernel"] for one in written["calls"]["cudnn"]] == ["cudnn_kernel"]
    assert written["calls"]["own"][0]["counters"][TENSOR] == 80.0


def test_a_run_without_calls_is_refused() -> None:
    with pytest.raises(ConfigError, match="no call is named"):
        counters.main(["--shape", "S=64,D=64"])


def test_a_call_that_is_named_twice_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nsight, "counted", lambda *_: pytest.fail("it was run"))
    given = ["--shape", "S=64,D=64", *["--call", "own"] * 2]
    with pytest.raises(ConfigError, match="--call own is given twice"):
        counters.main(given)


def test_gradients_are_counted_by_the_names_of_their_bench(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Sequence[str]] = []

    def counted(ncu: Path, child: Sequence[str], l2: str) -> tuple[KernelCounters, ...]:
        asked.append(child)
        return tuple(LAUNCHES)

    monkeypatch.setattr(nsight, "find_ncu", lambda given: Path("ncu"))
    monkeypatch.setattr(nsight, "counted", counted)
    monkeypatch.setattr(counters.own_kernels, "environment", dict)
    path = tmp_path / "counters.json"
    shape = "S=64,D=64,dtype=bf16,deterministic=1"
    given = ["--op", "attention_backward", "--shape", shape, "--call", "own", "--call", "flash3"]
    given += ["--json", path]
    assert counters.main([str(one) for one in given]) == 0
    assert "attention_backward" in asked[0]
    posed = json.loads(path.read_text())["problem"]
    assert posed["op"] == "attention_backward" and posed["is_deterministic"]
    calls = {"own": lambda: None}
    monkeypatch.setattr(counters.backward, "built", lambda problems: {})
    monkeypatch.setattr(counters.backward, "contenders", lambda *given: (calls, []))
    problem = counters.AttentionBackwardProblem.parse(shape)
    assert counters.calls_of(problem) is calls
