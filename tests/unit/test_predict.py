"""Without GPU and recording: candidates are ranked by their estimates, which say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from bare_family import BareFamily

from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import Domain, KernelSpec
from tuner.families.peers.blas import VendorBlas
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Provenance, Regime
from tuner.problem import GemmProblem, Problem
from tuner.runners.predict import PredictRunner
from tuner.store import open_store
from tuner.tuning.sweep import Sweep, SweepOptions

PROBLEM = GemmProblem(256, 256, 256)
REGIME = Regime("stream", "cold")


class Toy(BareFamily):
    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})
    domains: ClassVar[Mapping[str, Domain]] = {"m": tuple(range(1, 31)), "raster": ("m", "n")}

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config("toy", {"m": m, "raster": r}) for m in range(1, 31) for r in "mn"]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {"main": KernelSpec("toy.cu.j2", {"m": config["m"]})}

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        return 64

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 40.0 - config["m"] + 0.5 * (config["raster"] == "m")


TOY = Toy()


def predict() -> PredictRunner:
    return PredictRunner(DEFAULT_GPU, REGIME, {"toy": TOY}.__getitem__)


def group(m: int) -> list[Config]:
    return [Config("toy", {"m": m, "raster": r}) for r in "mn"]


def test_an_estimate_is_predicted_and_compiles_nothing() -> None:
    runner = predict()
    runner.prefetch(PROBLEM, [group(5)])
    runner.submit(PROBLEM, group(5))
    first, second = runner.collect()
    assert (first.latency_us, second.latency_us) == (35.5, 35.0)
    assert {m.provenance for m in (first, second)} == {Provenance.PREDICTED}
    assert (first.artifacts, first.resources, first.compile_cpu_s) == ({}, {}, None)
    assert (first.std_us, first.rounds, first.workspace_bytes) == (None, 0, 64)
    assert runner.environment.facts == {}


def test_nothing_is_collected_of_what_was_given_up() -> None:
    runner = predict()
    with pytest.raises(BenchmarkError, match="nothing was submitted"):
        runner.collect()
    runner.submit(PROBLEM, group(5))
    runner.cancel()
    assert runner.collect() == [] == runner.collect()
    runner.submit(PROBLEM, group(6))
    assert [m.config["m"] for m in runner.collect()] == [6, 6]


def test_vendors_cannot_be_predicted() -> None:
    vendor = VendorBlas()
    space = vendor.space(PROBLEM, DEFAULT_GPU)
    assert predict().candidates(PROBLEM, vendor, space) == []
    assert predict().candidates(PROBLEM, TOY, group(5)) == group(5)


def test_a_sweep_ranks_the_most_promising_few(tmp_path: Any) -> None:
    with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
        outcome = Sweep(
            PROBLEM,
            REGIME,
            predict(),
            store,
            SweepOptions(sampler="tpe"),
            catalogue=lambda op: {"toy": TOY},
        ).run()
        stored = store.best(PROBLEM, DEFAULT_GPU, REGIME)
    assert outcome.kernels == 2
    assert outcome.ranking[0].config == Config("toy", {"m": 30, "raster": "n"})
    assert (stored.provenance, stored.pass_name) == (Provenance.PREDICTED, "")
