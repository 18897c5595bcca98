"""Counters of Nsight Compute: their names and meanings, and profiles read and stored.

A profile is a JSON file under ``profiles/`` of the cache folder, named by its problem, GPU and
config. `tuner.measure.nsight` makes it; reports show it.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tuner import settings
from tuner.base import document, output
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import Gpu
from tuner.measurement import Environment, Regime, Status
from tuner.problem import Problem, problem_from_json

FORMAT = "cutlass-tuner profile"
VERSION = 1


@dataclass(frozen=True)
class Counter:
    """One metric of Nsight Compute [Kernel Profiling Guide, "Metrics Reference"]."""

    metric: str
    label: str
    says: str


_ACTIVE, _ELAPSED = "avg.pct_of_peak_sustained_active", "avg.pct_of_peak_sustained_elapsed"
#: Utilisation of units in percent of their peak: over the cycles in which multiprocessors are
#: active, and for L2 and memory over all cycles.
SHARES: tuple[Counter, ...] = (
    Counter(
        f"sm__pipe_tensor_cycles_active.{_ACTIVE}",
        "tensor cores",
        "cycles with a product under way",
    ),
    Counter(
        f"sm__inst_executed_pipe_xu.{_ACTIVE}",
        "special-function units",
        "exponentials and conversions issued",
    ),
    Counter(f"sm__inst_executed_pipe_fma.{_ACTIVE}", "FMA pipes", "multiplications and additions"),
    Counter(f"sm__inst_executed_pipe_alu.{_ACTIVE}", "ALU pipes", "maxima, integers, logic"),
    Counter(f"smsp__issue_active.{_ACTIVE}", "issue slots", "cycles that issued an instruction"),
    Counter(f"lts__t_sectors.{_ELAPSED}", "L2 cache", "sectors looked up"),
    Counter(f"dram__throughput.{_ELAPSED}", "memory", "bytes to and from HBM"),
    Counter(f"sm__warps_active.{_ACTIVE}", "occupancy", "resident warps of the most that fit"),
)
DURATION, CLOCK = "gpu__time_duration.sum", "smsp__cycles_elapsed.avg.per_second"
CYCLES_ACTIVE, CYCLES = "sm__cycles_active.avg", "sm__cycles_elapsed.max"
#: Other counters, in the units of ``--print-units base``.
FACTS: tuple[Counter, ...] = (
    Counter(DURATION, "duration", "under the profiler, kernel by kernel, without neighbours"),
    Counter(CLOCK, "SM clock", "while it was profiled; not locked"),
    Counter(CYCLES, "cycles", "from the kernel's start to its end"),
    Counter(CYCLES_ACTIVE, "active cycles", "mean over the multiprocessors"),
    Counter("lts__t_sector_hit_rate.pct", "L2 hit rate", "sectors that were there"),
    Counter("lts__t_bytes.sum", "L2 bytes", "looked up in the L2"),
    Counter("dram__bytes_read.sum", "memory read", "from HBM"),
    Counter("dram__bytes_write.sum", "memory written", "to HBM"),
    Counter(
        "l1tex__data_bank_conflicts_pipe_lsu.sum",
        "bank conflicts",
        "cycles that shared memory lost to them",
    ),
    Counter("launch__registers_per_thread", "registers", "of a thread at launch"),
)
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
#: Mean number of warps that are stalled for each reason when an instruction is issued.
STALLS: tuple[Counter, ...] = tuple(
    Counter(_STALL.format(name), label, "warps waiting when an instruction is issued")
    for name, label in (
        ("barrier", "barrier of the block"),
        ("branch_resolve", "branch"),
        ("dispatch_stall", "dispatch"),
        ("gmma", "WGMMA"),
        ("lg_throttle", "queue of local and global accesses"),
        ("long_scoreboard", "memory or L2"),
        ("math_pipe_throttle", "arithmetic pipe busy"),
        ("membar", "memory barrier"),
        ("mio_throttle", "queue of shared memory and special functions"),
        ("no_instruction", "instruction fetch"),
        ("not_selected", "another warp was chosen"),
        ("short_scoreboard", "shared memory or special functions"),
        ("sleeping", "asleep"),
        ("wait", "fixed latency"),
    )
)
COUNTERS = (*SHARES, *FACTS, *STALLS)


@dataclass(frozen=True)
class Value:
    """Value of a counter."""

    value: float
    unit: str
    """Unit as Nsight Compute names it: ``%``, ``nsecond``, ``byte``, ``cycle``."""


@dataclass(frozen=True)
class KernelCounters:
    """Counters of one launch within a call."""

    kernel: str
    counters: Mapping[str, Value]
    """Values by metric. A metric that this version of Nsight Compute or this chip lacks is
    absent."""

    def get(self, metric: str) -> float | None:
        """Value of a counter; None if it was not counted."""
        value = self.counters.get(metric)
        return None if value is None else value.value

    def shown(self, counters: Sequence[Counter]) -> list[tuple[Counter, Value]]:
        """The given counters that were counted, in order."""
        return [(c, self.counters[c.metric]) for c in counters if c.metric in self.counters]


@dataclass(frozen=True)
class Profile:
    """Counters of one call of a config."""

    problem: Problem
    gpu: Gpu
    regime: Regime
    config: Config
    environment: Environment
    """Environment; ``ncu`` is the profiler's version."""
    kernels: tuple[KernelCounters, ...]
    created_at: str

    @property
    def main(self) -> KernelCounters:
        """Launch with the longest duration."""
        return max(self.kernels, key=lambda kernel: kernel.get(DURATION) or 0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "problem": self.problem.to_json(),
            "gpu": asdict(self.gpu),
            "regime": self.regime.key,
            "config": self.config.to_json(),
            "environment": dict(self.environment.facts),
            "created_at": self.created_at,
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """The inverse of `to_json`.

        Raises:
            ConfigError: when it is not a profile, or is of another version.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ConfigError(f"not a profile (its 'format' is not '{FORMAT}')")
        if data.get("version") != VERSION:
            raise ConfigError(
                f"the profile has version {data.get('version')!r} (this tuner reads {VERSION})"
            )
        try:
            kernels = tuple(
                KernelCounters(
                    str(row["kernel"]),
                    {
                        metric: Value(float(v["value"]), str(v["unit"]))
                        for metric, v in row["counters"].items()
                    },
                )
                for row in data["kernels"]
            )
            if not kernels:
                raise ConfigError("it holds no kernel")
            return cls(
                problem_from_json(data["problem"]),
                Gpu(**document.checked(Gpu, data["gpu"])),
                Regime.parse(data["regime"]),
                Config.from_json(data["config"]),
                Environment(dict(data["environment"])),
                kernels,
                str(data["created_at"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            raise ConfigError(f"the profile is damaged: {type(exc).__name__} {exc}") from exc


def folder() -> Path:
    """Folder of the profiles on this machine."""
    return settings.cache_dir() / "profiles"


def file_name(problem: Problem, gpu: Gpu, config: Config) -> str:
    """File name of a profile, equal for the same kernel on the same GPU model."""
    identity = f"{problem.key}|{gpu.identity}|{config.digest}"
    return f"{problem.op}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def keep(profile: Profile) -> Path:
    """Write a profile to `folder`, replacing an older one. Returns its path.

    Raises:
        StoreError: when it cannot be written.
    """
    path = folder() / file_name(profile.problem, profile.gpu, profile.config)
    output.write(path, json.dumps(profile.to_json(), indent=1) + "\n", make_folder=True)
    return path


def find(problem: Problem, gpu: Gpu, config: Config) -> Profile | None:
    """Profile of a config on this machine; None if it was not profiled.

    Raises:
        ConfigError: when the file is damaged.
    """
    path = folder() / file_name(problem, gpu, config)
    try:
        return Profile.from_json(document.parse(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"profile {path}: {exc}") from exc


def read_csv(text: str) -> tuple[KernelCounters, ...]:
    """Parse the output of ``ncu --csv --page raw --print-units base``, one row a launch.

    Lines before the table (``==PROF==``, the program's output) and values like ``n/a`` are skipped.

    Raises:
        BenchmarkError: when there is no table, or no launch in it.
    """
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise BenchmarkError("the profiler wrote no table of counters", status=Status.UNAVAILABLE)
    table = csv.reader(io.StringIO("\n".join(lines[start:])))
    header, units = next(table), next(table, [])
    names = {counter.metric for counter in COUNTERS}
    launches = []
    for row in table:
        if len(row) != len(header) or not row[0].isdigit():
            continue
        cells = dict(zip(header, zip(row, units, strict=True), strict=True))
        counters = {m: v for m, v in _values(cells) if m in names}
        launches.append(KernelCounters(cells["Kernel Name"][0], counters))
    if not launches:
        raise BenchmarkError("the profiler counted no launch", status=Status.UNAVAILABLE)
    return tuple(launches)


def _values(cells: Mapping[str, tuple[str, str]]) -> Iterator[tuple[str, Value]]:
    for metric, (text, unit) in cells.items():
        try:
            yield metric, Value(float(text.replace(",", "")), unit)
        except ValueError:
            continue
