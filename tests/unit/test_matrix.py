"""`scripts/matrix`: its rows, and what it says of a version that cannot be had or fails."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import matrix

TESTS = Path(__file__).parents[1]


def test_the_files_of_every_row_are_there() -> None:
    rows = matrix.rows()
    assert len({row.label for row in rows}) == len(rows) > 20
    for row in rows:
        assert all((TESTS / row.folder / f"test_{name}.py").is_file() for name in row.tests), row


def test_a_version_that_is_not_here_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUNER_CUTLASS_CLONE", raising=False)
    for row in (matrix.Row("Python", "9.9", ()), matrix.Row("CUTLASS's headers", "4.2.0", ())):
        assert matrix.record(row)["result"] == "not run"


def test_a_failing_test_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "x\nFAILED tests/unit/test_a.py::test_b - assert 0\n1 failed, 2 passed in 3 s"

    def run(row: matrix.Row, folder: Path) -> str:
        if row.version == "2":
            return "4 passed, 1 skipped in 2 s"
        raise subprocess.CalledProcessError(1, [], said)

    monkeypatch.setattr(matrix, "run", run)
    records = [matrix.record(matrix.Row("a", version, ())) for version in ("1", "2")]
    assert records[0]["faults"] == ["FAILED tests/unit/test_a.py::test_b - assert 0"]
    assert [one["result"] for one in records] == ["failed", "passed"]
    last = {**records[0], "result": "passed", "tests": "3 passed"}
    lines = matrix.table([*records, last]).splitlines()
    assert len(lines) == 4 and "| a 1 |" in lines[2] and "3 passed" in lines[2]
