"""One contract over every backend; then what only SQLite files can do wrong."""

from __future__ import annotations

import importlib
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from programs import ran
from stored import (
    CUDNN,
    H100,
    H200,
    OTHER,
    OWN,
    PROBLEM,
    SLOWER,
    WARM,
    failed,
    full,
    measured,
)

from tuner import settings
from tuner.errors import ConfigError, StoreError
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import AttentionProblem, GemmProblem
from tuner.store import Store, SweepRecord, open_store
from tuner.store.entry import from_row, to_row
from tuner.store.reading import sqlite_file


@pytest.fixture(params=["file", "memory", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "postgresql":
        url = request.getfixturevalue("create_postgres_url")()
    else:
        url = str(tmp_path / "s.sqlite") if request.param == "file" else "sqlite://"
    with open_store(url) as made:
        yield made


class TestContract:
    """What `Store` promises, of every backend."""

    def test_measurements_come_back_as_they_were(self, store: Store) -> None:
        given = [full(), failed(), measured(CUDNN, 14.1)]
        ids = store.add(given)
        assert len(set(ids)) == 3
        assert store.measurements() == given
        assert [m.to_json() for m in store.measurements()] == [m.to_json() for m in given]

    def test_environments_of_final_passes(self, store: Store) -> None:
        later = {"environment": Environment({"driver": "590"}), "created_at": "2026-10-02"}
        others = [
            measured(environment=Environment({"driver": "1"}), is_final=False),
            measured(environment=Environment({"driver": "2"}), provenance=Provenance.REPLAYED),
        ]
        assert store.environments() == []
        store.add([measured(created_at="2026-10-01"), measured(created_at="2026-09-01")])
        store.add([measured(**later), *others])
        found = [(record.environment, record.newest) for record in store.environments()]
        assert found == [
            (later["environment"], "2026-10-02"),
            (measured().environment, "2026-10-01"),
        ]

    def test_a_log_may_hold_anything(self, store: Store) -> None:
        store.add([failed(log="\0\x01\x7f ünï \U0001f680")])
        (kept,) = store.measurements()
        assert kept.log == "\N{REPLACEMENT CHARACTER}\x01\x7f ünï \U0001f680"
        store.add([failed(log="\0\x01\x7f ünï \U0001f680"), kept])
        assert store.measurements() == [kept]

    def test_equal_gpus_may_be_written_differently(self, store: Store) -> None:
        """A file from elsewhere has 4800 where this program has 4800.0."""
        given = [measured(), measured(SLOWER, gpu=replace(H200, memory_gbs=4800))]
        store.add(given)
        assert store.measurements() == given

    def test_an_equal_measurement_is_stored_once(self, store: Store) -> None:
        first, repeated, other = store.add([measured(), measured(), measured(latency_us=13.1)])
        assert first == repeated != other
        assert store.add([measured()]) == [first]
        assert len(store.measurements()) == 2

    @pytest.mark.parametrize(
        ("wanted", "expected"),
        [
            ({"problem": PROBLEM}, {1, 2, 3, 4, 5, 6}),
            ({"problem": OTHER}, {7}),
            ({"gpu": H100}, {2}),
            ({"regime": Regime("eager", "warm")}, {3}),
            ({"provenance": Provenance.REPLAYED}, {4}),
            ({"final": False}, {5}),
            ({"final": True, "problem": PROBLEM, "gpu": H200, "regime": WARM}, {1, 4, 6}),
            ({"environment": Environment({"driver": "590"}).digest}, {6}),
            ({"problem": AttentionProblem(8, 8, 64)}, set()),
        ],
    )
    def test_filters(self, store: Store, wanted: dict[str, Any], expected: set[int]) -> None:
        store.add(
            [
                measured(latency_us=1),
                measured(latency_us=2, gpu=H100),
                measured(latency_us=3, regime=Regime("eager", "warm")),
                measured(latency_us=4, provenance=Provenance.REPLAYED),
                measured(latency_us=5, is_final=False),
                measured(latency_us=6, environment=Environment({"driver": "590"})),
                measured(latency_us=7, problem=OTHER),
            ]
        )
        assert {m.latency_us for m in store.measurements(**wanted)} == expected

    @pytest.mark.parametrize(
        "wrong",
        [
            measured(latency_us=float("nan")),
            measured(latency_us=float("inf")),
            measured(latency_us=-1.0),
            measured(latency_us=0.0),
            measured().but(latency_us=None),
            failed().but(latency_us=3.0),
        ],
    )
    def test_a_time_that_cannot_be_is_refused(self, store: Store, wrong: Measurement) -> None:
        with pytest.raises(StoreError, match="latency"):
            store.add([measured(SLOWER), wrong])
        assert store.measurements() == [], "all or nothing"

    def test_a_decision_ranks_own_and_vendors(self, store: Store) -> None:
        ranking = [measured(OWN, 13), measured(CUDNN, 14.3), measured(SLOWER, 16)]
        store.decide(PROBLEM, H200, WARM, ranking, "sweep1")
        entry = store.best(PROBLEM, H200, WARM)
        assert entry.winner == entry.best_own == ranking[0]
        assert entry.ranking == tuple(ranking)
        assert entry.vendors == {"cudnn": ranking[1]}
        assert entry.speedups == {"cudnn": pytest.approx(14.3 / 13)}
        assert (entry.pinned, entry.provenance, entry.origin) == (False, Provenance.MEASURED, "")
        assert entry.sweep == "sweep1"
        assert entry.decided_at
        assert (entry.problem, entry.gpu, entry.regime) == (PROBLEM, H200, WARM)
        assert store.measurements(final=True) == ranking

    def test_a_vendor_may_win(self, store: Store) -> None:
        store.decide(PROBLEM, H200, WARM, [measured(CUDNN, 9), measured(OWN, 13)], "s")
        entry = store.best(PROBLEM, H200, WARM)
        assert entry.winner.config == CUDNN
        assert entry.best_own is not None
        assert entry.best_own.config == OWN

    def test_problem_gpu_and_regime_are_kept_apart(self, store: Store) -> None:
        store.decide(PROBLEM, H200, WARM, [measured()], "s")
        assert store.best(OTHER, H200, WARM) is None
        assert store.best(PROBLEM, H100, WARM) is None
        assert store.best(PROBLEM, H200, Regime("stream", "cold")) is None

    def test_the_newest_decision_of_a_kind_stands(self, store: Store) -> None:
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 13), measured(SLOWER, 14)], "s1")
        store.decide(PROBLEM, H200, WARM, [measured(SLOWER, 12)], "s2")
        entry = store.best(PROBLEM, H200, WARM)
        assert [m.config for m in entry.ranking] == [SLOWER]
        assert entry.sweep == "s2"
        assert len(store.entries()) == 1
        assert len(store.measurements()) == 3, "what was measured stays"

    @pytest.mark.parametrize("first", [Provenance.MEASURED, Provenance.PREDICTED])
    def test_only_measured_ones_are_best(self, store: Store, first: Provenance) -> None:
        order = [Provenance.PREDICTED, Provenance.REPLAYED, Provenance.MEASURED]
        for provenance in order if first is Provenance.PREDICTED else reversed(order):
            latency = {"measured": 13.0, "replayed": 5.0, "predicted": 1.0}[provenance]
            found = measured(latency_us=latency, provenance=provenance)
            store.decide(PROBLEM, H200, WARM, [found], str(provenance))
        entry = store.best(PROBLEM, H200, WARM)
        assert entry.provenance is Provenance.MEASURED
        assert entry.winner.latency_us == 13.0
        assert [str(e.provenance) for e in store.entries()] == ["measured", "replayed", "predicted"]
        assert [e.sweep for e in store.entries(provenance=Provenance.REPLAYED)] == ["replayed"]

    @pytest.mark.parametrize(
        ("ranking", "reason"),
        [
            ([], "empty"),
            ([failed()], "did not pass"),
            ([measured(is_final=False)], "not a final"),
            ([measured(), measured(gpu=H100)], "another problem, GPU or regime"),
            ([measured(problem=OTHER)], "another problem, GPU or regime"),
            ([measured(), measured(CUDNN, provenance=Provenance.REPLAYED)], "replayed"),
            (
                [
                    measured(is_final=False, provenance=Provenance.REPLAYED),
                    measured(CUDNN, provenance=Provenance.REPLAYED),
                ],
                "is of another pass",
            ),
        ],
    )
    def test_what_is_no_decision(
        self, store: Store, ranking: list[Measurement], reason: str
    ) -> None:
        with pytest.raises(StoreError, match=reason):
            store.decide(PROBLEM, H200, WARM, ranking, "s")
        assert store.entries() == []
        assert store.measurements() == []

    def test_a_replay_may_rank_its_quick_pass(self, store: Store) -> None:
        kind = {"provenance": Provenance.REPLAYED, "is_final": False}
        ranking = [measured(OWN, 13, **kind), measured(CUDNN, 14.3, **kind)]
        store.decide(PROBLEM, H200, WARM, ranking, "s")
        (entry,) = store.entries()
        assert (entry.pass_name, entry.speedups) == ("quick", {"cudnn": pytest.approx(1.1)})

    def test_an_older_decision_over_two_passes_is_not_read(self, store: Store) -> None:
        """Replays stored quick times as final ones with a flag, beside vendors' final times."""
        kind = {"provenance": Provenance.REPLAYED}
        ranking = [measured(OWN, 10, flags=("quick",), **kind), measured(CUDNN, 14.3, **kind)]
        store.decide(PROBLEM, H200, WARM, ranking, "s")
        assert store.entries() == []
        store.decide(PROBLEM, H200, WARM, ranking[1:], "s")
        assert [entry.winner.config for entry in store.entries()] == [CUDNN]

    def test_entries_by_filter(self, store: Store) -> None:
        gemm = GemmProblem(64, 64, 64)
        cold = Regime("stream", "cold")
        store.decide(PROBLEM, H200, WARM, [measured()], "a")
        store.decide(PROBLEM, H100, WARM, [measured(gpu=H100)], "b")
        store.decide(gemm, H200, cold, [measured(problem=gemm, regime=cold)], "c")
        assert {e.sweep for e in store.entries()} == {"a", "b", "c"}
        assert {e.sweep for e in store.entries(op="gemm")} == {"c"}
        assert {e.sweep for e in store.entries(problem=PROBLEM)} == {"a", "b"}
        assert {e.sweep for e in store.entries(gpu=H200)} == {"a", "c"}
        assert {e.sweep for e in store.entries(regime=WARM, gpu=H100)} == {"b"}

    def test_a_sweep_from_start_to_end(self, store: Store) -> None:
        record = SweepRecord("s1", PROBLEM, H200, WARM, "e" * 16, "t" * 16)
        begun = store.begin_sweep(record)
        assert begun.state == "running"
        assert begun.created_at
        assert store.find_sweep(PROBLEM, H200, WARM, "e" * 16, "t" * 16) == begun
        store.end_sweep("s1", "interrupted")
        ended = store.find_sweep(PROBLEM, H200, WARM, "e" * 16, "t" * 16)
        assert (ended.state, bool(ended.finished_at)) == ("interrupted", True)
        again = store.begin_sweep(record)
        assert again == begun, "taken up, not made anew"
        store.end_sweep("s1", "done")
        ended = store.find_sweep(PROBLEM, H200, WARM, "e" * 16, "t" * 16)
        assert ended.state == "done"

    def test_find_sweep_goes_by_all_of_it_and_takes_the_newest(self, store: Store) -> None:
        base = SweepRecord("old", PROBLEM, H200, WARM, "e", "t", created_at="2026-01-01T00:00:00")
        store.begin_sweep(base)
        store.begin_sweep(base.but(id="new", created_at="2026-01-02T00:00:00"))
        found = store.find_sweep(PROBLEM, H200, WARM, "e", "t")
        assert found.id == "new"
        assert store.find_sweep(OTHER, H200, WARM, "e", "t") is None
        assert store.find_sweep(PROBLEM, H100, WARM, "e", "t") is None
        assert store.find_sweep(PROBLEM, H200, Regime("stream", "cold"), "e", "t") is None
        assert store.find_sweep(PROBLEM, H200, WARM, "x", "t") is None
        assert store.find_sweep(PROBLEM, H200, WARM, "e", "x") is None

    def test_ends_of_sweeps_that_cannot_be(self, store: Store) -> None:
        with pytest.raises(StoreError, match="no sweep nothing"):
            store.end_sweep("nothing", "done")
        with pytest.raises(StoreError, match="allowed: done, interrupted"):
            store.end_sweep("nothing", "finished")

    def test_a_pin_wins_until_it_is_taken_back(self, store: Store) -> None:
        trial = measured(SLOWER, 16, is_final=False)
        store.add([trial])
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 13), measured(CUDNN, 14)], "s1")
        entry = store.pin(PROBLEM, H200, WARM, SLOWER)
        assert entry == store.best(PROBLEM, H200, WARM)
        assert (entry.pinned, entry.winner) == (True, trial)
        assert [m.config for m in entry.ranking] == [OWN, CUDNN]
        assert store.pin(PROBLEM, H200, WARM, CUDNN).winner.config == CUDNN
        assert store.unpin(PROBLEM, H200, WARM) is True
        assert store.unpin(PROBLEM, H200, WARM) is False
        after = store.best(PROBLEM, H200, WARM)
        assert (after.pinned, after.winner.config) == (False, OWN)

    def test_a_pin_outlives_decisions_and_follows_its_config(self, store: Store) -> None:
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 13), measured(SLOWER, 16)], "s1")
        store.pin(PROBLEM, H200, WARM, SLOWER)
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 12)], "s2")
        entry = store.best(PROBLEM, H200, WARM)
        assert (entry.pinned, entry.winner.latency_us) == (True, 16)
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 12), measured(SLOWER, 15)], "s3")
        entry = store.best(PROBLEM, H200, WARM)
        assert (entry.pinned, entry.winner.latency_us) == (True, 15), "the newest measurement"

    def test_a_mirrored_pin_ends_with_the_decision_that_it_came_with(self, store: Store) -> None:
        url = "http://a-service-with-a-name-of-more-characters-than-an-origin-has:8265"
        with open_store("sqlite://") as theirs:
            theirs.decide(PROBLEM, H200, WARM, [measured(OWN, 13), measured(SLOWER, 16)], "s1")
            theirs.pin(PROBLEM, H200, WARM, SLOWER)
            store.mirror(theirs.export(), url=url, etag="x", check=lambda m: [])
        mirrored = store.best(PROBLEM, H200, WARM)
        assert mirrored is not None and mirrored.pinned
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 12)], "s2")
        entry = store.best(PROBLEM, H200, WARM)
        assert (entry.pinned, entry.winner.latency_us) == (False, 12)
        store.pin(PROBLEM, H200, WARM, SLOWER)
        store.decide(PROBLEM, H200, WARM, [measured(OWN, 11)], "s3")
        entry = store.best(PROBLEM, H200, WARM)
        assert entry is not None and entry.pinned, "one's own pin stays, whoever measured"

    @pytest.mark.parametrize(
        "only",
        [
            failed(SLOWER),
            measured(SLOWER, problem=OTHER),
            measured(SLOWER, gpu=H100),
            measured(SLOWER, provenance=Provenance.PREDICTED),
            measured(SLOWER, regime=Regime("eager", "warm")),
        ],
    )
    def test_only_what_was_measured_can_be_pinned(self, store: Store, only: Measurement) -> None:
        store.add([only])
        store.decide(PROBLEM, H200, WARM, [measured()], "s")
        with pytest.raises(ConfigError, match="no measurement that passed"):
            store.pin(PROBLEM, H200, WARM, SLOWER)

    def test_nothing_is_pinned_where_nothing_is_decided(self, store: Store) -> None:
        store.add([measured()])
        store.decide(PROBLEM, H200, WARM, [measured(provenance=Provenance.REPLAYED)], "s")
        with pytest.raises(StoreError, match="run `tuner sweep` first"):
            store.pin(PROBLEM, H200, WARM, OWN)
        assert store.unpin(PROBLEM, H200, WARM) is False

    def test_forget_deletes_a_problem_and_no_other(self, store: Store) -> None:
        store.decide(PROBLEM, H200, WARM, [measured(), measured(CUDNN, 14)], "s")
        store.decide(OTHER, H200, WARM, [measured(problem=OTHER)], "s")
        store.pin(PROBLEM, H200, WARM, CUDNN)
        store.begin_sweep(SweepRecord("s", PROBLEM, H200, WARM, "e", "t"))
        assert store.forget(PROBLEM) == (1, 2)
        assert store.best(PROBLEM, H200, WARM) is None
        assert store.find_sweep(PROBLEM, H200, WARM, "e", "t") is None
        assert store.measurements(problem=PROBLEM) == []
        assert store.best(OTHER, H200, WARM) is not None
        assert store.forget(PROBLEM) == (0, 0)
        assert store.forget(AttentionProblem(8, 8, 64)) == (0, 0)

    def test_forget_can_be_narrowed(self, store: Store) -> None:
        eager = Regime("eager", "warm")
        for gpu, regime in ((H200, WARM), (H200, eager), (H100, WARM)):
            store.decide(PROBLEM, gpu, regime, [measured(gpu=gpu, regime=regime)], "s")
        assert store.forget(PROBLEM, H200, eager) == (1, 1)
        assert len(store.entries()) == 2
        assert store.forget(PROBLEM, gpu=H100) == (1, 1)
        assert [e.gpu for e in store.entries()] == [H200]
        assert store.forget(PROBLEM, regime=WARM) == (1, 1)

    def test_builds_stand_in_until_the_config_is_measured_again(self, store: Store) -> None:
        store.decide(PROBLEM, H200, WARM, [measured()], "s1")
        store.record_build(PROBLEM, OWN, {"main": "b" * 32})
        store.record_build(PROBLEM, OWN, {"main": "c" * 32})
        entry = store.best(PROBLEM, H200, WARM)
        assert entry.winner.artifacts == {"main": "c" * 32}
        assert store.measurements() == [measured()], "the measurement itself is immutable"
        store.decide(PROBLEM, H200, WARM, [measured(artifacts={"main": "d" * 32})], "s2")
        entry = store.best(PROBLEM, H200, WARM)
        assert entry.winner.artifacts == {"main": "d" * 32}

    def test_measurements_cannot_be_changed(self, store: Store) -> None:
        store.add([measured()])
        engine: sa.Engine = store._engine  # type: ignore[attr-defined]
        with pytest.raises(sa.exc.DBAPIError, match="immutable"), engine.begin() as connection:
            connection.execute(sa.text("UPDATE measurements SET latency_us = 1"))
        assert store.measurements() == [measured()]


def test_a_row_holds_everything() -> None:
    assert from_row(to_row(full())) == full()


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///a.sqlite", Path("a.sqlite")),
        ("sqlite:////var/a.sqlite", Path("/var/a.sqlite")),
        ("sqlite+pysqlite:////var/a.sqlite?mode=ro", Path("/var/a.sqlite")),
        ("/var/a.sqlite", Path("/var/a.sqlite")),
        ("sqlite://", None),
        ("sqlite:///:memory:", None),
        ("postgresql://localhost/tuner", None),
    ],
)
def test_the_file_of_a_url(url: str, path: Path | None) -> None:
    assert sqlite_file(url) == path


def test_the_default_store_makes_its_folder() -> None:
    with open_store() as store:
        store.add([measured()])
    assert settings.store_path().is_file()


def test_a_file_is_in_wal_mode_with_foreign_keys(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s.sqlite")) as store:
        engine: sa.Engine = store._engine  # type: ignore[attr-defined]
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 5000


@pytest.mark.parametrize(
    "url", ["nonsense://x", "sqlite+nothing:///x", "://", "postgresql+psycopg://host:port/x"]
)
def test_a_url_that_cannot_be_used(url: str) -> None:
    with pytest.raises(ConfigError, match="allowed: a path, sqlite:///PATH") as error:
        open_store(url)
    assert "\n" not in str(error.value)


def test_a_refused_url_shows_no_password() -> None:
    with pytest.raises(ConfigError) as error:
        open_store("nonsense://tuner:secret@host/x")
    assert "nonsense://tuner:***@host/x" in str(error.value)
    assert "secret" not in str(error.value)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(StoreError) as error:
        open_store(str(path), **options).close()
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_places_where_no_store_can_be(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)
    assert "no folder" in refusal(tmp_path / "no" / "s.sqlite")
    assert "does not exist" in refusal(tmp_path / "s.sqlite", create=False)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in refusal(tmp_path / "pipe")
    (tmp_path / "pipe").unlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, whose files nobody makes")
def test_a_folder_that_cannot_be_written() -> None:
    assert "cannot be opened: the folder must exist and be writable" in refusal(
        Path("/proc/self/s")
    )


def test_a_default_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(StoreError, match="cannot be made: Not a directory"):
        open_store()


def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    content = b"these are notes, not a database\n" * 64
    path.write_bytes(content)
    assert "is not an SQLite database" in refusal(path)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["s.sqlite"]


def test_a_damaged_database_is_left_as_it_is(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.sqlite", tmp_path / "s.sqlite"
    with open_store(str(whole)) as store:
        store.add([measured(latency_us=1.0 + i) for i in range(200)])
    shutil.copy(whole, path)
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    message = refusal(path)
    assert "is damaged" in message
    assert "`tuner store restore`" in message and "-wal and -shm" in message
    assert path.read_bytes() == bytes(content)


def test_another_programs_database_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE trials (id INTEGER)")
    connection.close()
    content = path.read_bytes()
    assert "database of another program (its tables: trials)" in refusal(path)
    assert path.read_bytes() == content


def test_a_locked_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.store.engine.BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr("tuner.store.engine.PATIENCE_S", 0.0)
    path = tmp_path / "s.sqlite"
    with open_store(str(path)) as store:
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked by another program; nothing was written"):
            store.add([measured()])
        assert store.measurements() == [], "reading goes on"
        blocker.execute("ROLLBACK")
        blocker.close()
        store.add([measured()])
        assert len(store.measurements()) == 1


def test_a_full_disk_keeps_what_was_stored(tmp_path: Path) -> None:
    with open_store(str(tmp_path / "s.sqlite")) as store:
        store.add([measured()])
        engine: sa.Engine = store._engine  # type: ignore[attr-defined]
        with engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="the disk is full; what was stored before is kept"):
            store.add([failed(log="x" * 100_000)])
        assert store.measurements() == [measured()]


def test_a_damaged_row_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with open_store(str(path)) as store:
        store.decide(PROBLEM, H200, WARM, [measured()], "s")
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TRIGGER measurements_immutable")
            connection.execute("UPDATE measurements SET config = '{'")
        connection.close()
        for read in (store.measurements, store.entries, store.export):
            with pytest.raises(StoreError, match="a row that cannot be read"):
                read()


WRITER = """
import sys
sys.path.insert(0, {support!r})
from stored import H200, PROBLEM, WARM, measured
from tuner.store import open_store

number = int(sys.argv[2])
with open_store(sys.argv[1]) as store:
    for turn in range(12):
        store.add([measured(latency_us=100.0 + 100 * number + turn, is_final=False)])
        store.decide(PROBLEM, H200, WARM, [measured(latency_us=1.0 + number)], str(number))
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """They also make the database at once."""
    path = tmp_path / "s.sqlite"
    script = WRITER.format(support=str(Path(__file__).parent.parent / "support"))
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(path), str(number)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    complaints = [writer.communicate(timeout=120)[1] for writer in writers]
    assert [w.returncode for w in writers] == [0] * 4, complaints
    with open_store(str(path)) as store:
        assert len(store.measurements(final=False)) == 4 * 12
        assert len(store.measurements(final=True)) == 4
        assert len(store.entries()) == 1


def test_importing_the_store_is_light() -> None:
    script = "import sys, tuner.store; print([m for m in sys.modules if 'sqlalchemy' in m])"
    done = ran(sys.executable, "-c", script)
    assert done.stdout.strip() == "[]"
    assert importlib.util.find_spec("sqlalchemy") is not None
