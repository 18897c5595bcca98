"""``scripts/bench odd_columns``: the report, and what it counts as wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from benchmarks import odd_columns
from benchmarks.call_times import Contender, Times
from tuner.errors import BenchmarkError
from tuner.problem.population import is_held_out, linears, subset


def row(us: float, error: float = 1e-3, failed: dict[str, str] | None = None) -> dict[str, Any]:
    times = {"tuner": us, "parts": 2.0, "pytorch": 8.0, "pytorch again": 8.0}
    sizes = {"model": "gpt2-xl", "m": 4, "n": 50257, "k": 1600, "own": False}
    return {**sizes, "us": times, "failed": failed or {}, "errors": {"tuner": error}}


def test_vocabularies_are_of_models_that_make_selections() -> None:
    for model in subset(",".join(odd_columns.VOCABULARIES)):
        assert not is_held_out(model)
        widths = {(n, k) for stack in model.stacks for n, k, _ in linears(stack).values()}
        columns, _ = odd_columns.VOCABULARIES[model.name]
        assert odd_columns.VOCABULARIES[model.name] in widths and columns % 8


def test_the_mean_is_geometric_and_a_wrong_output_has_no_ratio() -> None:
    said = odd_columns.report([row(2.0), row(8.0), row(1.0, error=0.1)])
    assert "mean 2.000, worst 1.000" in said and "failed" in said
    assert odd_columns.is_right(row(1.0)) and not odd_columns.is_right(row(1.0, error=0.1))


@pytest.mark.parametrize("flag", ["--heads=bias", "--gradients"])
def test_it_needs_a_gpu(flag: str) -> None:
    with pytest.raises(BenchmarkError, match=r"no GPU found|cannot be imported"):
        odd_columns.main([flag])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("of", ["measured", "with_gradients"])
def test_all_ways_agree(monkeypatch: pytest.MonkeyPatch, of: str, has_bias: bool) -> None:
    """Everything but the GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    plain, called = torch.randn, list[str]()

    def timed(ways: Sequence[Contender], before: Callable[[int], Any], copies: int) -> Times:
        before(0)
        called.extend(way.name for way in ways if way.call(0) is not None)
        return Times({way.name: 1.0 for way in ways}, {})

    monkeypatch.setattr(torch, "randn", lambda *size, device, **more: plain(*size, **more))
    monkeypatch.setattr(odd_columns, "time_calls", timed)
    found = getattr(odd_columns, of)(5, 16387, 32, has_bias)
    assert odd_columns.is_right(found) and list(found["errors"]) == called
    assert "mean 1.000" in odd_columns.report([{"model": "one", **found}])
