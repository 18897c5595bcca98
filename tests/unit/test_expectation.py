"""Expected time and loss of an effort: which numbers answer, and how they are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from timed_runner import TimedRunner
from toys import GEMM, REGIME, Clock, catalogue, recording

from tuner.cli.result import outcome_text
from tuner.errors import StoreError
from tuner.runners.base import Runner
from tuner.runners.replay import ReplayRunner
from tuner.search import expectation, history
from tuner.search.expectation import Credit, Expectation
from tuner.search.study import EFFORTS
from tuner.store import Store
from tuner.tuning.outcome import Outcome
from tuner.tuning.progress import Watcher
from tuner.tuning.sweep import Sweep, SweepOptions

FOUR = Expectation("gemm", "quick", 4, 5, 200.0, 300.0, 0.001, 0.02)
CREDITS = (Credit(1, 0.5, 0.8, 30), Credit(5, 0.25, 0.5, 30))
SIXTEEN = Expectation("gemm", "quick", 16, 5, 50.0, 70.0, 0.001, 0.02)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(history, "_shipped", lambda *_: ())
    monkeypatch.setattr(expectation, "shipped", lambda: (SIXTEEN, FOUR))
    monkeypatch.setattr(expectation, "credits", lambda: CREDITS)
    return Clock(monkeypatch)


def swept(runner: Runner, store: Store, **options: object) -> tuple[Outcome, list[str]]:
    told: list[str] = []
    watcher = Watcher()
    watcher.note = told.append  # type: ignore[method-assign]
    chosen = SweepOptions(**{"sampler": "model", **options})  # type: ignore[arg-type]
    made = Sweep(GEMM, REGIME, runner, store, chosen, watcher=watcher, catalogue=catalogue)
    return made.run(), told


@pytest.mark.parametrize(
    ("cores", "chosen"), [(2, FOUR), (4, FOUR), (15, FOUR), (16, SIXTEEN), (64, SIXTEEN)]
)
def test_the_machine_like_this_one_answers(clock: Clock, cores: int, chosen: Expectation) -> None:
    assert expectation.expected("gemm", "quick", cores) == chosen
    assert expectation.expected("gemm", "full", cores) is None
    assert expectation.expected("softmax", "quick", cores) is None


def test_it_is_told_as_simulated() -> None:
    text = SIXTEEN.text(16)
    assert "about 50 s of search on 16 cores, 70 s in one of ten" in text
    assert "within 0.1 % of the best, 2.0 % in one of ten" in text
    assert "simulated over 5 recordings" in text
    assert "16 cores (24 here)" in SIXTEEN.text(24)


def test_a_sweep_says_it_first_and_what_it_was_last(store: Store, clock: Clock) -> None:
    runner = TimedRunner(recording(), clock, lambda config: 900.0 if config["m"] == 256 else 20.0)
    runner.compiles = 16
    outcome, told = swept(runner, store)
    assert told[0] == f"{GEMM.label()}: {SIXTEEN.text(16)}"
    text = " ".join(outcome_text(outcome, "store").split())
    assert f"{outcome.given_up} sets not waited for" in text and outcome.given_up
    assert outcome.expected_loss is not None
    assert outcome.expected_loss_p90 == pytest.approx(2 * outcome.expected_loss)
    told_loss = f"{100 * outcome.expected_loss:.1f} %, {200 * outcome.expected_loss:.1f} %"
    assert f"the sets left are expected to save {told_loss} in one of ten" in text


@pytest.mark.parametrize("options", [{"trials": 9}, {"time_limit_s": 60}, {"sampler": "cost"}])
def test_other_budgets_are_not_what_was_learnt(
    store: Store, clock: Clock, options: dict[str, object]
) -> None:
    runner = TimedRunner(recording(), clock, lambda config: 1.0)
    _, told = swept(runner, store, **options)
    assert not any("of search on" in text for text in told)


def test_a_replay_takes_no_time_that_is_worth_telling(store: Store, clock: Clock) -> None:
    _, told = swept(ReplayRunner(recording()), store)
    assert told == []


def test_a_damaged_file_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "expected.json"
    monkeypatch.setattr(expectation, "file", lambda: damaged)
    expectation.shipped.cache_clear()
    assert expectation.shipped() == ()
    for text in ("{", '{"expected": [{"op": 1}]}', "[]"):
        damaged.write_text(text)
        expectation.shipped.cache_clear()
        with pytest.raises(StoreError, match=r"expected\.json cannot be read"):
            expectation.shipped()
    expectation.shipped.cache_clear()


def test_what_ships_is_of_every_effort() -> None:
    expectation.shipped.cache_clear()
    found = {(one.op, one.effort, one.cores): one for one in expectation.shipped()}
    for op in ("attention", "gemm"):
        for cores in (4, 16):
            quick, full = (found[op, effort, cores] for effort in EFFORTS)
            assert 0 < quick.seconds <= full.seconds
            assert 0 <= full.loss_p90 <= quick.loss_p90
