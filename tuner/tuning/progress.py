"""What a face sees of a sweep, and how Ctrl-C reaches it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.outcome import Outcome


class Interruption:
    """Ctrl-C as a request: the first asks the sweep to end with what it has, the second ends it."""

    def __init__(self) -> None:
        self._count = 0
        self._waiting = False
        self._previous: Any = None

    @property
    def requested(self) -> bool:
        return self._count > 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._waiting or self._count > 1:
            raise KeyboardInterrupt

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that the first Ctrl-C should cut short: the main thread's, for another's
        is not reached by signals.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waiting = True
        try:
            yield
        except KeyboardInterrupt:
            if self._count > 1 or self._count == 0:
                raise
        finally:
            self._waiting = False


@dataclass
class SweepState:
    """What a display shows; changes as the sweep goes on."""

    problem: Problem
    gpu: Gpu
    regime: Regime
    provenance: Provenance
    started: float
    """`time.monotonic` at the start."""
    deadline: float | None = None
    phase: str = "planning"
    phase_started: float = 0.0
    goal: int = 0
    """Groups that this phase may evaluate."""
    done: int = 0
    done_before: int = 0
    """Groups that were done when the phase began."""
    in_flight: int = 0
    """Groups that were submitted and not collected."""
    building: Callable[[], int] = lambda: 0
    """How many of those in flight are not compiled yet, at this moment."""
    resumed: int = 0
    """Groups taken from the store."""
    candidates: int = 0
    """Candidates evaluated in this run."""
    failures: Counter[str] = field(default_factory=Counter)
    best_own: Measurement | None = None
    best_vendor: Measurement | None = None


class Watcher:
    """Told of every change; a display overrides it."""

    def changed(self, state: SweepState) -> None:
        """Something of `state` changed."""

    def note(self, text: str) -> None:
        """Something that a person should know, once."""

    def finished(self, outcome: Outcome) -> None:
        """A sweep ended with this."""

    def failed(self, problem: Problem) -> None:
        """A sweep ended without an outcome."""
