"""Without GPU and recording: what compiles is ranked by its estimate, and says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, NoValidConfigError
from tuner.families.base import Family, KernelSpec
from tuner.families.vendor_blas import VendorBlas
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Provenance, Regime, Resources, Status
from tuner.problem import GemmProblem, Problem
from tuner.runners.predict import PredictRunner
from tuner.store import open_store
from tuner.sweep import Sweep, SweepOptions

PROBLEM = GemmProblem(256, 256, 256)
REGIME = Regime("graph", "cold")


class Toy(Family):
    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config("toy", {"m": m, "raster": r}) for m in range(1, 31) for r in "mn"]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {"main": KernelSpec("toy.cu.j2", {"m": config["m"]})}

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        return 64

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 40.0 - config["m"] + 0.5 * (config["raster"] == "m")


TOY = Toy()


class FakeCompiler:
    """Refuses kernels whose `m` is among `refused`."""

    def __init__(self, refused: Sequence[int] = ()) -> None:
        self.refused = refused
        self.jobs = 2
        self.toolchain = SimpleNamespace(nvcc_version="13.0", cutlass_version="4.2")
        self.calls: list[list[int]] = []

    def submit(self, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Future[Artifact]]]:
        self.calls.append([spec.variables["m"] for spec in specs])
        return [(spec, self._compile(spec)) for spec in specs]

    def _compile(self, spec: KernelSpec) -> Future[Artifact]:
        future: Future[Artifact] = Future()
        m = spec.variables["m"]
        if m in self.refused:
            future.set_exception(CompileError("nvcc refused", command="nvcc", log="error: no\nx"))
        else:
            fields: Any = {
                "key": f"{m:032x}",
                "library": None,
                "sha256": "",
                "resources": Resources(168, 0, 0, 0),
                "compile_cpu_s": 20.0,
            }
            future.set_result(Artifact(**fields))
        return future


def predict(compiler: Any) -> PredictRunner:
    return PredictRunner(DEFAULT_GPU, REGIME, compiler, {"toy": TOY}.__getitem__)


def group(m: int) -> list[Config]:
    return [Config("toy", {"m": m, "raster": r}) for r in "mn"]


def test_what_compiles_is_predicted_and_never_measured() -> None:
    runner = predict(FakeCompiler())
    runner.submit(PROBLEM, group(5))
    first, second = runner.collect()
    assert (first.latency_us, second.latency_us) == (35.5, 35.0)
    assert {m.provenance for m in (first, second)} == {Provenance.PREDICTED}
    assert first.artifacts == {"main": f"{5:032x}"}
    assert first.resources["main"].registers == 168
    assert (first.std_us, first.rounds, first.workspace_bytes) == (None, 0, 64)


def test_what_does_not_compile_has_a_status_and_its_log() -> None:
    runner = predict(FakeCompiler(refused=[5]))
    runner.submit(PROBLEM, group(5))
    measured = runner.collect()
    assert {m.status for m in measured} == {Status.COMPILE_ERROR}
    assert measured[0].latency_us is None
    assert "error: no" in measured[0].log


def test_without_a_compiler_estimates_alone() -> None:
    runner = predict(None)
    runner.prefetch(PROBLEM, [group(5)])
    runner.submit(PROBLEM, group(5))
    assert [m.artifacts for m in runner.collect()] == [{}, {}]
    assert runner.environment.facts == {}


def test_nothing_is_collected_of_what_was_given_up() -> None:
    runner = predict(None)
    with pytest.raises(BenchmarkError, match="nothing was submitted"):
        runner.collect()
    runner.submit(PROBLEM, group(5))
    runner.cancel()
    assert runner.collect() == [] == runner.collect()
    runner.submit(PROBLEM, group(6))
    assert [m.config["m"] for m in runner.collect()] == [6, 6]


def test_groups_are_given_to_the_compiler_together() -> None:
    compiler = FakeCompiler()
    predict(compiler).prefetch(PROBLEM, [group(5), group(6)])
    assert compiler.calls == [[5, 6]]


def test_vendors_cannot_be_predicted() -> None:
    vendor = VendorBlas()
    space = vendor.space(PROBLEM, DEFAULT_GPU)
    assert predict(None).restrict(PROBLEM, vendor, space) == []
    assert predict(None).restrict(PROBLEM, TOY, group(5)) == group(5)


def test_sweep_compiles_the_most_promising_few(tmp_path: Any) -> None:
    compiler = FakeCompiler(refused=[30])
    with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
        outcome = Sweep(
            PROBLEM,
            REGIME,
            predict(compiler),
            store,
            SweepOptions(sampler="tpe"),
            catalogue=lambda op: {"toy": TOY},
        ).run()
        stored = store.best(PROBLEM, DEFAULT_GPU, REGIME)
    assert {m for call in compiler.calls for m in call} == {30, 29}
    assert outcome.ranking[0].config == Config("toy", {"m": 29, "raster": "n"})
    assert outcome.failures == {"compile_error": 2}
    assert stored is not None
    assert stored.provenance is Provenance.PREDICTED


def test_nothing_compiles(tmp_path: Any) -> None:
    compiler = FakeCompiler(refused=range(31))
    with (
        open_store(f"sqlite:///{tmp_path}/s.sqlite") as store,
        pytest.raises(NoValidConfigError, match=r"4 compile_error \(as: nvcc refused"),
    ):
        Sweep(
            PROBLEM,
            REGIME,
            predict(compiler),
            store,
            SweepOptions(sampler="tpe"),
            catalogue=lambda op: {"toy": TOY},
        ).run()
