"""What a bench says of kernels that launch several: each alone, and the gaps between them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import pytest

from tuner import families
from tuner.bench import presets
from tuner.bench.comparison import ComparisonRun, RowTask
from tuner.bench.contenders import Role, line_up, peers_named
from tuner.bench.results import Results, TimedKernel
from tuner.cli import bench_tables
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.triton_attention import TritonAttention
from tuner.hardware import DEFAULT_GPU
from tuner.measure.kernel_times import described, read
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import Problem

WARM = Regime("stream", "warm")
TILED = presets.TILED
NAMED = presets.three_kernels(TILED, DEFAULT_GPU)
FIRST = "three kernels 64x128x64, softmax 32"


class Runner:
    """A call of all heads takes 36 us, one of a head at a time 50; their kernels as the worker says
    it.
    """

    environment = Environment({"driver": "580"})

    def retime(self, problem: Problem, configs: Sequence[Config], rounds: int) -> list[Measurement]:
        return [self._measured(problem, config) for config in configs]

    def _measured(self, problem: Problem, config: Config) -> Measurement:
        us = 36.0 if config.get("heads_per_launch") == 16 else 50.0
        parts = {"qk.gemm": 20.0, "softmax.softmax": 10.0, "pv.gemm": 8.0} if config.stages else {}
        measured = Measurement(problem, config, DEFAULT_GPU, WARM, Status.OK)
        return measured.but(latency_us=us, std_us=0.1, rounds=20, log=described(parts, us))


class Machines:
    gpu = DEFAULT_GPU

    def __init__(self) -> None:
        self.runner = Runner()

    def of(self, problem: Problem, regime: Regime) -> Any:
        return self.runner

    def compiler(self) -> Any:
        class Done:
            def submit(self, specs: Any, owner: Any = None) -> list[Any]:
                return []

        return Done()


def bench(machines: Any) -> Results:
    task = RowTask(presets.NAME, TILED, WARM, 20, ("cudnn",), presets.three_kernels)
    return ComparisonRun([task], machines, [], note=lambda _: None).run(lambda _: None)


def by_name(results: Results) -> dict[str, TimedKernel]:
    return {timed.name: timed for timed in results.rows[0].timed}


def test_each_kernel_alone_and_the_rest_are_gaps() -> None:
    results = bench(Machines())
    found = by_name(results)[FIRST]
    assert found.stages_us == {"qk.gemm": 20.0, "softmax.softmax": 10.0, "pv.gemm": 8.0}
    assert results.rows[0].figures(found, DEFAULT_GPU)["gaps_us"] == pytest.approx(36 - 38)
    assert by_name(results)["cudnn"].stages_us == {}


@pytest.mark.parametrize("line", ["", "nvcc refused", "alone", "alone a 1.00 us"])
def test_another_line_says_nothing_of_kernels(line: str) -> None:
    assert read(line) == {}


def test_they_are_in_every_form_of_the_results() -> None:
    results = bench(Machines())
    assert Results.from_json(results.to_json()) == results
    kernels = results.to_json()["rows"][0]["kernels"]
    (one,) = [k for k in kernels if k["name"] == FIRST]
    assert one["stages_us"]["qk.gemm"] == 20.0 and one["figures"]["gaps_us"] == -2.0
    for text in (
        bench_tables.text(results, {presets.NAME}),
        bench_tables.markdown(results, {presets.NAME}),
    ):
        lines = [line.replace("|", " ").split() for line in text.splitlines() if FIRST in line]
        assert ["20.0", "10.0", "8.00", "-2.0", "36.0"] in [line[-5:] for line in lines]
    rows = list(csv.DictReader(io.StringIO(bench_tables.csv_text(results))))
    (row,) = [row for row in rows if row["kernel"] == FIRST]
    assert row["stages_us"] == "qk.gemm=20.0;softmax.softmax=10.0;pv.gemm=8.0"
    assert (row["gaps_us"], row["driver"], row["std_us"]) == ("-2.0", "580", "0.1")


def test_results_from_before_there_were_stages_are_read() -> None:
    data = bench(Machines()).to_json()
    for kernel in data["rows"][0]["kernels"]:
        del kernel["stages_us"]
    assert by_name(Results.from_json(data))[FIRST].stages_us == {}


def test_heads_on_streams_are_among_the_presets_and_legal() -> None:
    member = families.family("three_kernel_attention")
    streams = {name: c.get("streams", 1) for name, c in NAMED.items() if "a head a launch" in name}
    assert sorted(streams.values()) == [1, 4]
    for name in streams:
        assert member.violations(TILED, NAMED[name], DEFAULT_GPU) == []


class TestTriton:
    """A family of ours that is another language's peer."""

    def peers(self, entries: Sequence[Any] = ()) -> list[Any]:
        names = peers_named("attention", ["cudnn", "triton"])
        found = line_up(TILED, DEFAULT_GPU, WARM, entries, names, own=1, with_untuned=False)
        self.notes = found.notes
        return [c for c in found.contenders if c.role is Role.PEER]

    def test_it_is_a_peer_where_it_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TritonAttention, "lacks", lambda self: "")
        cudnn, triton = self.peers()
        assert (cudnn.name, triton.name) == ("cudnn", "triton")
        assert triton.config.family == "triton_attention"
        assert "triton" not in peers_named("attention")
        assert "triton" not in peers_named("attention", ["cudnn"])

    def test_what_it_lacks_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TritonAttention, "lacks", lambda self: "needs Triton 3.6")
        assert [c.name for c in self.peers()] == ["cudnn"]
        assert "triton is left out: needs Triton 3.6" in self.notes

    def test_it_is_attention_s_alone(self) -> None:
        with pytest.raises(ConfigError, match=r"'triton' is not a peer of gemm"):
            peers_named("gemm", ["triton"])
