"""``scripts/bench learning`` on the CPU: its calls, its journal, and the table."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning
from tuner.errors import BenchmarkError
from tuner.problem import AttentionProblem, GemmProblem
from tuner.selection.domains import domain_of

SHAPE = "B=1,H=4,HKV=2,S=32,D=16,causal=1"
PROBLEM = AttentionProblem.parse(f"{SHAPE},dtype=bf16,layout=bshd")


def test_its_shapes_are_problems() -> None:
    for shape in learning.CALLS.values():
        assert AttentionProblem.parse(f"{shape},dtype=bf16,layout=bshd").layout == "bshd"
    for shape in learning.PRODUCTS.values():
        assert domain_of(GemmProblem.parse(f"{shape},dtype=bf16")) is not None


def test_it_says_that_a_gpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "detect", lambda: None)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        learning.main([])


def test_the_journal_is_new_and_the_artifacts_are_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path / "users"))
    monkeypatch.setenv("TUNER_BENCHMARK", "0")
    new = tmp_path / "new"
    new.mkdir()
    learning._set_out(new)
    assert (os.environ["TUNER_CACHE_DIR"], os.environ["TUNER_BENCHMARK"]) == (str(new), "1")
    assert sorted(one.name for one in new.iterdir()) == ["artifacts", "kernels"]
    assert (new / "artifacts").resolve() == tmp_path / "users" / "artifacts"


def test_the_last_choice_of_the_problem_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    assert learning._choice(PROBLEM) is None
    other = AttentionProblem.parse("S=64,D=64")
    rows = [
        {"problem": one.to_json(), "us": us} for one, us in ((PROBLEM, 1), (PROBLEM, 2), (other, 3))
    ]
    (tmp_path / learning.JOURNAL).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = learning._choice(PROBLEM)
    assert found is not None and found["us"] == 2


def test_the_table_names_the_choice() -> None:
    figures: dict[str, Any] = {
        "name": "a model",
        "first_ms": 41.2,
        "second_ms": 0.051,
        "us": 20.0,
        "pytorch_us": 25.0,
        "error": 1e-3,
    }
    choices = (None, {"config": None}, {"config": {"family": "fused_attention"}})
    lines = learning.report({**figures, "choice": one} for one in choices).splitlines()[2:]
    assert [line.split()[4:-4] for line in lines] == [
        ["not", "timed"],
        ["PyTorch's"],
        ["fused_attention"],
    ]
    assert all(line.split()[-4:] == ["20.0", "25.0", "1.250", "1.0e-03"] for line in lines)
