"""Kernels that are not there, whose rows depend on themselves only, or also on others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import invariance_calls
from tuner.runtime.call import devices


class RowByRow:
    """A plan: each row of the output is a function of the row of its first operand."""

    def __init__(self, problem: Any, is_true: bool = True) -> None:
        self.problem, self._is_true = problem, is_true

    def run_uncounted(self, *inputs: torch.Tensor) -> torch.Tensor:
        first = inputs[0]
        if first.dim() > 2:
            return first * 2
        shape = self.problem.outputs[-1].shape[-2:]
        out = first[:, :1].to(torch.bfloat16).expand(shape).clone()
        # As a kernel that splits K by the number of rows.
        return out if self._is_true or shape[0] <= 64 else out * (1 + 2**-7)

    run = run_uncounted


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TYPE", "cpu")
    monkeypatch.setattr(invariance_calls, "planned", lambda posed, config: RowByRow(posed.problem))
