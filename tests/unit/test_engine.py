"""Many who use one SQLite file at once: all of them get their turn."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from programs import ran
from stored import measured
from toys import REGIME, catalogue, recording

from tuner.errors import StoreBusyError
from tuner.problem import GemmProblem
from tuner.runners.replay import ReplayRunner
from tuner.store import open_store
from tuner.tuning.progress import Interruption, Watcher
from tuner.tuning.sweep import Sweep, SweepOptions

SUPPORT = Path(__file__).parent.parent / "support"

#: Forks processes that begin at once, each with the store closed, and counts those that fail.
CROWD = """
import os, sys
sys.path.insert(0, {support!r})
import tuner.store.sql
from stored import PROBLEM, measured
from tuner.store import open_store

path, processes, writes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gate, held = os.pipe()
children = []
for number in range(processes):
    child = os.fork()
    if child == 0:
        os.close(held)
        os.read(gate, 1)
        try:
            with open_store(path) as store:
                for turn in range(writes):
                    store.add([measured(latency_us=1000.0 * number + turn + 1, is_final=False)])
                store.jobs.submit([PROBLEM], {{}})
        except Exception as exc:
            print(f"process {{number}}: {{exc!r}}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
os.close(held)
sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sqlite"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.store.engine.BUSY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("tuner.store.engine.PATIENCE_S", 0.0)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Another program's transaction that writes."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        yield blocker


def crowd(path: Path, processes: int, writes: int) -> None:
    """Have processes use one store at once; each must do all that it is to do."""
    script = CROWD.format(support=str(SUPPORT))
    command = [sys.executable, "-c", script, str(path), str(processes), str(writes)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with open_store(str(path)) as store:
        assert len(store.measurements()) == processes * writes
        assert len(store.jobs.all()) == processes


@pytest.mark.timeout(3600)
def test_a_crowd_makes_a_new_store(path: Path, long_mode: bool) -> None:
    crowd(path, processes=32 if long_mode else 8, writes=0)


@pytest.mark.timeout(3600)
def test_greedy_writers_leave_one_another_a_turn(path: Path, long_mode: bool) -> None:
    open_store(str(path)).close()
    crowd(path, processes=16 if long_mode else 4, writes=160 if long_mode else 25)


def test_nothing_is_imported_while_others_wait_for_the_lock(path: Path) -> None:
    script = """
import sys, sqlalchemy as sa
from tuner.store import open_store
had = []
@sa.event.listens_for(sa.engine.Engine, "begin")
def begin(connection):
    if connection.get_execution_options().get("tuner_write"):
        had.append("alembic.command" in sys.modules)
open_store(sys.argv[1]).close()
print(had)
"""
    command = [sys.executable, "-c", script, str(path)]
    done = ran(*command)
    assert done.stdout.strip() == "[True]"


def test_a_write_outlasts_a_lock_that_sqlite_does_not_wait_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.store.engine.BUSY_TIMEOUT_S", 0.01)
    tried = 0
    with open_store(str(path)) as store, locked(path) as blocker:
        engine: sa.Engine = store._engine  # type: ignore[attr-defined]

        @sa.event.listens_for(engine, "before_cursor_execute")
        def release(_: object, __: object, statement: str, *___: object) -> None:
            nonlocal tried
            tried += statement == "BEGIN IMMEDIATE"
            if tried == 3 and blocker.in_transaction:
                blocker.execute("ROLLBACK")

        store.add([measured()])
        assert (tried, len(store.measurements())) == (3, 1)


def test_a_lock_that_lasts_is_one_line(path: Path, impatient: None) -> None:
    with open_store(str(path)) as store, locked(path):
        with pytest.raises(StoreBusyError, match="is locked by another program") as error:
            store.add([measured()])
        assert "\n" not in str(error.value)


class Patient(Watcher):
    """Lets the other program end once it is told of the lock for the second time."""

    def __init__(self, blocker: sqlite3.Connection) -> None:
        self.blocker, self.told = blocker, list[str]()

    def note(self, text: str) -> None:
        self.told.append(text)
        if len(self.told) == 2:
            self.blocker.execute("ROLLBACK")


def a_sweep(store: object, watcher: Watcher, interruption: Interruption | None = None) -> Sweep:
    problem, options = GemmProblem(512, 512, 512), SweepOptions(sampler="tpe", trials=3)
    return Sweep(
        problem,
        REGIME,
        ReplayRunner(recording(problem)),
        store,  # type: ignore[arg-type]
        options,
        watcher=watcher,
        interruption=interruption,
        catalogue=catalogue,
    )


def test_a_sweep_waits_until_the_lock_is_gone(path: Path, impatient: None) -> None:
    with open_store(str(path)) as store, locked(path) as blocker:
        watcher = Patient(blocker)
        outcome = a_sweep(store, watcher).run()
        assert [text.partition("store ")[2].partition(" is")[0] for text in watcher.told] == [
            str(path)
        ] * 2
        assert all(text.endswith("; trying again") for text in watcher.told)
        assert outcome.entry is not None
        assert len(store.entries()) == 1


def test_ctrl_c_ends_a_sweep_that_waits(path: Path, impatient: None) -> None:
    interruption = Interruption()

    class Asked(Watcher):
        def note(self, text: str) -> None:
            interruption.number = signal.SIGINT

    with (
        open_store(str(path)) as store,
        locked(path),
        pytest.raises(StoreBusyError),
    ):
        a_sweep(store, Asked(), interruption).run()
