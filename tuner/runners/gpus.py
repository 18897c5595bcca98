"""Which GPUs of this machine measure: those that were named, or all that are alike and free."""

from __future__ import annotations

from collections.abc import Callable

from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import OLDEST_CAPABILITY, Gpu
from tuner.measure import device


def parse_devices(text: str) -> tuple[int, ...] | None:
    """CUDA devices from ``0``, ``0,1`` or ``all``, which is None.

    Raises:
        ConfigError: when it is none of these.
    """
    if text == "all":
        return None
    numbers = tuple(int(part) for part in text.split(",") if part.strip().isdecimal())
    if len(numbers) != text.count(",") + 1 or len(set(numbers)) != len(numbers):
        raise ConfigError(
            f"device={text} is out of range (allowed: 0 or more, several as in 0,1, or all)"
        )
    return numbers


def choose(devices: tuple[int, ...] | None, note: Callable[[str], None]) -> tuple[int, ...]:
    """The devices to measure on, all of one kind; empty where nothing can be measured.

    Times of different GPUs must not mix in one search. Devices that differ from the first, and busy
    devices, are left out unless they were named.

    Args:
        devices: CUDA device numbers; None: all of this machine.
        note: receives notices for the user.

    Raises:
        ConfigError: when a named device does not exist, or differs from the first.
    """
    named = devices or tuple(range(device.count())) or (0,)
    gpus = {index: gpu for index in named if (gpu := device.detect(index)) is not None}
    missing = [index for index in named if index not in gpus]
    if missing == [0] and len(named) == 1:
        note("no GPU found: nothing is measured here")
        return ()
    if missing:
        here = f"0 to {device.count() - 1}" if device.count() else "none is here"
        raise ConfigError(f"device={missing[0]} is not a CUDA device of this machine ({here})")
    first = gpus[named[0]]
    if not first.is_served:
        note(
            f"{first.name} has compute capability {first.compute_capability}, the kernels need "
            f"{OLDEST_CAPABILITY} or newer: nothing is measured here"
        )
        return ()
    alike = [named[0]]
    for index in named[1:]:
        difference = _difference(gpus[index], index, first, named[0])
        if not difference:
            alike.append(index)
        elif devices is None:
            note(f"{difference}: left out")
        else:
            raise ConfigError(f"{difference}: times of unlike GPUs cannot be compared")
    free = _free(alike, note, all_named=devices is not None)
    if len(free) > 1:
        note(f"measuring on {len(free)} GPUs: {', '.join(map(str, free))}")
    return free


def _difference(gpu: Gpu, index: int, first: Gpu, lead: int) -> str:
    """Difference of a device from the first; empty if they are of one kind."""
    if gpu.identity != first.identity:
        other, own = (f"{which.name} ({which.sm_count} SMs)" for which in (gpu, first))
        return f"device {index} is {other}, device {lead} {own}"
    ours, theirs = device.environment(lead).facts, device.environment(index).facts
    for fact in sorted({*ours, *theirs}):
        if ours.get(fact) != theirs.get(fact):
            return f"device {index} has {fact} {theirs.get(fact)}, device {lead} {ours.get(fact)}"
    return ""


def _free(devices: list[int], note: Callable[[str], None], *, all_named: bool) -> tuple[int, ...]:
    """Without those that others compute on, unless they were named or none is left."""
    occupied: dict[int, str] = {}
    for index in devices:
        try:
            occupants = device.occupants(index)
        except BenchmarkError as exc:
            note(f"whether others use the GPU is not known: {exc}")
            continue
        if occupants:
            occupied[index] = ", ".join(occupants)
    keeps_all = all_named or len(occupied) == len(devices)
    for index, who in occupied.items():
        outcome = "times will be unsteady" if keeps_all else "it is left out"
        which = f"device {index}" if len(devices) > 1 else "the GPU"
        note(f"{which} is used by {who}: {outcome}")
    return tuple(index for index in devices if keeps_all or index not in occupied)
