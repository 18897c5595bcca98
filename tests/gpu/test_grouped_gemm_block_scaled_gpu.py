"""Grouped products with factors of blocks against fp64, through the gate, at groups of any rows."""

from __future__ import annotations

import pytest
from block_scaled_cases import CASES, GROUPED, GROUPED_SIZES, grouped
from gating import pass_the_gate

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.families.block_scaled_grouped_gemm import KERNEL, BlockScaledGroupedGemm
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import KINDS
from tuner.measure.subjects import WORKSPACE, CompiledSubject
from tuner.measurement import Status
from tuner.problem import E4M3, GroupedGemmProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

FAMILY = BlockScaledGroupedGemm()
#: Those beside the small ones that groups of a warp's lanes, and their tiles, go beyond.
SIZES = (*GROUPED_SIZES, (64, 2048, 1408, 2048), (8, 4096, 1024, 512))


def problem_of(size: tuple[int, int, int, int]) -> GroupedGemmProblem:
    return GroupedGemmProblem(*size, sizes="zipf", dtype=E4M3)


def spec_of(case: str) -> KernelSpec:
    return FAMILY.kernels(problem_of(SIZES[0]), grouped(CASES[case]))[KERNEL]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *map(spec_of, GROUPED)]


def subject_of(
    device: Device, compiler: Compiler, case: str, problem: GroupedGemmProblem
) -> CompiledSubject:
    chosen = grouped(CASES[case])
    assert FAMILY.violations(problem, chosen, DEFAULT_GPU) == []
    [(_, future)] = compiler.submit([spec_of(case)])
    return CompiledSubject(device, FAMILY, problem, chosen, {KERNEL: load(future.result())}, 1.0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", GROUPED)
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, case: str, size: tuple[int, int, int, int]
) -> None:
    problem = problem_of(size)
    pass_the_gate(device, gate, problem, subject_of(device, compiler, case, problem))


@pytest.mark.parametrize("case", ["square", "swapped"])
def test_a_captured_call_reads_its_offsets_when_it_is_replayed(
    device: Device, gate: Gate, compiler: Compiler, case: str
) -> None:
    problem = GroupedGemmProblem(9, 700, 264, 400, dtype=E4M3)
    subject = subject_of(device, compiler, case, problem)
    gate.open(problem, 5)
    call = subject.bind({**gate.pointers, WORKSPACE: 0}, 1.0)
    call()
    graph = subject.capture([call])
    for kind in KINDS[problem.op]:  # each has other rows in a group
        gate.load(kind)
        gate.arm()
        graph.replay()
        verdict = gate.examine()
        assert verdict.status is Status.OK, verdict.log
    graph.close()


def test_offsets_beyond_the_rows_write_nothing_beside_them(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    """Nobody can look at them before the kernel runs: it takes them for the nearest bound."""
    problem = GroupedGemmProblem(3, 200, 136, 272, dtype=E4M3)
    for case in GROUPED:
        subject = subject_of(device, compiler, case, problem)
        gate.open(problem, 5)
        gate.load("random")
        gate.arm()
        offsets = (-70_000, 150, 100, 2_000_000)
        data = b"".join(at.to_bytes(4, "little", signed=True) for at in offsets)
        device.write(gate.pointers["offsets"], data)
        subject.bind({**gate.pointers, WORKSPACE: 0}, 1.0)()
        log = gate.examine().log
        assert log == "random inputs: input 'offsets' was changed"  # by this test, and no more
