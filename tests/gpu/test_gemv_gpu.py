"""GEMV against fp64: through the gate, at sizes that no step and no block of rows divides."""

from __future__ import annotations

import pytest
from gating import pass_the_gate
from gemv_cases import CASES, problem_of

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.families.base import KernelSpec
from tuner.families.gemv import KERNEL, Gemv
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.subjects import CompiledSubject

pytestmark = pytest.mark.gpu

GEMV = Gemv()


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
