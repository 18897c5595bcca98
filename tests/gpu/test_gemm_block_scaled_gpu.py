"""Products with factors of blocks against fp64: own kernels, cuBLASLt's and DeepGEMM's."""

from __future__ import annotations

import pytest
from block_scaled_cases import CASES, PROMOTED, SIZES
from block_scaled_cases import problem as problem_of
from gating import Gated, specs_of

from tuner.config import Config
from tuner.families.base import KernelSpec
from tuner.measure.device import Pool
from tuner.measurement import Status
from tuner.problem import GemmProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

Size = tuple[int, int, int]


def promoted(size: Size, scales: str) -> GemmProblem:
    m, n, k = size
    return GemmProblem.parse(f"M={m},N={n},K={k},dtype=e4m3,scales={scales},fast_accum=0")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    of_blocks = [(problem_of(*SIZES[0]), config) for config in CASES.values()]
    return specs_of([*of_blocks, *((promoted(SIZES[0], "row"), c) for c in PROMOTED.values())])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(gated: Gated, case: str, size: Size) -> None:
    gated.passes(problem_of(*size), CASES[case])


@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", PROMOTED)
def test_promoted_sums_pass_the_gate(gated: Gated, case: str, size: Size, scales: str) -> None:
    gated.passes(promoted(size, scales), PROMOTED[case])


REPEATED = (
    "square",
    "columns of three blocks",
    "tall",
    "unrolled, tall",
    "factors by TMA",
    "swapped, split",
)


@pytest.mark.parametrize("case", REPEATED)
def test_repeated_launches_are_equal_to_the_bit(gated: Gated, case: str) -> None:
    gated.repeats(problem_of(1000, 2112, 1152), CASES[case], count=100)


WRONG = ("square", "columns of two blocks", "unrolled, tall", "swapped", "swapped, split")


@pytest.mark.parametrize("case", WRONG)
def test_the_gate_misses_factors_that_are_wrong(gated: Gated, case: str) -> None:
    """The factors of the next row, of the next block of columns, of the next block of K."""
    problem, gate, device = problem_of(512, 512, 512), gated.gate, gated.device
    subject = gated.subject(problem, CASES[case])
    gate.open(problem, 5)
    gate.load("random")
    sizes = {operand.name: operand.bytes for operand in problem.operands}
    with Pool(device) as pool:
        for name, step in (("scale_a", 4), ("scale_a", 4 * 512), ("scale_b", 16), ("scale_b", 4)):
            size, at = sizes[name], gate.pointers[name]
            moved = pool.allocate(size)
            device.copy(moved, at + step, size - step)
            device.copy(moved + size - step, at, step)
            verdict = gated.judged(subject, problem, {name: moved})
            assert verdict.status is Status.WRONG_RESULT, (name, step)


@pytest.mark.parametrize("kernel", ["scaled_mm", "deep_gemm"])
@pytest.mark.parametrize("size", [(64, 512, 1024), (512, 2112, 4096)], ids=str)
def test_a_vendor_s_passes_the_gate(gated: Gated, kernel: str, size: Size) -> None:
    gated.passes(problem_of(*size), Config("vendor_blas", {"kernel": kernel}))
