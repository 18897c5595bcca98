"""A runner whose compiles and timings take seconds of a test's own clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from toys import Clock, Toy

from tuner.config import Config
from tuner.families.base import Family
from tuner.measurement import Measurement, Provenance
from tuner.problem import Problem
from tuner.runners.base import Building
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner


class TimedRunner(ReplayRunner):
    """Compiles on simulated cores, times on one simulated GPU; answers as if measured.

    Args:
        recorded: measurements to answer with.
        clock: passes while it waits.
        compile_s: seconds of a group's compile, by its first config.
        cores: compiles at a time.
        compiled: configs whose kernels are compiled already.
        timing_s: seconds of a group.
        finalist_s: seconds of each finalist of a final pass.
    """

    def __init__(
        self,
        recorded: Recording,
        clock: Clock,
        compile_s: Callable[[Config], float],
        *,
        cores: int = 16,
        compiled: Collection[Config] = (),
        timing_s: float = 0.5,
        finalist_s: float = 0.5,
    ) -> None:
        super().__init__(recorded)
        self.provenance, self.capacity = Provenance.MEASURED, 64
        self._clock, self._compile_s = clock, compile_s
        self._compiled = {_kernel(config) for config in compiled}
        self._timing_s, self._finalist_s = timing_s, finalist_s
        self._free = [0.0] * cores
        self._begun: list[tuple[float, float, Problem, list[Config]]] = []
        """Begin and end of each compile, problem and group."""
        self.abandoned: list[Config] = []
        self.events: list[tuple[float, str]] = []

    @property
    def building(self) -> int:
        return sum(end > self._clock.now for _, end, *_ in self._begun)

    @building.setter
    def building(self, count: int) -> None: ...

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        return [c for c in space if family.is_vendor or _kernel(c) in self._compiled]

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        now = self._clock.now
        is_known = group[0].family.startswith("vendor") or _kernel(group[0]) in self._compiled
        begin = now if is_known else max(now, self._free.pop(0))
        end = begin if is_known else begin + self._compile_s(group[0])
        if not is_known:
            self._free = sorted([*self._free, end])
        self._compiled.add(_kernel(group[0]))  # what is left of it is asked for once it is compiled
        self._begun.append((begin, end, problem, list(group)))

    def under_way(self, problem: Problem) -> list[Building]:
        now = self._clock.now
        return [
            Building(group[0], now - begin if begin <= now else None, 1)
            for begin, end, of, group in self._begun
            if of == problem and end > now
        ]

    def abandon(self, problem: Problem) -> None:
        self.abandoned += [group[0] for *_, of, group in self._begun if of == problem]
        self._begun = [one for one in self._begun if one[2] != problem]

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        _, end, problem, group = min(self._begun, key=lambda one: one[1])
        done = max(self._clock.now, end) + self._timing_s
        if timeout_s is not None and done > self._clock.now + timeout_s:
            self._clock.pass_by(timeout_s)
            raise TimeoutError
        self._clock.now = done
        self._begun = [one for one in self._begun if one[3] is not group]
        self.events.append((done, f"timed {group[0].family}"))
        return [self._answer(self._quick, problem, config) for config in group]

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        seconds = self._finalist_s * len(finalists)
        if timeout_s is not None and seconds > timeout_s:
            self._clock.pass_by(timeout_s)
            return []
        self._clock.pass_by(seconds)
        self.events.append((self._clock.now, f"final pass of {len(finalists)}"))
        timed = [self._answer(self._quick, problem, config) for config in finalists]
        return [m.but(is_final=True, rounds=rounds) if m.ok else m for m in timed]

    def _answer(
        self, known: dict[tuple[str, str], Measurement], problem: Problem, config: Config
    ) -> Measurement:
        return known[problem.key, config.digest].but(provenance=self.provenance)


def _kernel(config: Config) -> str:
    return Toy().compile_digest(config)
