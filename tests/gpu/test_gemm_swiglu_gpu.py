"""SwiGLU in one kernel against fp64, through the gate, at sizes that no tile divides."""

from __future__ import annotations

from typing import Any

import pytest
from gating import pass_the_gate

from tuner.artifacts import load
from tuner.benchmark import CompiledSubject
from tuner.compiler import Compiler
from tuner.config import Config, Value
from tuner.device import Device
from tuner.families.base import KernelSpec
from tuner.families.gemm_swiglu import GemmSwiglu
from tuner.gate import REFERENCE, Gate
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SwigluProblem

pytestmark = pytest.mark.gpu

SWIGLU = GemmSwiglu()


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


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    specs = [
        SWIGLU.kernels(SwigluProblem(*SIZES[0], dtype=dtype), chosen)["gemm"]
        for dtype, chosen in CASES.values()
    ]
    return [REFERENCE, *specs]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, case: str, size: tuple[int, int, int]
) -> None:
    dtype, chosen = CASES[case]
    problem = SwigluProblem(*size, dtype=dtype)
    assert SWIGLU.violations(problem, chosen, DEFAULT_GPU) == []
    specs = SWIGLU.kernels(problem, chosen)
    built = compiler.submit(list(specs.values()))
    loaded = {name: load(future.result()) for name, (_, future) in zip(specs, built, strict=True)}
    subject = CompiledSubject(device, SWIGLU, problem, chosen, loaded, 1.0)
    pass_the_gate(device, gate, problem, subject)
