"""vLLM's norm in its batch-invariant mode: which calls it takes over, beside stand-ins."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

LAYERS = "vllm.model_executor"


class RMSNorm(torch.nn.Module):
    """As of vLLM 0.26."""

    name = "rms_norm"
    variance_epsilon, has_weight, variance_size_override = 1e-5, True, None

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(columns))

    def forward_cuda(self, x: Any, residual: Any = None) -> str:
        return "vLLM's"

    @classmethod
    def register_oot(cls, other: Any) -> None:
        other.name = cls.__name__
        sys.modules[f"{LAYERS}.custom_op"].op_registry_oot[cls.__name__] = other


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module under test; its kernel takes dense rows and notes them."""
    taken: list[Any] = []
    given: dict[str, dict[str, Any]] = {
        "vllm": {},
        LAYERS: {"custom_op": SimpleNamespace(op_registry_oot={})},
        f"{LAYERS}.layers": {},
        f"{LAYERS}.layers.layernorm": {"RMSNorm": RMSNorm},
        "tuner.runtime.engines.norms": {
            "fits": lambda x, residual, weight: x.is_contiguous(),
            "add_and_normalise": lambda *call: taken.append(call),
        },
    }
    for name, values in given.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, f"{LAYERS}.custom_op", given[LAYERS]["custom_op"])
    name = "tuner.runtime.engines.vllm.norms"
    monkeypatch.delitem(sys.modules, name, raising=False)
    found: Any = importlib.import_module(name)
    found.taken = taken
    yield found
    sys.modules.pop(name, None)


def test_it_stands_in_vllms_place_unless_another_does(norms: Any) -> None:
    registry = sys.modules[f"{LAYERS}.custom_op"].op_registry_oot
    norms.register(), norms.register()
    assert registry == {"RMSNorm": norms.TunerRMSNorm}
    assert norms.TunerRMSNorm.name == RMSNorm.name
    registry["RMSNorm"] = "another's"
    norms.register()
    assert registry == {"RMSNorm": "another's"}


def test_sums_with_a_residual_are_the_kernel_s(norms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x, residual = norms.TunerRMSNorm(8), torch.ones(3, 8), torch.ones(3, 8)
    assert layer.forward_cuda(x, residual) == (x, residual)
    [(first, second, weight, epsilon)] = norms.taken
    assert first is x and second is residual and epsilon == 1e-5
    assert type(weight) is torch.Tensor and weight.data_ptr() == layer.weight.data_ptr()
    assert layer.forward_cuda(x) == "vLLM's"
    assert layer.forward_cuda(torch.ones(8, 3).t(), residual) == "vLLM's"
    monkeypatch.setenv("TUNER_DISABLE", "1")
    assert layer.forward_cuda(x, residual) == "vLLM's"
    monkeypatch.delenv("TUNER_DISABLE")
    layer.has_weight = False
    assert layer.forward_cuda(x, residual) == "vLLM's" and len(norms.taken) == 1
