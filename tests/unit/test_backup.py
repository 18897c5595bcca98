"""``tuner store backup`` and ``restore``: no log is missed, and no old one comes back."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from stored import H200, PROBLEM, WARM, measured

from tuner.cli import main
from tuner.errors import StoreLostError
from tuner.selection.reader import close, lookup
from tuner.store import open_store
from tuner.store.reading import REVISION

ROWS, MORE = 30, 50
FILES = ("", "-wal", "-shm")


def fill(path: Path, first: int, count: int) -> None:
    with open_store(str(path)) as store:
        store.add([measured(latency_us=1.0 + n) for n in range(first, first + count)])


def rows(path: Path) -> int:
    with open_store(str(path)) as store:
        return len(store.measurements())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "s.sqlite"
    fill(made, 0, ROWS)
    return made


@pytest.fixture
def crashed(path: Path, tmp_path: Path) -> Path:
    """A store as a machine that went down leaves it: its newest rows are in the log."""
    left = tmp_path / "crashed" / "s.sqlite"
    left.parent.mkdir()
    with open_store(str(path)) as store:
        store.add([measured(latency_us=1.0 + n) for n in range(ROWS, ROWS + MORE)])
        for end in FILES:
            shutil.copy(f"{path}{end}", f"{left}{end}")
    return left


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a refused command prints."""
    assert main(["store", *map(str, arguments)]) in (1, 2)
    text = capsys.readouterr().err
    assert text.startswith("tuner: ") and text.count("\n") == 1
    return text


def test_a_backup_holds_what_the_log_holds(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "b.sqlite"
    with open_store(str(path)) as store:
        store.add([measured(latency_us=0.5)])
        store.decide(PROBLEM, H200, WARM, [measured(latency_us=0.25)], "s")
        assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
        assert f"1 entry, {ROWS + 2} measurements" in capsys.readouterr().out
        store.add([measured(latency_us=0.75)])
    assert [p.name for p in tmp_path.glob("b.*")] == ["b.sqlite"]
    assert rows(backup) == ROWS + 2
    assert rows(path) == ROWS + 3


def test_an_old_log_is_not_replayed_over_what_was_restored(
    path: Path, crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "b.sqlite"
    with open_store(str(path)) as store:
        store.forget(PROBLEM)
    fill(path, 500, 5)
    assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
    assert main(["store", "restore", str(backup), "--store", str(crashed), "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["measurements"] == 5
    assert rows(crashed) == 5
    assert rows(Path(said["former"])) == ROWS + MORE, "the former store, with its log"


def test_a_damaged_store_is_replaced_and_kept(path: Path, tmp_path: Path) -> None:
    backup, store = tmp_path / "b.sqlite", tmp_path / "d.sqlite"
    assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
    for end in FILES:
        Path(f"{store}{end}").write_bytes(b"damaged" + end.encode())
    store.chmod(0o600)
    assert main(["store", "restore", str(backup), "--store", str(store)]) == 0
    kept = sorted(p.read_bytes() for p in tmp_path.glob("d.sqlite.replaced-*"))
    assert kept == [b"damaged", b"damaged-shm", b"damaged-wal"]
    assert store.stat().st_mode & 0o777 == 0o600
    assert rows(store) == ROWS


def test_a_restored_store_is_seen_at_once(path: Path, tmp_path: Path) -> None:
    """By what looks things up; what has the former one open ends when it uses it."""
    backup = tmp_path / "b.sqlite"
    with open_store(str(path)) as store:
        store.decide(PROBLEM, H200, WARM, [measured(latency_us=9.0)], "s")
        assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
        store.decide(PROBLEM, H200, WARM, [measured(latency_us=8.0)], "s")

        def served() -> float | None:
            found = lookup(PROBLEM, gpu=H200, path=path)
            return found.entry.winner.latency_us

        assert served() == 8.0
        assert main(["store", "restore", str(backup), "--store", str(path)]) == 0
        assert served() == 9.0
        with pytest.raises(StoreLostError):
            store.add([measured()])
    close()


def test_the_default_store_of_a_new_machine(path: Path, tmp_path: Path) -> None:
    backup = tmp_path / "b.sqlite"
    assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
    assert main(["store", "restore", str(backup)]) == 0
    assert rows(tmp_path / "cache" / "store.sqlite") == ROWS


def test_a_symbolic_link_stays(path: Path, tmp_path: Path) -> None:
    backup, link = tmp_path / "b.sqlite", tmp_path / "link.sqlite"
    link.symlink_to(path)
    assert main(["store", "backup", str(backup), "--store", str(link)]) == 0
    fill(path, ROWS, 1)
    assert main(["store", "restore", str(backup), "--store", str(link)]) == 0
    assert link.is_symlink() and rows(path) == ROWS


def test_a_backup_on_a_medium_that_cannot_be_written(path: Path, tmp_path: Path) -> None:
    """Reading it leaves nothing beside it."""
    backup, medium = tmp_path / "b.sqlite", tmp_path / "medium"
    assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
    medium.mkdir()
    backup = backup.rename(medium / "b.sqlite")
    assert main(["store", "restore", str(backup), "--store", str(tmp_path / "n.sqlite")]) == 0
    assert [p.name for p in medium.iterdir()] == ["b.sqlite"]


def test_a_damaged_store_leaves_the_backup_before_as_it_is(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backup = tmp_path / "b.sqlite"
    assert main(["store", "backup", str(backup), "--store", str(path)]) == 0
    content = path.read_bytes()
    path.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    capsys.readouterr()
    assert "is damaged" in told(capsys, "backup", backup, "--store", path)
    assert rows(backup) == ROWS
    assert [p for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_what_is_no_backup_replaces_nothing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes, other, newer = (tmp_path / name for name in ("notes", "other.sqlite", "newer.sqlite"))
    notes.write_bytes(b"these are notes, not a database\n" * 64)
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE trials (id INTEGER)")
    connection.close()
    open_store(str(newer)).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("UPDATE tuner_version SET version_num = '9999'")
    connection.close()
    for backup, reason in (
        (notes, "is not an SQLite database"),
        (other, "is not a store of cutlass-tuner, nothing was restored"),
        (newer, f"has schema 9999, newer than this program knows ({REVISION})"),
        (tmp_path / "absent", "does not exist"),
        (path, "is the store itself"),
    ):
        assert reason in told(capsys, "restore", backup, "--store", path)
    assert rows(path) == ROWS
    assert list(tmp_path.glob("*replaced*")) == []


def test_places_where_no_backup_can_be(
    path: Path, crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, reason in (
        (path, "is the store itself"),
        (crashed, "is a store in use"),
        (tmp_path, "is a folder"),
        (tmp_path / "absent" / "b.sqlite", "there is no folder"),
    ):
        assert reason in told(capsys, "backup", target, "--store", path)
    absent = tmp_path / "absent.sqlite"
    assert "does not exist" in told(capsys, "backup", tmp_path / "b", "--store", absent)
    url = "postgresql+psycopg://host/tuner"
    assert "is for SQLite files" in told(capsys, "backup", tmp_path / "b", "--store", url)
    assert rows(crashed) == ROWS + MORE
