"""Products of few hundred rows against fp64: kernels whose clusters divide K."""

from __future__ import annotations

import pytest
from cluster_gemm_cases import COMPILED, FAMILY, SIZES, spec_of
from cluster_gemm_cases import problem as problem_of
from gating import pass_the_gate

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.families.cluster_gemm import KERNEL
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.subjects import CompiledSubject

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec_of(*case) for case in COMPILED.values())]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", COMPILED)
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, case: str, size: tuple[int, int, int]
) -> None:
    chosen, epilogue, dtype = COMPILED[case]
    problem = problem_of(size, epilogue, dtype)
    assert FAMILY.violations(problem, chosen, DEFAULT_GPU) == []
    [(_, future)] = compiler.submit([spec_of(chosen, epilogue, dtype)])
    loaded = {KERNEL: load(future.result())}
    subject = CompiledSubject(device, FAMILY, problem, chosen, loaded, 1.0)
    pass_the_gate(device, gate, problem, subject)
