"""Products with factors of blocks that nobody tuned: a few kernels, and a rule that chooses among
them.

Sizes are arguments of a launch, so a proven kernel serves any. The rule takes the kernel of the
least time by the family's estimate, with each kernel's rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.block_scaled_gemm import BlockScaledGemm, of_rows, serial
from tuner.families.block_scaled_gemm.expected import Rates, expected_us
from tuner.families.block_scaled_gemm.legality import UNROLL
from tuner.families.block_scaled_gemm.shape import INSTRUCTION_ROWS, LOADS, MAX_READS, deepened
from tuner.families.rule import RuleSelection
from tuner.families.strided_product import tiles
from tuner.families.target import Target
from tuner.hardware import HOPPER, Gpu
from tuner.problem import E4M3, GemmProblem


def _kernel(
    tile: tuple[int, int],
    *,
    swap_ab: bool = False,
    split_k: int = 1,
    store_buffers: int = 0,
    unroll: int = UNROLL,
    band: int = 8,
    cluster_m: int = 1,
    **levers: bool,
) -> Config:
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": 2},
        **{"cluster_m": cluster_m, "cluster_n": 1, "split_k": split_k},
        **{"store_buffers": store_buffers, "raster_order": "AlongM"},
        **{"max_swizzle_size": 1 if swap_ab else band, "pdl": False},
        **{"unroll": unroll, "tma_factors": True},
        **levers,
    }
    if "ahead" in levers and tile[0] == INSTRUCTION_ROWS:
        params["uniform_branch"] = True
    return deepened(Config(BlockScaledGemm.name, params))


def _swapped(
    tile: tuple[int, int], split_k: int = 1, unroll: int = UNROLL, **levers: bool
) -> Config:
    return _kernel(tile, swap_ab=True, split_k=split_k, unroll=unroll, **levers)


STAGED: Mapping[str, bool] = {"staged_columns": True, "clips_rows": True}
ELECTED: Mapping[str, bool] = {"ahead": True, "elected": True}
KERNELS: Mapping[Config, Rates] = {
    _swapped((64, 8), 2): Rates(274, 3525),
    _swapped((64, 16), 2): Rates(309, 3323),
    _swapped((256, 8)): Rates(365, 4865),
    _swapped((256, 8), 4): Rates(584, 5890),
    _swapped((256, 16)): Rates(315, 9845),
    _kernel((128, 64), split_k=2): Rates(406, 4200),
    _kernel((128, 160), split_k=2): Rates(732, 6725),
    _kernel((256, 128), store_buffers=4, unroll=8, band=16): Rates(1085, 4367),
    _kernel((256, 128), store_buffers=4, band=16): Rates(1053, 4259),
    _swapped((64, 8), ahead=True): Rates(259, 577),
    _swapped((64, 16), ahead=True): Rates(270, 667),
    _swapped((64, 32), **ELECTED): Rates(283, 553),
    _swapped((64, 64), **ELECTED): Rates(312, 1010),
    _swapped((64, 8), 2, ahead=True): Rates(349, 1110),
    _swapped((64, 16), 2, ahead=True): Rates(333, 1341),
    _swapped((64, 64), 2, ahead=True): Rates(452, 2293),
    _kernel((64, 64), store_buffers=1, **ELECTED): Rates(255, 698),
    _kernel((64, 80), store_buffers=2, **ELECTED): Rates(283, 1269),
    _kernel((64, 112), store_buffers=2, **ELECTED): Rates(352, 1538),
    _kernel((64, 32), split_k=2, ahead=True): Rates(203, 4202),
    _kernel((64, 64), split_k=2, ahead=True): Rates(330, 2379),
    _kernel((64, 128), split_k=2, ahead=True): Rates(345, 5536),
    _swapped((128, 8), ahead=True): Rates(232, 2732),
    _swapped((128, 16), ahead=True): Rates(241, 3301),
    _swapped((128, 16), 2, ahead=True): Rates(230, 6544),
    _swapped((128, 8), 4, ahead=True): Rates(640, 1094),
    _swapped((128, 16), 4, ahead=True): Rates(720, 1314),
    _kernel((128, 64), store_buffers=1, **ELECTED): Rates(310, 2076),
    _kernel((128, 96), store_buffers=2, ahead=True): Rates(427, 3027),
    _kernel((128, 128), store_buffers=2, ahead=True): Rates(562, 2317),
    _kernel((128, 128), split_k=2, ahead=True): Rates(655, 4118),
    _kernel((128, 64), store_buffers=1, clips_rows=True, **ELECTED): Rates(326, 1914),
    _swapped((64, 16), **ELECTED, **LOADS): Rates(277, 433),
    _kernel((128, 96), split_k=4, ahead=True, vector_merge=True, **LOADS): Rates(494, 6371),
    _kernel((128, 128), split_k=2, ahead=True, vector_merge=True, clips_rows=True): Rates(
        579, 5168
    ),
    _swapped((64, 8), unroll=2, ahead=True, **LOADS): Rates(342, 74),
    _swapped((64, 16), unroll=2, **ELECTED, **LOADS): Rates(323, 171),
    _swapped((64, 16), 4, unroll=2, vector_merge=True, **ELECTED, **STAGED): Rates(314, 1835),
    _kernel((64, 16), unroll=2, **ELECTED, **STAGED): Rates(181, 468),
    _kernel((64, 32), unroll=2, **ELECTED, **STAGED): Rates(211, 578),
    _kernel((64, 16), split_k=4, unroll=2, vector_merge=True, **ELECTED, **STAGED): Rates(
        262, 1978
    ),
    _kernel((64, 96), store_buffers=2, unroll=2, band=1, staged_columns=True, **ELECTED): Rates(
        272, 1129
    ),
    _kernel((64, 192), store_buffers=3, unroll=2, band=2, **STAGED): Rates(532, 3824),
    _kernel((128, 80), store_buffers=2, unroll=2, **ELECTED, **STAGED): Rates(350, 3294),
    _kernel((128, 128), store_buffers=2, unroll=2, band=1, **ELECTED, **STAGED): Rates(552, 2060),
    _kernel((128, 96), store_buffers=2, unroll=2, turns=True, elected=True, **STAGED): Rates(
        404, 4660
    ),
    _kernel(
        (128, 80), split_k=2, unroll=2, ahead=True, turns=True, vector_merge=True, **STAGED
    ): Rates(448, 3955),
    _kernel((128, 144), store_buffers=3, **STAGED): Rates(606, 3996),
    _kernel((128, 160), store_buffers=3, band=1, **STAGED): Rates(704, 2527),
    _kernel((128, 192), store_buffers=3, turns=True, **STAGED): Rates(884, 2148),
    _kernel((128, 192), store_buffers=3, cluster_m=2, turns=True, staged_columns=True): Rates(
        982, 2073
    ),
}
"""Kernels and their rates: the fit of `tuner develop fit rates` to
``tests/assets/fits/rates.jsonl.gz``.
"""


def serves(problem: GemmProblem, gpu: Gpu) -> bool:
    """True for such problems, and those with factors of rows, on a GPU that runs the kernels."""
    is_served = problem.scales == "block" or problem.dtype_d == "bfloat16"
    return is_served and gpu.compute_capability == HOPPER


def select(problem: GemmProblem, gpu: Gpu) -> RuleSelection | None:
    """The rule's kernels for a problem; None when none takes it."""
    if problem.scales == "row":
        doubt = "chosen by the rule of products with factors of rows"
        return RuleSelection.of(of_rows.expected(problem, gpu), doubt)
    expected = []
    for config, rates in KERNELS.items():
        reads = tiles(problem, config)[1] if config["swap_ab"] else 1
        if reads <= MAX_READS and families()[config.family].accepts(problem, config, gpu):
            expected.append((expected_us(problem, config, gpu, rates), config))
    return RuleSelection.of(expected, "chosen by the rule of products with factors of blocks")


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    small = GemmProblem(512, 1024, 1024, dtype=E4M3, scales="block")
    every = *KERNELS, *serial.KERNELS, *of_rows.KERNELS
    of_rows_only = replace(small, scales="row")
    return tuple(
        Target(config, small if "tma_factors" in config.params else of_rows_only)
        for config in every
    )
