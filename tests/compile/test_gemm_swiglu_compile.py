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
ALL = [SWIGLU.kernels(PROBLEM, config)["gemm"] for config in CONFIGS]
#: Compiled in every run; the other with ``scripts/test --long``, and of it the device half alone.
USUAL = {1}
SPECS = [ALL[1]]


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_they_compile_without_spills(
    number: int, compiler: Compiler, device_compiler: Compiler
) -> None:
    assert SWIGLU.violations(PROBLEM, CONFIGS[number], DEFAULT_GPU) == []
    [(_, future)] = (compiler if number in USUAL else device_compiler).submit([ALL[number]])
    used = future.result().resources
    assert used is not None and used.registers > 0
    assert used.spill_store_bytes == used.spill_load_bytes == 0


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    [(_, future)] = compiler.submit(SPECS)
    kernel = load(future.result())
    launch = SWIGLU.launches(PROBLEM, CONFIGS[1], 1.0)[0]
    assert kernel.workspace_bytes(launch.integers) == 0
    # Columns that fill no group; an output row that is too short.
    for position, value in ((1, 2 * 14336 + 32), (6, 14336 - 8)):
        bad = [*launch.integers]
        bad[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(bad)
