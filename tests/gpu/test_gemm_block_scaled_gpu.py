"""Products with factors of blocks against fp64: own kernels, cuBLASLt's and DeepGEMM's."""

from __future__ import annotations

import pytest
from block_scaled_cases import CASES, PROMOTED, SIZES
from block_scaled_cases import problem as problem_of
from gating import pass_the_gate

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.block_scaled_gemm import KERNEL, BlockScaledGemm
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import kinds_of
from tuner.measure.subjects import CompiledSubject, VendorSubject
from tuner.measurement import Status
from tuner.problem import GemmProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

FAMILY = BlockScaledGemm()
ANY = problem_of(*SIZES[0])


def promoted(size: tuple[int, int, int], scales: str) -> GemmProblem:
    m, n, k = size
    return GemmProblem.parse(f"M={m},N={n},K={k},dtype=e4m3,scales={scales},fast_accum=0")


def config_of(case: str) -> Config:
    return {**CASES, **PROMOTED}[case]


def spec_of(case: str, problem: GemmProblem = ANY) -> KernelSpec:
    return FAMILY.kernels(problem, config_of(case))[KERNEL]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    by_rows = promoted(SIZES[0], "row")
    return [REFERENCE, *map(spec_of, CASES), *(spec_of(case, by_rows) for case in PROMOTED)]


def subject_of(
    device: Device, compiler: Compiler, case: str, problem: GemmProblem
) -> CompiledSubject:
    [(_, future)] = compiler.submit([spec_of(case, problem)])
    loaded = {KERNEL: load(future.result())}
    return CompiledSubject(device, FAMILY, problem, config_of(case), loaded, 1.0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, case: str, size: tuple[int, int, int]
) -> None:
    problem = problem_of(*size)
    assert FAMILY.violations(problem, CASES[case], DEFAULT_GPU) == []
    pass_the_gate(device, gate, problem, subject_of(device, compiler, case, problem))


@pytest.mark.parametrize("scales", ["row", "tensor"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", PROMOTED)
def test_promoted_sums_pass_the_gate(
    device: Device,
    gate: Gate,
    compiler: Compiler,
    case: str,
    size: tuple[int, int, int],
    scales: str,
) -> None:
    problem = promoted(size, scales)
    assert FAMILY.violations(problem, PROMOTED[case], DEFAULT_GPU) == []
    pass_the_gate(device, gate, problem, subject_of(device, compiler, case, problem))


REPEATED = (
    "square",
    "columns of three blocks",
    "tall",
    "unrolled, tall",
    "factors by TMA",
    "swapped, split",
)


@pytest.mark.parametrize("case", REPEATED)
def test_repeated_launches_are_equal_to_the_bit(
    device: Device, gate: Gate, compiler: Compiler, case: str
) -> None:
    problem = problem_of(1000, 2112, 1152)
    subject = subject_of(device, compiler, case, problem)
    gate.open(problem, 5)
    gate.load("random")
    call = subject.bind({**gate.pointers, "workspace": 0}, 1.0)
    output, size = gate.pointers["d"], problem.output.bytes
    first = b""
    for _ in range(200):
        gate.arm()
        call()
        device.wait()
        found = device.read(output, size)
        first = first or found
        assert found == first


WRONG = ("square", "columns of two blocks", "unrolled, tall", "swapped", "swapped, split")


@pytest.mark.parametrize("case", WRONG)
def test_the_gate_misses_factors_that_are_wrong(
    device: Device, gate: Gate, compiler: Compiler, case: str
) -> None:
    """The factors of the next row, of the next block of columns, of the next block of K."""
    problem = problem_of(512, 512, 512)
    subject = subject_of(device, compiler, case, problem)
    gate.open(problem, 5)
    gate.load("random")
    sizes = {operand.name: operand.bytes for operand in problem.operands}
    with Pool(device) as pool:
        for name, step in (("scale_a", 4), ("scale_a", 4 * 512), ("scale_b", 16), ("scale_b", 4)):
            size, at = sizes[name], gate.pointers[name]
            moved = pool.allocate(size)
            device.copy(moved, at + step, size - step)
            device.copy(moved + size - step, at, step)
            gate.arm()
            subject.bind({**gate.pointers, name: moved, "workspace": 0}, 1.0)()
            assert gate.examine().status is Status.WRONG_RESULT, (name, step)


@pytest.mark.parametrize("kernel", ["scaled_mm", "deep_gemm"])
@pytest.mark.parametrize("size", [(64, 512, 1024), (512, 2112, 4096)], ids=str)
def test_a_vendor_s_passes_the_gate(
    device: Device, gate: Gate, kernel: str, size: tuple[int, int, int]
) -> None:
    problem, vendor = problem_of(*size), family("vendor_blas")
    chosen = Config(vendor.name, {"kernel": kernel})
    assert vendor.violations(problem, chosen, DEFAULT_GPU) == []
    if isinstance(reason := vendor.vendor_call(problem, chosen, 1.0), str):
        pytest.skip(reason)
    subject = VendorSubject(device, vendor, problem, chosen)
    gate.open(problem, 5)
    for kind in kinds_of(problem, is_vendor=True):
        gate.load(kind)
        gate.arm()
        subject.bind(gate.pointers, 1.0, deliver=True)()
        verdict = gate.examine()
        assert verdict.status is Status.OK, verdict.log
    subject.close()
