"""The grouped kernels against fp64, through the gate, at groups that no tile divides."""

from __future__ import annotations

from typing import Any

import pytest
from gating import pass_the_gate
from grouped_gemm_cases import CASES, SIZES

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.families.grouped_gemm import GroupedGemm
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device, Pool
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import KINDS
from tuner.measure.subjects import WORKSPACE, CompiledSubject
from tuner.measurement import Status
from tuner.problem import GroupedGemmProblem

pytestmark = pytest.mark.gpu

GROUPED = GroupedGemm()


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    specs = [
        GROUPED.kernels(GroupedGemmProblem(*SIZES[0], dtype=dtype), chosen)["grouped_gemm"]
        for dtype, chosen in CASES.values()
    ]
    return [REFERENCE, *specs]


def prepared(
    device: Device, compiler: Compiler, case: str, size: tuple[int, int, int, int, Any]
) -> tuple[GroupedGemmProblem, CompiledSubject]:
    dtype, chosen = CASES[case]
    problem = GroupedGemmProblem(*size, dtype=dtype)
    assert GROUPED.violations(problem, chosen, DEFAULT_GPU) == []
    specs = GROUPED.kernels(problem, chosen)
    built = compiler.submit(list(specs.values()))
    loaded = {name: load(future.result()) for name, (_, future) in zip(specs, built, strict=True)}
    return problem, CompiledSubject(device, GROUPED, problem, chosen, loaded, 1.0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, case: str, size: tuple[int, int, int, int, Any]
) -> None:
    problem, subject = prepared(device, compiler, case, size)
    pass_the_gate(device, gate, problem, subject)


def test_a_captured_call_reads_its_offsets_when_it_is_replayed(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    problem, subject = prepared(device, compiler, "swapped", (9, 700, 264, 136, "uniform"))
    gate.open(problem, 5)
    with Pool(device) as pool:
        own = gate.allocate(pool, WORKSPACE, subject.workspace_bytes)
        call = subject.bind({**gate.pointers, WORKSPACE: own.pointer}, 1.0)
        call()
        graph = subject.capture([call])
        for kind in KINDS[problem.op]:  # each has other rows in a group
            gate.load(kind)
            gate.arm([own])
            graph.replay()
            verdict = gate.examine([own])
            assert verdict.status is Status.OK, verdict.log
        graph.close()


def test_offsets_beyond_the_rows_write_nothing_beside_them(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    """Nobody can look at them before the kernel runs: it takes them for the nearest bound."""
    problem, subject = prepared(device, compiler, "pingpong", (3, 200, 136, 72, "uniform"))
    gate.open(problem, 5)
    with Pool(device) as pool:
        own = gate.allocate(pool, WORKSPACE, subject.workspace_bytes)
        gate.load("random")
        gate.arm([own])
        offsets = (-70_000, 150, 100, 2_000_000)
        data = b"".join(at.to_bytes(4, "little", signed=True) for at in offsets)
        device.write(gate.pointers["offsets"], data)
        subject.bind({**gate.pointers, WORKSPACE: own.pointer}, 1.0)()
        log = gate.examine([own]).log
        assert log == "random inputs: input 'offsets' was changed"  # by this test, and no more
