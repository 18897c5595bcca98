"""Products with factors of blocks that nobody tuned: a few kernels, and a rule that chooses among
them.

Sizes are arguments of a launch, so a proven kernel serves any. The rule takes the kernel of the
least time by the family's estimate, with each kernel's rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from math import ceil

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.block_scaled_gemm import (
    CLOCK_SHARE,
    MAX_READS,
    UNROLL,
    BlockScaledGemm,
    Rates,
    estimate_us,
)
from tuner.families.block_scaled_gemm.shape import INSTRUCTION_ROWS, deepened, tiles
from tuner.families.rule import RuleSelection
from tuner.families.target import Target
from tuner.hardware import HOPPER, Gpu
from tuner.measurement import Regime
from tuner.problem import E4M3, SCALE_BLOCK, GemmProblem

FILLED_CLOCKS, HIDDEN_CLOCKS = 8.0, 220.0
"""Clocks of a step for each row of A's last tile that lies outside, and those that other copies
hide. At 19 products of 64 to 6000 rows the choice was 2.5 % slower than the fastest kernel, and
6.8 % without them (H200, 29 November 2026). Other products stayed as they were.
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
    _swapped((64, 8), 2): Rates(326, 2098),
    _swapped((64, 16), 2): Rates(336, 2404),
    _swapped((256, 8)): Rates(361, 4023),
    _swapped((256, 8), 4): Rates(674, 3318),
    _swapped((256, 16)): Rates(313, 8445),
    _kernel((64, 64), split_k=2): Rates(483, 628),
    _kernel((128, 64), store_buffers=1): Rates(413, 1137),
    _kernel((128, 64), split_k=2): Rates(316, 6861),
    _kernel((128, 144), store_buffers=3): Rates(764, 2154),
    _kernel((128, 160), store_buffers=3): Rates(761, 1578),
    _kernel((128, 160), split_k=2): Rates(976, 14),
    _kernel((128, 176), store_buffers=3): Rates(960, 1321),
    _kernel((128, 192), store_buffers=3): Rates(859, 2144),
    _kernel((256, 128), store_buffers=4, unroll=8, band=16): Rates(1128, 2389),
    _kernel((256, 128), store_buffers=4, band=16): Rates(1150, 1820),
    _swapped((64, 8), ahead=True): Rates(230, 797),
    _swapped((64, 16), ahead=True): Rates(221, 1642),
    _swapped((64, 32), ahead=True): Rates(300, 333),
    _swapped((64, 64), ahead=True): Rates(346, 1311),
    _swapped((64, 8), 2, ahead=True): Rates(285, 2486),
    _swapped((64, 16), 2, ahead=True): Rates(289, 3010),
    _swapped((64, 64), 2, ahead=True): Rates(487, 13),
    _kernel((64, 32), ahead=True): Rates(255, 2244),
    _kernel((64, 48), ahead=True): Rates(306, 1463),
    _kernel((64, 64), store_buffers=1, ahead=True): Rates(323, 669),
    _kernel((64, 80), store_buffers=2, ahead=True): Rates(361, 1380),
    _kernel((64, 96), store_buffers=2, ahead=True): Rates(411, 1156),
    _kernel((64, 112), store_buffers=2, ahead=True): Rates(425, 2096),
    _kernel((64, 32), split_k=2, ahead=True): Rates(268, 5254),
    _kernel((64, 64), split_k=2, ahead=True): Rates(427, 817),
    _kernel((64, 80), split_k=2, ahead=True): Rates(429, 3682),
    _kernel((64, 128), split_k=2, ahead=True): Rates(402, 4841),
    _swapped((128, 8), ahead=True): Rates(228, 1876),
    _swapped((128, 16), ahead=True): Rates(234, 2502),
    _swapped((128, 16), 2, ahead=True): Rates(234, 5609),
    _swapped((128, 8), 4, ahead=True): Rates(408, 6682),
    _swapped((128, 16), 4, ahead=True): Rates(606, 4278),
    _kernel((128, 64), store_buffers=1, ahead=True): Rates(397, 1521),
    _kernel((128, 80), store_buffers=2, ahead=True): Rates(494, 1739),
    _kernel((128, 96), store_buffers=2, ahead=True): Rates(465, 2745),
    _kernel((128, 112), store_buffers=2, ahead=True): Rates(674, 1011),
    _kernel((128, 128), store_buffers=2, ahead=True): Rates(608, 1525),
    _kernel((128, 64), split_k=2, ahead=True): Rates(483, 7069),
    _kernel((128, 128), split_k=2, ahead=True): Rates(662, 4659),
}
"""Kernels and their rates. All are proven on an H200. `tuner develop fit rates` of
``tests/assets/fits/rates.jsonl.gz`` repeats 56 of the 118 constants of this rule and of grouped
products. The others also rest on measurements that are not kept.
"""


def serves(problem: GemmProblem, gpu: Gpu) -> bool:
    """True for such problems on a GPU that runs the kernels."""
    return problem.scales == "block" and gpu.compute_capability == HOPPER


def select(problem: GemmProblem, gpu: Gpu) -> RuleSelection | None:
    """The rule's kernels for a problem; None when none takes it."""
    found = []
    for config, rates in KERNELS.items():
        reads = tiles(problem, config)[1] if config["swap_ab"] else 1
        if reads <= MAX_READS and families()[config.family].accepts(problem, config, gpu):
            us = estimate_us(problem, config, gpu, rates) + _filled_us(problem, config, gpu)
            found.append((us, config))
    found.sort(key=lambda one: one[0])
    doubts = ("chosen by the rule of products with factors of blocks",)
    return RuleSelection(tuple(found), Regime(), doubts) if found else None


def _filled_us(problem: GemmProblem, config: Config, gpu: Gpu) -> float:
    """Microseconds that TMA takes longer to fill the rows of A's last tile that lie outside."""
    if config["swap_ab"] or "clips_rows" in config.params:
        return 0.0
    rows = tiles(problem, config)[0] * config["tile_m"]
    steps = ceil(ceil(problem.k / SCALE_BLOCK) / config["split_k"])
    clocks = max(0.0, FILLED_CLOCKS * (rows - problem.m) - HIDDEN_CLOCKS)
    return float(steps * clocks / (CLOCK_SHARE * gpu.clock_max_mhz))


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    return tuple(_targets())


def _targets() -> Iterator[Target]:
    small = GemmProblem(512, 1024, 1024, dtype=E4M3, scales="block")
    for config in KERNELS:
        yield Target(config, small)
