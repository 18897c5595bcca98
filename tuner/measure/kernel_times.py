"""Times of the kernels within one call: each timed alone, and as the profiler reports them.

A call's time beyond the sum of its kernels timed alone is spent between its launches. Its time
beyond the profiler's durations is the launch itself and the predecessor's effect on the caches.
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
    """Microseconds of each kernel of a call over all its launches, timed quickly without the other
    kernels. Empty for a call of one kernel.

    Args:
        subject: subject that has already run on these buffers.
        sets: sets of operands.
        own: scratch and workspace of the subject.
        scale: see `Family.launches`.
        stopwatch: stopwatch that times them under the whole call's regime.
    """
    parts = subject.parts()
    times: dict[str, float] = {}
    for name, part in parts.items() if len(parts) > 1 else ():
        burst = stopwatch.prepare(entrant(part, sets, own, scale))
        try:
            timing, _ = stopwatch.quick(burst)
        finally:
            burst.close()
        times[name] = timing.median_us
    return times


def described(times: Mapping[str, float], whole_us: float) -> str:
    """Format the kernels' times, and the rest of the whole call's time, as one line. The rest is
    negative if kernels overlap, or if a kernel alone finds data in the L2 that it misses within the
    call.
    """
    if not times:
        return ""
    parts = ", ".join(f"{name} {us:.2f} us" for name, us in times.items())
    return f"alone {parts}; between launches {whole_us - sum(times.values()):.2f} us"


def again_text(us: float) -> str:
    """Format the control's time, of the same kernel as a second participant of the pass, as one
    line.
    """
    return f"again {us:.4f} us"


def read_again(log: str) -> float | None:
    """Inverse of `again_text`; None for another log."""
    match = _AGAIN.search(log)
    return float(match[1]) if match else None


def device_us(device: Device, burst: Burst) -> float:
    """Microseconds that the kernels of one call run, by PyTorch's profiler. Overlapping kernels are
    summed. Predecessors are left out.

    Args:
        device: device to run on.
        burst: prepared burst that has been replayed before.

    Raises:
        BenchmarkError: without torch, or when the profiler saw no kernel.
    """
    torch = import_torch(device)
    whole = _recorded(torch, device, burst.enqueue)
    alone = _recorded(torch, device, burst.enqueue_alone)
    total = 0.0
    for name, (count, us) in whole.items():
        count_alone, _ = alone.get(name, (0, 0.0))
        total += us * max(0, count - count_alone) / count
    if not total:
        raise BenchmarkError("the profiler saw no kernel", status=Status.UNAVAILABLE)
    return total / burst.n


def _recorded(torch: Any, device: Device, work: Callable[[], None]) -> dict[str, tuple[int, float]]:
    """Count and total microseconds of each kernel that `work` launches, by name."""
    profiler = torch.profiler
    # Without `acc_events` PyTorch warns that a next cycle would lose these events.
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
        device.wait()
    return {
        event.key: (event.count, event.self_device_time_total)
        for event in profile.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }


def read(line: str) -> dict[str, float]:
    """Inverse of `described`, to a hundredth of a microsecond; empty for another log."""
    match = _ALONE.search(line)
    return {name: float(us) for name, us in _ONE.findall(match[1])} if match else {}
