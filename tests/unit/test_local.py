"""The local runner's order of work; compiler, worker and device are scripted."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_compiler import FakeCompiler, FakeWorker

from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families_in
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measure.gate import REFERENCE
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Environment, Regime, Status
from tuner.problem import GemmProblem
from tuner.runners.base import Building
from tuner.runners.local import LocalRunner
from tuner.runners.pool import WorkerPool

PROBLEM = GemmProblem(m=64, n=64, k=64)
PATIENCE_S = 30.0
"""Longer than anything here takes; only a failure waits for it."""
FAMILY = """
from tuner.families.base import Family, KernelSpec

class Planted(Family):
    name, op = "planted", "gemm"
    def conflicts(self, problem, config, gpu): return []
    def space(self, problem, gpu): return []
    def predict_us(self, problem, config, gpu): return 1.0
    def kernels(self, problem, config):
        return {"main": KernelSpec("planted.cu.j2", {"tile": config["tile"]})}

class Listed(Planted):
    name, is_vendor, is_listed = "listed", True, True
    domains = {"n": (1, 2)}

class Half(Planted):
    name, is_vendor = "ready", True
    def kernels(self, problem, config): return {}
"""


class TiledCompiler(FakeCompiler):
    """Has the gate's kernel; others when it is told of their tiles."""

    def __init__(self) -> None:
        super().__init__(late=True)
        self.submit([REFERENCE])
        self.build(REFERENCE)

    def build_tile(self, tile: int) -> None:
        self.build(KernelSpec("planted.cu.j2", {"tile": tile}))


class ListingWorker(FakeWorker):
    def __init__(self) -> None:
        super().__init__()
        self.listed: list[tuple[Any, ...]] = []
        self.found = [2, 1, 3]
        self.holds: threading.Event | None = None

    def listing(self, problem: GemmProblem, family: str, most: int | None) -> list[Config]:
        self.listed.append((problem, family, most))
        if self.holds is not None:
            self.holds.wait(PATIENCE_S)
            raise CancelledError
        return [Config(family, {"n": n}) for n in self.found]

    def interrupt(self) -> None:
        if self.holds is not None:
            self.holds.set()


class Results(queue.SimpleQueue[Any]):
    """A runner's results; does something first when somebody waits for one."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self.on_wait = on_wait

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.on_wait()
        return super().get(block, timeout)


def press_ctrl_c() -> None:
    """In the thread that waits: a signal from another may come just before the wait, and last."""
    signal.raise_signal(signal.SIGINT)


def after(event: threading.Event, then: Callable[[], object]) -> None:
    """Do something in another thread once an event has come."""

    def run() -> None:
        assert event.wait(PATIENCE_S), "what was to come first did not come"
        then()

    threading.Thread(target=run, daemon=True).start()


Made = tuple[LocalRunner, TiledCompiler, ListingWorker]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Made]:
    (tmp_path / "planted.py").write_text(FAMILY)
    facts = Environment({"driver": "580"})
    monkeypatch.setattr(device, "environment", lambda index: facts)

    def runner() -> Made:
        compiler, worker = TiledCompiler(), ListingWorker()
        parts: Any = (compiler, worker)
        made = LocalRunner(
            0,
            Regime("stream", "warm"),
            parts[0],
            family_modules=[tmp_path / "planted.py"],
            gpu=DEFAULT_GPU,
            pool=WorkerPool([parts[1]]),
        )
        return made, compiler, worker

    return runner


def config(tile: int) -> Config:
    return Config("planted", {"tile": tile})


def tiles(measurements: Any) -> list[int]:
    return [m.config["tile"] for m in measurements]


def test_what_is_compiled_first_is_timed_first(make: Callable[[], Made]) -> None:
    runner, compiler, _ = make()
    for tile in (64, 128, 256):
        runner.submit(PROBLEM, [config(tile)])
    compiler.build_tile(128)
    assert tiles(runner.collect()) == [128]
    compiler.build_tile(256)
    compiler.build_tile(64)
    assert tiles(runner.collect()) + tiles(runner.collect()) == [256, 64]


def test_a_vendor_s_group_waits_for_no_compiler(make: Callable[[], Made]) -> None:
    runner, _, worker = make()
    runner.submit(PROBLEM, [config(64)])
    runner.submit(PROBLEM, [Config("ready")])
    (seen,) = runner.collect()
    assert seen.config == Config("ready") and seen.ok
    assert len(worker.asked) == 1


def test_collect_waits_for_the_compiler(make: Callable[[], Made]) -> None:
    runner, compiler, _ = make()
    is_waited_for = threading.Event()
    runner._done = Results(is_waited_for.set)
    runner.submit(PROBLEM, [config(64)])
    after(is_waited_for, lambda: compiler.build_tile(64))
    assert tiles(runner.collect()) == [64]


def test_collecting_nothing_is_an_error(make: Callable[[], Made]) -> None:
    with pytest.raises(BenchmarkError, match="nothing was submitted"):
        make()[0].collect()


def test_retiming_is_one_final_request(make: Callable[[], Made]) -> None:
    runner, compiler, worker = make()
    runner.prefetch(PROBLEM, [[config(64)], [config(128)]])
    compiler.build_tile(64)
    compiler.build_tile(128)
    seen = runner.retime(PROBLEM, [config(64), config(128), Config("ready")], 20)
    assert [m.is_final for m in seen] == [True] * 3 and [m.rounds for m in seen] == [20] * 3
    assert [(ask.mode, len(ask.candidates)) for ask in worker.asked] == [("final", 3)]


def test_the_environment_joins_machine_compiler_and_vendors(make: Callable[[], Made]) -> None:
    facts = make()[0].environment.facts
    assert facts == {"driver": "580", "nvcc": "13.0.88", "cutlass": "4.2.0", "torch": "2.11"}


@pytest.mark.parametrize(("capability", "found"), [("9.0", None), ("8.0", "3.6.0")])
def test_triton_is_a_fact_where_its_kernels_compete(
    capability: str, found: str | None, make: Callable[[], Made]
) -> None:
    runner, compiler, _ = make()
    tools: Any = SimpleNamespace(**vars(compiler.toolchain), triton_version="3.6.0")
    compiler.toolchain = tools
    runner.gpu = replace(DEFAULT_GPU, compute_capability=capability)
    assert runner.environment.facts.get("triton") == found


def test_capacity_follows_the_compiler(make: Callable[[], Made]) -> None:
    assert make()[0].capacity == 16


def test_close_drops_what_is_submitted_and_leaves_the_pool_to_others(
    make: Callable[[], Made],
) -> None:
    runner, compiler, worker = make()
    runner.submit(PROBLEM, [config(64)])
    runner.close()
    compiler.build_tile(64)
    assert worker.closed == 0 and worker.asked == []
    assert runner.collect() == []


def test_close_ends_a_worker_of_its_own(make: Callable[[], Made]) -> None:
    compiler: Any = TiledCompiler()
    runner = LocalRunner(0, Regime(), compiler, gpu=DEFAULT_GPU)
    pool = runner._pool
    runner.close()
    assert pool.submit(lambda worker: worker.pid).cancelled()


class TestAbandoning:
    def test_what_compiles_is_given_up_and_what_is_timed_is_not(
        self, make: Callable[[], Made]
    ) -> None:
        runner, compiler, worker = make()
        other = GemmProblem(m=128, n=64, k=64)
        begun, goes_on = threading.Event(), threading.Event()

        def measure(ask: Ask) -> list[CandidateOutcome]:
            begun.set()
            assert goes_on.wait(PATIENCE_S)
            return [CandidateOutcome(Status.OK, 10.0, 0.1, 7) for _ in ask.candidates]

        worker.measure = measure  # type: ignore[method-assign]
        for tile, problem in ((64, PROBLEM), (128, PROBLEM), (256, PROBLEM), (512, other)):
            runner.submit(problem, [config(tile)])
        compiler.build_tile(64)
        assert begun.wait(PATIENCE_S)
        compiler.build_tile(128)  # waits for the GPU
        runner.abandon(PROBLEM)
        assert compiler.released == [runner._evaluator.owner(PROBLEM)]
        compiler.build_tile(256)
        compiler.build_tile(512)
        goes_on.set()
        assert [runner.collect()[0].config["tile"] for _ in range(2)] == [64, 512]
        with pytest.raises(BenchmarkError, match="nothing was submitted"):
            runner.collect()

    def test_what_is_under_way_says_how_long(self, make: Callable[[], Made]) -> None:
        runner, compiler, _ = make()
        for tile in (64, 128, 256):
            runner.submit(PROBLEM, [config(tile)])
        compiler.build_tile(64)
        compiler.begun = [KernelSpec("planted.cu.j2", {"tile": 128})]
        found = runner.under_way(PROBLEM)
        assert found == [Building(config(128), 6.0, 2), Building(config(256), None, 1)]
        assert runner.under_way(GemmProblem(m=128, n=64, k=64)) == []

    def test_no_wait_is_longer_than_its_limit(self, make: Callable[[], Made]) -> None:
        runner, compiler, worker = make()
        runner.submit(PROBLEM, [config(64)])
        with pytest.raises(TimeoutError):
            runner.collect(0.0)
        assert runner.retime(PROBLEM, [config(64)], 20, 0.0) == [], "it is not compiled"
        compiler.build_tile(64)
        assert tiles(runner.collect(PATIENCE_S)) == [64]
        worker.holds = threading.Event()

        def hang(ask: Ask) -> list[CandidateOutcome]:
            assert worker.holds is not None and worker.holds.wait(PATIENCE_S)
            raise CancelledError

        worker.measure = hang  # type: ignore[method-assign]
        assert runner.retime(PROBLEM, [config(64)], 20, 0.05) == []
        assert worker.holds.is_set(), "the worker was ended"


class TestCuttingShort:
    """A request that hangs until its worker is interrupted."""

    @pytest.fixture
    def hung(self, make: Callable[[], Made]) -> LocalRunner:
        runner, compiler, worker = make()
        self.begun, self.interrupted = threading.Event(), threading.Event()
        self.is_waited_for = threading.Event()
        runner._done = self.results = Results(self.is_waited_for.set)

        def measure(ask: Ask) -> list[CandidateOutcome]:
            self.begun.set()
            assert self.interrupted.wait(30), "nobody gave it up"
            raise CancelledError

        fake: Any = worker
        fake.measure, fake.interrupt = measure, self.interrupted.set
        runner.submit(PROBLEM, [config(64)])
        runner.submit(PROBLEM, [config(128)])
        compiler.build_tile(64)
        return runner

    @pytest.fixture
    def final(self, hung: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
        """Takes what is done first when somebody waits for a final pass."""
        submit = hung._pool.submit
        on_wait: list[Callable[[], None]] = []

        def watched(*args: Any, **options: Any) -> Future[Any]:
            timing: Future[Any] = submit(*args, **options)
            result = timing.result

            def wait(timeout_s: float | None = None) -> Any:
                for act in on_wait:
                    act()
                return result(timeout_s)

            monkeypatch.setattr(timing, "result", wait)
            return timing

        monkeypatch.setattr(hung._pool, "submit", watched)
        return on_wait.append

    def test_ctrl_c_while_collecting_gives_up_what_is_timed(self, hung: LocalRunner) -> None:
        assert self.begun.wait(PATIENCE_S)
        self.results.on_wait = press_ctrl_c
        with pytest.raises(KeyboardInterrupt):
            hung.collect()
        assert self.interrupted.wait(PATIENCE_S) and hung.building == 0

    def test_ctrl_c_during_the_final_pass_gives_it_up(
        self, hung: LocalRunner, final: Callable[[Any], None]
    ) -> None:
        assert self.begun.wait(PATIENCE_S)
        final(press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            hung.retime(PROBLEM, [config(64)], 20)
        hung.close()

    @pytest.mark.parametrize("waits_in", ["collect", "retime"])
    def test_another_thread_ends_the_wait(
        self, hung: LocalRunner, final: Callable[[Any], None], waits_in: str
    ) -> None:
        assert self.begun.wait(PATIENCE_S)
        final(self.is_waited_for.set)
        after(self.is_waited_for, hung.cancel)
        if waits_in == "collect":
            assert hung.collect() == []
        else:
            assert hung.retime(PROBLEM, [config(64)], 20) == []
        assert self.interrupted.wait(30)
        assert hung.collect() == []


class Cancelling(list[Any]):
    """The open groups of a runner that is cancelled when somebody looks whether there are any: at
    once, or as soon as its lock is free.
    """

    def __init__(self, runner: LocalRunner) -> None:
        super().__init__(runner._open)
        self.runner = runner
        self.thread = threading.Thread(target=runner.cancel)

    def __len__(self) -> int:
        self.thread.start()
        if not self.runner._lock.locked():
            self.thread.join()
        return super().__len__()


def test_a_cancel_while_collecting_begins_ends_it(make: Callable[[], Made]) -> None:
    runner, compiler, _ = make()
    runner.submit(PROBLEM, [config(64)])
    open_groups = runner._open = Cancelling(runner)
    collected: list[Any] = []
    thread = threading.Thread(target=lambda: collected.append(runner.collect()), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    open_groups.thread.join()
    assert collected == [[]], "it waits for what was given up"
    runner.submit(PROBLEM, [config(128)])
    compiler.build_tile(128)
    assert tiles(runner.collect()) == [128], "what is submitted later is collected"


def test_a_machine_without_the_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect", lambda index: None)
    compiler: Any = TiledCompiler()
    with pytest.raises(BenchmarkError, match="CUDA device 3 was not found"):
        LocalRunner(3, Regime(), compiler)


def test_families_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(FAMILY)
    assert set(families_in(tmp_path / "planted.py")) == {"planted", "listed", "ready"}
    (tmp_path / "broken.py").write_text("import no_such_module")
    with pytest.raises(ConfigError, match="cannot be imported"):
        families_in(tmp_path / "broken.py")


def test_a_library_s_candidates_are_asked_for_and_judged(
    make: Callable[[], Made], tmp_path: Path
) -> None:
    runner, _, worker = make()
    members = families_in(tmp_path / "planted.py")
    first = [Config("listed", {"n": 1})]
    assert runner.candidates(PROBLEM, members["planted"], first) == first
    assert worker.listed == []
    found = runner.candidates(PROBLEM, members["listed"], first)
    assert [config["n"] for config in found] == [2, 1], "in its order, without what is not legal"
    assert worker.listed == [(PROBLEM, "listed", None)]
    worker.found = []
    assert runner.candidates(PROBLEM, members["listed"], first) == first


def test_a_listing_can_be_given_up(make: Callable[[], Made], tmp_path: Path) -> None:
    runner, _, worker = make()
    member = families_in(tmp_path / "planted.py")["listed"]
    worker.holds = threading.Event()
    first = [Config("listed", {"n": 1})]
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(runner.candidates(PROBLEM, member, first)), daemon=True
    )
    thread.start()
    while not worker.listed:
        assert thread.is_alive()
    runner.cancel()
    thread.join(PATIENCE_S)
    assert found == [first]
