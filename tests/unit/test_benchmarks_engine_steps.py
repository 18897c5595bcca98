"""Parts of an engine's decoding steps: what is recorded, undone and printed."""

from __future__ import annotations

import cProfile
import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import engine_steps
from benchmarks.engine_steps import Step, busy, functions, kernels, medians, recorded, report

torch = pytest.importorskip("torch", reason="torch is not installed")


class Event:
    """A CUDA event whose pairs are 2 ms apart."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def record(self) -> None: ...

    def synchronize(self) -> str:
        return "waited"

    def elapsed_time(self, other: Event) -> float:
        return 2.0


class Graph:
    def replay(self) -> None: ...


class Builder:
    def build(self, one: int) -> int:
        return one + 1


class Engine:
    """Every second step replays a graph, builds metadata, collects garbage and waits."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> int:
        self.count += 1
        if self.count % 2 == 0:
            assert torch.cuda.Event().synchronize() == "waited"
            torch.cuda.CUDAGraph().replay()
            assert Builder().build(1) == 2
            gc.collect()
        return self.count


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    module: Any = ModuleType("builders")
    module.Builder = Builder
    monkeypatch.setitem(sys.modules, "builders", module)
    monkeypatch.setattr(engine_steps, "BUILDERS", (("missing", "None"), ("builders", "Builder")))


def test_parts_of_steps_that_replay_a_graph_are_recorded_and_undone(cuda: None) -> None:
    engine, before = Engine(), list(gc.callbacks)
    parts = Event.synchronize, Graph.replay, Builder.build

    def generate() -> None:
        assert [engine.step() for _ in range(6)] == [1, 2, 3, 4, 5, 6]

    found = recorded(engine, generate)
    assert len(found["steps"]) == 3 and found["median"]["count"] == 3
    for step in found["steps"]:
        assert step["graph"] == 2.0 and step["graphs"] == 1
        assert 0 < step["collect"] <= step["wall"] and step["sleep"] < step["wall"]
        assert step["builder"] < step["wall"]
    assert (Event.synchronize, Graph.replay, Builder.build) == parts
    assert gc.callbacks == before and engine.step.__func__ is Engine.step


def test_an_engine_that_raises_is_left_as_it_was(cuda: None) -> None:
    engine = Engine()

    def generate() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        recorded(engine, generate)
    assert engine.step.__func__ is Engine.step and Graph.replay.__qualname__ == "Graph.replay"


def test_busy_time_is_the_union_of_intervals() -> None:
    assert busy([(5.0, 6.0, "c"), (0.0, 2.0, "a"), (1.0, 3.0, "b"), (1.5, 1.8, "d")]) == 4.0
    assert busy([]) == 0.0


def test_kernels_count_the_last_half_of_a_pass() -> None:
    spans = [(0.0, 1000.0, "prompt"), *((t, t + 50.0, "decode") for t in (1600.0, 1800.0, 1950.0))]
    found = kernels(spans, 3)
    assert found["largest"] == [["decode", 0.15, 3]]
    assert found["busy_ms"] == pytest.approx(0.15) and found["wall_ms"] == pytest.approx(0.4)
    assert kernels([], 0) == {}


def test_medians_take_the_mean_of_garbage_collections() -> None:
    steps = [Step(wall=1.0, collect=0.0), Step(wall=2.0, collect=6.0), Step(wall=9.0)]
    found = medians(steps)
    assert (found["wall"], found["collect"], found["count"]) == (2.0, 2.0, 3)
    assert found["wall_mean"] == 4.0 and medians([]) == {}


def test_functions_and_the_table_name_what_takes_time() -> None:
    python = cProfile.Profile()
    python.runcall(sorted, [SimpleNamespace(x=1)], key=lambda one: one.x)
    assert any("sorted" in row[0] for row in functions(python))
    row = {"shape": "1b", "way": "vllm", "of": {"128": {"median": medians([Step(wall=3.25)])}}}
    of_gpu = {"128": {"median": {}, "kernels": {"busy_ms": 1.0, "wall_ms": 4.0}}}
    text = report([row, {**row, "of": of_gpu}, {"shape": "1b", "way": "tuner", "lost": "why"}])
    assert "3.250" in text and "25.0% of its time" in text
    assert text.splitlines()[-1] == "steps, 1b, tuner: lost: why"
