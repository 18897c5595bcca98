"""Shared memory of both kernels' blocks."""

from __future__ import annotations

from tuner.families.attention_instances import instance
from tuner.hardware import SMEM_PER_BLOCK_BYTES, SMEM_PER_SM_BYTES, SMEM_RESERVED_PER_BLOCK_BYTES
from tuner.problem import DTYPE_BYTES, AttentionProblem

STAGES = ("scores", "output")
"""Kernels in order of launch; also the prefix of their parameters' names."""
#: Rows of queries that a warp group computes, and of an image of probabilities.
ROWS = 64
#: Bytes of a row's maximum and sum in one tile: two fp32.
STATISTIC_BYTES = 8
#: Images of probabilities that a warp group of the first kernel holds.
IMAGES = 2
#: Columns of V in a block of the second kernel at most; wider heads take two.
MAX_COLUMNS = 128
#: Of one mbarrier: each stage of a ring has two, Q in the first kernel one.
BARRIER_BYTES = 8


def columns(problem: AttentionProblem, stage: str) -> int:
    """Shared memory of a block's tiles: all of Q and K, up to `MAX_COLUMNS` of V."""
    whole = instance(problem.head_dim)
    return whole if stage == "scores" or whole <= MAX_COLUMNS else whole // 2


def bias_bytes(problem: AttentionProblem) -> int:
    """Strides of the additive bias; 0 without one."""
    return sum(operand.bytes for operand in problem.operands if operand.name == "bias")


def smem_bytes(problem: AttentionProblem, stage: str, tile_n: int, groups: int, depth: int) -> int:
    """Dynamic shared memory of a block: the stages of K or V, the images of probabilities, and the
    barriers. The first kernel adds Q, the second the statistics of its tiles. Rounded to the
    alignment of the tiles, as the template asserts.
    """
    width = DTYPE_BYTES[problem.dtype]
    ring = depth * tile_n * columns(problem, stage) * width
    image = ROWS * tile_n * width
    if stage == "scores":
        own = groups * (IMAGES * image + ROWS * columns(problem, stage) * width) + BARRIER_BYTES
    else:
        own = groups * depth * (image + ROWS * STATISTIC_BYTES)
    return -(-(ring + own + 2 * depth * BARRIER_BYTES) // 1024) * 1024


def smem_limit(blocks_per_sm: int) -> int:
    """Shared memory of a block when this many share a multiprocessor."""
    shared = SMEM_PER_SM_BYTES // blocks_per_sm - SMEM_RESERVED_PER_BLOCK_BYTES
    return min(SMEM_PER_BLOCK_BYTES, shared)
