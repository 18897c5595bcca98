"""The served part of a store as bytes: it answers as the store does, and holds nothing else."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from stored import final

from tuner.config import Config
from tuner.errors import StoreError
from tuner.hardware import GPUS
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import AttentionProblem
from tuner.selection.reader import entries, lookup
from tuner.selection.snapshot import take, unpack
from tuner.store import SweepRecord, open_store

H200, WARM = GPUS["H200"], Regime("stream", "warm")
PROBLEM = AttentionProblem.parse("S=1024,D=64")


OWN = Config("fused_attention", {"tile_n": 999})


def measured(config: Config, us: float, problem: Any = PROBLEM, **changes: Any) -> Measurement:
    facts = {"is_final": problem == PROBLEM, "artifacts": {"attention": "a" * 32}}
    return final(config, us, problem, **{**facts, "log": "as it was compiled", **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one decision, and much that nobody serves."""
    file = tmp_path / "s.sqlite"
    with open_store(str(file)) as store:
        record = SweepRecord("sweep1", PROBLEM, H200, WARM, "e", "d")
        store.begin_sweep(record)
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 12.0)], "sweep1")
        loser = [Config("fused_attention", {"tile_n": n}) for n in range(300)]
        store.add([measured(c, 20.0, is_final=False, log="x" * 2000) for c in loser])
        store.add([measured(OWN, 9.0, is_final=False, provenance=Provenance.PREDICTED)])
        store.jobs.submit([PROBLEM], {})
    return file


def test_it_answers_as_the_store_does(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.sqlite"
    unpack(take(path), copy)
    found, here = (lookup(PROBLEM, gpu=H200, path=p) for p in (path, copy))
    assert found is not None and here is not None
    assert (here.kind, here.notes) == (found.kind, found.notes)
    assert [m.config for m in here.candidates] == [m.config for m in found.candidates] == [OWN]
    assert [e.problem for e in entries(copy)] == [e.problem for e in entries(path)]


def test_it_holds_what_is_served_and_no_more(path: Path, tmp_path: Path) -> None:
    data = take(path)
    assert len(data) < path.stat().st_size / 10
    copy = tmp_path / "copy.sqlite"
    unpack(data, copy)
    with sqlite3.connect(copy) as database:
        (kept,) = database.execute("SELECT count(*) FROM measurements").fetchone()
        (logs,) = database.execute("SELECT count(*) FROM measurements WHERE log != ''").fetchone()
        rest = [
            database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("sweeps", "jobs", "tasks", "job_events", "mirrors")
        ]
    database.close()
    with open_store(str(path)) as store:
        assert kept == 1 and len(store.measurements()) > 300, "the store is untouched"
    assert (logs, rest) == (0, [0] * 5)


def test_without_a_store_there_is_nothing_and_no_file(tmp_path: Path) -> None:
    assert take(tmp_path / "none.sqlite") == b""
    unpack(b"", tmp_path / "copy.sqlite")
    assert not (tmp_path / "copy.sqlite").exists()


def test_what_is_ill_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.sqlite").write_text("no database, and long enough to be seen as none" * 9)
    with pytest.raises(StoreError, match=r"text\.sqlite"):
        take(tmp_path / "text.sqlite")
    with pytest.raises(StoreError, match="damaged"):
        unpack(b"no zlib", tmp_path / "copy.sqlite")
    with pytest.raises(StoreError, match="cannot be written"):
        unpack(b"x\x9c\x03\x00\x00\x00\x00\x01", tmp_path / "no" / "copy.sqlite")
