"""Times of calls: behind an ordinary kernel (`time_calls`), and on the host (`time_host`).

Both interleave the contenders, and time the first of them once more as the control.

A programmatic dependent of a copy of itself starts before that copy has ended, and looks faster
than in a model. So each call follows an element-wise kernel here. Its time is the difference of two
CUDA graphs: one with the calls, one with the element-wise kernels only.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tuner.errors import TunerError
from tuner.measure.rounds import median_interval, shuffled

#: A graph holds as many calls as take about this long, within limits.
GRAPH_US, MIN_CALLS, MAX_CALLS = 1200.0, 2, 40
#: A call that takes so long, and so many times as long as the shortest, has two replays only.
LONG_US, LONG_RATIO = 1000.0, 2.5
#: All graphs of a call together, repeated, take at most about so long; at least seven rounds.
BUDGET_US, MIN_ROUNDS, MAX_ROUNDS = 2e6, 7, 20
EVICTED_BYTES = 160 << 20
"""Bytes that are read before a graph of several copies: three times an H100's L2 cache, where the
copies of a small call stay together."""
CONTROL = "control"
#: What a contender's code raises when it does not take such tensors, and a refused launch.
FAILURES = (
    *(RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError),
    TunerError,
)


_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Contender:
    """One way to answer a call.

    Args:
        name: name of the way.
        call: enqueues it on the tensors of copy i, and returns the output.
        around: context that it has to be called in.
    """

    name: str
    call: Callable[[int], Any]
    around: Callable[[], AbstractContextManager[Any]] = field(default=contextlib.nullcontext)


@dataclass(frozen=True)
class Times:
    """Microseconds of a call by contender, and why others have none."""

    us: dict[str, float]
    failed: dict[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the captures and the rounds took."""


def time_calls(
    contenders: Sequence[Contender],
    before: Callable[[int], Any],
    copies: int,
    budget_us: float = BUDGET_US,
) -> Times:
    """Medians over rounds in which the contenders' graphs are replayed in a shuffled order.

    The first contender runs once more as `CONTROL`: the ratio of both times is the noise. Calls of
    `LONG_US` and more that are `LONG_RATIO` times as long as the shortest are replayed twice only.
    Several copies are cold: the L2 cache is filled with other bytes before each replay.

    Args:
        contenders: each was called once before, so that nothing is loaded while it is captured.
        before: enqueues the element-wise kernel that writes an input of copy i.
        copies: copies of the tensors, used in turn; 1: warm tensors.
        budget_us: that all rounds together take at most, if these are more than `MIN_ROUNDS`.
    """
    graphs, rough = dict[str, tuple[Any, int]](), dict[str, float]()
    failed: dict[str, str] = {}
    begin = time.perf_counter()
    ways = _with_control(contenders)
    for one in ways:
        first_us = _tried(one.name, partial(_rough_us, before, one, copies), failed)
        if first_us is not None:
            rough[one.name] = first_us
    limit = max(LONG_US, LONG_RATIO * min(rough.values(), default=0.0))
    long = {name: us for name, us in rough.items() if us > limit}
    for one in [way for way in ways if way.name in rough and way.name not in long]:
        count = _calls_of(rough[one.name], copies)
        make = partial(_captured, before, one, count, copies)
        if (graph := _tried(one.name, make, failed)) is not None:
            graphs[one.name] = graph, count
    failed.pop(CONTROL, None)  # the first contender's failure says it
    if not graphs:
        return Times(long, failed)
    captured = time.perf_counter()
    alone = {count: _captured(before, None, count, copies) for _, count in graphs.values()}
    evict = _evicting() if copies > 1 else _nothing
    every = [*(graph for graph, _ in graphs.values()), *alone.values()]
    replays = [partial(replayed, graph, evict) for graph in every]
    one_round = sum(replay() for replay in replays)  # the first replay of each
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, round(budget_us / max(one_round, 1.0))))
    medians = dict(
        zip([*graphs, *alone], map(statistics.median, shuffled(replays, rounds)), strict=True)
    )
    us = {name: (medians[name] - medians[count]) / count for name, (_, count) in graphs.items()}
    seconds = {"captures": captured - begin, "rounds": time.perf_counter() - captured}
    us |= long
    return Times({name: us[name] for name in rough if name in us}, failed, seconds)


def _tried(name: str, make: Callable[[], _Made], failed: dict[str, str]) -> _Made | None:
    """Return the result of a contender's code; None after an error, which `failed` notes."""
    import torch

    try:
        return make()
    except FAILURES as exc:
        torch.cuda.synchronize()  # raises again where the device is lost
        failed[name] = first_line(exc)
        return None


def _with_control(contenders: Sequence[Contender]) -> list[Contender]:
    return [*contenders, *(replace(first, name=CONTROL) for first in contenders[:1])]


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios, and the 95 % interval that holds the true median.

    Host-bound passes vary by tens of percent from one to the next; two passes of one round, next
    to each other, much less. The interval is that of order statistics: it assumes nothing about
    the distribution. With fewer than six rounds it is from the smallest to the largest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, reference: Sequence[float], times: Sequence[float]) -> Ratio:
        """The reference's times over others of the same rounds."""
        ratios = [first / other for first, other in zip(reference, times, strict=True)]
        return cls(statistics.median(ratios), *median_interval(ratios))

    def verdict(self, control: Ratio) -> str:
        """``faster`` or ``slower`` than the reference, or ``tie``: an interval that contains 1 or
        overlaps the control's.
        """
        if self.low > max(1.0, control.high):
            return "faster"
        return "slower" if self.high < min(1.0, control.low) else "tie"


@dataclass(frozen=True)
class HostTimes:
    """Microseconds of a call by contender: of every round, the control's among them."""

    rounds: dict[str, list[float]]

    @property
    def us(self) -> dict[str, float]:
        """Medians."""
        return {name: statistics.median(times) for name, times in self.rounds.items()}

    def over(self, reference: str, name: str) -> Ratio:
        """Paired ratios of a reference's times to another's."""
        return Ratio.of(self.rounds[reference], self.rounds[name])


def time_host(
    contenders: Sequence[Contender],
    calls: int = 100,
    rounds: int = 50,
    is_waiting: bool = False,
    wait: Callable[[], Any] | None = None,
) -> HostTimes:
    """Wall time of bursts of calls; the order of the contenders turns about with every round.

    Garbage is collected between the rounds only: it would lengthen some bursts at random.

    Args:
        contenders: each was called once before.
        calls: calls of a burst, with copy 0 to `calls` - 1; the launch queue holds 1024.
        rounds: bursts of each contender.
        is_waiting: the time includes the wait for the device after each burst.
        wait: waits for the device; None: torch's.
    """
    if wait is None:
        import torch

        wait = torch.cuda.synchronize
    order = _with_control(contenders)
    times: dict[str, list[float]] = {one.name: [] for one in order}
    with _uncollected():
        for turn in range(rounds):
            gc.collect()
            for one in order if turn % 2 else reversed(order):
                with one.around():
                    one.call(0)  # the processor's caches hold this contender's code, not another's
                    wait()
                    start = time.perf_counter()
                    for i in range(calls):
                        one.call(i)
                    if is_waiting:
                        wait()
                    spent = time.perf_counter() - start
                    wait()
                times[one.name].append(spent * 1e6 / calls)
    return HostTimes(times)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection; what is there now is left out of those that are asked for."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def every_copy(call: Callable[[], Any]) -> Callable[[int], Any]:
    """A call that is the same for every copy of the tensors."""
    return lambda _: call()


def first_outputs(
    calls: Mapping[str, Callable[[int], Any]], read: Callable[[Any], Any] = lambda out: out
) -> tuple[dict[str, Any], dict[str, str]]:
    """Results of calls that are made once, and why others have none.

    Args:
        calls: by contender.
        read: makes what is to be held of an output, whose memory the next call may use.
    """
    import torch

    outs, failed = dict[str, Any](), dict[str, str]()
    for name, call in calls.items():
        try:
            outs[name] = read(call(0))
            torch.cuda.synchronize()
        except FAILURES as exc:
            torch.cuda.synchronize()  # raises again where the device is lost
            outs.pop(name, None)
            failed[name] = first_line(exc)
    return outs, failed


def distance(out: Any, wanted: Any) -> float:
    """Relative Frobenius norm of the difference of two tensors."""
    wanted = wanted.detach().double()
    return float((out.detach().double() - wanted).norm() / wanted.norm())


def first_line(exc: BaseException) -> str:
    """First line of an error's text, at most 200 characters."""
    lines = str(exc).strip().splitlines() or [""]
    return (lines[0] or type(exc).__name__)[:200]


def _rough_us(before: Callable[[int], Any], one: Contender, copies: int) -> float:
    """Microseconds of a call, by a few calls outside of a graph. A long one may wait for the host,
    so its graph tells.
    """
    import torch

    with one.around():
        one.call(0)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(3):
            one.call(i % copies)
        end.record()
        end.synchronize()
    us = float(start.elapsed_time(end)) * 1e3 / 3
    if us <= LONG_US:
        return us
    graph = _captured(before, one, MIN_CALLS, copies)
    return min(replayed(graph) for _ in range(2)) / MIN_CALLS


def _calls_of(us: float, copies: int) -> int:
    """How many calls the graph of a call of this length holds."""
    wanted = round(GRAPH_US / max(us, 1.0))
    return min(MAX_CALLS, max(MIN_CALLS, min(copies, 16), wanted))


def _captured(before: Callable[[int], Any], one: Contender | None, count: int, copies: int) -> Any:
    import torch

    around = contextlib.nullcontext if one is None else one.around
    graph = torch.cuda.CUDAGraph()
    with around(), torch.cuda.graph(graph):
        for i in range(count):
            before(i % copies)
            if one is not None:
                one.call(i % copies)
    return graph


def _evicting() -> Callable[[], Any]:
    """A function that enqueues reads of `EVICTED_BYTES`: writes would still be on their way to
    memory while the next graph runs.
    """
    import torch

    other = torch.zeros(EVICTED_BYTES // 4, device="cuda")
    total = torch.empty((), device="cuda")
    return lambda: torch.sum(other, 0, out=total)


def _nothing() -> None:
    """Warm tensors stay in the L2."""


def replayed(graph: Any, evict: Callable[[], Any] = _nothing) -> float:
    """Microseconds of one replay, behind what `evict` enqueues."""
    import torch

    evict()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
