"""Problems and configs of the family `gemm` that its tests share."""

from __future__ import annotations

from typing import Any

from tuner.config import Config
from tuner.families.gemm import Gemm
from tuner.problem import E4M3, GemmProblem

GEMM = Gemm()
SQUARE = GemmProblem(4096, 4096, 4096)
PROBLEMS = {
    "square": SQUARE,
    "scores": GemmProblem(1024, 1024, 64, batch=16, dtype_d="float32"),
    "values": GemmProblem(1024, 64, 1024, batch=16, layout_b="row"),
    "one row": GemmProblem(1, 4096, 4096),
    "few rows": GemmProblem(16, 14336, 4096, dtype="bfloat16"),
    "odd": GemmProblem(1000, 1016, 1032, layout_a="col", layout_b="row"),
    "short k": GemmProblem(512, 512, 32),
    "tiny": GemmProblem(8, 8, 8),
    "mlp": GemmProblem(4096, 14336, 4096, epilogue="bias_gelu"),
    "residual": GemmProblem(64, 4096, 1024, dtype_d="float32", epilogue="bias_residual"),
    "scaled": GemmProblem(1000, 1016, 1032, scales="row"),
    "e4m3": GemmProblem(8192, 8192, 8192, dtype=E4M3),
    "e4m3, few rows": GemmProblem(16, 4096, 4096, dtype=E4M3, scales="row"),
    "e4m3, small output": GemmProblem(512, 2048, 1024, dtype=E4M3, dtype_d=E4M3, scales="row"),
    "e4m3, summed": GemmProblem(1000, 1016, 1040, dtype=E4M3, fast_accum=False),
}


def ping(**changes: Any) -> Config:
    params = {
        "tile_m": 128,
        "tile_n": 128,
        "tile_k": 64,
        "cluster_m": 2,
        "cluster_n": 1,
        "kernel_schedule": "TmaWarpSpecializedPingpong",
        "epilogue_schedule": "TmaWarpSpecialized",
        "raster_order": "AlongM",
        "max_swizzle_size": 4,
        "swap_ab": False,
        **changes,
    }
    return Config("gemm", {k: v for k, v in params.items() if v is not None})


def coop(**changes: Any) -> Config:
    return ping(
        **{
            "tile_n": 256,
            "kernel_schedule": "TmaWarpSpecializedCooperative",
            "epilogue_schedule": "TmaWarpSpecializedCooperative",
            "tile_scheduler": "Persistent",
            **changes,
        }
    )


def plain(**changes: Any) -> Config:
    return ping(
        **{
            "kernel_schedule": "TmaWarpSpecialized",
            "raster_order": None,
            "max_swizzle_size": None,
            **changes,
        }
    )


def stream_k(**changes: Any) -> Config:
    return coop(
        **{
            "tile_scheduler": "StreamK",
            "decomposition_mode": "SplitK",
            "splits": 3,
            "max_swizzle_size": 1,
            **changes,
        }
    )
