"""A simulated fleet on one store: cost of a trial in its controller, and trials lost to kills.

One job of many problems is submitted. Many workers take them under leases, as `tuner worker` does,
and replay a recorded sweep faster than real time. Workers are threads of several processes. Some
processes are killed (SIGKILL) at random moments and replaced.

A worker's cost is the CPU time of its thread (`time.thread_time`), less that of the search
(`FamilySearch`, `Search.ask`) and of the simulation. The last second of a killed process is not
counted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import Row
from benchmarks.rows import markdown
from tuner.errors import BenchmarkError, ConfigError, LeaseLostError, StoreError
from tuner.families import family
from tuner.families.base import group_by_kernels
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime
from tuner.problem import AttentionProblem, Problem
from tuner.runners import recording_archive
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.search.family_search import FamilySearch
from tuner.search.study import Search
from tuner.store import Store, open_store
from tuner.store.jobs import Claim, Lease
from tuner.tuning.competition import Competition
from tuner.tuning.controller import (
    BEAT_S,
    POLL_S,
    Pulse,
    longer_pause,
)
from tuner.tuning.job import JobOptions
from tuner.tuning.sweep import Sweep, SweepOptions

RECORDED = AttentionProblem.parse("B=16,H=16,S=2048,D=64")
"""The recording with the most kernels."""
FAMILY = "fused_attention"
LEASE_S = 20.0
"""Shorter than a real one, so that a killed worker's problem waits a like part of the run."""
MIN_TRIAL_S = 2.0
"""Seconds of a trial whose kernels were compiled before: check and timing."""
ATTEMPTS = 50
"""A problem may be unlucky often: no kill may fail it."""
LAST_KILL = 0.8
"""Part of the problems that may be done before the last kill: what it takes is to be noticed."""
REPORT_S = 1.0
"""Between two reports of a process."""
NOT_OWN = ("search", "simulation")
"""Parts that are not a cost of the controller."""


@dataclass(frozen=True)
class FleetSize:
    """A fleet and its job."""

    workers: int
    processes: int
    problems: int
    trials: int
    """Groups of a problem, at most."""
    kill: float = 0.2
    """Part of the processes."""
    speed: float = 25.0
    """Times faster than recorded."""
    group = "fleet"

    @property
    def label(self) -> str:
        """Numbers of all."""
        killed = f", {self.kill:.0%} killed" if self.kill else ""
        work = f"{self.problems} problems, {self.trials} trials each"
        return f"{self.workers} workers of {self.processes} processes{killed}, {work}"


CASES = (FleetSize(200, 40, 400, 50), FleetSize(1, 1, 20, 50, kill=0.0, speed=1e9))
SMOKE = FleetSize(1, 1, 2, 3, kill=0.0, speed=1e9)


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

    def read(self) -> dict[str, float]:
        """Counts up to now."""
        with self._lock:
            return dict(self.seconds)

    def counted(self, on: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time is counted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.spent(on):
                return call(*arguments, **options)

        return timed


class Worn(ReplayRunner):
    """Replays at a pace."""

    def __init__(self, recorded: Recording, speed: float, told: Callable[[], None]) -> None:
        super().__init__(recorded)
        self._speed, self._told = speed, told

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        measured = super().collect(timeout_s)
        self._told()
        compile_s = sum(m.compile_cpu_s or 0.0 for m in measured)
        time.sleep((MIN_TRIAL_S + compile_s) / self._speed)
        return measured


@dataclass
class Crew:
    """The workers of one process."""

    url: str
    size: int
    speed: float
    """Times faster than recorded."""
    report: Path
    """File for its periodic reports of CPU time."""

    def run(self) -> None:
        """Work until no problem of the store is open."""
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._held: dict[Lease, Pulse] = {}
        self._clock, self._seen = Clock(), Counter[str]()
        self._faults: list[BaseException] = []
        self._progress: dict[Lease, dict[str, int]] = {}
        self._recorded = recorded_sweep()
        with open_store(self.url) as self._store, counted_apart(self._clock):
            beside = [self._keep_all, self._report_all]
            threads = [threading.Thread(target=target, daemon=True) for target in beside]
            workers = [
                threading.Thread(target=self._worker, args=(number,), daemon=True)
                for number in range(self.size)
            ]
            for thread in (*threads, *workers):
                thread.start()
            for worker in workers:
                worker.join()
            self._ended.set()
            for thread in threads:
                thread.join()
        self._tell()
        if self._faults:
            raise self._faults[0]

    def _worker(self, number: int) -> None:
        try:
            with self._clock.spent("own"):
                self._work(f"{os.getpid()}:{number}")
        except BaseException as exc:  # a thread that ends in silence would look like work done
            self._faults.append(exc)

    def _work(self, name: str) -> None:
        pause_s = POLL_S
        while not self._faults:
            try:
                with self._clock.spent("queue"):
                    claim = self._store.jobs.claim(name, LEASE_S)
                    counts = self._store.jobs.counts() if claim is None else {}
                if claim is not None:
                    pause_s = POLL_S
                    self._sweep(claim)
                elif not counts.get("queued") and not counts.get("running"):
                    return
                else:
                    time.sleep(pause_s)
                    pause_s = longer_pause(pause_s)
            except LeaseLostError:
                self._seen["lost_leases"] += 1
            except StoreError:
                self._seen["store_errors"] += 1
                time.sleep(BEAT_S)

    def _sweep(self, claim: Claim) -> None:
        """One problem, as `controller.Controller` does it."""
        lease = claim.lease
        trials = 0

        def count() -> None:
            nonlocal trials
            trials += 1
            self._progress[lease] = {"done": trials}

        with self._lock:
            self._held[lease] = Pulse(self._store.jobs, lease, LEASE_S)
        try:
            options = JobOptions.from_json(claim.options)
            with self._clock.spent("simulation"):
                runner = Worn(retold(self._recorded, claim.problem), self.speed, count)
            sweep = Sweep(
                claim.problem, runner.regime, runner, self._store.under(lease), options.sweep
            )
            self._store.jobs.begin(lease, sweep.id)
            outcome = sweep.run()
            self._store.jobs.finish(lease, f"{outcome.kernels} kernels")
        finally:
            with self._lock:
                del self._held[lease]
                self._progress.pop(lease, None)

    def _keep_all(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._lock:
                held = list(self._held.items())
            with self._clock.spent("leases"):
                for lease, pulse in held:
                    try:
                        pulse.beat(self._progress.get(lease, {}))
                    except StoreError:
                        self._seen["store_errors"] += 1

    def _report_all(self) -> None:
        while not self._ended.wait(REPORT_S):
            self._tell()

    def _tell(self) -> None:
        told = {"seconds": self._clock.read(), "seen": dict(self._seen)}
        aside = self.report.with_suffix(".new")
        aside.write_text(json.dumps(told))
        aside.replace(self.report)


class Fleet:
    """The processes, and who kills them.

    Args:
        url: URL of the store, with one job.
        size: number of workers and processes, and of the job's problems.
        folder: folder for the reports.
        seed: seed of the kills.
    """

    def __init__(self, url: str, size: FleetSize, folder: Path, seed: str) -> None:
        self._url, self._size, self._folder, self._seed = url, size, folder, seed
        self._started = 0
        self._context = multiprocessing.get_context("spawn")
        self.killed_workers = self.killed_processes = 0

    def run(self, store: Store) -> None:
        """Work until no problem is open.

        Raises:
            BenchmarkError: when a process ends that was not killed.
        """
        draw, size = random.Random(self._seed), self._size
        many, rest = divmod(size.workers, size.processes)
        sizes = [many + (place < rest) for place in range(size.processes)]
        doomed = draw.sample(range(len(sizes)), round(size.kill * len(sizes)))
        kills = sorted((draw.uniform(0, LAST_KILL), place) for place in doomed)
        crews = [self._start(size) for size in sizes]
        try:
            while any(crew.is_alive() for crew in crews):
                time.sleep(0.1)
                done = store.jobs.counts().get("done", 0) / size.problems
                while kills and kills[0][0] <= done:
                    _, place = kills.pop(0)
                    crews[place].kill()
                    crews[place].join()
                    crews[place] = self._start(sizes[place])
                    self.killed_processes += 1
                    self.killed_workers += sizes[place]
        finally:
            for crew in crews:
                crew.kill()
                crew.join()
        for crew in crews:
            if crew.exitcode:
                raise BenchmarkError(f"a process of the fleet ended with code {crew.exitcode}")

    def _start(self, size: int) -> Any:
        self._started += 1
        report = self._folder / f"{self._started}.json"
        crew = Crew(self._url, size, self._size.speed, report)
        process = self._context.Process(target=crew.run)
        process.start()
        return process

    def told(self) -> tuple[Counter[str], Counter[str]]:
        """CPU seconds of all, and what they saw, by name."""
        seconds, seen = Counter[str](), Counter[str]()
        for report in self._folder.glob("*.json"):
            told = json.loads(report.read_text())
            seconds.update(told["seconds"])
            seen.update(told["seen"])
        return seconds, seen


def retold(recorded: Recording, problem: Problem) -> Recording:
    """A recording of one problem as another's."""
    measured = tuple(m.but(problem=problem) for m in recorded.measurements)
    return replace(recorded, problem=problem, measurements=measured, stages=())


def recorded_sweep() -> Recording:
    """The recorded fused kernels of one problem and the baselines beside them.

    Raises:
        ConfigError: when the recording is not there.
    """
    found = recording_archive.find(RECORDED, DEFAULT_GPU, Regime.choices(RECORDED.op))
    if found is None:
        raise ConfigError(f"there is no recording of {RECORDED.label()}")
    kept = [m for m in found.measurements if m.config.family in (FAMILY, "vendor_sdpa")]
    return replace(found, measurements=tuple(kept), stages=())


def problems_like(recorded: Recording, count: int) -> list[Problem]:
    """Problems at which every recorded kernel is legal: other lengths and heads."""
    member = family(FAMILY)
    own = [m.config for m in recorded.measurements if m.config.family == FAMILY]
    shapes = product(range(1024, 8192, 8), (16, 12, 20, 24, 28, 32))
    posed = (AttentionProblem.parse(f"S={length},D=64,H={heads}") for length, heads in shapes)
    legal = (p for p in posed if all(member.accepts(p, c, recorded.gpu) for c in own))
    return list(islice(legal, count))


def due(recorded: Recording, problem: Problem, trials: int) -> int:
    """Trials that a problem must have in the end: the budget, or all groups that are recorded."""
    member, runner = family(FAMILY), ReplayRunner(retold(recorded, problem))
    space = member.space(problem, recorded.gpu)
    configs = runner.candidates(problem, member, space)
    return min(trials, len(list(group_by_kernels(member, configs))))


def groups_of(measurements: Sequence[Measurement]) -> Counter[Problem]:
    """Groups of own kernels that were measured, which are the trials of a sweep, by problem."""
    member = family(FAMILY)
    own = [(m.problem, m.config) for m in measurements if m.config.family == FAMILY]
    groups = {(problem, member.compile_digest(config)) for problem, config in own}
    return Counter(problem for problem, _ in groups)


@contextmanager
def counted_apart(clock: Clock) -> Iterator[None]:
    """Count apart what the search does, what planning a problem's space and what storing trials
    takes: the product itself carries no clock.
    """
    places: tuple[tuple[str, type, str], ...] = (
        ("search", Search, "ask"),
        ("search", FamilySearch, "tell"),
        ("search", FamilySearch, "__init__"),
        ("space", Competition, "_space"),
        ("store", Store, "add"),
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


def measure(size: FleetSize, args: Namespace) -> Row:
    """Run the fleet on a store; ``wrong`` names what was lost."""
    with tempfile.TemporaryDirectory() as folder:
        return simulate(size, args.store or f"sqlite:///{folder}/store.sqlite", Path(folder), args)


def simulate(size: FleetSize, url: str, folder: Path, args: Namespace) -> Row:
    """Costs of the fleet, and contents of the store in the end."""
    recorded = recorded_sweep()
    problems = problems_like(recorded, size.problems)
    options = JobOptions(
        SweepOptions(families=(FAMILY,), effort="full", trials=size.trials, sampler="cost"),
    )
    with open_store(url) as store:
        job = store.jobs.submit(problems, options.to_json(), attempts=ATTEMPTS)
        fleet = Fleet(url, size, folder, args.seed)
        started = time.monotonic()
        fleet.run(store)
        wall_s = time.monotonic() - started
        measured = store.measurements(final=False)
        states = Counter(task.state for task in store.jobs.tasks(job))
        decided = len(store.entries())
        store_ms = store_cost(store, measured)
    wanted = {problem: due(recorded, problem, size.trials) for problem in problems}
    per_problem = groups_of(measured)
    trials = sum(per_problem.values())
    repeated = len(measured) - len({(m.problem, m.config) for m in measured})
    seconds, seen = fleet.told()
    cost = {on: round(1e3 * s / trials, 4) for on, s in sorted(seconds.items())}
    lost = sum(max(0, count - per_problem[p]) for p, count in wanted.items())
    faults = {
        "lost trials": lost,
        "repeated trials": repeated,
        "open problems": size.problems - states["done"],
        "undecided problems": size.problems - decided,
    }
    return {
        "store": url.partition(":")[0],
        "killed_workers": fleet.killed_workers,
        "killed_processes": fleet.killed_processes,
        "trials": trials,
        "candidates": len(measured),
        "wall_s": round(wall_s, 1),
        "cpu_ms_per_trial": cost,
        "controller_ms_per_trial": round(sum(cost[on] for on in cost if on not in NOT_OWN), 4),
        "store_ms": store_ms,
        "load": [round(load, 1) for load in os.getloadavg()],
        "cores": os.cpu_count(),
        "store_errors": seen["store_errors"],
        "lost_leases": seen["lost_leases"],
        "wrong": [f"{count} {name}" for name, count in faults.items() if count],
    }


def store_cost(store: Store, measured: Sequence[Measurement]) -> dict[str, float]:
    """Milliseconds that one writer at a time keeps the database busy, on the full store: storing
    a trial, and extending a lease.

    Raises:
        BenchmarkError: when the store has no trial, or gives no lease.
    """
    if not measured:
        raise BenchmarkError("the fleet ended, and the store has no trial")
    job = store.jobs.submit([RECORDED], {}, priority=1)
    claim = store.jobs.claim("store cost", LEASE_S)
    if claim is None:
        raise BenchmarkError("the store gives no lease")
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


def line(row: Row) -> str:
    """Costs of a trial, and what is wrong."""
    wrong = ", ".join(row["wrong"]) or "nothing lost"
    return (
        f"{row['case']}: {row['controller_ms_per_trial']} ms of the controller for a trial, "
        f"{row['store_ms']['add']} ms to store one, {row['wall_s']} s; {wrong}"
    )


def table(rows: Sequence[Row]) -> list[str]:
    """Milliseconds of a trial, by parts."""
    parts = dict.fromkeys(part for row in rows for part in row.get("cpu_ms_per_trial", {}))
    head = ("fleet", "trials", "killed workers", "controller, ms a trial", *parts, "wrong")
    lines = [
        (
            row["case"],
            *(str(row[name]) for name in ("trials", "killed_workers", "controller_ms_per_trial")),
            *(str(row["cpu_ms_per_trial"].get(part, "")) for part in parts),
            ", ".join(row["wrong"]),
        )
        for row in rows
        if "trials" in row
    ]
    return markdown([head, *lines])
