"""Own kernels for whatever is posed to the runtime's table, over CPU tensors: launches are noted,
and nothing is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.families.base import Family
from tuner.hardware import DEFAULT_GPU
from tuner.problem import Problem


@dataclasses.dataclass(frozen=True)
class NotedKernel:
    """Takes launches down, and writes nothing."""

    workspace: int = 0
    launched: list[Any] = dataclasses.field(default_factory=list)

    def bind(self, integers: Any, scalars: Any) -> Any:
        return lambda tensors, workspace, stream: self.launched.append((tensors, integers, scalars))

    def workspace_bytes(self, integers: Any) -> int:
        return self.workspace


def find_kernels(
    on_cpu: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    family_of: Callable[[Problem], Family | None],
    *,
    workspace: int = 0,
    is_strided: bool = False,
) -> SimpleNamespace:
    """Make the table find a kernel for every problem that has a family.

    Args:
        on_cpu: the fixture of this name.
        monkeypatch: pytest's fixture.
        family_of: the family of a problem's kernel; None: nothing is decided for it.
        workspace: bytes that each kernel asks for.
        is_strided: True to launch it with the strides of the call.

    Returns:
        `posed` has each requested kind and problem, `launched` the addresses, integers and scalars
        of each launch. `by_portfolio` has each plan. A `refusal` that is set is found instead.
    """
    import torch

    kernel = NotedKernel(workspace)
    made = SimpleNamespace(posed=[], launched=kernel.launched, refusal=None, by_portfolio=False)
    plan, refusal = on_cpu.plan, on_cpu.refusal

    def find_out(kind: Any, told: Any, pose: Any, device: int, _: Any = None) -> Any:
        assert told is None, "the dispatcher in C++ knows no such calls"
        try:
            asked = pose()
        except ConfigError as exc:
            return refusal.Refusal(refusal.Kind.TENSORS, str(exc))
        problem = asked.problem
        family = family_of(problem)
        if family is None:
            return refusal.Refusal(refusal.Kind.MISS, problem.label())
        made.posed.append((kind, problem))
        if made.refusal is not None:
            return made.refusal
        config = family.space(problem, DEFAULT_GPU)[0]
        launches = family.launches(problem, config, asked.scale)
        if is_strided:
            launches = family.strided_launches(problem, config, asked.scale, asked.strides)  # type: ignore[assignment]
        return plan.KernelPlan(
            problem, config, -1,
            shape=problem.output.shape,
            strides=problem.output.strides,
            steps=(plan._step(problem, kernel, launches[0], 0),),
            workspace_bytes=workspace,
            dtype=torch.float16,
            writes_lse=problem.op == "attention",
            by_portfolio=made.by_portfolio,
            further=tuple((o.shape, o.strides, torch.float16) for o in problem.outputs[:-1]),
        )  # fmt: skip

    monkeypatch.setattr(on_cpu.table.table, "get", lambda kind: None)
    monkeypatch.setattr(on_cpu.table.table, "find_out", find_out)
    return made
