"""`tuner.prepare`: the calls that it notes, and the build that it starts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import fake_machine, inputs

import tuner
from tuner.errors import CompileError
from tuner.problem import AttentionProblem, GemmProblem
from tuner.selection.answering import Answering

torch = pytest.importorskip("torch", reason="torch is not installed")

machine = fake_machine


class Block(torch.nn.Module):
    """A layer of attention, called twice, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 128, bias=False).half()

    def forward(self, x: Any) -> Any:
        assert not self.training and not torch.is_grad_enabled()
        query, key, value = inputs((1, 2, x.shape[0], 64))
        for _ in range(2):
            tuner.attention(query, key, value)
        return self.layer(x)


@pytest.fixture
def builds(
    machine: Any, on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[Any], str]]:
    """Builds that were started; kernels of attention and products are own ones."""
    preparing = importlib.import_module("tuner.runtime.preparing")
    found: list[tuple[list[Any], str]] = []

    def build(problems: list[Any], gpu: str, *, in_background: bool) -> str:
        found.append((problems, gpu))
        assert not in_background
        return ""

    def answer(problem: Any, gpu: Any) -> Answering:
        config = None if problem == AttentionProblem.parse("S=32,D=64,H=2") else Answering
        return Answering(problem, "predicted", 1.0, config)  # type: ignore[arg-type]

    monkeypatch.setattr(preparing.background, "build", build)
    monkeypatch.setattr(preparing, "answering", answer)
    return found


def rows(count: int) -> Any:
    return torch.randn(count, 64).half()


def test_the_calls_of_each_example_are_counted_and_built(
    machine: Any, builds: list[tuple[list[Any], str]]
) -> None:
    model = Block()
    tuner.tune_linear_(model)
    calls = tuner.prepare(model, rows(16), {"x": rows(8)})
    first, second = (AttentionProblem.parse(f"S={n},D=64,H=2") for n in (16, 8))
    products = [GemmProblem.parse(f"M={n},N=128,K=64") for n in (16, 8)]
    assert calls == {first: 2, products[0]: 1, second: 2, products[1]: 1}
    assert builds == [([first, first, products[0], second, second, products[1]], machine.gpu.name)]
    assert model.training


def test_calls_that_pytorch_answers_are_not_built(builds: list[tuple[list[Any], str]]) -> None:
    assert tuner.prepare(Block(), (rows(32),)) == {AttentionProblem.parse("S=32,D=64,H=2"): 2}
    assert builds == []


def test_afterwards_calls_are_served_again(machine: Any, builds: Any) -> None:
    tuner.prepare(Block(), rows(16))
    before = len(machine.problems)
    tuner.attention(*inputs((1, 2, 16, 64)))
    assert len(machine.problems) > before


def test_a_build_that_fails_is_said(builds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preparing = importlib.import_module("tuner.runtime.preparing")
    monkeypatch.setattr(preparing.background, "build", lambda *_, in_background: "it ended with 1")
    with pytest.raises(CompileError, match="it ended with 1"):
        tuner.prepare(Block(), rows(16))
