"""Expected times of a rule's kernels: estimates, and rows that TMA copies slowly."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from tuner.config import Config
from tuner.families.strided_product import tiles
from tuner.hardware import GRAPH_LAUNCH_US, Gpu
from tuner.problem import SCALE_BLOCK, GemmProblem

MEMORY_EFFICIENCY, CLOCK_SHARE = 0.88, 0.72
"""Memory's bandwidth over the data sheet's, and the clock under such products over the highest:
first guesses, read off 14 kernels at (4096,7168,2048) on one H200.
"""
GPCS = 8
"""Groups of multiprocessors: the blocks of a cluster lie in one. Hopper has at most eight."""
START_CLOCKS = 1600.0
"""Clocks of a launch beside its tiles'."""
FILLED_CLOCKS, HIDDEN_ROWS = 4.5, 8.0
"""Clocks of a step for each row of A's last tile that lies outside, and rows that other copies
hide. So many where all multiprocessors have such a tile, in proportion where fewer have. Measured
beside kernels that copy no such rows, at 26 products of 1 to 6000 rows (H200, 29 November 2026).
"""


class Rates(NamedTuple):
    """Clocks of a kernel on a busy multiprocessor."""

    step: float
    """Clocks of 128 of K of a tile."""
    end: float
    """Clocks of a tile beside its steps."""


def estimate_us(
    problem: GemmProblem, config: Config, gpu: Gpu, rates: Rates, start: float
) -> float:
    """Estimated microseconds: nearly the longer of the busiest multiprocessor's time and memory's.

    Args:
        problem: the product.
        config: the kernel.
        gpu: GPU that it runs on.
        rates: rates of the kernel.
        start: clocks of a launch beside its tiles'.
    """
    steps = ceil(ceil(problem.k / SCALE_BLOCK) / int(config["split_k"]))
    size = int(config["cluster_m"] * config["cluster_n"] * config["split_k"])
    resident = resident_blocks(size, gpu) * int(config.get("blocks_per_sm", 1))
    rounds = ceil(prod(tiles(problem, config)) * size / resident)
    clocks = start + rounds * (steps * rates.step + rates.end)
    compute_us = clocks / (CLOCK_SHARE * gpu.clock_max_mhz)
    memory_us = problem.bytes / (gpu.memory_gbs * MEMORY_EFFICIENCY * 1e3)
    longest = float((compute_us**4 + memory_us**4) ** 0.25)
    return GRAPH_LAUNCH_US * (0.5 if config["pdl"] else 1.0) + longest


def resident_blocks(size: int, gpu: Gpu) -> int:
    """Blocks that run at once, a multiprocessor each, in clusters of so many within one GPC."""
    if size <= 2:
        return gpu.sm_count
    return max(1, gpu.sm_count // GPCS // size) * GPCS * size


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
