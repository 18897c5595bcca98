"""Kernels of paged caches over CPU tensors: launches are noted, and nothing is computed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config
from tuner.families.fused_attention import FusedAttention
from tuner.hardware import DEFAULT_GPU


@dataclasses.dataclass(frozen=True)
class FakeKernel:
    """Takes launches down, and writes nothing."""

    launched: list[Any] = dataclasses.field(default_factory=list)

    def bind(self, integers: Any, scalars: Any) -> Any:
        return lambda tensors, workspace, stream: self.launched.append((tensors, integers, scalars))

    def workspace_bytes(self, integers: Any) -> int:
        return 0


@pytest.fixture
def paged_kernels(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Make the table find a fused attention kernel for every problem. `posed` has each requested
    kind and problem, `launched` the addresses, integers and scalars of each launch. `by_portfolio`
    has each plan. A `refusal` that is set is found instead.
    """
    import torch

    kernel, member = FakeKernel(), FusedAttention()
    made = SimpleNamespace(posed=[], launched=kernel.launched, refusal=None, by_portfolio=False)

    def find_out(kind: Any, told: Any, pose: Any, device: int, _: Any = None) -> Any:
        assert told is None, "the dispatcher in C++ knows no paged caches"
        asked = pose()
        problem = asked.problem
        made.posed.append((kind, problem))
        if made.refusal is not None:
            return made.refusal
        config: Config = member.space(problem, DEFAULT_GPU)[0]
        plan = on_cpu.plan
        (launch,) = member.launches(problem, config, asked.scale)
        return plan.KernelPlan(
            problem, config, -1,
            shape=problem.output.shape,
            strides=problem.output.strides,
            steps=(plan._step(problem, kernel, launch, 0),),
            workspace_bytes=0,
            dtype=torch.float16,
            writes_lse=True,
            by_portfolio=made.by_portfolio,
        )  # fmt: skip

    monkeypatch.setattr(on_cpu.table.table, "get", lambda kind: None)
    monkeypatch.setattr(on_cpu.table.table, "find_out", find_out)
    return made
