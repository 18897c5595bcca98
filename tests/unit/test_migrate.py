"""The schema: migrations and tables agree, old databases are brought up, newer ones left alone."""

from __future__ import annotations

import importlib
import shutil
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config as AlembicConfig
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from tuner.base import resources
from tuner.errors import StoreError
from tuner.hardware import GPUS
from tuner.measurement import Regime
from tuner.problem import AttentionProblem
from tuner.store import migrate, open_store
from tuner.store.entry import BEST_COLUMNS
from tuner.store.models import metadata
from tuner.store.reading import REVISION

ASSETS = Path(__file__).parent.parent / "assets"


@pytest.fixture(autouse=True)
def migrations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run, as in a program (`migrated_once`)."""
    monkeypatch.setattr(migrate, "upgrade", migrate.upgrade.__wrapped__)


def scripts() -> ScriptDirectory:
    config = AlembicConfig()
    config.set_main_option("script_location", str(resources.cache() / "migrations"))
    return ScriptDirectory.from_config(config)


def engine_of(path: Path) -> sa.Engine:
    return sa.create_engine(f"sqlite:///{path}", poolclass=sa.NullPool)


def test_the_program_reads_the_newest_revision() -> None:
    assert scripts().get_heads() == [REVISION]


def test_migrations_make_the_tables_that_the_program_uses(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    open_store(str(path)).close()
    with engine_of(path).connect() as connection:
        options = {"version_table": "tuner_version", "compare_type": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
        columns = connection.exec_driver_sql("SELECT * FROM best").keys()
    assert set(BEST_COLUMNS) <= set(columns)


def test_the_comparison_sees_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    open_store(str(path)).close()
    with engine_of(path).begin() as connection:
        connection.exec_driver_sql("DROP TABLE builds")
        options = {"version_table": "tuner_version"}
        context = MigrationContext.configure(connection, opts=options)
        assert [change[0] for change in compare_metadata(context, metadata)] == ["add_table"]


def test_the_version_has_its_own_table(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    open_store(str(path)).close()
    with engine_of(path).connect() as connection:
        tables = sa.inspect(connection).get_table_names()
        version = connection.exec_driver_sql("SELECT version_num FROM tuner_version").scalar()
    assert "alembic_version" not in tables
    assert version == REVISION


def test_an_empty_file_becomes_a_store(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    path.touch()
    with open_store(str(path)) as store:
        assert store.entries() == []


def test_a_store_of_a_newer_program_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    open_store(str(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE tuner_version SET version_num = '9999'")
    connection.close()
    content = path.read_bytes()
    with pytest.raises(StoreError, match="schema 9999, newer than this program knows") as error:
        open_store(str(path))
    assert "install a newer cutlass-tuner" in str(error.value)
    lookup = importlib.import_module("tuner.selection.reader")
    with pytest.raises(StoreError, match="schema 9999, newer than this program knows"):
        lookup.lookup(AttentionProblem(1024, 1024, 64), path=path)
    lookup.close()
    assert path.read_bytes() == content


def test_a_migration_that_fails_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(resources.cache() / "migrations", broken / "migrations")
    first = broken / "migrations" / "versions" / "0001_initial.py"
    first.write_text(first.read_text() + "    op.execute('SELECT * FROM absent')\n")
    path = tmp_path / "s.sqlite"
    with monkeypatch.context() as patch:
        patch.setattr("tuner.store.migrate.resources.cache", lambda: broken)
        with pytest.raises(StoreError, match="no such table: absent"):
            open_store(str(path))
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []
    connection.close()
    with open_store(str(path)) as store:
        assert store.entries() == []


def test_missing_migrations_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.store.migrate.resources.cache", lambda: tmp_path)
    with pytest.raises(StoreError, match="cannot be migrated with"):
        open_store("sqlite://")


@pytest.mark.parametrize("asset", sorted(ASSETS.glob("store_*.db")), ids=lambda p: p.stem)
def test_a_store_of_every_revision_opens_with_all_it_held(asset: Path, tmp_path: Path) -> None:
    """Made by `tests/assets/README.md`'s lines: a pinned decision, a failure, a done sweep."""
    path = tmp_path / "s.sqlite"
    shutil.copy(asset, path)
    problem, h200, warm = AttentionProblem(1024, 1024, 64), GPUS["H200"], Regime("chained", "warm")
    with open_store(str(path)) as store:
        entry = store.best(problem, h200, warm)
        assert entry.pinned
        assert [m.latency_us for m in entry.ranking] == [13.5, 14.1, 16.25]
        assert entry.winner.latency_us == 16.25
        assert entry.winner.resources["main"].registers == 168
        assert entry.winner.environment.facts == {"driver": "580.159", "cuda": "13.0"}
        assert set(entry.vendors) == {"cudnn"}
        failures = store.measurements(problem=problem, final=False)
        assert [(str(m.status), m.log) for m in failures] == [("timeout", "no end after 5 s")]
        sweep = store.find_sweep(problem, h200, warm, entry.winner.environment.digest, "quick")
        assert sweep.state == "done"
    with engine_of(path).connect() as connection:
        version = connection.exec_driver_sql("SELECT version_num FROM tuner_version").scalar()
    assert version == REVISION


def test_there_is_an_old_store_of_every_revision() -> None:
    revisions = {script.revision for script in scripts().walk_revisions()}
    assert {asset.stem.removeprefix("store_") for asset in ASSETS.glob("store_*.db")} == revisions
