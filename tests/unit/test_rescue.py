"""A store's file that is removed, replaced or truncated while it is open: said, and nothing is
lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from queue_toys import OPTIONS, Replays, catalogue
from stored import H200, PROBLEM, SLOWER, WARM, failed, measured
from toys import recording, sweep

from tuner.cli import main
from tuner.errors import StoreLostError
from tuner.measurement import Measurement
from tuner.problem import GemmProblem
from tuner.runners.choose import Machine
from tuner.runners.replay import ReplayRunner
from tuner.store import Store, open_store
from tuner.store.exchange import load
from tuner.tuning.controller import Controller


def remove(path: Path) -> None:
    path.unlink()


def remove_all(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def replace(path: Path) -> None:
    other = path.with_name("other.sqlite")
    open_store(str(other)).close()
    other.replace(path)


def truncate(path: Path) -> None:
    """In place, as ``: > FILE`` does."""
    path.write_bytes(b"")


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))


def rescued(path: Path, store: Path) -> Store:
    """A new store that took over what was rescued."""
    made = open_store(str(store))
    made.import_(load(path))
    return made


def file_of(error: BaseException) -> Path:
    text = str(error)
    assert "\n" not in text
    return Path(text.partition("is in ")[2].partition(" (`tuner store import`")[0])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "s.sqlite"


@pytest.mark.parametrize("lose", [remove, remove_all, replace, truncate])
def test_what_a_lost_file_held_is_kept_with_what_was_just_written(
    lose: Callable[[Path], None], path: Path, tmp_path: Path
) -> None:
    kept, late = failed(SLOWER), measured(latency_us=12.0)
    with open_store(str(path)) as store:
        store.add([kept])
        lose(path)
        with pytest.raises(StoreLostError, match="removed, replaced or truncated while") as e:
            store.decide(PROBLEM, H200, WARM, [late], "sweep1")
        assert file_of(e.value).parent == path.parent
        with pytest.raises(StoreLostError, match="removed, replaced or truncated"):
            store.measurements()
        with rescued(file_of(e.value), tmp_path / "new.sqlite") as new:
            assert new.measurements() == [late, kept]
            entry = new.best(PROBLEM, H200, WARM)
            assert entry is not None and entry.sweep == "sweep1"


def test_what_several_threads_wrote_is_kept_in_one_file(path: Path) -> None:
    def write(latency_us: float) -> None:
        meet.wait()
        try:
            store.add([measured(latency_us=latency_us)])
        except StoreLostError as exc:
            errors.append(exc)

    meet, errors = threading.Barrier(4), list[StoreLostError]()
    with open_store(str(path)) as store:
        # One connection a thread is open before the file is lost.
        opened = [store._engine.connect() for _ in range(4)]  # type: ignore[attr-defined]
        for connection in opened:
            connection.close()
        path.unlink()
        threads = [threading.Thread(target=write, args=(1.0 + n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (file,) = {file_of(error) for error in errors}
    assert len(errors) == 4
    rows = load(file)["measurements"]
    assert sorted(row["latency_us"] for row in rows) == [1.0, 2.0, 3.0, 4.0]


def test_no_connection_opens_the_file_that_came_in_its_place(path: Path) -> None:
    with open_store(str(path)) as store:
        engine = store._engine  # type: ignore[attr-defined]
        with engine.connect():
            remove_all(path)
            with pytest.raises(StoreLostError):
                engine.connect()
        assert not path.exists()


def test_a_lost_folder_has_its_content_kept_elsewhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with open_store(str(path)) as store:
        move_folder(path)
        with pytest.raises(StoreLostError) as error:
            store.add([measured()])
    assert file_of(error.value).parent == tmp_path


def test_where_nothing_can_be_kept_the_message_says_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with open_store(str(path)) as store:
        move_folder(path)
        with pytest.raises(StoreLostError, match=r"what it held is lost: .* cannot be written"):
            store.add([measured()])


def test_an_empty_store_leaves_no_file(path: Path) -> None:
    with open_store(str(path)) as store:
        path.unlink()
        with pytest.raises(StoreLostError, match="it held no measurements"):
            store.jobs.submit([PROBLEM], {})
    assert [p.name for p in path.parent.glob("*.json")] == []


class Losing(ReplayRunner):
    """Loses the store's file while the third request is measured."""

    def __init__(self, path: Path, lose: Callable[[Path], None]) -> None:
        super().__init__(recording())
        self._path, self._lose, self._requests = path, lose, 0

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        self._requests += 1
        if self._requests == 3:
            self._lose(self._path)
        return super().collect(timeout_s)


@pytest.mark.parametrize("lose", [remove, truncate])
def test_a_sweep_ends_with_the_fault_and_all_that_it_measured(
    path: Path, lose: Callable[[Path], None]
) -> None:
    with open_store(str(path)) as store:
        with pytest.raises(StoreLostError) as error:
            sweep(Losing(path, lose), store, trials=27).run()
        assert len(load(file_of(error.value))["measurements"]) >= 3


def test_a_worker_ends(path: Path) -> None:
    with open_store(str(path)) as store:
        store.jobs.submit([GemmProblem(128, 128, 128)], OPTIONS)
        path.unlink()
        with (
            Controller(
                store, Machine(), catalogue=catalogue, create_runners=Replays()
            ) as controller,
            pytest.raises(StoreLostError),
        ):
            controller.run(drain=True)


def test_the_command_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    decide = Store.decide

    def lose(self: Store, *arguments: object) -> None:
        path.unlink()
        decide(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "decide", lose)
    shape = ["--shape", "S=1024,D=64", "--family", "fused_attention", "--trials", "2"]
    code = main(["sweep", *shape, "--replay", "--store", str(path)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert (code, last.startswith("tuner: store")) == (1, True), last
    document = load(file_of(RuntimeError(last)))
    assert len(document["entries"]) == 1
