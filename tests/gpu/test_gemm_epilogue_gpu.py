"""GEMM epilogues against fp64: each one through the gate, at sizes that no tile divides."""

from __future__ import annotations

from typing import Any

import pytest
from gating import Gated, specs_of
from gemm_cases import EPILOGUE_SIZES as SIZES
from gemm_cases import EPILOGUES as CASES
from gemm_cases import with_epilogue as problem_of

from tuner.families.base import KernelSpec, Ref
from tuner.families.gemm import Matrix, gemm_launch
from tuner.measure.device import Device, Pool
from tuner.measurement import Status
from tuner.problem import EPILOGUES

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytestmark = pytest.mark.gpu


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(problem_of(epilogue), CASES[epilogue][2]) for epilogue in CASES])


def test_every_epilogue_has_a_case() -> None:
    assert sorted(CASES) == sorted(EPILOGUES)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("epilogue", CASES)
def test_the_gate_passes_it(gated: Gated, epilogue: str, size: tuple[int, int, int, int]) -> None:
    gated.passes(problem_of(epilogue, size), CASES[epilogue][2])


def test_the_gate_misses_a_part_that_is_zero(gated: Gated) -> None:
    both, device = problem_of("bias_residual"), gated.device
    subject = gated.subject(both, CASES["bias_residual"][2])
    gated.gate.open(both, 5)
    gated.gate.load("random")
    with Pool(device) as pool:
        zeros = pool.allocate(both.output.bytes)
        device.fill8(zeros, 0, both.output.bytes)
        for missing in ("bias", "residual"):
            verdict = gated.judged(subject, both, {missing: zeros})
            assert verdict.status is Status.WRONG_RESULT, missing


def read16(device: Device, pointer: int, shape: tuple[int, ...]) -> Any:
    size = 2 * int(np.prod(shape))
    return np.frombuffer(device.read(pointer, size), np.float16).reshape(shape).astype(np.float64)


def test_alpha_beta_and_a_residual_in_place(gated: Gated) -> None:
    """D = alpha A B + bias + beta C, with C and D one tensor."""
    problem, chosen = problem_of("bias_residual"), CASES["bias_residual"][2]
    device, gate = gated.device, gated.gate
    gate.open(problem, 9)
    gate.load("random")
    m, n, k = problem.m, problem.n, problem.k
    at = gate.pointers
    a, b = read16(device, at["a"], (m, k)), read16(device, at["b"], (n, k)).T
    bias, residual = read16(device, at["bias"], (n,)), read16(device, at["residual"], (m, n))
    launch = gemm_launch(
        problem,
        chosen,
        (Matrix(Ref("a"), k, m * k), Matrix(Ref("b"), k, n * k), Matrix(Ref("d"), n, m * n)),
        0.5,
        beta=-0.75,
        extra={"bias": Ref("bias"), "residual": Ref("d")},
    )
    device.copy(at["d"], at["residual"], problem.output.bytes)
    kernel = gated.loaded(problem, chosen)["gemm"]
    tensors = [at[ref.operand] for ref in launch.tensors]
    kernel.launch(tensors, launch.integers, launch.scalars, 0, device.stream)
    device.wait()
    wanted = 0.5 * (a @ b) + bias - 0.75 * residual
    got = read16(device, at["d"], (m, n))
    assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 1e-3
