"""`scripts/bench population --preset regret`: a choice beside all built kernels of its problem."""

from __future__ import annotations

import pytest
from bench_fakes import SweepRunner

from benchmarks import harness, population, population_regret
from benchmarks.population_regret import Choice
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.selection.kernels import lists
from tuner.store.entry import is_vendor

pytest.importorskip("torch", reason="torch is not installed")


def cases(*options: str) -> list[Choice]:
    parser = harness.parser_of(population.BENCH)
    return population_regret.regret_cases(parser.parse_args(["--seed", "regret", *options]))


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    return cases()


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "proven", lambda specs, capability: {})


def test_attention_and_products_take_turns(choices: list[Choice]) -> None:
    groups = [choice.group for choice in choices[:16]]
    assert groups == ["attention", "products"] * 8
    assert {choice.problem.op for choice in cases("--op", "gemm")} == {"gemm"}
    with pytest.raises(ConfigError, match="has no portfolio"):
        cases("--op", "softmax")


@pytest.mark.usefixtures("proven")
def test_a_choice_is_timed_again_beside_the_fastest_and_pytorchs(choices: list[Choice]) -> None:
    case = next(one for one in choices if not is_vendor(one.selection.config))
    choice = population_regret.launched(case.selection, GPUS["H200"])
    assert choice == case.selection.config
    runner = SweepRunner(choice)
    row = population_regret.swept(case, runner)  # type: ignore[arg-type]
    assert runner.retimed[0] == choice and len(runner.retimed) <= population_regret.FINALISTS + 2
    assert row["us"]["tuner"] == 60.0 and row["is_own"] and not row["failed"]
    best = min(row["us"].values())
    assert population_regret.regret(row) == pytest.approx(60.0 / best - 1) and best < 30.0
    assert row["candidates"] == runner.submitted > len(runner.retimed)


def test_an_unproven_kernel_leaves_the_call_to_pytorch(
    choices: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "proven", lambda specs, capability: "no proof")
    for case in choices[:16]:
        if case.selection.vendor:
            config = population_regret.launched(case.selection, GPUS["H200"])
            assert is_vendor(config) and config["kernel"] == case.selection.vendor


def test_the_table_has_means_by_operation_and_the_worst_problems() -> None:
    row = {"case": "attention x", "group": "attention", "is_own": True, "failed": {}}
    rows = [
        {**row, "us": {"pytorch": 22.0, "tuner": 11.0, "own b": 10.0}},
        {**row, "case": "gemm y", "group": "products", "us": {"pytorch": 9.0, "tuner": 10.0}},
        {"case": "gemm z", "group": "products", "lost": "no answer"},
    ]
    lines = population_regret.regret_table(rows)
    assert "| attention | 1 | 1 | 100% | 10.0% | 10.0% |" in lines
    assert "| products | 2 | 1 | 100% | 11.1% | 11.1% |" in lines
    assert "- 11.1% gemm y" in lines
