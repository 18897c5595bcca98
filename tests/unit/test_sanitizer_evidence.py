"""Counts of compute-sanitizer's findings on a GPU, on the page of results and in the evidence."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

EVIDENCE = Path(__file__).parents[2] / "scripts" / "benchmarks" / "evidence"


def test_the_sanitizer_saw_no_fault_of_paged_kernels() -> None:
    with gzip.open(EVIDENCE / "sanitize-paged.json.gz", "rt") as text:
        found = json.load(text)
    control, *others = sorted(found, key=lambda run: run["status"] != "seen")
    assert control["status"] == "seen" and {run["status"] for run in others} == {"clean"}
    counts = Counter(run["tool"] for run in others)
    assert counts == {"memcheck": 17, "racecheck": 17, "synccheck": 17}


def test_the_page_counts_what_the_sanitizer_said_of_gradients() -> None:
    with gzip.open(EVIDENCE / "sanitize-gradients-h200.json.gz", "rt") as text:
        found = json.load(text)
    counts = Counter(
        (run["tool"], run["kernel"].startswith("cluster_gemm"), run["status"])
        for run in found
        if run["status"] != "seen"
    )
    tools = ("memcheck", "racecheck", "synccheck")
    assert [counts[tool, True, "clean"] for tool in tools] == [6, 6, 6]
    assert [counts[tool, False, "clean"] for tool in tools] == [18, 3, 17]
    assert counts["racecheck", False, "errors"] == 12 and sum(counts.values()) == 68
    races = [run for run in found if run["tool"] == "racecheck" and "backward" in run["kernel"]]
    assert all(("tile_m=128" in run["kernel"]) == (run["status"] == "clean") for run in races)
