"""Attention with head dimensions above 256, through the gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gating import Gated, specs_of

from tuner.families.base import KernelSpec
from tuner.families.fused_attention import wide_rule
from tuner.families.target import Target
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
TARGETS = [target for target in wide_rule.targets() if target.problem.dtype == "bfloat16"]  # type: ignore[attr-defined]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return specs_of([(target.problem, target.config) for target in TARGETS])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.problem.label())
@pytest.mark.parametrize("head_dim", [512, 264])
def test_the_gate_passes_it(gated: Gated, target: Target, head_dim: int) -> None:
    small = target.problem
    assert isinstance(small, AttentionProblem)
    is_prompt = small.seqlen_q > 64
    heads_q, heads_kv = (5, 5) if is_prompt else (12, 2)
    queries = 333 if is_prompt else small.seqlen_q
    sizes = {"batch": 3, "heads_q": heads_q, "heads_kv": heads_kv, "seqlen_q": queries}
    problem = replace(small, head_dim=head_dim, seqlen_kv=1001, **sizes)
    gated.passes(problem, target.config)
