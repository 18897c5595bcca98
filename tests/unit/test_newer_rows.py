"""Rows of a newer program under the same schema are left out and named; its tasks wait for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sqlalchemy as sa
from serving import H200, WARM, decide, measured

from tuner.cli import main
from tuner.config import Config
from tuner.problem import GemmProblem, Problem
from tuner.problem.base import Meaning, Operand
from tuner.selection.reader import close, lookup
from tuner.store import Store, open_store
from tuner.store.newer import say_left_out

KNOWN = GemmProblem(128, 256, 512)


@dataclass(frozen=True)
class Convolution(Problem):
    """An operation that this program does not have."""

    n: int = 8
    op: ClassVar[str] = "convolution"
    keys: ClassVar[Mapping[str, str]] = {"N": "n"}
    meanings: ClassVar[Mapping[str, Meaning]] = {"N": Meaning("images")}
    required: ClassVar[tuple[str, ...]] = ("N",)

    def label(self) -> str:
        return f"N={self.n}"

    @property
    def flops(self) -> int:
        return self.n

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (Operand("x", (self.n,), (1,), "float16", is_output=True),)


@dataclass(frozen=True)
class SparseGemm(GemmProblem):
    """An operation of this program with a field that it does not have."""

    sparsity: str = "2:4"


NEWER = (Convolution(), SparseGemm(128, 256, 512))


@pytest.fixture(params=["file", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("create_postgres_url")())
    return str(tmp_path / "s.sqlite")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    say_left_out.cache_clear()
    with open_store(url) as opened:
        decide(opened, measured(12.0, KNOWN))
        for problem in NEWER:
            decide(opened, measured(9.0, problem))
        yield opened


def test_the_others_are_read_and_the_newer_ones_named_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert [entry.problem for entry in store.entries()] == [KNOWN]
        assert [m.problem for m in store.measurements()] == [KNOWN]
        document = store.export(trials=True)
        assert [row["problem"]["op"] for row in document["measurements"]] == ["gemm"]
        assert [entry["ranking"] for entry in document["entries"]] == [[0]]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    said = caplog.text
    assert "rows of another version are left out: op='convolution' is not known" in said
    assert "unknown field 'sparsity' for gemm" in said


@pytest.mark.parametrize(
    "change",
    [
        {"status": "'too_hot'", "latency_us": "NULL"},
        {"provenance": "'dreamt'"},
        {"regime": "'stream-frozen'"},
        {"clocks": '\'{"fan":3,"throttle":[]}\''},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_whole_row_in_words_of_a_newer_program_is_left_out(
    change: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tuner.store.entry import STORED, STORED_COLUMNS, row_digest

    say_left_out.cache_clear()
    path = tmp_path / "s.sqlite"
    with open_store(str(path)) as opened:
        decide(opened, measured(12.0, KNOWN))
        opened.add([measured(13.0, KNOWN)])
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TRIGGER measurements_immutable")
        which = "WHERE id = (SELECT max(id) FROM measurements)"
        words = ", ".join(f"{name} = {value}" for name, value in change.items())
        connection.exec_driver_sql(f"UPDATE measurements SET {words} {which}")
        query = f"{STORED} {which.replace('id =', 'measurements.id =')}"
        row = dict(zip(STORED_COLUMNS, connection.exec_driver_sql(query).one(), strict=True))
        del row["digest"]
        digest = row_digest({**row, "is_final": bool(row["is_final"])})
        connection.exec_driver_sql(f"UPDATE measurements SET digest = '{digest}' {which}")
    engine.dispose()
    with open_store(str(path)) as opened:
        assert [m.latency_us for m in opened.measurements()] == [12.0]
    assert "rows of another version are left out" in caplog.text


def test_commands_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "s.sqlite")
    with open_store(path) as opened:
        for problem in (KNOWN, *NEWER):
            decide(opened, measured(9.0, problem))
    stored = ["--store", path]
    shape = ["--op", "gemm", "--shape", KNOWN.label(), *stored]
    assert main(["list", "--json", *shape]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1
    assert main(["export", *stored]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 1
    assert main(["explain", *shape]) in (0, 1)
    assert "cannot be read" not in capsys.readouterr().err
    answer = lookup(KNOWN, gpu=H200, regime=WARM, path=Path(path))
    assert answer.entry.winner.latency_us == 9.0
    close()


def test_a_newer_service_s_other_decisions_are_taken_over(tmp_path: Path) -> None:
    rows = [measured(9.0, problem) for problem in (*NEWER, KNOWN)]
    slower = measured(10.0, KNOWN, config=Config("vendor_sdpa", {"kernel": "cudnn"}))
    with open_store(str(tmp_path / "served.sqlite")) as served:
        decide(served, rows[2], slower)
        served.pin(KNOWN, H200, WARM, slower.config)
        document = served.export()
    # As a newer program would have written it: its rows before the known ones.
    newer = [{**document["measurements"][0], "problem": m.problem.to_json()} for m in rows[:2]]
    shifted = [
        {**entry, "ranking": [n + 2 for n in entry["ranking"]], "pinned": entry["pinned"] + 2}
        for entry in document["entries"]
    ]
    decided = [{**document["entries"][0], "ranking": [n], "pinned": None} for n in range(2)]
    decided.append({**shifted[0], "pinned": 0})  # pinned to a newer one
    snapshot = {
        **document,
        "measurements": [*newer, *document["measurements"]],
        "entries": [*decided, *shifted],
    }
    with open_store(str(tmp_path / "own.sqlite")) as own:
        report = own.mirror(snapshot, url="http://a:1", etag="", check=lambda m: [])
        assert report.entries_added == 1
        first, second, third = report.entries_refused
        assert third == first
        assert first.startswith("convolution: op='convolution' is not known")
        assert second.startswith("gemm: unknown field 'sparsity'")
        [entry] = own.entries()
        assert (entry.problem, entry.pinned, entry.winner.config) == (KNOWN, True, slower.config)


def test_tasks_are_left_to_a_newer_worker(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    job = store.jobs.submit([*NEWER, KNOWN], {}, attempts=1)
    assert store.jobs.is_work_left()
    claim = store.jobs.claim("host:1")
    assert claim.problem == KNOWN
    assert store.jobs.claim("host:1") is None
    store.jobs.finish(claim.lease, "done")
    assert not store.jobs.is_work_left(), "a worker that drains ends"
    record = store.jobs.find(job)
    assert record.counts == {"queued": 2, "done": 1}, "no attempt of theirs was begun"
    assert [task.problem for task in store.jobs.tasks(job)] == [KNOWN]
    events = [event.text for event in store.jobs.events(job)]
    assert events == ["submitted, problems: 3", "attempt 1 by host:1", "done: done"]


def test_the_jobs_command_shows_the_rest(
    store: Store, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = store.jobs.submit([*NEWER, KNOWN], {})
    assert main(["jobs", "show", job, "--store", url, "--json"]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [task["op"] for task in facts["problems"]] == ["gemm"]
