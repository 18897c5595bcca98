"""`scripts/bench regret`: the problems of a draw, and a choice beside all built kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import regret
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Family
from tuner.hardware import GPUS, Gpu
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.selection.choice import Selection
from tuner.selection.kernels import lists
from tuner.store.entry import is_vendor

H100 = GPUS["H100"]
SEED = "regret"


class Timed:
    """A runner that has built every second kernel, and times configs by their digests."""

    gpu: Gpu = H100

    def __init__(self, slow: Config | None = None) -> None:
        self.slow, self.requests = slow, list[list[Config]]()
        self.retimed: list[Config] = []
        self.submitted = 0

    def compiled(self, problem: Problem, family: Family, space: Sequence[Config]) -> list[Config]:
        return [one for one in space if one == self.slow or int(one.digest[:2], 16) % 2]

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.problem, self.submitted = problem, self.submitted + len(group)
        self.requests.append(list(group))

    def _of(self, config: Config, us: float) -> Measurement:
        return Measurement(
            self.problem,
            config,
            H100,
            Regime(),
            Status.OK,
            Provenance.MEASURED,
            latency_us=us,
        )

    def _us(self, config: Config) -> float:
        return 30.0 if config == self.slow else 10.0 + int(config.digest[:4], 16) / 65536

    def collect(self) -> list[Measurement]:
        request = next(r for r in self.requests if r)
        found = [self._of(config, self._us(config)) for config in request]
        request.clear()
        return found

    def retime(
        self, problem: Problem, finalists: Sequence[Config], rounds: int
    ) -> list[Measurement]:
        self.retimed = list(finalists)
        return [self._of(config, 2 * self._us(config)) for config in finalists]


@pytest.fixture(scope="module")
def problems() -> list[tuple[Problem, Selection]]:
    return regret.drawn(SEED, 16, "held-out", H100)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lists, "proven", lambda specs, capability: {})


def test_attention_and_products_take_turns(problems: list[tuple[Problem, Selection]]) -> None:
    kinds = [problem.op == "attention" for problem, _ in problems]
    assert kinds == [True, False] * 8
    assert regret.drawn(SEED, 4, "held-out", H100) == problems[:4]
    only = regret.drawn(SEED, 5, "held-out", H100, "gemm")
    assert {problem.op for problem, _ in only} == {"gemm"}
    with pytest.raises(ConfigError, match="has no portfolio"):
        regret.drawn(SEED, 5, "held-out", H100, "softmax")


def test_a_choice_is_timed_again_beside_the_fastest_and_pytorch_s(
    problems: list[tuple[Problem, Selection]], proven: None
) -> None:
    problem, selection = next(one for one in problems if not is_vendor(one[1].config))
    choice = regret.choice_of(selection, H100)
    assert choice == selection.config
    runner = Timed(choice)
    row = regret._measured(problem, selection, runner)  # type: ignore[arg-type]
    assert runner.retimed[0] == choice and len(runner.retimed) <= regret.FINALISTS + 2
    assert row["chosen_us"] == 60.0 and row["is_own"]
    best = min(row["us"].values())
    assert regret.regret(row) == pytest.approx(60.0 / best - 1) and best < 30.0
    assert row["candidates"] == runner.submitted > len(runner.retimed)


def test_an_unproven_kernel_leaves_the_call_to_pytorch(
    problems: list[tuple[Problem, Selection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "proven", lambda specs, capability: "no proof")
    for _, selection in problems:
        if selection.vendor:
            config = regret.choice_of(selection, H100)
            assert is_vendor(config) and config["kernel"] == selection.vendor


def row(problem: str, chosen: float, us: dict[str, float], vendor: float | None) -> dict[str, Any]:
    return {
        "problem": problem,
        "domain": "d",
        "candidates": 9,
        "kernels": 3,
        "choice": "a",
        "is_own": True,
        "chosen_us": chosen,
        "vendor_us": vendor,
        "us": us,
    }


def test_the_report_counts_by_operation_and_names_the_worst() -> None:
    rows = [
        row("attention x", 11.0, {"a": 11.0, "b": 10.0}, 22.0),
        row("gemm y", 10.0, {"a": 10.0}, 9.0),
        {**row("gemm z", 0.0, {}, None), "chosen_us": None},
    ]
    text = regret.report(rows, 40)
    assert "2 of 40" in text and "without a time: gemm z" in text
    lines = text.splitlines()
    assert any(
        line.startswith("attention") and "10.0%" in line and "2.000" in line for line in lines
    )
    assert any(line.startswith("10.0% attention x") for line in lines)


def test_a_file_of_another_draw_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert regret._kept(path, {"seed": "a"}) == [] and regret._kept(path, {"seed": "a"}) == []
    with pytest.raises(ConfigError, match="another draw"):
        regret._kept(path, {"seed": "b"})
