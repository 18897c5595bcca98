"""GEMV against fp64: through the gate, at sizes that no step and no block of rows divides."""

from __future__ import annotations

from typing import Any

import pytest
from gating import pass_the_gate

from tuner.artifacts import LoadedKernel, load
from tuner.benchmark import CompiledSubject
from tuner.compiler import Compiler
from tuner.config import Config, Value
from tuner.device import Device, Pool
from tuner.families.base import KernelSpec
from tuner.families.gemv import KERNEL, Gemv
from tuner.gate import REFERENCE, Gate
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GemmProblem

pytestmark = pytest.mark.gpu

GEMV = Gemv()


def config(shape: tuple[int, int, int, int, int, int], **more: Value) -> Config:
    names = ("warps", "k_warps", "row_tiles", "pieces", "stages", "blocks_per_sm")
    params: dict[str, Value] = {
        **dict(zip(names, shape, strict=True)),
        "persistent": False,
        "pdl": False,
        "lead": 0,
    }
    return Config("gemv", {**params, **more})


PERSISTENT: dict[str, Value] = {"persistent": True, "pdl": True, "lead": 1024}
#: Types, epilogue, config, and M, N, K, batch: M = 1 of many steps, rows and K that end anywhere.
CASES: dict[str, tuple[Any, Any, str, Config, tuple[int, int, int, int]]] = {
    "one row": (
        "float16",
        "float16",
        "",
        config((8, 8, 2, 8, 3, 1)),
        (1, 5000, 4104, 1),
    ),
    "groups of warps": (
        "bfloat16",
        "float32",
        "bias",
        config((8, 2, 1, 4, 8, 1), **PERSISTENT),
        (5, 20001, 72, 1),
    ),
    "four row tiles": (
        "float16",
        "float32",
        "bias_residual",
        config((4, 4, 4, 2, 2, 2), **PERSISTENT),
        (8, 33000, 520, 1),
    ),
    "sixteen rows": (
        "bfloat16",
        "bfloat16",
        "bias_gelu",
        config((16, 8, 2, 2, 2, 1)),
        (13, 264, 1544, 3),
    ),
    "one warp": (
        "float16",
        "float16",
        "relu",
        config((1, 1, 1, 4, 2, 8)),
        (3, 9, 8, 2),
    ),
    "two blocks": (
        "float16",
        "float16",
        "silu",
        config((8, 8, 2, 4, 3, 2)),
        (1, 5000, 4104, 1),
    ),
    "groups for sixteen rows": (
        "float16",
        "float32",
        "residual",
        config((4, 2, 4, 2, 4, 2), **PERSISTENT),
        (16, 40000, 328, 1),
    ),
    "whole rows": (
        "float16",
        "float16",
        "bias_gelu_tanh",
        config((4, 4, 1, 16, 2, 1), pdl=True, lead=4096),
        (2, 333, 4096, 2),
    ),
}


def problem_of(name: str) -> GemmProblem:
    dtype, dtype_d, epilogue, _, (m, n, k, batch) = CASES[name]
    return GemmProblem(m, n, k, batch, dtype, dtype_d, epilogue=epilogue)


def spec_of(name: str) -> KernelSpec:
    return GEMV.kernels(problem_of(name), CASES[name][3])[KERNEL]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *map(spec_of, CASES)]


def compiled(compiler: Compiler, name: str) -> LoadedKernel:
    [(_, future)] = compiler.submit([spec_of(name)])
    return load(future.result())


@pytest.mark.parametrize("name", CASES)
def test_the_gate_passes_it(device: Device, gate: Gate, compiler: Compiler, name: str) -> None:
    problem, chosen = problem_of(name), CASES[name][3]
    assert GEMV.violations(problem, chosen, DEFAULT_GPU) == []
    loaded = {KERNEL: compiled(compiler, name)}
    subject = CompiledSubject(device, GEMV, problem, chosen, loaded, 1.0)
    pass_the_gate(device, gate, problem, subject)


@pytest.mark.parametrize("name", ["four row tiles", "groups of warps"])
def test_calls_that_overlap_give_the_same_bits(
    device: Device, gate: Gate, compiler: Compiler, name: str
) -> None:
    """Launched as dependents of one another: nothing of one is taken for the next one's."""
    problem, chosen = problem_of(name), CASES[name][3]
    kernel = compiled(compiler, name)
    [launch] = GEMV.launches(problem, chosen, 1.0)
    gate.open(problem, 5)
    gate.load("random")
    at = gate.pointers
    size = problem.output.bytes
    with Pool(device) as pool:
        outputs = [pool.allocate(size) for _ in range(30)]
        for output in outputs:
            tensors = [output if ref.operand == "d" else at[ref.operand] for ref in launch.tensors]
            kernel.launch(tensors, launch.integers, launch.scalars, 0, device.stream)
        device.wait()
        first, *others = (device.read(output, size) for output in outputs)
    assert all(other == first for other in others)
