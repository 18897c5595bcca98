"""Every entry of the runtime over CPU tensors: each of its sizes at 0, tensors that lie off 16
bytes, huge numbers. Attention and products of fp16 are in `test_runtime_tensors.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import entry_calls
import pytest

import tuner

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

from tuner.runtime.attention import sparse  # noqa: E402


@pytest.fixture(autouse=True)
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has no log-sum-exp of FlexAttention on a CPU."""
    monkeypatch.setattr(sparse, "_compiled", lambda: flex_attention)


def test_each_size_at_0(on_cpu: SimpleNamespace, long_mode: bool) -> None:
    faults = entry_calls.faults(long_mode)
    assert not faults, "\n".join(faults)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_sizes_are_those_of_calls_that_pass(on_cpu: SimpleNamespace) -> None:
    for entry, (sizes, _) in entry_calls.ENTRIES.items():
        out, shape, dtype = entry(*sizes)
        assert (tuple(out.shape), out.dtype) == (shape, dtype)


OTHERS = {
    "deterministic",
    "disable",
    "enable",
    "enabled",
    "interleave",
    "linear_problems",
    "prepare",
}
OTHERS |= {"prepare_block_mask", "restore_linear_", "stats", "tune_linear_"}
"""Public functions that compute nothing."""


def test_every_entry_is_called(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for name, place in tuner._MODULES.items() if place == "tuner.runtime"} - OTHERS
    called = set()

    def noting(name: str, entry: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return entry(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(tuner, name, noting(name, getattr(tuner, name)))
    for entry, (sizes, _) in entry_calls.ENTRIES.items():
        entry(*sizes)
    assert called == names


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_drawn_calls(on_cpu: SimpleNamespace, long_mode: bool) -> None:
    """A few hundred, thousands in the long mode."""
    for name, call in entry_calls.differences(4000 if long_mode else 200):
        assert call() < 2e-2, name
