"""Fit of `paged_schedule.RATES` to timed schedules of paged decoding.

A row has a batch (``problem``, ``queries`` and ``keys`` of each sequence) and the microseconds of
each schedule by name (``schedules``, as `NAME` reads it). Kernels of one group of warps count, in
plain decoding in bf16, at schedules of at most 2.5 times their batch's fastest. Errors are
relative, and weigh less where a schedule is slow. A kernel is chosen before its splits, so that
each kernel's schedules stand for themselves. Two fits to half the rows judge it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, cast

from tuner.errors import ConfigError
from tuner.families.attention_instances import instance
from tuner.families.fitting import Constants, FitGroup, least_squares
from tuner.families.fused_attention import paged_schedule
from tuner.families.fused_attention.paged_schedule import Combine, Decoding, ScheduleRates
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, problem_from_json

_MAX_RATIO = 2.5
"""Schedules slower than this over the fastest of their batch are left out."""
_EVEN_WEIGHT = 3.0
"""Weight of a batch of equal lengths: few of them were measured, and many are in use."""
_START = ScheduleRates(3.0, 0.8, 1.0, 4e6, 2.0, 0.25, 1.0, 0.5, 0.5, 0.8)
MAX_QUERIES = 8
"""Queries of a sequence of decoding, at most."""
NAME = re.compile(r"1/(\d+)/\d+/(\d+)/\d+/(\d+)(.*)")
"""A kernel of one group of warps: its keys of a tile, packed heads, splits, and further words."""


class TimedSchedule(NamedTuple):
    """A batch as its kernel sees it, and the time of a schedule."""

    batch: Decoding
    splits: int
    combine: Combine
    us: float

    def expected_us(self, rates: Constants) -> float:
        """Expected time."""
        every = ScheduleRates(**rates)
        return paged_schedule.expected_us(self.batch, self.splits, self.combine, every)


Batch = list[TimedSchedule]
"""The schedules of one kernel at one batch."""


def loss(batch: Batch, rates: Constants) -> float:
    """Time of the schedule that rates choose, as `paged_schedule.best` does, over the fastest,
    less one.
    """
    times = [(t.expected_us(rates), t) for t in batch]
    of = batch[0].batch
    bound_us = (1 + paged_schedule.TIE * of.mean / of.longest) * min(us for us, _ in times)
    near = ((t.splits, us, t.us) for us, t in times if us <= bound_us)
    return min(near)[-1] / min(t.us for t in batch) - 1


def fitted(batches: Sequence[Batch]) -> dict[str, float]:
    """Constants of one instance, by least squares of weighted relative errors."""
    near: list[tuple[float, TimedSchedule]] = []
    for batch in batches:
        least = min(t.us for t in batch)
        for t in batch:
            if t.us < _MAX_RATIO * least:
                is_even = t.batch.mean == t.batch.longest
                near.append((least / t.us * (_EVEN_WEIGHT if is_even else 1), t))

    def errors(rates: Constants) -> list[float]:
        return [weight * math.log(t.expected_us(rates) / t.us) for weight, t in near]

    rates = least_squares(errors, _START._asdict(), 3, f_scale=0.1)
    if all(t.batch.blocks_per_sm == 1 for _, t in near):
        rates["shared_tile_us"] = rates["tile_us"]
    return rates


def _schedules(row: Mapping[str, Any], gpu: Gpu) -> list[Batch]:
    """Timed schedules of each kernel that the runtime chooses from."""
    if not (schedules := row.get("schedules")):
        return []
    problem = cast(AttentionProblem, problem_from_json(row["problem"]))
    queries, keys = row["queries"], row["keys"]
    kernels: dict[tuple[int, int, frozenset[str]], Batch] = {}
    is_plain = not (problem.is_windowed or problem.has_sinks or problem.softcap)
    if not is_plain or problem.dtype != "bfloat16" or max(queries) > MAX_QUERIES:
        return []
    blocks_per_sm = 2 if problem.head_dim <= 128 else 1
    for name, us in schedules.items():
        if (parts := NAME.fullmatch(name)) is None:
            continue
        tile_n, packed, splits = map(int, parts.groups()[:3])
        words = parts[4].split()
        if "persistent" in words:  # blocks share keys by the lengths, not by splits
            continue
        combine: Combine = (
            "cluster" if "cluster" in words else "kernel" if "kernel" in words else ""
        )
        of_cluster = combine == "cluster"
        splits_of = paged_schedule.CLUSTER_SPLITS if of_cluster else paged_schedule.KERNEL_SPLITS
        if splits > 1 and splits not in splits_of:
            continue
        heads = problem.heads_kv if "padded" in words else problem.heads_q // packed
        batch = Decoding(
            instance(problem.head_dim),
            tile_n,
            blocks_per_sm,
            gpu.sm_count * blocks_per_sm,
            heads * sum(-(-count * packed // 64) for count in queries),
            sum(queries) * problem.heads_q,
            max(keys),
            round(fmean(keys)),
            len(keys) * 4 * problem.heads_kv * problem.head_dim,
        )
        kernel = tile_n, packed, frozenset(words) - {combine}
        kernels.setdefault(kernel, []).append(TimedSchedule(batch, splits, combine, us))
    return list(kernels.values())


def timed(documents: Sequence[Mapping[str, Any]], gpu: Gpu) -> list[Batch]:
    """The timed schedules of each batch, those of a row one after the other.

    Raises:
        ConfigError: when there is none.
    """
    batches = [batch for row in documents for batch in _schedules(row, gpu)]
    if not batches:
        raise ConfigError("no schedule was timed (wanted: rows of scripts/bench paged --schedules)")
    return batches


def groups(rows: Sequence[Mapping[str, Any]], gpu: Gpu) -> Iterator[FitGroup]:
    """The constants of each instance that the rows time.

    Raises:
        ConfigError: when they time no schedule.
    """
    batches = timed(rows, gpu)
    number = {id(batch): place for place, batch in enumerate(batches)}
    for width in sorted({batch[0].batch.instance for batch in batches}):
        mine = [batch for batch in batches if batch[0].batch.instance == width]
        ships = paged_schedule.RATES[width]._asdict()
        yield FitGroup(f"D={width}", mine, ships, fitted, loss, lambda batch: number[id(batch)] % 2)
