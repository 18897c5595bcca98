"""`attention`: the tuned kernel where there is a measured one, PyTorch's everywhere else.

Where SQ and SKV differ, a causal mask lies along the diagonal that starts at the first query and
the first key (top-left: query i sees keys 0..i), or along the one that ends at the last of both
(bottom-right: 0..i + SKV - SQ). Tuned kernels compute the former. What each way in means, and who
answers it:

| way in | causal mask | answered by |
|---|---|---|
| `tuner.attention`, e4m3 too; operators `tuner::attention*` | top-left | tuned kernels |
| their gradients | top-left | cuDNN's kernel, or recomputed; flash's where SQ is SKV |
| a window | along the top-left diagonal | tuned kernels, or PyTorch's operations |
| `attn_mask=causal_upper_left(...)`, `causal_lower_right(...)` | as it says | PyTorch |
| `attention_varlen` | top-left in each sequence | tuned kernels |
| nested tensors | PyTorch's | PyTorch |
| `tuner.enable`: `scaled_dot_product_attention`, efficient's operator | top-left | tuned kernels |
| `tuner.enable`: `aten::_scaled_dot_product_cudnn_attention` | top-left | tuned kernels |
| `tuner.enable`: `aten::_scaled_dot_product_flash_attention` | bottom-right | tuned if SQ is SKV |
| Transformers: no mask, several queries (an empty static cache) | top-left | tuned kernels |
| Transformers: no mask, one query | none, all keys | tuned kernels |
| Transformers: queries after a filled cache | a mask | PyTorch |

Grouped heads change nothing of it: query head h reads key head h // (H / HKV).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from tuner.errors import ConfigError
from tuner.runtime import counters, devices, dispatch, guards, native, quantised
from tuner.runtime.attention_plan import find_plan
from tuner.runtime.autograd import has_backward
from tuner.runtime.bias import GIVEN, as_bias
from tuner.runtime.composed import NONE, Extras, compose
from tuner.runtime.operators import operate
from tuner.runtime.refusal import Refusal
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
    answers, with these same arguments, whatever no tuned kernel can: most masks, dropout, other
    shapes, CPU tensors, `TUNER_DISABLE=1`, ... Each such call is counted by its reason
    (`tuner.stats`), and the reason is logged once to ``tuner.runtime``. Predicted and replayed
    entries are never launched. The first call of a shape loads its kernel: make one before
    capturing a CUDA graph.

    A gradient is computed by PyTorch's backward kernels from the tuned kernel's output and
    log-sum-exp, where it writes one. Autocast casts the inputs, as it does PyTorch's.

    PyTorch's operator has no `window` and no `softcap`. With either, what no tuned kernel answers,
    gradients and graphs of torch.compile among it, is composed of PyTorch's operations
    (`tuner.runtime.composed`).

    Args:
        query: (B, H, SQ, D), fp16 or bf16; contiguous, or a view of a contiguous (B, SQ, H, D).
        key: (B, HKV, SKV, D), laid out as `query`, or contiguous.
        value: (B, HKV, SKV, D), laid out as `key`.
        attn_mask: as in PyTorch. Tuned kernels take one that is added to the scores (a float one
            of the query's type), has whole rows of keys, one for all, for each head, each sequence
            or both, and wants no gradient. With them a query all of whose keys are at -inf has
            zeros for its output.
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
        (B, H, SQ, D), of the inputs' type, bf16 of e4m3; laid out as `query` where a tuned kernel
        ran.

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
        return _composed(query, key, value, *options, Extras.of(window, softcap))
    if not torch.compiler.is_compiling():
        out = dispatch.attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
        if out is dispatch.REFUSED:
            return native.attend(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        if out is not None:
            return out
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if not torch.compiler.is_compiling():
        out = answer(*arguments)
        return native.attend(*arguments) if out is None else out
    out = operate(*arguments)
    if out is not None:
        return out
    return scaled_dot_product_attention(*arguments[:6], scale=scale, enable_gqa=enable_gqa)


def _composed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    extras: Extras,
) -> torch.Tensor:
    """The tuned kernel's output under a window or a soft cap, or that of PyTorch's operations."""
    query, key, value = guards.autocast(devices.TYPE, query, key, value)
    arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
    if torch.compiler.is_compiling():
        return compose(*arguments, extras)
    out = answer(*arguments, extras)
    if out is None:
        out = native.call(compose, *arguments, extras)
    return out


def answer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    extras: Extras = NONE,
) -> torch.Tensor | None:
    """The tuned kernel's output, or None, counted by its reason, where PyTorch must answer."""
    served: torch.Tensor | Refusal
    generation = table.refresh(query)
    if dropout_p:
        served = Refusal("dropout_p is not 0")
    elif attn_mask is None:
        served = serve(query, key, value, is_causal, scale, enable_gqa, extras)
    elif extras != NONE:
        served = Refusal(f"{GIVEN}: beside a window or a soft cap")
    else:
        served = _serve_biased(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    if not isinstance(served, Refusal):
        return served
    if extras == NONE:
        arguments = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        dispatch.refuse("attention", arguments, served, generation)
    else:  # which the dispatcher does not know
        counters.count_fallback(served.reason)
    return None


def _serve_biased(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | Refusal:
    """As `serve`, with a mask that is added to the scores."""
    bias = as_bias(attn_mask, query, key, is_causal)
    if isinstance(bias, str):
        return Refusal(bias)
    if guards.wants_gradient(query, key, value, bias):
        return Refusal("a gradient is wanted: tuned kernels have none for an attn_mask")
    plan = find_plan(query, key, value, is_causal, scale, enable_gqa, bias=bias)
    return plan if isinstance(plan, Refusal) else table.run(plan, query, key, value, bias)


def serve(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    extras: Extras = NONE,
) -> torch.Tensor | Refusal:
    """The tuned kernel's output, or why there is none; counts hits, and no fallback."""
    plan = find_plan(query, key, value, is_causal, scale, enable_gqa, extras)
    if isinstance(plan, Refusal):
        return plan
    if not guards.wants_gradient(query, key, value):
        return table.run(plan, query, key, value)
    if extras != NONE:
        return Refusal(
            "a gradient is wanted: PyTorch has no backward kernel for a window or a soft cap"
        )
    if not plan.has_lse:
        return Refusal(f"a gradient is wanted: {plan.config.family} does not write the log-sum-exp")
    if not has_backward(query, key, is_causal):
        return Refusal("a gradient is wanted: PyTorch has no fused backward kernel for such shapes")
    out: torch.Tensor = torch.ops.tuner.attention_with_lse(query, key, value, is_causal, scale)[0]
    return out
