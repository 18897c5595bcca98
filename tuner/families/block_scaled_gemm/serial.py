"""Kernels for many rows in the order of additions that few rows have.

One block adds the parts of K that a cluster's blocks would have (`serial_parts`). The kernels serve
the batch-invariant mode alone (`tuner.selection.invariant`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tuner.config import Config
from tuner.families.block_scaled_gemm.shape import deepened


def _kernel(columns: int, store_buffers: int) -> Config:
    return deepened(
        Config(
            "block_scaled_gemm",
            {
                **{"swap_ab": False, "tile_m": 128, "tile_n": columns, "stages": 2},
                **{"cluster_m": 1, "cluster_n": 1, "split_k": 1, "store_buffers": store_buffers},
                **{"raster_order": "AlongM", "max_swizzle_size": 8, "pdl": False, "unroll": 4},
                **{"tma_factors": True, "turns": True, "fetch_factors": True, "clips_rows": True},
                "serial_parts": 2,
            },
        )
    )


KERNELS: Mapping[Config, tuple[float, float]] = {
    _kernel(128, 2): (610, 800),
    _kernel(160, 3): (740, 1400),
    _kernel(192, 3): (830, 3600),
}
"""The kernels, and clocks of a step and of a tile's end: they follow ten products of an H200 (29
November 2026).
"""
