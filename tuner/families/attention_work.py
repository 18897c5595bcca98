"""Amounts of work of an attention call: what a kernel's time is a sum of.

A time model has the microseconds that one kernel takes for each term (`tuner.selection.portfolio`).
Terms follow from the problem and the kernel's tiles, so they are exact; the rates are measured.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from tuner.hardware import Gpu
from tuner.problem import DTYPE_BYTES, AttentionProblem

MEGABYTE = 1e6
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
)
"""Names of what `work` counts:

- a launch; rounds of blocks over the chip, and the key steps of all rounds;
- key steps of the busiest multiprocessor, of the mean one, and of the longest block;
- blocks of a multiprocessor;
- megabytes through memory, more of them where too few blocks are there to fill it (``stream``), and
  those of partial outputs;
- splits to combine.
"""


class Tiling(NamedTuple):
    """How a kernel cuts the scores into blocks."""

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


def work(problem: AttentionProblem, tiling: Tiling, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `TERMS`."""
    queries = max(1, tiling.rows // tiling.packed)
    tiles = ceil(problem.seqlen_q / queries)
    blocks = tiles * problem.batch * problem.heads_q // tiling.packed * tiling.splits
    longest, mean = _steps(problem, queries, tiles, tiling.keys)
    longest, mean = ceil(longest / tiling.splits), mean / tiling.splits
    rounds = ceil(blocks / (gpu.sm_count * tiling.resident))
    share = blocks / gpu.sm_count
    width = DTYPE_BYTES[problem.dtype] * problem.head_dim
    cached = 2 * problem.batch * problem.heads_kv * problem.seqlen_kv * width
    moved = cached + 2 * problem.batch * problem.heads_q * problem.seqlen_q * width
    step_bytes = 2 * tiling.keys * width
    waiting = LATENCY_SHARE * rounds * tiling.resident * longest * step_bytes * gpu.sm_count
    outputs = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim
    is_split = tiling.splits > 1
    return (
        1.0,
        float(rounds),
        rounds * mean,
        ceil(share) * mean,
        share * mean,
        float(longest),
        share,
        moved / MEGABYTE,
        max(moved, waiting) / MEGABYTE,
        4 * tiling.splits * outputs / MEGABYTE if is_split else 0.0,
        float(tiling.splits) if is_split else 0.0,
    )


TILINGS = {
    "128x128": Tiling(128, 128),
    "64x128, two blocks": Tiling(64, 128, resident=2),
    "192x128": Tiling(192, 128),
    "256x128": Tiling(256, 128),
}
"""Tiles that a kernel whose source is not known may have; a fit finds out which."""
_OF_TILES = ("rounds", "round_steps", "busiest_steps", "mean_steps", "longest_steps")
_AT = [TERMS.index(name) for name in _OF_TILES]
CLOSED_TERMS = (
    "launch",
    "blocks",
    "memory",
    "repeated_memory",
    *(f"{term} of {tiles}" for tiles in TILINGS for term in _OF_TILES),
)
"""Names of what `closed_work` counts. ``repeated_memory``: megabytes where each query head reads
its keys and values anew."""


def closed_work(problem: AttentionProblem, gpu: Gpu) -> tuple[float, ...]:
    """The amount of each of `CLOSED_TERMS`, for a kernel whose tiles are not known."""
    found = [work(problem, tiling, gpu) for tiling in TILINGS.values()]
    _, _, _, _, _, _, blocks, memory, *_ = found[0]
    width = DTYPE_BYTES[problem.dtype] * problem.head_dim
    repeated = 2 * problem.batch * problem.heads_q * problem.seqlen_kv * width / MEGABYTE
    return (1.0, blocks, memory, repeated, *(one[at] for one in found for at in _AT))


def _steps(problem: AttentionProblem, queries: int, tiles: int, keys: int) -> tuple[int, float]:
    """Key steps of a block: the most, and the mean of at most 16 blocks, evenly spread."""
    if not problem.is_causal and not problem.is_windowed:
        steps = ceil(problem.seqlen_kv / keys)
        return steps, float(steps)
    found = []
    for tile in range(tiles - 1, -1, -ceil(tiles / 16)):
        seen = problem.keys_of(tile * queries, (tile + 1) * queries - 1)
        found.append(ceil(seen.stop / keys) - seen.start // keys if seen else 0)
    return max(found), sum(found) / len(found)
