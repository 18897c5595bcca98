"""The page of results is what the generator writes, and each of its rows says how it was made."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results
from tuner.errors import ConfigError

README = Path(__file__).parents[2] / "README.md"
MAX_LINES = 300
FIGURES = "cases", "own", "ratio", "decisions"
NAMES = [name for names in results.SECTIONS.values() for name in names]


def test_the_page_is_what_the_generator_writes() -> None:
    """``scripts/bench results`` writes it anew, as after a change of ``cache/tuned/``."""
    page = results.PAGE.read_text()
    assert page == results.page()
    assert len(page.splitlines()) <= MAX_LINES


def test_the_page_has_every_file() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in results.FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_each_row_says_what_was_measured_and_how(name: str) -> None:
    content = results.read(name)
    assert set(content) == {"text", "runs", "limits"} and content["runs"]
    for run in content["runs"]:
        assert set(run) == {*results.FACTS, "rows"} and all(run.values())
        assert re.match(r"(scripts/|tuner )[\w-]+", run["command"])
        assert datetime.date.fromisoformat(run["date"]).year >= 2026
        for row in run["rows"]:
            assert row["what"] and any(row.get(figure) for figure in FIGURES), row
            assert set(row) <= {"what", "over", "worst", *FIGURES}


def test_ratios_of_the_readme_are_on_the_page() -> None:
    (part,) = re.findall(r"^## Results\n(.*?)^## ", README.read_text(), re.DOTALL | re.MULTILINE)
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    ratios = {ratio for line in rows for ratio in re.findall(r"\b\d\.\d{3}\b", line)}
    page = results.PAGE.read_text()
    assert len(ratios) > 30 and {ratio for ratio in ratios if ratio not in page} == set()


HEAD = {
    "bench": "backward",
    "preset": "attention",
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "date": "2026-12-01",
    "command": "scripts/bench backward --json rows.jsonl",
}


def bench_row(group: str, tuner: float, pytorch: float, flash: float) -> dict[str, Any]:
    return {
        "case": f"{group} {tuner}",
        "group": group,
        "us": {"tuner": tuner, "pytorch": pytorch, "flash3": flash},
    }


def test_rows_of_a_bench_are_a_run_of_their_groups() -> None:
    rows = [bench_row("causal", 10.0, 20.0, 10.0), bench_row("full", 10.0, 5.0, 10.0)]
    run = results.run_of(HEAD, rows)
    assert {name: run[name] for name in results.FACTS} == {
        "command": "scripts/bench backward --json rows.jsonl",
        "gpu": "H200",
        "versions": "driver 580.1, torch 2.11.0",
        "date": "2026-12-01",
    }
    assert [(row["what"], row["ratio"], row["worst"]) for row in run["rows"]] == [
        ("causal", "2.000; 1.000", "2.000; 1.000"),
        ("full", "0.500; 0.500", "0.500; 0.500"),
        ("all", "1.000; 0.707", "0.500; 0.500"),
    ]
    with pytest.raises(ConfigError, match="enter its figures by hand"):
        results.run_of(HEAD, [{"case": "a", "group": "b", "lost": "hung"}])


def test_a_run_takes_the_place_of_its_preset_s_former_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(results.FOLDER, tmp_path / "results")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    before = {name: results.read(name) for name in NAMES}
    run = results.run_of(HEAD, [bench_row("causal", 10.0, 20.0, 10.0)])
    assert results.add(run, "backward") == tmp_path / "results" / "backward.json"
    assert results.read("backward")["runs"] == [run]
    h100 = {**run, "gpu": "H100"}
    results.add(h100, "backward")
    assert results.read("backward")["runs"] == [run, h100]
    odd = {**run, "command": "scripts/bench population --preset odd_columns --json odd.jsonl"}
    assert results.add(odd, "population").stem == "vocabularies"
    changed = [name for name in NAMES if results.read(name) != before[name]]
    assert changed == ["backward", "vocabularies"] and "1 Dec 2026" in results.page()
    with pytest.raises(ConfigError, match="no file of 'new'"):
        results.add({**run, "command": "scripts/bench new"}, "new")
