"""``scripts/bench paged --fit FILE ...``: constants of `paged_schedule.RATES` from timed schedules.

A FILE is what ``scripts/bench paged --json`` wrote with its pass over all schedules. Kernels of one
group of warps count, at schedules of at most 2.5 times their case's fastest. Errors are relative,
and weigh less where a schedule is slow. The constants of each instance are judged at the half of
the cases that a fit leaves out.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.paged_batches import Case, cases
from tuner.errors import ConfigError
from tuner.families.fused_attention.paged_schedule import (
    CLUSTER_SPLITS,
    KERNEL_SPLITS,
    TIE,
    Combine,
    Decoding,
    ScheduleRates,
    expected_us,
)
from tuner.families.fused_attention.registers import instance
from tuner.hardware import DEFAULT_GPU

#: Schedules slower than this over the fastest of their case are left out.
_MAX_RATIO = 2.5
#: Groups of cases that count: plain decoding in bf16.
_GROUPS = ("decode", "few", "unlike", "narrow", "ratios")
#: Weight of a batch of equal lengths: few of them are in the evidence, and many in use.
_EVEN_WEIGHT = 3.0
_START = ScheduleRates(3.0, 0.8, 1.0, 4e6, 2.0, 0.25, 1.0, 0.5, 0.5, 0.8)
_NAME = re.compile(r"1/(\d+)/\d+/(\d+)/\d+/(\d+)(.*)")
"""A kernel of one group, as `paged.short` names it."""


class TimedSchedule(NamedTuple):
    """A schedule of a case, and its time."""

    case: str
    batch: Decoding
    splits: int
    combine: Combine
    us: float

    def expected(self, rates: ScheduleRates) -> float:
        """Expected time, microseconds."""
        return expected_us(self.batch, self.splits, self.combine, rates)


def schedule_of(case: Case, name: str, us: float) -> TimedSchedule | None:
    """A timed schedule; None for kernels and schedules that the runtime does not choose from."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return None
    tile_n, packed, splits, words = int(parts[1]), int(parts[2]), int(parts[3]), parts[4].split()
    combine: Combine = "cluster" if "cluster" in words else "kernel" if "kernel" in words else ""
    if splits > 1 and splits not in (CLUSTER_SPLITS if combine == "cluster" else KERNEL_SPLITS):
        return None
    heads = case.heads_kv if "padded" in words else case.heads_q // packed
    rows = sum(case.queries)
    blocks_per_sm = 2 if case.head_dim <= 128 else 1
    batch = Decoding(
        instance(case.head_dim),
        tile_n,
        blocks_per_sm,
        DEFAULT_GPU.sm_count * blocks_per_sm,
        heads * sum(-(-queries * packed // 64) for queries in case.queries),
        rows * case.heads_q,
        max(case.keys),
        round(statistics.mean(case.keys)),
        len(case.keys) * case.token_bytes,
    )
    return TimedSchedule(case.label(), batch, splits, combine, us)


def timed(documents: Iterable[Mapping[str, Any]]) -> list[TimedSchedule]:
    """The schedules of several results.

    Raises:
        ConfigError: when there is none.
    """
    by_label = {case.label(): case for case in cases([])}
    rows = (
        schedule_of(by_label[row["case"]], name, us)
        for document in documents
        for row in document.get("runs", [document])[-1]["cases"]
        if row["group"] in _GROUPS and row["case"] in by_label
        for name, us in row["schedules"].items()
    )
    every = [row for row in rows if row is not None]
    if not every:
        raise ConfigError("no schedule was timed (allowed: results of `scripts/bench paged` "
                          "without --selected)")  # fmt: skip
    return every


def _fastest(rows: Iterable[TimedSchedule]) -> dict[str, float]:
    fastest: dict[str, float] = {}
    for row in rows:
        fastest[row.case] = min(row.us, fastest.get(row.case, math.inf))
    return fastest


def fitted(rows: Sequence[TimedSchedule]) -> ScheduleRates:
    """Constants of one instance, by least squares of weighted relative errors."""
    from scipy.optimize import least_squares

    fastest = _fastest(rows)
    near = [row for row in rows if row.us < _MAX_RATIO * fastest[row.case]]

    def errors(logarithms: Sequence[float]) -> list[float]:
        rates = ScheduleRates(*map(math.exp, logarithms))
        weights = (
            fastest[row.case]
            / row.us
            * (_EVEN_WEIGHT if row.batch.mean == row.batch.longest else 1)
            for row in near
        )
        return [w * math.log(row.expected(rates) / row.us)
                for w, row in zip(weights, near, strict=True)]  # fmt: skip

    start = [math.log(value) for value in _START]
    solution = least_squares(errors, start, loss="soft_l1", f_scale=0.1)
    rates = ScheduleRates(*(float(f"{math.exp(value):.3g}") for value in solution.x))
    is_shared = any(row.batch.blocks_per_sm > 1 for row in near)
    return rates if is_shared else rates._replace(shared_tile_us=rates.tile_us)


def regrets(rows: Sequence[TimedSchedule], rates: Mapping[int, ScheduleRates]) -> list[float]:
    """By case: time of the schedule that the rates choose over the fastest."""
    by_case: dict[str, list[TimedSchedule]] = {}
    for row in rows:
        by_case.setdefault(row.case, []).append(row)
    return [_chosen(same, rates).us / min(row.us for row in same) for same in by_case.values()]


def _read(path: Path) -> Any:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return json.load(file)


def _chosen(same: Sequence[TimedSchedule], rates: Mapping[int, ScheduleRates]) -> TimedSchedule:
    """The schedule of a case that is chosen as `paged_schedule.best` does."""
    times = [row.expected(rates[row.batch.instance]) for row in same]
    bound_us = (1 + TIE * same[0].batch.mean / same[0].batch.longest) * min(times)
    near = [number for number, us in enumerate(times) if us <= bound_us]
    return same[min(near, key=lambda number: (same[number].splits, times[number]))]


def report(paths: Sequence[Path]) -> int:
    """Fit, judge and print, from files of ``scripts/bench paged``.

    Raises:
        ConfigError: when a file cannot be read, or holds no timed schedule.
    """
    try:
        rows = timed(map(_read, paths))
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"the results cannot be read: {exc!r}") from exc
    order = {case: number for number, case in enumerate(dict.fromkeys(row.case for row in rows))}
    instances = sorted({row.batch.instance for row in rows})
    rates: dict[int, ScheduleRates] = {}
    halves: list[float] = []
    for width in instances:
        mine = [row for row in rows if row.batch.instance == width]
        rates[width] = fitted(mine)
        print(f"{width}: {rates[width]}")
    for left_out in (0, 1):
        part = {width: fitted([row for row in rows if row.batch.instance == width
                               and order[row.case] % 2 != left_out])
                for width in instances}  # fmt: skip
        halves += regrets([row for row in rows if order[row.case] % 2 == left_out], part)
    for name, found in (("fitted", regrets(rows, rates)), ("left out", halves)):
        mean = statistics.geometric_mean(found)
        print(f"{name}: {len(rows)} schedules of {len(found)} cases, chosen over fastest "
              f"{mean:.3f}, worst {max(found):.3f}")  # fmt: skip
    return 0
