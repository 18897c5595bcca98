"""Kernels that wait for the compiler, the units built of them, and the memory that they take."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from tuner.compile.artifacts import Artifact
from tuner.families.base import KernelSpec


@dataclass
class KernelJob:
    """A kernel that is to be compiled."""

    spec: KernelSpec
    key: str
    future: Future[Artifact]
    alone: bool = False
    """Set when its unit failed: build it by itself."""
    cpu_s: float = 0.0
    """Its share of the units that failed."""
    owners: set[Hashable] = field(default_factory=set)
    """Submitters that still want it."""


@dataclass(eq=False)
class Unit:
    """Kernels that are built together."""

    jobs: Sequence[KernelJob]
    began: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when nobody wants any of it."""
    folder: Path | None = None
    """Folder that its compiler works in."""


@dataclass(frozen=True)
class Underway:
    """A kernel that is being built."""

    elapsed_s: float
    """Since its unit began."""
    kernels: int
    """Kernels of its unit."""


def available_bytes(proc: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be used now: the machine's, or the control group's where that is less."""
    machine = _table(proc / "meminfo").get("MemAvailable:", 64 << 20) * 1024
    limit, used = (next(_lines(group / f"memory.{n}"), "") for n in ("max", "current"))
    if not (limit.isdigit() and used.isdigit()):
        return machine
    held = _table(group / "memory.stat")  # the page cache counts as used and can be dropped
    cached = held.get("inactive_file", 0) + held.get("active_file", 0)
    return max(0, min(machine, int(limit) - int(used) + cached))


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return


def shared(spec: KernelSpec, other: KernelSpec) -> int:
    """How many variables of two kernels are equal: the more, the more instantiations they share."""
    return sum(other.variables.get(name) == value for name, value in spec.variables.items())
