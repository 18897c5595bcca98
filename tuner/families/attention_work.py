"""Terms of the time model of attention: the amount of each for a call.

A time model holds one kernel's microseconds for each term (`tuner.selection.portfolio`). The
amounts follow exactly from the problem and the kernel's tiles. The rates are fitted to
measurements.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from tuner.families.attention_instances import instance
from tuner.families.tape import called, larger, smaller, where
from tuner.hardware import Gpu
from tuner.problem import DTYPE_BYTES, AttentionProblem

MEGABYTE = 1e6
SAMPLED = 8
"""Lengths that stand for those of packed sequences beside the longest."""
PACKING = frozenset({"packed_heads", "pads_heads"})
"""Parameters that say which query heads share a tile's rows."""
#: Share of the memory's bandwidth above which one more block on a multiprocessor stops helping: of
#: eleven values from 0 to 1, 0.4 or 0.5 left the least error for 15 of 20 decoding kernels.
LATENCY_SHARE = 0.45

TERMS = (
    "launch",
    "rounds",
    "round_steps",
    "busiest_steps",
    "mean_steps",
    "longest_steps",
    "blocks",
    "memory",
    "stream",
    "partials",
    "splits",
    "critical_steps",
    "aligned_mask_steps",
    "mask_steps",
    "repeated",
)
"""Names of what `work` counts:

- a launch; rounds of blocks over the chip, and the key steps of all rounds;
- key steps of the busiest multiprocessor, of the mean one, and of the longest block;
- blocks of a multiprocessor;
- megabytes through memory, more of them where too few blocks are there to fill it (``stream``), and
  those of partial outputs;
- splits to combine;
- under a mask, key steps of the mean multiprocessor, or of the longest block beside its neighbours
  where these are more;
- key steps of all rounds, as one term if the rows of a mask operand are aligned, else as another;
- megabytes of keys and values that blocks read beyond once: each tile and each pack of query heads
  of a KV head reads them.
"""
MASK_TERMS = frozenset({"aligned_mask_steps", "mask_steps"})
"""Terms that cost time under a mask operand only. Fits leave them out."""
ALIGNED_KEYS = 16
"""Keys that rows of a mask of booleans are aligned by, for loads of 16 bytes."""


class AttentionTiling(NamedTuple):
    """Tiling of the scores by one kernel."""

    rows: int
    """Rows of the scores a block computes; those of `packed` heads share it."""
    keys: int
    """Keys of a step."""
    resident: int = 1
    """Blocks of a multiprocessor."""
    packed: int = 1
    """Query heads of one key head that share a block's rows."""
    splits: int = 1
    """Blocks that share the keys of a tile."""
    columns: int = 0
    """Columns computed for the head dimension; 0: as many as there are."""
    pads_heads: bool = False
    """True if `packed` rows belong to each KV head, however many query heads it has."""
    fills_rows: bool = False
    """True if only rows of heads that there are do."""


class AttentionSizes(NamedTuple):
    """Sizes from which the work of all kernels at one problem is counted."""

    seqlen_q: int
    seqlen_kv: int
    heads: int
    """Query heads of all sequences."""
    heads_kv: int
    """KV heads of all sequences."""
    is_masked: bool
    left: int
    right: int
    """Keys that query i sees before and behind key i (`AttentionProblem.visible`)."""
    row_bytes: int
    """Bytes of one query or key of a head."""
    moved: int
    """Bytes read and written at least."""
    outputs: int
    """Elements."""
    sequences: int = 0
    """Packed sequences; 0: none are packed. The other sizes are those of as many of the longest."""
    rows_q: int = 0
    rows_kv: int = 0
    """Rows of queries and of keys of all packed sequences."""

    @property
    def megabytes(self) -> float:
        """Read and written at least."""
        return self.moved / MEGABYTE

    @classmethod
    def of(cls, problem: AttentionProblem) -> AttentionSizes:
        """The sizes of a problem. A selection begins with them: it is kept short."""
        queries, keys, batch = problem.seqlen_q, problem.seqlen_kv, problem.batch
        head_dim, heads = problem.head_dim, batch * problem.heads_q
        width = DTYPE_BYTES[problem.dtype] * head_dim
        heads_kv = batch * problem.heads_kv
        is_masked = problem.is_causal
        left, right = queries, 0 if is_masked else keys
        if problem.page_size or problem.window_left >= 0 or problem.window_right >= 0:
            is_masked = is_masked or problem.is_windowed
            left, right = problem.visible
            left, right = left - problem.position, max(0, right + problem.position)
        rows, rows_kv, packed = heads * queries, heads_kv * keys, (0, 0, 0)
        if problem.is_varlen and not problem.page_size:
            packed = batch, problem.total_q, problem.total_kv
            rows, rows_kv = packed[1] * problem.heads_q, packed[2] * problem.heads_kv
        return cls(
            *(queries, keys, heads, heads_kv, is_masked, left, right, width),
            *(2 * width * (rows_kv + rows), rows * head_dim, *packed),
        )


def work(sizes: AttentionSizes, tiling: AttentionTiling, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `TERMS`; it may be traced (`tuner.families.tape`), where the mask's
    presence is known, and several splits are a symbol.
    """
    rows, keys, resident, packed, splits, _, pads_heads, fills_rows = tiling
    seqlen_q, seqlen_kv, heads, heads_kv, is_masked, left, right, *others = sizes
    row_bytes, moved, outputs, sequences, *_, rows_kv = others
    sm_count = gpu.sm_count
    queries = rows // (heads // heads_kv) if fills_rows else rows // packed or 1
    tiles = -(-seqlen_q // queries)
    is_packed = sequences != 0
    if is_packed:
        heads, heads_kv = heads // sequences, heads_kv // sequences
        unlike = called(_unlike, *sizes[:2], *sizes[-3:], queries, keys, is_masked)
        tiles = unlike[0]
    reading = tiles * heads_kv if pads_heads else tiles * heads // packed
    blocks = reading * splits
    longest = -(-seqlen_kv // keys)
    mean: float = longest
    read = reading * seqlen_kv
    if is_packed:
        mean, read = unlike[1] / tiles, unlike[2] * reading / tiles
    elif is_masked and right == 0 and left == seqlen_q:  # the last block has the most
        longest = smaller(longest, -(-seqlen_q // keys))
        more = called(_others, tiles, queries, keys)
        cut = called(_steps, seqlen_q, seqlen_kv, left, right, queries, keys)
        uncut = (longest + more[0]) / more[1]
        mean = where((tiles - 1) * queries, seqlen_kv, cut[1], uncut)
    elif is_masked:
        steps = called(_steps, seqlen_q, seqlen_kv, left, right, queries, keys)
        longest, mean = steps[0], steps[1]
    is_split = splits != 1
    if is_split:
        longest, mean = -(-longest // splits), mean / splits
    rounds = -(-blocks // (sm_count * resident))
    share = blocks / sm_count
    at_once = LATENCY_SHARE * resident * 2 * keys * sm_count / MEGABYTE
    memory, round_steps = moved / MEGABYTE, rounds * mean
    aligned = seqlen_kv // ALIGNED_KEYS * ALIGNED_KEYS
    return (
        1.0,
        rounds,
        round_steps,
        -(-blocks // sm_count) * mean,
        share * mean,
        longest,
        share,
        memory,
        larger(memory, at_once * (rounds * longest * row_bytes)),
        splits * outputs * (4 / MEGABYTE) if is_split else 0.0,
        splits if is_split else 0.0,
        larger(share * mean, longest * resident) if is_masked else 0.0,
        where(seqlen_kv, aligned, 0.0, round_steps),
        where(seqlen_kv, aligned, round_steps, 0.0),
        (read - heads_kv * (rows_kv if is_packed else seqlen_kv)) * row_bytes * (2 / MEGABYTE),
    )


TILINGS = {
    "128x128": AttentionTiling(128, 128),
    "64x128, two blocks": AttentionTiling(64, 128, resident=2),
    "192x128": AttentionTiling(192, 128),
    "256x128": AttentionTiling(256, 128),
}
"""Candidate tiles of a closed-source kernel; the fit chooses among them."""
_OF_TILES = ("rounds", "round_steps", "busiest_steps", "mean_steps", "longest_steps")
FIRST_KEYS = 256
"""Keys up to which a library is assumed to start splitting them over blocks, which needs a second
kernel.
"""
CLOSED_TERMS = (
    "launch",
    "blocks",
    "memory",
    "repeated_memory",
    "first_keys",
    "overlapped",
    *(f"{term} of {tiles}" for tiles in TILINGS for term in _OF_TILES),
)
"""Names of what `closed_work` counts:

- ``repeated_memory``: megabytes where each query head reads its keys and values anew;
- ``first_keys``: the part of `FIRST_KEYS` that a sequence has;
- ``overlapped``: the longer of that and of the memory in units of `FIRST_MEGABYTES`.
"""
FIRST_MEGABYTES = 20.0
"""Megabytes that pass through an H100's memory while a sequence's first keys are worked on."""

CONSTANT_TERMS = frozenset(
    {"launch", "memory", "stream", "partials", "repeated", "repeated_memory"}
)
"""Terms whose rates do not follow the clock."""


def closed_work(sizes: AttentionSizes, tiling: None, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `CLOSED_TERMS`, for a closed-source kernel."""
    works = [work(sizes, tiling, gpu) for tiling in TILINGS.values()]
    blocks, memory = works[0][6:8]
    repeated = 2 * sizes.heads * sizes.seqlen_kv * sizes.row_bytes / MEGABYTE
    first = smaller(sizes.seqlen_kv, FIRST_KEYS) / FIRST_KEYS
    longer = larger(first, memory / FIRST_MEGABYTES)
    of_tiles = chain.from_iterable(map(_of_tiles, works))
    return (1.0, blocks, memory, repeated, first, longer, *of_tiles)


_of_tiles = itemgetter(*(TERMS.index(name) for name in _OF_TILES))


PEER_ROWS, PEER_KEYS = 128, {64: 128, 96: 128, 128: 128, 192: 112, 256: 80}
"""Rows of a tile of FlashAttention-3, and its keys by the instance of the head dimension."""


def peer_work(problem: AttentionProblem, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `TERMS` for FlashAttention-3, whose tiles hold all heads of a group."""
    tiling = AttentionTiling(PEER_ROWS, PEER_KEYS[instance(problem.head_dim)])
    if 1 < problem.heads_q // problem.heads_kv <= PEER_ROWS:
        tiling = tiling._replace(pads_heads=True, fills_rows=True)
    return work(AttentionSizes.of(problem), tiling, gpu)


def _steps(
    seqlen_q: int, seqlen_kv: int, left: int, right: int, queries: int, keys: int
) -> tuple[int, float]:
    """Key steps of a block: the most, and the mean of at most 16 blocks, evenly spread."""
    tiles = -(-seqlen_q // queries)
    step, sums = -(-tiles // 16), []
    if (
        left >= seqlen_q and right == 0
    ):  # no key is hidden on that side: the last block has the most
        whole = -(-seqlen_kv // keys)
        ends = range((tiles - step) * queries, 0, -step * queries)
        steps = [-(-end // keys) if end < seqlen_kv else whole for end in ends]
        most = min(whole, -(-seqlen_q // keys))
        return most, (most + sum(steps)) / (1 + len(steps))
    for tile in range(tiles - 1, -1, -step):
        first = tile * queries
        end = min(seqlen_kv, min(first + queries, seqlen_q) + right)
        start = first - left if first > left else 0
        sums.append(-(-end // keys) - start // keys if end > start else 0)
    return max(sums), sum(sums) / len(sums)


@lru_cache(1 << 14)
def _others(tiles: int, queries: int, keys: int) -> tuple[int, int]:
    """Key steps of the blocks of `_steps` but the last, under a causal mask and with keys for all;
    and the number of blocks.
    """
    step = -(-tiles // 16)
    ends = range((tiles - step) * queries, 0, -step * queries)
    return sum(-(-end // keys) for end in ends), 1 + len(ends)


@lru_cache(1 << 12)
def _unlike(
    seqlen_q: int,
    seqlen_kv: int,
    sequences: int,
    rows_q: int,
    rows_kv: int,
    queries: int,
    keys: int,
    is_masked: bool,
) -> tuple[int, float, float]:
    """Tiles of a head over packed sequences, their key steps, and keys that they read.

    The host knows the longest length and the sum of all. The others' lengths are taken as powers of
    evenly spread numbers that have this sum.
    """
    others, tiles, steps, read = sequences - 1, 0.0, 0.0, 0.0
    count = min(others, SAMPLED)
    powers = [
        max(0.0, longest / max(1.0, (rows - longest) / max(1, others)) - 1)
        for longest, rows in ((seqlen_q, rows_q), (seqlen_kv, rows_kv))
    ]
    for place in range(count + 1):
        share = 1.0 if place == count else (place + 0.5) / count
        length = math.ceil(seqlen_q * share ** powers[0]) or 1
        length_kv = math.ceil(seqlen_kv * share ** powers[1]) or 1
        mine = -(-length // queries)
        mean: float = -(-length_kv // keys)
        if is_masked and mine > 1:
            mean = min(mean, 0.5 + (mine + 1) * queries / (2 * keys))
        weight = 1.0 if place == count else others / count
        tiles += weight * mine
        steps += weight * mine * mean
        read += weight * mine * length_kv
    return math.ceil(tiles), steps, read
