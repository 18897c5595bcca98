"""Products with factors, of e4m3 and of 16 bits, against fp64: each one through the gate."""

from __future__ import annotations

import struct

import pytest
from gating import Gated, specs_of
from gemm_cases import SCALED as CASES
from gemm_cases import SCALED_SIZES as SIZES
from gemm_cases import scaled as problem_of

from tuner.config import Config
from tuner.families.base import KernelSpec
from tuner.measure.device import Pool
from tuner.measurement import Status
from tuner.problem import E4M3, GemmProblem

pytestmark = pytest.mark.gpu

TORCH = Config("vendor_blas", {"kernel": "scaled_mm"})


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(problem_of(case), CASES[case][1]) for case in CASES])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(gated: Gated, case: str, size: tuple[int, int, int]) -> None:
    gated.passes(problem_of(case, size), CASES[case][1])


@pytest.mark.parametrize("case", ["wide", "fp16", "e4m3 once"])
def test_the_gate_misses_factors_that_are_wrong(gated: Gated, case: str) -> None:
    """None at all, a row's factor for another's, by one tile of rows; for an output's, one and an
    operand's.
    """
    problem, device, gate = problem_of(case, (512, 512, 256)), gated.device, gated.gate
    subject = gated.subject(problem, CASES[case][1])
    gate.open(problem, 5)
    gate.load("random")
    at = gate.pointers
    with Pool(device) as pool:
        zeros, one = pool.allocate(4 * 512), pool.allocate(4)
        device.fill8(zeros, 0, 4 * 512)
        device.write(one, struct.pack("<f", 1.0))
        wrong = [("scale_d", pointer) for pointer in (zeros, one, at["scale_a"])]
        if case != "e4m3 once":
            wrong = []
            for name in ("scale_a", "scale_b"):
                moved = pool.allocate(4 * 512)
                device.copy(moved, at[name] + 4 * 64, 4 * (512 - 64))
                device.copy(moved + 4 * (512 - 64), at[name], 4 * 64)
                wrong += [(name, zeros), (name, moved)]
        for name, pointer in wrong:
            verdict = gated.judged(subject, problem, {name: pointer})
            assert verdict.status is Status.WRONG_RESULT, name


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize(
    ("scales", "dtype_d"), [("tensor", ""), ("row", ""), ("tensor", E4M3)], ids=str
)
def test_torch_s_own_passes_the_gate(
    gated: Gated, scales: str, dtype_d: str, fast_accum: bool
) -> None:
    options = {"dtype": E4M3, "dtype_d": dtype_d, "scales": scales, "fast_accum": fast_accum}
    gated.passes(GemmProblem(512, 512, 4096, **options), TORCH)  # type: ignore[arg-type]


#: K at which one H200 was 9.6 % low under fast accumulation, of operands behind ReLU.
LONG = (256, 256, 16384)


def positive_error(gated: Gated, problem: GemmProblem, config: Config) -> float:
    """Relative error on all-positive operands, after the gate's verdict."""
    error = gated.passes(problem, config, ["positive"]).error
    assert error is not None
    print(f"{problem.label()}: {error:.2e}")
    return error


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0].get("dtype") == E4M3])
def test_own_sums_of_all_positive_operands(gated: Gated, case: str) -> None:
    """Exact ones pass their limit; the loss of fast ones is measured, and passes."""
    problem = problem_of(case, LONG)
    error = positive_error(gated, problem, CASES[case][1])
    if problem.dtype_d != E4M3:  # whose rounding is 2.7 %
        assert (error > 0.02) is problem.fast_accum


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_torch_s_sums_of_all_positive_operands(gated: Gated, scales: str, fast_accum: bool) -> None:
    options = {"dtype": E4M3, "scales": scales, "fast_accum": fast_accum}
    problem = GemmProblem(*LONG, **options)  # type: ignore[arg-type]
    assert (positive_error(gated, problem, TORCH) > 0.02) is fast_accum


def test_exact_sums_of_a_call_without_the_option(missing_gpu: str) -> None:
    """`tuner.scaled_mm` of elements behind ReLU, as PyTorch's by default.

    A kernel of exact sums may answer a call that permits fast ones.
    """
    if missing_gpu:
        pytest.skip(missing_gpu)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import tuner

    m, n, k = LONG
    torch.manual_seed(0)
    a, b = (
        (16 * torch.randn(rows, k, device="cuda")).relu().to(torch.float8_e4m3fn) for rows in (m, n)
    )
    rows, columns = torch.full((m, 1), 1 / 16), torch.full((1, n), 1 / (16 * k))
    given = a, b.t(), rows.cuda(), columns.cuda()
    wanted = given[2].double() * (a.double() @ b.double().t()) * given[3].double()
    for fast in (False, True):
        out = tuner.scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=fast)
        error = float((out.double() - wanted).norm() / wanted.norm())
        print(f"fast accumulation {fast}: {error:.2e}")
        assert error < (0.5 if fast else 8e-3)
