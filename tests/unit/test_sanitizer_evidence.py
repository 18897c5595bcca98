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


def test_the_sanitizer_counts_gradients_and_small_products() -> None:
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


def test_what_racecheck_says_of_gradients_ends_with_every_lane_arriving() -> None:
    with gzip.open(EVIDENCE / "racecheck-gradients-h200.json.gz", "rt") as text:
        runs = json.load(text)["runs"]
    kernels = {variant: Counter(run["status"] for run in found) for variant, found in runs.items()}
    assert kernels == {
        "plain": {"errors": 16, "clean": 4},
        "every-lane": {"clean": 20},
        "late-read": {"errors": 2},
        "early-ds": {"clean": 1},
        "early-sums": {"clean": 2},
    }
    plain = [run["kernel"] for run in runs["plain"]]
    changed = [run["kernel"].removesuffix(" (every-lane)") for run in runs["every-lane"]]
    assert sorted(plain) == sorted(changed)
    statistics = {f"read {load} and write UBLKCP.S.G" for load in ("LDS", "LDS.64")}
    for run in runs["plain"]:
        assert ("tile_m=128" in run["kernel"]) == (run["status"] == "clean")
        passed = {"read LDS.128 and write STS.128"} if "D=256" in run["kernel"] else set()
        assert set(run["hazards"]) <= statistics | passed


def test_what_racecheck_says_of_fused_attention_ends_with_every_lane_arriving() -> None:
    with gzip.open(EVIDENCE / "racecheck-fused-h200.json.gz", "rt") as text:
        runs = json.load(text)["runs"]
    kernels = {variant: Counter(run["status"] for run in found) for variant, found in runs.items()}
    assert kernels == {"plain": {"errors": 19}, "every-lane": {"clean": 16}}
    plain = {run["kernel"] for run in runs["plain"]}
    assert {run["kernel"].removesuffix(" (every-lane)") for run in runs["every-lane"]} <= plain
    pairs = {pair for run in runs["plain"] for pair in run["hazards"]}
    assert pairs == {"read LDS and write STS.64", "read LDS.64 and write STS.64"}


def test_the_sanitizer_counts_block_scaled_products() -> None:
    with gzip.open(EVIDENCE / "sanitize-block-scaled-h200.json.gz", "rt") as text:
        runs = json.load(text)["runs"]
    counts = Counter((run["tool"], "grouped" in run["kernel"], run["status"]) for run in runs)
    assert counts == {
        ("memcheck", True, "seen"): 1,
        ("memcheck", True, "clean"): 9,
        ("racecheck", True, "clean"): 8,
        ("racecheck", True, "errors"): 1,
        ("synccheck", True, "clean"): 9,
        ("memcheck", False, "seen"): 1,
        ("memcheck", False, "clean"): 4,
        ("racecheck", False, "errors"): 1,
        ("synccheck", False, "clean"): 4,
    }
    loads = {"read LDS and write LDGSTS.E", "read LDS.128 and write LDGSTS.E"}
    assert {pair for run in runs for pair in run.get("hazards", ())} == loads
