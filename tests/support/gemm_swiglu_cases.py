"""The kernels of the family `gemm_swiglu` that its test on a GPU proves, and at which sizes."""

from __future__ import annotations

from typing import Any

from tuner.config import Config, Value


def config(schedule: str, tile: tuple[int, int, int], **more: Value) -> Config:
    params: dict[str, Value] = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        "cluster_m": 1,
        "cluster_n": 1,
        "kernel_schedule": schedule,
        "epilogue_schedule": "NoSmemWarpSpecialized",
        "swap_ab": False,
        "raster_order": "AlongM",
        "max_swizzle_size": 1,
    }
    return Config("gemm_swiglu", {**params, **more})


#: Type and config: instructions of one to four groups of columns, and with half a group.
CASES: dict[str, tuple[Any, Config]] = {
    "one group": ("float16", config("TmaWarpSpecializedPingpong", (64, 64, 64))),
    "two groups": ("bfloat16", config("TmaWarpSpecializedPingpong", (128, 128, 64), cluster_m=2)),
    "three groups": (
        "float16",
        config("TmaWarpSpecializedCooperative", (256, 192, 64), tile_scheduler="Persistent"),
    ),
    "one and a half": ("float16", config("TmaWarpSpecializedPingpong", (64, 96, 64))),
    "three and a half": (
        "float16",
        config("TmaWarpSpecializedCooperative", (128, 224, 64), tile_scheduler="Persistent"),
    ),
    "four groups": (
        "bfloat16",
        config(
            "TmaWarpSpecializedCooperative",
            (128, 256, 64),
            tile_scheduler="Persistent",
            cluster_n=2,
        ),
    ),
}
#: M, N, K.
SIZES = ((200, 96, 136), (1, 1312, 72), (515, 352, 264))
