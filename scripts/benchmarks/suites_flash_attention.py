"""FlashAttention's functions by `tuner.attention`, for its own tests (`benchmarks.suites`).

Its tests then call the runtime with every shape of their parametrisation. Functions that the
runtime lacks are skipped by name. A diagonal that ends at the last query and key is passed as a
mask, which PyTorch answers: tuned kernels do not compute it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import tuner

Window = Any
"""(left, right), as integers or as elements of a tensor; -1 stands for none."""


def install(checkout: Path) -> None:
    """Put a package ``flash_attn`` before any other.

    Args:
        checkout: checkout of FlashAttention; modules that only use PyTorch are taken from there.
    """
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = [str(checkout / "flash_attn")]
    functions = {
        "flash_attn_func": func,
        "flash_attn_kvpacked_func": kvpacked_func,
        "flash_attn_qkvpacked_func": qkvpacked_func,
        "flash_attn_varlen_func": varlen_func,
        "flash_attn_varlen_kvpacked_func": varlen_kvpacked_func,
        "flash_attn_varlen_qkvpacked_func": varlen_qkvpacked_func,
        "flash_attn_with_kvcache": _absent("a cache that is updated in place"),
    }
    for module in (package, interface):
        vars(module).update(functions)
    vars(interface).update(
        _get_block_size_n=_absent("dropout's mask"),
        _flash_attn_varlen_forward=_absent("pages"),
        USE_TRITON_ROCM=False,
    )
    rotary = ModuleType("flash_attn.layers.rotary")
    vars(rotary)["apply_rotary_emb"] = _absent("rotary embeddings")
    layers = ModuleType("flash_attn.layers")
    for module in (package, interface, layers, rotary):
        sys.modules[module.__name__] = module


def _absent(what: str) -> Any:
    def skip(*args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"the runtime has no function for {what}")

    return skip


def _refuse(dropout_p: float, alibi_slopes: Any, block_table: Any = None) -> None:
    for given, what in (
        (dropout_p, "dropout's random stream"),
        (alibi_slopes is not None, "ALiBi"),
        (block_table is not None, "pages"),
    ):
        if given:
            _absent(what)()


def func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q (B, SQ, H, D), k and v (B, SKV, HKV, D); as q."""
    _refuse(dropout_p, alibi_slopes)
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    options: dict[str, Any] = {"scale": softmax_scale, "enable_gqa": q.shape[2] != k.shape[2]}
    left, right = (int(side) for side in window_size)
    is_limited = (left, right) != (-1, -1)
    if q.shape[1] != k.shape[1] and (causal or is_limited):
        if softcap:
            _absent("a soft cap under a mask that is aligned bottom-right")()
        mask = _bottom_right(q.shape[1], k.shape[1], left, 0 if causal else right, q.device)
        options["attn_mask"] = mask
    else:
        options["is_causal"] = causal
        if softcap:
            options["softcap"] = softcap
        if is_limited:
            options["window"] = (left, -1 if causal else right)
    out = tuner.attention(query, key, value, **options).transpose(1, 2)
    if (mask := options.get("attn_mask")) is not None:
        out = out.masked_fill(~mask.any(-1)[:, None, None], 0)  # rows that see no key
    return (out, *_unread(query)) if return_attn_probs else out


def _unread(query: torch.Tensor) -> tuple[torch.Tensor, None]:
    """In the place of the log-sum-exp and dropout's mask, which no test without dropout judges."""
    return query.new_zeros(query.shape[:3], dtype=torch.float32), None


def _bottom_right(
    queries: int, keys: int, left: int, right: int, device: torch.device
) -> torch.Tensor:
    """Which keys each query sees along the diagonal that ends at the last of both."""
    offset = keys - queries
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if right >= 0:
        seen &= distance <= offset + right
    if left >= 0:
        seen &= distance >= offset - left
    return seen


def kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`func` of kv (B, SKV, 2, HKV, D)."""
    return func(q, *kv.unbind(2), *args, **kwargs)


def qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`func` of qkv (B, S, 3, H, D)."""
    return func(*qkv.unbind(2), *args, **kwargs)


def varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of packed sequences: q (total_q, H, D), k and v (total_kv, HKV, D); as q."""
    _refuse(dropout_p, alibi_slopes, block_table)
    if softcap or tuple(int(side) for side in window_size) != (-1, -1):
        _absent("windows and soft caps of packed sequences")()
    if causal and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        _absent("packed sequences under a mask that is aligned bottom-right")()
    out = tuner.attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        is_causal=causal,
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return (out, *_unread(q.transpose(0, 1)[None])) if return_attn_probs else out


def varlen_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`varlen_func` of kv (total_kv, 2, HKV, D)."""
    return varlen_func(q, *kv.unbind(1), *args, **kwargs)


def varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """`varlen_func` of qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return varlen_func(q, k, v, *lengths, *args, **kwargs)
