"""`attention`: a measured or proven kernel where one is faster, PyTorch's otherwise.

A causal mask has two meanings when SQ and SKV differ. Top-left: query i sees keys 0..i.
Bottom-right: query i sees keys 0..i + SKV - SQ. Tuned kernels compute the top-left mask. Each entry
point has its own meaning:

| entry point | causal mask | answered by |
|---|---|---|
| `tuner.attention`, e4m3 also; operators `tuner::attention*` | top-left | tuned kernels |
| gradients of both | top-left | measured kernels, cuDNN's, flash's if SQ is SKV, or recomputed |
| a window | along the top-left diagonal | tuned kernels, or PyTorch's operations |
| `attn_mask=causal_upper_left(...)` | top-left | tuned kernels |
| `attn_mask=causal_lower_right(...)` | bottom-right | tuned kernels, as a window |
| another `attn_mask` | none | tuned kernels |
| `attention_varlen` | top-left in each sequence | tuned kernels |
| `paged_attention` | bottom-right in each sequence | tuned kernels |
| `sparse_attention` | as the block mask says | tuned kernels, or FlexAttention |
| nested tensors | PyTorch's | PyTorch |
| `tuner.enable`: `scaled_dot_product_attention`, efficient's operator | top-left | tuned kernels |
| `tuner.enable`: `aten::_scaled_dot_product_cudnn_attention` | top-left | tuned kernels |
| `tuner.enable`: `aten::_scaled_dot_product_flash_attention` | bottom-right | as a window |
| Transformers: no mask, several queries (an empty static cache) | top-left | tuned kernels |
| Transformers: no mask, one query | none, all keys | tuned kernels |
| Transformers: queries after a filled cache | a mask | tuned kernels |

With grouped heads, query head h reads key head h // (H / HKV).
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from tuner.errors import ConfigError
from tuner.runtime.attention import quantised, window_operators
from tuner.runtime.attention.attention_call import AttentionCall, known
from tuner.runtime.attention.bias import as_operand, causal_right
from tuner.runtime.attention.composed import NONE, Extras, compose
from tuner.runtime.attention.operators import operate
from tuner.runtime.call import devices, dispatch, guards, handed_over, native, serving
from tuner.runtime.training.gradients import attend_extras, is_differentiable


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

    Has the signature and the meaning of `torch.nn.functional.scaled_dot_product_attention`. PyTorch
    answers calls that no tuned kernel serves: dropout, masks that want a gradient, untuned shapes,
    CPU tensors, `TUNER_DISABLE=1`. Each such call is counted by its reason (`tuner.stats`), and
    each reason is logged once to ``tuner.runtime``. Predicted and replayed entries are never
    launched. The first call of a shape loads its kernel: call once before capturing a CUDA graph.

    Gradients come from a backward kernel measured for the problem (`AttentionBackwardProblem`).
    Otherwise PyTorch's backward kernels compute them from the tuned kernel's output and
    log-sum-exp. For calls whose output PyTorch computes, the same holds if a backward kernel was
    measured, or if cuDNN's kernels gain over FlashAttention-2's (`gains_by_cudnn`). Autocast casts
    the inputs as for PyTorch's attention.

    PyTorch's operator has no `window` and no `softcap`. With either, calls that no tuned kernel
    serves are composed of PyTorch's operations (`composed`), gradients without a backward kernel
    among them. So are graphs of torch.compile whose kind of call has no proven kernel here; the
    others hold an operator (`window_operators`).

    Args:
        query: (B, H, SQ, D), fp16 or bf16. TMA needs stride 1 along D, and multiples of 16 bytes
            along the other dimensions and for the start. Other tensors are copied first.
        key: (B, HKV, SKV, D), as `query`. Keys and values expanded over all heads are one head.
        value: (B, HKV, SKV, DV), of `key`'s type.
        attn_mask: as in PyTorch. Tuned kernels take booleans, true where a query sees a key, and
            additive masks of the query's type. The mask lies on the query's device and wants no
            gradient. It may have any strides, and broadcast along any axis. Rows without a visible
            key, or with all keys at -inf, have zeros for their output, whoever answers.
        dropout_p: as in PyTorch; tuned kernels support 0 only.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        enable_gqa: let HKV be a divisor of H.
        window: (left, right): query i sees keys i - left..i + right; -1: unlimited. Under
            `is_causal` it sees no key beyond i. One number stands for both sides, as ``window=`` of
            a shape. Queries without a key have zeros for their output.
        softcap: each scaled score s becomes softcap * tanh(s / softcap), before the mask; 0 is
            none.
        descale_q: positive fp32 (B, H). With descale factors query, key and value are
            float8_e4m3fn, and stand for their elements times these factors. The output is bf16.
            Calls that no tuned kernel serves are computed by PyTorch from bf16 copies. A mask,
            dropout, a window and a soft cap are not allowed.
        descale_k: fp32 (B, HKV).
        descale_v: fp32 (B, HKV).

    Returns:
        (B, H, SQ, D), of the inputs' type; bf16 for e4m3 inputs. A tuned kernel's output has the
        strides of ``torch.empty_like(query)``.

    Raises:
        ConfigError: when `window` or `softcap` is out of range. Also on descale factors that do not
            fit the tensors, or that come with a mask, dropout, a window or a soft cap.
        Exception: an error of `scaled_dot_product_attention` on arguments that it refuses, or of an
            earlier kernel.
    """
    if descale_q is not None or descale_k is not None or descale_v is not None:
        if attn_mask is not None or dropout_p or window is not None or softcap:
            raise ConfigError(
                "quantised attention takes no attn_mask, no dropout_p, no window and no softcap"
            )
        descales = (descale_q, descale_k, descale_v)
        return quantised.attend((query, key, value), descales, is_causal, scale, enable_gqa)
    extras = NONE if window is None and not softcap else Extras.of(window, softcap)
    is_composed = extras is not NONE
    if not is_composed and not is_dynamo_compiling():  # cheaper than `is_compiling`
        if attn_mask is not None and type(attn_mask) is not torch.Tensor and not is_causal:
            right = causal_right(attn_mask, query, key)
            is_composed = bool(right)
            if right == 0:
                attn_mask, is_causal = None, True
        if not is_composed:
            out = dispatch.attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
            if out is dispatch.REFUSED:
                options = attn_mask, dropout_p, is_causal, scale, enable_gqa
                return native.attend(query, key, value, *options)
            if out is not None:
                return out
            if not (attn_mask is not None or dropout_p or dispatch.is_loaded()):
                out = known(query, key, value, is_causal, scale, enable_gqa)
                if out is not None:
                    return out
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    options = attn_mask, dropout_p, is_causal, scale, enable_gqa
    return _answer(AttentionCall(query, key, value, *options, extras), is_composed)


def _answer(call: AttentionCall, is_composed: bool) -> torch.Tensor:
    """A tuned kernel's output, or PyTorch's.

    Args:
        call: a call that the dispatcher does not know.
        is_composed: PyTorch has no such attention: a window, a soft cap or a lower-right bias.
    """
    tensors, out = call.tensors, None
    if torch.compiler.is_compiling():  # also by an export without dynamo
        return _traced(call, is_composed)
    is_plain = call.attn_mask is None and not call.dropout_p
    if (is_composed or is_plain) and guards.wants_gradient(*tensors):
        query, key, value = handed_over.checked(*tensors)  # autograd keeps these
        call = call._replace(query=query, key=key, value=value)
        if is_composed:
            out = attend_extras(call)
        elif is_differentiable(call.attended):
            out = operate(*call.arguments)
    if out is None:
        if call.attn_mask is not None:
            call = _with_mask(call, call.attn_mask)
        out = serving.answer(call)
    return call.by_pytorch() if out is None else out


def _traced(call: AttentionCall, is_composed: bool) -> torch.Tensor:
    """The operator of torch.compile's graph, or PyTorch's operations."""
    out = window_operators.operate(call) if is_composed else operate(*call.arguments)
    if out is None and is_composed:
        return compose(*call.arguments, call.extras)
    return native.attend(*call.arguments) if out is None else out


def _with_mask(call: AttentionCall, mask: torch.Tensor) -> AttentionCall:
    """The call with its mask as an operand. A `CausalBias` is a causal flag or a window."""
    query, key, extras = call.query, call.key, call.extras
    right = None if call.is_causal else causal_right(mask, query, key)
    if right is None:
        return call._replace(operand=as_operand(mask, query, key, call.is_causal))
    if right == 0:
        return call._replace(attn_mask=None, is_causal=True)
    last = right if extras.right < 0 else min(right, extras.right)
    return call._replace(extras=extras._replace(right=last))
