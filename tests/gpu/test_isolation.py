"""Planted faults on the GPU: each ends as a status with its log, and costs nobody else anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import families_in, families_of
from tuner.families.base import Family, KernelSpec
from tuner.families.peers import Vendor
from tuner.hardware import DEFAULT_GPU
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, SwigluProblem
from tuner.runners.local import LocalRunner
from tuner.runners.pool import WorkerPool
from tuner.store import open_store
from tuner.tuning.sweep import Sweep, SweepOptions

pytestmark = pytest.mark.gpu

PROBLEM = GemmProblem(m=512, n=512, k=512)
FAMILIES = Path(__file__).parent / "planted.py"
REGIME = Regime("chained", "warm")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    planted = [
        spec
        for member in families_in(FAMILIES).values()
        for config in member.space(PROBLEM, DEFAULT_GPU)
        for spec in member.kernels(PROBLEM, config).values()
    ]
    return [REFERENCE, *dict.fromkeys(planted)]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One worker for the module: a fresh process takes seconds to import torch.

    The tests in which none dies come first, so that they all have the same process.
    """
    made = WorkerPool([WorkerClient(0, family_modules=[FAMILIES], timeout_s=6)])
    yield made
    made.close()


@pytest.fixture(scope="module")
def local(compiler: Compiler, pool: WorkerPool) -> Callable[..., LocalRunner]:
    """Makes a runner on the module's worker, which is not the runner's to close."""

    def made(regime: Regime, **options: Any) -> LocalRunner:
        return LocalRunner(0, regime, compiler, family_modules=[FAMILIES], pool=pool, **options)

    return made


@pytest.fixture(scope="module")
def runner(local: Callable[..., LocalRunner]) -> LocalRunner:
    return local(REGIME)


def evaluate(runner: LocalRunner, problem: Any, *configs: Config) -> list[Measurement]:
    runner.submit(problem, configs)
    return runner.collect()


def test_a_good_kernel_is_measured(runner: LocalRunner, planted: Any) -> None:
    (seen,) = evaluate(runner, PROBLEM, planted.good(1))
    assert seen.status is Status.OK, seen.log
    assert seen.error is not None and 0 < seen.error < 1e-3
    assert seen.latency_us is not None
    assert seen.latency_us > runner.gpu.floor_us(PROBLEM.flops, PROBLEM.bytes)
    assert seen.clocks.sm_mhz > 0 and seen.environment.facts["driver"]


def test_workspace_is_limited(local: Callable[..., LocalRunner], planted: Any) -> None:
    (seen,) = evaluate(local(REGIME, max_workspace=255), PROBLEM, planted.good(1))
    assert seen.status is Status.OUT_OF_MEMORY and "256 bytes" in seen.log


@pytest.mark.parametrize("regime", ["stream-cold", "chained-cold", "eager-warm", "eager-cold"])
def test_every_regime_is_timed(
    local: Callable[..., LocalRunner], planted: Any, regime: str
) -> None:
    (seen,) = evaluate(local(Regime.parse(regime)), PROBLEM, planted.good(1))
    assert seen.status is Status.OK, seen.log
    assert str(seen.regime) == regime


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        GemmProblem(m=256, n=384, k=512, batch=2, dtype="bfloat16", layout_a="col"),
        AttentionProblem(512, 512, 64, heads_q=4),
        AttentionProblem(256, 512, 128, 2, 8, 2, False, "bfloat16", "bshd"),
        AttentionProblem(512, 512, 64, heads_q=4, is_causal=True),
    ],
    ids=lambda problem: problem.label(),
)
def test_vendors_pass_the_same_gate(runner: LocalRunner, problem: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed: no vendor kernel to measure")
    configs = [
        config
        for family in families_of(problem.op).values()
        if family.is_vendor
        for config in family.space(problem, runner.gpu)
    ]
    seen = evaluate(runner, problem, *configs)
    assert {m.status for m in seen} <= {Status.OK, Status.UNAVAILABLE}, [m.log for m in seen]
    assert Status.OK in {m.status for m in seen}, [m.log for m in seen]
    assert all(m.log for m in seen if m.status is Status.UNAVAILABLE)


@pytest.mark.parametrize(
    "problem",
    [GemmProblem(512, 1024, 256, epilogue="bias_gelu"), SwigluProblem(512, 256, 256)],
    ids=lambda problem: problem.op,
)
def test_what_torch_compiles_is_timed_in_our_graph(
    local: Callable[..., LocalRunner], problem: Any
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: torch.compile needs it")
    vendors = [m for m in families_of(problem.op).values() if isinstance(m, Vendor)]
    (vendor,) = (member for member in vendors if "inductor" in member.on_request)
    config = Config(vendor.name, {"kernel": "inductor"})
    (seen,) = evaluate(local(Regime("chained", "cold")), problem, config)
    assert seen.status is Status.OK, seen.log


@pytest.mark.parametrize("fault", ["leak", "miss", "padding", "scale"])
def test_a_mask_that_is_off_by_one_key_fails(runner: LocalRunner, planted: Any, fault: str) -> None:
    problem = AttentionProblem(300, 300, 64, heads_q=8, is_causal=planted.MASK_FAULTS[fault])
    good, bad = (
        evaluate(runner, problem, planted.masked("good")),
        evaluate(runner, problem, planted.masked(fault)),
    )
    assert good[0].status is Status.OK, good[0].log
    assert bad[0].status is Status.WRONG_RESULT
    assert "dominant inputs" in bad[0].log


def test_a_multiply_add_that_overflows_fails(runner: LocalRunner, planted: Any) -> None:
    problem = AttentionProblem(300, 300, 64, heads_q=8)
    (bad,) = evaluate(runner, problem, planted.masked("fused"))
    assert bad.status in (Status.NOT_FINITE, Status.WRONG_RESULT)
    assert "huge_scores inputs" in bad.log


@pytest.mark.parametrize(
    "fault",
    ["illegal_address", "infinite_loop", "wrong_result", "nan", "out_of_bounds", "changes_input",
     "unwritten", "out_of_memory", "crash", "refused", "synchronizes", "skips"],
)  # fmt: skip
def test_a_fault_is_a_status_and_the_next_is_measured(
    runner: LocalRunner, planted: Any, fault: str
) -> None:
    status, words = planted.FAULTS[fault]
    bad, good = evaluate(runner, PROBLEM, planted.faulty(fault), planted.good(1))
    assert bad.status == status, bad.log
    assert words in bad.log
    assert bad.latency_us is None
    assert good.status is Status.OK, good.log


def test_finals_survive_their_faults(runner: LocalRunner, planted: Any) -> None:
    finalists = [
        planted.good(2),
        planted.faulty("illegal_address"),
        planted.faulty("crash"),
        planted.good(1),
    ]
    seen = runner.retime(PROBLEM, finalists, 20)
    assert [m.config for m in seen] == finalists and all(m.is_final for m in seen)
    assert [m.status.value for m in seen] == ["ok", "illegal_access", "worker_died", "ok"]
    slow, _, _, fast = (m.latency_us for m in seen)
    assert slow is not None and fast is not None and fast < slow
    assert min(seen[0].rounds, seen[3].rounds) >= 20
    assert seen[0].std_us is not None


def test_the_winner_is_the_same_beside_faults(
    runner: LocalRunner, planted: Any, tmp_path: Path
) -> None:
    class Clean(planted.Planted):  # type: ignore[name-defined, misc]
        def space(self, problem: Any, gpu: Any) -> list[Config]:
            return [planted.good(4), planted.good(1), planted.good(2)]

    def swept(name: str, family: Family) -> tuple[Config, dict[Config, set[Status]]]:
        """The winner, and what became of each candidate."""
        store = open_store(f"sqlite:///{tmp_path}/{name}.sqlite")

        def catalogue(op: str) -> Mapping[str, Family]:
            return {"planted": family} if op == "gemm" else {}

        options = SweepOptions(sampler="tpe", trials=40)
        Sweep(PROBLEM, REGIME, runner, store, options, catalogue=catalogue).run()
        entry = store.best(PROBLEM, runner.gpu, REGIME)
        assert entry is not None
        statuses: dict[Config, set[Status]] = {}
        for measured in store.measurements(problem=PROBLEM):
            statuses.setdefault(measured.config, set()).add(measured.status)
        return entry.winner.config, statuses

    winner, statuses = swept("faults", planted.Planted())
    assert winner == planted.good(1)
    # Beside other programs an idle burst may last longer than the floor: its output is wrong, too.
    idle = statuses.pop(planted.faulty("skips"))
    assert idle <= {Status.TOO_FAST, Status.WRONG_RESULT}, idle
    good = {planted.good(repeat): {Status.OK} for repeat in (1, 2, 4)}
    faults = {fault: Status(status) for fault, (status, _) in planted.FAULTS.items()}
    bad = {planted.faulty(fault): {faults[fault]} for fault in faults if fault != "skips"}
    assert statuses == {**good, **bad}
    assert swept("clean", Clean()) == (winner, good)
