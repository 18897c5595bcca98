"""Attention whose values are narrower than its keys, through the gate and as models call it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gating import Gated, specs_of

from tuner.families.base import KernelSpec
from tuner.families.fused_attention import values_rule
from tuner.families.target import Target

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TARGETS = [target for target in values_rule.targets() if target.problem.dtype == "bfloat16"]  # type: ignore[attr-defined]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(target.problem, target.config) for target in TARGETS])


@pytest.mark.parametrize("target", TARGETS, ids=Target.label)
@pytest.mark.parametrize("widths", [(192, 128), (136, 104)])
def test_the_gate_passes_it(gated: Gated, target: Target, widths: tuple[int, int]) -> None:
    head_dim, value_dim = widths
    sizes = {"batch": 3, "heads_q": 5, "heads_kv": 5, "seqlen_q": 333, "seqlen_kv": 1001}
    problem = replace(target.problem, head_dim=head_dim, value_dim=value_dim, **sizes)
    gated.passes(problem, target.config)
