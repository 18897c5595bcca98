"""Strides of tensors that TMA reads: the part of legality that all families with TMA share."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.hardware import MAX_TMA_STRIDE_BYTES, TMA_ALIGNMENT_BYTES
from tuner.problem import DTYPE_BYTES, Operand


def tma_conflict(operand: Operand, strides: Sequence[int], contiguous: int = -1) -> str:
    """Reason why TMA cannot read a tensor with such strides; empty when it can.

    A stride of 0 is refused: `cuTensorMapEncodeTiled` documents strides that are at least as long
    as the extent below them.

    Args:
        operand: shape and type of the tensor.
        strides: elements, one for each dimension.
        contiguous: dimension along which the elements follow one another.
    """
    width, inner = DTYPE_BYTES[operand.dtype], contiguous % len(strides)
    for axis, (size, stride) in enumerate(zip(operand.shape, strides, strict=True)):
        text = f"{operand.name}'s stride of {stride} elements in dimension {axis}"
        if size == 1:
            continue
        if axis == inner:
            if stride != 1:
                return f"{text} is not 1"
        elif stride == 0:
            return f"{text}: TMA takes no expanded tensor"
        elif stride * width % TMA_ALIGNMENT_BYTES:
            return f"{text} is not a multiple of {TMA_ALIGNMENT_BYTES} bytes"
        elif stride * width >= MAX_TMA_STRIDE_BYTES:
            return f"{text} is 2^40 bytes or more"
    return ""
