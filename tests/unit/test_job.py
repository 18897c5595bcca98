"""A job on several GPUs: sweeps side by side over one pool; compiler and workers are scripted."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_compiler import FakeCompiler, FakeWorker

from tuner.config import Config
from tuner.errors import BenchmarkError, StoreError
from tuner.families import families_in
from tuner.families.base import Family
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Environment, Provenance, Regime, Status
from tuner.problem import GemmProblem, Problem
from tuner.runners.local import LocalRunner
from tuner.runners.pool import WorkerPool
from tuner.store import Store, open_store
from tuner.tuning.job import Job, JobOptions
from tuner.tuning.progress import Interruption, Watcher
from tuner.tuning.sweep import SweepOptions

PATIENCE_S = 30.0
PROBLEMS = [GemmProblem(m, 64, 64) for m in (64, 128, 192, 256, 320, 384)]
FAMILY = """
from tuner.config import Config
from tuner.families.base import Family, KernelSpec

class Toy(Family):
    name, op = "toy", "gemm"
    def conflicts(self, problem, config, gpu): return []
    def space(self, problem, gpu): return [Config("toy", {"tile": t}) for t in range(1, 13)]
    def predict_us(self, problem, config, gpu): return 10.0 + config.get("tile", 0)
    def kernels(self, problem, config):
        return {"main": KernelSpec("toy.cu.j2", {"tile": config["tile"]})}

class ToyVendor(Toy):
    name, is_vendor = "vendor_toy", True
    def space(self, problem, gpu): return [Config("vendor_toy", {"library": "blas"})]
    def kernels(self, problem, config): return {}
"""
OPTIONS = JobOptions(SweepOptions(trials=12, sampler="cost"), l2="warm")


class ToyCompiler(FakeCompiler):
    jobs, batch = 2, 2

    def compiled(self, family: Family, problem: Problem, space: Any) -> Any:
        return space


class TimingWorker(FakeWorker):
    """The best tile is 5. `before` may block until `interrupt` comes."""

    def __init__(self, before: Callable[[TimingWorker, Ask], None]) -> None:
        super().__init__()
        self.before = before
        self.interrupted = threading.Event()

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        found = super().measure(ask)
        self.before(self, ask)
        if self.interrupted.is_set():
            raise CancelledError
        return found

    def outcome(self, config: Config, ask: Ask) -> CandidateOutcome:
        us = 10.0 + abs(config["tile"] - 5) if config.family == "toy" else 12.5
        return CandidateOutcome(Status.OK, us, us / 1000, ask.rounds or 7)

    def renew(self) -> None:
        self.interrupted.clear()

    def interrupt(self) -> None:
        self.interrupted.set()

    def close(self) -> None:
        self.interrupt()


class Gpus:
    """What `Runners` is on a machine with several GPUs."""

    def __init__(
        self, count: int, module: Path, before: Callable[[TimingWorker, Ask], None]
    ) -> None:
        self.devices = tuple(range(count))
        self.module = module
        self.workers = [TimingWorker(before) for _ in self.devices]
        parts: Any = self.workers
        self.pool = WorkerPool(parts)
        self.closed = 0
        self.begun: list[Problem] = []
        self.refused: Problem | None = None
        self.shared: dict[str, LocalRunner] = {}

    def apart(self, problem: Problem, regime: Regime) -> LocalRunner:
        if problem == self.refused:
            raise BenchmarkError("no such GPU")
        compiler: Any = ToyCompiler()
        self.begun.append(problem)
        return LocalRunner(
            0, regime, compiler, family_modules=[self.module], gpu=DEFAULT_GPU, pool=self.pool
        )

    def of(self, problem: Problem, regime: Regime) -> LocalRunner:
        if str(regime) not in self.shared:
            self.shared[str(regime)] = self.apart(problem, regime)
        return self.shared[str(regime)]

    def close(self) -> None:
        self.closed += 1
        self.pool.close()

    @property
    def asked(self) -> list[Ask]:
        return [ask for worker in self.workers for ask in worker.asked]


class Setting:
    def __init__(self, tmp_path: Path, store: Store) -> None:
        self.module = tmp_path / "toys.py"
        self.module.write_text(FAMILY)
        self.store = store
        self.made: list[Gpus] = []

    def gpus(
        self, count: int, before: Callable[[TimingWorker, Ask], None] = lambda worker, ask: None
    ) -> Gpus:
        self.made.append(Gpus(count, self.module, before))
        return self.made[-1]

    def job(
        self, gpus: Any, problems: list[GemmProblem], options: JobOptions = OPTIONS, **more: Any
    ) -> Job:
        families = families_in(self.module)

        def catalogue(op: str) -> Mapping[str, Family]:
            return {name: family for name, family in families.items() if family.op == op}

        return Job(problems, gpus, self.store, options, catalogue=catalogue, **more)

    def winners(self) -> dict[str, Config]:
        return {
            entry.problem.key: entry.winner.config
            for entry in self.store.entries(provenance=Provenance.MEASURED)
        }

    def repeated(self) -> list[Any]:
        counts = Counter((m.problem, m.config) for m in self.store.measurements(final=False))
        return [trial for trial, count in counts.items() if count > 1]


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    monkeypatch.setattr(device, "environment", lambda index=0: Environment({"driver": "580"}))
    with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
        made = Setting(tmp_path, store)
        yield made
        for gpus in made.made:
            gpus.pool.close()


def both_busy() -> Callable[[TimingWorker, Ask], None]:
    """The first two own candidates wait for each other: both GPUs are at work at a time."""
    meeting, left = threading.Barrier(2), threading.Semaphore(2)

    def before(worker: TimingWorker, ask: Ask) -> None:
        if ask.candidates[0][0].family == "toy" and left.acquire(blocking=False):
            meeting.wait(PATIENCE_S)

    return before


def test_one_problem_s_candidates_are_dealt_to_all_gpus(setting: Setting) -> None:
    gpus = setting.gpus(2, both_busy())
    result = setting.job(gpus, PROBLEMS[:1]).run()
    assert len(result.outcomes) == 1 and setting.repeated() == []
    assert all(worker.asked for worker in gpus.workers)
    assert setting.winners() == {PROBLEMS[0].key: Config("toy", {"tile": 5})}


def test_finalists_and_baselines_are_one_gpu_s(setting: Setting) -> None:
    gpus = setting.gpus(4)
    setting.job(gpus, PROBLEMS).run()
    finals = [ask for ask in gpus.asked if ask.mode == "final"]
    own = [[config.family for config, _ in ask.candidates].count("toy") for ask in finals]
    assert all("vendor_toy" in [config.family for config, _ in ask.candidates] for ask in finals)
    vendors, first, last = (
        [ask for ask, n in zip(finals, own, strict=True) if n == k] for k in (0, 1, 4)
    )
    assert len(vendors) + len(first) + len(last) == len(finals)
    assert max(Counter(ask.problem for ask in vendors).values()) == 1, "before an own kernel"
    assert Counter(ask.problem for ask in last) == dict.fromkeys(PROBLEMS, 1)
    assert max(Counter(ask.problem for ask in first).values()) == 1, "the first answer"


def test_a_job_on_two_gpus_stores_each_trial_once_and_decides_as_on_one(setting: Setting) -> None:
    gpus = setting.gpus(2, both_busy())
    result = setting.job(gpus, PROBLEMS).run()
    assert [o.problem for o in result.outcomes] == PROBLEMS, "in the order of the problems"
    assert not result.failed and not result.interrupted
    assert setting.repeated() == [] and len(gpus.begun) == len(PROBLEMS)
    assert len(setting.store.measurements(final=False)) == len(PROBLEMS) * 13
    together = setting.winners()
    with open_store("sqlite://") as other:
        setting.store = other
        setting.job(setting.gpus(1), PROBLEMS).run()
        assert setting.winners() == together and len(together) == len(PROBLEMS)


def test_several_gpus_begin_with_the_costliest_and_one_with_the_first(setting: Setting) -> None:
    one, two = setting.gpus(1), setting.gpus(2)
    for gpus in (one, two):
        setting.job(gpus, PROBLEMS, replace(OPTIONS, skip_tuned=False)).run()
    assert one.begun[0] == PROBLEMS[0]
    # Two begin at once, so either may have been first.
    assert two.begun[0] in PROBLEMS[-2:] and two.begun[-1] in PROBLEMS[:2]


def test_one_gpu_has_two_problems_at_a_time_where_nothing_is_compiled(setting: Setting) -> None:
    options = replace(OPTIONS, sweep=replace(OPTIONS.sweep, compiled_only=True))
    asked: list[tuple[Problem, str]] = []

    def before(worker: TimingWorker, ask: Ask) -> None:
        asked.append((ask.problem, ask.mode))

    gpus = setting.gpus(1, before)
    result = setting.job(gpus, PROBLEMS, options).run()
    assert [o.problem for o in result.outcomes] == PROBLEMS and len(gpus.begun) == len(PROBLEMS)
    assert setting.repeated() == []
    finals = [problem for problem, mode in asked if mode == "final"]
    assert sorted(finals, key=PROBLEMS.index) == PROBLEMS
    # Vendors' in one request, the 12 own ones in three (the runner's capacity), the final pass.
    assert Counter(problem for problem, _ in asked) == dict.fromkeys(PROBLEMS, 5)


def test_another_search_goes_on_while_finalists_are_timed(setting: Setting) -> None:
    """A final pass and a candidate of another problem that wait for each other."""
    first, second = PROBLEMS[:2]
    begun, measured = threading.Event(), threading.Event()

    def before(worker: TimingWorker, ask: Ask) -> None:
        if (ask.problem, ask.mode) == (second, "quick"):
            assert begun.wait(PATIENCE_S)
            measured.set()
        if (ask.problem, ask.mode) == (first, "final"):
            begun.set()
            assert measured.wait(PATIENCE_S)

    result = setting.job(setting.gpus(2, before), [first, second]).run()
    assert len(result.outcomes) == 2 and measured.is_set()


def test_one_that_fails_does_not_end_the_others(setting: Setting) -> None:
    class Seen(Watcher):
        failures: list[Problem] = []  # noqa: RUF012

        def failed(self, problem: Problem) -> None:
            self.failures.append(problem)

    gpus = setting.gpus(2)
    gpus.refused = PROBLEMS[1]
    result = setting.job(gpus, PROBLEMS[:4], watcher=Seen()).run()
    assert [p for p, _ in result.failed] == [PROBLEMS[1]] == Seen.failures
    assert [o.problem for o in result.outcomes] == [PROBLEMS[0], *PROBLEMS[2:4]]
    again = setting.job(setting.gpus(2), PROBLEMS[:4]).run()
    assert again.skipped == [PROBLEMS[0], *PROBLEMS[2:4]], "what is tuned is skipped"


def test_a_store_that_fails_ends_the_job_at_once(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()

    def before(worker: TimingWorker, ask: Ask) -> None:
        if ask.problem == PROBLEMS[-2] and not hung.is_set():
            hung.set()
            assert worker.interrupted.wait(PATIENCE_S), "nobody gave it up"

    gpus = setting.gpus(2, before)
    add = setting.store.add

    def fail(measurements: Any) -> Any:
        if hung.is_set():
            raise StoreError("the disk is full")
        return add(measurements)

    monkeypatch.setattr(setting.store, "add", fail)
    with pytest.raises(StoreError, match="disk is full"):
        setting.job(gpus, PROBLEMS).run()
    assert gpus.closed == 1


class TestInterruption:
    """Ctrl-C through a real signal to the main thread while others sweep. That thread raises it
    itself: one from another thread may come just before the wait, and wait as well.
    """

    @pytest.fixture
    def on_wait(self, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
        """Done one after the other, each when the main thread begins to wait for the others."""
        acts: list[Callable[[], None]] = []

        def wait(*arguments: Any, **options: Any) -> Any:
            if acts:
                acts.pop(0)()
            return futures.wait(*arguments, **options)

        monkeypatch.setattr("tuner.tuning.job.wait", wait)
        return acts

    @staticmethod
    def press(after: threading.Event) -> Callable[[], None]:
        """Ctrl-C as soon as something has come."""

        def act() -> None:
            assert after.wait(PATIENCE_S)
            signal.raise_signal(signal.SIGINT)

        return act

    def test_the_first_keeps_the_best_so_far_of_each(
        self, setting: Setting, on_wait: list[Callable[[], None]]
    ) -> None:
        asked, lock, hangs = Counter[str](), threading.Lock(), threading.Event()

        def before(worker: TimingWorker, ask: Ask) -> None:
            """Every quick request hangs from the 21st on."""
            with lock:
                asked["all"] += 1
                is_last = asked["all"] > 20 and ask.mode == "quick"
            if is_last:
                hangs.set()
                assert worker.interrupted.wait(PATIENCE_S), "nobody gave it up"

        on_wait.append(self.press(hangs))
        with Interruption() as interruption:
            result = setting.job(setting.gpus(2, before), PROBLEMS, interruption=interruption).run()
        assert result.interrupted and len(result.outcomes) + len(result.failed) < len(PROBLEMS)
        assert setting.winners(), "the best so far is decided"
        assert setting.repeated() == []
        ended = setting.job(setting.gpus(2), PROBLEMS).run()
        assert len(ended.outcomes) + len(ended.skipped) == len(PROBLEMS)
        assert setting.repeated() == [], "a resumed job measures nothing again"

    def test_the_second_ends_at_once(
        self, setting: Setting, on_wait: list[Callable[[], None]]
    ) -> None:
        finals = threading.Event(), threading.Event()
        count, lock = Counter[str](), threading.Lock()

        def before(worker: TimingWorker, ask: Ask) -> None:
            """A final pass hangs; what the first Ctrl-C makes of it, too."""
            if ask.mode == "final":
                with lock:
                    which = min(count["finals"], 1)
                    count["finals"] += 1
                finals[which].set()
                assert worker.interrupted.wait(PATIENCE_S), "nobody gave it up"

        on_wait += map(self.press, finals)
        gpus = setting.gpus(2, before)
        with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
            setting.job(gpus, PROBLEMS, interruption=interruption).run()
        assert gpus.closed == 1 and setting.store.measurements(), "what was finished is kept"
