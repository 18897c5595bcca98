"""Waits of a sweep for its compiler: their remaining time, and whether they are worth it."""

from __future__ import annotations

import math

from tuner.problem import Problem
from tuner.runners.base import Building, Runner
from tuner.search.stopping import FURTHER, CompileTimes, Stopping, queued
from tuner.search.study import Place, Search


class Waits:
    """Judges the compiles that a search waits for.

    Args:
        runner: runner that knows the compiles in progress.
        times: durations of earlier compiles.
        price: price of a second, as in `Effort.price`.
        target_s: as in `Effort.target_s`.
    """

    def __init__(
        self, runner: Runner, times: CompileTimes, price: float, target_s: float = math.inf
    ) -> None:
        self._runner, self._times = runner, times
        self._price, self._target_s = price, target_s

    def is_over(self, problem: Problem, search: Search, elapsed_s: float = 0.0) -> bool:
        """True if only compiles are left, and none is worth waiting for.

        Compiled kernels are always timed, which takes one or two seconds.

        Args:
            problem: problem of the search.
            search: search with requests in flight.
            elapsed_s: seconds since the sweep began.
        """
        under_way = {_place(b, search): b for b in self._runner.under_way(problem)}
        pending = {(m.family.name, key) for m in search.members for key in m.pending}
        if not pending <= under_way.keys():
            return False
        left_s = self._left_s({place: under_way[place] for place in sorted(pending)})
        return Stopping(search, self._price, self._target_s).is_over(left_s, elapsed_s)

    def _left_s(self, compiling: dict[Place, Building]) -> dict[Place, float]:
        """Seconds until each group is expected to be compiled."""
        seconds: dict[Place, float] = {}
        for place, building in compiling.items():
            if building.elapsed_s is not None:
                alone = 1 + FURTHER * (building.kernels - 1)
                seconds[place] = alone * self._times.left_s(place[0], building.elapsed_s / alone)
        waiting = [place for place in compiling if place not in seconds]
        ends = queued(list(seconds.values()), [self._times.left_s(name) for name, _ in waiting])
        return seconds | dict(zip(waiting, ends, strict=True))


def _place(one: Building, search: Search) -> Place:
    name = one.config.family
    member = next((m for m in search.members if m.family.name == name), None)
    return name, "" if member is None else member.family.compile_digest(one.config)
