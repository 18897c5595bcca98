"""PyTorch's FlashAttention-2, called with what PyTorch's attention does not pass to it: lengths
that only the device knows, and windows.

It reads no length on the host, so that calls by it can be captured in CUDA graphs.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from tuner.errors import ConfigError
from tuner.problem.attention import NARROW_HEAD_DIM
from tuner.runtime.call import devices, guards, handed_over

_WIDTH_STEP = 8
_HALF = torch.float16, torch.bfloat16
_MIN_MAJOR = 8
"""Least major compute capability of its GPUs."""
_forward = torch.ops.aten._flash_attention_forward.default


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> bool:
    """True if it computes attention of such tensors, in this type, without a gradient.

    Args:
        query: (..., H, D).
        key: (..., HKV, D).
        value: (..., HKV, D).
        dtype: type that the tensors have, or are copied to.
    """
    (heads, width), heads_kv = query.shape[-2:], key.shape[-2]
    return (
        query.is_cuda
        and _runs_on(query.get_device())
        and guards.are_plain(query, key, value)
        and dtype in _HALF
        and key.shape[-2:] == value.shape[-2:]
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        and 0 < width <= NARROW_HEAD_DIM
        and width % _WIDTH_STEP == 0
        and heads_kv > 0
        and heads % heads_kv == 0
        and bool(query.numel() and key.numel())
        and not guards.wants_gradient(query, key, value)
    )


def are_together(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """True for tensors of one device."""
    return all(tensor is None or tensor.device == first.device for tensor in others)


@cache
def _runs_on(device: int) -> bool:
    """True if PyTorch has it for a GPU."""
    major = torch.cuda.get_device_properties(device).major
    return bool(torch.backends.cuda.is_flash_attention_available() and major >= _MIN_MAJOR)


def check_uncaptured(name: str, further: str = "") -> None:
    """Refuse a capture of a call whose lengths PyTorch would read on the host.

    Args:
        name: the function that was called.
        further: a further need of this function, as the end of a list.

    Raises:
        ConfigError: within a capture.
    """
    if torch.cuda.is_available() and devices.is_capturing():
        raise ConfigError(
            f"{name} cannot be captured here: no tuned kernel serves the call, and PyTorch's "
            "operations read its lengths on the host (allowed in a capture without such a kernel: "
            f"no soft cap, no gradient, one GPU of compute capability {_MIN_MAJOR}.0 or newer, "
            f"D a multiple of {_WIDTH_STEP} to {NARROW_HEAD_DIM}{further})"
        )


def packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    is_causal: bool,
    scale: float,
    window: tuple[int, int] = (-1, -1),
    used: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (total_q, H, D) and log-sum-exp (H, total_q) of packed sequences.

    Args:
        query: (total_q, H, D).
        key: (total_kv, HKV, D).
        value: as `key`.
        starts: int32 (B + 1), of queries and of keys.
        longest: queries and keys of a sequence at most; of one query every sequence must have it.
        is_causal: bottom-right mask.
        scale: factor of the scores.
        window: keys that a query sees before and after its own; -1: no limit.
        used: int32 (B), keys of each sequence; None: all up to the next start.
    """
    out, lse, *_ = _forward(
        *(query, key, value, *starts, *longest, 0.0, is_causal, False),
        scale=scale,
        window_size_left=window[0],
        window_size_right=0 if is_causal else window[1],
        seqused_k=used,
    )
    return out, lse.masked_fill(lse == math.inf, -math.inf)


def windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor | None:
    """Output (B, H, S, D) under a window; None where it does not take the call.

    Args:
        query: (B, H, S, D).
        key: (B, HKV, SKV, D); another length than the queries' is not taken.
        value: as `key`.
        is_causal: query i sees keys 0..i.
        scale: factor of the scores; 1/sqrt(D) when None.
        window: keys that a query sees before and after its own; -1: no limit.
    """
    is_square = query.dim() == 4 and query.shape[::2] == key.shape[::2]
    if not is_square or key.shape != value.shape or torch.compiler.is_compiling():
        return None
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    if len({t.dtype for t in (query, key, value)}) > 1 or not takes(query, key, value, query.dtype):
        return None
    tensors = handed_over.aligned(query, key, value)
    lengths = query.shape[1], key.shape[1]
    out, *_ = _forward(
        *(*tensors, None, None, *lengths, 0.0, is_causal, False),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window_size_left=window[0],
        window_size_right=0 if is_causal else window[1],
    )
    return out.transpose(1, 2)
