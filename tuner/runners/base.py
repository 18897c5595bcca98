"""The contract of a runner: where evaluations happen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import Problem


@dataclass(frozen=True)
class Building:
    """A submitted group whose kernels are not compiled yet."""

    config: Config
    """The first of the group."""
    elapsed_s: float | None
    """Seconds since its compile began; None while it waits for a core."""
    kernels: int
    """Kernels of the translation unit, which share its time."""


class Runner(Protocol):
    """Evaluates groups of candidates. A group shares its compiled kernels.

    A failed candidate is a measurement with a status; only what makes every evaluation
    impossible (no disk space, no compiler) raises.
    """

    gpu: Gpu
    regime: Regime
    """How it times; a replay's is its recording's."""
    provenance: Provenance
    capacity: int
    """Groups worth having in flight."""
    compiles: int
    """Compiles at a time."""

    @property
    def building(self) -> int:
        """Submitted groups that are not compiled yet. May be asked from another thread."""
        ...

    @property
    def environment(self) -> Environment:
        """Environment of the machine; may take seconds the first time."""
        ...

    def candidates(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """Candidates that can be evaluated here: `space`, or its recorded part in a replay. A
        family with `is_listed` asks its library for its list now.
        """
        ...

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """Configs of `space` that can be evaluated without compiling anything."""
        ...

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        """Start compiling for later; groups given together may share translation units."""
        ...

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        """Start evaluating a group."""
        ...

    def under_way(self, problem: Problem) -> list[Building]:
        """Submitted groups of a problem that are not compiled yet."""
        ...

    def abandon(self, problem: Problem) -> None:
        """Cancel the submitted and prefetched work of a problem, except candidates that are being
        timed. Compiles without another user are killed.
        """
        ...

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        """Wait until a submitted group is done; one measurement a config. An empty list once
        `cancel` gave it up, and after it until something is submitted again.

        Args:
            timeout_s: longest wait.

        Raises:
            TimeoutError: when nothing was done by then.
            BenchmarkError: when nothing was submitted.
        """
        ...

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        """Time finalists interleaved in one run, on one GPU: one measurement each, `is_final`.

        Args:
            problem: problem of the finalists.
            finalists: configs that passed the quick gate.
            rounds: interleaved rounds at least.
            timeout_s: longest time, seconds; None: no limit.

        Returns:
            A measurement of each; none after `cancel`, or where it took longer than `timeout_s`.
        """
        ...

    def kernel_times(self, problem: Problem, configs: Sequence[Config]) -> list[Measurement]:
        """How long the kernels of a call run, by the profiler: one measurement each; empty where
        nothing is measured.
        """
        ...

    def cancel(self) -> None:
        """Cancel all submitted work at once, including candidates that are being timed. Any thread
        may call it; a thread that waits in `collect` or `retime` returns.
        """
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...


class OfflineRunner(ABC):
    """Runner without a GPU: it compiles nothing, and answers a group when it is submitted."""

    gpu: Gpu
    regime: Regime
    provenance: Provenance
    environment: Environment
    capacity = compiles = 1
    building = 0

    def __init__(self) -> None:
        self._queue: deque[list[Measurement]] = deque()
        self._is_cancelled = False

    @abstractmethod
    def _answer(self, problem: Problem, config: Config) -> Measurement:
        """Quick measurement of a config."""

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        return space

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        return

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self._is_cancelled = False
        self._queue.append([self._answer(problem, config) for config in group])

    def under_way(self, problem: Problem) -> list[Building]:
        return []

    def abandon(self, problem: Problem) -> None:
        self._queue.clear()

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        if not self._queue and not self._is_cancelled:
            raise BenchmarkError("nothing was submitted to collect")
        return self._queue.popleft() if self._queue else []

    def kernel_times(self, problem: Problem, configs: Sequence[Config]) -> list[Measurement]:
        return []

    def cancel(self) -> None:
        self._is_cancelled = True
        self._queue.clear()

    def close(self) -> None:
        self.cancel()
