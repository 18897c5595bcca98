"""Controllers at work: in this process, then as processes that are killed at any moment."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tuner.cli import main
from tuner.config import Config
from tuner.controller import Controller
from tuner.errors import BenchmarkError, NoValidConfigError, StoreError
from tuner.families.base import Family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.job import JobOptions
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import GemmProblem, Problem
from tuner.recording import Recording
from tuner.runners.choose import Machine
from tuner.runners.replay import ReplayRunner
from tuner.store import Store, open_store
from tuner.sweep import SweepOptions
from tuner.watch import Watcher

REGIME = Regime("graph", "cold")
ENVIRONMENT = Environment({"driver": "1"})
ONE, TWO, THREE = (GemmProblem(size, size, size) for size in (128, 256, 512))
OPTIONS = JobOptions(SweepOptions(trials=8, sampler="tpe")).to_json()


class Toy(Family):
    """Twelve kernels of two candidates each; the larger, the faster."""

    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"m": m, "n": n, "raster": raster})
            for m, n, raster in product((16, 32, 64, 128), (64, 128, 256), "mn")
        ]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10.0


def catalogue(op: str) -> Mapping[str, Family]:
    return {"toy": Toy()} if op == "gemm" else {}


def recording(problem: Problem) -> Recording:
    measured = tuple(
        Measurement(
            problem,
            config,
            DEFAULT_GPU,
            REGIME,
            Status.OK,
            environment=ENVIRONMENT,
            latency_us=1e5 / config["m"] / config["n"] + (config["raster"] == "m"),
            std_us=0.001,
            rounds=7,
        )
        for config in Toy().space(problem, DEFAULT_GPU)
    )
    return Recording(problem, DEFAULT_GPU, REGIME, ENVIRONMENT, measured)


class SlowRunner(ReplayRunner):
    """Takes a while for each group, and tells when it has one."""

    def __init__(self, problem: Problem, after: Callable[[Problem], None], pause_s: float) -> None:
        super().__init__(recording(problem))
        self._problem, self._after, self._pause_s = problem, after, pause_s

    def collect(self) -> list[Measurement]:
        time.sleep(self._pause_s)
        self._after(self._problem)
        return super().collect()


class Replays:
    """Stands in for `Runners`: a recording of every problem."""

    gpu = DEFAULT_GPU

    def __init__(
        self, after: Callable[[Problem], None] = lambda problem: None, pause_s: float = 0.0
    ) -> None:
        self.after, self.pause_s = after, pause_s
        self.closed = 0

    def __call__(self, machine: Machine, note: Callable[[str], None]) -> Any:
        return self

    def of(self, problem: Problem, regime: Regime) -> ReplayRunner:
        return SlowRunner(problem, self.after, self.pause_s)

    def __exit__(self, *exc: object) -> None:
        self.closed += 1


class Notes(Watcher):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(str(tmp_path / "s.sqlite")) as made:
        yield made


def drained(store: Store, replays: Replays | None = None, **options: Any) -> int:
    """How many problems one controller decides until the queue is empty."""
    runners = replays or Replays()
    with Controller(
        store, Machine(), catalogue=catalogue, create_runners=runners, **options
    ) as controller:
        return controller.run(drain=True)


def states(store: Store, job: str) -> list[str]:
    return [task.state for task in store.jobs.tasks(job)]


def repeated(store: Store, final: bool = False) -> list[str]:
    """Trials that were stored more than once."""
    trials = Counter(f"{m.problem.key} {m.config.digest}" for m in store.measurements(final=final))
    return [trial for trial, count in trials.items() if count > 1]


class TestController:
    """One controller in this process."""

    def test_a_job_is_worked_off(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO], OPTIONS)
        assert drained(store) == 2
        assert states(store, job) == ["done", "done"]
        for problem in (ONE, TWO):
            entry = store.best(problem, DEFAULT_GPU, REGIME)
            assert entry is not None
            assert str(entry.provenance) == "replayed"
        assert [task.trials for task in store.jobs.tasks(job)] == [16, 16]
        texts = [event.text for event in store.jobs.events(job)]
        assert sum(text.startswith("done: toy ") for text in texts) == 2

    def test_the_urgent_job_comes_first(self, store: Store) -> None:
        order: list[Problem] = []
        store.jobs.submit([ONE], OPTIONS)
        store.jobs.submit([TWO], OPTIONS, priority=1)
        drained(store, Replays(order.append))
        assert list(dict.fromkeys(order)) == [TWO, ONE]

    def test_what_is_tuned_already_ends_at_once(self, store: Store) -> None:
        store.jobs.submit([ONE], OPTIONS)
        drained(store)
        collected: list[Problem] = []
        job = store.jobs.submit([ONE], OPTIONS)
        assert drained(store, Replays(collected.append)) == 0
        assert collected == []
        (task,) = store.jobs.tasks(job)
        assert (task.state, task.trials) == ("done", 16), "with the trials that decided it"

    def test_the_next_problem_is_claimed_before_the_final_pass(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO], OPTIONS)
        drained(store)
        texts = [
            (event.text.split()[0].rstrip(":"), event.problem) for event in store.jobs.events(job)
        ]
        assert texts.index(("attempt", TWO)) < texts.index(("done", ONE))

    def test_one_that_fails_is_retried_and_does_not_end_the_others(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuner.store.sql_jobs.BACKOFF_S", 0.01)
        failures = iter([BenchmarkError("the GPU fell off"), KeyError("a defect")])

        def fail(problem: Problem) -> None:
            if problem == ONE and (failure := next(failures, None)):
                raise failure

        job = store.jobs.submit([ONE, TWO], OPTIONS)
        replays = Replays(fail)
        assert drained(store, replays) == 2
        first, second = store.jobs.tasks(job)
        assert (first.state, first.attempt, second.attempt) == ("done", 3, 1)
        texts = " | ".join(event.text for event in store.jobs.events(job))
        assert "attempt 1 failed: the GPU fell off" in texts
        assert "attempt 2 failed: defect: KeyError: 'a defect'" in texts
        assert replays.closed >= 3, "what evaluates is made anew"

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({**OPTIONS, "families": ["absent"]}, "family 'absent' does not serve gemm"),
            ({**OPTIONS, "lasers": 3}, "unexpected keyword argument 'lasers'"),
            ({**OPTIONS, "effort": "heroic"}, "effort"),
        ],
    )
    def test_options_that_no_attempt_can_mend_fail_once(
        self, store: Store, options: dict[str, Any], reason: str
    ) -> None:
        job = store.jobs.submit([ONE], options)
        assert drained(store) == 0
        (task,) = store.jobs.tasks(job)
        assert (task.state, task.attempt) == ("failed", 1)
        assert reason in task.reason

    def test_nothing_passing_is_final(self, store: Store) -> None:
        def none(problem: Problem) -> None:
            raise NoValidConfigError("no candidate passed")

        job = store.jobs.submit([ONE], OPTIONS)
        drained(store, Replays(none))
        assert [(t.state, t.attempt) for t in store.jobs.tasks(job)] == [("failed", 1)]

    def test_cancelling_ends_a_sweep_within_seconds(self, store: Store) -> None:
        seen = threading.Event()
        job = store.jobs.submit([ONE, TWO], OPTIONS)
        waits = 60.0

        def hang(problem: Problem) -> None:
            seen.set()
            time.sleep(waits)  # A compiler or a kernel that takes its time.

        def cancel() -> None:
            seen.wait()
            store.jobs.cancel(job)

        thread = threading.Thread(target=cancel)
        thread.start()
        started = time.monotonic()
        replays = Replays(hang)
        assert drained(store, replays, lease_s=1.0) == 0
        thread.join()
        assert time.monotonic() - started < waits / 2
        assert states(store, job) == ["cancelled", "cancelled"]
        assert store.best(ONE, DEFAULT_GPU, REGIME) is None
        assert replays.closed, "what was half way through something is gone"

    def test_a_controller_that_slept_too_long_writes_nothing(self, store: Store) -> None:
        """Another one took over while this one's process stood still."""
        taken = []

        def take_over(problem: Problem) -> None:
            if not taken:
                engine: sa.Engine = store._engine  # type: ignore[attr-defined]
                with engine.begin() as connection:
                    connection.execute(sa.text("UPDATE tasks SET expires_at = 0"))
                store.jobs.claim("host:2")
                with engine.begin() as connection:
                    connection.execute(sa.text("UPDATE tasks SET not_before = 0"))
                taken.append(store.jobs.claim("host:2"))
                store.jobs.finish(taken[0].lease, "by the other")

        job = store.jobs.submit([ONE], OPTIONS)
        assert drained(store, Replays(take_over)) == 0
        assert taken[0] is not None
        assert states(store, job) == ["done"]
        assert store.measurements() == []

    def test_a_lease_outlives_a_store_that_fails_for_a_while(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tuner.store.sql_jobs import SqlJobs

        extend, failures = SqlJobs.extend, []

        def flaky(self: SqlJobs, *arguments: Any, **options: Any) -> bool:
            if len(failures) < 2:
                failures.append(1)
                raise StoreError("the server is starting up")
            return extend(self, *arguments, **options)

        monkeypatch.setattr(SqlJobs, "extend", flaky)
        job = store.jobs.submit([ONE], OPTIONS)
        assert drained(store, Replays(pause_s=0.2), lease_s=1.5) == 1
        assert len(failures) == 2
        assert store.jobs.tasks(job)[0].attempt == 1

    def test_progress_is_told_while_at_work(self, store: Store) -> None:
        job = store.jobs.submit([ONE], OPTIONS)
        told: list[Mapping[str, Any]] = []

        def look(problem: Problem) -> None:
            told.append(store.jobs.tasks(job)[0].progress)

        drained(store, Replays(look, pause_s=0.15), lease_s=0.3)
        assert any(facts.get("candidates", 0) > 0 for facts in told)
        assert {"search"} <= {facts.get("phase") for facts in told}

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_being_stopped_gives_the_problem_back_at_once(self, store: Store, number: int) -> None:
        job = store.jobs.submit([ONE, TWO], OPTIONS)
        collected = []

        def stop(problem: Problem) -> None:
            collected.append(problem)
            if len(collected) == 3:
                os.kill(os.getpid(), number)

        before = signal.getsignal(number)
        with Controller(
            store, Machine(), catalogue=catalogue, create_runners=Replays(stop)
        ) as controller:
            assert controller.run() == 0
            assert controller.was_stopped
        assert signal.getsignal(number) == before
        assert [(t.state, t.attempt) for t in store.jobs.tasks(job)] == [("queued", 0)] * 2
        kept = store.measurements()
        assert len(kept) == 4, "two groups were stored, the third was not"
        assert drained(store) == 2
        assert not repeated(store)

    def test_without_a_gpu_nothing_is_taken_unless_replays_were_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuner.device.detect", lambda index=0: None)
        url = str(tmp_path / "s.sqlite")
        with open_store(url) as store:
            job = store.jobs.submit([GemmProblem(4096, 4096, 4096)], OPTIONS)
        assert main(["worker", "--drain", "--store", url]) == 1
        assert "tuner worker --replay" in capsys.readouterr().err
        with open_store(url) as store:
            assert states(store, job) == ["queued"]
        assert main(["worker", "--drain", "--replay", "--store", url]) == 0
        assert "1 problems decided" in capsys.readouterr().err
        with open_store(url) as store:
            assert states(store, job) == ["done"]


WORKER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("queue_worker", sys.argv[1])
toys = importlib.util.module_from_spec(spec)
sys.modules["queue_worker"] = toys
spec.loader.exec_module(toys)
from tuner.store import sql_jobs
sql_jobs.BACKOFF_S = 0.1
with (
    toys.open_store(sys.argv[2]) as store,
    toys.Controller(
        store,
        toys.Machine(),
        lease_s=1.0,
        catalogue=toys.catalogue,
        create_runners=toys.Replays(pause_s=0.02),
    ) as controller,
):
    print("ready", flush=True)
    controller.run(drain=True)
"""


class Fleet:
    """Worker processes on one store; those that die are replaced."""

    def __init__(self, url: str, size: int, log: Path) -> None:
        self._url, self.log = url, log
        self.processes = [self._start() for _ in range(size)]

    def _start(self) -> subprocess.Popen[str]:
        root = Path(__file__).resolve().parents[2]
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", WORKER, __file__, self._url],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(root)},
            )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", self.log.read_text()
        return process

    def kill_one(self, draw: random.Random) -> None:
        victim = draw.randrange(len(self.processes))
        self.processes[victim].kill()
        self.processes[victim].communicate()
        self.processes[victim] = self._start()

    def join(self) -> list[int]:
        for process in self.processes:
            process.communicate(timeout=120)
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_whoever_is_killed_the_job_ends_and_every_trial_is_there_once(
    backend: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Two controllers; again and again one of them is killed where it stands. On PostgreSQL the
    server is, too.
    """
    url = str(tmp_path / "s.sqlite")
    if backend == "postgresql":
        url = request.getfixturevalue("create_postgres_url")()
    problems = [GemmProblem(64 * n, 64, 64) for n in range(1, 7)]
    with open_store(url) as store:
        # The same problems in two jobs, and far more attempts than there are murders.
        jobs = [store.jobs.submit(problems, OPTIONS, attempts=50) for _ in range(2)]
    draw = random.Random(7)
    with contextlib.closing(Fleet(url, 2, tmp_path / "log")) as fleet:
        for murder in range(2):
            time.sleep(draw.uniform(0.2, 0.6))
            fleet.kill_one(draw)
            if backend == "postgresql" and murder == 1:
                server = request.getfixturevalue("postgres_server")
                server.kill()
                time.sleep(0.5)
                server.start()
        assert fleet.join() == [0, 0], fleet.log.read_text()
    with open_store(url) as store:
        for job in jobs:
            assert states(store, job) == ["done"] * len(problems)
        assert not repeated(store)
        assert len(store.measurements(final=False)) == len(problems) * 16
        for problem in problems:
            assert store.best(problem, DEFAULT_GPU, REGIME) is not None
        sweeps = {m.sweep for m in store.measurements(final=False)}
        assert len(sweeps) == len(problems), "whoever went on took up the same sweep"
