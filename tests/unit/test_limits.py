"""CPUs and memory of control groups: version 1, version 2, nested, and in containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tuner.base.limits import available_bytes, cpu_count

MIB = 1 << 20
NONE_V1 = str((1 << 63) - 4096)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 CPUs and 1000 MiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    write(tmp_path, {"proc/meminfo": f"MemAvailable: {1000 * 1024} kB"})


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def limits(tmp_path: Path, membership: str, files: dict[str, str]) -> tuple[int, int]:
    """CPUs and MiB."""
    groups = {f"groups/{name}": text for name, text in files.items()}
    write(tmp_path, {"proc/self/cgroup": membership, **groups})
    (tmp_path / "groups").mkdir(exist_ok=True)
    places = tmp_path / "proc", tmp_path / "groups"
    return cpu_count(*places), available_bytes(*places) // MIB


def memory(folder: str, limit: str, used: int) -> dict[str, str]:
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": str(used * MIB)}


def memory_v1(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": str(used * MIB),
        f"{folder}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached * MIB}",
    }


def test_without_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    places = tmp_path / "proc", tmp_path / "groups"
    assert (cpu_count(*places), available_bytes(*places)) == (16, 1000 * MIB)


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 16), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1)],
)
def test_a_quota_of_cpus(tmp_path: Path, quota: str, cpus: int) -> None:
    assert limits(tmp_path, "0::/job", {"job/cpu.max": quota}) == (cpus, 1000)


@pytest.mark.parametrize("inner", ["max", str(900 * MIB)])
def test_the_least_of_nested_groups_counts(tmp_path: Path, inner: str) -> None:
    files = {**memory("user/job/step", inner, 10), **memory("user/job", str(500 * MIB), 100)}
    files |= {"user/job/step/cpu.max": "max 100000", "user/cpu.max": "300000 100000"}
    assert limits(tmp_path, "0::/user/job/step", files) == (3, 400)


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    files = {**memory(".", str(300 * MIB), 100), "cpu.max": "400000 100000"}
    assert limits(tmp_path, "0::/kubepods/pod1/other", files) == (4, 200)


def test_version_1(tmp_path: Path) -> None:
    membership = "5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n3:cpuset:/docker/a\n1:name=x:/"
    files = {
        **memory_v1("memory/docker/a", NONE_V1, 300),
        **memory_v1("memory/docker", str(600 * MIB), 300, cached=50),
        "cpu,cpuacct/docker/a/cpu.cfs_quota_us": "250000",
        "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000",
        "cpu,cpuacct/docker/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/docker/cpu.cfs_period_us": "100000",
    }
    assert limits(tmp_path, membership, files) == (3, 350)


def test_a_group_that_is_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/job", memory("job", str(100 * MIB), 200)) == (16, 0)
