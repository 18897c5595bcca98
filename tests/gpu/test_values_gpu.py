"""Attention whose values are narrower than its keys, through the gate and as models call it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gating import pass_the_gate

from tuner.compile.compiler import Compiler
from tuner.compile.loading import load
from tuner.families.base import KernelSpec
from tuner.families.fused_attention import KERNEL, values_rule
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import Device
from tuner.measure.gate import REFERENCE, Gate
from tuner.measure.subjects import CompiledSubject

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TARGETS = [target for target in values_rule.targets() if target.problem.dtype == "bfloat16"]  # type: ignore[attr-defined]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *(target.kernels[KERNEL] for target in TARGETS)]


@pytest.mark.parametrize("target", TARGETS, ids=Target.label)
@pytest.mark.parametrize("widths", [(192, 128), (136, 104)])
def test_the_gate_passes_it(
    device: Device, gate: Gate, compiler: Compiler, target: Target, widths: tuple[int, int]
) -> None:
    head_dim, value_dim = widths
    sizes = {"batch": 3, "heads_q": 5, "heads_kv": 5, "seqlen_q": 333, "seqlen_kv": 1001}
    problem = replace(target.problem, head_dim=head_dim, value_dim=value_dim, **sizes)
    member, config = target.family, target.config
    assert not member.violations(problem, config, DEFAULT_GPU)
    [(_, future)] = compiler.submit([member.kernels(problem, config)[KERNEL]])
    kernel = {KERNEL: load(future.result())}
    pass_the_gate(
        device, gate, problem, CompiledSubject(device, member, problem, config, kernel, 1.0)
    )
