"""Masks that are expanded over the keys, under `tuner.enable`: they hide whole queries.

The dispatcher over CPU tensors. Transformers builds such a mask while it traces an encoder.
"""

from __future__ import annotations

from typing import Any

import pytest
from runtime_server import (
    Server,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    enabled_server,
    inputs,
    known_tensors,
    pytorchs,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.usefixtures("enabled")

built, server = built_dispatcher, dispatched_server
enabled, known = enabled_server, known_tensors
SDPA = torch.nn.functional.scaled_dot_product_attention


def test_a_mask_expanded_over_the_keys_hides_whole_queries(server: Server) -> None:
    """As Transformers builds it where it traces: `query >= 0`, expanded."""
    q, k, v = inputs()
    length = q.shape[2]
    rows = torch.arange(length) < length - 3
    for mask in (rows[:, None].expand(1, 1, length, length), rows[:, None].expand(-1, length)):
        seen = list[bool]()
        for _ in range(2):
            out, by_python, launched = server.went(lambda: SDPA(q, k, v, mask))  # noqa: B023
            assert launched and by_kernel(out[:, :, rows], q[:, :, rows], 16)
            assert not out[:, :, ~rows].any() and out.shape == q.shape
            seen.append(by_python)
        assert not seen[-1]


def test_only_whole_queries_are_hidden_without_the_mask(server: Server) -> None:
    q, k, v = inputs()
    length = q.shape[2]
    keys = (torch.arange(length) < length - 3).expand(length, -1)
    for mask in (keys, keys[:, :1].expand(-1, length).float()):
        _, _, launched = server.went(lambda: SDPA(q, k, v, mask))  # noqa: B023
        assert not launched


def test_gradients_of_hidden_queries_are_zero(known: list[Any]) -> None:
    q, k, v = (one.clone().requires_grad_() for one in known)
    rows = torch.arange(q.shape[2]) > 1
    mask = rows[:, None].expand(-1, q.shape[2])
    SDPA(q, k, v, mask).float().square().sum().backward()
    wanted = [one.detach().clone().requires_grad_() for one in (q, k, v)]
    pytorchs(lambda: SDPA(*wanted, mask).float().square().sum().backward())
    assert not q.grad[:, :, ~rows].any()
    for one, other in zip((q, k, v), wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=2e-2)


def test_a_traced_encoder_s_mask_does_not_reach_the_attention(known: list[Any]) -> None:
    """Transformers builds it where it traces, and CUDA's fused kernels refuse its strides."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def encode(q: Any, k: Any, v: Any) -> Any:
        length = q.shape[2]
        mask = (torch.arange(length)[:, None] >= 0).expand(1, 1, length, length)
        return SDPA(q, k, v, mask)

    with torch.inference_mode():
        graph = make_fx(encode, tracing_mode="fake")(*known).graph
    (attention,) = (node for node in graph.nodes if "attention" in str(node.target))
    assert len(attention.args) == 3 and "attn_mask" not in attention.kwargs
    (filled,) = (node for node in graph.nodes if "masked_fill" in str(node.target))
    assert filled.args[0].args[0] is attention
