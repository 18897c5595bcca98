"""Bursts of calls that are enqueued together, and the sets of operands that they rotate over."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tuner.errors import BenchmarkError
from tuner.hardware import Gpu
from tuner.measure.device import CapturedGraph, Device, Pool
from tuner.measure.predecessor import Predecessor
from tuner.measure.subjects import Call, Subject
from tuner.measurement import Regime
from tuner.problem import Problem

#: Target length of a burst: the gap between a graph's launch and its first kernel (several
#: microseconds) then stays under 2 %, and events (0.5 us) far below.
BURST_US = 400.0
#: Limits of the calls in a burst (warm) and of the sets of buffers that are rotated (cold).
MAX_CALLS = 200
MAX_SETS = 1024
#: Rotated buffers are this many times as large as the L2, so that a call finds none of its data
#: there.
COLD_L2S = 3


@dataclass(frozen=True)
class Entrant:
    """A subject ready to be timed: one bound call for each set of buffers."""

    subject: Subject
    calls: Sequence[Call]
    before: Sequence[Call] = ()
    """Predecessor of each call; empty if calls follow one another."""


class Replay(NamedTuple):
    """One timed replay between two events."""

    sign: int
    """+1: calls with their predecessors, if any; -1: predecessors only."""
    enqueue: Callable[[], None]


class Burst:
    """n calls of one subject, enqueued together: as one graph replay, or one by one in eager mode.

    If calls have predecessors, a second graph holds only the predecessors. The time of a call is
    the difference of the two replays, divided by n.
    """

    def __init__(self, entrant: Entrant, n: int, launch: str) -> None:
        """Args: entrant: subject to time; n: number of calls; launch: see `Regime`."""
        self.n = n
        self._graphs: list[CapturedGraph] = []
        self._replays: list[Callable[[], None]] = []
        turns = [entrant.calls[i % len(entrant.calls)] for i in range(n)]
        # Graphs read the copies of the inputs that a vendor's calls hold. Without the calls PyTorch
        # would return that memory to the device at the next capture.
        self._calls: list[Call] = turns
        if launch == "eager":
            return
        lead = [entrant.before[i % len(entrant.before)] for i in range(n)] if entrant.before else []
        pairs = itertools.chain(*zip(lead, turns, strict=True)) if lead else turns
        for calls in (list(pairs), lead):
            if calls:
                graph = entrant.subject.capture(calls)
                self._graphs.append(graph)
                self._replays.append(graph.replay)

    def enqueue(self) -> None:
        """Enqueue the calls, each behind its predecessor."""
        if self._replays:
            self._replays[0]()
            return
        for call in self._calls:
            call()

    def enqueue_alone(self) -> None:
        """Enqueue only the predecessors, if there are any."""
        for replay in self._replays[1:]:
            replay()

    def steps(self, samples: int, chance: random.Random) -> list[Replay]:
        """Steps to enqueue between events for `samples` times. If predecessors are subtracted, they
        are pairs in shuffled order.
        """
        if len(self._replays) < 2:
            return [Replay(1, self.enqueue)] * samples
        pair = [Replay(1, self.enqueue), Replay(-1, self.enqueue_alone)]
        return [step for _ in range(samples) for step in chance.sample(pair, 2)]

    def close(self) -> None:
        for graph in self._graphs:
            if isinstance(graph, CapturedGraph):
                graph.close()
        self._graphs, self._replays, self._calls = [], [], []


def times_of(steps: Sequence[Replay], spans: Sequence[float], n: int) -> list[float]:
    """Microseconds a call, computed from the time of each step.

    Args:
        steps: result of `Burst.steps`.
        spans: microseconds of each step.
        n: calls in a burst.
    """
    signed = [step.sign * span / n for step, span in zip(steps, spans, strict=True)]
    pairs = any(step.sign < 0 for step in steps)
    return [a + b for a, b in zip(signed[::2], signed[1::2], strict=True)] if pairs else signed


def median_of(steps: Sequence[Replay], spans: Sequence[float], n: int) -> float:
    """Median of `times_of`, microseconds."""
    return statistics.median(times_of(steps, spans, n))


def count_sets(problem: Problem, gpu: Gpu, regime: Regime, free_bytes: int) -> int:
    """Number of sets of operands to rotate: one if warm; if cold, enough for `COLD_L2S` times the
    L2.

    Limited by half of the free memory and by `MAX_SETS`.
    """
    if regime.l2 == "warm":
        return 1
    sets = math.ceil(COLD_L2S * gpu.l2_bytes / problem.bytes)
    return max(1, min(sets, MAX_SETS, 1 + free_bytes // 2 // problem.bytes))


def count_calls(estimate_us: float, sets: int) -> int:
    """Number of calls in a burst: as many as take `BURST_US`, at least 2, with every set equally
    often.
    """
    n = min(MAX_CALLS, max(2, math.ceil(BURST_US / max(estimate_us, 0.1))))
    return math.ceil(n / sets) * sets


class Sets:
    """Sets of operands that calls rotate over. The first set is the gate's own.

    Args:
        device: device of the buffers.
        problem: problem whose operands they are.
        first: device address of each of the gate's operands.
        count: number of sets.
        behind: function that makes the calls' predecessor, from a pool that lives as long as the
            sets.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        first: Mapping[str, int],
        count: int,
        behind: Callable[[Pool], Predecessor | None] = lambda pool: None,
    ) -> None:
        """Copy the inputs of `first` into `count - 1` further sets."""
        self._pool = Pool(device)
        self.buffers: list[dict[str, int]] = [dict(first)]
        try:
            for _ in range(count - 1):
                new = {o.name: self._pool.allocate(o.bytes) for o in problem.operands}
                for operand in problem.inputs:
                    device.copy(new[operand.name], first[operand.name], operand.bytes)
                self.buffers.append(new)
            self.predecessor = behind(self._pool)
            device.wait()
        except BenchmarkError:
            self.close()
            raise

    def close(self) -> None:
        self._pool.close()


def entrant(subject: Subject, sets: Sets, own: Mapping[str, int], scale: float) -> Entrant:
    """Bind a subject to every set. `own` holds its scratch and workspace."""
    calls = [subject.bind({**buffers, **own}, scale) for buffers in sets.buffers]
    lead = sets.predecessor
    return Entrant(subject, calls, [lead.bind(call, subject) for call in calls] if lead else ())
