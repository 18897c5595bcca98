"""Progress of a sweep for displays, and the request to end it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tuner.base.processes import EndingSignals, Interrupted
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.tuning.outcome import Outcome


class Interruption:
    """Request to end. The first signal makes the sweep end with its results so far, and a further
    Ctrl-C ends it at once. A further SIGTERM or SIGHUP does not, because both are often sent twice.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """Number of the first signal."""
        self._is_forced = False
        self._waiting = False
        self._signals = EndingSignals(self._on_signal)

    @property
    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> Self:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__()

    def _on_signal(self, number: int) -> None:
        self._is_forced |= self.requested and number == signal.SIGINT
        if self.number is None:
            self.number = number
        if self._waiting or self._is_forced:
            raise Interrupted(self.number)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of a wait that the first signal should end. It must be in the main thread, the
        only one that signals reach.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._waiting = True
        try:
            yield
        except KeyboardInterrupt:
            if self._is_forced or not self.requested:
                raise
        finally:
            self._waiting = False


@dataclass
class SweepState:
    """State of a running sweep for a display."""

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
    """Number of groups that this phase may evaluate."""
    done: int = 0
    done_before: int = 0
    """Number of groups that were done when the phase began."""
    in_flight: int = 0
    """Number of groups that were submitted and not collected."""
    building: Callable[[], int] = lambda: 0
    """Number of groups in flight that are not compiled yet."""
    resumed: int = 0
    """Number of groups taken from the store."""
    candidates: int = 0
    """Number of candidates evaluated in this run."""
    failures: Counter[str] = field(default_factory=Counter)
    best_own: Measurement | None = None
    best_vendor: Measurement | None = None


def progress_of(state: SweepState) -> dict[str, Any]:
    """Progress of a running sweep for the job's row."""
    own, vendor = state.best_own, state.best_vendor
    return {
        "phase": state.phase,
        "done": state.done,
        "goal": state.goal,
        "candidates": state.candidates,
        "known_before": state.resumed,
        "failures": dict(state.failures),
        "best_own_us": own.latency_us if own else None,
        "best_vendor_us": vendor.latency_us if vendor else None,
    }


class Watcher:
    """Receiver of every change. Displays override its methods."""

    def changed(self, state: SweepState) -> None:
        """Called when `state` changes."""

    def note(self, text: str) -> None:
        """Called once for a message to the user."""

    def finished(self, outcome: Outcome) -> None:
        """Called when a sweep ends with an outcome."""

    def failed(self, problem: Problem) -> None:
        """Called when a sweep ends without an outcome."""
