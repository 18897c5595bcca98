"""The candidates of a CollectiveBuilder GEMM: a table of binaries and their run-time choices."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from tuner.config import Config, Value
from tuner.families.collective import CONSUMERS, COOPERATIVE, NO_SMEM, PINGPONG, PLAIN, TMA_EPILOGUE
from tuner.families.gemm.cost import clustered_blocks
from tuner.families.gemm.shape import (
    RASTER_ORDERS,
    SWIZZLES,
    GemmShape,
    effective_swizzle,
    instruction_columns,
    oriented,
    round_up,
    smem_bytes,
    tile_blocks,
)
from tuner.hardware import (
    SMEM_PER_BLOCK_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    WARP_GROUP,
    Gpu,
)
from tuner.problem import DTYPE_BYTES, GemmProblem

#: The widest swizzle of shared memory, bytes (PTX ISA, "Tensor Swizzling Modes").
SWIZZLE_BYTES = 128
#: K steps that a stream-K unit gets at least (gemm/kernel/tile_scheduler_params.h).
STREAM_K_MIN_STEPS = 8

_TILES = (
    *((COOPERATIVE, m, n) for m, n in ((128, 64), (128, 128), (128, 192), (128, 256))),
    *((COOPERATIVE, m, n) for m, n in ((256, 64), (256, 128))),
    *((PINGPONG, 64, n) for n in (16, 32, 64, 96, 128, 192, 256)),
    *((PINGPONG, 128, n) for n in (64, 128)),
)
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (1, 4))
_WIDE_CLUSTERS = ((4, 1), (2, 2))
_WIDE_CLUSTER_TILES = {
    *((COOPERATIVE, 128, n) for n in (128, 192, 256)),
    (COOPERATIVE, 256, 128),
    (PINGPONG, 128, 128),
}
#: Tiles near the register limit, and a width between two powers of two.
_MORE_TILES = (
    (COOPERATIVE, 256, 192),
    (COOPERATIVE, 256, 96),
    (COOPERATIVE, 128, 96),
    (PINGPONG, 192, 128),
    (PINGPONG, 128, 192),
    (PINGPONG, 128, 96),
)
_MORE_CLUSTERS = ((1, 1), (2, 1), (1, 2))
#: Widths that CuTe does not declare, and the widest of all for each schedule and tile_m.
_WIDTHS = (80, 112, 144, 160, 176, 208, 224, 240)
_WIDEST = {
    (COOPERATIVE, 128): 256,
    (COOPERATIVE, 256): 192,
    (PINGPONG, 64): 256,
    (PINGPONG, 128): 192,
}
#: Of the work of wider and of narrower tiles, what a width that is worth a binary has at most.
_WIDER_WORK, _NARROWER_WORK = 0.98, 1.04
_DEEP_TILES = (
    *((PINGPONG, 64, n) for n in (16, 32, 64, 128)),
    (PINGPONG, 128, 64),
    *((COOPERATIVE, 128, n) for n in (64, 128, 192, 256)),
    (COOPERATIVE, 256, 128),
)
_PLAIN_TILES = ((64, 16), (64, 32), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
_STREAM_K_TILES = ((128, 16), (128, 32), (128, 64), (128, 128), (128, 256), (256, 128))
_NO_SMEM_TILES = (
    (COOPERATIVE, 128, 128),
    (COOPERATIVE, 128, 256),
    (COOPERATIVE, 256, 128),
    (PINGPONG, 64, 64),
    (PINGPONG, 64, 128),
    (PINGPONG, 64, 256),
    (PINGPONG, 128, 64),
    (PINGPONG, 128, 128),
)
#: Half of 16 columns a block; the two blocks of a cluster share the tile of rows. Twice the blocks
#: read the rows. Pays where tiles of 16 columns leave multiprocessors without one.
_NARROW_TILE = (PINGPONG, 64, 8)
#: Clusters of 8 blocks, for 65 to 256 rows, where reading the L2 binds. Each tile is read for two
#: or four multiprocessors, and the tiles fill those that such clusters reach once.
_LARGE_CLUSTERS = ((2, 4), (4, 2))
_LARGE_CLUSTER_TILES = (
    *((PINGPONG, 64, n) for n in (64, 80, 96, 112, 128, 256)),
    *((PINGPONG, 128, n) for n in (64, 80, 96, 112)),
    (COOPERATIVE, 128, 256),
)
#: The one that is also offered with twice the K of a step.
_DEEP_LARGE_CLUSTER = (PINGPONG, 64, 64)
#: Smallest share of these multiprocessors that must have a block.
_MIN_FILLED = 0.8
SPLITS = (2, 3, 4, 6, 8)
#: Hiding the launch behind the kernel in front pays where one side is short: the product takes few
#: microseconds.
_SHORT_SIDE = 128
#: A swap pays where one side is a few tiles long: tile_n has more widths than tile_m.
_SWAPPED_SIDE = 1024
#: Output tiles x splits above this many waves only add traffic.
_MAX_SPLIT_WAVES = 8


def _is_short(problem: GemmProblem) -> bool:
    return min(problem.m, problem.n) <= _SHORT_SIDE


def candidates(problem: GemmProblem, gpu: Gpu) -> Iterator[list[Config]]:
    """Candidates of one binary at a time, in a fixed order; their legality is not looked at."""
    for swap_ab in (False, True) if min(problem.m, problem.n) <= _SWAPPED_SIDE else (False,):
        shape = oriented(problem, swap_ab)
        for compiled in _compiled(problem, shape, swap_ab, gpu):
            group = list(_scheduled(shape, compiled, gpu))
            if _is_short(problem) and compiled.get("tile_scheduler") != "StreamK":
                group += [Config("gemm", {**config.params, "pdl": True}) for config in group]
            yield group


def _compiled(
    problem: GemmProblem, shape: GemmShape, swap_ab: bool, gpu: Gpu
) -> Iterator[dict[str, Value]]:
    """Compile-time parameters worth a binary for a shape, in a fixed order."""
    atom = SWIZZLE_BYTES // DTYPE_BYTES[problem.dtype]
    for schedule, tile_m, tile_n, tile_k, cluster, extra in _binaries(shape, atom, gpu):
        base: dict[str, Value] = {
            "tile_m": tile_m,
            "tile_n": tile_n,
            "tile_k": tile_k,
            "cluster_m": cluster[0],
            "cluster_n": cluster[1],
            "kernel_schedule": schedule,
            "epilogue_schedule": TMA_EPILOGUE[schedule],
            "swap_ab": swap_ab,
        }
        if schedule == COOPERATIVE:
            base["tile_scheduler"] = "Persistent"
        params = {**base, **extra}
        if not _fits(shape, params, atom):
            continue
        if schedule != PLAIN:
            yield params
        else:
            for stages in _plain_stages(problem, shape, params):
                yield {**params, "stages": stages}


_Binary = tuple[str, int, int, int, tuple[int, int], dict[str, Value]]


def _binaries(shape: GemmShape, atom: int, gpu: Gpu) -> Iterator[_Binary]:
    # K as it fills a swizzle atom; half of that only where the atom would mostly be padding.
    tile_k = atom // 2 if shape.k <= atom // 2 else atom
    for schedule, m, n in _TILES:
        wide = _WIDE_CLUSTERS if (schedule, m, n) in _WIDE_CLUSTER_TILES else ()
        for cluster in (*_CLUSTERS, *wide):
            yield schedule, m, n, tile_k, cluster, {}
    for schedule, m, n in _DEEP_TILES:
        for cluster in _MORE_CLUSTERS:
            yield schedule, m, n, 2 * atom, cluster, {}
    for schedule, m, n in _LARGE_CLUSTER_TILES:
        for cluster in _LARGE_CLUSTERS:
            if _fills_once(shape, (m, n), cluster, gpu):
                yield schedule, m, n, tile_k, cluster, {}
                if (schedule, m, n) == _DEEP_LARGE_CLUSTER:
                    yield schedule, m, n, 2 * atom, cluster, {}
    schedule, m, n = _NARROW_TILE
    is_along_k = (shape.layout_a, shape.layout_b) == ("row", "col")
    if is_along_k and n < shape.n <= 2 * n and ceil(shape.m / m) * shape.batch <= gpu.sm_count:
        yield schedule, m, n, 2 * atom, (1, 2), {}
    if atom < shape.k < 2 * atom and shape.k % atom <= atom // 2:
        for schedule, m, n in _TILES:
            yield schedule, m, n, atom // 2, (1, 1), {}
    for m, n in _STREAM_K_TILES:
        for cluster in ((1, 1), (2, 1)):
            yield COOPERATIVE, m, n, tile_k, cluster, {"tile_scheduler": "StreamK"}
    for schedule, m, n in _MORE_TILES:
        for cluster in _MORE_CLUSTERS:
            yield schedule, m, n, tile_k, cluster, {}
    for schedule, m in _WIDEST:
        for n in _filling_widths(shape, schedule, m, gpu):
            for cluster in _MORE_CLUSTERS:
                yield schedule, m, n, tile_k, cluster, {}
    for m, n in _PLAIN_TILES:
        for cluster in ((1, 1), (2, 1)):
            yield PLAIN, m, n, tile_k, cluster, {}
    for schedule, m, n in _NO_SMEM_TILES:
        yield schedule, m, n, tile_k, (2, 1), {"epilogue_schedule": NO_SMEM}


def _fills_once(
    shape: GemmShape, tile: tuple[int, int], cluster: tuple[int, int], gpu: Gpu
) -> bool:
    """True when a few rows' blocks, in clusters of 8, fill the multiprocessors once."""
    if not _SHORT_SIDE // 2 < min(shape.m, shape.n) <= 2 * _SHORT_SIDE:
        return False
    if instruction_columns(shape, tile[1]) < tile[1]:
        return False
    blocks, reached = shape.batch, clustered_blocks(prod(cluster), gpu)
    for extent, size, wide in zip((shape.m, shape.n), tile, cluster, strict=True):
        blocks *= round_up(ceil(extent / size), wide)
    return _MIN_FILLED * reached <= blocks <= reached


def _filling_widths(shape: GemmShape, schedule: str, tile_m: int, gpu: Gpu) -> Iterator[int]:
    """Widths between the usual ones whose tiles fill the multiprocessors' last wave better.

    One instruction spans such a tile only where both operands lie along K. A wider tile reads less
    for each product: a narrower one has to leave the busiest multiprocessor less to do than every
    wider one, and not more than those that are narrower still.
    """
    if instruction_columns(shape, min(_WIDTHS)) < min(_WIDTHS):
        return
    usual = [n for s, m, n in (*_TILES, *_MORE_TILES) if (s, m) == (schedule, tile_m)]
    widths = {*usual, *(n for n in _WIDTHS if n < _WIDEST[schedule, tile_m])}

    def work(tile_n: int) -> int:
        """Columns that the busiest multiprocessor computes."""
        tiles = ceil(shape.m / tile_m) * ceil(shape.n / tile_n) * shape.batch
        return ceil(tiles / gpu.sm_count) * tile_n

    for width in sorted(widths & set(_WIDTHS)):
        wider = min(work(n) for n in widths if n > width)
        narrower = min(work(n) for n in usual if width / 2 <= n < width)
        if work(width) < _WIDER_WORK * wider and work(width) <= _NARROWER_WORK * narrower:
            yield width


def _fits(shape: GemmShape, params: dict[str, Value], atom: int) -> bool:
    """True when no smaller tile or cluster does the same: the rest would be padding."""
    m, n, k = (int(params[f"tile_{x}"]) for x in "mnk")
    least_m = 64 * CONSUMERS[str(params["kernel_schedule"])]
    if (m > least_m and m >= 2 * shape.m) or (n > 16 and n >= 2 * round_up(shape.n, 8)):
        return False
    if k > atom and k >= 2 * shape.k:
        return False
    return int(params["cluster_m"]) <= ceil(shape.m / m) and int(params["cluster_n"]) <= ceil(
        shape.n / n
    )


def _plain_stages(problem: GemmProblem, shape: GemmShape, params: dict[str, Value]) -> list[int]:
    """Stages that let one, two or three blocks share a multiprocessor: their phases overlap."""
    accumulators = int(params["tile_m"]) * int(params["tile_n"]) // WARP_GROUP
    useful = max(2, ceil(shape.k / int(params["tile_k"])))
    stage = (
        DTYPE_BYTES[problem.dtype]
        * (int(params["tile_m"]) + int(params["tile_n"]))
        * int(params["tile_k"])
    )
    depths: list[int] = []
    for blocks in range(1, 4 if accumulators <= 32 else 3 if accumulators <= 64 else 2):
        budget = min(
            SMEM_PER_BLOCK_BYTES, SMEM_PER_SM_BYTES // blocks - SMEM_RESERVED_PER_BLOCK_BYTES
        )
        stages = min(useful, max(2, budget // stage))  # the tiles alone would not fit
        while (
            stages > 2
            and smem_bytes(problem, Config("gemm", {**params, "stages": stages}))[1] > budget
        ):
            stages -= 1
        depths.append(stages)
    return list(dict.fromkeys(depths))


def _scheduled(shape: GemmShape, compiled: dict[str, Value], gpu: Gpu) -> Iterator[Config]:
    """The run-time choices of one binary that differ from one another for this shape."""
    if compiled["kernel_schedule"] == PLAIN:
        yield Config("gemm", compiled)
        return
    plain = Config("gemm", compiled)
    clusters_m = ceil(shape.m / (plain["tile_m"] * plain["cluster_m"]))
    clusters_n = ceil(shape.n / (plain["tile_n"] * plain["cluster_n"]))
    rasters = tuple(RASTER_ORDERS) if min(clusters_m, clusters_n) > 1 else ("AlongN",)
    if compiled.get("tile_scheduler") == "StreamK":
        for mode in _decompositions(shape, plain, gpu):
            for raster in rasters:
                yield Config(
                    "gemm", {**compiled, **mode, "raster_order": raster, "max_swizzle_size": 1}
                )
        return
    for swizzle in _swizzles(shape, plain, gpu):
        for raster in rasters:
            yield Config("gemm", {**compiled, "raster_order": raster, "max_swizzle_size": swizzle})


def _swizzles(shape: GemmShape, config: Config, gpu: Gpu) -> Iterator[int]:
    blocks_m, blocks_n = tile_blocks(shape, config)
    for swizzle in SWIZZLES:
        if swizzle == 1:
            yield 1
            continue
        padded_m, padded_n = tile_blocks(
            shape, Config("gemm", {**config.params, "max_swizzle_size": swizzle})
        )
        one_wave = blocks_m * blocks_n * shape.batch <= gpu.sm_count
        same = effective_swizzle(blocks_m, blocks_n, swizzle) != swizzle
        # Padding tiles are computed like others: above an eighth they cannot pay.
        if not one_wave and not same and 8 * padded_m * padded_n <= 9 * blocks_m * blocks_n:
            yield swizzle


def _decompositions(shape: GemmShape, config: Config, gpu: Gpu) -> Iterator[dict[str, Value]]:
    blocks_m, blocks_n = tile_blocks(shape, config)
    tiles = blocks_m * blocks_n * shape.batch
    steps = ceil(shape.k / config["tile_k"])
    # Without a partial wave, or with too little K to divide, it falls back to plain scheduling.
    if tiles % gpu.sm_count and steps > STREAM_K_MIN_STEPS:
        yield {"decomposition_mode": "StreamK"}
    for splits in SPLITS:
        if 2 * splits <= steps and tiles * splits <= _MAX_SPLIT_WAVES * gpu.sm_count:
            yield {"decomposition_mode": "SplitK", "splits": splits}
