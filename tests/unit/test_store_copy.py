"""``tuner store copy``: SQLite to PostgreSQL and back, cut short, repeated, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from stored import final

from tuner.cli import main
from tuner.config import Config
from tuner.errors import StoreError
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Regime, Resources
from tuner.problem import AttentionProblem, GemmProblem
from tuner.store import Store, SweepRecord, open_store
from tuner.store.copy import copy

H200, WARM = GPUS["H200"], Regime("stream", "warm")
PROBLEM = AttentionProblem.parse("S=1024,D=64")


def measured(tile: int, **changes: object) -> Measurement:
    facts = {
        "environment": Environment({"driver": "580", "power_limit_w": 700}),
        "error": 2.7e-4,
        "workspace_bytes": 2**40,
        "resources": {"main": Resources(168, 0, 0, 0, 0)},
        "log": "zwei Zeilen\nµs",
        "sweep": "sweep1",
    }
    config = Config("cutlass_fmha", {"tile_m": tile})
    return final(config, 10.0 + tile / 7, PROBLEM, **{**facts, **changes})


def fill(store: Store, quick: int = 50) -> None:
    """Something in every table."""
    store.begin_sweep(SweepRecord("sweep1", PROBLEM, H200, WARM, "e", "quick"))
    store.add([measured(n, is_final=False) for n in range(1, quick + 1)])
    store.decide(PROBLEM, H200, WARM, [measured(64), measured(128)], "sweep1")
    store.pin(PROBLEM, H200, WARM, measured(128).config)
    store.record_build(PROBLEM, measured(128).config, {"main": "ab" * 16})
    store.end_sweep("sweep1", "done")
    store.jobs.submit([PROBLEM, GemmProblem(64, 64, 64)], {"effort": "full"}, priority=2)
    claim = store.jobs.claim("host:1")
    store.jobs.begin(claim.lease, "sweep1")
    store.jobs.fail(claim.lease, "no GPU")
    store.mirror(store.export(), url="http://host:1", etag='W/"x"', check=lambda m: [])


def content(store: Store) -> dict[str, object]:
    (job,) = store.jobs.all()
    return {
        "measurements": store.measurements(),
        "entries": store.entries(),
        "job": job,
        "tasks": store.jobs.tasks(job.id),
        "events": store.jobs.events(job.id),
        "etag": store.mirrored("http://host:1"),
        "sweep": store.find_sweep(PROBLEM, H200, WARM, "e", "quick"),
    }


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "source.sqlite")
    with open_store(path) as store:
        fill(store)
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "target.sqlite")
    url: str = request.getfixturevalue("create_postgres_url")()
    return url


def silent(table: str, done: int, total: int) -> None:
    pass


def test_every_table_goes_there_and_back(
    source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = str(tmp_path / "again.sqlite")
    assert main(["store", "copy", source, target, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows["measurements"] == 52
    assert min(rows.values()) > 0, "something of every table was copied"
    assert main(["store", "copy", target, again]) == 0
    assert "52 measurements" in capsys.readouterr().out
    with open_store(source) as first, open_store(target) as second, open_store(again) as third:
        assert content(second) == content(first)
        assert content(third) == content(first)
        assert second.decisions_version() > 0, "what is served there changed"


def test_the_copy_can_be_written(source: str, target: str) -> None:
    """New rows get numbers of their own."""
    assert main(["store", "copy", source, target]) == 0
    with open_store(target) as store:
        store.add([measured(99)])
        store.decide(GemmProblem(8, 8, 8), H200, WARM, [gemm()], "s")
        store.jobs.submit([GemmProblem(16, 8, 8)], {})
        assert len(store.measurements()) == 54
        assert len(store.jobs.all()) == 2


def gemm() -> Measurement:
    return measured(1, config=Config("gemm", {}), problem=GemmProblem(8, 8, 8))


class Stopped(Exception):
    pass


def stop_after(rows: int) -> Callable[[str, int, int], None]:
    def progress(table: str, done: int, total: int) -> None:
        if table == "measurements" and done >= rows:
            raise Stopped

    return progress


def test_cut_short_it_goes_on_where_it_stopped(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.store.copy.CHUNK", 10)
    with Store(source) as first, Store(target) as second:
        with pytest.raises(Stopped):
            copy(first, second, stop_after(20))
        assert len(second.measurements()) == 20
        assert second.entries() == []
        seen: list[int] = []
        copy(first, second, lambda table, done, total: seen.append(done)
             if table == "measurements" else None)  # fmt: skip
        assert seen == [20, 30, 40, 50, 52]
        assert content(second) == content(first)
        # Once more changes nothing.
        before = second.decisions_version()
        copy(first, second, silent)
        assert second.decisions_version() == before


def test_a_store_with_rows_of_its_own_is_left_as_it_is(source: str, target: str) -> None:
    with open_store(target) as other:
        other.add([measured(7, latency_us=3.0)])
        kept = other.measurements()
    with Store(source) as first, Store(target) as second:
        with pytest.raises(StoreError, match="holds other rows"):
            copy(first, second, silent)
    with open_store(target) as other:
        assert other.measurements() == kept


def test_a_complete_copy_that_was_changed_is_left_as_it_is(source: str, target: str) -> None:
    assert main(["store", "copy", source, target]) == 0
    with open_store(target) as other:
        other.unpin(PROBLEM, H200, WARM)
    assert main(["store", "copy", source, target]) == 1
    with open_store(target) as other:
        assert not other.entries()[0].pinned


def test_a_row_that_differs_in_the_end_is_noticed(
    source: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(table: str, done: int, total: int) -> None:
        if table == "gpus" and done:
            with Store(target) as other, other.transaction(write=True) as connection:
                connection.execute(sa.text("UPDATE gpus SET identity = 'other'"))

    with Store(source) as first, Store(target) as second:
        with pytest.raises(StoreError, match=r"table gpus of .* differs"):
            copy(first, second, meddle)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.sqlite", "t.sqlite"], 1, "store absent.sqlite does not exist"),
        (["s.sqlite", "s.sqlite"], 2, "cannot be copied into itself"),
        (["nonsense://x", "t.sqlite"], 2, "store URL 'nonsense://x' cannot be used"),
    ],
)
def test_wrong_names(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store", "copy", *arguments]) == code
    assert message in capsys.readouterr().err


def test_an_empty_store_is_copied_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_store(str(tmp_path / "empty.sqlite")).close()
    arguments = [str(tmp_path / "empty.sqlite"), str(tmp_path / "t.sqlite")]
    assert main(["store", "copy", *arguments]) == 0
    assert "the store is empty" in capsys.readouterr().out
