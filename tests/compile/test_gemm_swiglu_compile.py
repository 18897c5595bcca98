"""The SwiGLU kernel through the real nvcc: no spills, and what it refuses."""

from __future__ import annotations

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.gemm_swiglu import GemmSwiglu
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SwigluProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

SWIGLU = GemmSwiglu()
PROBLEM = SwigluProblem(512, 14336, 4096, dtype="bfloat16")
#: Whole groups of columns, and tiles that end within one.
CONFIGS = [
    Config(
        "gemm_swiglu",
        {
            "tile_m": 128,
            "tile_n": tile_n,
            "tile_k": 64,
            "cluster_m": 2,
            "cluster_n": 1,
            "kernel_schedule": "TmaWarpSpecializedCooperative",
            "epilogue_schedule": "NoSmemWarpSpecialized",
            "tile_scheduler": "Persistent",
            "raster_order": "AlongM",
            "max_swizzle_size": 1,
            "swap_ab": False,
        },
    )
    for tile_n in (256, 224)
]
SPECS = [SWIGLU.kernels(PROBLEM, config)["gemm"] for config in CONFIGS]


def test_they_compile_without_spills(compiler: Compiler) -> None:
    for config, (_, future) in zip(CONFIGS, compiler.submit(SPECS), strict=True):
        assert SWIGLU.violations(PROBLEM, config, DEFAULT_GPU) == []
        artifact = future.result()
        assert artifact.resources is not None and artifact.resources.registers > 0
        assert artifact.resources.spill_store_bytes == artifact.resources.spill_load_bytes == 0
        kernel = load(artifact)
        launch = SWIGLU.launches(PROBLEM, config, 1.0)[0]
        assert kernel.workspace_bytes(launch.integers) == 0
        # Columns that are no whole groups; a row of the output that is too short.
        for position, value in ((1, 2 * 14336 + 32), (6, 14336 - 8)):
            bad = [*launch.integers]
            bad[position] = value
            with pytest.raises(BenchmarkError):
                kernel.workspace_bytes(bad)
