"""Splits of the keys for decoding over a paged cache, by the expected time of every schedule.

A selected kernel of one group of warps may share each sequence's keys among several blocks. A
cluster or a second kernel combines their partial results. The best number depends on how unlike
the lengths are, which a selection of the kernel does not know. The time model here counts

- blocks that run one after the other on the places of the chip,
- the block of the longest sequence, which may outlast the others,
- bytes of keys and values,
- the combination of partial results.

Constants are ``tuner develop fit paged``'s, of 8,911 schedules of 618 kernels at 271 batches
on an NVIDIA H200 (``tests/assets/fits/paged.jsonl.gz``). At batches left out of a fit the chosen
schedule takes 2.0 to 3.8 % longer than the best in the mean. Needs the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from tuner.config import Config
from tuner.families.attention_instances import instance
from tuner.families.fused_attention.packing import tile_m
from tuner.families.schedules import PagedBatch

Combine = Literal["", "cluster", "kernel"]

CLUSTER_SPLITS = (2, 3, 4, 6, 8)
KERNEL_SPLITS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
#: Part of the chip's places that clusters of a size can fill: clusters do not span GPCs, which
#: have 16 or 18 multiprocessors (measured with empty kernels on an H200).
_CLUSTER_PLACES: Mapping[int, float] = {2: 1.0, 3: 0.97, 4: 0.94, 6: 0.91, 8: 0.91}
#: Longest over mean length that is assumed where the mean is not known. With 2, the keys of 64
#: sequences of 64 to 32768 keys were not split: 1.3 times the time (an H200, 29 November 2026).
_ASSUMED_RATIO = 3
#: Order of the norm that joins the time of blocks and the time of memory, over 1 less the mean
#: length's part of the longest: the slower of both where lengths are alike, more where the last
#: blocks leave the memory idle. 4, 6 and 10 chose equally well.
_OVERLAP, _MAX_ORDER = 6.0, 60.0
#: Expected times within this part of the least are equal where all lengths are, and less where they
#: are unlike; then the fewest splits are chosen.
TIE = 0.05
#: Keys of a split at least, where the mean length is not known and every multiprocessor has a
#: block: a captured graph also serves lengths far below the longest. In a graph for 32768 keys four
#: sequences of 64 to 4096 keys took 0.80 to 0.90 times as long with eight splits as with sixteen
#: (an H200, 29 November 2026).
_ASSUMED_KEYS = 4096


#: By the instance: tiles at most for which a cluster of so many blocks stands for a kernel that
#: combines as many splits or more. Between a layer's products its code lies in no cache: there the
#: cluster took 5 to 16 % less, behind an element-wise kernel 5 % less to 8 % more (one sequence of
#: 128 to 16384 keys, an H200, 29 November 2026). At D = 64 it took 18 % more at 128 keys, 7 % less
#: at 1024 and 14 % less at 4096.
#: Last, the keys at most that this holds for: at D = 128 a kernel took 13 % less at 32768 keys.
_CLUSTERED = {64: (8, 16, 32768), 128: (8, 16, 8192)}
_MIN_CLUSTERED = 12
#: Tiles and splits of a graph whose keys clusters share, of kernels that leave them (blocks): 2 to
#: 10 % less than by a kernel that combines (4 sequences of 128 to 4096 keys, an H200, 29 November
#: 2026).
_SHARED_TILES, _SHARED_SPLITS, _SHARED_BLOCKS = 32, 4, 6


class ScheduleRates(NamedTuple):
    """Constants of the time model for the kernels of one instance of the head dimension."""

    start_us: float
    """A block's time beside its tiles of keys."""
    tile_us: float
    """A tile of keys (`_TILE_N`), where a block has a multiprocessor to itself."""
    shared_tile_us: float
    """The same where two blocks share one."""
    bytes_per_us: float
    """Keys and values read from memory."""
    kernel_us: float
    """The kernel that combines partial results."""
    partial_us: float
    """A million bytes of partial results, written and read."""
    cluster_us: float
    """Combination inside a cluster, on an empty chip."""
    cluster_load_us: float
    """Further time of that where clusters fill the chip."""
    tail: float
    """Part of the longest block that runs after the places have emptied."""
    cluster_tail: float
    """The same of clusters."""


#: Keys of a tile whose time the rates hold, where they are not 64.
_TILE_N = {64: 128}
#: By the instance (`registers.INSTANCES`). D = 192 was not measured and has the rates of 256, whose
#: kernels have its tiles and stages. Those of 512 fit ten schedules of five batches (an H200, 29
#: November 2026).
RATES: Mapping[int, ScheduleRates] = {
    64: ScheduleRates(2.37, 1.01, 1.45, 2.67e6, 4.31, 0.226, 4.91, 0.0, 0.376, 1.01),
    96: ScheduleRates(2.14, 1.17, 1.39, 3.01e6, 4.67, 0.126, 4.03, 3.19, 0.466, 0.947),
    128: ScheduleRates(2.02, 0.773, 1.29, 4.25e6, 5.42, 0.208, 4.01, 3.62, 0.394, 0.883),
    192: ScheduleRates(2.22, 1.59, 1.59, 3.43e6, 5.18, 0.118, 9.75, 0.0, 0.394, 0.744),
    256: ScheduleRates(2.22, 1.59, 1.59, 3.43e6, 5.18, 0.118, 9.75, 0.0, 0.394, 0.744),
    512: ScheduleRates(4.0, 3.4, 3.4, 4.3e6, 5.18, 0.3, 9.75, 0.0, 0.394, 0.744),
}


class Decoding(NamedTuple):
    """A batch as a kernel sees it."""

    instance: int
    """Head dimension that the kernel is compiled for."""
    tile_n: int
    """Keys of a tile."""
    blocks_per_sm: int
    places: int
    """Blocks that the chip holds at once."""
    tiles: int
    """Tiles of queries of all sequences: blocks without splits."""
    rows: int
    """Rows of the output: queries times query heads, of all sequences."""
    longest: int
    """Keys of the longest sequence, or more."""
    mean: int
    """Mean keys of a sequence; 0: not known."""
    bytes_per_key: int
    """Bytes of a position's keys and values over all sequences."""
    leaves_cluster: bool = False
    """Blocks of a cluster leave keys that one of them takes alone."""
    has_clusters: bool = True
    """Blocks of a cluster may share a tile's keys. Those of padded heads also store rows that are
    none: their clusters were never faster by more than a kernel that combines (an H200).
    """


def expected_us(
    batch: Decoding, splits: int, combine: Combine, rates: ScheduleRates | None = None
) -> float:
    """Expected time of a schedule, microseconds.

    Args:
        batch: the batch, with its mean length known.
        splits: blocks that share a tile's keys.
        combine: the way in which their results are combined; empty with one split.
        rates: constants; None: those of the instance.
    """
    rates = rates or RATES[batch.instance]
    is_cluster = combine == "cluster"
    places = batch.places * (_CLUSTER_PLACES[splits] if is_cluster else 1.0)
    rounds = batch.tiles * splits / places
    tile_us = rates.tile_us
    if batch.blocks_per_sm > 1:
        tile_us += (rates.shared_tile_us - tile_us) * min(1.0, max(0.0, 2 * rounds - 1))
    tile_us *= batch.tile_n / _TILE_N.get(batch.instance, 64)
    longest_us = rates.start_us + tile_us * math.ceil(batch.longest / (batch.tile_n * splits))
    us = longest_us
    if rounds > 1:
        mean_us = rates.start_us + tile_us * batch.mean / (batch.tile_n * splits)
        tail = rates.cluster_tail if is_cluster else rates.tail
        us = max(longest_us, rounds * mean_us + tail * longest_us)
    memory_us = batch.mean * batch.bytes_per_key / rates.bytes_per_us
    order = min(_MAX_ORDER, _OVERLAP / max(1e-3, 1 - batch.mean / batch.longest))
    longer = max(us, memory_us)
    us = longer * math.pow((us / longer) ** order + (memory_us / longer) ** order, 1 / order)
    if combine == "kernel":  # fp32 rows and their statistics, written and read
        us += rates.kernel_us + rates.partial_us * batch.rows * splits * (batch.instance + 1) * 8e-6
    if is_cluster:
        us += rates.cluster_us + rates.cluster_load_us * min(1.0, rounds)
    return us


def decoding(config: Config, batch: PagedBatch) -> Decoding:
    """A batch as a kernel sees it. Lengths are rounded, so that few kinds of calls occur."""
    packed, blocks = int(config.get("packed_heads", 1)), int(config["blocks_per_sm"])
    heads = batch.heads_kv if config.get("pads_heads") else batch.heads_q // packed
    mean_rows = -(-batch.rows // max(1, batch.batch))
    group = batch.heads_q // batch.heads_kv
    rows_of_query = group if config.get("fills_rows") else packed
    return Decoding(
        instance=instance(batch.head_dim),
        tile_n=int(config["tile_n"]),
        blocks_per_sm=blocks,
        places=batch.sm_count * blocks,
        tiles=heads * batch.batch * -(-mean_rows // (tile_m(config.params) // rows_of_query)),
        rows=batch.rows * batch.heads_q,
        longest=coarse(batch.longest),
        mean=coarse(batch.mean),
        bytes_per_key=2 * batch.batch * batch.heads_kv * batch.head_dim * batch.element_bytes,
        leaves_cluster=bool(config.get("leaves_cluster")),
        has_clusters=config["warp_groups"] == 1 and not config.get("pads_heads"),
    )


@lru_cache(maxsize=4096)
def best(batch: Decoding) -> tuple[int, Combine]:
    """Number of splits of the least expected time, and the way in which they are combined."""
    most, is_open = batch.longest // batch.tile_n, not batch.mean
    if is_open:
        batch = batch._replace(mean=-(-batch.longest // _ASSUMED_RATIO))
        idle = batch.places // (batch.blocks_per_sm * batch.tiles)
        most = min(most, max(batch.longest // _ASSUMED_KEYS, idle))
    times = {
        schedule: expected_us(batch, *schedule) for schedule in _schedules(most, batch.has_clusters)
    }
    bound_us = (1 + TIE * batch.mean / batch.longest) * min(times.values())
    near = (schedule for schedule, us in times.items() if us <= bound_us)
    splits, combine = min(near, key=lambda schedule: (schedule[0], times[schedule]))
    tiles, blocks, keys = _CLUSTERED.get(batch.instance, (0, 0, 0))
    is_clustered = combine == "kernel" and batch.has_clusters and splits >= _MIN_CLUSTERED
    if is_clustered and batch.tiles <= tiles and batch.longest <= keys:
        return blocks, "cluster"
    is_shared = is_open and combine == "kernel" and splits >= _SHARED_SPLITS
    if is_shared and batch.leaves_cluster and batch.tiles <= _SHARED_TILES:
        return _SHARED_BLOCKS, "cluster"
    return splits, combine


def best_us(batch: Decoding) -> float:
    """Expected time of `best`, of a batch whose mean length is known."""
    return expected_us(batch, *best(batch))


def coarse(size: int) -> int:
    """A size rounded up to four significant bits: nearly equal lengths share a schedule."""
    shift = max(0, size.bit_length() - 4)
    return -(-size >> shift) << shift


def _schedules(most: int, has_clusters: bool) -> Iterator[tuple[int, Combine]]:
    """All schedules of at most so many splits, fewest first."""
    yield 1, ""
    clusters = CLUSTER_SPLITS if has_clusters else ()
    yield from ((splits, "cluster") for splits in clusters if splits <= most)
    yield from ((splits, "kernel") for splits in KERNEL_SPLITS if splits <= most)
