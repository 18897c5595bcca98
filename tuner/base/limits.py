"""CPUs and memory that this process may use: the machine's, within its control groups.

A control group's limit holds for all below it. So the least counts of the process's own group and
of those above it, in version 2 and in version 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import ceil
from pathlib import Path

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60
"""Version 1 writes no limit as a number of about 2^63."""


def cpu_count(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """CPUs of this process: those that it may run on, or its quota if that is less."""
    count = len(os.sched_getaffinity(0))
    for folder in _folders("cpu", proc, groups):
        quota, period = ([*_words(folder / "cpu.max"), "", ""])[:2]
        if not quota:
            quota, period = (
                next(_words(folder / f"cpu.cfs_{name}_us"), "") for name in ("quota", "period")
            )
        if quota.isdigit() and period.isdigit() and int(period):
            count = min(count, ceil(int(quota) / int(period)))
    return max(1, count)


def available_bytes(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Bytes of free memory: the machine's or a control group's, whichever is least."""
    available = _table(proc / "meminfo").get("MemAvailable:", 64 << 20) * 1024
    for folder in _folders("memory", proc, groups):
        for limit_name, used_name, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            limit, used = (next(_words(folder / name), "") for name in (limit_name, used_name))
            if not (limit.isdigit() and used.isdigit()) or int(limit) > NO_LIMIT:
                continue
            stat = _table(folder / "memory.stat")  # the page cache counts as used, can be dropped
            names = (f"{prefix}inactive_file", f"{prefix}active_file")
            cached = sum(stat.get(name, 0) for name in names)
            available = min(available, max(0, int(limit) - int(used) + cached))
    return available


def _folders(controller: str, proc: Path, groups: Path) -> Iterator[Path]:
    """Folders of the process's control groups, its own first. In a container the path may be the
    host's, of which only the root is there.
    """
    rows = list(_lines(proc / "self" / "cgroup")) or ["0::/"]
    for row in rows:
        _, controllers, path = ([*row.split(":", 2), "", ""])[:3]
        names = controllers.split(",") if controllers else []
        if names and controller not in names:
            continue
        roots = [groups] if not names else [groups / controllers, groups / controller]
        for root in dict.fromkeys(roots):
            group = Path(path.lstrip("/"))
            for parent in (group, *group.parents):
                if (root / parent).is_dir():
                    yield root / parent


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _words(path: Path) -> Iterator[str]:
    for line in _lines(path):
        yield from line.split()


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text().splitlines()
    except OSError:
        return
