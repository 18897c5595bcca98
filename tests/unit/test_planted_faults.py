"""The script that plants faults: what it draws, where it finds it again, and how it goes on."""

from __future__ import annotations

import ast
import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import planted_faults
from planted_faults import (
    AREAS,
    CAUGHT,
    FAULTS,
    GONE,
    SURVIVED,
    Copy,
    Fault,
    candidates,
    draw,
    planted,
    run,
)

SOURCE = """
class Guard:
    def check(self, size: int) -> None:
        if size > 4 and not self.is_open:
            raise ValueError("too large")
"""
FAULT = Fault("gate", "tuner/a.py", "Guard.check", "if size > 4 and not self.is_open:", "if False:")


def test_each_change_is_of_one_line() -> None:
    changes = {fault.after for fault in planted_faults.candidates("gate", "a.py", SOURCE)}
    assert changes == {
        "if (size > 4 or not self.is_open):",
        "if (size >= 4) and not self.is_open:",
        "if size > 5 and not self.is_open:",
        "if size > 4 and self.is_open:",
        "pass",
    }


def test_the_draw_is_of_its_seed_and_of_all_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    by_file = functools.cache(lambda *file: [*candidates(*file)])
    monkeypatch.setattr(planted_faults, "candidates", by_file)
    drawn = draw(44, 20)
    assert drawn == draw(44, 20) != draw(45, 20)
    assert {fault.area for fault in drawn} == set(AREAS) and len(drawn) == 20
    for fault in drawn:
        place = planted(fault, planted_faults.TOP)
        assert place is not None and place[1] != place[0].read_text()
        ast.parse(place[1])


def test_the_file_has_a_hundred_that_can_be_planted() -> None:
    """A fault whose line was changed is replaced by one of the new line."""
    faults = [Fault(**row) for row in json.loads(FAULTS.read_text())]
    assert len({fault.id for fault in faults}) == 100
    assert {fault.area for fault in faults} == set(AREAS)
    assert [fault for fault in faults if planted(fault, planted_faults.TOP) is None] == []


def test_a_fault_is_found_where_its_function_moved(tmp_path: Path) -> None:
    (tmp_path / "tuner" / "deep").mkdir(parents=True)
    (tmp_path / "tuner" / "deep" / "b.py").write_text(SOURCE)
    place = planted(FAULT, tmp_path)
    assert place[0].name == "b.py" and "        if False:\n" in place[1]
    assert planted(replace(FAULT, function="Guard.other"), tmp_path) is None
    assert planted(replace(FAULT, before="if size > 3:"), tmp_path) is None


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A copy of one source, in which a test fails at ``if False``; areas that were tested."""
    tested: list[str] = []

    def made(tree: Copy, root: Path, limit_s: float) -> None:
        tree.root = root
        (root / "tuner").mkdir()
        (root / "tuner" / "a.py").write_text(SOURCE)

    def test(tree: Copy, area: str) -> tuple[str, str, float]:
        tested.append(area)
        text = (tree.root / "tuner" / "a.py").read_text()
        return (CAUGHT, "test_a", 1.0) if "if False" in text else (SURVIVED, "", 1.0)

    monkeypatch.setattr(Copy, "__init__", made)
    monkeypatch.setattr(Copy, "test", test)
    return tested


def test_results_are_kept_and_a_second_run_goes_on(sources: list[str], tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    missed, gone = replace(FAULT, after="if size > 5:"), replace(FAULT, before="no such line")
    assert run([FAULT], file, 1.0)[FAULT.id]["result"] == CAUGHT
    assert sources == ["gate"] * 2
    results = run([FAULT, missed, gone], file, 1.0)
    assert [results[one.id]["result"] for one in (FAULT, missed, gone)] == [CAUGHT, SURVIVED, GONE]
    assert sources == ["gate"] * 4 and json.loads(file.read_text()) == results


def test_tests_that_fail_without_a_fault_end_it(
    sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copy, "test", lambda tree, area: (CAUGHT, "test_b", 1.0))
    with pytest.raises(SystemExit, match="gate: its tests fail without a fault"):
        run([FAULT], tmp_path / "results.json", 1.0)
