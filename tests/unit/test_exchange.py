"""Export and import: a round trip is exact; what does not fit is refused with row and reason."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from stored import final

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
    Status,
)
from tuner.problem import AttentionProblem, GemmProblem
from tuner.store import Store, open_store
from tuner.store.entry import sort_key
from tuner.store.exchange import load, parse, to_text
from tuner.store.trusted import Trusted

H200, H100 = GPUS["H200"], GPUS["H100"]
WARM, COLD = Regime("stream", "warm"), Regime("stream", "cold")
PROBLEM = AttentionProblem(1024, 1024, 64)
GEMM = GemmProblem(4096, 4096, 4096)
OWN = Config("cutlass_fmha", {"tile_m": 128})
SLOWER = Config("cutlass_fmha", {"tile_m": 64})
CUDNN = Config("vendor_sdpa", {"backend": "cudnn"})

Document = dict[str, Any]


def measured(config: Config = OWN, latency_us: float = 13.0, **changes: Any) -> Measurement:
    own = {"artifacts": {"main": "0123456789abcdef" * 2}}
    facts: dict[str, Any] = {} if config == CUDNN else own
    facts |= {} if config == CUDNN else {"resources": {"main": Resources(168, 0, 0, 0, 64)}}
    facts["environment"] = Environment({"driver": "580.159", "power_limit_w": 700})
    facts["clocks"] = Clocks(1755, 3201, 61, 689.5, ("sw_power_cap",))
    facts |= {"std_us": 0.125, "created_at": "2026-10-01T12:00:00.123+00:00"}
    return final(config, latency_us, PROBLEM, **{**facts, **changes})


@pytest.fixture
def filled(store: Store) -> Store:
    store.add(
        [
            measured(SLOWER, 17, is_final=False),
            measured(SLOWER, is_final=False).but(
                status=Status.TIMEOUT, latency_us=None, log="no end\nµ", artifacts={}
            ),
        ]
    )
    store.decide(PROBLEM, H200, WARM, [measured(), measured(CUDNN, 14)], "s1")
    store.decide(
        PROBLEM, H200, WARM, [measured(latency_us=1, provenance=Provenance.PREDICTED)], "s2"
    )
    gemm = Config("gemm", {"tile_m": 128, "swap_ab": True}, {})
    store.decide(GEMM, H200, COLD, [measured(gemm, 220, problem=GEMM, regime=COLD)], "s3")
    store.pin(PROBLEM, H200, WARM, SLOWER)
    return store


@pytest.mark.parametrize("trials", [False, True])
def test_a_round_trip_is_exact(filled: Store, trials: bool) -> None:
    document = filled.export(trials=trials)
    text = json.dumps(document, allow_nan=False)
    with open_store("sqlite://") as other:
        report = other.import_(parse(text))
        assert other.export(trials=trials) == document
        assert json.dumps(other.export(trials=trials)) == text
        assert report.entries_added == 3
        assert report.measurements_added == len(document["measurements"]) == (6 if trials else 5)
        again = other.import_(parse(text))
        assert (again.entries_known, again.measurements_known) == (3, report.measurements_added)
        assert again.entries_added == again.measurements_added == 0
        assert again.entries_kept == ()


def test_imported_entries_say_so_and_have_no_artifacts_here(filled: Store) -> None:
    with open_store("sqlite://") as other:
        other.import_(filled.export())
        entry = other.best(PROBLEM, H200, WARM)
        assert entry.origin == "imported"
        assert entry.pinned
        assert entry.winner.config == SLOWER
        assert entry.best_own is not None
        assert entry.best_own.artifacts == {}, "a file must not choose a local binary"
        other.record_build(PROBLEM, OWN, {"main": "f" * 32})
        entry = other.best(PROBLEM, H200, WARM)
        assert entry.best_own is not None
        assert entry.best_own.artifacts == {"main": "f" * 32}
        assert other.export() == filled.export(), "what was measured is what is exported"


def test_filters(filled: Store) -> None:
    assert len(filled.export(op="gemm")["entries"]) == 1
    assert len(filled.export(op="gemm")["measurements"]) == 1
    assert len(filled.export(problem=PROBLEM, provenance=Provenance.MEASURED)["entries"]) == 1
    assert filled.export(gpu=H100) == {
        "format": "cutlass-tuner-entries",
        "version": 3,
        "gpus": [],
        "environments": [],
        "measurements": [],
        "entries": [],
    }
    assert len(filled.export(regime=COLD, trials=True)["measurements"]) == 1


def test_a_decision_of_ones_own_stands_against_an_imported_one(filled: Store) -> None:
    with open_store("sqlite://") as other:
        other.decide(PROBLEM, H200, WARM, [measured(SLOWER, 12)], "mine")
        report = other.import_(filled.export())
        assert (report.entries_added, report.entries_replaced) == (2, 0)
        assert report.entries_kept == (f"{PROBLEM.label()} on NVIDIA H200 (stream-warm)",)
        entry = other.best(PROBLEM, H200, WARM)
        assert (entry.sweep, entry.origin, entry.pinned) == ("mine", "", False)


def decided(latency_us: float, decided_at: str) -> Document:
    """What another store decided, and when."""
    with open_store("sqlite://") as other:
        other.decide(PROBLEM, H200, WARM, [measured(latency_us=latency_us)], decided_at)
        exported = other.export()
        exported["entries"][0]["decided_at"] = decided_at
        return exported


def test_of_two_imported_decisions_the_newer_stands(store: Store) -> None:
    assert store.import_(decided(13, "2026-10-02T00:00:00+00:00")).entries_added == 1
    assert store.import_(decided(12, "2026-10-03T00:00:00+00:00")).entries_replaced == 1
    late = store.import_(decided(11, "2026-10-01T00:00:00+00:00"))
    assert len(late.entries_kept) == 1
    entry = store.best(PROBLEM, H200, WARM)
    assert entry.winner.latency_us == 12


def test_a_decision_of_a_time_to_come_is_replaced(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store may hold one from before they were refused."""
    with monkeypatch.context() as before:
        before.setattr("tuner.store.exchange.is_ahead", lambda time: False)
        store.import_(decided(13, "9999-01-01T00:00:00+00:00"))
    assert store.import_(decided(12, "2026-10-03T00:00:00+00:00")).entries_replaced == 1


def test_clocks_may_differ_by_hours(store: Store) -> None:
    soon = datetime.now(UTC) + timedelta(hours=23)
    assert store.import_(decided(13, soon.isoformat(timespec="milliseconds"))).entries_added == 1
    assert store.import_(decided(12, "2026-10-03T00:00:00+00:00")).entries_kept


def test_a_measured_decision_replaces_an_imported_one(filled: Store) -> None:
    with open_store("sqlite://") as other:
        other.import_(filled.export())
        other.decide(PROBLEM, H200, WARM, [measured(latency_us=12.5)], "mine")
        entry = other.best(PROBLEM, H200, WARM)
        assert (entry.origin, entry.ranking[0].latency_us) == ("", 12.5)


def at(path: str, value: Any) -> Callable[[Document], None]:
    """A change of one place, as in ``measurements.0.latency_us``."""

    def change(document: Document) -> None:
        *steps, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        place: Any = document
        for step in steps:
            place = place[step]
        if value is DELETE:
            del place[last]
        else:
            place[last] = value

    return change


DELETE = object()
ROW = "measurements.0"


def another_digest(document: Document) -> None:
    document["measurements"][0]["config"]["params"]["tile_m"] = 192


def decided_twice(document: Document) -> None:
    document["entries"].append(dict(document["entries"][0]))


def failure_wins(document: Document) -> None:
    document["measurements"][0].update(status="timeout", latency_us=None)


BAD: dict[str, tuple[Callable[[Document], None], str]] = {
    "negative time": (at(f"{ROW}.latency_us", -1.0), r"measurements\[0\]: latency_us: -1.0 is"),
    "no time": (at(f"{ROW}.latency_us", None), r"measurements\[0\]: latency_us: None does not go"),
    "text as time": (at(f"{ROW}.latency_us", "13"), r"measurements\[0\]: latency_us: '13' is not"),
    "endless time": (at(f"{ROW}.latency_us", float("inf")), r"latency_us: it is not finite"),
    "huge time": (at(f"{ROW}.latency_us", 10**400), r"latency_us: it is not finite"),
    "endless power": (at(f"{ROW}.clocks.power_w", float("inf")), r"clocks.power_w: it is not"),
    "truth as count": (
        at(f"{ROW}.rounds", True),
        r"measurements\[0\]: rounds: True is not of type",
    ),
    "huge count": (at(f"{ROW}.workspace_bytes", 2**64), r"workspace_bytes: 18446744073709551616"),
    "unknown field": (at(f"{ROW}.code", "x"), r"measurements\[0\]: .*'code' was unexpected"),
    "missing field": (at(f"{ROW}.gpu", DELETE), r"measurements\[0\]: 'gpu' is a required property"),
    "unknown op": (at(f"{ROW}.problem.op", "conv"), r"measurements\[0\]: op='conv' is not known"),
    "unknown size": (at(f"{ROW}.problem.depth", 3), r"measurements\[0\]: unknown field 'depth'"),
    "wrong size": (at(f"{ROW}.problem.head_dim", 63), r"measurements\[0\]: D=63 has no tuned"),
    "text as size": (
        at(f"{ROW}.problem.head_dim", "64"),
        r"attention.head_dim='64' is not of type",
    ),
    "unknown status": (at(f"{ROW}.status", "great"), r"measurements\[0\]: status: 'great' is not"),
    "unknown regime": (at(f"{ROW}.regime", "graph"), r"measurements\[0\]: regime: 'graph' is not"),
    "digest": (another_digest, r"measurements\[0\]: config_digest: [0-9a-f]{16} given"),
    "digest's form": (at(f"{ROW}.config_digest", "xyz"), r"config_digest: 'xyz' does not match"),
    "fraction": (
        at(f"{ROW}.config.params.tile_m", 1.5),
        r"config.params.tile_m: 1.5 is not of type",
    ),
    "artifact path": (
        at(f"{ROW}.artifacts.main", "../../lib"),
        r"artifacts.main: '../../lib' does",
    ),
    "artifact newline": (at(f"{ROW}.artifacts.main", "a" * 32 + "\n"), r"artifacts.main: .* does"),
    "half a character": (
        at(f"{ROW}.log", "\ud800"),
        r"measurements\[0\]: .*surrogates not allowed",
    ),
    "zero byte": (at(f"{ROW}.log", "a\0"), r"measurements\[0\]: log: .* does not match"),
    "row is a list": (at(ROW, [1, 2]), r"measurements\[0\]: \[1, 2\] is not of type 'object'"),
    "no such row": (at("entries.0.ranking", [77]), r"entries\[0\]: there is no measurements\[77\]"),
    "empty ranking": (at("entries.0.ranking", []), r"entries\[0\]: ranking: \[\]"),
    "repeated row": (at("entries.0.ranking", [0, 0]), r"entries\[0\]: ranking: .*non-unique"),
    "two problems": (at("entries.0.ranking", [0, 4]), r"entries\[0\]: ranking: .*another problem"),
    "no final": (at("entries.0.ranking", [2]), r"entries\[0\]: ranking: .* is not a final"),
    "failure wins": (failure_wins, r"entries\[0\]: ranking: .* did not pass \(timeout\)"),
    "foreign pin": (at("entries.0.pinned", 4), r"entries\[0\]: pinned: .*another problem"),
    "decided twice": (decided_twice, r"entries: .* is decided twice"),
    "to come": (
        at("entries.0.decided_at", "9999-01-01T00:00:00Z"),
        r"entries\[0\]: decided_at: 9999-01-01T00:00:00Z is more than a day ahead",
    ),
    "measured to come": (
        at(f"{ROW}.created_at", "9999-01-01T00:00:00+00:00"),
        r"measurements\[0\]: created_at: 9999-\S+ is more than a day ahead",
    ),
    "when": (at("entries.0.decided_at", "yesterday"), r"entries\[0\]: decided_at: 'yesterday'"),
    "newer": (at("version", 4), r"version 4, this program reads 3: update cutlass-tuner"),
    "unknown GPU": (at(f"{ROW}.gpu", 7), r"measurements\[0\]: gpu: number 7 is missing"),
    "GPU below zero": (at(f"{ROW}.gpu", -1), r"measurements\[0\]: gpu: number -1 is missing"),
    "truth as GPU": (at(f"{ROW}.gpu", True), r"measurements\[0\]: gpu: True is not"),
    "no environments": (at("environments", DELETE), r"environment: number 0 is missing"),
    "a GPU's size": (at("gpus.0.sm_count", 0), r"not a document of entries: gpus\[0\].sm_count: 0"),
    "format": (at("format", "x"), r"not a document of entries: format: 'cutlass-tuner-entries'"),
    "extra part": (at("binaries", {}), r"not a document of entries: .*'binaries' was unexpected"),
    "no rows": (at("measurements", DELETE), r"not a document of entries: 'measurements' is"),
}


def test_what_earlier_programs_wrote_around_decisions_is_not_read(filled: Store) -> None:
    """Whatever it says: quick times at other shapes, which served these."""
    row = {
        "entry": 0,
        "sweep": "w",
        "environment": {"driver": "580.159"},
        "configs": [0],
        "shapes": [[{"batch": 2}, [20.123], "2026-10-01T12:00:00+00:00"]],
    }
    document = {**filled.export(), "around": [row, "and text"]}
    assert Trusted(json.dumps(document).encode()).decisions
    with open_store("sqlite://") as other:
        assert other.import_(document).measurements_added == 5
        assert other.export() == filled.export()
    assert "around" not in filled.export() and "around" not in to_text(document)


@pytest.mark.parametrize("version", [1, 2])
def test_a_document_of_an_earlier_version_is_read(filled: Store, version: int) -> None:
    exported = filled.export()
    gpus, environments = exported["gpus"], exported["environments"]
    rows = [
        {**row, "gpu": gpus[row["gpu"]], "environment": environments[row["environment"]]}
        for row in exported["measurements"]
    ]
    document = {name: exported[name] for name in ("format", "entries")}
    document |= {"version": version, "measurements": rows}
    with open_store("sqlite://") as other:
        other.import_(document)
        assert other.export() == filled.export()


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_with_row_and_reason(filled: Store, case: str) -> None:
    change, reason = BAD[case]
    document = copy.deepcopy(filled.export())
    order = [(m["config"]["family"], m["is_final"]) for m in document["measurements"]]
    assert order.index(("cutlass_fmha", False)) == 2, "the rows that the cases name"
    assert order.index(("gemm", True)) == 4
    change(document)
    with open_store("sqlite://") as other:
        with pytest.raises(ConfigError, match=reason):
            other.import_(document)
        assert other.measurements() == [], "nothing is imported"


def test_the_unchanged_document_of_these_cases_is_taken(filled: Store, store: Store) -> None:
    with open_store("sqlite://") as other:
        assert other.import_(copy.deepcopy(filled.export())).entries_added == 3


def test_every_bad_row_is_listed(filled: Store) -> None:
    document = filled.export()
    document["measurements"][1]["latency_us"] = -1
    document["measurements"][4]["status"] = "great"
    document["entries"][0]["sweep"] = 3
    with open_store("sqlite://") as other, pytest.raises(ConfigError) as error:
        other.import_(document)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("nothing was imported, ")
    rows = {line.split(":")[0].strip() for line in lines[1:]}
    assert {"measurements[1]", "measurements[4]", "entries[0]"} <= rows


@pytest.mark.parametrize("document", [None, [], 3, "x", {}, {"format": "cutlass-tuner-entries"}])
def test_what_is_no_document(store: Store, document: Any) -> None:
    with pytest.raises(ConfigError, match="not a document of entries"):
        store.import_(document)


def test_a_config_nested_without_end(store: Store, filled: Store) -> None:
    document = filled.export()
    config: Document = {"family": "gemm", "params": {}}
    for _ in range(5000):
        config = {"family": "gemm", "params": {}, "stages": {"qk": config}}
    document["measurements"][0]["config"] = config
    with open_store("sqlite://") as other, pytest.raises(ConfigError, match="nested too deeply"):
        other.import_(document)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": NaN}', "NaN is not allowed"),
        ('{"a": -Infinity}', "-Infinity is not allowed"),
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ('{"a": ', "not JSON: .* at line 1, column 7"),
        ("1" * 10_000, "not JSON: Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_text_that_is_not_strict_json(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json cannot be read: No such file"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(tmp_path / "binary")


def test_a_check_refuses_served_rows_only(filled: Store) -> None:
    seen = []

    def check(measurement: Measurement) -> list[str]:
        seen.append(measurement)
        return ["config: tile_m=64 is not legal"] if measurement.config == SLOWER else []

    with open_store("sqlite://") as other:
        with pytest.raises(ConfigError, match=r"measurements\[2\]: config: tile_m=64 is not"):
            other.import_(filled.export(trials=True), check=check)
        assert other.measurements() == []
    ranked = [m for entry in filled.entries() for m in (*entry.ranking, entry.winner)]
    assert len(seen) == 5
    assert all(m in ranked for m in seen), "a trial may have become illegal since"


def test_whole_numbers_and_fractions_are_one_latency(store: Store) -> None:
    store.decide(PROBLEM, H200, WARM, [measured(latency_us=14)], "s")
    with open_store("sqlite://") as other:
        other.decide(PROBLEM, H200, WARM, [measured(latency_us=14.0)], "s")
        assert json.dumps(store.export()["measurements"]) == json.dumps(
            other.export()["measurements"]
        )


@pytest.mark.parametrize("write", [to_text, json.dumps], ids=["lines", "another layout"])
def test_a_shipped_document_reads_as_the_store_answers(
    filled: Store, write: Callable[[Document], str]
) -> None:
    document = Trusted(write(filled.export()).encode())
    entries = sorted((document.entry(d, "shipped") for d in document.decisions), key=sort_key)
    stored = filled.entries()
    assert [e.ranking for e in entries] == [e.ranking for e in stored]
    assert [e.winner for e in entries] == [e.winner for e in stored]
    assert [e.pinned for e in entries] == [e.pinned for e in stored] and any(
        e.pinned for e in entries
    )
    assert {e.origin for e in entries} == {"shipped"}


def test_each_row_has_a_line_of_its_own(filled: Store) -> None:
    document = filled.export(trials=True)
    assert any("\n" in row["log"] for row in document["measurements"])
    text = to_text(document)
    assert parse(text) == document
    rows = [json.loads(line.rstrip(",")) for line in text.splitlines() if line.startswith('{"')]
    parts = "gpus", "environments", "measurements", "entries"
    assert rows == [row for part in parts for row in document[part]]
    assert len(document["gpus"]) < len(document["measurements"])


def test_a_document_without_decisions_is_text_too(store: Store) -> None:
    text = to_text(store.export())
    assert parse(text) == store.export() and Trusted(text.encode()).decisions == []


@pytest.mark.parametrize("part", [0.5, 0.97])
def test_half_a_shipped_document_is_refused(filled: Store, part: float) -> None:
    text = to_text(filled.export()).encode()
    with pytest.raises(ValueError):
        Trusted(text[: int(part * len(text))])


def test_an_import_that_fails_in_the_database_leaves_nothing(filled: Store, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with open_store(str(path)) as other:
        with sqlite3.connect(path) as connection:
            connection.execute(
                "CREATE TRIGGER no BEFORE INSERT ON rankings BEGIN SELECT RAISE(ABORT, 'no'); END"
            )
        connection.close()
        with pytest.raises(Exception, match="failed: no"):
            other.import_(filled.export())
        assert other.measurements() == []
