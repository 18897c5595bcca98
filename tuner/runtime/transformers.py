"""`attn_implementation="tuner"` for Hugging Face Transformers: registered by importing this.

::

    import tuner.runtime.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tuner")

Masks are made as for `sdpa`: none where the causal flag says it all, so that a tuned kernel can
answer, else a tensor, with which PyTorch does.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
except ImportError as exc:
    raise ImportError(
        f"tuner.runtime.transformers needs Transformers 5 ({exc}): "
        "pip install 'cutlass-tuner[transformers]'"
    ) from exc

from tuner.runtime import devices, dispatch, guards, native
from tuner.runtime.attention import answer
from tuner.runtime.operators import operate

NAME = "tuner"
"""The value of `attn_implementation`."""


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a Transformers layer by a tuned kernel, else by Transformers' `sdpa`.

    Args:
        module: the layer; its `is_causal` holds where the argument is None.
        query: (B, H, SQ, D)
        key: (B, HKV, SKV, D)
        value: (B, HKV, SKV, D)
        attention_mask: as `sdpa_mask` makes it, or None.
        dropout: probability.
        scaling: of the scores; 1/sqrt(D) when None.
        is_causal: overrides the module's.
        kwargs: what the model passes on; what changes the result is left to `sdpa`.

    Returns:
        (B, SQ, H, D), and None for the weights.

    Raises:
        ValueError: when the model has attention sinks, which `sdpa` does not know.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError("attn_implementation='tuner' has no attention sinks (s_aux): use 'eager'")
    out = None
    if not any(kwargs.get(name) is not None for name in ("cache", "position_bias", "softcap")):
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # One query sees all keys; several start at key 0, also in a static cache that is longer.
        causal = query.shape[2] > 1 and attention_mask is None and bool(causal)
        out = _tuned(query, key, value, attention_mask, dropout, causal, scaling)
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    arguments = module, query, key, value, attention_mask, dropout, scaling, is_causal
    result: tuple[torch.Tensor, None]
    if torch.compiler.is_compiling():
        result = sdpa_attention_forward(*arguments, **kwargs)
    else:
        result = native.call(sdpa_attention_forward, *arguments, **kwargs)
    return result


def _tuned(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor | None:
    options = mask, dropout, is_causal, scale, True
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling:
        out = dispatch.attention(query, key, value, *options)
        if out is not None:
            return out
    elif is_causal and query.shape[2] != key.shape[2]:  # a static cache's: `sdpa` cuts it off
        return None
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    return (operate if is_compiling else answer)(query, key, value, *options)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
