"""The GEMV template through nvcc: no spills, its own instructions, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tuner.base import resources
from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families.base import KernelSpec
from tuner.families.gemv import KERNEL, Gemv, block_threads, registers
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GemmProblem

pytestmark = [pytest.mark.compile, pytest.mark.timeout(900)]

GEMV = Gemv()
NAMES = ("warps", "k_warps", "row_tiles", "pieces", "stages", "blocks_per_sm")


def config(*values: int, **more: int) -> Config:
    runtime: dict[str, bool | int] = {"persistent": False, "pdl": False, "lead": 0, **more}
    return Config("gemv", {**dict(zip(NAMES, values, strict=True)), **runtime})


#: M up to 8 and up to 16, the most warps a multiprocessor is to hold, and an epilogue.
CASES = (
    (GemmProblem(1, 4096, 4096), config(8, 8, 2, 4, 3, 2)),
    (GemmProblem(16, 4096, 4096, dtype="bfloat16"), config(8, 8, 1, 4, 2, 1)),
    (
        GemmProblem(3, 512, 4104, dtype_d="float32", epilogue="bias_residual"),
        config(16, 16, 1, 4, 2, 2),
    ),
    (GemmProblem(8, 5120, 5120, dtype="bfloat16"), config(16, 8, 1, 4, 4, 1, row_loads=8)),
)


def spec_of(problem: GemmProblem, chosen: Config) -> KernelSpec:
    return GEMV.kernels(problem, chosen)[KERNEL]


ALL = [spec_of(*case) for case in CASES]
SPECS, DEVICE_SPECS = ALL[:1], ALL[1:]


def test_a_sample_of_the_space_compiles_without_spills(
    compiler: Compiler, device_compiler: Compiler
) -> None:
    submitted = [*compiler.submit(SPECS), *device_compiler.submit(DEVICE_SPECS)]
    for (problem, chosen), (_, future) in zip(CASES, submitted, strict=True):
        assert GEMV.violations(problem, chosen, DEFAULT_GPU) == []
        used = future.result().resources
        assert (used.spill_store_bytes, used.spill_load_bytes) == (0, 0), chosen.params
        assert used.registers * block_threads(chosen) * chosen["blocks_per_sm"] <= 65536
        assert registers(chosen) >= 0.75 * used.registers, "the predicate knows too few"


def test_the_library_refuses_what_it_would_get_wrong(compiler: Compiler) -> None:
    problem, chosen = CASES[0]
    [(_, future)] = compiler.submit(SPECS)
    kernel = load(future.result())
    (launch,) = GEMV.launches(problem, chosen, 1.0)
    assert kernel.workspace_bytes(launch.integers) == 0
    for position, value in (
        (0, 0),
        (0, 9),
        (1, 2**31),
        (2, 4100),
        (2, 8 * 10**6),
        (3, 65536),
        (4, 4088),
        (5, 4100),
        (6, 4095),
        (12, -8),
    ):
        wrong = [*launch.integers]
        wrong[position] = value
        with pytest.raises(BenchmarkError):
            kernel.workspace_bytes(wrong)
        with pytest.raises(BenchmarkError):
            kernel.launch((256, 512, 768), wrong, launch.scalars, 0, 0)
    for tensors in ((264, 512, 768), (256, 520, 768), (256, 512, 0)):
        with pytest.raises(BenchmarkError):
            kernel.launch(tensors, launch.integers, launch.scalars, 0, 0)


def test_weights_come_by_bulk_copies_and_not_before_their_time(
    compiler: Compiler, tmp_path: Path
) -> None:
    source, out = tmp_path / "gemv.cu", tmp_path / "out.ptx"
    source.write_text(render(SPECS[0], "bulk"))
    command = [str(compiler.toolchain.nvcc), "-std=c++17", "-O3", "-ptx", "-arch=sm_90a"]
    command.append(f"-I{resources.templates()}")
    subprocess.run([*command, "-o", str(out), str(source)], check=True)
    text = out.read_text()
    before, after = text.split("griddepcontrol.wait")
    assert "cp.async.bulk.shared::cluster.global" in after
    # What is fetched before the kernel in front has ended reaches the L2 and nothing else.
    assert "cp.async.bulk.prefetch.L2" in before and "ld.global" not in before
    assert "shared::cluster.global" not in before
