"""Configs of the GEMM family, for tests that need any that are legal."""

from __future__ import annotations

from tuner.config import Config


def tile(tile_m: int, tile_n: int) -> Config:
    """Ping-pong, one block a cluster."""
    return Config(
        "gemm",
        {
            "tile_m": tile_m,
            "tile_n": tile_n,
            "tile_k": 64,
            "cluster_m": 1,
            "cluster_n": 1,
            "kernel_schedule": "TmaWarpSpecializedPingpong",
            "epilogue_schedule": "TmaWarpSpecialized",
            "swap_ab": False,
            "raster_order": "AlongN",
            "max_swizzle_size": 1,
        },
    )
