"""Products with factors of blocks that nobody tuned: a few kernels, and a rule that chooses among
them.

Sizes are arguments of a launch, so a proven kernel serves any. The rule takes the kernel of the
least time by the family's estimate, with each kernel's rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import ceil

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.block_scaled_gemm import (
    CLOCK_SHARE,
    LOADS,
    MAX_READS,
    UNROLL,
    BlockScaledGemm,
    Rates,
    estimate_us,
    serial,
)
from tuner.families.block_scaled_gemm.shape import INSTRUCTION_ROWS, deepened
from tuner.families.rule import RuleSelection
from tuner.families.strided_product import tiles
from tuner.families.target import Target
from tuner.hardware import HOPPER, Gpu
from tuner.problem import E4M3, SCALE_BLOCK, GemmProblem

FILLED_CLOCKS, HIDDEN_ROWS = 4.5, 8.0
"""Clocks of a step for each row of A's last tile that lies outside, and rows that other copies
hide. So many where all multiprocessors have such a tile, in proportion where fewer have. Measured
beside kernels that copy no such rows, at 26 products of 1 to 6000 rows (H200, 29 November 2026).
"""


def _kernel(
    tile: tuple[int, int],
    *,
    swap_ab: bool = False,
    split_k: int = 1,
    store_buffers: int = 0,
    unroll: int = UNROLL,
    band: int = 8,
    **levers: bool,
) -> Config:
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": 2},
        **{"cluster_m": 1, "cluster_n": 1, "split_k": split_k},
        **{"store_buffers": store_buffers, "raster_order": "AlongM"},
        **{"max_swizzle_size": 1 if swap_ab else band, "pdl": False},
        **{"unroll": unroll, "tma_factors": True},
        **levers,
    }
    if "ahead" in levers and tile[0] == INSTRUCTION_ROWS:
        params["uniform_branch"] = True
    return deepened(Config(BlockScaledGemm.name, params))


def _swapped(tile: tuple[int, int], split_k: int = 1, **levers: bool) -> Config:
    return _kernel(tile, swap_ab=True, split_k=split_k, **levers)


KERNELS: Mapping[Config, Rates] = {
    _swapped((64, 8), 2): Rates(271, 2776),
    _swapped((64, 16), 2): Rates(297, 2748),
    _swapped((256, 8)): Rates(355, 3944),
    _swapped((256, 8), 4): Rates(613, 4294),
    _swapped((256, 16)): Rates(317, 8420),
    _kernel((128, 64), store_buffers=1): Rates(433, 7),
    _kernel((128, 64), split_k=2): Rates(417, 2775),
    _kernel((128, 144), store_buffers=3): Rates(756, 1906),
    _kernel((128, 160), store_buffers=3): Rates(717, 1784),
    _kernel((128, 160), split_k=2): Rates(746, 5088),
    _kernel((128, 192), store_buffers=3): Rates(834, 1463),
    _kernel((256, 128), store_buffers=4, unroll=8, band=16): Rates(1162, 1945),
    _kernel((256, 128), store_buffers=4, band=16): Rates(1139, 1615),
    _swapped((64, 8), ahead=True): Rates(233, 577),
    _swapped((64, 16), ahead=True): Rates(221, 1508),
    _swapped((64, 32), ahead=True): Rates(257, 1019),
    _swapped((64, 64), ahead=True): Rates(339, 663),
    _swapped((64, 8), 2, ahead=True): Rates(267, 2688),
    _swapped((64, 16), 2, ahead=True): Rates(278, 2658),
    _swapped((64, 64), 2, ahead=True): Rates(465, 533),
    _kernel((64, 64), store_buffers=1, ahead=True): Rates(254, 887),
    _kernel((64, 80), store_buffers=2, ahead=True): Rates(340, 8),
    _kernel((64, 96), store_buffers=2, ahead=True): Rates(365, 5),
    _kernel((64, 112), store_buffers=2, ahead=True): Rates(409, 37),
    _kernel((64, 32), split_k=2, ahead=True): Rates(252, 4954),
    _kernel((64, 64), split_k=2, ahead=True): Rates(280, 2425),
    _kernel((64, 128), split_k=2, ahead=True): Rates(299, 5337),
    _swapped((128, 8), ahead=True): Rates(225, 1899),
    _swapped((128, 16), ahead=True): Rates(234, 2269),
    _swapped((128, 16), 2, ahead=True): Rates(215, 5831),
    _swapped((128, 8), 4, ahead=True): Rates(408, 6682),
    _swapped((128, 16), 4, ahead=True): Rates(606, 4278),
    _kernel((128, 64), store_buffers=1, ahead=True): Rates(341, 1559),
    _kernel((128, 96), store_buffers=2, ahead=True): Rates(431, 2303),
    _kernel((128, 128), store_buffers=2, ahead=True): Rates(590, 782),
    _kernel((128, 64), split_k=2, ahead=True): Rates(455, 6665),
    _kernel((128, 128), split_k=2, ahead=True): Rates(675, 2753),
    _kernel((128, 80), split_k=2, ahead=True, turns=True, vector_merge=True, **LOADS): Rates(
        416, 4042
    ),
    _kernel((128, 96), store_buffers=2, ahead=True, **LOADS): Rates(469, 1946),
    _kernel((128, 48), unroll=2, clips_rows=True): Rates(355, 713),
    _kernel((128, 64), store_buffers=1, ahead=True, clips_rows=True): Rates(369, 1050),
    _kernel((128, 128), split_k=2, ahead=True, vector_merge=True, clips_rows=True): Rates(
        507, 5253
    ),
    _kernel((128, 192), store_buffers=3, turns=True, **LOADS): Rates(810, 2034),
    _swapped((64, 16), ahead=True, **LOADS): Rates(258, 120),
    _kernel((128, 96), split_k=4, ahead=True, vector_merge=True, **LOADS): Rates(392, 6690),
}
"""Kernels and their rates: the fit of `tuner develop fit rates` to
``tests/assets/fits/rates.jsonl.gz``.
"""


def serves(problem: GemmProblem, gpu: Gpu) -> bool:
    """True for such problems on a GPU that runs the kernels."""
    return problem.scales == "block" and gpu.compute_capability == HOPPER


def select(problem: GemmProblem, gpu: Gpu) -> RuleSelection | None:
    """The rule's kernels for a problem; None when none takes it."""
    expected = []
    for config, rates in KERNELS.items():
        reads = tiles(problem, config)[1] if config["swap_ab"] else 1
        if reads <= MAX_READS and families()[config.family].accepts(problem, config, gpu):
            expected.append((expected_us(problem, config, gpu, rates), config))
    return RuleSelection.of(expected, "chosen by the rule of products with factors of blocks")


def expected_us(problem: GemmProblem, config: Config, gpu: Gpu, rates: Rates) -> float:
    """Expected time of a kernel, microseconds."""
    return estimate_us(problem, config, gpu, rates) + _filled_us(problem, config, gpu)


def _filled_us(problem: GemmProblem, config: Config, gpu: Gpu) -> float:
    """Microseconds that TMA takes longer to fill the rows of A's last tile that lie outside."""
    if config["swap_ab"] or "clips_rows" in config.params:
        return 0.0
    along_m, along_n = tiles(problem, config)
    rows = along_m * config["tile_m"] - problem.m
    share = min(1.0, along_n * config["split_k"] / gpu.sm_count)
    steps = ceil(ceil(problem.k / SCALE_BLOCK) / config["split_k"])
    clocks = FILLED_CLOCKS * max(0.0, rows * share - HIDDEN_ROWS)
    return float(steps * clocks / (CLOCK_SHARE * gpu.clock_max_mhz))


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    small = GemmProblem(512, 1024, 1024, dtype=E4M3, scales="block")
    return tuple(Target(config, small) for config in (*KERNELS, *serial.KERNELS))
