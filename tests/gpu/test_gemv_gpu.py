"""GEMV against fp64: through the gate, at sizes that no step and no block of rows divides."""

from __future__ import annotations

import pytest
from gating import Gated, specs_of
from gemv_cases import CASES, problem_of

from tuner.families.base import KernelSpec
from tuner.measure.device import Pool
from tuner.measure.subjects import WORKSPACE

pytestmark = pytest.mark.gpu


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(problem_of(name), CASES[name][3]) for name in CASES])


@pytest.mark.parametrize("name", CASES)
def test_the_gate_passes_it(gated: Gated, name: str) -> None:
    gated.passes(problem_of(name), CASES[name][3])


@pytest.mark.parametrize("name", ["four row tiles", "groups of warps"])
def test_calls_that_overlap_give_the_same_bits(gated: Gated, name: str) -> None:
    """Launched as dependents of one another: nothing of one is taken for the next one's."""
    problem, device, gate = problem_of(name), gated.device, gated.gate
    subject = gated.subject(problem, CASES[name][3])
    gate.open(problem, 5)
    gate.load("random")
    size = problem.output.bytes
    with Pool(device) as pool:
        outputs = [pool.allocate(size) for _ in range(30)]
        at = {**gate.pointers, WORKSPACE: 0}
        calls = [subject.bind({**at, "d": output}, 1.0) for output in outputs]
        for call in calls:
            call()
        device.wait()
        first, *others = (device.read(output, size) for output in outputs)
    assert all(other == first for other in others)
