"""Expected times of a rule's kernels: estimates, and rows that TMA copies slowly."""

from __future__ import annotations

from math import ceil

from tuner.config import Config
from tuner.families.block_scaled_gemm import CLOCK_SHARE, Rates, estimate_us
from tuner.families.strided_product import tiles
from tuner.hardware import Gpu
from tuner.problem import SCALE_BLOCK, GemmProblem

START_CLOCKS = 1600.0
"""Clocks of a launch beside its tiles'."""
FILLED_CLOCKS, HIDDEN_ROWS = 4.5, 8.0
"""Clocks of a step for each row of A's last tile that lies outside, and rows that other copies
hide. So many where all multiprocessors have such a tile, in proportion where fewer have. Measured
beside kernels that copy no such rows, at 26 products of 1 to 6000 rows (H200, 29 November 2026).
"""


def expected_us(problem: GemmProblem, config: Config, gpu: Gpu, rates: Rates) -> float:
    """Expected time of a kernel."""
    return estimate_us(problem, config, gpu, rates, START_CLOCKS) + _filled_us(problem, config, gpu)


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
