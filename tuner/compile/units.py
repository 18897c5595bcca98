"""Kernels queued for the compiler, and the units they are built in."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from tuner.compile.artifacts import Artifact
from tuner.families.base import KernelSpec

SPREAD = 2
"""Kernels of a unit whatever their `KernelSpec.together`, where cores for all of them are idle, but
not for twice as many. More keep a core busy for longer than the search waits. Alone, each of two
kernels takes three quarters of the pair's time, and 16 logical cores compile what 8 whole ones do.
"""
UNLIKE = 8
"""Most unlike kernels of a unit (`KernelSpec.instance`), which its memory depends on."""


@dataclass
class KernelJob:
    """Kernel in the compiler's queue."""

    spec: KernelSpec
    key: str
    future: Future[Artifact]
    alone: bool = False
    """True after its unit failed: it is then built alone."""
    cpu_s: float = 0.0
    """Its share of the CPU-seconds of failed units."""
    owners: set[Hashable] = field(default_factory=set)
    """Submitters that still want it."""
    is_first: bool = False
    """True for the first kernel of a submitter, which waits for an answer."""


@dataclass(eq=False)
class Unit:
    """Kernels that are built together in one translation unit."""

    jobs: Sequence[KernelJob]
    began: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when no kernel of the unit has an owner any more."""
    folder: Path | None = None
    """Working folder of its compiler."""


def fixed_units(specs: Iterable[KernelSpec], size: int) -> list[list[KernelSpec]]:
    """Groups of at most `size` kernels of one template that depend on the kernels only, so that
    equal lists give equal libraries.
    """
    units: list[list[KernelSpec]] = []
    waiting = sorted(set(specs), key=lambda spec: (spec.template, spec.instance, spec.key))
    while waiting:
        units.append(waiting[: fitting(waiting, size)])
        del waiting[: len(units[-1])]
    return units


def fitting(specs: Sequence[KernelSpec], size: int) -> int:
    """Number of kernels, from the first on, that may be one unit: at most `size` of its template,
    and `UNLIKE` unlike ones.
    """
    instances: set[str] = set()
    for count, spec in enumerate(specs):
        instances.add(spec.instance)
        is_other = spec.template != specs[0].template
        if count == size or is_other or len(instances) > UNLIKE:
            return count
    return len(specs)


def unit_size(first: KernelJob, waiting: int, idle: int, most: int) -> int:
    """Number of kernels of the next unit.

    Args:
        first: its first kernel.
        waiting: number of kernels that wait.
        idle: number of units that may be begun, at least one.
        most: largest size.
    """
    least, shares = first.spec.together, -(-waiting // idle)
    if first.is_first and waiting <= least * (idle - 1):
        return 1  # the answer comes sooner, and the others have cores
    if idle >= SPREAD * waiting:
        return 1
    return min(most, SPREAD if shares <= SPREAD else max(least, shares))


@dataclass(frozen=True)
class Underway:
    """Kernel that is being built."""

    elapsed_s: float
    """Seconds since its unit started."""
    kernels: int
    """Number of kernels in its unit."""


def shared(spec: KernelSpec, other: KernelSpec) -> tuple[int, int]:
    """Numbers of equal variables of two kernels: of `KernelSpec.instances`, and of all. The more
    are equal, the more instantiations the kernels share.
    """
    equal = [name for name, value in spec.variables.items() if other.variables.get(name) == value]
    return sum(name in spec.instances for name in equal), len(equal)
