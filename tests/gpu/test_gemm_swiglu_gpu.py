"""SwiGLU in one kernel against fp64, through the gate, at sizes that no tile divides."""

from __future__ import annotations

import pytest
from gating import Gated, specs_of
from gemm_swiglu_cases import CASES, SIZES

from tuner.families.base import KernelSpec
from tuner.problem import SwigluProblem

pytestmark = pytest.mark.gpu


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(SwigluProblem(*SIZES[0], dtype=dtype), c) for dtype, c in CASES.values()])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(gated: Gated, case: str, size: tuple[int, int, int]) -> None:
    dtype, chosen = CASES[case]
    gated.passes(SwigluProblem(*size, dtype=dtype), chosen)
