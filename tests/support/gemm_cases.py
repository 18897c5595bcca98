"""The kernels of the family `gemm` that the tests on a GPU prove, and the sizes they do it at."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from tuner.config import Config, Value
from tuner.problem import E4M3, GemmProblem

PLAIN, PINGPONG = "TmaWarpSpecialized", "TmaWarpSpecializedPingpong"
COOPERATIVE = "TmaWarpSpecializedCooperative"


def config(schedule: str, tile: tuple[int, int, int], **more: Value) -> Config:
    params: dict[str, Value] = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        "cluster_m": 1,
        "cluster_n": 1,
        "kernel_schedule": schedule,
        "epilogue_schedule": schedule.removesuffix("Pingpong"),
        "swap_ab": False,
    }
    if schedule != PLAIN:
        params |= {"raster_order": "AlongN", "max_swizzle_size": 1}
    if schedule == COOPERATIVE:
        params["tile_scheduler"] = "Persistent"
    return Config("gemm", {**params, **more})


STREAM_K: dict[str, Value] = {
    "tile_scheduler": "StreamK",
    "decomposition_mode": "SplitK",
    "splits": 2,
}
#: Every epilogue once, both types, every schedule, both orientations; a kernel each.
EPILOGUES: dict[str, tuple[str, str, Config]] = {
    "bias": ("float16", "float32", config(PINGPONG, (64, 96, 64))),
    "residual": ("bfloat16", "float32", config(COOPERATIVE, (128, 128, 64), **STREAM_K)),
    "bias_residual": ("float16", "float16", config(COOPERATIVE, (128, 224, 64), cluster_m=2)),
    "relu": ("bfloat16", "bfloat16", config(PLAIN, (64, 64, 64), stages=3)),
    "gelu": ("float16", "float16", config(COOPERATIVE, (256, 112, 64))),
    "gelu_tanh": ("bfloat16", "float32", config(PINGPONG, (64, 128, 64), swap_ab=True)),
    "silu": ("float16", "float16", config(PINGPONG, (128, 176, 64), cluster_n=2)),
    "bias_relu": ("float16", "float32", config(COOPERATIVE, (128, 64, 64), swap_ab=True)),
    "bias_gelu": ("bfloat16", "bfloat16", config(PINGPONG, (128, 128, 64), cluster_m=2)),
    "bias_gelu_tanh": ("float16", "float16", config(PLAIN, (64, 128, 64), stages=2)),
    "bias_silu": ("bfloat16", "bfloat16", config(PINGPONG, (64, 16, 64), swap_ab=True)),
}
#: M, N, K, batch.
EPILOGUE_SIZES = ((200, 264, 136, 1), (1, 1000, 72, 1), (333, 136, 520, 3))
FAST = {"dtype": E4M3, "scales": "row"}
SUMMED = {"dtype": E4M3, "scales": "row", "fast_accum": False}
#: Both accumulations and kinds of factors, every schedule, both orientations, outputs of e4m3; a
#: kernel each.
SCALED: dict[str, tuple[Mapping[str, Any], Config]] = {
    "wide": (FAST, config(COOPERATIVE, (128, 256, 128), cluster_m=2)),
    "alone": (FAST, config(PLAIN, (64, 128, 128), stages=3)),
    "swapped": (FAST, config(PINGPONG, (64, 16, 128), swap_ab=True)),
    "deep": ({**FAST, "scales": "tensor"}, config(PINGPONG, (64, 64, 256), cluster_n=2)),
    "split": ({**FAST, "scales": "tensor"}, config(COOPERATIVE, (128, 128, 128), **STREAM_K)),
    "summed": (SUMMED, config(COOPERATIVE, (128, 176, 128))),
    "summed swapped": (
        {**SUMMED, "dtype_d": "float16"},
        config(COOPERATIVE, (128, 128, 64), swap_ab=True),
    ),
    "summed split": (SUMMED, config(COOPERATIVE, (128, 64, 128), **STREAM_K)),
    "summed once": ({**SUMMED, "scales": "tensor"}, config(PINGPONG, (128, 96, 128), cluster_m=2)),
    "e4m3": ({**FAST, "dtype_d": E4M3}, config(COOPERATIVE, (128, 176, 128), cluster_n=2)),
    "e4m3 swapped": (
        {**SUMMED, "dtype_d": E4M3},
        config(PINGPONG, (64, 16, 128), swap_ab=True),
    ),
    "e4m3 once": (
        {**FAST, "scales": "tensor", "dtype_d": E4M3},
        config(PINGPONG, (128, 128, 128), cluster_m=2),
    ),
    "e4m3 split": (
        {**SUMMED, "scales": "tensor", "dtype_d": E4M3},
        config(COOPERATIVE, (128, 64, 128), **STREAM_K),
    ),
    "fp16": ({"scales": "row"}, config(PINGPONG, (128, 112, 64), cluster_m=2)),
    "bf16": (
        {"dtype": "bfloat16", "dtype_d": "float32", "scales": "row"},
        config(COOPERATIVE, (128, 128, 64), swap_ab=True),
    ),
}
#: M, N, K.
SCALED_SIZES = ((200, 264, 144), (1, 1000, 80), (333, 136, 1040), (512, 512, 16384))


def with_epilogue(
    epilogue: str, size: tuple[int, int, int, int] = EPILOGUE_SIZES[0]
) -> GemmProblem:
    m, n, k, batch = size
    dtype, dtype_d, _ = EPILOGUES[epilogue]
    return GemmProblem(m, n, k, batch, dtype, dtype_d, epilogue=epilogue)  # type: ignore[arg-type]


def scaled(case: str, size: tuple[int, int, int] = SCALED_SIZES[0]) -> GemmProblem:
    """The problem of a case; rows of an e4m3 output are whole 16 bytes."""
    m, n, k = size
    if SCALED[case][0].get("dtype_d") == E4M3:
        n = ceil(n / 16) * 16
    return GemmProblem(m, n, k, **SCALED[case][0])
