"""Products of few hundred rows against fp64: kernels whose clusters divide K."""

from __future__ import annotations

import pytest
from cluster_gemm_cases import COMPILED, SIZES, spec_of
from cluster_gemm_cases import problem as problem_of
from gating import Gated

from tuner.families.base import KernelSpec
from tuner.measure.gate import REFERENCE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec_of(*case) for case in COMPILED.values())]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", COMPILED)
def test_the_gate_passes_it(gated: Gated, case: str, size: tuple[int, int, int]) -> None:
    chosen, epilogue, dtype = COMPILED[case]
    gated.passes(problem_of(size, epilogue, dtype), chosen)
