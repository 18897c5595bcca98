"""How compiler and worker become measurements; both are scripted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from bare_family import BareFamily
from fake_compiler import FakeCompiler, FakeWorker

from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, RenderError, StoreError
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure.evaluate import (
    LOG_LIMIT,
    Evaluator,
    Pending,
    trim,
)
from tuner.measure.gate import REFERENCE
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Environment, Measurement, Provenance, Regime, Resources, Status
from tuner.problem import GemmProblem

PROBLEM = GemmProblem(m=64, n=64, k=64)
REGIME = Regime("stream", "cold")
USED = Resources(168, 0, 0, 0)


class Toy(BareFamily):
    """One kernel a `tile`; `raster` is a run-time argument."""

    name, op = "toy", "gemm"
    runtime_parameters = frozenset({"raster"})

    def kernels(self, problem: Any, config: Config) -> dict[str, KernelSpec]:
        return {"main": KernelSpec("toy.cu.j2", {"tile": 128 // config["tile"]})}


class Vendor(Toy):
    name, is_vendor = "vendor", True

    def kernels(self, problem: Any, config: Config) -> dict[str, KernelSpec]:
        return {}


class AnsweringCompiler(FakeCompiler):
    """Settles what `answers` names by tile; the rest are artifacts."""

    jobs, used = 3, USED

    def __init__(self, late: bool = False) -> None:
        super().__init__(late)
        self.answers: dict[int, Exception] = {}

    def key(self, spec: KernelSpec) -> str:
        return f"{abs(hash(spec)):032x}"

    def error(self, spec: KernelSpec) -> Exception | None:
        return self.answers.get(spec.variables.get("tile", 0))


class AnsweringWorker(FakeWorker):
    def __init__(self, *outcomes: CandidateOutcome) -> None:
        super().__init__()
        self.outcomes = list(outcomes)

    def outcome(self, config: Config, ask: Ask) -> CandidateOutcome:
        return self.outcomes.pop(0) if self.outcomes else super().outcome(config, ask)


class OnOne(Evaluator):
    """An evaluator whose every group is one worker's."""

    def __init__(self, worker: AnsweringWorker, *rest: Any) -> None:
        super().__init__(DEFAULT_GPU, REGIME, *rest)
        self.worker: Any = worker

    def finish(self, pending: Pending, *_: Any, **how: Any) -> list[Measurement]:
        return super().finish(pending, self.worker, **how)

    def evaluate(self, problem: Any, group: Sequence[Config]) -> list[Measurement]:
        return self.finish(self.start(problem, group))


def evaluator(
    compiler: AnsweringCompiler, worker: AnsweringWorker, limit: int | None = None
) -> OnOne:
    members = {"toy": Toy(), "vendor": Vendor()}
    facts = Environment({"driver": "580"})
    return OnOne(worker, compiler, members, lambda: facts, limit)


def toy(tile: int, **more: Any) -> Config:
    return Config("toy", {"tile": tile, **more})


def test_a_measurement_says_everything() -> None:
    worker = AnsweringWorker(CandidateOutcome(Status.OK, 12.5, 0.2, 7, (), 3e-4, 1024))
    (seen,) = evaluator(AnsweringCompiler(late=False), worker, limit=4096).evaluate(
        PROBLEM, [toy(64)]
    )
    assert (seen.status, seen.latency_us, seen.std_us, seen.rounds) == (Status.OK, 12.5, 0.2, 7)
    assert (seen.error, seen.workspace_bytes, seen.is_final) == (3e-4, 1024, False)
    assert (seen.gpu, seen.regime, seen.provenance) == (DEFAULT_GPU, REGIME, Provenance.MEASURED)
    assert seen.environment.facts == {"driver": "580"}
    assert seen.resources == {"main": USED} and len(seen.artifacts["main"]) == 32
    assert seen.created_at.endswith("+00:00")
    assert worker.asked[0].max_workspace == 4096 and worker.asked[0].mode == "quick"


def test_quick_requests_of_a_problem_share_their_inputs_and_others_do_not() -> None:
    worker = AnsweringWorker()
    made = evaluator(AnsweringCompiler(), worker)
    for problem in (PROBLEM, replace(PROBLEM, m=128), PROBLEM):
        made.evaluate(problem, [toy(64)])
    for mode in ("final", "final", "probe"):
        made.finish(made.start(PROBLEM, [toy(64)]), mode=mode)
    first, other, again, *others = (ask.seed for ask in worker.asked)
    assert first == again, "a worker keeps the references of the latest seed"
    assert len({first, other, *others}) == 5


@pytest.mark.parametrize("status", [Status.WRONG_RESULT, Status.ILLEGAL_ACCESS, Status.TIMEOUT])
def test_what_fails_leaves_its_inputs_to_nobody(status: Status) -> None:
    worker = AnsweringWorker()
    made = evaluator(AnsweringCompiler(), worker)
    made.evaluate(PROBLEM, [toy(64)])
    measure = worker.measure
    worker.measure = lambda ask: [replace(one, status=status) for one in measure(ask)]  # type: ignore[method-assign]
    made.evaluate(PROBLEM, [toy(64)])
    worker.measure = measure  # type: ignore[method-assign]
    made.evaluate(PROBLEM, [toy(64)])
    first, failed, after = (ask.seed for ask in worker.asked)
    assert first == failed != after


def test_a_kernel_is_paid_for_once() -> None:
    compiler = AnsweringCompiler(late=True)
    made = evaluator(compiler, AnsweringWorker())
    pending = made.start(PROBLEM, [toy(64, raster="m"), toy(64, raster="n")])
    again = made.start(PROBLEM, [toy(64, raster="h")])
    assert not pending.is_ready
    compiler.build_all()
    assert pending.is_ready
    assert [m.compile_cpu_s for m in made.finish(pending)] == [6.5, 0]
    assert [m.compile_cpu_s for m in made.finish(again)] == [0]


def test_a_cached_kernel_costs_nothing_and_a_vendor_s_has_no_cost() -> None:
    seen = evaluator(AnsweringCompiler(), AnsweringWorker()).evaluate(
        PROBLEM, [toy(64), Config("vendor")]
    )
    assert [m.compile_cpu_s for m in seen] == [0, None]
    assert seen[1].artifacts == {}


def test_a_prefetched_kernel_is_paid_for_by_who_uses_it() -> None:
    compiler = AnsweringCompiler(late=True)
    made = evaluator(compiler, AnsweringWorker())
    made.prefetch(PROBLEM, [toy(64)])
    compiler.build_all()
    assert [m.compile_cpu_s for m in made.evaluate(PROBLEM, [toy(64)])] == [6.5]


def test_what_does_not_compile_is_a_status_and_its_neighbours_are_measured() -> None:
    compiler, worker = AnsweringCompiler(), AnsweringWorker()
    compiler.answers = {
        2: CompileError("toy.cu.j2: error: no", command="nvcc unit.cu", log="line 3: error: no"),
        4: RenderError("template toy.cu.j2: variable 'x' is undefined"),
    }
    group = [toy(64), toy(32), toy(16), toy(0)]
    seen = evaluator(compiler, worker).evaluate(PROBLEM, group)
    assert [m.config for m in seen] == group
    assert [m.status for m in seen] == [Status.COMPILE_ERROR] * 2 + [Status.OK] + [
        Status.COMPILE_ERROR
    ]
    assert seen[0].log.splitlines() == ["toy.cu.j2: error: no", "nvcc unit.cu", "line 3: error: no"]
    assert "'x' is undefined" in seen[1].log
    assert "ZeroDivisionError" in seen[3].log
    assert [c.digest for c, _ in worker.asked[0].candidates] == [group[2].digest]


@pytest.mark.parametrize(
    ("tile", "error"),
    [(0, "ZeroDivisionError"), (None, "TypeError"), ("table", "KeyError"),
     ("attribute", "AttributeError"), ("next", "StopIteration"), ("value", "ValueError")],
)  # fmt: skip
def test_a_config_that_its_family_cannot_express_is_a_status(tile: Any, error: str) -> None:
    class Fragile(Toy):
        name = "fragile"

        def kernels(self, problem: Any, config: Config) -> dict[str, KernelSpec]:
            failing = {
                "table": lambda: {}["tile"],
                "attribute": lambda: config.get("shape").tile_m,
                "next": lambda: next(n for n in (8, 16) if n > 16),
                "value": lambda: int("auto"),
            }
            failing.get(config["tile"], lambda: None)()
            return super().kernels(problem, config)

    made = OnOne(
        AnsweringWorker(), AnsweringCompiler(), {"fragile": Fragile()}, lambda: Environment({})
    )
    bad, good = made.evaluate(
        PROBLEM, [Config("fragile", {"tile": tile}), Config("fragile", {"tile": 64})]
    )
    assert (bad.status, good.status) == (Status.COMPILE_ERROR, Status.OK)
    assert bad.log.startswith("fragile cannot express this config: ") and error in bad.log


def test_nothing_left_to_measure_asks_nobody() -> None:
    compiler, worker = AnsweringCompiler(), AnsweringWorker()
    compiler.answers = {2: CompileError("no")}
    evaluator(compiler, worker).evaluate(PROBLEM, [toy(64)])
    assert worker.asked == []


def test_a_failed_run_is_a_status_with_a_short_log() -> None:
    worker = AnsweringWorker(CandidateOutcome(Status.TIMEOUT, log="first " + "x" * 9000 + " last"))
    (seen,) = evaluator(AnsweringCompiler(), worker).evaluate(PROBLEM, [toy(64)])
    assert seen.status is Status.TIMEOUT and not seen.ok and seen.latency_us is None
    assert seen.log.startswith("first") and seen.log.endswith("last")
    assert len(seen.log) <= LOG_LIMIT


def test_a_full_disk_ends_everything() -> None:
    compiler = AnsweringCompiler()
    compiler.answers = {2: StoreError("the disk is full")}
    with pytest.raises(StoreError, match="disk is full"):
        evaluator(compiler, AnsweringWorker()).evaluate(PROBLEM, [toy(64)])


def test_a_closed_compiler_is_no_verdict_on_a_candidate() -> None:
    compiler = AnsweringCompiler(late=True)
    made = evaluator(compiler, AnsweringWorker())
    pending = made.start(PROBLEM, [toy(64)])
    for future in compiler.futures.values():
        future.cancel()
    with pytest.raises(BenchmarkError, match="cancelled"):
        made.finish(pending)


def test_a_gate_that_does_not_compile_is_an_error() -> None:
    compiler = AnsweringCompiler()
    compiler.answers = {0: CompileError("nvcc: no", command="nvcc", log="log")}
    with pytest.raises(CompileError, match="numerics gate cannot be compiled: nvcc: no"):
        evaluator(compiler, AnsweringWorker()).evaluate(PROBLEM, [toy(64)])
    assert compiler.submitted[0] == REFERENCE


def test_finals_are_marked() -> None:
    worker = AnsweringWorker()
    made = evaluator(AnsweringCompiler(), worker)
    pending = made.start(PROBLEM, [toy(64), Config("vendor")])
    seen = made.finish(pending, mode="final", rounds=20)
    assert all(m.is_final for m in seen)
    assert (worker.asked[0].mode, worker.asked[0].rounds) == ("final", 20)


def test_the_request_names_each_artifact_once() -> None:
    worker = AnsweringWorker()
    evaluator(AnsweringCompiler(), worker).evaluate(PROBLEM, [toy(64, raster=r) for r in "abc"])
    data = worker.asked[0].to_json([0, 2], careful=False)
    assert [c["index"] for c in data["candidates"]] == [0, 2]
    assert len(data["artifacts"]) == 2  # the kernel and the gate's


def test_trim_keeps_both_ends() -> None:
    assert trim("short") == "short"
    assert len(trim("a" * 100_000)) <= LOG_LIMIT
    assert "100000 characters" in trim("a" * 100_000)
