"""A device whose time passes only where a test says so."""

from __future__ import annotations


class FakeDevice:
    """Time passes only where a burst says so."""

    index, stream = 0, 0

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0

    def event(self) -> list[float]:
        return [0.0]

    def destroy_event(self, event: list[float]) -> None:
        event.clear()

    def record(self, event: list[float]) -> None:
        event[0] = self.now

    def elapsed_us(self, start: list[float], end: list[float]) -> float:
        return end[0] - start[0]

    def wait(self) -> None:
        self.waits += 1
