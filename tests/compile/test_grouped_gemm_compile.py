"""The grouped kernel through the real nvcc: no spills, and what it refuses."""

from __future__ import annotations

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.grouped_gemm import GroupedGemm
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GroupedGemmProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

GROUPED = GroupedGemm()
PROBLEM = GroupedGemmProblem(8, 512, 14336, 4096, dtype="bfloat16")
CONFIG = Config(
    "grouped_gemm",
    {
        "tile_m": 64,
        "tile_n": 64,
        "tile_k": 128,
        "cluster_m": 2,
        "cluster_n": 1,
        "kernel_schedule": "TmaWarpSpecializedPingpong",
        "swap_ab": True,
        "raster_order": "AlongM",
    },
)
SPECS = [GROUPED.kernels(PROBLEM, CONFIG)["grouped_gemm"]]


def test_it_compiles_without_spills(compiler: Compiler) -> None:
    assert GROUPED.violations(PROBLEM, CONFIG, DEFAULT_GPU) == []
    [(_, future)] = compiler.submit(SPECS)
    artifact = future.result()
    assert artifact.resources is not None and artifact.resources.registers > 0
    assert artifact.resources.spill_store_bytes == artifact.resources.spill_load_bytes == 0
    kernel = load(artifact)
    launch = GROUPED.launches(PROBLEM, CONFIG, 1.0)[0]
    # No rows; columns that TMA cannot step over; weights beyond 2^31 rows; an order there is not.
    for position, value in ((0, 0), (1, 14332), (3, 2**18), (4, 0)):
        bad = [*launch.integers]
        bad[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(bad)
