"""``scripts/bench training`` on the CPU: its calls, a measured row, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import call_times, training
from tuner.errors import BenchmarkError
from tuner.problem import AttentionProblem
from tuner.problem.population import ModelCall, View, subset

torch = pytest.importorskip("torch", reason="torch is not installed")


def small(**changes: Any) -> ModelCall:
    """Grouped heads, token by token."""
    sizes: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 2, **changes}
    problem = AttentionProblem(24, 24, 16, is_causal=True, dtype="bfloat16", layout="bshd", **sizes)
    views = tuple(
        View(name, name, (2, heads, 24, 16), (24 * heads * 16, 16, heads * 16, 1))
        for name, heads in (("query", 4), ("key", 2), ("value", 2))
    )
    return ModelCall("small", "layers", "training", 1, problem, views)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the contenders, each called once in its context instead of timed."""
    names: list[str] = []

    def time_calls(contenders: Sequence[Any], before: Any, copies: int, budget_us: float) -> Any:
        us = {}
        for one in contenders:
            before(0)
            with one.around():
                assert len(one.call(0)) == 4
            us[one.name] = 10.0
            names.append(one.name)
        return call_times.Times(us, {})

    monkeypatch.setattr(call_times, "time_calls", time_calls)
    return names


def test_its_models_make_training_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(subset(",".join(training.MODELS))) == 10
    assert training.main(["--list", "--count", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(" training: attention B=" in line for line in lines)


def test_it_says_that_a_gpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "detect", lambda: None)
    with pytest.raises(BenchmarkError, match="no GPU found"):
        training.main([])


def test_every_way_is_compared_with_float64(timed: list[str]) -> None:
    row = training.measure(small(), "cpu")
    ways = [training.PYTORCH, training.CONTROL, training.ENABLED, training.TUNER]
    assert timed[:4] == ways and row["wrong"] == []
    assert set(row["us"]) | set(row["failed"]) == {*ways, training.CUDNN}
    assert all(0 < error < 2e-2 for name in ways for error in row["errors"][name])
    assert row["backward"].startswith("PyTorch's: ")


def test_a_wrong_gradient_is_said(timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import tuner

    sdpa = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        tuner, "attention", lambda q, k, v, **options: sdpa(q, k, 1.1 * v, **options)
    )
    assert training.measure(small(), "cpu")["wrong"] == [training.TUNER]


def test_the_part_in_float64_is_the_last_group() -> None:
    call = small()
    query, key, value = (
        torch.randn(view.shape, dtype=torch.float64, requires_grad=True) for view in call.views
    )
    grad_out = torch.randn(query.shape, dtype=torch.float64)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = sdpa(query, key, value, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, (query, key, value), grad_out)
    assert isinstance(call.problem, AttentionProblem)
    wanted = training.exact(call.problem, [query, key, value], grad_out)
    assert max(training.away(call.problem, (out, *grads), wanted)) < 1e-12
    swapped = [grad.flip(1) for grad in grads]
    assert min(training.away(call.problem, (out, *swapped), wanted)[1:]) > 0.1


def test_the_tables() -> None:
    def row(call: str, enabled: float, by: str) -> dict[str, Any]:
        us = {"pytorch": 12.0, "pytorch again": 12.0, "enabled": enabled, "tuner": 10.0}
        return {"call": call, "us": us, "wrong": [], "backward": by}

    rows = [
        row("first", 10.0, "own"),
        row("second", 16.0, "PyTorch's: no"),
        {"call": "third", "model": "m", "lost": "no answer after 60 s"},
    ]
    text = training.report(rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["enabled", "all", "2", "0.949", "0.750"] in lines
    assert ["enabled", "own", "1", "1.200", "1.200"] in lines
    assert ["tuner", "all", "2", "1.200", "1.200"] in lines
    assert "0.750  second" in text and "third: no answer after 60 s" in text
