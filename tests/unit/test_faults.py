"""Whatever damages a store, its users meet a StoreError, and a model's call PyTorch's answer."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from damage import FILES, SMALL, damaged, files_of, fill
from stored import CUDNN, H200, OTHER, OWN, PROBLEM, SLOWER, WARM, full, measured

from tuner import settings
from tuner.errors import ConfigError, StoreError
from tuner.problem import Problem
from tuner.selection import describe, snapshot
from tuner.store import Store, SweepRecord, open_store
from tuner.store.entry import canonical
from tuner.store.exchange import to_text

lookup = importlib.import_module("tuner.selection.reader")

SHORT, LONG = 30, 1000
"""Damaged stores."""

Call = Callable[[], object]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(tmp_path_factory.mktemp("whole") / "s.sqlite")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("written") / "s.sqlite"
    fill(path)
    return path.read_bytes()


@pytest.fixture
def path(written: bytes, tmp_path: Path) -> Path:
    """A store with something in every table."""
    path = tmp_path / "s.sqlite"
    path.write_bytes(written)
    return path


@pytest.fixture
def stores(files: dict[str, bytes], tmp_path: Path, long_mode: bool) -> Iterator[Path]:
    return damaged(files, tmp_path / "damaged", LONG if long_mode else SHORT, seed=1)


def looks(path: Path) -> dict[str, Call]:
    """All that reads an SQLite file without SQLAlchemy, and shows what it read."""

    def answer(problem: Problem) -> None:
        found = lookup.lookup(problem, gpu=H200, path=path)
        if found is not None:
            describe.answer_text(found, problem, "store")
            json.dumps(describe.answer_json(found, problem, ranking=True))
            describe.ranking_text(found.entry)

    return {
        "lookup": lambda: answer(PROBLEM),
        "lookup of another": lambda: answer(OTHER),
        "entries": lambda: describe.list_text(lookup.entries(path)),
        "gpus": lambda: lookup.find_gpu("H200", lookup.gpus(path)),
        "decided": lambda: lookup.decided(path),
        "stamp": lambda: hash(lookup.decided_stamp(path)),
        "snapshot": lambda: snapshot.take(path),
    }


@pytest.fixture(scope="module")
def whole(files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The measurements of the store that is damaged."""
    path = tmp_path_factory.mktemp("whole") / "s.sqlite"
    for end, content in files.items():
        Path(f"{path}{end}").write_bytes(content)
    with open_store(str(path)) as store:
        return {canonical(m.to_json()) for m in store.measurements()}


def uses(store: Store) -> dict[str, Call]:
    """All that reads and writes a store, and shows what it read."""
    jobs = store.jobs

    def show_jobs() -> None:
        for job in jobs.all():
            json.dumps([job.to_json(), job.created_at[:19]])
            json.dumps([task.to_json() for task in jobs.tasks(job.id)])
            json.dumps([[event.to_json(), event.at[:19]] for event in jobs.events(job.id)])
            json.dumps([measured.to_json() for _, measured in jobs.trials(job.id)])

    def work() -> None:
        claim = jobs.claim("host:2")
        if claim is not None:
            json.dumps(dict(claim.options))
            jobs.begin(claim.lease, "sweep9")
            jobs.extend(claim.lease, {"done": 1})
            jobs.is_held(claim.lease)
            jobs.fail(claim.lease, "no GPU")

    def sweep(id: str, problem: Problem) -> SweepRecord:
        return SweepRecord(id, problem, H200, WARM, "e", "quick")

    return {
        "measurements": lambda: json.dumps([m.to_json() for m in store.measurements()]),
        "all entries": lambda: [describe.entry_json(entry) for entry in store.entries()],
        "environments": lambda: [
            (e.environment.digest, e.newest[:4]) for e in store.environments()
        ],
        "export": lambda: to_text(store.export(trials=True)),
        "find a sweep": lambda: store.find_sweep(PROBLEM, H200, WARM, "e", "quick"),
        "mirrored": lambda: (store.mirrored("http://host:1") or "").encode(),
        "version": store.decisions_version,
        "counts": lambda: sum(jobs.counts().values()),
        "jobs": show_jobs,
        "work": work,
        "submit": lambda: jobs.submit([OTHER], {}),
        "take up a sweep": lambda: store.begin_sweep(sweep("sweep1", PROBLEM)),
        "begin a sweep": lambda: store.begin_sweep(sweep("sweep9", OTHER)),
        "end a sweep": lambda: store.end_sweep("sweep1", "done"),
        "add": lambda: store.add([measured(latency_us=7.0), full()]),
        "decide": lambda: store.decide(
            PROBLEM, H200, WARM, [measured(latency_us=3.0), measured(CUDNN, 4.0)], "sweep9"
        ),
        "pin": lambda: store.pin(PROBLEM, H200, WARM, SLOWER),
        "unpin": lambda: store.unpin(PROBLEM, H200, WARM),
        "build": lambda: store.record_build(OTHER, OWN, {"main": "cd" * 16}),
        "forget": lambda: store.forget(OTHER),
    }


def meets(name: str, call: Call) -> bool:
    """Whether a call meets a fault of the store, told as one line."""
    try:
        call()
    except StoreError as exc:
        assert "\n" not in str(exc)
        return True
    except ConfigError as exc:
        # The measurement that is to be pinned may be the one that is gone.
        assert name == "pin" and "no measurement that passed" in str(exc)
    return False


@pytest.mark.timeout(3600)
def test_every_fault_of_a_damaged_file_is_a_store_error(
    stores: Iterator[Path], whole: set[str]
) -> None:
    met: dict[str, bool] = {}
    changed: list[Path] = []

    def show(store: Store) -> None:
        if not {canonical(m.to_json()) for m in store.measurements()} <= whole:
            changed.append(path)

    for path in stores:
        for name, call in looks(path).items():
            met[name] = meets(name, call) or met.get(name, False)
        lookup.close()
        if meets("open", lambda path=path: open_store(str(path), create=False).close()):
            continue
        with open_store(str(path), create=False) as store:
            meets("show", lambda store=store: show(store))
            for name, call in uses(store).items():
                met[name] = meets(name, call) or met.get(name, False)
    assert changed == [], "what is read is what was written"
    assert {name for name, is_met in met.items() if is_met} >= {
        "lookup",
        "entries",
        "decided",
        "measurements",
        "export",
        "jobs",
        "add",
    }, "the damage reaches what reads and what writes"


@pytest.mark.parametrize(
    "change",
    [
        "latency_us = latency_us + 1e-9",
        "std_us = 0.2",
        "rounds = rounds + 1",
        "is_final = 1 - is_final",
        "flags = '[\"noisy\"]'",
        "error = NULL",
        "workspace_bytes = 1",
        "artifacts = '{\"main\":\"' || substr(digest, 1, 32) || '\"}'",
        "resources = '{}', log = 'x'",
        "compile_cpu_s = 0",
        "clocks = replace(clocks, '0', '1')",
        "log = log || ' '",
        "sweep = 'other'",
        "created_at = '2026-10-01T12:00:00+00:00'",
        "config = replace(config, '6', '7'), log = 'x'",
        "status = 'timeout', latency_us = NULL",
        "gpu_id = 3 - gpu_id",
        "digest = replace(digest, 'a', 'b') || id",
    ],
)
def test_a_measurement_that_changed_is_not_shown(change: str, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER measurements_immutable")
        connection.execute(f"UPDATE measurements SET {change}")
    shown = {name for name, call in looks(path).items() if not meets(name, call)}
    lookup.close()
    assert shown <= {"gpus", "decided", "stamp", "snapshot"}
    with open_store(str(path)) as store:
        called = uses(store)
        for name in ("measurements", "all entries", "export"):
            assert meets(name, called[name]), name
        with pytest.raises(StoreError, match="its SHA-256 differs"):
            store.measurements()


def test_a_byte_of_the_schema_s_text_that_is_no_character(path: Path) -> None:
    """SQLite quotes it in its message, which Python then cannot read."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"CREATE TABLE builds (", b"CREATE TAB\xffE builds ("))
    for call in (
        lambda: lookup.lookup(PROBLEM, gpu=H200, path=path),
        lambda: open_store(str(path)),
    ):
        with pytest.raises(StoreError, match="is damaged"):
            call()


@pytest.mark.parametrize(
    ("statement", "met"),
    [
        ("UPDATE builds SET artifacts = '[1]'", {"lookup", "entries", "all entries"}),
        ("UPDATE builds SET artifacts = '{\"main\": 1}'", {"lookup", "entries", "all entries"}),
        ("UPDATE winners SET decided_at = x'00'", {"lookup", "entries", "all entries", "export"}),
        ("UPDATE winners SET sweep = x'00'", {"lookup", "entries", "all entries", "export"}),
        ("UPDATE gpus SET facts = '{\"name\": ' || id || '}'", {"gpus", "lookup", "measurements"}),
        ("UPDATE environments SET facts = '5'", {"environments", "lookup", "measurements"}),
        ("UPDATE problems SET key = CAST(id AS BLOB)", {"decided", "measurements", "jobs"}),
        ("UPDATE problems SET key = '5' || id", {"measurements", "jobs", "work"}),
        ("UPDATE rankings SET measurement_id = 2 WHERE position = 0", {"lookup", "export"}),
        ("DELETE FROM rankings WHERE position >= 0", {"lookup", "all entries", "export"}),
        ("UPDATE measurements SET regime = 'eager-warm'", {"measurements", "export"}),
        ("UPDATE measurements SET provenance = 'replayed'", {"measurements", "export"}),
        ("UPDATE measurements SET log = 'x' WHERE sweep = 'sweep1'", {"measurements", "jobs"}),
        ("UPDATE sweeps SET created_at = x'00'", {"find a sweep"}),
        ("UPDATE mirrors SET etag = x'00'", {"mirrored"}),
        ("UPDATE versions SET number = 'many'", {"version"}),
        ("UPDATE jobs SET created_at = x'00'", {"jobs"}),
        ("UPDATE jobs SET options = '[]'", {"jobs", "work"}),
        ("UPDATE tasks SET progress = '[]'", {"jobs"}),
        ('UPDATE tasks SET progress = \'{"goal": "x"}\'', {"jobs"}),
        ('UPDATE tasks SET progress = \'{"result": {"winner": 1}}\'', {"jobs"}),
        ("UPDATE tasks SET attempt = 'x'", {"jobs", "work"}),
        ("UPDATE job_events SET at = x'00'", {"jobs"}),
        ("UPDATE tuner_version SET version_num = x'00'", {"lookup", "open"}),
    ],
)
def test_values_that_nobody_wrote(statement: str, met: set[str], path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TRIGGER measurements_immutable")
        connection.execute(statement)
    found = {name for name, call in looks(path).items() if meets(name, call)}
    lookup.close()
    if meets("open", lambda: open_store(str(path), create=False).close()):
        found.add("open")
    else:
        with open_store(str(path), create=False) as store:
            found |= {name for name, call in uses(store).items() if meets(name, call)}
    assert found >= met


@pytest.mark.timeout(3600)
def test_a_model_s_call_is_answered_whatever_the_store_does(
    stores: Iterator[Path], on_cpu: SimpleNamespace
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import tuner

    inputs = [torch.randn(1, SMALL.heads_q, SMALL.seqlen_q, SMALL.head_dim).half() for _ in "qkv"]
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    blamed = 0
    for path in stores:
        for end in FILES:
            if (file := Path(f"{path}{end}")).exists():
                settings.store_path().parent.mkdir(exist_ok=True)
                shutil.copy(file, f"{settings.store_path()}{end}")
        assert torch.equal(tuner.attention(*inputs), expected)
        blamed += any("the store cannot be read" in error for error in tuner.stats().errors)
        on_cpu.forget()
        lookup.close()
        shutil.rmtree(settings.store_path().parent)
    assert blamed > 5
