"""Tensors as PyTorch's fused attention kernels read them rightly.

Torch 2.11 chooses cuDNN's kernel (9.19) for most calls on Hopper. `native.attend` hands calls over
by these rules; `templates/dispatcher/handed_over.h` has them for calls that pass no Python.

| call | fault on an H200 | handed over |
|---|---|---|
| a start, or rows, off multiples of 16 bytes | wrong numbers, or a CUDA error | aligned copies |
| a mask of one column for all keys | a CUDA error, or another | a column for each key |
| a row of a boolean mask without a key | attention over all keys | terms of minus infinity |
| the same with gradients | the same | the mask; PyTorch's output becomes zero there |
| sizes that do not fit | an error first, then the process ends | the call, to PyTorch's `math` |
| a size of 0 | no tensor | the call, to PyTorch's `math` |
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import pad

from tuner.hardware import TMA_ALIGNMENT_BYTES
from tuner.runtime.call import devices, guards

HALF = (torch.float16, torch.bfloat16)
"""Types that PyTorch's fused kernels take."""


def is_checked(*tensors: torch.Tensor) -> bool:
    """True for tensors that these rules are for: plain ones of the served device.

    In a trace the device decides.
    """
    if torch.compiler.is_compiling():
        return bool(tensors[0].device.type == devices.TYPE)
    return guards.unserved(tensors) is None


def is_empty(*tensors: torch.Tensor) -> bool:
    """True for plain tensors of any device of which one has no element, outside of a trace.

    PyTorch 2.11 ends the process for some of them on a CPU, too.
    """
    if torch.compiler.is_compiling() or not guards.are_plain(*tensors):
        return False
    return not all(tensor.numel() for tensor in tensors)


def is_ready(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True for a call without a mask that is handed over as it is.

    False where that takes longer to say, as for tensors that are not plain, and in a trace.
    """
    tensors = query, key, value
    if torch.compiler.is_compiling() or not guards.are_plain(*tensors):
        return False
    layouts = query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride()
    try:
        return lie_well(layouts, query.element_size()) and not guards.is_misaligned(tensors)
    except RuntimeError:  # tensors of a transform have no memory
        return False


@lru_cache(4096)
def lie_well(layouts: tuple[Any, ...], size: int) -> bool:
    """True for tensors, not e4m3, that `is_ready` takes if they start at multiples of 16 bytes.

    Args:
        layouts: shapes of query, key and value, then their strides.
        size: bytes of an element.
    """
    query, key, value, *strides = layouts
    every = zip((query, key, value), strides, strict=True)
    is_read = size > 1 and all(any(_layout(shape, steps, size)) for shape, steps in every)
    return is_read and _match(query, key, value, None)


def fits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """False for sizes that PyTorch's fused kernels fail on, though one may be chosen for them.

    A call that cuDNN's front end refuses leaves no plan in PyTorch's cache, where the next equal
    call takes one from. PyTorch's `math` raises an error each time.

    Args:
        query: (B, H, SQ, D). Other dimensions fit: no fused kernel takes them.
        key: (B, HKV, SKV, D).
        value: (B, HKV, SKV, any).
        mask: `attn_mask`; None: no mask.
    """
    if mask is None or type(mask) is not torch.Tensor:
        mask = None
    elif mask.device != query.device:
        return False
    match = _match if torch.compiler.is_compiling() else _match_cached
    return match(query.shape, key.shape, value.shape, None if mask is None else mask.shape)


def _match(query: torch.Size, key: torch.Size, value: torch.Size, mask: torch.Size | None) -> bool:
    """`fits` of the shapes."""
    if not len(query) == len(key) == len(value) == 4:
        return True
    if 0 in (*query, *key, *value):
        return False
    batch, heads, length, head_dim = query
    heads_kv, keys = key[1:3]
    if key[0] != batch or key[3] != head_dim or value[:3] != key[:3] or heads % heads_kv:
        return False
    if mask is None:
        return True
    sizes = (batch, heads, length, keys)[4 - len(mask) :]
    pairs = zip(mask, sizes, strict=False)
    return len(mask) <= 4 and all(size in (1, full) for size, full in pairs)


_match_cached = lru_cache(4096)(_match)


def by_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attention of four-dimensional tensors without a fused kernel.

    Raises:
        RuntimeError: PyTorch's own, on sizes that do not fit.
    """
    attend = torch.ops.aten._scaled_dot_product_attention_math
    is_grouped = enable_gqa and key.shape[1] > 0  # PyTorch divides by it
    options = mask, dropout_p, is_causal, None
    out: torch.Tensor
    out, _ = attend(query, key, value, *options, scale=scale, enable_gqa=is_grouped)
    return out


def aligned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors; in place of those that fused kernels read wrongly where they lie, copies.

    A copy starts at a multiple of 16 bytes, and so do its rows. It keeps the order of the
    dimensions, and the broadcast ones.
    """
    return tuple(t if is_aligned(t) else copied(t) for t in tensors)


def checked(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `aligned`, for tensors that may be any."""
    return aligned(*tensors) if is_checked(*tensors) else tensors


def is_aligned(tensor: torch.Tensor) -> bool:
    """True for a tensor that lies well, is empty, or has rows that PyTorch pads or leaves to
    `math`.
    """
    if torch.compiler.is_compiling():
        return _is_left(tensor.shape, tensor.stride(), tensor.element_size()) or _has_aligned_rows(
            tensor.shape, tensor.stride(), tensor.element_size()
        )
    is_left, has_rows = _layout(tensor.shape, tensor.stride(), tensor.element_size())
    return is_left or (has_rows and not is_off(tensor))


@lru_cache(4096)
def _layout(shape: torch.Size, strides: tuple[int, ...], size: int) -> tuple[bool, bool]:
    """`_is_left` and `_has_aligned_rows`, which most calls ask of few layouts."""
    return _is_left(shape, strides, size), _has_aligned_rows(shape, strides, size)


def _is_left(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    """True for a tensor without elements, or with rows that no fused kernel reads in place."""
    if not shape or 0 in shape or strides[-1] != 1:
        return True
    return bool(shape[-1] * size % TMA_ALIGNMENT_BYTES)


def _has_aligned_rows(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    """True when rows lie multiples of 16 bytes apart."""
    for length, stride in zip(shape[:-1], strides, strict=False):
        if length != 1 and stride * size % TMA_ALIGNMENT_BYTES:
            return False
    return True


def is_off(tensor: torch.Tensor) -> bool:
    """True for a tensor that does not start at a multiple of 16 bytes; unknown in a trace."""
    return not torch.compiler.is_compiling() and guards.is_misaligned((tensor,))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose start and rows are aligned, differentiable."""
    rows = _once(tensor)
    width, step = tensor.shape[-1], TMA_ALIGNMENT_BYTES // tensor.element_size()
    if width % step:
        copy = pad(rows, (0, -width % step))[..., :width]
    else:
        copy = rows.clone()
        if copy.stride(-1) != 1 or not is_aligned(copy):  # of rows that overlap
            copy = rows.clone(memory_format=torch.contiguous_format)
    return copy.expand(tensor.shape)


def is_changed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """True for a call that `native.attend` hands over in another form than it came."""
    tensors = query, key, value
    if not is_checked(*tensors):
        return False
    if not fits(*tensors, mask) or not all(map(is_aligned, tensors)):
        return True
    if type(mask) is not torch.Tensor:
        return False
    return may_ignore(query, mask) or aligned_mask(over_keys(mask, key)) is not mask


def may_ignore(query: torch.Tensor, mask: torch.Tensor) -> bool:
    """True for a boolean mask that cuDNN's kernel may ignore in rows that see no key."""
    return mask.dtype == torch.bool and query.dtype in HALF and query.dim() == 4 and has_cudnn()


def has_cudnn() -> bool:
    """True while the program lets PyTorch choose cuDNN's kernel. Read once, when a graph is
    traced.
    """
    return bool(torch.backends.cuda.cudnn_sdp_enabled())


# As `torch.compiler.assume_constant_result`, which imports all of dynamo.
has_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def terms_of(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A boolean mask as terms of the scores, in aligned rows: 0 where a query sees a key."""
    width, step = mask.shape[-1], TMA_ALIGNMENT_BYTES // dtype.itemsize
    rows = _once(mask)
    if width % step:
        rows = pad(rows, (0, -width % step))
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(rows, zero, -math.inf)[..., :width].expand(mask.shape)


def over_keys(mask: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mask; one with a single column, expanded over the keys (B, HKV, SKV, D)."""
    if not mask.dim() or mask.shape[-1] != 1 or key.dim() < 2:
        return mask
    return mask.expand(*mask.shape[:-1], key.shape[-2])


def aligned_mask(mask: torch.Tensor) -> torch.Tensor:
    """The mask; a copy of one with terms whose rows are not aligned, or expanded over the keys."""
    if not mask.is_floating_point() or not mask.dim():
        return mask
    is_read = _has_aligned_rows(mask.shape, mask.stride(), mask.element_size())
    is_read = is_read and (mask.shape[-1] < 2 or mask.stride(-1) != 0)
    return mask if is_read and not is_off(mask) else copied(mask)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """One element of each broadcast dimension but the last."""
    for dim, stride in enumerate(tensor.stride()[:-1]):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor
