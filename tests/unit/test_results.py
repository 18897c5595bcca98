"""The page of results is what the generator writes, and each of its rows says how it was made."""

from __future__ import annotations

import datetime
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, results, results_chart
from tuner import cli
from tuner.errors import ConfigError

ROOT = Path(__file__).parents[2]
MAX_LINES = 300
FIGURES = "cases", "own", "ratio", "decisions"
NAMES = [name for names in results.SECTIONS.values() for name in names]


def test_the_page_is_what_the_generator_writes() -> None:
    """``scripts/bench results`` writes it anew, as after a change of ``cache/tuned/``."""
    page = results.PAGE.read_text()
    assert page == results.page()
    assert len(page.splitlines()) <= MAX_LINES


def test_the_chart_is_what_the_generator_writes() -> None:
    assert results_chart.PATH.read_text() == results_chart.chart()
    means = [bar.figures()[0] for bar in results_chart.BARS if bar.what]
    assert all(results_chart.LEAST < mean < results_chart.MOST for mean in means)


def test_the_page_has_every_file() -> None:
    assert sorted(NAMES) == sorted(path.stem for path in results.FOLDER.glob("*.json"))


def test_a_longer_version_is_not_shortened() -> None:
    """cuDNN 9.19.0.56 is not version B, which has 9.19."""
    run = {"versions": f"{results.VERSIONS['B']}.0.56", "date": "2026-11-29"}
    cells = results._row({}, {**run, "command": "x", "gpu": "H200"})
    assert cells[-1] == "H200, 29 Nov 2026, A, cuDNN 9.19.0.56"


@pytest.mark.parametrize("name", NAMES)
def test_each_row_says_what_was_measured_and_how(name: str) -> None:
    content = results.read(name)
    assert set(content) == {"text", "runs", "limits"} and content["runs"]
    for run in content["runs"]:
        assert set(run) - {"commit"} == {*results.FACTS, "rows"} and all(run.values())
        assert re.fullmatch(r"[0-9a-f]{8}", run.get("commit", "0" * 8))
        assert re.match(r"(scripts/|tuner )[\w-]+", run["command"])
        assert datetime.date.fromisoformat(run["date"]).year >= 2026
        for row in run["rows"]:
            assert row["what"] and any(row.get(figure) for figure in FIGURES), row
            assert set(row) <= {"what", "over", "worst", *FIGURES}


def commands() -> list[str]:
    """Commands of the page whose programs are here, without those with a place to fill in."""
    runs = [run for name in NAMES for run in results.read(name)["runs"] if "commit" not in run]
    texts = {run["command"] for run in runs}
    return sorted(command for command in texts if not re.search(r"\b[A-Z]{4,}\b", command))


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_are_the_programs(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "tuner":
        cli.parser().parse_args(arguments)
    elif program == "scripts/bench":
        bench = importlib.import_module(f"benchmarks.{arguments[0]}").BENCH
        harness.parser_of(bench).parse_args(arguments[1:])
    else:
        assert (ROOT / program).is_file()
        assert all((ROOT / path).is_file() for path in arguments if path.startswith("tests/"))


def test_ratios_of_the_readme_are_on_the_page() -> None:
    (part,) = re.findall(
        r"^## Results\n(.*?)^## ", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    rows = [line for line in part.splitlines() if line.startswith("| ")]
    ratios = {ratio for line in rows for ratio in re.findall(r"\b\d\.\d{3}\b", line)}
    page = results.PAGE.read_text()
    assert len(ratios) > 10 and {ratio for ratio in ratios if ratio not in page} == set()


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
        "command": "scripts/bench backward",
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
    def runs(name: str) -> list[dict[str, Any]]:
        return results.read(name)["runs"]  # type: ignore[no-any-return]

    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "SECTIONS", {"Attention": ("backward",), "Products": ("odd",)})
    run = results.run_of(HEAD, [bench_row("causal", 10.0, 20.0, 10.0)])
    errors = {**run, "command": "scripts/bench backward --preset errors"}
    columns = {**run, "command": "scripts/bench population --preset layers"}
    former = {**run, "date": "2026-11-01"}
    for name, held in (("backward", [former, errors]), ("odd", [columns])):
        content = {"text": "", "runs": held, "limits": []}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert results.add(run, "backward") == tmp_path / "backward.json"
    assert runs("backward") == [run, errors]
    h100 = {**run, "gpu": "H100"}
    results.add(h100, "backward")
    assert runs("backward") == [run, errors, h100] and runs("odd") == [columns]
    later = {**columns, "command": f"{columns['command']} --json odd.jsonl"}
    assert results.add(later, "population").stem == "odd" and runs("odd") == [later]
    with pytest.raises(ConfigError, match="no file of 'new'"):
        results.add({**run, "command": "scripts/bench new"}, "new")
