"""GEMM kernels through the real nvcc: each schedule, layout pair, output type and scheduler."""

from __future__ import annotations

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config, Value
from tuner.errors import BenchmarkError
from tuner.families.gemm import Gemm
from tuner.hardware import DEFAULT_GPU
from tuner.problem import E4M3, GemmProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

GEMM = Gemm()


def config(schedule: str, tile: tuple[int, int, int], **more: Value) -> Config:
    params: dict[str, Value] = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        "cluster_m": 2,
        "cluster_n": 1,
        "kernel_schedule": schedule,
        "epilogue_schedule": schedule.removesuffix("Pingpong"),
        "swap_ab": False,
        **more,
    }
    if schedule != "TmaWarpSpecialized":
        params |= {"raster_order": "AlongM", "max_swizzle_size": 1}
    return Config("gemm", params)


#: Together they take every branch of the template.
SAMPLE = [
    (
        GemmProblem(1024, 1024, 64, batch=16, dtype_d="float32", layout_a="col"),
        config("TmaWarpSpecialized", (64, 128, 64), stages=2),
    ),
    (
        GemmProblem(2048, 2048, 2048, dtype="bfloat16", layout_b="row", epilogue="residual"),
        config(
            "TmaWarpSpecializedCooperative",
            (128, 256, 64),
            tile_scheduler="StreamK",
            decomposition_mode="StreamK",
        ),
    ),
    (
        GemmProblem(2048, 2048, 2048, layout_a="col", layout_b="row"),
        config(
            "TmaWarpSpecializedCooperative",
            (256, 128, 64),
            tile_scheduler="Persistent",
            epilogue_schedule="NoSmemWarpSpecialized",
        ),
    ),
    (
        GemmProblem(4096, 14336, 4096, epilogue="bias_gelu"),
        config("TmaWarpSpecializedPingpong", (128, 176, 64)),
    ),
    (
        GemmProblem(16, 4096, 4096, dtype="bfloat16", dtype_d="float32", epilogue="bias_silu"),
        config("TmaWarpSpecializedPingpong", (64, 16, 64), swap_ab=True),
    ),
    (
        GemmProblem(2048, 2048, 2048, dtype=E4M3, scales="row", fast_accum=False),
        config(
            "TmaWarpSpecializedCooperative",
            (128, 176, 128),
            tile_scheduler="Persistent",
            swap_ab=True,
        ),
    ),
    (
        GemmProblem(2048, 2048, 2048, dtype=E4M3, dtype_d=E4M3, scales="row"),
        config("TmaWarpSpecializedPingpong", (64, 16, 128), swap_ab=True),
    ),
]


#: The one whose library is loaded. Of the others only the device half is compiled.
LOADED = 4
#: Compiled in every run; the others, 26 CPU-seconds each, with ``scripts/test --long``.
USUAL = {LOADED}
ALL = [GEMM.kernels(problem, candidate)["gemm"] for problem, candidate in SAMPLE]
SPECS = [ALL[LOADED]]


def test_the_sample_is_legal() -> None:
    for problem, candidate in SAMPLE:
        assert GEMM.violations(problem, candidate, DEFAULT_GPU) == []


@pytest.mark.usefixtures("usual")
@pytest.mark.parametrize("number", range(len(SAMPLE)))
def test_branches_of_the_template_compile_without_spills(
    number: int, compiler: Compiler, device_compiler: Compiler
) -> None:
    [(_, future)] = (compiler if number == LOADED else device_compiler).submit([ALL[number]])
    used = future.result().resources
    assert used.registers > 0
    assert used.spill_store_bytes == used.spill_load_bytes == 0


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    [(_, future)] = compiler.submit(SPECS)
    kernel = load(future.result())
    launch = GEMM.launches(*SAMPLE[LOADED], 1.0)[0]
    assert kernel.workspace_bytes(launch.integers) == 0
    for position, value in ((0, 0), (4, launch.integers[4] + 1), (11, 9)):
        bad = [*launch.integers]
        bad[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(bad)
    with pytest.raises(BenchmarkError, match="Misaligned"):
        kernel.launch([256, 257, 512], launch.integers, launch.scalars, 0, 0)
