"""The kernels of the family `block_scaled_gemm` that tests prove, and the sizes they do it at."""

from __future__ import annotations

from tuner.config import Config
from tuner.problem import E4M3, GemmProblem


def config(
    tile: tuple[int, int],
    stages: int,
    *,
    swap_ab: bool = False,
    cluster: tuple[int, int] = (1, 1),
    split_k: int = 1,
    store_buffers: int = 0,
    raster: tuple[str, int] = ("AlongM", 4),
    pdl: bool = True,
    unroll: int = 0,
    tma_factors: bool = False,
    uniform_branch: bool = False,
    ahead: bool = False,
    turns: bool = False,
    fetch_factors: bool = False,
    clips_rows: bool = False,
    vector_merge: bool = False,
    blocks_per_sm: int = 0,
    serial_parts: int = 0,
    staged_columns: bool = False,
    elected: bool = False,
) -> Config:
    given = {"unroll": unroll, "tma_factors": tma_factors}
    given |= {"uniform_branch": uniform_branch, "ahead": ahead, "turns": turns}
    given |= {"vector_merge": vector_merge, "blocks_per_sm": blocks_per_sm}
    given |= {"fetch_factors": fetch_factors, "clips_rows": clips_rows}
    given |= {"serial_parts": serial_parts, "staged_columns": staged_columns}
    given |= {"elected": elected}
    loop = {name: value for name, value in given.items() if value}
    return Config(
        "block_scaled_gemm",
        {
            "swap_ab": swap_ab,
            "tile_m": tile[0],
            "tile_n": tile[1],
            "stages": stages,
            "cluster_m": cluster[0],
            "cluster_n": cluster[1],
            "split_k": split_k,
            "store_buffers": store_buffers,
            "raster_order": raster[0],
            "max_swizzle_size": raster[1],
            "pdl": pdl,
            **loop,
        },
    )


#: Every height and kind of width in both orientations, multicast either way, K divided; a kernel
#: each.
CASES: dict[str, Config] = {
    "square": config((128, 128), 6, store_buffers=1),
    "two stages": config((128, 128), 2, pdl=False),
    "columns of two blocks": config((128, 192), 4, cluster=(2, 1), store_buffers=3),
    "columns of three blocks": config((128, 176), 5, cluster=(1, 2)),
    "odd octets": config((128, 144), 6, cluster=(2, 1), raster=("AlongN", 1)),
    "narrow": config((128, 80), 7, store_buffers=2, raster=("AlongN", 16)),
    "tall": config((256, 128), 4, cluster=(2, 1), store_buffers=1, raster=("AlongN", 2)),
    "tall, halved": config((256, 112), 3, cluster=(1, 2), store_buffers=4),
    "tall, split": config((256, 96), 4, split_k=2),
    "one warp group": config((64, 96), 8, store_buffers=2),
    "split": config((128, 64), 8, split_k=2),
    "unrolled": config((128, 160), 4, cluster=(2, 1), store_buffers=3, unroll=2),
    "unrolled, tall": config(
        (256, 128), 3, cluster=(1, 2), store_buffers=4, unroll=4, tma_factors=True
    ),
    "factors by TMA": config((128, 176), 4, store_buffers=3, unroll=4, tma_factors=True),
    "factors by TMA, one warp group": config((64, 112), 8, unroll=4, tma_factors=True),
    "uniform branch": config(
        (64, 32), 16, unroll=4, tma_factors=True, uniform_branch=True, pdl=False
    ),
    "ahead": config((128, 128), 5, store_buffers=2, unroll=4, tma_factors=True, ahead=True),
    "ahead, one warp group": config(
        (64, 48), 8, unroll=4, tma_factors=True, uniform_branch=True, ahead=True, elected=True
    ),
    "ahead, swapped and split": config(
        (64, 16), 16, swap_ab=True, split_k=2, unroll=2, tma_factors=True, ahead=True
    ),
    "turns": config((128, 160), 4, store_buffers=3, unroll=4, tma_factors=True, turns=True),
    "turns, tall": config((256, 128), 3, store_buffers=4, unroll=4, tma_factors=True, turns=True),
    "turns, ahead": config((128, 48), 9, unroll=4, tma_factors=True, ahead=True, turns=True),
    "factors fetched": config(
        (64, 96), 9, store_buffers=2, unroll=4, tma_factors=True, ahead=True, fetch_factors=True
    ),
    "rows clipped": config(
        (128, 80),
        7,
        store_buffers=2,
        unroll=4,
        tma_factors=True,
        turns=True,
        clips_rows=True,
        elected=True,
    ),
    "rows clipped, swapped": config(
        (64, 24),
        12,
        swap_ab=True,
        split_k=2,
        unroll=4,
        tma_factors=True,
        ahead=True,
        fetch_factors=True,
        clips_rows=True,
    ),
    "factors fetched, swapped": config(
        (128, 16), 9, swap_ab=True, split_k=2, unroll=4, tma_factors=True, fetch_factors=True
    ),
    "words merged": config(
        (128, 80), 7, split_k=2, unroll=4, tma_factors=True, ahead=True, vector_merge=True
    ),
    "words merged in four": config(
        (128, 160), 5, split_k=4, unroll=4, tma_factors=True, turns=True, vector_merge=True
    ),
    "parts in turn": config(
        (128, 64), 4, store_buffers=1, unroll=4, tma_factors=True, turns=True, serial_parts=2
    ),
    "parts in turn, tall": config((256, 64), 2, unroll=2, tma_factors=True, serial_parts=4),
    "parts in turn, swapped": config(
        (64, 24), 8, swap_ab=True, unroll=2, tma_factors=True, clips_rows=True, serial_parts=2
    ),
    "columns staged": config(
        (64, 96), 9, store_buffers=2, unroll=2, tma_factors=True, ahead=True, staged_columns=True
    ),
    "columns staged, swapped": config(
        (64, 16),
        16,
        swap_ab=True,
        split_k=2,
        unroll=2,
        tma_factors=True,
        ahead=True,
        staged_columns=True,
        elected=True,
    ),
    "columns staged, multicast": config(
        (128, 192),
        4,
        cluster=(2, 1),
        store_buffers=3,
        unroll=4,
        tma_factors=True,
        turns=True,
        staged_columns=True,
    ),
    "two blocks": config(
        (64, 48),
        6,
        unroll=4,
        tma_factors=True,
        uniform_branch=True,
        ahead=True,
        blocks_per_sm=2,
    ),
    "swapped": config((128, 16), 12, swap_ab=True),
    "swapped, unrolled": config((64, 24), 16, swap_ab=True, unroll=8),
    "swapped, factors by TMA": config(
        (256, 64), 5, swap_ab=True, cluster=(2, 1), unroll=4, tma_factors=True
    ),
    "split, factors by TMA": config((128, 64), 8, split_k=2, unroll=4, tma_factors=True),
    "swapped, one octet": config((128, 8), 10, swap_ab=True, cluster=(1, 2)),
    "swapped, tall": config((256, 64), 5, swap_ab=True, cluster=(2, 1)),
    "swapped, tall and odd": config((256, 112), 4, swap_ab=True, cluster=(1, 2)),
    "swapped, three octets": config((64, 24), 16, swap_ab=True, cluster=(1, 2)),
    "swapped, wide": config((128, 192), 5, swap_ab=True),
    "swapped, split": config((128, 16), 12, swap_ab=True, split_k=4),
    "swapped, split in eight": config((256, 32), 5, swap_ab=True, split_k=8),
    "swapped, least": config((64, 8), 24, swap_ab=True, split_k=2),
}
#: The kernels that are proven with one factor for all of K: of rows and columns, or of matrices.
PROMOTED: dict[str, Config] = {
    "unrolled": CASES["unrolled"],
    "swapped, unrolled": CASES["swapped, unrolled"],
    "promoted, tall": config((256, 128), 3, store_buffers=4, unroll=4),
    "promoted, swapped and wide": config((128, 192), 5, swap_ab=True, unroll=4),
    "promoted, split": config((128, 64), 8, split_k=2, unroll=4),
    "promoted, ahead": config(
        (64, 64), 10, store_buffers=1, unroll=2, ahead=True, fetch_factors=True, clips_rows=True
    ),
    "promoted, ahead and swapped": config(
        (64, 16),
        16,
        swap_ab=True,
        split_k=2,
        unroll=2,
        ahead=True,
        fetch_factors=True,
        clips_rows=True,
        vector_merge=True,
    ),
}
#: M, N, K: rows, columns and blocks that tiles and blocks cut off.
SIZES = (
    (130, 72, 1024),
    (1, 520, 1040),
    (333, 1000, 2064),
    (64, 4096, 1536),
    (1000, 2112, 1152),
)


def grouped(chosen: Config) -> Config:
    """The config of `block_scaled_grouped_gemm` with the same tiles."""
    params = {name: value for name, value in chosen.params.items() if name != "split_k"}
    return Config("block_scaled_grouped_gemm", params)


#: The kernels that are proven over groups: both orientations, multicast along either side.
GROUPED = (
    "square",
    "columns of three blocks",
    "tall",
    "swapped",
    "swapped, tall and odd",
    "one warp group",
    "factors by TMA",
    "unrolled, tall",
    "swapped, factors by TMA",
)
#: Groups, rows of all, N, K: one with rows alone, more than a warp's lanes, more than rows.
GROUPED_SIZES = ((4, 300, 264, 400), (40, 1000, 520, 1152), (70, 60, 136, 272), (1, 130, 72, 128))


def problem(m: int, n: int, k: int) -> GemmProblem:
    return GemmProblem(m, n, k, dtype=E4M3, scales="block")
