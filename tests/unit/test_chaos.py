"""What goes wrong in the middle of a job: processes killed with SIGKILL, a full disk, a clock that
jumps, two controllers on one job. Every finished trial is there once, and the job ends.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import queue_toys
import sqlalchemy as sa
from queue_toys import OPTIONS, REGIME, Replays, catalogue, repeated, states

from tuner.base.processes import python_command, python_environment
from tuner.compile.artifacts import Artifact
from tuner.hardware import DEFAULT_GPU
from tuner.measure.worker_client import WorkerClient
from tuner.measurement import Regime, Status
from tuner.problem import GemmProblem, Problem
from tuner.runners.choose import Machine
from tuner.runners.local import LocalRunner
from tuner.runners.pool import WorkerPool
from tuner.store import Store, open_store
from tuner.tuning.controller import Controller
from tuner.tuning.progress import Watcher

PROBLEMS = [GemmProblem(64 * n, 64, 64) for n in range(1, 7)]
EACH = 16
"""Trials of a problem under `OPTIONS`."""
PATIENCE_S = 120.0
"""Longer than anything here takes; only a failure waits for it."""
ATTEMPTS = 50
"""Far more than anything here takes from a problem."""


class Fleet:
    """Controllers as processes on one store; those that die are replaced at once.

    Args:
        url: of the store.
        size: processes at work from the start.
        log: takes what they say.
        spares: processes that wait to replace others.
        clock: file with the seconds by which their clock is off.
    """

    def __init__(
        self, url: str, size: int, log: Path, spares: int = 0, clock: Path | None = None
    ) -> None:
        self._arguments = [url, *([str(clock)] if clock else [])]
        self.log = log
        self.processes: list[subprocess.Popen[str]] = []
        self._spares = [self._start() for _ in range(size + spares)]
        for process in self._spares:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", self.log.read_text()
        for _ in range(size):
            self._put_to_work()

    def _start(self) -> subprocess.Popen[str]:
        script = Path(queue_toys.__file__).with_name("chaos_worker.py")
        root = str(script.parents[2])
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(script), *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": root},
            )

    def _put_to_work(self) -> None:
        process = self._spares.pop()
        self.processes.append(process)
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()

    def kill_one(self, draw: random.Random) -> None:
        victim = self.processes.pop(draw.randrange(len(self.processes)))
        victim.kill()
        victim.communicate()
        self._put_to_work()

    def noticed(self, text: str) -> bool:
        """Whether one of them said so, or all have ended."""
        has_ended = all(process.poll() is not None for process in self.processes)
        return has_ended or text in self.log.read_text()

    def join(self) -> list[int]:
        for process in self.processes:
            process.communicate(timeout=120)
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        for process in (*self.processes, *self._spares):
            process.kill()
            process.communicate()


def wait_for(condition: Callable[[], object]) -> None:
    """Look again and again until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def wait_for_trials(store: Store, count: int) -> None:
    """Until so many more are stored, or no problem is open."""

    def stored() -> int:
        return len(store.measurements(final=False))

    wanted = stored() + count

    def is_open() -> bool:
        counts = store.jobs.counts()
        return bool(counts.get("queued") or counts.get("running"))

    wait_for(lambda: stored() >= wanted or not is_open())


def submit(url: str, jobs: int = 1) -> list[str]:
    """The same problems in some jobs."""
    with open_store(url) as store:
        return [store.jobs.submit(PROBLEMS, OPTIONS, attempts=ATTEMPTS) for _ in range(jobs)]


def check(store: Store, *jobs: str) -> None:
    """All ended, and every trial is there once."""
    for job in jobs:
        assert states(store, job) == ["done"] * len(PROBLEMS)
    assert not repeated(store)
    measured = store.measurements(final=False)
    assert len(measured) == len(PROBLEMS) * EACH
    for problem in PROBLEMS:
        assert store.best(problem, DEFAULT_GPU, REGIME) is not None
    sweeps = {m.sweep for m in measured}
    assert len(sweeps) == len(PROBLEMS), "whoever went on took up the same sweep"


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_controllers_and_the_database_server_are_killed(
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
    jobs = submit(url, jobs=2)
    draw = random.Random(7)
    with (
        open_store(url) as store,
        contextlib.closing(Fleet(url, 2, tmp_path / "log", spares=2)) as fleet,
    ):
        for murder in range(2):
            wait_for_trials(store, draw.randrange(1, 20))
            fleet.kill_one(draw)
            if backend == "postgresql" and murder == 1:
                server = request.getfixturevalue("postgres_server")
                server.kill()
                wait_for(lambda: fleet.noticed("trying again"))
                server.start()
        assert fleet.join() == [0, 0], fleet.log.read_text()
    with open_store(url) as store:
        check(store, *jobs)


def test_the_clock_jumps(tmp_path: Path) -> None:
    """By hours and days, forth and back, under two controllers: SQLite's clock is the machine's.

    The first jump forth ends the lease of a holder that does nothing.
    """
    url, clock = str(tmp_path / "s.sqlite"), tmp_path / "clock"
    clock.write_text("0")
    (job,) = submit(url)

    def jump(offset: float) -> None:
        aside = clock.with_suffix(".new")
        aside.write_text(str(offset))
        aside.replace(clock)

    with open_store(url) as store:
        assert store.jobs.claim("silent:1") is not None

        def taken_over() -> bool:
            return any("silent:1 stopped answering" in e.text for e in store.jobs.events(job))

        with contextlib.closing(Fleet(url, 2, tmp_path / "log", clock=clock)) as fleet:
            wait_for_trials(store, 1)
            jump(7200)
            wait_for(taken_over)
            for offset in (-86_400, 30, 0, 86_400):
                wait_for_trials(store, 5)
                jump(offset)
            assert fleet.join() == [0, 0], fleet.log.read_text()
        check(store, job)


class Notes(Watcher):
    """Told what the controller tells a person."""

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told

    def note(self, text: str) -> None:
        self._told(text)


def test_the_disk_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller says so, waits, and goes on when there is room."""
    for name in ("STORE_WAIT_S", "POLL_S"):
        monkeypatch.setattr(f"tuner.tuning.controller.{name}", 0.1)
    monkeypatch.setattr("tuner.store.sql_jobs.BACKOFF_S", 0.1)
    url = str(tmp_path / "s.sqlite")
    (job,) = submit(url)
    is_full = False
    collected: list[Problem] = []
    told: list[str] = []

    def fill(problem: Problem) -> None:
        nonlocal is_full
        collected.append(problem)
        is_full |= len(collected) == 5

    def tell(text: str) -> None:
        nonlocal is_full
        if "the disk is full; what was stored before is kept" in text:
            told.append(text)
            is_full = len(told) < 3

    with open_store(url) as store:
        engine: sa.Engine = store._engine  # type: ignore[attr-defined]

        @sa.event.listens_for(engine, "begin")
        def limit(connection: sa.Connection) -> None:
            pages = 1 if is_full else 1 << 30  # no less than there are: then none can be added
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")

        with Controller(
            store,
            Machine(),
            watcher=Notes(tell),
            lease_s=1.0,
            catalogue=catalogue,
            create_runners=Replays(fill),
        ) as controller:
            controller.run(drain=True)
        assert len(told) == 3
        check(store, job)


KILLED_AT = (3, 20, 21, 60)
"""Candidates, counted over all processes that measure, at which one is killed."""
MEASURES = f"""
import json, os, signal, sys
KILLED_AT = {KILLED_AT}
"""
MEASURES += """
requests, answers = (int(sys.argv[sys.argv.index(f) + 1]) for f in ("--requests", "--answers"))

def say(**event):
    os.write(answers, (json.dumps(event) + "\\n").encode())

def begun():
    with open(os.environ["TOY_WORKER_COUNT"], "a") as file:
        file.write("x")
        return file.tell()

say(event="ready")
for line in os.fdopen(requests):
    request = json.loads(line)
    if request["mode"] == "environment":
        say(event="facts", facts={"torch": "2.11"})
    for candidate in request.get("candidates", ()):
        say(event="phase", index=candidate["index"], what="timing", allow_s=0)
        if begun() in KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        config = candidate["config"]["params"]
        us = 1e5 / config["m"] / config["n"] + (config["raster"] == "m")
        outcome = {"status": "ok", "latency_us": us, "std_us": 0.001, "rounds": 20}
        say(event="result", index=candidate["index"], outcome=outcome, fatal=False)
    say(event="done")
"""


class Processes:
    """Stands in for `Runners`: a worker process that measures, of the toys' kernels."""

    gpu = DEFAULT_GPU

    def __init__(self, script: Path) -> None:
        self._worker = WorkerClient(command=[sys.executable, "-SE", str(script)])
        self._pool = WorkerPool([self._worker])

    def of(self, problem: Problem, regime: Regime) -> LocalRunner:
        artifact: Any = SimpleNamespace(
            result=lambda: Artifact("k" * 32, Path("/k.so"), "0" * 64, None, 0.0)
        )
        compiler: Any = SimpleNamespace(
            underway=dict,
            compiled=lambda member, problem, space: [],
            release=lambda owner: None,
            jobs=2,
            batch=1,
            toolchain=SimpleNamespace(nvcc_version="13.0.88", cutlass_version="4.2.0"),
            submit=lambda specs: [(spec, artifact) for spec in specs],
        )
        return LocalRunner(
            0,
            regime,
            compiler,
            family_modules=[Path(queue_toys.__file__)],
            gpu=DEFAULT_GPU,
            pool=self._pool,
            facts={"driver": "1"},
        )

    def __exit__(self, *exc: object) -> None:
        self._pool.close()


def test_the_process_that_measures_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill costs at most the candidate at which it came; a final pass is tried again."""
    script, url = tmp_path / "measures.py", str(tmp_path / "s.sqlite")
    script.write_text(MEASURES)
    monkeypatch.setenv("TOY_WORKER_COUNT", str(tmp_path / "count"))
    (job,) = submit(url)
    with open_store(url) as store:
        with Controller(
            store,
            Machine(),
            catalogue=catalogue,
            create_runners=lambda machine, note: Processes(script),  # type: ignore[arg-type,return-value]
        ) as controller:
            assert controller.run(drain=True) == len(PROBLEMS)
        check(store, job)
        measured = store.measurements(final=False)
    lost = [m for m in measured if m.status is not Status.OK]
    assert (tmp_path / "count").stat().st_size > max(KILLED_AT), "all of the kills came"
    assert 0 < len(lost) <= len(KILLED_AT)
    assert all(m.status is Status.WORKER_DIED and "SIGKILL" in m.log for m in lost)


def test_the_service_is_killed(tmp_path: Path) -> None:
    """Submitted over HTTP, worked off by a process, the service killed in the middle."""
    pytest.importorskip("fastapi", reason="the extra [service] is not installed")
    from serving import eventually, request, service

    url = str(tmp_path / "s.sqlite")
    body = {
        "problems": ["M=4096,N=4096,K=4096", "M=8192,N=8192,K=8192"],
        "op": "gemm",
        "trials": 6,
        "sampler": "tpe",
    }
    with contextlib.ExitStack() as stack:
        with service(url) as (address, process):
            status, job = request(address, "POST", "/v1/jobs", body)
            assert status == 201
            worker = subprocess.Popen(
                python_command("-m", "tuner", "worker", "--drain", "--replay", "--store", url),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=python_environment(),
            )
            stack.enter_context(worker)
            stack.callback(worker.kill)
            path = f"/v1/jobs/{job['id']}"
            eventually(lambda: request(address, "GET", path)[1]["trials"] != [])
            process.kill()
        with service(url) as (address, _):
            eventually(lambda: request(address, "GET", path)[1]["state"] == "done")
            assert worker.wait(PATIENCE_S) == 0
            found = request(address, "GET", f"{path}?trials=1000")[1]["trials"]
    trials = [(t["shape"], t["config_digest"]) for t in found if not t["is_final"]]
    assert len(trials) == len(set(trials)) > 6
