"""Products with factors, of e4m3 and of 16 bits, against fp64: each one through the gate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tuner.artifacts import LoadedKernel, load
from tuner.benchmark import WORKSPACE, CompiledSubject, VendorSubject
from tuner.compiler import Compiler
from tuner.config import Config, Value
from tuner.device import Device, Pool
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.gemm import Gemm
from tuner.gate import KINDS, REFERENCE, Gate
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Status
from tuner.problem import E4M3, GemmProblem

pytestmark = pytest.mark.gpu

GEMM = Gemm()
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
FAST = {"dtype": E4M3, "scales": "row"}
SUMMED = {"dtype": E4M3, "scales": "row", "fast_accum": False}
#: Both accumulations and kinds of factors, every schedule, both orientations; a kernel each.
CASES: dict[str, tuple[Mapping[str, Any], Config]] = {
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
    "fp16": ({"scales": "row"}, config(PINGPONG, (128, 112, 64), cluster_m=2)),
    "bf16": (
        {"dtype": "bfloat16", "dtype_d": "float32", "scales": "row"},
        config(COOPERATIVE, (128, 128, 64), swap_ab=True),
    ),
}
#: M, N, K.
SIZES = ((200, 264, 144), (1, 1000, 80), (333, 136, 1040), (512, 512, 16384))


def problem_of(case: str, size: tuple[int, int, int] = SIZES[0]) -> GemmProblem:
    return GemmProblem(*size, **CASES[case][0])


def spec_of(case: str) -> KernelSpec:
    return GEMM.kernels(problem_of(case), CASES[case][1])["gemm"]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *map(spec_of, CASES)]


@pytest.fixture(scope="module")
def device(missing_gpu: str) -> Device:
    if missing_gpu:
        pytest.skip(missing_gpu)
    return Device()


@pytest.fixture(scope="module")
def gate(device: Device, compiler: Compiler) -> Iterator[Gate]:
    [(_, future)] = compiler.submit([REFERENCE])
    made = Gate(device, load(future.result()))
    yield made
    made.close()


def compiled(compiler: Compiler, case: str) -> LoadedKernel:
    [(_, future)] = compiler.submit([spec_of(case)])
    return load(future.result())


def test_every_case_is_legal() -> None:
    for case, (_, chosen) in CASES.items():
        for size in SIZES:
            assert GEMM.violations(problem_of(case, size), chosen, DEFAULT_GPU) == []


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, case: str, size: tuple[int, int, int]
) -> None:
    problem, chosen = problem_of(case, size), CASES[case][1]
    loaded = {"gemm": compiled(compiler, case)}
    subject = CompiledSubject(device, GEMM, problem, chosen, loaded, 1.0)
    gate.open(problem, 5)
    with Pool(device) as pool:
        own = gate.allocate(pool, WORKSPACE, subject.workspace_bytes)
        for kind in KINDS[problem.op]:
            gate.load(kind)
            gate.arm([own])
            subject.bind({**gate.pointers, WORKSPACE: own.pointer}, 1.0)()
            verdict = gate.examine([own])
            assert verdict.status is Status.OK, verdict.log


def test_the_gate_misses_factors_that_are_wrong(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    """A row's factor for another's, by one tile of rows; and none at all."""
    for case in ("wide", "fp16"):
        problem, chosen = problem_of(case, (512, 512, 256)), CASES[case][1]
        kernel = compiled(compiler, case)
        gate.open(problem, 5)
        gate.load("random")
        [launch] = GEMM.launches(problem, chosen, 1.0)
        at = gate.pointers
        with Pool(device) as pool:
            zeros = pool.allocate(4 * 512)
            device.fill8(zeros, 0, 4 * 512)
            for name in ("scale_a", "scale_b"):
                moved = pool.allocate(4 * 512)
                device.copy(moved, at[name] + 4 * 64, 4 * (512 - 64))
                device.copy(moved + 4 * (512 - 64), at[name], 4 * 64)
                for wrong in (zeros, moved):
                    gate.arm()
                    tensors = [
                        wrong if ref.operand == name else at[ref.operand] for ref in launch.tensors
                    ]
                    kernel.launch(tensors, launch.integers, launch.scalars, 0, device.stream)
                    assert gate.examine().status is Status.WRONG_RESULT, name


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_torch_s_own_passes_the_gate(
    device: Device, gate: Gate, scales: str, fast_accum: bool
) -> None:
    problem = GemmProblem(512, 512, 4096, dtype=E4M3, scales=scales, fast_accum=fast_accum)  # type: ignore[arg-type]
    vendor = family("vendor_blas")
    subject = VendorSubject(device, vendor, problem, Config(vendor.name, {"kernel": "scaled_mm"}))
    gate.open(problem, 5)
    for kind in KINDS[problem.op]:
        gate.load(kind)
        gate.arm()
        subject.bind(gate.pointers, 1.0, deliver=True)()
        verdict = gate.examine()
        assert verdict.status is Status.OK, verdict.log
    subject.close()
