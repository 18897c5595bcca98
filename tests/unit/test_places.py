"""Operands at several places: the addresses change the time of a short call."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.measure.bursts import PLACES, Burst, Entrant, Sets, count_places
from tuner.measure.stopwatch import Timing
from tuner.measure.subjects import Subject
from tuner.measurement import Regime
from tuner.problem import GemmProblem

SMALL, LARGE = GemmProblem(m=512, n=512, k=512), GemmProblem(m=8192, n=8192, k=8192)


@pytest.mark.parametrize("launch", ["stream", "eager"])
def test_a_burst_moves_between_the_places_of_its_operands(launch: str) -> None:
    done: list[str] = []

    class Recorded(Subject):
        def bind(self, buffers: Any, scale: float, *, deliver: bool = False) -> Any: ...

        def capture(self, calls: Any) -> Any:
            captured = list(calls)

            def replay() -> None:
                for call in captured:
                    call()

            return SimpleNamespace(replay=replay)

        def stream(self) -> int:
            return 0

    here, there = (Entrant(Recorded(), [partial(done.append, name)]) for name in ("here", "there"))
    burst = Burst(here, 2, launch, [there])
    assert burst.places == 2
    for place in range(3):
        burst.move(place)
        burst.enqueue()
    assert done == ["here", "here", "there", "there", "here", "here"]


def test_a_time_of_several_places_is_the_mean_of_their_medians() -> None:
    timing = Timing.of([1.0, 9.0, 2.0, 9.0, 30.0, 12.0], [0, 1, 0, 1, 0, 1])
    assert (timing.median_us, timing.rounds) == (5.5, 6)
    assert timing.std_us == pytest.approx(((271.0 + 3.0) / 2) ** 0.5)
    assert Timing.of([1.0, 9.0], [0, 1]).std_us == 0


def test_small_problems_with_warm_operands_are_timed_at_several_places() -> None:
    assert count_places(SMALL, Regime("stream", "warm")) == PLACES
    assert count_places(SMALL, Regime("stream", "cold")) == 1  # its calls rotate
    assert count_places(LARGE, Regime("stream", "warm")) == 1


class Memory:
    """Allocates one address after the other."""

    def __init__(self) -> None:
        self.next = 1 << 20
        self.copied: list[tuple[int, int, int]] = []

    def allocate(self, size: int) -> int:
        self.next += size
        return self.next - size

    def free(self, pointer: int) -> None: ...

    def copy(self, target: int, source: int, size: int) -> None:
        self.copied.append((target, source, size))

    def wait(self) -> None: ...


def test_a_place_is_a_copy_whose_operands_lie_at_other_distances() -> None:
    memory: Any = Memory()
    first = {"a": 4096, "b": 1 << 13, "d": 1 << 14}
    places = [Sets(memory, SMALL, first, 1, place=place) for place in range(PLACES)]
    assert places[0].buffers == [first]
    sources = [source for _, source, _ in memory.copied]
    assert sources == [first["a"], first["b"]] * (PLACES - 1)
    found = [one.buffers[0] for one in places[1:]]
    assert len({(one["b"] - one["a"], one["d"] - one["b"]) for one in found}) == PLACES - 1
    assert all(address % 256 == 0 for one in found for address in one.values())
