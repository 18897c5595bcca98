"""The surrogate of a family: prior, learning, transfer, expected gain."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tuner.problem import AttentionProblem, GemmProblem
from tuner.problem.base import doublings
from tuner.search.surrogate import Past, Surrogate

PROBLEM = GemmProblem(1024, 1024, 1024)
FEATURES = {
    f"{m} {schedule} {stages}": {"m": m, "schedule": schedule}
    | ({} if stages is None else {"stages": stages})
    for m, schedule, stages in product((64, 128, 256), ("a", "b"), (None, 2, 8))
}
FLAT = dict.fromkeys(FEATURES, 10.0)


def believe(past: list[Past] | None = None) -> Surrogate:
    return Surrogate(PROBLEM, FEATURES, FLAT, past or [])


def test_the_cost_model_is_the_prior() -> None:
    predicted = {key: 10.0 + i for i, key in enumerate(FEATURES)}
    found = Surrogate(PROBLEM, FEATURES, predicted)
    for key, time in predicted.items():
        assert found.mean(key) == pytest.approx(math.log(time))


def test_a_result_is_believed_and_moves_its_likes_most() -> None:
    found = believe()
    found.observe("64 a 2", math.log(20.0))
    assert found.mean("64 a 2") == pytest.approx(math.log(20.0), abs=0.02)
    assert found.mean("128 a 2") > found.mean("256 a 2") > found.mean("256 b 8") > math.log(10)


def test_learning_one_by_one_is_learning_at_once() -> None:
    """Rank-one updates against the closed form, through the past of the same problem."""
    from tuner.search import surrogate

    values = {"64 a 2": 0.3, "128 b None": -0.2, "256 b 8": 0.1}
    found = believe()
    for key, error in values.items():
        found.observe(key, math.log(10) + error)
    rows = [FEATURES[key] for key in values]
    among = surrogate._config_covariance(rows, rows) + surrogate.NOISE**2 * np.eye(3)
    cross = surrogate._config_covariance(list(FEATURES.values()), rows)
    wanted = math.log(10) + cross @ np.linalg.solve(among, list(values.values()))
    assert [found.mean(key) for key in FEATURES] == pytest.approx(list(wanted))


def test_covariances_are_covariances() -> None:
    from tuner.search import surrogate

    rows = list(FEATURES.values())
    assert np.linalg.eigvalsh(surrogate._config_covariance(rows, rows)).min() > 0


def test_near_problems_teach_more_than_far_ones() -> None:
    def taught(by: GemmProblem) -> float:
        return believe([Past(by, [FEATURES["64 a 2"]], [0.5])]).mean("64 a 2")

    near, far = GemmProblem(2048, 1024, 1024), GemmProblem(64, 65536, 64)
    assert doublings(PROBLEM, near) == 1
    assert math.log(10) < taught(far) < taught(near) < math.log(10) + 0.5


def test_another_problem_says_less_than_this_one_in_another_environment() -> None:
    """What a config owes to one problem alone is no noise where the problem is the same."""
    other = GemmProblem(1024, 1024, 1032)
    assert doublings(PROBLEM, other) < 0.02
    here, there = (believe([Past(by, [FEATURES["64 a 2"]], [0.5])]) for by in (PROBLEM, other))
    wanted = math.log(10) + 0.5
    assert abs(here.mean("64 a 2") - wanted) < abs(there.mean("64 a 2") - wanted) / 2


def test_a_window_is_a_difference_and_its_width_a_size() -> None:
    plain, narrow, wide = (
        AttentionProblem.parse(f"S=1024,D=64,causal=1{window}")
        for window in ("", ",window=64", ",window=256")
    )
    assert doublings(plain, narrow) == doublings(narrow, plain) == 1
    assert doublings(narrow, wide) == 2
    nothing = AttentionProblem.parse("S=1024,D=64,causal=1,window=0")
    assert doublings(nothing, wide) == doublings(wide, nothing) == 1


def test_an_epilogue_is_one_difference_either_way() -> None:
    other = replace(PROBLEM, epilogue="bias_gelu")
    assert doublings(PROBLEM, other) == doublings(other, PROBLEM) == 1
    assert doublings(other, replace(other, epilogue="bias_silu")) == 1


def test_gain_is_where_the_mean_is_low_or_nothing_is_known() -> None:
    found = believe()
    best = math.log(10.0)
    found.observe("64 a 2", best)
    gains = found.gains(list(FEATURES), best)
    assert gains["64 a 2"] == min(gains.values())
    assert gains["256 b 8"] > gains["64 a 8"]
    found.observe("256 b 8", math.log(8.0))
    gains = found.gains(list(FEATURES), math.log(8.0))
    assert gains["256 b 2"] > gains["64 a 8"]


def test_what_is_pending_is_not_asked_twice() -> None:
    found = believe()
    found.observe("64 a 2", math.log(10.0))
    keys = [key for key in FEATURES if key != "64 a 2"]
    free = found.gains(keys, math.log(10.0))
    busy = found.gains(keys, math.log(10.0), pending=["256 b 8"])
    assert busy["256 b 8"] < free["256 b 8"] / 2
    assert found.gains(keys, math.log(10.0)) == free, "asking changes nothing"


def test_surprises_raise_the_uncertainty() -> None:
    calm, shaken = believe(), believe()
    for key, error in (("64 a 2", 1.0), ("128 a 8", -1.0), ("256 a None", 1.0)):
        calm.observe(key, calm.mean(key))
        shaken.observe(key, shaken.mean(key) + error)
    lowest = min(shaken.mean(key) for key in FEATURES) - 1
    key = "64 b 8"
    assert shaken.gains([key], lowest)[key] > calm.gains([key], lowest)[key]
