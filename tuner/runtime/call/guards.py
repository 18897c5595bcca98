"""Conditions that tensors must meet for any tuned kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache

import torch
from torch.autograd import forward_ad

from tuner.errors import ConfigError
from tuner.hardware import TMA_ALIGNMENT_BYTES
from tuner.problem import E4M3, DType, Operand
from tuner.runtime.call import devices
from tuner.runtime.call.refusal import Kind, Refusal, once

DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
QUANTISED: dict[torch.dtype, DType] = {torch.float8_e4m3fn: E4M3}

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack


@cache
def _type_of(device: torch.device) -> str:
    """``device.type``, which makes a new text each time."""
    return str(device.type)


@cache
def _has_autocast(device: str) -> bool:
    return bool(torch.amp.is_autocast_available(device))


def are_plain(*tensors: torch.Tensor) -> bool:
    """True where `unplain` finds no reason."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.layout is not _STRIDED or tensor.is_nested:
            return False
    return True


def unplain(tensors: Iterable[torch.Tensor]) -> Refusal | None:
    """Reason why these are not plain strided tensors; else None."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return once(Kind.SUBCLASS)
        if tensor.layout is not _STRIDED or tensor.is_nested:
            return once(Kind.NOT_STRIDED)
    return None


def unserved(tensors: Sequence[torch.Tensor]) -> Refusal | None:
    """Reason why no kernel can take these tensors; else None. Sizes are not checked here."""
    return unplain(tensors) or unready(tensors)


def unready(tensors: Sequence[torch.Tensor]) -> Refusal | None:
    """As `unserved`, for tensors that are plain."""
    if _type_of(tensors[0].device) != devices.TYPE:
        return once(Kind.DEVICE)
    if _transforms() or _modes():
        return once(Kind.TRANSFORM)
    # A dual tensor requires no gradient, and its dispatch keys are any tensor's.
    if forward_ad._current_level >= 0:
        return once(Kind.TANGENT, "tuned kernels compute no tangents")
    for tensor in tensors:
        if tensor.is_neg():
            return once(Kind.NEGATIVE, "its memory has the other sign")
        if tensor._is_zerotensor():
            return once(Kind.ZEROS)
    return None


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """True when autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def autocast(device: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, cast as autocast casts attention's inputs while it is on."""
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if t.device.type == device and t.is_floating_point() and t.dtype != torch.double
        else t
        for t in tensors
    )


def deferred(*tensors: torch.Tensor) -> Refusal | None:
    """Reason why the state of autograd or autocast leaves this call to PyTorch; else None."""
    if wants_gradient(*tensors):
        return Refusal(Kind.GRADIENT, "tuned kernels have no backward pass")
    return recast(tensors[0])


def recast(tensor: torch.Tensor) -> Refusal | None:
    """Reason why the state of autocast leaves a call with this tensor to PyTorch; else None."""
    device = _type_of(tensor.device)
    if (
        _has_autocast(device)
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) != tensor.dtype
    ):
        return Refusal(Kind.AUTOCAST)
    return None


def unscaled(scale: float | None) -> Refusal | None:
    """Reason why tuned attention does not take a scale of the scores; else None."""
    if scale is None or scale > 0:  # False of NaN
        return None
    return Refusal(Kind.SCALE, "tuned kernels take the maxima of the scores before scaling")


def is_misaligned(tensors: Iterable[torch.Tensor]) -> bool:
    """True when one of these tensors starts at an address that TMA cannot read from."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % TMA_ALIGNMENT_BYTES != 0


def check_alike(*tensors: torch.Tensor, dtypes: Mapping[torch.dtype, DType] = DTYPES) -> None:
    """Refuse tensors of different types, or of types that are not in `dtypes`.

    Raises:
        ConfigError: names the rule that they break.
    """
    if len({t.device for t in tensors}) > 1 or len({t.dtype for t in tensors}) > 1:
        raise ConfigError("they differ in device or type")
    if tensors[0].dtype not in dtypes:
        raise ConfigError(f"{tensors[0].dtype} is not tuned (fp16 and bf16 are)")


def check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse tensors that are not a valid attention over (B, H, S, D).

    Raises:
        ConfigError: names the given and the allowed shapes.
    """
    sizes = query.shape, key.shape, value.shape
    if (
        any(len(size) != 4 for size in sizes)
        or sizes[1] != sizes[2]
        or sizes[0][::3] != sizes[1][::3]
        or sizes[0][1] % max(1, sizes[1][1])
    ):
        raise ConfigError(
            f"query {tuple(sizes[0])}, key {tuple(sizes[1])} and value {tuple(sizes[2])} are not "
            "(B, H, SQ, D) and twice (B, HKV, SKV, D) with HKV a divisor of H"
        )


def lies(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """True when `tensor` has these strides in all dimensions longer than one."""
    return all(
        size == 1 or stride == step
        for size, stride, step in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def along(operand: Operand, strides: Sequence[int]) -> tuple[int, ...]:
    """A tensor's strides, with the operand's strides in dimensions of one element: the former have
    no meaning there, and TMA refuses some values.
    """
    every = zip(operand.shape, strides, operand.strides, strict=True)
    return tuple(own if size == 1 else stride for size, stride, own in every)


@lru_cache(1024)
def dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``torch.empty_like(tensor)``: its own if it is dense, else dense ones in the same
    order.
    """
    like = torch.empty_strided(shape, strides, device="meta")
    return tuple(torch.empty_like(like).stride())


def laid_out_as(like: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result` with the strides of `torch.empty_like(like)`, which the fake kernels promise."""
    if result.stride() == like.stride() or lies(result, dense(like.shape, like.stride())):
        return result
    return torch.empty_like(like).copy_(result)
