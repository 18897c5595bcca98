"""Words, shapes and sizes of the families that run CollectiveBuilder GEMMs."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from tuner.config import Config
from tuner.families.collective import CONSUMERS, NO_SMEM, PINGPONG, PLAIN
from tuner.hardware import SMEM_PER_BLOCK_BYTES
from tuner.problem import DTYPE_BYTES, GemmProblem

RASTER_ORDERS = {"AlongM": 1, "AlongN": 2}
#: "Heuristic" and "DataParallel" are left out: the first picks one of these or plain persistent
#: scheduling, which is the second (gemm/kernel/tile_scheduler_params.h).
DECOMPOSITIONS = {"SplitK": 2, "StreamK": 3}
SWIZZLES = (1, 2, 4, 8)
#: Columns of the WGMMAs that CuTe declares (cute/arch/mma_sm90_gmma.hpp).
_DECLARED_N = (256, 192, 128, 96, 64, 32, 16, 8)


@dataclass(frozen=True)
class GemmShape:
    """Extents and types of the computed product, after `swap_ab`."""

    m: int
    n: int
    k: int
    batch: int
    layout_a: str
    layout_b: str
    layout_d: str


def oriented(problem: GemmProblem, swap_ab: bool) -> GemmShape:
    """The computed problem: the given one, or its transpose."""
    if not swap_ab:
        a, b = problem.layout_a, problem.layout_b
        return GemmShape(problem.m, problem.n, problem.k, problem.batch, a, b, "row")
    flip = {"row": "col", "col": "row"}
    layout_a, layout_b = flip[problem.layout_b], flip[problem.layout_a]
    return GemmShape(problem.n, problem.m, problem.k, problem.batch, layout_a, layout_b, "col")


def instruction_columns(shape: GemmShape, tile_n: int) -> int:
    """Columns of one WGMMA of a tile.

    All of the tile's where both operands lie along K: `gemm.cu.j2` writes out the widths that CuTe
    does not declare. Elsewhere the widest declared one that divides the tile.
    """
    if (shape.layout_a, shape.layout_b) == ("row", "col"):
        return tile_n
    return next(n for n in _DECLARED_N if tile_n % n == 0)


def smem_bytes(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Stages and shared memory of the compiled kernel, bytes.

    A residual shares the output's buffers, as it has its type. A bias along N, or the columns'
    factors, adds a tile's part of it. Equal to sizeof in every kernel compiled [c]. Sources:

    - gemm/kernel/sm90_gemm_tma_warpspecialized*.hpp and
      epilogue/collective/sm90_epilogue_tma_warpspecialized.hpp: sizes of SharedStorage
    - gemm/collective/builders/sm90_gmma_builder.inl: the automatic stage count
    """
    tile_m, tile_n, schedule = config["tile_m"], config["tile_n"], config["kernel_schedule"]
    width = DTYPE_BYTES[problem.dtype_d]
    stage = DTYPE_BYTES[problem.dtype] * (tile_m + tile_n) * config["tile_k"]
    buffer, vector = 0, 1  # what is empty still takes a byte
    carveout = loads = 1  # and a pipeline that is not there a slot
    alignment = 128
    if config["epilogue_schedule"] != NO_SMEM:
        rows = min(64 * CONSUMERS[schedule], tile_m)
        columns = gcd(32, tile_n)
        pieces = (tile_m // rows) * (tile_n // columns)
        contiguous = width * (rows if config["swap_ab"] else columns)
        alignment = 8 * min(contiguous, 128)
        buffers, loads = min(pieces, 2), min(pieces, 4)
        if problem.has_residual:
            loads = buffers = max(loads, buffers + 1)
        if problem.has_bias and not config["swap_ab"]:
            vector = tile_n * DTYPE_BYTES[problem.dtype]
        if problem.scales == "row":
            vector = tile_n * DTYPE_BYTES["float32"]
        buffer = buffers * rows * columns * width
        carveout = round_up(buffer + vector, alignment) + alignment
    stages = config.get("stages") or (SMEM_PER_BLOCK_BYTES - round_up(carveout, 128)) // (
        round_up(stage, 128) + 16
    )
    barriers = 16 * stages + 16 * loads
    tiles = stages * stage
    if schedule == PLAIN:
        used = round_up(max(tiles, buffer + vector), alignment)
        return stages, round_up(used + barriers, alignment)
    # Barriers that order the loads, and ping-pong's warp groups; then the scheduler's one byte.
    barriers += 49 if schedule == PINGPONG else 17
    return stages, round_up(barriers, alignment) + round_up(buffer + vector, alignment) + tiles


def round_up(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def tile_blocks(shape: GemmShape, config: Config) -> tuple[int, int]:
    """Tiles along M and N, rounded up to the cluster and the swizzle, as the scheduler does."""
    swizzle = config.get("max_swizzle_size", 1)
    blocks_m = round_up(ceil(shape.m / config["tile_m"]), config["cluster_m"])
    blocks_n = round_up(ceil(shape.n / config["tile_n"]), config["cluster_n"])
    effective = effective_swizzle(blocks_m, blocks_n, swizzle)
    return (
        round_up(blocks_m, effective * config["cluster_m"]),
        round_up(blocks_n, effective * config["cluster_n"]),
    )


def effective_swizzle(blocks_m: int, blocks_n: int, swizzle: int) -> int:
    """The swizzle that the scheduler uses where `swizzle` is allowed (tile_scheduler_params.h)."""
    least = min(blocks_m, blocks_n)
    return next(
        s for s, needed in ((8, 6), (4, 3), (2, 2), (1, 0)) if swizzle >= s and least >= needed
    )
