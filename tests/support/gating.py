"""A compiled kernel through the gate, for the tests of families on a GPU."""

from __future__ import annotations

from tuner.families.base import SCRATCH
from tuner.measure.device import Device, Pool
from tuner.measure.gate import Gate
from tuner.measure.gate.inputs import kinds_of, scale_of
from tuner.measure.subjects import WORKSPACE, CompiledSubject
from tuner.measurement import Status
from tuner.problem import Problem


def pass_the_gate(device: Device, gate: Gate, problem: Problem, subject: CompiledSubject) -> None:
    """Every kind of input, with guarded scratch and workspace where the kernels want them."""
    gate.open(problem, 5)
    with Pool(device) as pool:
        own = [
            gate.allocate(pool, WORKSPACE, subject.workspace_bytes),
            gate.allocate(pool, SCRATCH, subject.scratch_bytes),
        ]
        pointers = {guarded.name: guarded.pointer for guarded in own}
        for kind in kinds_of(problem):
            gate.load(kind)
            gate.arm(own)
            subject.bind({**gate.pointers, **pointers}, scale_of(problem, kind))()
            verdict = gate.examine(own)
            assert verdict.status is Status.OK, f"{kind}: {verdict.log}"
