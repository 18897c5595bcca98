"""The read path: what it answers, when it looks again, and what it says of a store that is ill."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import ran
from stored import final

from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.hardware import DEFAULT_GPU, GPUS, Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.selection.reader import (
    LookupResult,
    decided,
    decided_stamp,
    entries,
    find_gpu,
    lookup,
)
from tuner.selection.shipped import in_use
from tuner.store import Entry, Store, open_store, reading
from tuner.store.exchange import to_text

# The package shows the function under this name.
MODULE = importlib.import_module("tuner.selection.reader")

H200, H100, PCIE = GPUS["H200"], GPUS["H100"], GPUS["H100-PCIe"]
WARM, EAGER = Regime("stream", "warm"), Regime("eager", "warm")
PROBLEM = AttentionProblem(1024, 1024, 64)
OWN = Config("cutlass_fmha", {"tile_m": 128})
CUDNN = Config("vendor_sdpa", {"backend": "cudnn"})
HERE = Environment({"driver": "580.159", "cuda": "13.0"})


def measured(latency_us: float = 13.0, config: Config = OWN, **changes: Any) -> Measurement:
    artifacts = {} if config == CUDNN else {"main": "a" * 32}
    facts = {"environment": HERE, "artifacts": artifacts, "std_us": None, "rounds": 0}
    return final(config, latency_us, PROBLEM, **{**facts, **changes})


def decide(store: Store, *ranking: Measurement, sweep: str = "s") -> None:
    first = ranking[0]
    store.decide(first.problem, first.gpu, first.regime, ranking, sweep)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    with open_store(str(path)) as made:
        yield made


@pytest.fixture(autouse=True)
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of shipped decisions, empty at first; no portfolio ships."""
    monkeypatch.setattr("tuner.selection.portfolio.shipped", lambda: ())
    folder = tmp_path / "tuned"
    folder.mkdir()
    monkeypatch.setattr("tuner.selection.shipped._tuned", lambda: folder)

    def forget() -> None:
        MODULE.close()
        MODULE.shipped.cache_clear()
        MODULE.shipped_index.cache_clear()

    forget()
    yield folder
    forget()


def ship(folder: Path, *ranking: Measurement) -> None:
    with open_store("sqlite://") as other:
        decide(other, *ranking, sweep="shipped")
        (folder / "a.json").write_text(json.dumps(other.export()))


def us(answer: LookupResult | None) -> float | None:
    return answer.entry.winner.latency_us


class TestAnswers:
    def test_the_decision_as_the_store_gives_it(self, store: Store, path: Path) -> None:
        decide(store, measured(), measured(14.1, CUDNN))
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert answer == LookupResult(store.best(PROBLEM, H200, WARM), exact=True, notes=())  # type: ignore[arg-type]

    def test_a_pin_is_served(self, store: Store, path: Path) -> None:
        decide(store, measured(), measured(14.1, CUDNN))
        store.pin(PROBLEM, H200, WARM, CUDNN)
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert (answer.entry.pinned, answer.entry.winner.config) == (True, CUDNN)
        assert answer.entry.best_own == measured()

    def test_no_file_is_a_miss(self, path: Path) -> None:
        assert lookup(PROBLEM, gpu=H200, path=path) is None
        assert lookup(PROBLEM, gpu=H200) is None
        assert not path.exists()

    def test_another_problem_regime_or_gpu_is_a_miss(self, store: Store, path: Path) -> None:
        decide(store, measured())
        other = AttentionProblem(1024, 1024, 64, is_causal=True)
        assert lookup(other, gpu=H200, path=path) is None
        assert lookup(PROBLEM, gpu=H200, regime=EAGER, path=path) is None
        assert lookup(PROBLEM, gpu=PCIE, path=path) is None

    def test_the_regime_is_the_operations_own(self, store: Store, path: Path) -> None:
        gemm, cold = GemmProblem(64, 64, 64), Regime("stream", "cold")
        decide(store, measured(problem=gemm, regime=cold))
        assert us(lookup(gemm, gpu=H200, path=path)) == 13
        assert lookup(gemm, gpu=H200, regime=WARM, path=path) is None

    def test_who_names_no_regime_is_answered_from_either_state_of_the_inputs(
        self, store: Store, path: Path
    ) -> None:
        cold = Regime("stream", "cold")
        decide(store, measured(regime=cold))
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert (us(answer), answer and answer.exact) == (13, True)
        assert answer.notes == ("timed stream-cold: nothing better is known stream-warm",)
        assert lookup(PROBLEM, gpu=H200, regime=WARM, path=path) is None
        assert us(lookup(PROBLEM, gpu=H200, among=store.entries())) == 13
        replayed = measured(11.0, provenance=Provenance.REPLAYED)
        decide(store, replayed)
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13, "measured before replayed"
        decide(store, measured(12.0))
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert (us(answer), answer and answer.notes) == (12, ())

    def test_a_chained_decision_serves_until_one_of_a_stream_replaces_it(
        self, store: Store, path: Path
    ) -> None:
        chained = Regime("chained", "warm")
        decide(store, measured(9.0, regime=chained))
        decide(store, measured(8.0, regime=Regime("stream", "cold")))
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert (us(answer), answer.entry.regime) == (9, chained)
        assert answer.notes == ("timed chained-warm: nothing better is known stream-warm",)
        assert us(lookup(PROBLEM, gpu=H200, among=store.entries())) == 9
        decide(store, measured(11.0))
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert (us(answer), answer and answer.notes) == (11, ())
        assert us(lookup(PROBLEM, gpu=H200, regime=chained, path=path)) == 9

    def test_no_gpu_is_said(self, store: Store, path: Path) -> None:
        decide(store, measured())
        answer = lookup(PROBLEM, path=path)
        assert answer.notes == (f"no GPU named: this is the answer for {DEFAULT_GPU.name}",)

    @pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200"])
    def test_a_gpu_by_name(self, store: Store, path: Path, name: str) -> None:
        decide(store, measured())
        assert us(lookup(PROBLEM, gpu=name, path=path)) == 13
        assert lookup(PROBLEM, gpu="H100-PCIe", path=path) is None

    def test_a_gpu_that_only_the_store_knows(self, store: Store, path: Path) -> None:
        gpu = Gpu("NVIDIA GH200 480GB", "9.0", 132, 1980, 4000.0, 62914560)
        decide(store, measured(gpu=gpu))
        assert us(lookup(PROBLEM, gpu="nvidia gh200 480gb", path=path)) == 13
        with pytest.raises(ConfigError, match=r"allowed: H200, H100.*in the store: NVIDIA GH200"):
            lookup(PROBLEM, gpu="B200", path=path)

    def test_another_gpu_only_by_the_explicit_rule_and_with_a_note(
        self, store: Store, path: Path
    ) -> None:
        decide(store, measured())
        answer = lookup(PROBLEM, gpu=PCIE, path=path, allow_other_gpu=True)
        assert not answer.exact
        name = PCIE.name
        assert answer.notes == (f"measured on NVIDIA H200, not on {name}: another GPU was allowed",)
        decide(store, measured(15.0, gpu=PCIE))
        answer = lookup(PROBLEM, gpu=PCIE, path=path, allow_other_gpu=True)
        assert (answer.exact, answer.entry.winner.latency_us, answer.notes) == (True, 15.0, ())

    def test_a_gpu_with_as_many_multiprocessors_shares_its_decisions(
        self, store: Store, path: Path
    ) -> None:
        decide(store, measured())
        answer = lookup(PROBLEM, gpu=H100, path=path)
        assert (answer.kind, answer.exact, answer.entry.gpu) == ("exact", False, H200)
        why = "the same kernels on as many multiprocessors (132)"
        assert answer.notes == (f"measured on NVIDIA H200, not on {H100.name}: {why}",)
        decide(store, measured(15.0, gpu=H100))
        answer = lookup(PROBLEM, gpu=H100, path=path)
        assert (answer.exact, answer.entry.winner.latency_us, answer.notes) == (True, 15.0, ())
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13

    def test_a_gpu_s_own_chained_decision_comes_before_another_one_s(
        self, store: Store, path: Path
    ) -> None:
        decide(store, measured())
        decide(store, measured(9.0, regime=Regime("chained", "warm"), gpu=H100))
        assert us(lookup(PROBLEM, gpu=H100, path=path)) == 9

    def test_the_other_gpu_is_the_nearest_of_its_kind(self, store: Store, path: Path) -> None:
        blackwell = Gpu("NVIDIA B200", "10.0", 114, 1965, 8000.0, 132644864)
        decide(store, measured(1.0, gpu=blackwell))
        assert lookup(PROBLEM, gpu=PCIE, path=path, allow_other_gpu=True) is None
        decide(store, measured(20.0, gpu=PCIE))
        decide(store, measured(15.0, gpu=H100))
        assert us(lookup(PROBLEM, gpu=H200, path=path, allow_other_gpu=True)) == 15.0

    def test_another_environment_is_said(self, store: Store, path: Path) -> None:
        decide(store, measured())
        there = Environment({"driver": "590.1", "cuda": "13.0", "torch": "2.11"})
        answer = lookup(PROBLEM, gpu=H200, path=path, environment=there)
        assert not answer.exact
        assert answer.notes == ("measured in another environment (driver 580.159, here 590.1)",)
        same = lookup(PROBLEM, gpu=H200, path=path, environment=HERE)
        assert (same.exact, same.notes) == (True, ())

    def test_measured_before_replayed_before_predicted(self, store: Store, path: Path) -> None:
        for provenance, latency in (("predicted", 1.0), ("replayed", 2.0), ("measured", 13.0)):
            decide(store, measured(latency, provenance=Provenance(provenance)))
            answer = lookup(PROBLEM, gpu=H200, path=path)
            assert us(answer) == latency
            expected = () if provenance == "measured" else (f"{provenance}, not measured",)
            assert answer.notes == expected

    def test_an_imported_entry_says_so(self, store: Store, path: Path) -> None:
        with open_store("sqlite://") as other:
            decide(other, measured())
            store.import_(other.export())
        answer = lookup(PROBLEM, gpu=H200, path=path)
        assert answer.notes == ("imported",)
        assert answer.entry.winner.artifacts == {}


class TestShipped:
    def test_a_shipped_decision_answers_where_the_store_has_none(
        self, store: Store, path: Path, tuned: Path
    ) -> None:
        ship(tuned, measured(13.5))
        for where in (path, path.with_name("none.sqlite")):
            answer = lookup(PROBLEM, gpu=H200, path=where)
            assert us(answer) == 13.5
            assert (answer.notes, answer.entry.origin) == (("shipped",), "shipped")
        decide(store, measured(13.0))
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13.0

    def test_a_shipped_measurement_stands_before_a_stored_prediction(
        self, store: Store, path: Path, tuned: Path
    ) -> None:
        ship(tuned, measured(13.5))
        decide(store, measured(1.0, provenance=Provenance.PREDICTED))
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13.5

    def test_what_was_built_here_of_a_shipped_kernel_is_named(
        self, store: Store, path: Path, tuned: Path
    ) -> None:
        ship(tuned, measured(13.5), measured(14.0, CUDNN))
        store.record_build(PROBLEM, OWN, {"main": "b" * 32})
        answer = lookup(PROBLEM, gpu=H200, path=path)
        entry = answer.entry
        assert entry.best_own is not None
        for found in (entry.winner, entry.ranking[0], entry.best_own):
            assert found.artifacts == {"main": "b" * 32}
        assert entry.ranking[1].artifacts == {}

    def test_a_damaged_shipped_file_is_named(self, path: Path, tuned: Path) -> None:
        (tuned / "a.json").write_text("{")
        with pytest.raises(StoreError, match=r"the shipped file .*a\.json cannot be read"):
            lookup(PROBLEM, gpu=H200, path=path)

    def test_a_damaged_measurement_is_named_when_it_is_asked_for(
        self, path: Path, tuned: Path
    ) -> None:
        ship(tuned, measured(13.5), measured(14.0, CUDNN))
        file = tuned / "a.json"
        text = to_text(json.loads(file.read_text()))
        file.write_text(text.replace('"latency_us":14.0', '"latency_us":'))
        with pytest.raises(StoreError, match=r"the shipped file .*a\.json cannot be read"):
            lookup(PROBLEM, gpu=H200, path=path)
        assert lookup(replace(PROBLEM, batch=64), gpu=H200, path=path) is None, "out of reach"

    def test_only_the_decision_that_is_asked_for_is_built(
        self, path: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ship(tuned, measured(13.5))
        text = (tuned / "a.json").read_text()
        (tuned / "b.json").write_text(text.replace('"batch": 1,', '"batch": 2,'))
        built: list[Problem] = []
        of = Entry.of

        def build(ranking: Sequence[Measurement], **facts: Any) -> Entry:
            built.append(ranking[0].problem)
            return of(ranking, **facts)

        monkeypatch.setattr(Entry, "of", build)
        assert us(lookup(PROBLEM, gpu="H200", path=path)) == 13.5
        assert built == [PROBLEM]
        assert len(entries(path)) == 2 and built[1:] == [replace(PROBLEM, batch=2)]

    def test_all_entries(self, store: Store, path: Path, tuned: Path) -> None:
        ship(tuned, measured(13.5))
        assert [e.origin for e in entries(path)] == ["shipped"]
        decide(store, measured(13.0))
        decide(store, measured(15.0, gpu=H100))
        found = entries(path)
        assert [(e.gpu, e.winner.latency_us, e.origin) for e in found] == [
            (H100, 15.0, ""),
            (H200, 13.0, ""),
        ]
        assert found == store.entries()


class TestFreshness:
    def test_a_commit_is_seen(self, store: Store, path: Path) -> None:
        assert lookup(PROBLEM, gpu=H200, path=path) is None
        for latency in (13.0, 12.0, 14.0):
            decide(store, measured(latency))
            assert us(lookup(PROBLEM, gpu=H200, path=path)) == latency
        store.forget(PROBLEM)
        assert lookup(PROBLEM, gpu=H200, path=path) is None

    def test_nothing_is_read_twice(self, store: Store, path: Path) -> None:
        decide(store, measured())
        first = lookup(PROBLEM, gpu=H200, path=path)
        assert lookup(PROBLEM, gpu=H200, path=path) is first
        decide(store, measured())
        assert lookup(PROBLEM, gpu=H200, path=path) is not first

    def test_a_file_that_comes_goes_and_is_replaced(self, path: Path, tmp_path: Path) -> None:
        for name, latency in (("one", 13.0), ("two", 14.0)):
            with open_store(str(tmp_path / name)) as other:
                decide(other, measured(latency))
        assert lookup(PROBLEM, gpu=H200, path=path) is None
        (tmp_path / "one").rename(path)
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13.0
        (tmp_path / "two").replace(path)
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 14.0
        path.unlink()
        assert lookup(PROBLEM, gpu=H200, path=path) is None

    def test_a_read_only_medium(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """There SQLite opens a database in WAL mode as an immutable file only."""
        connect = reading._connect

        def refuse(address: str) -> sqlite3.Connection:
            if "immutable" not in address:
                raise sqlite3.OperationalError("unable to open database file")
            connection: sqlite3.Connection = connect(address)
            return connection

        monkeypatch.setattr(reading, "_connect", refuse)
        for latency in (13.0, 14.0):
            with open_store(str(path)) as store:
                decide(store, measured(latency))
            assert us(lookup(PROBLEM, gpu=H200, path=path)) == latency

    def test_answers_do_not_pile_up(
        self, store: Store, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(MODULE, "_MAX_ANSWERS", 4)
        decide(store, measured())
        for length in range(8, 80, 8):
            assert lookup(AttentionProblem(length, length, 64), gpu=H200, path=path) is None
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13
        assert len(MODULE._reader(path)._answers) <= 4

    def test_a_reader_never_keeps_a_writer_waiting(self, store: Store, path: Path) -> None:
        decide(store, measured())
        lookup(PROBLEM, gpu=H200, path=path)
        with sqlite3.connect(path, timeout=0) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("ROLLBACK")
            # A reader with an open transaction would keep the log from being emptied.
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        connection.close()
        assert busy == 0

    def test_threads(self, store: Store, path: Path) -> None:
        decide(store, measured(100.0))
        seen: list[list[float]] = [[] for _ in range(6)]
        errors: list[BaseException] = []
        done = threading.Event()

        def read(found: list[float]) -> None:
            try:
                while not done.is_set():
                    found.append(us(lookup(PROBLEM, gpu=H200, path=path)) or 0.0)
            except BaseException as exc:
                errors.append(exc)

        readers = [threading.Thread(target=read, args=(found,)) for found in seen]
        for reader in readers:
            reader.start()
        for latency in range(99, 79, -1):
            decide(store, measured(float(latency)))
        while not errors and not all(found and found[-1] == 80.0 for found in seen):
            done.wait(0.001)
        done.set()
        for reader in readers:
            reader.join()
        assert errors == []
        for found in seen:
            assert found == sorted(found, reverse=True), "no reader goes back in time"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
    def test_a_forked_child_reads_through_a_connection_of_its_own(
        self, store: Store, path: Path
    ) -> None:
        decide(store, measured())
        script = f"""
import importlib, os, sys
from pathlib import Path
from tuner.selection.reader import lookup
from tuner.problem import AttentionProblem
module = importlib.import_module("tuner.selection.reader")
path = Path({str(path)!r})
def ask():
    return lookup(AttentionProblem(1024, 1024, 64), gpu="H200", path=path).entry.winner.latency_us
assert ask() == 13.0
mine = module._reader(path)._file._connection
module._readers_lock.acquire()  # held by another thread, say
child = os.fork()
if child == 0:
    right = ask() == 13.0 and module._reader(path)._file._connection is not mine
    os._exit(0 if right else 1)
module._readers_lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ask() == 13.0 and module._reader(path)._file._connection is mine
"""
        ran(sys.executable, "-c", script, timeout=60)


class TestIllStores:
    @pytest.mark.parametrize("content", [b"not a database at all\n" * 100, b"SQLite format 3\0abc"])
    def test_no_database(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(StoreError, match="is not an SQLite database") as error:
            lookup(PROBLEM, gpu=H200, path=path)
        assert "\n" not in str(error.value)
        assert path.read_bytes() == content

    def test_a_damaged_one_answers_again_when_it_is_mended(self, path: Path) -> None:
        with open_store(str(path)) as store:
            decide(store, measured())
        whole = path.read_bytes()
        path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
        with pytest.raises(StoreError, match="is damaged"):
            lookup(PROBLEM, gpu=H200, path=path)
        path.write_bytes(whole)
        assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13

    def test_a_folder_and_a_pipe(self, tmp_path: Path, path: Path) -> None:
        with pytest.raises(StoreError, match="is a folder"):
            lookup(PROBLEM, gpu=H200, path=tmp_path)
        os.mkfifo(path)
        with pytest.raises(StoreError, match="is not a file"):
            lookup(PROBLEM, gpu=H200, path=path)

    def test_another_programs_database(self, path: Path) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE trials (id INTEGER)")
        connection.close()
        with pytest.raises(StoreError, match="database of another program"):
            lookup(PROBLEM, gpu=H200, path=path)

    def test_an_older_schema(self, store: Store, path: Path) -> None:
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE tuner_version SET version_num = '0000'")
        connection.close()
        with pytest.raises(StoreError, match="has schema 0000, this program reads"):
            lookup(PROBLEM, gpu=H200, path=path)

    def test_a_file_that_is_being_made(self, path: Path) -> None:
        path.touch()
        assert lookup(PROBLEM, gpu=H200, path=path) is None
        with open_store(str(path)) as store:
            assert lookup(PROBLEM, gpu=H200, path=path) is None
            decide(store, measured())
            assert us(lookup(PROBLEM, gpu=H200, path=path)) == 13

    def test_a_damaged_row(self, store: Store, path: Path) -> None:
        decide(store, measured())
        with sqlite3.connect(path) as connection:
            connection.execute("UPDATE problems SET key = key")
            connection.execute("DROP TRIGGER measurements_immutable")
            connection.execute("UPDATE measurements SET clocks = '[]'")
        connection.close()
        with pytest.raises(StoreError, match="a row that cannot be read"):
            lookup(PROBLEM, gpu=H200, path=path)


def test_the_file_that_the_settings_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODULE.store_file() == tmp_path / "cache" / "store.sqlite"
    monkeypatch.setenv("TUNER_STORE", "sqlite:////var/tuner.sqlite")
    assert MODULE.store_file() == Path("/var/tuner.sqlite")
    monkeypatch.setenv("TUNER_STORE", "postgresql://host/tuner")
    assert MODULE.store_file() == tmp_path / "cache" / "store.sqlite"


def test_the_default_store_is_read() -> None:
    with open_store() as store:
        decide(store, measured())
    assert us(lookup(PROBLEM, gpu=H200)) == 13


def test_find_gpu_prefers_what_was_measured() -> None:
    slower = Gpu("NVIDIA H200", "9.0", 114, 1500, 4800.0, 62914560)
    assert find_gpu("NVIDIA H200", [slower]) == slower
    assert find_gpu("H200", [slower]) == H200


def test_the_package_shows_the_function() -> None:
    script = (
        "import tuner.selection.reader, tuner\n"
        "from tuner.selection.reader import lookup\n"
        "assert tuner.lookup is lookup\n"
        "import sys\n"
        "assert not {'sqlalchemy', 'torch', 'numpy', 'jsonschema'} & set(sys.modules)\n"
    )
    ran(sys.executable, "-c", script)


def test_what_is_decided_changes_with_decisions_alone(store: Store, path: Path) -> None:
    assert decided(path) == {}
    seen: list[Any] = [({}, decided_stamp(path))]

    def is_as_before() -> bool:
        seen.append((decided(path), decided_stamp(path)))
        decisions, stamps = zip(*seen[-2:], strict=True)
        assert (stamps[0] == stamps[1]) is (decisions[0] == decisions[1])
        return bool(stamps[0] == stamps[1])

    decide(store, measured(), measured(14.0, CUDNN))
    assert not is_as_before() and list(seen[-1][0]) == [PROBLEM.key]
    assert is_as_before()
    store.add([measured(20.0, is_final=False)])
    assert is_as_before(), "a sweep in the making is none"
    for change in (
        lambda: decide(store, measured(9.0), sweep="t"),
        lambda: decide(store, measured(8.0, problem=AttentionProblem(2048, 2048, 64))),
        lambda: store.pin(PROBLEM, H200, WARM, OWN),
        lambda: store.record_build(PROBLEM, OWN, {"main": "b" * 32}),
        lambda: store.record_build(PROBLEM, OWN, {"main": "c" * 32}),
    ):
        change()
        assert not is_as_before()
        assert is_as_before()
    store.close()
    for file in path.parent.glob("s.sqlite*"):
        file.unlink()
    assert decided(path) == {}


def test_a_chained_decision_is_in_use_while_no_stream_s_is() -> None:
    chained = Entry.of([measured(9.0, regime=WARM.chained)])
    replayed = measured(9.0, provenance=Provenance.REPLAYED)
    assert in_use([chained, Entry.of([replayed])]) == [chained, Entry.of([replayed])]
    stream = Entry.of([measured(11.0)])
    cold = Entry.of([measured(9.0, regime=WARM.other_inputs.chained)])
    assert in_use([chained, stream, cold]) == [stream, cold]
