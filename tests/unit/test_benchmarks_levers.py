"""Neighbours of a kernel in one lever, and the table of their times."""

from __future__ import annotations

import pytest

from benchmarks import levers
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem

FUSED = family("fused_attention")


@pytest.mark.parametrize("shape", ["S=1024,D=64", "B=4,S=2048,D=128,causal=1", "H=32,HKV=8,S=512"])
def test_neighbours_are_legal_and_differ_in_one_parameter(shape: str) -> None:
    problem = AttentionProblem.parse(shape if "D=" in shape else f"{shape},D=128")
    for config in FUSED.space(problem, DEFAULT_GPU)[::37]:
        found = levers.neighbours(FUSED, problem, config, DEFAULT_GPU)
        assert found
        for label, near in found.items():
            name, _, value = label.partition("=")
            assert not FUSED.violations(problem, near, DEFAULT_GPU)
            assert str(near.get(name, "off")) == value != str(config.get(name, "off"))
            both = config.params.keys() & near.params.keys()
            assert all(near[other] == config[other] for other in both - {name})


def test_a_lever_that_takes_another_away_is_still_shown() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    config = next(
        c
        for c in FUSED.space(problem, DEFAULT_GPU)
        if (c["score_buffers"], c["tile_n"], c["warp_groups"]) == (1, 128, 1)
    )
    near = levers.neighbours(FUSED, problem, config, DEFAULT_GPU)["score_buffers=2"]
    assert "early_exp" in config.params and "early_exp" not in near.params


def test_a_lever_that_is_there_only_where_it_is_on_is_shown_both_ways() -> None:
    problem = AttentionProblem.parse("S=512,D=64")
    space = FUSED.space(problem, DEFAULT_GPU)
    on = next(c for c in space if c.get("key_groups", 1) == 2 and "stages_output" in c.params)
    for name in ("key_groups", "stages_output"):
        off = levers.neighbours(FUSED, problem, on, DEFAULT_GPU)[f"{name}=off"]
        assert off.params == {k: v for k, v in on.params.items() if k != name}
        again = levers.neighbours(FUSED, problem, off, DEFAULT_GPU)
        assert again[f"{name}={on[name]}"] == on
        assert f"{name}=off" not in again


def test_ordered_values_go_one_step_each_way() -> None:
    assert list(levers._steps((32, 64, 80, 128), 64)) == [32, 80]
    assert list(levers._steps((False, True), True)) == [False]
    assert list(levers._steps((1, 2), 2)) == [1]


def test_a_shape_without_a_tuned_own_kernel_is_refused() -> None:
    problem = AttentionProblem.parse("S=77,D=64")
    with pytest.raises(ConfigError, match=r"no own kernel is tuned for .*S=77"):
        levers._best_own([], problem, DEFAULT_GPU)


def test_config_of_another_version_has_no_neighbours_but_reasons() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    old = Config("fused_attention", {"warp_groups": 1, "tile_n": 128})
    assert "missing" in FUSED.violations(problem, old, DEFAULT_GPU)[-1]
