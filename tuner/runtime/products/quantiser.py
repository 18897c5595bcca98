"""Kernel that quantises rows of activations in blocks of 128 (`single.BLOCK_QUANTISER`).

Before its first launch on a device its result must have the same bits as PyTorch's operations, for
rows with every kind of number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import torch

from tuner.compile.loading import LoadedKernel
from tuner.compile.single import BLOCK_QUANTISER
from tuner.problem import SCALE_BLOCK
from tuner.runtime.call import devices, guards
from tuner.runtime.call.sourced import SourcedKernel

Quantised = tuple[torch.Tensor, torch.Tensor]
"""Elements and factors."""
Composed = Callable[[torch.Tensor], Quantised]
"""Function that computes the same by PyTorch's operations."""

_VECTOR, _ALIGNMENT = 8, 16
"""Columns that a thread reads at once, and their bytes."""
_ROWS_ALIGNED = 4
"""Rows that a block's factors are padded to a multiple of, as in the products' operands."""
_PROVEN_ROWS, _PROVEN_COLUMNS = 37, 1416
"""Sizes of the rows that prove it: cut thread blocks and a cut block of columns."""

kernels = SourcedKernel(BLOCK_QUANTISER, "PyTorch's operations quantise")


def empty_factors(m: int, k: int, device: torch.device) -> torch.Tensor:
    """Uninitialised factors of (M, K): fp32 (M, K / 128), rounded up, with stride 1 along M."""
    padded = ceil(m / _ROWS_ALIGNED) * _ROWS_ALIGNED
    blocks = torch.empty(ceil(k / SCALE_BLOCK), padded, dtype=torch.float32, device=device)
    return blocks.t()[:m]


def run(rows: torch.Tensor, composed: Composed) -> Quantised | None:
    """Elements and factors of rows, enqueued on the current stream; None if no kernel serves them.

    Args:
        rows: (M, K), bf16.
        composed: function whose bits the kernel is compared with before its first launch.
    """
    if not _takes(rows) or guards.unserved((rows,)) is not None:
        return None
    is_proven = partial(_is_proven, device=rows.device, composed=composed)
    kernel = kernels.of(rows.device, is_proven)
    return None if kernel is None else _launch(kernel, rows)


def _takes(rows: torch.Tensor) -> bool:
    """True for rows whose size, type and strides the kernel supports."""
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or rows.numel() == 0:
        return False
    m, k = rows.shape
    stride, step = rows.stride()
    is_dense = (step == 1 or k == 1) and (m == 1 or (stride >= k and stride % _VECTOR == 0))
    return bool(is_dense and k % _VECTOR == 0 and rows.data_ptr() % _ALIGNMENT == 0)


def _is_proven(kernel: LoadedKernel, device: torch.device, composed: Composed) -> bool:
    """True when its bits are those of PyTorch's operations."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (_PROVEN_ROWS, _PROVEN_COLUMNS)
    rows = torch.randn(shape, generator=generator, device=device)
    rows *= torch.logspace(-30, 30, _PROVEN_ROWS, device=device).unsqueeze(1)
    rows = rows.to(torch.bfloat16)
    rows[0], rows[1] = 0.0, -0.0
    rows[2, 5], rows[3, 130], rows[4, 300] = torch.inf, -torch.inf, torch.nan
    came, due = _launch(kernel, rows), composed(rows)
    bits = (torch.uint8, torch.int32)
    return all(
        torch.equal(own.contiguous().view(kind), theirs.contiguous().view(kind))
        for own, theirs, kind in zip(came, due, bits, strict=True)
    )


def _launch(kernel: LoadedKernel, rows: torch.Tensor) -> Quantised:
    m, k = rows.shape
    index = rows.get_device()
    elements = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=rows.device)
    factors = empty_factors(m, k, rows.device)
    tensors, integers, _ = BLOCK_QUANTISER.arguments.ordered(
        {
            "rows": rows.data_ptr(),
            "elements": elements.data_ptr(),
            "factors": factors.data_ptr(),
        },
        {
            "m": m,
            "k": k,
            # One row has any stride; that of the factors between blocks is their second.
            "row_stride": rows.stride(0) if m > 1 else k,
            "block_stride": factors.stride(1),
            "pdl": 1,
        },
        {},
    )
    with devices.use(index):
        devices.bind(index)
        kernel.launch(tensors, integers, (), 0, devices.stream_of(index))
    return elements, factors
