"""The stream's decision leads every text on a sweep that was timed in another way."""

from __future__ import annotations

import pytest

from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.problem import AttentionProblem
from tuner.report import analysis
from tuner.report.subject import from_store
from tuner.selection.reader import shipped
from tuner.selection.served import served_text

PROBLEM = AttentionProblem.parse("S=1024,D=64")
CHAINED = Regime("chained", "warm")


def test_a_chained_sweep_is_led_by_the_decision_that_ships() -> None:
    text = served_text(PROBLEM, DEFAULT_GPU, CHAINED, shipped())
    assert text.startswith("Served is fused_attention ")
    assert text.endswith("x cudnn.")
    assert not served_text(PROBLEM, DEFAULT_GPU, Regime("stream", "warm"), shipped())
    assert not served_text(PROBLEM, DEFAULT_GPU, CHAINED, ())


def test_a_report_of_a_chained_recording_says_so_before_its_own_ratio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = from_store(None, PROBLEM, DEFAULT_GPU, CHAINED, "")
    said = analysis.verdict(recorded)
    lead = served_text(PROBLEM, DEFAULT_GPU, CHAINED, recorded.known)
    assert said.startswith(f"{lead} This sweep, timed chained: fused_attention ")
    monkeypatch.setattr(analysis, "served_text", lambda *given: "")
    assert PROBLEM.label() in analysis.verdict(recorded) and PROBLEM.label() not in said
