"""`time_calls` on a device that is not there: graphs of costs, replayed by a clock."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import call_times  # noqa: E402
from benchmarks.call_times import (  # noqa: E402
    Contender,
    HostTimes,
    Ratio,
    first_line,
    time_calls,
    time_host,
)
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
    assert found.us == pytest.approx({"a": 100.0, "b": 20.0, "control": 100.0})
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
    each = len("abcd") + 2  # the control, and the element-wise kernels alone
    assert len(order) == (call_times.MAX_ROUNDS + 1) * each
    rounds = {tuple(order[i : i + each]) for i in range(each, len(order), each)}
    assert len(rounds) > 10 and all(sorted(r) == sorted(order[:each]) for r in rounds)


def test_long_calls_get_few_rounds(device: Device) -> None:
    time_calls([contender(device, "a", 1e6)], before(device), 1)
    looks = 2 * 2  # at graphs of calls that look long
    assert len(device.replayed) == (call_times.MIN_ROUNDS + 1) * 3 + looks
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
    assert found.us == pytest.approx({"a": 100.0, "control": 100.0})
    replays = len(device.replayed)
    assert device.launched["evict"] == (0 if copies == 1 else replays)


def test_what_cannot_be_captured_has_a_reason_and_costs_nobody_else(device: Device) -> None:
    def refuse(i: int) -> None:
        if device.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        device.launch("b", 1.0)

    found = time_calls([contender(device, "a", 9.0), Contender("b", refuse)], before(device), 1)
    assert found.us == pytest.approx({"a": 9.0, "control": 9.0})
    assert found.failed == {"b": "operation not permitted when stream is capturing"}
    alone = time_calls([Contender("b", refuse)], before(device), 1)
    assert alone.us == {} and list(alone.failed) == ["b"]


def test_a_refused_launch_costs_nobody_else(device: Device) -> None:
    def refused(_: int) -> None:
        raise BenchmarkError("too many resources requested for launch")

    found = time_calls([contender(device, "a", 5.0), Contender("b", refused)], before(device), 1)
    assert list(found.us) == ["a", "control"]
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


def test_host_times_are_bursts_in_turning_order() -> None:
    asked: list[str] = []
    ways = [Contender(name, lambda i, name=name: asked.append(name)) for name in "ab"]
    found = time_host(ways, calls=3, rounds=2, wait=lambda: asked.append("wait"))
    assert asked.count("wait") == 2 * 2 * 3, "before and after each burst"
    order = [name for name in asked if name != "wait"][::4]
    assert order == ["a", "b", "a", "a", "b", "a"], "the control is the first once more"
    assert list(found.us) == ["a", "b", "control"] and all(us > 0 for us in found.us.values())


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_wait_is_in_the_time_where_it_is_wanted(
    is_waiting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(call_times.time, "perf_counter", lambda: now[0])
    way = Contender("a", lambda i: spend(1.0))
    found = time_host([way], 10, 3, is_waiting, lambda: spend(5.0))
    assert found.us["a"] == pytest.approx(1e6 * (1.5 if is_waiting else 1.0))


def test_ratios_are_of_the_same_round() -> None:
    reference = [float(us) for us in range(1, 12)]
    found = HostTimes({"a": reference, "b": [us / 1.5 for us in reference]}).over("a", "b")
    assert (found.median, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize(("count", "skipped"), [(1, 0), (5, 0), (6, 0), (9, 1), (25, 7), (60, 21)])
def test_the_interval_is_that_of_a_sign_test(count: int, skipped: int) -> None:
    """Known ranks of 95 % intervals for medians."""
    found = Ratio.of([float(us) for us in range(1, count + 1)], [1.0] * count)
    assert (found.low, found.high) == (1 + skipped, count - skipped)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Ratio(0.95, 0.9, 1.01), "tie"),
        (Ratio(0.95, 0.93, 0.98), "tie"),
        (Ratio(0.95, 0.93, 0.96), "slower"),
        (Ratio(1.06, 1.03, 1.1), "tie"),
        (Ratio(1.06, 1.05, 1.1), "faster"),
    ],
)
def test_what_the_control_reaches_is_a_tie(found: Ratio, verdict: str) -> None:
    assert found.verdict(Ratio(1.0, 0.97, 1.04)) == verdict


@pytest.mark.parametrize(("low", "verdict"), [(0.999, "tie"), (1.001, "faster")])
def test_an_interval_around_one_is_a_tie(low: float, verdict: str) -> None:
    assert Ratio(1.01, low, 1.02).verdict(Ratio(0.98, 0.97, 0.99)) == verdict
