"""SwiGLU in one kernel against fp64, through the gate, at sizes that no tile divides."""

from __future__ import annotations

import pytest
from gating import pass_the_gate
from gemm_swiglu_cases import CASES, SIZES

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.families.gemm_swiglu import GemmSwiglu
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.subjects import CompiledSubject
from tuner.problem import SwigluProblem

pytestmark = pytest.mark.gpu

SWIGLU = GemmSwiglu()


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
