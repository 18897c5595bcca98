"""Kernels of PyTorch's attention backends on CPU tensors, where PyTorch has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.runtime.attention.composed import Attended, BackwardInputs  # noqa: E402
from tuner.runtime.training import autograd  # noqa: E402

FLASH, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


@pytest.fixture
def sdpa_backends() -> Iterator[list[str]]:
    """The names of the calls that reach the kernels."""
    calls: list[str] = []

    def forward(name: str) -> Any:
        def kernel(q: Any, k: Any, v: Any, *options: Any, scale: float | None = None) -> Any:
            calls.append(name)
            wants_lse = options[1] if name == CUDNN else True
            options = options[2:] if name == CUDNN else options
            is_causal = len(options) > 1 and options[1]
            out, lse = autograd.forward_with_lse(Attended(q, k, v, is_causal, scale))
            lse = (lse[..., None] if name == CUDNN else lse) if wants_lse else None
            state = [torch.empty(2), torch.empty(()), torch.empty(0)]
            return out, lse, None, None, q.shape[2], k.shape[2], *state

        return kernel

    def backward(name: str) -> Any:
        def kernel(
            grad: Any,
            q: Any,
            k: Any,
            v: Any,
            out: Any,
            lse: Any,
            *rest: Any,
            scale: float | None = None,
        ) -> Any:
            calls.append(name + "_backward")
            lse = lse.squeeze(-1) if name == CUDNN else lse
            is_causal = rest[-1] if name == CUDNN else rest[-3]
            return autograd.backward(
                Attended(q, k, v, is_causal, scale), BackwardInputs(out, lse, grad)
            )

        return kernel

    def efficient(q: Any, k: Any, v: Any, *options: Any, scale: float | None = None) -> Any:
        calls.append(EFFICIENT)
        out, lse = autograd.forward_with_lse(
            Attended(q, k, v, bool(len(options) > 3 and options[3]), scale)
        )
        lse = lse if options[1] else lse[..., :0].contiguous()
        return out, lse, torch.empty((), dtype=torch.long), torch.empty((), dtype=torch.long)

    library = torch.library.Library("aten", "IMPL")
    library.impl(EFFICIENT, efficient, "CPU")
    for name in (FLASH, CUDNN):
        library.impl(name, forward(name), "CPU")
        library.impl(name + "_backward", backward(name), "CPU")
    yield calls
    library._destroy()
