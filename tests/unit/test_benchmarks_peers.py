"""Libraries' lists: what is said of a sweep of the vendors alone."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks import peers
from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import PROBLEMS, GemmProblem
from tuner.tuning.outcome import Outcome

PROBLEM = GemmProblem(16, 4096, 4096)
CUBLAS = Config("vendor_blas", {"kernel": "cublas"})


def algorithm(number: int) -> Config:
    params = {"kernel": "cublaslt_search", "algorithm": number}
    return Config("vendor_cublaslt_search", params)


def measured(config: Config, us: float | None, **changes: Any) -> Measurement:
    status = Status.OK if us is not None else Status.UNAVAILABLE
    found = Measurement(PROBLEM, config, DEFAULT_GPU, Regime(), status, latency_us=us)
    return found.but(**changes)


def test_a_list_is_its_size_its_first_and_its_fastest() -> None:
    seen = [
        measured(CUBLAS, 9.0),
        measured(algorithm(3), 7.0),
        measured(algorithm(1), None, log="not supported\nmore"),
        measured(algorithm(2), 6.0, workspace_bytes=4096),
        measured(algorithm(2), 5.0, is_final=True),
    ]
    [row] = peers.of_lists(PROBLEM, seen)
    assert (row["listed"], row["passed"], row["first_us"], row["best_us"]) == (3, 2, 7.0, 6.0)
    assert row["best"] == algorithm(2).to_json() and row["workspace_bytes"] == 4096
    assert row["refused"] == ["not supported"]
    assert peers.of_lists(PROBLEM, seen[:1]) == []
    ranking = (measured(algorithm(2), 5.0, is_final=True, std_us=0.1), measured(CUBLAS, 9.0))
    outcome = Outcome(
        PROBLEM, DEFAULT_GPU, Regime(), Environment({"cublas": "13.1"}), Provenance.MEASURED, "s",
        ranking, candidates=0, kernels=0, resumed=0, failures={}, unavailable={"x": "not here"},
        interrupted=False, elapsed_s=2.0,
    )  # fmt: skip
    found = peers.found_of(outcome, [row], {"cublaslt_search": 6.5})
    assert found["environment"] == {"cublas": "13.1"}
    said = peers.text(found)
    assert "2 of 3 passed, first 7.00 us, fastest 6.00 us" in said
    assert "not measured: x: not here" in said and "host: cublaslt_search 6.5 us a call" in said


def test_calls_are_counted_between_two_looks_at_the_clock() -> None:
    calls, waits = itertools.count(), itertools.count()
    assert peers.host_us(lambda: next(calls), lambda: next(waits)) > 0
    assert (next(calls), next(waits)) == (100 + peers.CALLS, 2)


def test_its_problems_are_problems() -> None:
    for op, shapes in peers.SHAPES.items():
        assert [PROBLEMS[op].parse(shape).op for shape in shapes] == [op] * len(shapes)
