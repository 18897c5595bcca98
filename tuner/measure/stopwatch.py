"""Timing of one candidate, or of many interleaved, under a regime.

Times are taken over bursts (`tuner.measure.bursts`) of n calls enqueued together. In regime
`stream` each call has a predecessor. The time of n predecessors is subtracted, pair by pair.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.errors import BenchmarkError
from tuner.measure import device as device_module
from tuner.measure.bursts import Burst, Entrant, Replay, count_calls, median_of, times_of
from tuner.measure.device import Device
from tuner.measure.rounds import RoundOrder, Timing, is_decided, summarize
from tuner.measure.subjects import Call
from tuner.measurement import Clocks, Regime

#: Clocks ramp from idle (345 MHz on an H200) within this time.
WARM_UP_US = 20_000.0
#: Bursts of a warm-up at most: of a kernel that does nothing it would take ten thousand.
MAX_WARM_UPS = 1000
QUICK_REPLAYS = 7
#: A call of this length is not repeated only to estimate its time.
SLOW_US = 50_000.0
#: Timed bursts of each subject in a round, after an untimed one.
REPLAYS_A_ROUND = 3
#: A final pass whose rounds took this long continues only until every subject's rank relative to
#: the fastest is decided (`is_decided`), and ends undecided at the limit.
LONG_PASS_US = 3_000_000.0
PASS_LIMIT_US = 15_000_000.0
#: Rounds before a long pass may end, and rounds of its subjects that are not contenders.
MIN_ROUNDS = 8
#: An undecided long pass has at most this many times the requested rounds.
MAX_PASSES = 3


@dataclass
class _Rounds:
    """Accepted rounds of a final pass."""

    samples: list[list[float]]
    """Microseconds a call of each subject, by round."""
    clocks: list[Clocks] = field(default_factory=list)
    spent_us: float = 0.0
    is_throttled: bool = False

    @property
    def is_long(self) -> bool:
        return self.spent_us >= LONG_PASS_US

    @property
    def timings(self) -> list[Timing]:
        return [Timing.of(series) for series in self.samples]

    def is_over(self, rounds: int) -> bool:
        """True if no further round is needed.

        Args:
            rounds: requested rounds.
        """
        count = len(self.clocks)
        if not self.is_long:
            return count >= rounds
        if count < min(rounds, MIN_ROUNDS):
            return False
        most = count >= MAX_PASSES * rounds or self.spent_us >= PASS_LIMIT_US
        return most or is_decided(self.samples)


class Stopwatch:
    """Times bursts on one device."""

    def __init__(self, device: Device, regime: Regime) -> None:
        self._device, self._regime = device, regime
        self._events: list[Any] = []
        self._chance = random.Random(0)

    def prepare(self, entrant: Entrant) -> Burst:
        """Estimate a call's time, capture a burst of fitting length, and warm it up."""
        _all(entrant.before[:1])  # it may also choose algorithms
        three = [entrant.calls[0]] * 3
        estimate = self._time(lambda: _all(three)) / 3
        if estimate < SLOW_US:  # the first calls may have loaded modules or chosen algorithms
            estimate = self._time(lambda: _all(three)) / 3
        n = count_calls(estimate, len(entrant.calls))
        burst = Burst(entrant, n, self._regime.launch)
        try:
            spent, count = 0.0, 0
            while spent < WARM_UP_US and count < MAX_WARM_UPS:
                spent += self._time(burst.enqueue)
                count += 1
                burst.enqueue_alone()
        except BenchmarkError:
            with contextlib.suppress(BenchmarkError):  # the device is lost
                burst.close()
            raise
        return burst

    def quick(self, burst: Burst) -> tuple[Timing, Clocks]:
        """Time `QUICK_REPLAYS` bursts one after the other, after an untimed one."""
        steps = burst.steps(QUICK_REPLAYS, self._chance)
        events = self._take(len(steps) + 1)
        self._series(burst, steps, events)
        clocks = device_module.read_clocks(self._device.index)
        return Timing.of(times_of(steps, self._spans(events), burst.n)), clocks

    def final(
        self,
        bursts: Sequence[Burst],
        rounds: int,
        progress: Callable[[int], None],
        *,
        careful: bool,
    ) -> tuple[list[Timing], Clocks]:
        """Time all bursts interleaved over at least `rounds` accepted rounds, in the order of
        `RoundOrder`.

        Rounds under a thermal or hardware slowdown are repeated, at most as many as requested.
        Further ones are kept, and all times are flagged ``throttled``. If any deviation reaches
        `MAX_DEVIATION`, all subjects are timed again with twice the rounds. A deviation that stays
        above it is flagged ``noisy``.

        For a pass longer than `LONG_PASS_US` the noise decides the number of rounds. After
        `MIN_ROUNDS` it ends once `is_decided`. Otherwise it takes up to `MAX_PASSES` times the
        requested rounds within `PASS_LIMIT_US`. It is not repeated.

        Args:
            bursts: prepared bursts, own kernels and vendors'.
            rounds: accepted rounds requested.
            progress: callback that gets a burst's index before it is enqueued, and -1 once a round.
            careful: True to wait for each burst, so that a hanging one is identified.
        """
        times = []
        for index, burst in enumerate(bursts):
            if careful:
                progress(index)
            times.append(self._time(burst.enqueue))
        round_order = RoundOrder(times, [burst.n for burst in bursts], REPLAYS_A_ROUND + 1)
        result = self._rounds(bursts, round_order, rounds, progress, careful)
        if not result.is_long and any(timing.is_noisy for timing in result.timings):
            result = self._rounds(bursts, round_order, 2 * rounds, progress, careful)
        flagged = []
        for timing in result.timings:
            flags = (
                *(("noisy",) if timing.is_noisy else ()),
                *(("throttled",) if result.is_throttled else ()),
            )
            flagged.append(replace(timing, flags=flags))
        return flagged, summarize(result.clocks)

    def _rounds(
        self,
        bursts: Sequence[Burst],
        round_order: RoundOrder,
        rounds: int,
        progress: Callable[[int], None],
        careful: bool,
    ) -> _Rounds:
        result = _Rounds([[] for _ in bursts])
        spare = rounds
        while not result.is_over(rounds):
            progress(-1)
            order = next(round_order.orders)
            if result.is_long and len(result.clocks) >= MIN_ROUNDS:
                order = [index for index in order if index not in round_order.others]
            times, clocks = self._round(bursts, order, round_order, progress, careful)
            result.spent_us += self._device.elapsed_us(*self._events[:2])
            if device_module.SLOWDOWNS.intersection(clocks.throttle):
                if spare > 0:
                    spare -= 1
                    continue
                result.is_throttled = True
            result.clocks.append(clocks)
            for index, time in times.items():
                result.samples[index].append(time)
        return result

    def _round(
        self,
        bursts: Sequence[Burst],
        order: Sequence[int],
        round_order: RoundOrder,
        progress: Callable[[int], None],
        careful: bool,
    ) -> tuple[dict[int, float], Clocks]:
        """Run one burst after the other. Returns microseconds a call of each."""
        steps = {index: bursts[index].steps(REPLAYS_A_ROUND, self._chance) for index in order}
        free = iter(self._take(2 + sum(len(mine) + 1 for mine in steps.values()))[2:])
        events = {
            index: list(itertools.islice(free, len(mine) + 1)) for index, mine in steps.items()
        }
        untimed = round_order.settling(order[0])
        self._device.record(self._events[0])
        for index in order:
            if careful:
                progress(index)
            for _ in range(untimed):
                bursts[index].enqueue()
            untimed = 0
            self._series(bursts[index], steps[index], events[index])
            if careful:
                self._device.wait()
        self._device.record(self._events[1])
        # Clocks are read while the GPU works: an idle one reports idle clocks.
        clocks = device_module.read_clocks(self._device.index)
        self._device.wait()
        times = {
            index: median_of(steps[index], self._spans(events[index]), bursts[index].n)
            for index in order
        }
        return times, clocks

    def _series(self, burst: Burst, steps: Sequence[Replay], events: Sequence[Any]) -> None:
        """Enqueue an untimed burst, then one step between each two events."""
        burst.enqueue()
        self._device.record(events[0])
        for step, event in zip(steps, events[1:], strict=True):
            step.enqueue()
            self._device.record(event)

    def close(self) -> None:
        while self._events:
            self._device.destroy_event(self._events.pop())

    def _time(self, work: Call) -> float:
        start, end = self._take(2)
        self._device.record(start)
        work()
        self._device.record(end)
        return self._device.elapsed_us(start, end)

    def _take(self, count: int) -> list[Any]:
        while len(self._events) < count:
            self._events.append(self._device.event())
        return self._events[:count]

    def _spans(self, events: Sequence[Any]) -> list[float]:
        """Microseconds from each event to the next."""
        self._device.wait()
        return [self._device.elapsed_us(start, end) for start, end in itertools.pairwise(events)]


def _all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()
