"""Requests dealt to several workers; the workers are scripted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, WorkerLostError
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask, WorkerClient
from tuner.measurement import Regime, Status
from tuner.problem import GemmProblem
from tuner.runners import on_ray
from tuner.runners.on_ray import ClusterPool
from tuner.runners.pool import WorkerPool
from tuner.runners.ray_nodes import Reply
from tuner.runners.ray_workers import Parcels, RemoteWorker

PATIENCE_S = 30.0
"""Longer than anything here takes; only a failure waits for it."""


class FakeWorker:
    """Its requests wait until they are let go, or it is interrupted."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.go = threading.Event()
        self.begun = threading.Event()
        self.interrupted = self.closed = 0

    def wait(self) -> int:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        if self.interrupted:
            raise CancelledError
        return self.number

    def facts(self) -> dict[str, str]:
        return {"torch": "2.11", "asked": str(self.number)}

    def renew(self) -> None:
        pass

    def interrupt(self) -> None:
        self.interrupted += 1
        self.go.set()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def create() -> Iterator[Callable[[int], tuple[WorkerPool, list[FakeWorker]]]]:
    made: list[WorkerPool] = []

    def pool(count: int) -> tuple[WorkerPool, list[FakeWorker]]:
        workers: list[Any] = [FakeWorker(number) for number in range(count)]
        made.append(WorkerPool(workers))
        return made[-1], workers

    yield pool
    for each in made:
        each.close()


Create = Callable[[int], tuple[WorkerPool, list[FakeWorker]]]


def waiting(worker: Any) -> int:
    return int(worker.wait())


def test_every_worker_has_its_own_request_at_the_same_time(create: Create) -> None:
    pool, workers = create(3)
    futures = [pool.submit(waiting) for _ in range(3)]
    assert all(worker.begun.wait(PATIENCE_S) for worker in workers)
    for worker in workers:
        worker.go.set()
    assert sorted(future.result(PATIENCE_S) for future in futures) == [0, 1, 2]


def test_what_waits_goes_to_whichever_is_free(create: Create) -> None:
    pool, workers = create(2)
    for _ in range(2):
        pool.submit(waiting)
    assert all(worker.begun.wait(PATIENCE_S) for worker in workers)
    third = pool.submit(lambda worker: worker)
    assert not third.done()
    workers[1].go.set()
    assert third.result(PATIENCE_S) is workers[1]


def test_order_is_that_of_submission_but_for_what_goes_first(create: Create) -> None:
    pool, (worker,) = create(1)
    pool.submit(waiting)
    assert worker.begun.wait(PATIENCE_S)
    order: list[str] = []
    futures: list[Future[None]] = [
        pool.submit(lambda _, name=name: order.append(name), first=name.isupper())
        for name in ("a", "b", "F", "c", "G")
    ]
    worker.go.set()
    wait(futures, PATIENCE_S)
    assert order == ["F", "G", "a", "b", "c"]


def test_a_worker_prefers_what_it_has_at_home_and_takes_the_rest_rather_than_wait(
    create: Create,
) -> None:
    pool, workers = create(2)
    held = [pool.submit(waiting, affinity=name) for name in "ab"]
    assert all(worker.begun.wait(PATIENCE_S) for worker in workers)
    at_home = dict(zip(("ab" if pool._affine["a"] is workers[0] else "ba"), workers, strict=True))
    order: list[tuple[str, int]] = []

    def note(worker: Any, name: str) -> None:
        order.append((name, worker.number))

    asked = [("a2", "a", False), ("A3", "a", True), ("c", "c", False), ("b2", "b", False)]
    asked += [("c2", "c", True), ("none", None, False)]
    futures = [
        pool.submit(partial(note, name=name), affinity=affinity, first=first)
        for name, affinity, first in asked
    ]
    other = at_home["b"]
    other.go.set()
    wait(futures, PATIENCE_S)
    number = other.number
    # Its own and nobody's in their order, then what is new (and its own from there on), then a's.
    expected = ["b2", "none", "c2", "c", "A3", "a2"]
    assert order == [(name, number) for name in expected]
    at_home["a"].go.set()
    wait(held, PATIENCE_S)


def test_what_a_request_raises_is_its_own(create: Create) -> None:
    pool, _ = create(1)

    def fail(worker: Any) -> None:
        raise BenchmarkError("CUDA device 1 was not found")

    with pytest.raises(BenchmarkError, match="not found"):
        pool.submit(fail).result(PATIENCE_S)
    assert pool.submit(lambda worker: 5).result(PATIENCE_S) == 5


def test_cancelling_kills_the_worker_of_what_runs_and_drops_what_waits(create: Create) -> None:
    pool, workers = create(2)
    running = [pool.submit(waiting) for _ in workers]
    assert all(worker.begun.wait(PATIENCE_S) for worker in workers)
    queued = pool.submit(waiting)
    workers[0].go.set()
    done = {f for f in wait(running, PATIENCE_S, "FIRST_COMPLETED").done if f.done()}
    (other,) = set(running) - done
    pool.cancel([other, *done])
    with pytest.raises(CancelledError):
        other.result(PATIENCE_S)
    assert [worker.interrupted for worker in workers] == [0, 1], "what is done stays done"
    assert done.pop().result() == 0 and queued.result(PATIENCE_S) in (0, 1)


class Card:
    """What a fake actor says of itself."""

    def differs(self, other: Any) -> str:
        return ""


class Actor:
    """Measures, unless it was killed."""

    def __init__(self) -> None:
        self.killed, self.asked = False, 0
        self.card = SimpleNamespace(remote=Card)
        self.measure = SimpleNamespace(remote=self._measure)

    def _measure(self, ask: Ask, wanted: Any) -> Any:
        self.asked += 1
        return Lost("it is dead") if self.killed else Reply([CandidateOutcome(Status.OK, 5.0)])


class Lost(Exception):
    """What Ray raises."""


def get(reference: Any) -> Any:
    if isinstance(reference, Lost):
        raise reference
    return reference


RAY = SimpleNamespace(
    wait=lambda references, timeout: (references, []),
    get=get,
    put=lambda content: content,
    kill=lambda actor: setattr(actor, "killed", True),
    exceptions=SimpleNamespace(RayError=Lost),
)


class TestGivenUpBeforeTheWorkerIsAsked:
    """A request may still wait for the gate's own kernels, which are being compiled."""

    ASK = Ask(
        GemmProblem(m=64, n=64, k=64),
        Regime(),
        "quick",
        1,
        Artifact("k" * 32, Path(__file__), "0" * 64, None, 0.0),
        [(Config("toy"), {})],
    )

    def give_up(self, pool: WorkerPool) -> None:
        begun, compiled = threading.Event(), threading.Event()

        def work(worker: Any) -> Any:
            begun.set()
            assert compiled.wait(PATIENCE_S)
            return worker.measure(self.ASK)

        future = pool.submit(work)
        assert begun.wait(PATIENCE_S)
        pool.cancel([future])
        compiled.set()
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)

    def test_no_process_is_started_and_the_next_request_has_one(self) -> None:
        client = WorkerClient(command=["/nowhere/python"])
        pool = WorkerPool([client])
        self.give_up(pool)
        with pytest.raises(BenchmarkError, match="cannot be started"):
            pool.submit(lambda worker: worker.measure(self.ASK)).result(PATIENCE_S)
        pool.close()

    def test_no_actor_is_asked_and_the_next_request_has_another(self) -> None:
        actors: list[Actor] = []

        def spawn() -> Actor:
            actors.append(Actor())
            return actors[-1]

        pool = ClusterPool([RemoteWorker(RAY, spawn, Parcels(RAY))])
        self.give_up(pool)
        (outcome,) = pool.submit(lambda worker: worker.measure(self.ASK)).result(PATIENCE_S)
        pool.close()
        assert outcome.status is Status.OK and [actor.asked for actor in actors] == [0, 1]

    def test_an_actor_that_was_given_up_too_late_costs_the_next_request_nothing(self) -> None:
        actor = Actor()
        worker = RemoteWorker(RAY, iter([actor, Actor()]).__next__, Parcels(RAY))
        assert worker.begin(0.0) and worker.measure(self.ASK)
        worker.interrupt()
        worker.renew()
        assert worker.begin(0.0) and worker.measure(self.ASK)
        assert actor.killed and actor.asked == 1


def test_another_worker_takes_the_request_of_one_that_was_lost(create: Create) -> None:
    pool, _ = create(2)
    lost: list[Any] = []

    def work(worker: Any) -> int:
        if not lost:
            lost.append(worker)
            raise WorkerLostError("the node is gone")
        return 5

    assert pool.submit(work).result(PATIENCE_S) == 5 and len(lost) == 1


def test_a_request_that_always_loses_its_worker_ends(create: Create) -> None:
    pool, _ = create(1)
    tries: list[int] = []

    def lose(worker: Any) -> None:
        tries.append(1)
        raise WorkerLostError("the node is gone")

    with pytest.raises(BenchmarkError, match=r"3 workers went away at one request.*node is gone"):
        pool.submit(lose).result(PATIENCE_S)
    assert len(tries) == 3 and pool.submit(lambda worker: 5).result(PATIENCE_S) == 5


def test_a_lost_request_that_waits_again_can_be_cancelled(create: Create) -> None:
    pool, (worker,) = create(1)
    begun = threading.Event()

    def lose(_: Any) -> None:
        assert begun.wait(PATIENCE_S)
        raise WorkerLostError("the node is gone")

    lost = pool.submit(lose)
    ahead = pool.submit(waiting, first=True)
    begun.set()
    assert worker.begun.wait(PATIENCE_S), "it was put back behind what goes first"
    pool.cancel([lost])
    with pytest.raises(CancelledError):
        lost.result(PATIENCE_S)
    worker.go.set()
    assert ahead.result(PATIENCE_S) == 0


def test_close_ends_all_of_it_and_may_be_repeated(create: Create) -> None:
    pool, (worker,) = create(1)
    running, queued = pool.submit(waiting), pool.submit(waiting)
    assert worker.begun.wait(PATIENCE_S)
    pool.close()
    with pytest.raises(CancelledError):
        running.result(PATIENCE_S)
    assert queued.cancelled() and worker.closed
    assert pool.submit(waiting).cancelled()
    pool.close()


def test_the_machine_s_facts_are_asked_for_once(create: Create) -> None:
    pool, workers = create(2)
    first = pool.facts()
    assert first["torch"] == "2.11"
    for worker in workers:
        worker.facts = lambda: {}  # type: ignore[method-assign]
    assert pool.facts() == first and len(pool) == 2


class Noted(threading.Condition):
    """Tells that a worker's thread waits at it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.waits = {name: threading.Event() for name in names}

    def wait(self, timeout: float | None = None) -> bool:
        if event := self.waits.get(threading.current_thread().name):
            event.set()
        return super().wait(timeout)


def test_a_request_wakes_a_worker_that_is_free_beside_one_that_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of an actor that is gone waits longer at the same condition, and takes nothing."""
    monkeypatch.setattr(on_ray, "POLL_S", 1000.0)
    here, lost = (
        SimpleNamespace(begin=lambda timeout_s, is_here=is_here: is_here, reason="it is gone",
                        renew=lambda: None, interrupt=lambda: None, close=lambda: None)
        for is_here in (True, False)
    )  # fmt: skip
    workers: Any = [here, lost]
    pool = ClusterPool(workers)
    pool._changed = changed = Noted("worker 0", "worker 1")
    go = threading.Event()
    first = pool.submit(lambda worker: go.wait(PATIENCE_S))
    assert changed.waits["worker 1"].wait(PATIENCE_S)
    go.set()
    assert first.result(PATIENCE_S) and changed.waits["worker 0"].wait(PATIENCE_S)
    try:
        assert pool.submit(lambda worker: 1).result(PATIENCE_S) == 1
    finally:
        pool.close()
