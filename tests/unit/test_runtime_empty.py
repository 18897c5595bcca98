"""Every entry of the runtime with each of its sizes at 0, over CPU tensors: shape, type and numbers
of what comes back. Attention and products of fp16 are in `test_runtime_tensors.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import empty_calls
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention.flex_attention import flex_attention  # noqa: E402

from tuner.runtime.attention import sparse  # noqa: E402


@pytest.fixture(autouse=True)
def plain_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has no log-sum-exp of FlexAttention on a CPU."""
    monkeypatch.setattr(sparse, "_compiled", lambda: flex_attention)


def test_each_size_at_0(on_cpu: SimpleNamespace, long_mode: bool) -> None:
    faults = empty_calls.faults(long_mode)
    assert not faults, "\n".join(faults)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_sizes_are_those_of_calls_that_pass(on_cpu: SimpleNamespace) -> None:
    for entry, (sizes, _) in empty_calls.ENTRIES.items():
        out, shape, dtype = entry(*sizes)
        assert (tuple(out.shape), out.dtype) == (shape, dtype)
