"""Attention whose gradients must not be cuDNN's, by PyTorch's other fused kernels.

cuDNN's gradients may be NaN at some lengths (`may_be_nan`), and PyTorch prefers cuDNN on a Hopper
GPU. FlashAttention-2's and the memory-efficient kernels are finite there. Their operators are
called directly: PyTorch's switches of its backends hold for all threads of the process.
"""

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad

from tuner.families.peers.sdpa_backward import may_be_nan
from tuner.problem.attention import NARROW_HEAD_DIM
from tuner.runtime.call import handed_over

_CUDNN = int(SDPBackend.CUDNN_ATTENTION.value)
#: Columns that a masked row of the memory-efficient kernel is padded to, and rows that its
#: log-sum-exp is padded to.
_MASK_COLUMNS, _LSE_ROWS = 16, 32


def is_needed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """True for a call that autograd records, that PyTorch would give to cuDNN, and whose gradients
    may be NaN there. A traced graph may reach cuDNN at any of its calls.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        value: as `key`.
        attn_mask: as of `scaled_dot_product_attention`.
        dropout_p: share of the weights that is dropped.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.
    """
    tensors = query, key, value
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return False
    if query.dtype not in handed_over.HALF or not _is_on_gpu(query) or query.is_nested:
        return False
    if any(t.dim() != 4 for t in tensors):
        return False
    if not may_be_nan(query.shape[2], key.shape[2]):
        return False
    if attn_mask is not None and type(attn_mask) is not torch.Tensor:
        return False  # a `CausalBias`, which chooses for itself
    if torch.compiler.is_compiling():
        head_dim = query.shape[3]
        is_fused = head_dim % 8 == 0 and head_dim <= NARROW_HEAD_DIM and handed_over.has_cudnn()
        return is_fused and all(t.stride(3) == 1 for t in tensors)
    if 0 in (*query.shape, *key.shape):
        return False  # the choice divides by the number of heads
    choice = torch._fused_sdp_choice(
        *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
    )
    return int(choice) == _CUDNN


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention of a call that `is_needed` names, recorded by autograd.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D), HKV a divisor of H.
        value: as `key`.
        attn_mask: booleans or terms of the scores, broadcast to (B, H, SQ, SKV); None: no mask.
        dropout_p: share of the weights that is dropped.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.

    Returns:
        (B, H, SQ, D), of the query's type.
    """
    operators = torch.ops.aten
    out: torch.Tensor
    if attn_mask is None and (not is_causal or query.shape[2] == key.shape[2]):
        flash = operators._scaled_dot_product_flash_attention
        out = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out
    key, value = (_repeated(t, query) for t in (key, value))
    mask = None if attn_mask is None else _terms(attn_mask, query, key)
    efficient = operators._scaled_dot_product_efficient_attention
    out = efficient(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    return out


def masked_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value under a mask, from any kernel's output and log-sum-exp.

    Args:
        grad_out: (B, H, SQ, D), gradient of the output.
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D), HKV a divisor of H.
        value: as `key`.
        attn_mask: booleans or terms of the scores, broadcast to (B, H, SQ, SKV).
        out: (B, H, SQ, D), attention's output.
        lse: its log-sum-exp, fp32 (B, H, SQ).
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
    """
    repeated = [_repeated(t, query) for t in (key, value)]
    # No weight in rows without a key, and in rows behind the last.
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    lse = pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=math.inf)
    # The kernel reads the output's rows as its own forward kernel lays them: all heads of a query
    # side by side, whatever the strides say.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    state = (torch.empty((), dtype=torch.long, device=query.device) for _ in range(2))
    grad_query, *grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(grad_out, query, *repeated, _terms(attn_mask, query, key), out, lse, *state),
        *(0.0, [True, True, True, False], is_causal),
        scale=scale,
    )
    heads = key.shape[1]
    if heads != query.shape[1]:
        groups = [grad.unflatten(1, (heads, -1)) for grad in grads]
        grads = [grad.sum(2, dtype=torch.float32).to(key.dtype) for grad in groups]
    grad_key, grad_value = grads
    return grad_query, grad_key, grad_value


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, (B, H, SKV, D): one for each of the query's heads."""
    group = query.shape[1] // max(1, tensor.shape[1])
    return tensor if group == 1 else tensor.repeat_interleave(group, 1)


def _terms(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A mask as terms of the scores, (B, H, SQ, SKV) by its strides, its rows aligned."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    keys = key.shape[2]
    rows = mask.to(query.dtype).expand(*mask.shape[:-1], keys)
    rows = pad(rows, (0, -keys % _MASK_COLUMNS)).contiguous()
    return rows[..., :keys].expand(*query.shape[:3], keys)
