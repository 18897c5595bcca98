"""`attention`: the tuned kernel where there is a measured one, PyTorch's everywhere else.

Where SQ and SKV differ, a causal mask lies along the diagonal that starts at the first query and
the first key (top-left: query i sees keys 0..i), or along the one that ends at the last of both
(bottom-right: 0..i + SKV - SQ). Tuned kernels compute the former. What each way in means, and who
answers it:

| way in | causal mask | answered by |
|---|---|---|
| `tuner.attention`, e4m3 too; operators `tuner::attention*` | top-left | tuned kernels |
| their gradients | top-left | what was measured, cuDNN's, or recomputed; flash's if SQ is SKV |
| a window | along the top-left diagonal | tuned kernels, or PyTorch's operations |
| `attn_mask=causal_upper_left(...)`, `causal_lower_right(...)` | as it says | PyTorch |
| another `attn_mask` | none | tuned kernels |
| `attention_varlen` | top-left in each sequence | tuned kernels |
| `paged_attention` | bottom-right in each sequence | tuned kernels |
| `sparse_attention` | as the block mask says | tuned kernels, or FlexAttention |
| nested tensors | PyTorch's | PyTorch |
| `tuner.enable`: `scaled_dot_product_attention`, efficient's operator | top-left | tuned kernels |
| `tuner.enable`: `aten::_scaled_dot_product_cudnn_attention` | top-left | tuned kernels |
| `tuner.enable`: `aten::_scaled_dot_product_flash_attention` | bottom-right | tuned if SQ is SKV |
| Transformers: no mask, several queries (an empty static cache) | top-left | tuned kernels |
| Transformers: no mask, one query | none, all keys | tuned kernels |
| Transformers: queries after a filled cache | a mask | tuned kernels |

Grouped heads change nothing of it: query head h reads key head h // (H / HKV).
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.errors import ConfigError
from tuner.runtime import devices, dispatch, guards, native, quantised, serving
from tuner.runtime.attention_plan import AttentionCall
from tuner.runtime.bias import as_operand
from tuner.runtime.composed import NONE, Extras, compose
from tuner.runtime.gradients import is_differentiable
from tuner.runtime.operators import operate
from tuner.runtime.table import table


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: int | tuple[int, int] | None = None,
    softcap: float = 0.0,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    descale_v: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * Q K^T + mask) V by the fastest kernel measured on this GPU.

    Has the signature and the meaning of `torch.nn.functional.scaled_dot_product_attention`, which
    answers, with these same arguments, whatever no tuned kernel can: dropout, masks that want a
    gradient, other shapes, CPU tensors, `TUNER_DISABLE=1`, ... Each such call is counted by its
    reason (`tuner.stats`), and the reason is logged once to ``tuner.runtime``. Predicted and
    replayed entries are never launched. The first call of a shape loads its kernel: make one before
    capturing a CUDA graph.

    A gradient is computed by what was measured for it (`AttentionBackwardProblem`), else by
    PyTorch's backward kernels, from the output and the log-sum-exp of the tuned kernel, where it
    writes one. Of what PyTorch answers, they are computed so where something was measured, or
    where cuDNN's kernels gain over FlashAttention-2's (`gains_by_cudnn`). Autocast casts the
    inputs, as it does PyTorch's.

    PyTorch's operator has no `window` and no `softcap`. With either, what no tuned kernel answers,
    gradients and graphs of torch.compile among it, is composed of PyTorch's operations
    (`tuner.runtime.composed`).

    Args:
        query: (B, H, SQ, D), fp16 or bf16, with any strides that TMA takes: 1 along D, multiples of
            16 bytes along the others.
        key: (B, HKV, SKV, D), as `query`. Keys and values expanded over all heads are one head.
        value: (B, HKV, SKV, D), as `key`.
        attn_mask: as in PyTorch. Tuned kernels take booleans, true where a query sees a key, and
            what is added to the scores, of the query's type, on its device, broadcast along any
            axes and with any strides, that want no gradient. With them a query that sees no key, or
            all of whose keys are at -inf, has zeros for its output, as with PyTorch's math and
            efficient kernels. (cuDNN's leaves a boolean mask away in such a row.)
        dropout_p: as in PyTorch; no tuned kernel takes one.
        is_causal: query i sees keys 0..i.
        scale: of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.
        window: (left, right): query i sees keys i - left..i + right, -1 for no limit; under
            `is_causal` none beyond i. One number is both sides, as ``window=`` of a shape. A query
            that sees no key has zeros for its output.
        softcap: each scaled score s becomes softcap * tanh(s / softcap), before the mask; 0: as
            it is.
        descale_q: positive fp32 (B, H), and with it the next two: query, key and value are
            float8_e4m3fn, and stand for their elements times these factors. The output is bf16;
            where no tuned kernel can, PyTorch computes it from bf16 copies. No mask, dropout,
            window or soft cap.
        descale_k: fp32 (B, HKV).
        descale_v: fp32 (B, HKV).

    Returns:
        (B, H, SQ, D), of the inputs' type, bf16 of e4m3. Where a tuned kernel ran it is laid out as
        ``torch.empty_like(query)``.

    Raises:
        ConfigError: when `window` or `softcap` is out of range; on descale factors that do not fit
            the tensors, or come with a mask, dropout, a window or a soft cap.
        Whatever `scaled_dot_product_attention` raises on arguments that it refuses, and what CUDA
        reports of an earlier kernel.
    """
    if descale_q is not None or descale_k is not None or descale_v is not None:
        if attn_mask is not None or dropout_p or window is not None or softcap:
            raise ConfigError(
                "quantised attention takes no attn_mask, no dropout_p, no window and no softcap"
            )
        descales = (descale_q, descale_k, descale_v)
        return quantised.attend((query, key, value), descales, is_causal, scale, enable_gqa)
    if window is not None or softcap:
        options = attn_mask, dropout_p, is_causal, scale, enable_gqa
        return _composed(AttentionCall(query, key, value, *options, Extras.of(window, softcap)))
    if torch.compiler.is_compiling():
        return _traced(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    out = dispatch.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out is dispatch.REFUSED:
        return native.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if out is not None:
        return out
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    is_plain = attn_mask is None and not dropout_p
    if is_plain and guards.wants_gradient(query, key, value):
        table.refresh(query)
        if is_differentiable(query, key, value, is_causal, scale):
            out = operate(query, key, value, None, 0.0, is_causal, scale, enable_gqa)
            if out is not None:
                return out
    operand = None if attn_mask is None else as_operand(attn_mask, query, key, is_causal)
    options = attn_mask, dropout_p, is_causal, scale, enable_gqa
    call = AttentionCall(query, key, value, *options, NONE, operand)
    out = serving.answer(call)
    return call.by_pytorch() if out is None else out


def _traced(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any
) -> torch.Tensor:
    """The operator of torch.compile's graph, or PyTorch's attention."""
    arguments = *guards.autocast(devices.TYPE, query, key, value), *options
    out = operate(*arguments)
    return native.attend(*arguments) if out is None else out


def _composed(call: AttentionCall) -> torch.Tensor:
    """The tuned kernel's output under a window or a soft cap, or that of PyTorch's operations."""
    query, key, value = guards.autocast(devices.TYPE, *call[:3])
    call = AttentionCall(query, key, value, *call[3:])
    if torch.compiler.is_compiling():
        return compose(*call[:9])
    out = serving.answer(call)
    return call.by_pytorch() if out is None else out
