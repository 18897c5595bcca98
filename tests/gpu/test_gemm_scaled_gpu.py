"""Products with factors, of e4m3 and of 16 bits, against fp64: each one through the gate."""

from __future__ import annotations

import struct

import pytest
from gemm_cases import SCALED as CASES
from gemm_cases import SCALED_SIZES as SIZES
from gemm_cases import scaled as problem_of

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.gemm import Gemm
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import KINDS
from tuner.measure.subjects import WORKSPACE, CompiledSubject, VendorSubject
from tuner.measurement import Status
from tuner.problem import E4M3, GemmProblem

pytestmark = pytest.mark.gpu

GEMM = Gemm()


def spec_of(case: str) -> KernelSpec:
    return GEMM.kernels(problem_of(case), CASES[case][1])["gemm"]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *map(spec_of, CASES)]


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


def test_the_gate_misses_an_output_s_factor_that_is_wrong(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    """None at all, one, and an operand's."""
    problem, chosen = problem_of("e4m3 once", (512, 512, 256)), CASES["e4m3 once"][1]
    kernel = compiled(compiler, "e4m3 once")
    gate.open(problem, 5)
    gate.load("random")
    [launch] = GEMM.launches(problem, chosen, 1.0)
    at = gate.pointers
    with Pool(device) as pool:
        zero, one = pool.allocate(4), pool.allocate(4)
        device.fill8(zero, 0, 4)
        device.write(one, struct.pack("<f", 1.0))
        for wrong in (zero, one, at["scale_a"]):
            gate.arm()
            tensors = [
                wrong if ref.operand == "scale_d" else at[ref.operand] for ref in launch.tensors
            ]
            kernel.launch(tensors, launch.integers, launch.scalars, 0, device.stream)
            assert gate.examine().status is Status.WRONG_RESULT


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize(
    ("scales", "dtype_d"), [("tensor", ""), ("row", ""), ("tensor", E4M3)], ids=str
)
def test_torch_s_own_passes_the_gate(
    device: Device, gate: Gate, scales: str, dtype_d: str, fast_accum: bool
) -> None:
    options = {"dtype": E4M3, "dtype_d": dtype_d, "scales": scales, "fast_accum": fast_accum}
    problem = GemmProblem(512, 512, 4096, **options)  # type: ignore[arg-type]
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


#: K at which one H200 was 9.6 % low under fast accumulation, of operands behind ReLU.
LONG = (256, 256, 16384)


def positive_error(
    device: Device, gate: Gate, subject: CompiledSubject | VendorSubject, problem: GemmProblem
) -> float:
    """Relative error on all-positive operands, after the gate's verdict."""
    gate.open(problem, 5)
    with Pool(device) as pool:
        own = gate.allocate(pool, WORKSPACE, subject.workspace_bytes)
        gate.load("positive")
        gate.arm([own])
        subject.bind({**gate.pointers, WORKSPACE: own.pointer}, 1.0, deliver=True)()
        verdict = gate.examine([own])
    assert verdict.status is Status.OK and verdict.error is not None, verdict.log
    print(f"{problem.label()}: {verdict.error:.2e}")
    return verdict.error


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0].get("dtype") == E4M3])
def test_own_sums_of_all_positive_operands(
    device: Device, gate: Gate, compiler: Compiler, case: str
) -> None:
    """Exact ones pass their limit; the loss of fast ones is measured, and passes."""
    problem, chosen = problem_of(case, LONG), CASES[case][1]
    loaded = {"gemm": compiled(compiler, case)}
    subject = CompiledSubject(device, GEMM, problem, chosen, loaded, 1.0)
    error = positive_error(device, gate, subject, problem)
    if problem.dtype_d != E4M3:  # whose rounding is 2.7 %
        assert (error > 0.02) is problem.fast_accum


@pytest.mark.parametrize("fast_accum", [True, False])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_torch_s_sums_of_all_positive_operands(
    device: Device, gate: Gate, scales: str, fast_accum: bool
) -> None:
    m, n, k = LONG
    options = {"dtype": E4M3, "scales": scales, "fast_accum": fast_accum}
    problem = GemmProblem(m, n, k, **options)  # type: ignore[arg-type]
    vendor = family("vendor_blas")
    subject = VendorSubject(device, vendor, problem, Config(vendor.name, {"kernel": "scaled_mm"}))
    error = positive_error(device, gate, subject, problem)
    assert (error > 0.02) is fast_accum
    subject.close()


def test_exact_sums_of_a_call_without_the_option(missing_gpu: str) -> None:
    """`tuner.scaled_mm` of elements behind ReLU, as PyTorch's by default."""
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
    for fast, low in ((False, 0.0), (True, 0.02)):
        out = tuner.scaled_mm(*given, out_dtype=torch.bfloat16, use_fast_accum=fast)
        error = float((out.double() - wanted).norm() / wanted.norm())
        print(f"fast accumulation {fast}: {error:.2e}")
        assert low <= error < (0.5 if fast else 8e-3)
