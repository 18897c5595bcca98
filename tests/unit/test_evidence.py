"""The rule for evidence at other shapes, and that every reader of measurements applies it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from lenders import OWN, toy_family

from tuner.config import Config
from tuner.hardware import GPUS
from tuner.measurement import Measurement, Provenance, Regime, Resources, Status
from tuner.problem import AttentionProblem, Problem
from tuner.selection import reader
from tuner.selection.nearest import LEAST_PASSED, Loans, drawn
from tuner.selection.snapshot import take, unpack
from tuner.store import Entry, Store, evidence, open_store
from tuner.store.exchange import Trusted, to_text

toy = toy_family  # for every test here

PROBLEM = AttentionProblem.parse("S=1024,D=64")
SHAPES = drawn(PROBLEM)
H200, WARM = GPUS["H200"], Regime("stream", "warm")
CODE = Resources(168, 0, 0, 0, code="c" * 32)
RANKED = Measurement(
    PROBLEM,
    OWN[0],
    H200,
    WARM,
    Status.OK,
    latency_us=12.0,
    is_final=True,
    artifacts={"attention": "a" * 32},
    resources={"attention": CODE},
)
CUDNN = RANKED.but(config=Config("vendor_sdpa", {"kernel": "cudnn"}), artifacts={}, resources={})
GOOD = RANKED.but(problem=SHAPES[0], is_final=False, latency_us=10.0, created_at="2026-10-01")

COUNTS: Mapping[str, Mapping[str, Any]] = {
    "it passed": {},
    "its kernels failed": {"status": Status.WRONG_RESULT, "latency_us": None},
    "another artifact of the same code": {"artifacts": {"attention": "b" * 32}},
}
COUNTS_NOT: Mapping[str, Mapping[str, Any]] = {
    "the machine was full": {"status": Status.OUT_OF_MEMORY, "latency_us": None},
    "final pass": {"is_final": True},
    "replayed": {"provenance": Provenance.REPLAYED},
    "predicted": {"provenance": Provenance.PREDICTED},
    "the same problem": {"problem": PROBLEM},
    "another config": {"config": OWN[1]},
    "another GPU": {"gpu": GPUS["H100"]},
    "other inputs": {"regime": Regime("stream", "cold")},
    "other machine code": {
        "artifacts": {"attention": "b" * 32},
        "resources": {"attention": Resources(168, 0, 0, 0, code="d" * 32)},
    },
}

Reader = Callable[[Store, Path], list[Measurement]]


def from_store(store: Store, path: Path) -> list[Measurement]:
    (entry,) = store.entries(problem=PROBLEM)
    return store.evidence(entry.ranked, SHAPES)


def from_file(store: Store, path: Path) -> list[Measurement]:
    (entry,) = store.entries(problem=PROBLEM)
    reader.lookup(PROBLEM, gpu=H200, path=path)  # opens the file
    return reader._reader(path)._evidence(entry, SHAPES)


def from_snapshot(store: Store, path: Path) -> list[Measurement]:
    copy = path.with_name("copy.sqlite")
    unpack(take(path), copy)
    return from_file(store, copy)


def from_export(store: Store, path: Path) -> list[Measurement]:
    document = Trusted(to_text(store.export(around=drawn)).encode())
    return document.around(document.decisions[0])


READERS: Sequence[Reader] = (from_store, from_file, from_snapshot, from_export)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store that decides `PROBLEM`; nothing ships."""
    monkeypatch.setattr(reader, "shipped_around", lambda entry: [])
    file = tmp_path / "s.sqlite"
    with open_store(str(file)) as store:
        store.decide(PROBLEM, H200, WARM, [RANKED, CUDNN], "sweep1")
    yield file
    reader.close()


def told(measurements: Sequence[Measurement]) -> list[tuple[Problem, str, Status, float | None]]:
    return [(m.problem, m.config.digest, m.status, m.latency_us) for m in measurements]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("case", [*COUNTS, *COUNTS_NOT])
def test_every_reader_applies_the_rule(path: Path, case: str, read: Reader) -> None:
    m = GOOD.but(**{**COUNTS, **COUNTS_NOT}[case])
    expected = [m] if case in COUNTS else []
    assert evidence.counts(m, RANKED) == bool(expected)
    with open_store(str(path)) as store:
        store.add([m])
        assert told(read(store, path)) == told(expected)


@pytest.mark.parametrize("case", [*COUNTS, *COUNTS_NOT])
def test_lending_applies_the_rule(case: str) -> None:
    """One measurement short of enough, the case's is the last: it passes, fails or is not seen."""
    enough = [GOOD.but(problem=shape) for shape in SHAPES[1:LEAST_PASSED]]
    change = {**COUNTS, **COUNTS_NOT}[case]
    loans = Loans(Entry.of([RANKED, CUDNN]), [*enough, GOOD.but(**change)])
    lends = case in COUNTS and "status" not in change
    assert loans.configs == ((RANKED.config,) if lends else ())


@pytest.mark.parametrize("read", [from_file, from_export])
def test_newer_measurements_of_other_code_hide_nothing(path: Path, read: Reader) -> None:
    """A store and its export lend alike after an edit of a template."""
    old = [GOOD.but(problem=shape) for shape in SHAPES[:LEAST_PASSED]]
    newer = {**COUNTS_NOT["other machine code"], "created_at": "2026-11-01"}
    with open_store(str(path)) as store:
        store.add([*old, *(m.but(**newer) for m in old)])
        loans = Loans(store.entries()[0], read(store, path))
    assert loans.configs == (RANKED.config,)


def test_vendors_times_stand_beside_the_evidence() -> None:
    theirs = CUDNN.but(problem=SHAPES[0], is_final=False)
    assert evidence.comparable(theirs, RANKED) and not evidence.counts(theirs, RANKED)
    for case in ("final pass", "replayed", "the same problem", "another GPU", "other inputs"):
        assert not evidence.comparable(theirs.but(**COUNTS_NOT[case]), RANKED)


def test_of_several_the_newest_is_told() -> None:
    newer = GOOD.but(created_at="2026-10-02", latency_us=11.0)
    assert evidence.newest([newer, GOOD], RANKED) == {GOOD.problem: newer}
