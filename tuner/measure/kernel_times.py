"""The kernels of one call, each alone: what the call takes beside them is between its launches."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tuner.measure.stopwatch import (
    CompiledSubject,
    Sets,
    Stopwatch,
    entrant,
)

_ALONE = re.compile(r"alone (.*); between launches ")
_ONE = re.compile(r"(\S+) (-?[\d.]+) us")


def alone_us(
    subject: CompiledSubject,
    sets: Sets,
    own: Mapping[str, int],
    scale: float,
    stopwatch: Stopwatch,
) -> dict[str, float]:
    """Microseconds of each kernel of a call, of all its launches where they are several, timed
    quickly and repeated without the others; empty where there is but one kernel.

    Args:
        subject: has run on these buffers.
        sets: operands.
        own: its scratch and workspace.
        scale: see `Family.launches`.
        stopwatch: times them under the regime of the whole.
    """
    parts = subject.parts()
    found: dict[str, float] = {}
    for name, part in parts.items() if len(parts) > 1 else ():
        burst = stopwatch.prepare(entrant(part, sets, own, scale))
        try:
            timing, _ = stopwatch.quick(burst)
        finally:
            burst.close()
        found[name] = timing.median_us
    return found


def described(found: Mapping[str, float], whole_us: float) -> str:
    """One line: what each takes, and what is left of the whole call for what lies between them.
    Less than nothing where they overlap, or where one finds in the L2 what in the call it does not.
    """
    if not found:
        return ""
    parts = ", ".join(f"{name} {us:.2f} us" for name, us in found.items())
    return f"alone {parts}; between launches {whole_us - sum(found.values()):.2f} us"


def read(line: str) -> dict[str, float]:
    """The inverse of `described`, to a hundredth of a microsecond; empty for another line."""
    said = _ALONE.match(line)
    return {name: float(us) for name, us in _ONE.findall(said[1])} if said else {}
