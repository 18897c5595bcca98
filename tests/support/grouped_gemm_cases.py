"""The kernels of the family `grouped_gemm` that its test on a GPU proves, and at which sizes."""

from __future__ import annotations

from typing import Any

from tuner.config import Config


def config(
    schedule: str, tile: tuple[int, int, int], cluster: tuple[int, int], swap_ab: bool, order: str
) -> Config:
    params = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        **dict(zip(("cluster_m", "cluster_n"), cluster, strict=True)),
        "kernel_schedule": f"TmaWarpSpecialized{schedule}",
        "swap_ab": swap_ab,
        "raster_order": order,
    }
    return Config("grouped_gemm", params)


CASES: dict[str, tuple[Any, Config]] = {
    "cooperative": ("float16", config("Cooperative", (128, 256, 64), (2, 1), False, "AlongM")),
    "pingpong": ("bfloat16", config("Pingpong", (64, 128, 64), (1, 2), False, "AlongN")),
    "swapped": ("bfloat16", config("Pingpong", (64, 32, 128), (1, 1), True, "AlongN")),
    "swapped wide": ("bfloat16", config("Cooperative", (256, 64, 64), (1, 2), True, "AlongM")),
}
#: Groups, M, N, K and sizes: more groups than a warp looks at in a step, most of them empty; more
#: tiles than one wave; a single row.
SIZES: tuple[tuple[int, int, int, int, Any], ...] = (
    (5, 300, 136, 72, "uniform"),
    (150, 40, 352, 264, "zipf"),
    (70, 9000, 1032, 136, "sparse"),
    (1, 1, 1312, 72, "uniform"),
)
