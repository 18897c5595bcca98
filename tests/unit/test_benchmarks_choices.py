"""``scripts/bench choices``: the selection's choices at recorded problems."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks import choices
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.hardware import GPUS
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, Problem
from tuner.runners.recording import Recording
from tuner.selection.portfolio import serving, shipped

H200 = GPUS["H200"]
COLD = Regime("stream", "cold")
PORTFOLIOS = serving(shipped(), H200)
CAPPED = AttentionProblem.parse("B=2,H=8,HKV=4,SQ=1,SKV=5440,D=256,softcap=50,dtype=bf16")


def recorded(problem: Problem, times: dict[Config, float], day: str = "2026-11-27") -> Recording:
    rows = [
        Measurement(
            *(problem, config, H200, COLD, Status.OK, Provenance.MEASURED),
            latency_us=us,
            created_at=f"{day}T12:00:00+00:00",
        )
        for config, us in times.items()
    ]
    return Recording(problem, H200, COLD, Environment({}), tuple(rows))


def choice() -> Config:
    (portfolio,) = (one for one in PORTFOLIOS if one.op == "attention")
    selection = portfolio.select(CAPPED)
    assert selection is not None
    return selection.config


def test_a_choice_is_compared_with_the_best_and_with_pytorchs() -> None:
    config = choice()
    other = Config(config.family, {**config.params, "tile_n": 80})
    cudnn = Config("vendor_sdpa", {"kernel": "cudnn"})
    flex = Config("vendor_flex", {"kernel": "flex"})  # not a kernel that PyTorch chooses
    one = recorded(CAPPED, {config: 12.0, other: 10.0, cudnn: 18.0, flex: 1.0})
    (found,) = choices.choices([one], PORTFOLIOS)
    assert (found.us, found.best, found.vendor) == (12.0, 10.0, 18.0)
    said = choices.report([found], 1)
    assert "1.200" in said and "1.500" in said and "12.0 us, best 10.0" in said


def test_the_nearest_number_of_splits_stands_for_another() -> None:
    config = choice()
    assert config["splits"] > 4
    of = {count: Config(config.family, {**config.params, "splits": count}) for count in (2, 4)}
    (found,) = choices.choices([recorded(CAPPED, {of[2]: 9.0, of[4]: 11.0})], PORTFOLIOS)
    assert found.us == 11.0 and math.isinf(found.vendor)
    whole = Config(config.family, {**config.params, "tile_n": 80})
    assert not list(choices.choices([recorded(CAPPED, {whole: 9.0})], PORTFOLIOS))


def test_domains_and_days_can_be_left_out() -> None:
    one = recorded(CAPPED, {choice(): 9.0})
    assert list(choices.choices([one], PORTFOLIOS, ["soft cap", "D=256"], "2026-11-27T11"))
    assert not list(choices.choices([one], PORTFOLIOS, ["D=128"]))
    assert not list(choices.choices([one], PORTFOLIOS, since="2026-11-27T13"))
    other = replace(CAPPED, is_alibi=True, softcap=0.0)
    assert not list(choices.choices([recorded(other, {choice(): 9.0})], PORTFOLIOS))


def test_shipped_choices_of_soft_caps_are_near_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert choices.main(["--only", "D=256,soft cap,one query"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("D=256"))
    assert float(line.split()[-2]) < 1.02


def test_without_a_measured_choice_it_says_so() -> None:
    with pytest.raises(BenchmarkError, match="no recording"):
        choices.main(["--only", "no such domain"])
