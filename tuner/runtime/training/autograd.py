"""Gradients of attention from its output and log-sum-exp, by PyTorch's backward kernels.

FlashAttention-2's and cuDNN's backward kernels take the output and the log-sum-exp of any forward
kernel. FlashAttention-2 takes the log-sum-exp as fp32 (B, H, SQ), cuDNN as fp32 (B, H, SQ, 1), both
with the natural logarithm. The kernels read a random state for dropout only, which no tuned kernel
supports.

PyTorch's choice of a kernel holds, with two exceptions. FlashAttention-2's replaces cuDNN's at
lengths where cuDNN's gradients may be NaN (`may_be_nan`). At others cuDNN's replaces
FlashAttention-2's where it takes the tensors and the work is not tiny. It was faster at each of 14
shapes of 0.5 GFLOP and more, 1.09 to 1.92 times (bf16, behind an ordinary kernel, one H100, torch
2.11, cuDNN 9.19). At (1,16,128,32), 0.08 GFLOP, it took 12.8 us and FlashAttention-2's 10.3.

Without a fused kernel the scores are recomputed, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tuner.families.peers.sdpa_backward import may_be_nan
from tuner.problem.attention import NARROW_HEAD_DIM
from tuner.runtime.attention.composed import (
    Attended,
    BackwardInputs,
    differentiate,
    scores_of,
)
from tuner.runtime.call import native

_FLASH, _CUDNN = (int(b.value) for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION))
#: Floating-point operations of a backward pass from which cuDNN's kernel is expected to save 67 us
#: or more over FlashAttention-2's (`RATES` of `families/peers/sdpa_backward.py`), and its forward
#: pass some more. The operators' way through Python may cost the host of an eager program that
#: much.
CUDNN_FLOPS = 4e10
#: The same from which another kernel replaces cuDNN's, which takes about 200 us. Our own are
#: expected to save 5 to 15 % of that (by the costs of the rule of gradients).
CUDNN_REPLACED_FLOPS = 1e11
#: The same from which cuDNN's backward kernel replaces FlashAttention-2's where the gradient is
#: computed here anyway: it is between the shapes measured where it lost and where it won.
MIN_CUDNN_FLOPS = 4e8
#: Kinds of tensors that cuDNN was asked about, at most.
_MAX_KNOWN = 4096
_cudnn_takes: dict[Hashable, bool] = {}
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def has_backward(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> bool:
    """True when PyTorch has a fused backward kernel for half-precision tensors of such shapes.

    FlashAttention-2 aligns a causal mask bottom-right, so it needs equal SQ and SKV under one.
    """
    head_dim = query.shape[-1]
    square = query.shape[-2] == key.shape[-2]
    return head_dim <= NARROW_HEAD_DIM and head_dim % 8 == 0 and (square or not is_causal)


def has_much_work(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, is_cudnn: bool = False
) -> bool:
    """True when a faster backward kernel saves more than the operators' way costs the host.

    Args:
        query: (B, H, SQ, D).
        key: (B, HKV, SKV, D).
        is_causal: mask of the attention.
        is_cudnn: True in the place of cuDNN's kernel, False in that of FlashAttention-2's.
    """
    least = CUDNN_REPLACED_FLOPS if is_cudnn else CUDNN_FLOPS
    return _flops(query, key, is_causal) >= least


def gains_by_cudnn(call: Attended) -> bool:
    """True when PyTorch would choose FlashAttention-2's kernels for such tensors, cuDNN's may run,
    and the work is large enough for the difference to count.
    """
    if not (has_much_work(call.query, call.key, call.is_causal) and call.query.is_cuda):
        return False
    return _choice(call) == _FLASH and _takes_cudnn(call)


def forward_with_lse(call: Attended) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's attention with its log-sum-exp.

    Returns:
        The output (B, H, SQ, D), and the log-sum-exp (B, H, SQ) in at least single precision.
    """
    query, key, value, is_causal, scale, _ = call
    backend = _backend(call)
    if backend == _FLASH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = native.call(flash, query, key, value, 0.0, is_causal, scale=scale)
        return out, lse
    if backend == _CUDNN:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        options = None, True, 0.0, is_causal
        out, lse, *_ = native.call(cudnn, query, key, value, *options, scale=scale)
        return out, lse.squeeze(-1)
    is_grouped = call.is_grouped
    out = native.attend(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
    return out, torch.cat([block.scores.logsumexp(-1) for block in scores_of(call)], dim=-1)


def backward(call: Attended, recorded: BackwardInputs) -> Three:
    """Gradients of query, key and value by the kernels that PyTorch would choose, or cuDNN's."""
    query, key, value, is_causal, scale, _ = call
    out, lse, grad_out = recorded
    backend = _backend(call)
    lengths = query.shape[2], key.shape[2]
    if backend == _FLASH:
        unused = _random_state(query)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grads = native.call(
            flash, grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, is_causal,
            *unused, scale=scale,
        )  # fmt: skip
    elif backend == _CUDNN:
        unused = _random_state(query)
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        grads = native.call(
            cudnn, grad_out, query, key, value, out, lse.unsqueeze(-1), *unused, None, None, None,
            *lengths, 0.0, is_causal, scale=scale,
        )  # fmt: skip
    else:
        grads = differentiate(call, recorded)
    grad_query, grad_key, grad_value = grads
    return grad_query, grad_key, grad_value


def second_backward(
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Second derivatives: gradients of the `inputs` from those of the results of `backward`.

    No fused kernel computes them: attention is recomputed by PyTorch's plain operations.

    Args:
        grads: gradients of `backward`'s three results, each of its result's shape.
        inputs: the output's gradient (B, H, SQ, D), query (B, H, SQ, D), and key and value (B, HKV,
            SKV, D).
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.

    Returns:
        Gradients of the four `inputs`, each of its input's shape.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        grad_out, query, key, value = (t.detach().requires_grad_() for t in inputs)
        grouped = bool(query.shape[1] != key.shape[1])
        out = scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
        firsts = torch.autograd.grad(out, (query, key, value), grad_out, create_graph=True)
        return tuple(torch.autograd.grad(firsts, (grad_out, query, key, value), grads))


def _backend(call: Attended) -> int:
    """The `SDPBackend` that PyTorch would choose, but for the exceptions above; ERROR, which is
    none, off the GPU, of empty tensors, and of flash where its operators would align a causal mask
    otherwise.
    """
    none = int(SDPBackend.ERROR.value)
    query, key, is_causal = call.query, call.key, call.is_causal
    if not query.is_cuda or not (query.numel() and key.numel()):
        return none
    backend = _choice(call)
    if backend == _CUDNN and may_be_nan(query.shape[2], key.shape[2]):
        backend = _FLASH
    is_large = _flops(query, key, is_causal) >= MIN_CUDNN_FLOPS
    if backend == _FLASH and is_large and _takes_cudnn(call):
        return _CUDNN
    is_bottom_right = is_causal and backend == _FLASH and query.shape[2] != key.shape[2]
    return none if is_bottom_right else backend


def _flops(query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> float:
    """Floating-point operations of a backward pass: five products."""
    batch, heads, length, head_dim = query.shape
    flops: float = 10 * batch * heads * length * key.shape[2] * head_dim
    return flops / 2 if is_causal else flops


def _choice(call: Attended) -> int:
    """The `SDPBackend` that PyTorch would choose."""
    query, key, value, is_causal, scale, _ = call
    arguments = query, key, value, None, 0.0, is_causal
    return int(torch._fused_sdp_choice(*arguments, scale=scale, enable_gqa=call.is_grouped))


def _takes_cudnn(call: Attended) -> bool:
    """True when cuDNN's kernels may run: they are switched on, they take such tensors, their
    gradients are finite, and the program does not ask for deterministic algorithms, which they do
    not promise.
    """
    query, key, value, is_causal, *_ = call
    if may_be_nan(query.shape[2], key.shape[2]):
        return False
    backends = torch.backends.cuda
    if torch.are_deterministic_algorithms_enabled() or not backends.cudnn_sdp_enabled():
        return False
    tensors = query, key, value
    kind = is_causal, query.dtype, query.device, *((t.shape, t.stride()) for t in tensors)
    cached = _cudnn_takes.get(kind)
    if cached is None:
        params = backends.SDPAParams(*tensors, None, 0.0, is_causal, call.is_grouped)
        cached = bool(backends.can_use_cudnn_attention(params, False))
        if len(_cudnn_takes) >= _MAX_KNOWN:
            _cudnn_takes.clear()
        _cudnn_takes[kind] = cached
    return cached


def _random_state(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """State of dropout's generator for the backward kernels, which do not read it."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
    )
