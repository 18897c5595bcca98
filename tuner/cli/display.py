"""Display of a running sweep: a live panel on a terminal, otherwise plain lines.

Progress goes to standard error and results to standard output, so that either can be redirected.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from tuner.base.printable import printable, raw_stream
from tuner.cli.result import outcome_text
from tuner.measurement import versus
from tuner.problem import Problem
from tuner.selection.describe import kernel_name, microseconds
from tuner.tuning.outcome import Outcome
from tuner.tuning.progress import SweepState, Watcher

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table


PLAIN_INTERVAL_S = 5.0
"""Seconds between two plain lines of one phase."""


class Display(Watcher):
    """Display in plain lines.

    Args:
        store: name of the store, as shown.
        show_results: True to print each outcome on standard output.
    """

    def __init__(self, store: str, *, show_results: bool) -> None:
        self._store = store
        self._show_results = show_results
        self._last: dict[Problem, tuple[str, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def changed(self, state: SweepState) -> None:
        """Print a line for each new phase, and otherwise at most one every `PLAIN_INTERVAL_S` for a
        problem.
        """
        phase, last = self._last.get(state.problem, ("", 0.0))
        now = time.monotonic()
        if phase != state.phase or now - last >= PLAIN_INTERVAL_S:
            self._last[state.problem] = (state.phase, now)
            facts = [f"{name} {value}" for name, value in facts_of(state).items() if value]
            print(f"{state.problem.label()}: {', '.join(facts)}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def failed(self, problem: Problem) -> None:
        self._last.pop(problem, None)

    def finished(self, outcome: Outcome) -> None:
        self._last.pop(outcome.problem, None)
        if self._show_results:
            print(outcome_text(outcome, self._store), flush=True)


class LiveDisplay(Display):
    """Panel that is redrawn while the sweep waits."""

    def __enter__(self) -> Self:
        from rich.console import Console
        from rich.live import Live

        self._states: dict[Problem, SweepState] = {}
        self._console: Any = Console(file=raw_stream(sys.stderr))
        self._live: Live = Live(
            get_renderable=self._render, console=self._console, refresh_per_second=2, transient=True
        )
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def changed(self, state: SweepState) -> None:
        self._states[state.problem] = state

    def failed(self, problem: Problem) -> None:
        self._states.pop(problem, None)

    def note(self, text: str) -> None:
        shown = printable(text, keep="\n\t")
        self._console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def finished(self, outcome: Outcome) -> None:
        self._states.pop(outcome.problem, None)
        if self._show_results:
            self._live.stop()
            super().finished(outcome)
            self._live.start()

    def _render(self) -> Table:
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        for state in list(self._states.values()):
            where = f"{state.problem.label()} on {state.gpu.name}, {state.regime}"
            table.add_row(str(state.provenance), where)
            for name, value in facts_of(state).items():
                if value:
                    table.add_row(name, value)
        return table


def create_display(store: str, *, show_results: bool) -> Display:
    """Create a live display if standard error is a terminal and the output is not JSON, otherwise
    plain lines.

    Args:
        store: displayed name of the store.
        show_results: False if standard output is only for a JSON document.
    """
    live = show_results and sys.stderr.isatty() and sys.stdout.isatty()
    return (LiveDisplay if live else Display)(store, show_results=show_results)


def facts_of(state: SweepState) -> dict[str, str]:
    """Name and text of each fact; the text is empty if there is none."""
    failed = ", ".join(f"{count} {status}" for status, count in state.failures.most_common())
    own, vendor = state.best_own, state.best_vendor
    speed = versus(own, vendor, kernel_name(vendor)) if own and vendor else ""
    against = f" ({speed})" if speed else ""
    best = f"{microseconds(own.latency_us)} us {kernel_name(own)}{against}" if own else ""
    building = state.building()
    waiting = state.in_flight - building
    return {
        "phase": f"{state.phase} {state.done}/{state.goal}" if state.goal else state.phase,
        "compiling": str(building) if building else "",
        "compiled and waiting": str(waiting) if waiting > 0 else "",
        "candidates": str(state.candidates) if state.candidates else "",
        "known before": str(state.resumed) if state.resumed else "",
        "best own": best,
        "best vendor": f"{microseconds(vendor.latency_us)} us {kernel_name(vendor)}"
        if vendor
        else "",
        "failed": failed,
        "time": f"{_clock(time.monotonic() - state.started)}{_left(state)}",
    }


def _left(state: SweepState) -> str:
    """Remaining time of the phase at its pace so far, or until the time limit if that is sooner."""
    now = time.monotonic()
    estimates = []
    if state.deadline is not None:
        estimates.append(max(0.0, state.deadline - now))
    if state.done > state.done_before:
        pace = (now - state.phase_started) / (state.done - state.done_before)
        estimates.append(pace * (state.goal - state.done))
    return f", {_clock(min(estimates))} left" if estimates else ""


def _clock(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes}:{second:02d}"
