"""Calls of `scripts/bench layers`: ten held-out models, each layer at each number of rows."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import layers
from tuner.errors import ConfigError
from tuner.problem import GemmProblem, SwigluProblem
from tuner.problem.population import ModelCall, is_held_out, linears, subset


def sizes_of(call: ModelCall) -> tuple[int, int, int]:
    problem = call.problem
    assert isinstance(problem, GemmProblem | SwigluProblem)
    return problem.m, problem.n, problem.k


def test_ten_held_out_models() -> None:
    models = subset(",".join(layers.MODELS))
    assert len(models) == 10 and all(map(is_held_out, models))


def test_each_layer_has_each_number_of_rows_once() -> None:
    (gpt2,) = subset("gpt2")
    calls = layers.layers(["gpt2"])
    wanted = {(m, n, k) for n, k, _ in linears(gpt2.stacks[0]).values() for m in layers.ROWS}
    sizes = list(map(sizes_of, calls))
    assert len(sizes) == len(set(sizes)) and set(sizes) == wanted
    assert {m for m, _, _ in sizes} == set(layers.ROWS) and {1, 8192} <= set(layers.ROWS)


def test_a_shared_layer_is_called_once_and_the_order_is_a_hash() -> None:
    both = layers.layers(["llama-2-7b", "llama-2-13b"])
    keys = [call.key for call in both]
    assert len(keys) == len(set(keys))
    assert keys == [call.key for call in layers.layers(["llama-2-13b", "llama-2-7b"])]
    rows = [sizes_of(call)[0] for call in both[:20]]
    assert len(set(rows)) > 5  # the first calls hold small and large ones


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="not known"):
        layers.layers(["gpt9"])


def test_the_list_says_who_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main(["--list", "--models", "gpt2", "--count", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("gpt2/") for line in lines[:3])
