"""A simulated machine that compiles: units of kernels on cores that they share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from tuner.compile.compiler import UNIT
from tuner.compile.units import KernelJob, shared, unit_size
from tuner.families.base import KernelSpec
from tuner.search.stopping import FURTHER, CompileTimes, queued
from tuner.search.study import Place

DEVICE = 0.65
"""Share of a unit's CPU-seconds that its device half takes, which is compiled beside the other."""
_DONE_S = 1e-9


@dataclass(eq=False)
class SimulatedUnit:
    """Kernels that are compiled together."""

    places: list[Place]
    begin: float
    cpu_s: float
    left_s: list[float]
    """CPU-seconds that its halves still need."""


class Compilers:
    """Compilers of one machine.

    Args:
        cores: cores that the halves of all units share.
        seconds: CPU-seconds of a group that is compiled alone.
    """

    def __init__(self, cores: int, seconds: Mapping[Place, float]) -> None:
        self.now = 0.0
        self.units: list[SimulatedUnit] = []
        self.waiting: list[tuple[Place, KernelJob]] = []
        self.compiled: dict[Place, float] = {}
        """CPU-seconds of each compiled group: its share of the unit."""
        self._cores, self._seconds = cores, seconds

    def submit(self, place: Place, spec: KernelSpec) -> None:
        """Queue the kernel of a group."""
        is_first = not (self.compiled or self.units or self.waiting)
        self.waiting.append((place, KernelJob(spec, place[1], Future(), is_first=is_first)))

    def until(self, end: float) -> Iterator[tuple[float, Place]]:
        """Compile until a time; gives each group as it is compiled, with the time."""
        while True:
            self._begin()
            step = min(end, self.next_end) - self.now
            rate = self._rate
            self.now += step
            for unit in self.units:
                unit.left_s = [s for s in (s - rate * step for s in unit.left_s) if s > _DONE_S]
            ended = [unit for unit in self.units if not unit.left_s]
            if not ended:
                return
            self.units = [unit for unit in self.units if unit.left_s]
            for unit in ended:
                for place in unit.places:
                    self.compiled[place] = unit.cpu_s / len(unit.places)
                    yield self.now, place

    @property
    def next_end(self) -> float:
        """Time at which the next half is done; infinite without one."""
        least = min((s for unit in self.units for s in unit.left_s), default=math.inf)
        return self.now + least / self._rate

    @property
    def _rate(self) -> float:
        halves = sum(len(unit.left_s) for unit in self.units)
        return min(1.0, self._cores / halves) if halves else 1.0

    def _begin(self) -> None:
        """Begin units as `tuner.compile.compiler` does."""
        while self.waiting and len(self.units) < self._cores:
            (family, _), first = self.waiting[0]
            idle = max(1, self._cores // 2 - len(self.units))
            alike = [one for one in self.waiting if one[0][0] == family]
            alike.sort(key=lambda one: shared(first.spec, one[1].spec), reverse=True)
            unit = alike[: unit_size(first, len(self.waiting), idle, UNIT)]
            self.waiting = [one for one in self.waiting if one not in unit]
            each = sorted((self._seconds[place] for place, _ in unit), reverse=True)
            cpu_s = each[0] + FURTHER * sum(each[1:])
            halves = [DEVICE * cpu_s, (1 - DEVICE) * cpu_s]
            places = [place for place, _ in unit]
            self.units.append(SimulatedUnit(places, self.now, cpu_s, halves))

    def left_s(self, times: CompileTimes) -> dict[Place, float]:
        """Seconds until each group is expected to be compiled, by what a sweep knows: when each
        compile began, never when it ends.
        """
        left: dict[Place, float] = {}
        for unit in self.units:
            alone = 1 + FURTHER * (len(unit.places) - 1)
            for place in unit.places:
                left[place] = alone * times.left_s(place[0], (self.now - unit.begin) / alone)
        waiting = [place for place, _ in self.waiting]
        ends = queued(list(left.values()), [times.left_s(name) for name, _ in waiting])
        return left | dict(zip(waiting, ends, strict=True))
