"""A kernel of few tiles whose blocks have all of K.

It serves the batch-invariant mode alone (`tuner.selection.invariant`): without it vendors' kernels
answer, which divide K.
"""

from __future__ import annotations

from dataclasses import replace

from tuner.config import Config
from tuner.problem import GemmProblem, Problem

SMALL = GemmProblem(128, 1024, 1024, dtype="bfloat16")
"""A product of its calls."""
MOST_ROWS = 512
KERNEL = Config(
    "gemm",
    {
        **{"tile_m": 64, "tile_n": 64, "tile_k": 128, "cluster_m": 1, "cluster_n": 2},
        **{"kernel_schedule": "TmaWarpSpecializedPingpong", "swap_ab": True, "pdl": True},
        **{"epilogue_schedule": "TmaWarpSpecialized"},
        **{"raster_order": "AlongM", "max_swizzle_size": 1},
    },
)
FACTOR = 1.1
"""Time over the model's, of 128 rows, 4096 columns and 4096 of K (H200, 29 November 2026)."""


def is_served(problem: Problem) -> bool:
    """True for plain products of few rows in bf16."""
    if not isinstance(problem, GemmProblem) or problem.m > MOST_ROWS:
        return False
    return replace(SMALL, m=problem.m, n=problem.n, k=problem.k) == problem
