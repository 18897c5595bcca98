"""Sweeps of one problem side by side: what is timed again, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import repeats
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem
from tuner.tuning.job import JobOptions, JobResult
from tuner.tuning.outcome import Outcome

PROBLEM = AttentionProblem.parse("S=512,D=64")
OWN = [Config("fused_attention", {"tile_n": n}) for n in (64, 128)]
CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})


def measured(config: Config, us: float) -> Measurement:
    return Measurement(
        PROBLEM, config, DEFAULT_GPU, Regime(), Status.OK, latency_us=us, is_final=True
    )


def outcome(us: dict[Config, float]) -> Outcome:
    ranking = tuple(measured(config, time) for config, time in us.items())
    return Outcome(
        PROBLEM, DEFAULT_GPU, Regime(), Environment({}), Provenance.MEASURED, "s", ranking,
        candidates=40, kernels=13, resumed=0, failures={}, unavailable={}, interrupted=False,
        elapsed_s=2.0,
    )  # fmt: skip


class Retiming:
    """Answers a pass with scripted times, and notes what was asked of it."""

    def __init__(self, us: dict[Config, float]) -> None:
        self.us = us
        self.asked: list[tuple[list[Config], int]] = []

    def retime(self, problem: Any, finalists: list[Config], rounds: int) -> list[Measurement]:
        self.asked.append((list(finalists), rounds))
        return [measured(config, self.us[config]) for config in finalists]


def test_each_winner_is_timed_once_and_each_sweep_judged_by_it() -> None:
    outcomes = [outcome({OWN[0]: 5.0, OWN[1]: 5.2, CUDNN: 9.0}), outcome({OWN[1]: 5.1, CUDNN: 9.0})]
    runner: Any = Retiming({OWN[0]: 5.0, OWN[1]: 5.1})
    found = repeats.compared(PROBLEM, runner, [*outcomes, outcomes[0]], rounds=7)
    assert runner.asked == [([OWN[0], OWN[1]], 7)]
    assert [sweep["over_best"] for sweep in found["sweeps"]] == [1.0, 1.02, 1.0]
    assert found["worst_over_best"] == 1.02
    *lines, last = repeats.text(found).splitlines()
    assert len(lines) == 3 and "13 sets of kernels" in lines[1]
    assert last.startswith("3 sweeps, 2 winners, the worst 1.0200 of the best")


def test_a_winner_that_fails_is_no_result() -> None:
    runner: Any = Retiming({OWN[0]: 5.0})
    bad = replace(measured(OWN[0], 5.0), status=Status.LAUNCH_ERROR, latency_us=None, log="gone")
    runner.retime = lambda *_: [bad]
    with pytest.raises(BenchmarkError, match="failed: gone"):
        repeats.compared(PROBLEM, runner, [outcome({OWN[0]: 5.0})])


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (JobResult(failed=[(PROBLEM, BenchmarkError("nothing passed"))]), "nothing passed"),
        (JobResult(outcomes=[outcome({CUDNN: 9.0})]), "no own kernel"),
    ],
)
def test_a_sweep_without_an_own_winner_ends_it(
    result: JobResult, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "Job", lambda *_: SimpleNamespace(run=lambda: result))
    runners: Any = None
    with pytest.raises(BenchmarkError, match=reason):
        repeats.swept(PROBLEM, runners, JobOptions())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: 0)
    with pytest.raises(BenchmarkError, match="no GPU"):
        repeats.main(["--shape", "S=512,D=64"])
