"""The kernels of one call: each alone, and by the profiler.

A call's time beside its kernels timed alone lies between its launches. Its time beside the
profiler's durations is the launch itself, and the effect of its predecessor on the caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tuner.errors import BenchmarkError
from tuner.measure.bursts import Burst, Sets, entrant
from tuner.measure.device import Device
from tuner.measure.stopwatch import Stopwatch
from tuner.measure.subjects import CompiledSubject, import_torch
from tuner.measurement import Status

_ALONE = re.compile(r"^alone (.*); between launches ", re.MULTILINE)
_AGAIN = re.compile(r"^again ([\d.]+) us", re.MULTILINE)
_ONE = re.compile(r"(\S+) (-?[\d.]+) us")


def alone_us(
    subject: CompiledSubject,
    sets: Sets,
    own: Mapping[str, int],
    scale: float,
    stopwatch: Stopwatch,
) -> dict[str, float]:
    """Microseconds of each kernel of a call (of all its launches), timed quickly and repeated
    without the others. Empty for a call of one kernel.

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


def again_text(us: float) -> str:
    """One line: the time of the same kernel, timed in the same pass as another finalist."""
    return f"again {us:.4f} us"


def read_again(log: str) -> float | None:
    """The inverse of `again_text`; None for another log."""
    said = _AGAIN.search(log)
    return float(said[1]) if said else None


def device_us(device: Device, burst: Burst) -> float:
    """Microseconds that the kernels of one call run, by PyTorch's profiler; of kernels that
    overlap the sum. Those of the predecessors are left out.

    Args:
        device: where.
        burst: prepared; it was replayed before.

    Raises:
        BenchmarkError: without torch, or when the profiler saw no kernel.
    """
    torch = import_torch(device)
    whole = _recorded(torch, device, burst.enqueue)
    alone = _recorded(torch, device, burst.enqueue_alone)
    found = 0.0
    for name, (count, us) in whole.items():
        others, _ = alone.get(name, (0, 0.0))
        found += us * max(0, count - others) / count
    if not found:
        raise BenchmarkError("the profiler saw no kernel", status=Status.UNAVAILABLE)
    return found / burst.n


def _recorded(torch: Any, device: Device, work: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Count and microseconds of each kernel that some work launches, by name."""
    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
        work()
        device.wait()
    return {
        event.key: (event.count, event.self_device_time_total)
        for event in seen.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }


def read(line: str) -> dict[str, float]:
    """The inverse of `described`, to a hundredth of a microsecond; empty for another log."""
    said = _ALONE.search(line)
    return {name: float(us) for name, us in _ONE.findall(said[1])} if said else {}
