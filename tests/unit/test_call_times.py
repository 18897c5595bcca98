"""`time_calls` on a device that is not there: graphs of costs, replayed by a clock."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import call_times  # noqa: E402
from benchmarks.call_times import Contender, first_line, time_calls  # noqa: E402
from tuner.errors import BenchmarkError  # noqa: E402


class Device:
    """A clock that kernels move: at once, or when the graph that they were captured in is replayed.

    Kernels that follow one another directly overlap by `OVERLAP_US`, unless an ordinary one stands
    between them.
    """

    OVERLAP_US = 3.0

    def __init__(self) -> None:
        self.now_us = 0.0
        self.capturing: list[tuple[str, float]] | None = None
        self.launched: Counter[str] = Counter()
        self.replayed: list[tuple[str, ...]] = []

    def launch(self, name: str, us: float) -> None:
        if self.capturing is not None:
            self.capturing.append((name, us))
        else:
            self.now_us += us
            self.launched[name] += 1

    def play(self, kernels: list[tuple[str, float]]) -> None:
        self.replayed.append(tuple(name for name, _ in kernels))
        for (name, us), (before, _) in zip(kernels, [("", 0.0), *kernels], strict=False):
            self.now_us += us - (self.OVERLAP_US if name == before != "before" else 0.0)


class Graph:
    def __init__(self, device: Device) -> None:
        self.device, self.kernels = device, list[tuple[str, float]]()

    def replay(self) -> None:
        self.device.play(self.kernels)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def device(monkeypatch: Any) -> Device:
    made = Device()

    @contextlib.contextmanager
    def graph(into: Graph) -> Iterator[None]:
        made.capturing = into.kernels
        try:
            yield
        finally:
            made.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(made))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(made))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(call_times, "_evicting", lambda: lambda: made.launch("evict", 60.0))
    return made


def contender(device: Device, name: str, us: float) -> Contender:
    return Contender(name, lambda i: device.launch(name, us))


def before(device: Device) -> Any:
    return lambda i: device.launch("before", 4.0)


def test_a_time_is_the_difference_of_two_graphs(device: Device) -> None:
    both = [contender(device, "a", 100.0), contender(device, "b", 20.0)]
    found = time_calls(both, before(device), 1)
    assert found.us == pytest.approx({"a": 100.0, "b": 20.0})
    assert not found.failed


def test_every_call_stands_behind_an_ordinary_kernel(device: Device) -> None:
    time_calls([contender(device, "a", 100.0)], before(device), 1)
    graphs = set(device.replayed)
    assert all(names[::2] == ("before",) * len(names[::2]) for names in graphs)
    assert {names[1] for names in graphs} == {"a", "before"}


def test_rounds_are_shuffled_and_bounded(device: Device) -> None:
    several = [contender(device, name, 50.0) for name in "abcd"]
    time_calls(several, before(device), 1)
    order = [names[1] for names in device.replayed]
    assert len(order) == (call_times.MAX_ROUNDS + 1) * 5
    rounds = {tuple(order[i : i + 5]) for i in range(5, len(order), 5)}
    assert len(rounds) > 10 and all(sorted(r) == sorted(order[:5]) for r in rounds)


def test_long_calls_get_few_rounds(device: Device) -> None:
    time_calls([contender(device, "a", 1e6)], before(device), 1)
    assert len(device.replayed) == (call_times.MIN_ROUNDS + 1) * 2
    assert max(map(len, device.replayed)) == 2 * call_times.MIN_CALLS


def test_a_graph_goes_through_all_copies(device: Device) -> None:
    seen: list[int] = []

    def call(i: int) -> None:
        seen.append(i)
        device.launch("a", 1e5)

    time_calls([Contender("a", call)], before(device), 7)
    assert set(seen) == set(range(7))


@pytest.mark.parametrize("copies", [1, 2])
def test_copies_are_evicted_before_each_replay(device: Device, copies: int) -> None:
    """Other reads empty the L2 before each graph, outside the measured time."""
    found = time_calls([contender(device, "a", 100.0)], before(device), copies)
    assert found.us == pytest.approx({"a": 100.0})
    replays = len(device.replayed)
    assert device.launched["evict"] == (0 if copies == 1 else replays)


def test_what_cannot_be_captured_has_a_reason_and_costs_nobody_else(device: Device) -> None:
    def refuse(i: int) -> None:
        if device.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        device.launch("b", 1.0)

    found = time_calls([contender(device, "a", 9.0), Contender("b", refuse)], before(device), 1)
    assert found.us == pytest.approx({"a": 9.0})
    assert found.failed == {"b": "operation not permitted when stream is capturing"}
    assert time_calls([Contender("b", refuse)], before(device), 1).us == {}


def test_a_refused_launch_costs_nobody_else(device: Device) -> None:
    def refused(_: int) -> None:
        raise BenchmarkError("too many resources requested for launch")

    found = time_calls([contender(device, "a", 5.0), Contender("b", refused)], before(device), 1)
    assert list(found.us) == ["a"]
    assert found.failed == {"b": "too many resources requested for launch"}


def test_a_contenders_context_is_there_whenever_it_is_called(device: Device) -> None:
    inside: list[bool] = []
    state = {"is_on": False}

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        state["is_on"] = True
        yield
        state["is_on"] = False

    def call(i: int) -> None:
        inside.append(state["is_on"])
        device.launch("a", 10.0)

    time_calls([Contender("a", call, around), contender(device, "b", 10.0)], before(device), 1)
    assert inside and all(inside) and not state["is_on"]


def test_an_error_is_told_in_one_line() -> None:
    assert first_line(RuntimeError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(RuntimeError("x" * 999))) == 200
