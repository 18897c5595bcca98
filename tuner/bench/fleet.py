"""A simulated fleet on one store: what a trial costs its controller, and whether kills lose any.

``python -m tuner.bench fleet`` submits one job of many problems and has many workers take them
under leases, as `tuner worker` does, each replaying a recorded sweep: a trial takes the time that
its kernels took to compile, so many times faster. A part of the workers is killed at random trials:
they stop without a word, keep their lease, and another worker comes in their place.

Threads of one process stand for the workers. What is theirs is counted in CPU time of the thread
(`time.thread_time`), of which the search's (`search.FamilySearch`, `Search.ask`) and the
simulation's own are taken away. A kill is an exception that the sweep lets through: nothing of the
worker runs any more, but what it was writing is finished or rolled back.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tuner import recording
from tuner.bench.results import check_place, write_json
from tuner.errors import ConfigError, LeaseLostError, StoreError
from tuner.families import families_of
from tuner.families.base import group_by_kernels
from tuner.hardware import DEFAULT_GPU
from tuner.job import JobOptions
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem, Problem
from tuner.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.search import FamilySearch, Search
from tuner.store import Store, open_store
from tuner.store.jobs import Claim, Lease
from tuner.store.sql import SqlStore
from tuner.sweep import Sweep, SweepOptions

RECORDED = AttentionProblem.parse("S=1024,D=64")
"""The recording with the most kernels."""
FAMILIES = ("cutlass_fmha", "fused_attention")
LEASE_S = 20.0
"""Shorter than a real one, so that a killed worker's problem waits a like part of the run."""
EXTEND_S = 2.0
LEAST_TRIAL_S = 2.0
"""Of a trial whose kernels were compiled before: checking and timing alone."""
ATTEMPTS = 50
"""A problem may be unlucky often: no kill may fail it."""


class Killed(BaseException):
    """Ends a worker where it stands; nothing on the way may take it for a failure."""


class Clock:
    """CPU seconds of each thread by what they were spent on."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def spent(self, on: str) -> Iterator[None]:
        """Count this thread's time; what is spent inside on something else is not counted here."""
        outer = getattr(self._local, "inner", 0.0)
        self._local.inner, started = 0.0, time.thread_time()
        try:
            yield
        finally:
            took = time.thread_time() - started
            with self._lock:
                self.seconds[on] += took - self._local.inner
            self._local.inner = outer + took

    def counted(self, on: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is counted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.spent(on):
                return call(*arguments, **options)

        return timed


class Worn(ReplayRunner):
    """Replays at a pace, and may be the death of its worker."""

    def __init__(self, recorded: Recording, speed: float, live: Callable[[], None]) -> None:
        super().__init__(recorded)
        self._speed, self._live = speed, live

    def collect(self) -> list[Measurement]:
        measured = super().collect()
        self._live()
        compile_s = sum(m.compile_cpu_s or 0.0 for m in measured)
        time.sleep((LEAST_TRIAL_S + compile_s) / self._speed)
        return measured


class Life:
    """The trials that a worker has left; it dies at the last."""

    def __init__(self, left: float) -> None:
        self._left = left

    def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed


@dataclass
class Fleet:
    """Workers over one store and one job."""

    store: Store
    recorded: Recording
    size: int
    speed: float
    """Times faster than recorded."""
    killed_share: float
    trials_each: float
    """That a worker does in the mean."""
    draw: random.Random
    clock: Clock = field(default_factory=Clock)
    killed: int = 0
    lost_leases: int = 0
    store_errors: int = 0

    def run(self) -> None:
        """Work until no problem is open."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._held: set[Lease] = set()
        doomed = set(self.draw.sample(range(self.size), round(self.killed_share * self.size)))
        extender = threading.Thread(target=self._extend_all, daemon=True)
        extender.start()
        workers = [
            threading.Thread(target=self._worker, args=(number, number in doomed), daemon=True)
            for number in range(self.size)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self._ended.set()
        extender.join()

    def _worker(self, number: int, is_doomed: bool) -> None:
        """One place in the fleet: a worker, and its successor where it is killed."""
        with self._lock:
            doomed = Life(self.draw.uniform(0, 0.8 * self.trials_each))
        for life in [doomed, Life(math.inf)][not is_doomed :]:
            try:
                with self.clock.spent("own"):
                    self._work(f"worker {number}", life)
            except Killed:
                with self._lock:
                    self.killed += 1

    def _work(self, name: str, life: Life) -> None:
        while True:
            try:
                with self.clock.spent("queue"):
                    claim = self.store.jobs.claim(name, LEASE_S)
                    counts = self.store.jobs.counts() if claim is None else {}
                if claim is not None:
                    self._sweep(claim, life)
                elif not counts.get("queued") and not counts.get("running"):
                    return
                else:
                    time.sleep(EXTEND_S / 2)
            except LeaseLostError:
                with self._lock:
                    self.lost_leases += 1
            except StoreError:
                with self._lock:
                    self.store_errors += 1
                time.sleep(EXTEND_S)

    def _sweep(self, claim: Claim, life: Life) -> None:
        """One problem, as `controller.Controller` does it."""
        lease = claim.lease
        with self._lock:
            self._held.add(lease)
        try:
            options = JobOptions.from_json(claim.options)
            with self.clock.spent("simulation"):
                runner = Worn(retold(self.recorded, claim.problem), self.speed, life)
            regime = options.regime(claim.problem)
            sweep = Sweep(claim.problem, regime, runner, self.store.under(lease), options.sweep)
            self.store.jobs.begin(lease, sweep.id)
            outcome = sweep.run()
            self.store.jobs.finish(lease, f"{outcome.kernels} kernels")
        finally:
            with self._lock:
                self._held.discard(lease)

    def _extend_all(self) -> None:
        while not self._ended.wait(EXTEND_S):
            with self._lock:
                held = list(self._held)
            with self.clock.spent("leases"):
                for lease in held:
                    try:
                        self.store.jobs.extend(lease, {}, LEASE_S)
                    except StoreError:
                        self.store_errors += 1


def retold(recorded: Recording, problem: Problem) -> Recording:
    """A recording of one problem as another's."""
    measured = tuple(m.but(problem=problem) for m in recorded.measurements)
    return replace(recorded, problem=problem, measurements=measured, stages=())


def recorded_sweep() -> Recording:
    """The recorded fused kernels of one problem and the baselines beside them.

    Raises:
        ConfigError: when the recording is not there.
    """
    found = recording.find(RECORDED, DEFAULT_GPU, Regime.default(RECORDED.op))
    if found is None:
        raise ConfigError(f"there is no recording of {RECORDED.label()}")
    kept = [m for m in found.measurements if m.config.family in (*FAMILIES, "vendor_sdpa")]
    return replace(found, measurements=tuple(kept), stages=())


def problems_like(recorded: Recording, count: int) -> list[Problem]:
    """Problems at which every recorded kernel is legal: other lengths, heads and batches.

    Raises:
        ConfigError: when there are not so many.
    """
    members = families_of(RECORDED.op)
    own = [m.config for m in recorded.measurements if m.config.family in FAMILIES]
    found: list[Problem] = []
    for length in range(1024, 8192, 8):
        for heads in (16, 12, 20, 24):
            if len(found) == count:
                return found
            problem = AttentionProblem.parse(f"S={length},D=64,H={heads}")
            if all(members[c.family].accepts(problem, c, recorded.gpu) for c in own):
                found.append(problem)
    raise ConfigError(f"problems={count} is out of range (allowed: up to {len(found)})")


def due(recorded: Recording, problem: Problem, trials: int) -> int:
    """Trials that a problem must have in the end: the budget, or all groups that are recorded."""
    members = [families_of(RECORDED.op)[name] for name in FAMILIES]
    runner = ReplayRunner(retold(recorded, problem))
    groups = sum(
        len(list(group_by_kernels(member, runner.restrict(problem, member, space))))
        for member in members
        if (space := member.space(problem, recorded.gpu))
    )
    return min(trials, groups)


def groups_of(measurements: Sequence[Measurement]) -> Counter[Problem]:
    """Groups of own kernels that were measured, which are the trials of a sweep, by problem."""
    members = families_of(RECORDED.op)
    own = {
        (m.problem, m.config.family, members[m.config.family].compile_digest(m.config))
        for m in measurements
        if m.config.family in FAMILIES
    }
    return Counter(problem for problem, *_ in own)


@contextmanager
def counted_apart(clock: Clock) -> Iterator[None]:
    """Count apart what the search does, what planning a problem's space and what storing trials
    takes: the product itself carries no clock.
    """
    places: tuple[tuple[str, type, str], ...] = (
        ("search", Search, "ask"),
        ("search", FamilySearch, "tell"),
        ("search", FamilySearch, "__init__"),
        ("space", Sweep, "_space"),
        ("store", SqlStore, "add"),
    )
    patches = [
        mock.patch.object(place, name, clock.counted(on, getattr(place, name)))
        for on, place, name in places
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def simulate(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """Run the fleet; what it cost, and what the store holds in the end."""
    recorded = recorded_sweep()
    problems = problems_like(recorded, args.problems)
    options = JobOptions(
        SweepOptions(families=FAMILIES, effort="full", trials=args.trials, sampler="cost"),
        widen=False,
    )
    with open_store(url) as store:
        job = store.jobs.submit(problems, options.to_json(), attempts=ATTEMPTS)
        wanted = {problem: due(recorded, problem, args.trials) for problem in problems}
        fleet = Fleet(
            store,
            recorded,
            args.workers,
            args.speed,
            args.kill,
            sum(wanted.values()) / args.workers,
            random.Random(args.seed),
        )
        started = time.monotonic()
        with counted_apart(fleet.clock):
            fleet.run()
        wall_s = time.monotonic() - started
        measured = store.measurements(final=False)
        states = Counter(task.state for task in store.jobs.tasks(job))
        decided = len(store.entries())
        store_ms = store_cost(store, measured)
    per_problem = groups_of(measured)
    trials = sum(per_problem.values())
    repeated = len(measured) - len({(m.problem, m.config) for m in measured})
    seconds = dict(fleet.clock.seconds)
    return {
        "workers": args.workers,
        "workers_are": "threads of one process",
        "killed": fleet.killed,
        "problems": len(problems),
        "trials": trials,
        "candidates": len(measured),
        "wall_s": round(wall_s, 1),
        "speed": args.speed,
        "cpu_ms_per_trial": {on: round(1e3 * s / trials, 4) for on, s in seconds.items()},
        "store_ms": store_ms,
        "tasks": dict(states),
        "decisions": decided,
        "lost_trials": sum(max(0, count - per_problem[p]) for p, count in wanted.items()),
        "repeated_trials": repeated,
        "store_errors": fleet.store_errors,
        "lost_leases": fleet.lost_leases,
    }


def store_cost(store: Store, measured: Sequence[Measurement]) -> dict[str, float]:
    """Milliseconds that one writer at a time keeps the database busy, on the full store: storing
    a trial, and extending a lease.
    """
    job = store.jobs.submit([RECORDED], {}, priority=1)
    claim = store.jobs.claim("store cost", LEASE_S)
    if claim is None:
        raise StoreError("the store gives no lease")
    times: dict[str, list[float]] = {"add": [], "extend": []}
    for number, m in enumerate(measured[:200]):
        fresh = m.but(sweep=f"cost{number}")
        for name, call in (
            ("add", lambda: store.add([fresh])),  # noqa: B023 - called at once
            ("extend", lambda: store.jobs.extend(claim.lease, {}, LEASE_S)),
        ):
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))
    store.jobs.cancel(job)
    return {name: round(sorted(values)[len(values) // 2], 3) for name, values in times.items()}


def main(argv: Sequence[str]) -> int:
    """Simulate; exit code 1 when a trial is lost or there twice.

    Raises:
        ConfigError: when a number is out of range.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench fleet", description=__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--trials", type=int, default=50, help="groups a problem")
    parser.add_argument("--kill", type=float, default=0.2, help="part of the workers (default 0.2)")
    parser.add_argument("--speed", type=float, default=25.0, help="times faster than recorded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", metavar="URL", help="an empty one (default: a temporary file)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    for name in ("workers", "problems", "trials"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}={getattr(args, name)} is out of range (allowed: 1 or more)")
    if not 0 <= args.kill <= 1 or not args.speed > 0:
        raise ConfigError("kill must be between 0 and 1, and speed above 0")
    check_place(args.json)
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(args, args.store or f"sqlite:///{folder}/store.sqlite")
    print(json.dumps(found, indent=1))
    if args.json is not None:
        write_json(args.json, found)
    is_whole = not found["lost_trials"] and not found["repeated_trials"]
    return 0 if is_whole and found["tasks"] == {"done": args.problems} else 1
