"""Calls that are enqueued together, and the sets of buffers that they rotate over."""

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

#: A burst lasts about this long: the gap between a graph's launch and its first kernel (several
#: microseconds) then stays under 2 %, and events (0.5 us) far below.
BURST_US = 400.0
#: Calls a burst, warm; and, cold, the most sets of buffers that are rotated over.
MAX_CALLS = 200
MAX_SETS = 1024
#: Rotated buffers hold this many times the L2, so that a call finds none of its own.
COLD_L2S = 3


@dataclass(frozen=True)
class Entrant:
    """A subject ready to be timed: what to call, one call a set of buffers."""

    subject: Subject
    calls: Sequence[Call]
    before: Sequence[Call] = ()
    """The predecessor of each call; empty where calls follow one another."""


class Replay(NamedTuple):
    """One replay between two events."""

    sign: int
    """+1: calls with their predecessors, where there are such; -1: predecessors alone."""
    enqueue: Callable[[], None]


class Burst:
    """n calls of one subject, enqueued together: a graph's replay, or one by one when eager.

    When calls have predecessors, a second graph holds only the predecessors. A time is the
    difference of a replay of either, over n.
    """

    def __init__(self, entrant: Entrant, n: int, launch: str) -> None:
        """Args: entrant: what is timed; n: calls; launch: see `Regime`."""
        self.n = n
        self._calls: list[Call] = []
        self._graphs: list[CapturedGraph] = []
        self._replays: list[Callable[[], None]] = []
        turns = [entrant.calls[i % len(entrant.calls)] for i in range(n)]
        if launch == "eager":
            self._calls = turns
            return
        lead = [entrant.before[i % len(entrant.before)] for i in range(n)] if entrant.before else []
        pairs = itertools.chain(*zip(lead, turns, strict=True)) if lead else turns
        for calls in (list(pairs), lead):
            if calls:
                graph = entrant.subject.capture(calls)
                self._graphs.append(graph)
                self._replays.append(graph.replay)

    def enqueue(self) -> None:
        """The calls, behind their predecessors."""
        if self._replays:
            self._replays[0]()
            return
        for call in self._calls:
            call()

    def enqueue_alone(self) -> None:
        """The predecessors alone; nothing where there are none."""
        for replay in self._replays[1:]:
            replay()

    def steps(self, samples: int, chance: random.Random) -> list[Replay]:
        """Steps enqueued between events for a number of times: pairs in shuffled order where
        predecessors are subtracted.
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
    """Microseconds a call from the time of each step.

    Args:
        steps: of `Burst.steps`.
        spans: microseconds of each.
        n: calls a burst.
    """
    signed = [step.sign * span / n for step, span in zip(steps, spans, strict=True)]
    pairs = any(step.sign < 0 for step in steps)
    return [a + b for a, b in zip(signed[::2], signed[1::2], strict=True)] if pairs else signed


def median_of(steps: Sequence[Replay], spans: Sequence[float], n: int) -> float:
    """The median of `times_of`."""
    return statistics.median(times_of(steps, spans, n))


def count_sets(problem: Problem, gpu: Gpu, regime: Regime, free_bytes: int) -> int:
    """Sets of operands to rotate over: one when warm, `COLD_L2S` times the L2 when cold.

    Limited by half of the free memory and by `MAX_SETS`.
    """
    if regime.l2 == "warm":
        return 1
    wanted = math.ceil(COLD_L2S * gpu.l2_bytes / problem.bytes)
    return max(1, min(wanted, MAX_SETS, 1 + free_bytes // 2 // problem.bytes))


def count_calls(estimate_us: float, sets: int) -> int:
    """Calls a burst: `BURST_US` long, at least 2, and every set equally often."""
    n = min(MAX_CALLS, max(2, math.ceil(BURST_US / max(estimate_us, 0.1))))
    return math.ceil(n / sets) * sets


class Sets:
    """Operands that calls are rotated over; the first is the gate's own.

    Args:
        device: where.
        problem: whose operands.
        first: device address of each operand of the gate.
        count: sets.
        behind: makes the predecessor of the calls, from a pool that lives as long as the sets.
    """

    def __init__(
        self,
        device: Device,
        problem: Problem,
        first: Mapping[str, int],
        count: int,
        behind: Callable[[Pool], Predecessor | None] = lambda pool: None,
    ) -> None:
        """Copies the inputs of `first` into `count - 1` further sets."""
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
    """Bind a subject to every set; `own` holds its scratch and workspace."""
    calls = [subject.bind({**buffers, **own}, scale) for buffers in sets.buffers]
    lead = sets.predecessor
    return Entrant(subject, calls, [lead.bind(call, subject) for call in calls] if lead else ())
