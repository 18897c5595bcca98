"""What must hold of tensors before any tuned kernel may take them, whatever the store says."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd import forward_ad

from tuner.errors import ConfigError
from tuner.hardware import TMA_ALIGNMENT_BYTES
from tuner.problem import DType
from tuner.runtime import devices

DTYPES: dict[torch.dtype, DType] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

GRADIENT = "a gradient is wanted: tuned kernels have no backward pass"
SCALE = "scale is not positive: tuned kernels take the maxima of the scores before scaling"

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def unplain(*tensors: torch.Tensor) -> str:
    """Why these are not plain strided tensors; else empty."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return "an input is not a plain tensor"
        if tensor.layout is not torch.strided or tensor.is_nested:
            return "a tensor is not strided"
    return ""


def unserved(*tensors: torch.Tensor) -> str:
    """Why these are not tensors that a kernel can be given; else empty. Looks at no size."""
    if reason := unplain(*tensors):
        return reason
    if tensors[0].device.type != devices.TYPE:
        return "the tensors are not on a CUDA device"
    if torch._C._functorch.peek_interpreter_stack() or torch._C._len_torch_dispatch_stack():
        return "a transform or a dispatch mode of torch is active"
    # A dual tensor requires no gradient, and its dispatch keys are any tensor's.
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active: tuned kernels compute no tangents"
    for tensor in tensors:
        if tensor.is_neg():
            return "a tensor is a negative view: its memory has the other sign"
        if tensor._is_zerotensor():
            return "a tensor of zeros has no memory"
    return ""


def wants_gradient(*tensors: torch.Tensor) -> bool:
    """Whether autograd records a call with these tensors."""
    return torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])


def autocast(device: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors as autocast, where it is on, hands them to attention."""
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if t.device.type == device and t.is_floating_point() and t.dtype != torch.double
        else t
        for t in tensors
    )


def deferred(*tensors: torch.Tensor) -> str:
    """Why PyTorch must have this call, by the state of autograd and autocast; else empty."""
    if wants_gradient(*tensors):
        return GRADIENT
    return recast(tensors[0])


def recast(tensor: torch.Tensor) -> str:
    """Why PyTorch must have a call with this tensor, by the state of autocast; else empty."""
    device = tensor.device.type
    if (
        torch.amp.is_autocast_available(device)
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) != tensor.dtype
    ):
        return "autocast wants another type than the tensors'"
    return ""


def misaligned(*tensors: torch.Tensor) -> str:
    """Why TMA cannot read these tensors; else empty."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    if bits % TMA_ALIGNMENT_BYTES:
        return f"a tensor does not start at a multiple of {TMA_ALIGNMENT_BYTES} bytes"
    return ""


def check_alike(*tensors: torch.Tensor, dtypes: Mapping[torch.dtype, DType] = DTYPES) -> None:
    """Refuse tensors of different types, or of types that are not in `dtypes`.

    Raises:
        ConfigError: says which rule they break.
    """
    if len({t.device for t in tensors}) > 1 or len({t.dtype for t in tensors}) > 1:
        raise ConfigError("they differ in device or type")
    if tensors[0].dtype not in dtypes:
        raise ConfigError(f"{tensors[0].dtype} is not tuned (fp16 and bf16 are)")


def lies(tensor: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """True when `tensor` has these strides where they matter: in dimensions longer than one."""
    return all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def laid_out_as(like: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result` with the strides of `torch.empty_like(like)`, which is what tracing is told."""
    if result.stride() == like.stride():
        return result
    wanted = torch.empty_like(like)
    return result if lies(result, wanted.stride()) else wanted.copy_(result)
