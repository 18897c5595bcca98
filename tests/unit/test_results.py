"""The page of results is what the generator writes, and each of its rows says how it was made."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from benchmarks import results

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
