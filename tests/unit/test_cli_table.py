"""What a sweep prints: the table of its result, and its progress."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from cli_softmax import (
    ENVIRONMENT,
)
from stored import final

from tuner.cli.display import Display, LiveDisplay, facts_of
from tuner.cli.result import outcome_text
from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import AttentionProblem
from tuner.tuning.finals import PROVISIONAL
from tuner.tuning.outcome import Outcome
from tuner.tuning.progress import SweepState

ATTENTION = AttentionProblem.parse("S=1024,D=64")


def attention(config: Config, us: float, **changes: object) -> Measurement:
    return final(config, us, ATTENTION, **{"regime": Regime(), "std_us": us / 200, **changes})


OWN = attention(Config("cutlass_fmha", {"tile_m": 128}), 13.5, workspace_bytes=2_500_000)


OTHER = attention(Config("cutlass_fmha", {"tile_m": 64}), 13.9, flags=("noisy",))


CUDNN = attention(Config("vendor_sdpa", {"backend": "cudnn"}), 14.4)


FLASH = attention(Config("vendor_sdpa", {"backend": "flash"}), 21.6)


def outcome(*ranked: Measurement, **changes: object) -> Outcome:
    fields: dict[str, object] = {
        "problem": ATTENTION,
        "gpu": DEFAULT_GPU,
        "regime": Regime(),
        "environment": ENVIRONMENT,
        "provenance": Provenance.MEASURED,
        "sweep": "s",
        "ranking": ranked,
        "candidates": 40,
        "kernels": 30,
        "resumed": 0,
        "failures": {"timeout": 2, "wrong_result": 3},
        "unavailable": {"fa3": "not installed"},
        "interrupted": False,
        "elapsed_s": 125.0,
    }
    return Outcome(**{**fields, **changes})  # type: ignore[arg-type]


class TestResult:
    """The table at the end."""

    def test_measured(self) -> None:
        text = outcome_text(outcome(OWN, OTHER, CUDNN, FLASH), "sqlite:///x")
        lines = {line.split("  ")[0]: line for line in text.splitlines()}
        winner = lines["winner, best own"].split()
        assert "13.5" in winner  # us
        assert "0.844" in winner  # us a head: 13.5 / 16
        assert "318" in winner  # TFLOP/s: 4.295e9 / 13.5e-6
        assert winner[-2:] == ["2.5", "MB"]
        assert f"flagged: cutlass_fmha {OTHER.config.digest[:6]}: noisy" in text
        assert f"\ncutlass_fmha {OWN.config.digest[:6]} (winner, best own)\n" in text
        assert "\n  cutlass_fmha tile_m=128\n" in text
        assert "cudnn" in text
        assert "own speed: 1.07x cudnn; 1.60x flash" in text
        assert "not measured: fa3: not installed" in text
        assert "failed: 3 wrong_result, 2 timeout" in text
        assert "in 2 min 05 s" in text
        assert "REPLAYED" not in text
        assert text.endswith("\nstored as measured in sqlite:///x")

    def test_quick_times_of_a_sweep_are_no_decision(self) -> None:
        quick = [m.but(is_final=False, flags=(PROVISIONAL,)) for m in (OWN, CUDNN)]
        text = outcome_text(outcome(*quick), "sqlite:///x")
        assert "\nQUICK PASS: the time limit left no final pass; all times" in text
        assert text.endswith("\ntrials stored as measured in sqlite:///x; no decision")

    def test_a_tie_with_a_vendor_is_no_winner(self) -> None:
        text = outcome_text(outcome(attention(OWN.config, 14.45), CUDNN, FLASH), "sqlite:///x")
        roles = [line.split("  ")[0] for line in text.splitlines()]
        assert "tied first, best own" in roles and "tied first, baseline" in roles
        assert "own speed: 1.00x cudnn, a tie; 1.49x flash" in text
        assert "winner" not in text and "slower" not in text

    def test_long_configs_fit_the_width_and_are_complete(self) -> None:
        stage = Config("gemm", {f"parameter_number_{i}": i for i in range(12)})
        stages = {"qk": stage, "softmax": Config("softmax", {"passes": 1}), "pv": stage}
        params = {f"heads_a_launch_{i}": 16384 for i in range(8)}
        own = attention(
            Config("three_kernel_attention", params, stages), 123456.7, workspace_bytes=123_400_000
        )
        slower = attention(Config("three_kernel_attention", params), 123456.9)
        reasons = {f"fa{i}": "not installed " * 9 for i in range(2)}
        text = outcome_text(outcome(own, slower, CUDNN, unavailable=reasons), "sqlite:///x")
        assert max(map(len, text.splitlines())) <= 100
        assert all(line == line.rstrip() for line in text.splitlines())
        words = text.split()
        assert all(words.count(f"parameter_number_{i}={i}") == 2 for i in range(12))
        assert all(words.count(f"{name}=16384") == 2 for name in params)

    def test_vendor_wins(self) -> None:
        text = outcome_text(outcome(CUDNN, FLASH, OWN), "sqlite:///x")
        assert "winner, baseline" in text
        assert "runner-up, baseline" in text
        assert "\nbest own" in text
        assert "own speed: 1.07x cudnn" in text

    def test_a_loss_looks_like_one(self) -> None:
        slow = OWN.but(latency_us=16.8)
        text = outcome_text(outcome(CUDNN, FLASH, slow), "sqlite:///x")
        assert "own speed: 0.86x cudnn, slower; 1.29x flash" in text

    def test_a_replay_of_the_quick_pass_says_so(self) -> None:
        quick = [m.but(is_final=False, provenance=Provenance.REPLAYED) for m in (OWN, CUDNN)]
        text = outcome_text(outcome(*quick, provenance=Provenance.REPLAYED), "sqlite:///x")
        assert "\nREPLAYED from a recorded sweep" in text
        assert "\nQUICK PASS: the recorded final pass has none of these own kernels" in text

    def test_who_has_no_final_time_is_named_and_not_ranked(self) -> None:
        fast = OTHER.but(latency_us=9.5, is_final=False)
        vendor = CUDNN.but(latency_us=9.12, is_final=False)
        made = outcome(OWN, CUDNN, unranked=(fast,), quick_vendor=vendor)
        text = outcome_text(made, "sqlite:///x")
        name = f"cutlass_fmha {OTHER.config.digest[:6]}"
        said = f"not ranked, without a final time: {name}: 9.50 us in the quick pass"
        assert f"{said}, 0.96x cudnn there, slower" in " ".join(text.split())
        assert "QUICK PASS" not in text and "own speed: 1.07x cudnn" in text

    def test_no_own_kernel(self) -> None:
        assert "no own kernel passed" in outcome_text(outcome(CUDNN), "x")

    def test_nothing_yet(self) -> None:
        text = outcome_text(outcome(interrupted=True), "x")
        assert "interrupted before any candidate passed" in text


def state(**changes: object) -> SweepState:
    found = SweepState(
        ATTENTION, DEFAULT_GPU, Regime(), Provenance.MEASURED, started=time.monotonic() - 30
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


class TestDisplay:
    """Progress while it runs."""

    def test_facts(self) -> None:
        now = time.monotonic()
        facts = facts_of(
            state(
                phase="search",
                goal=40,
                done=20,
                done_before=10,
                phase_started=now - 10,
                in_flight=8,
                building=lambda: 5,
                candidates=12,
                best_own=OWN,
                best_vendor=CUDNN,
            )
        )
        assert facts["phase"] == "search 20/40"
        assert facts["compiling"] == "5"
        assert facts["compiled and waiting"] == "3"
        assert facts["best own"] == "13.5 us cutlass_fmha (1.07x cudnn)"
        assert facts["time"] == "0:30, 0:20 left"
        assert facts["failed"] == ""

    def test_time_limit_comes_first(self) -> None:
        facts = facts_of(state(deadline=time.monotonic() + 7.2))
        assert facts["time"] == "0:30, 0:07 left"

    def test_plain_lines_are_few(self, capsys: pytest.CaptureFixture[str]) -> None:
        display = Display("x", show_results=True)
        for done in range(50):
            display.changed(state(phase="search", goal=50, done=done))
        display.changed(state(phase="final pass"))
        err = capsys.readouterr().err.splitlines()
        assert len(err) == 2

    @pytest.mark.parametrize("create", [Display, LiveDisplay])
    def test_results_go_to_standard_output_alone(
        self, create: Callable[..., Display], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with create("x", show_results=True) as display:
            display.note("[a note] of 3")
            display.changed(state(phase="search", goal=50, done=3, best_own=OWN))
            display.finished(outcome(OWN, CUDNN))
        out, err = capsys.readouterr()
        assert "winner, best own" in out
        assert "[a note] of 3" in err
        with create("x", show_results=False) as display:
            display.finished(outcome(OWN, CUDNN))
        assert capsys.readouterr().out == ""
