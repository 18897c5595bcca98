"""A controller at work in this process; `test_chaos` has those that are killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from queue_toys import OPTIONS, REGIME, Replays, catalogue, repeated, states

from tuner.base.processes import ENDING_SIGNALS
from tuner.cli import main
from tuner.errors import BenchmarkError, NoValidConfigError, StoreBusyError, StoreError
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GemmProblem, Problem
from tuner.runners.choose import Machine
from tuner.settings import store_path
from tuner.store import Store, open_store
from tuner.store.jobs import Lease, result_of
from tuner.store.sql_jobs import Jobs
from tuner.tuning.controller import Controller, Pulse

ONE, TWO = (GemmProblem(size, size, size) for size in (128, 256))


def drained(store: Store, replays: Replays | None = None, **options: Any) -> int:
    """How many problems one controller decides until the queue is empty."""
    runners = replays or Replays()
    with Controller(
        store, Machine(), catalogue=catalogue, create_runners=runners, **options
    ) as controller:
        return controller.run(drain=True)


def wait_until(holds: Callable[[], bool]) -> None:
    """In the main thread, while others go on."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


class TestPulse:
    """What one lease costs the store."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        made = SimpleNamespace(now=100.0)
        monkeypatch.setattr("tuner.tuning.controller.time.monotonic", lambda: made.now)
        return made

    def test_it_is_written_when_it_ages_or_has_something_to_tell(
        self, clock: SimpleNamespace
    ) -> None:
        asked: list[str] = []

        def extend(lease: Lease, progress: Mapping[str, Any], lease_s: float) -> bool:
            asked.append(f"extend {dict(progress)}")
            return True

        jobs: Any = SimpleNamespace(extend=extend, is_held=lambda _: not asked.append("ask"))
        pulse = Pulse(jobs, Lease(1, 1), 20.0)
        for later, progress in ((2, {}), (2, {"done": 1}), (2, {"done": 1}), (4, {"done": 1})):
            clock.now += later
            assert pulse.beat(progress)
        assert asked == ["ask", "extend {'done': 1}", "ask", "extend {'done': 1}"]

    def test_it_lasts_from_its_last_writing_on(self, clock: SimpleNamespace) -> None:
        jobs: Any = SimpleNamespace(extend=lambda *_: True, is_held=lambda _: True)
        pulse = Pulse(jobs, Lease(1, 1), 20.0)
        clock.now += 4
        assert pulse.beat({})  # asked only
        clock.now += 15
        assert pulse.may_hold
        clock.now += 2
        assert not pulse.may_hold
        assert pulse.beat({})
        assert pulse.may_hold


class TestController:
    """One controller in this process."""

    def test_a_job_is_worked_off(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO], OPTIONS)
        assert drained(store) == 2
        assert states(store, job) == ["done", "done"]
        for problem in (ONE, TWO):
            entry = store.best(problem, DEFAULT_GPU, REGIME)
            assert str(entry.provenance) == "replayed"
        assert [task.trials for task in store.jobs.tasks(job)] == [16, 16]
        texts = [event.text for event in store.jobs.events(job)]
        assert sum(text.startswith("done: toy ") for text in texts) == 2
        for task in store.jobs.tasks(job):
            entry = store.best(task.problem, DEFAULT_GPU, REGIME)
            assert entry is not None and task.result == result_of(entry)

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
        assert task.result is not None and task.result["winner"] == "toy"

    def test_the_next_problem_is_claimed_before_the_final_pass(self, store: Store) -> None:
        job = store.jobs.submit([ONE, TWO], OPTIONS)
        drained(store)
        texts = [
            (event.text.split()[0].rstrip(":"), event.problem) for event in store.jobs.events(job)
        ]
        assert texts.index(("attempt", TWO)) < texts.index(("done", ONE))

    @pytest.mark.parametrize("fault", ["cancelled", "busy"])
    def test_a_problem_claimed_ahead_ends_no_other_s_final_pass(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        first, second = (store.jobs.submit([problem], OPTIONS) for problem in (ONE, TWO))
        begin = Jobs.begin
        begun: list[Lease] = []

        def begin_late(jobs: Jobs, lease: Lease, sweep: str) -> None:
            begun.append(lease)
            if len(begun) == 2:
                if fault == "busy":
                    raise StoreBusyError("the store is locked")
                store.jobs.cancel(second)
            begin(jobs, lease, sweep)

        monkeypatch.setattr(Jobs, "begin", begin_late)
        drained(store)
        ended = "cancelled" if fault == "cancelled" else "done"
        assert (states(store, first), states(store, second)) == (["done"], [ended])
        attempts = [store.jobs.tasks(job)[0].attempt for job in (first, second)]
        assert attempts == [1, 1]

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

    def test_a_signal_that_came_too_early_is_sent_again(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that comes just before the main thread begins to wait is not seen until its end."""
        send, sent = signal.pthread_kill, []

        def lose_the_first(thread: int, number: int) -> None:
            sent.append(number)
            if len(sent) > 1:
                send(thread, number)

        monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
        job = store.jobs.submit([ONE], OPTIONS)

        def hang(problem: Problem) -> None:
            store.jobs.cancel(job)
            threading.Event().wait(60)
            pytest.fail("nobody ended the wait")

        assert drained(store, Replays(hang), lease_s=0.3) == 0
        assert sent == [signal.SIGUSR1] * 2
        assert states(store, job) == ["cancelled"]

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
        from tuner.store.sql_jobs import Jobs

        extend, failures = Jobs.extend, []

        def flaky(self: Jobs, *arguments: Any, **options: Any) -> bool:
            if len(failures) < 2:
                failures.append(1)
                raise StoreError("the server is starting up")
            return extend(self, *arguments, **options)

        monkeypatch.setattr(Jobs, "extend", flaky)
        monkeypatch.setattr("tuner.tuning.controller.BEAT_S", 0.01)
        job = store.jobs.submit([ONE], OPTIONS)
        assert drained(store, Replays(lambda _: wait_until(lambda: len(failures) == 2))) == 1
        assert store.jobs.tasks(job)[0].attempt == 1

    def test_progress_is_told_while_at_work(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuner.tuning.controller.BEAT_S", 0.01)
        job = store.jobs.submit([ONE], OPTIONS)
        collected: list[Problem] = []

        def look(problem: Problem) -> None:
            collected.append(problem)
            if len(collected) == 3:  # two groups are known by then
                wait_until(lambda: store.jobs.tasks(job)[0].progress.get("candidates", 0) > 0)
                assert store.jobs.tasks(job)[0].progress["phase"] == "search"

        assert drained(store, Replays(look)) == 1
        assert len(collected) > 3

    @pytest.mark.parametrize("number", ENDING_SIGNALS)
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
            assert controller.stopped_by == number
        assert signal.getsignal(number) == before
        assert [(t.state, t.attempt) for t in store.jobs.tasks(job)] == [("queued", 0)] * 2
        kept = store.measurements()
        assert len(kept) == 4, "two groups were stored, the third was not"
        assert drained(store) == 2
        assert not repeated(store)

    @pytest.mark.parametrize("is_named", [True, False])
    def test_a_store_that_is_named_must_be_there(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        is_named: bool,
    ) -> None:
        monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
        path = tmp_path / "typo.sqlite" if is_named else store_path()
        words = ["worker", "--drain", "--replay", *(["--store", str(path)] if is_named else [])]
        assert main(words) == (1 if is_named else 0)
        said = f"store {path} does not exist" if is_named else "0 problems decided"
        assert said in capsys.readouterr().err
        assert path.exists() is not is_named

    def test_its_exit_code_says_that_problems_failed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        url = str(tmp_path / "s.sqlite")
        with open_store(url) as store:
            store.jobs.submit([ONE], {**OPTIONS, "families": ["absent"]})
            store.jobs.submit([TWO], {**OPTIONS, "lasers": 3})
        assert main(["worker", "--drain", "--replay", "--store", url]) == 1
        assert "0 problems decided, 2 failed" in capsys.readouterr().err

    def test_without_a_gpu_nothing_is_taken_unless_replays_were_asked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuner.measure.device.detect", lambda index=0: None)
        url = str(tmp_path / "s.sqlite")
        with open_store(url) as store:
            job = store.jobs.submit([GemmProblem(4096, 4096, 4096)], OPTIONS)
        assert main(["worker", "--drain", "--store", url]) == 1
        assert "tuner jobs worker --replay" in capsys.readouterr().err
        with open_store(url) as store:
            assert states(store, job) == ["queued"]
        studies = f"sqlite:///{tmp_path / 'optuna.db'}"
        words = ["worker", "--drain", "--replay", "--store", url, "--optuna-storage", studies]
        assert main(words) == 0
        assert "1 problem decided" in capsys.readouterr().err
        with open_store(url) as store:
            assert states(store, job) == ["done"]
        with sqlite3.connect(tmp_path / "optuna.db") as database:
            [(trials,)] = database.execute("SELECT count(*) FROM trials")
        database.close()
        assert trials > 0
