"""Attention over paged caches on the GPU.

Kernels are proven on shuffled pages, with lengths that end at a page's edge and with NaN in unused
slots. Further tests cover keys that the gate does not see.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from paged_cases import FAMILY, KERNELS, spec
from proving import attention_target, faults

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.gate.inputs import scale_of
from tuner.measure.worker_client import WorkerClient
from tuner.measurement import Status
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.compile]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(spec(name) for name in KERNELS)]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_proven(
    name: str, compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    text, sizes, _, config = KERNELS[name]
    target = attention_target(f"{text},page_size={sizes[0]}", config)
    assert faults(compiler, worker, tmp_path / "kernels.json", target) == []


def test_the_gate_sees_keys_that_are_left_out(
    device: Device, gate: Gate, compiler: Compiler
) -> None:
    [(_, future)] = compiler.submit([spec("few")])
    text, sizes, queries, config = KERNELS["few"]
    problem = AttentionProblem.parse(f"B=3,SQ={queries},SKV=600,{text},page_size={sizes[0]}")
    kernel = load(future.result())
    gate.open(problem, 7)
    try:
        for kind in ("dominant", "random"):
            gate.load(kind)
            gate.arm()
            (launch,) = FAMILY.launches(problem, config, scale_of(problem, kind))
            integers = [*launch.integers]
            integers[4] = 599  # keys of a sequence at most
            addresses = [gate.pointers.get(ref.operand, 0) for ref in launch.tensors]
            kernel.launch(addresses, integers, launch.scalars, 0, device.stream)
            assert gate.examine().status is not Status.OK, kind
    finally:
        gate.close()
