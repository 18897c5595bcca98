"""Kernel that quantises rows of activations in blocks of 128 (`tuner.compile.block_quantiser`).

``tuner build`` builds it. Before its first launch on a device its result must have the same bits as
PyTorch's operations, for rows with every kind of number.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from math import ceil

import torch

from tuner.compile import block_quantiser
from tuner.compile.artifacts import ArtifactCache, LoadedKernel, load
from tuner.errors import TunerError
from tuner.hardware import HOPPER
from tuner.problem import SCALE_BLOCK
from tuner.runtime import devices, guards

_log = logging.getLogger("tuner.runtime")

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

_lock = threading.Lock()
_kernels: dict[torch.device, LoadedKernel | None] = {}
"""Kernels by device; None where the kernel is not served."""


def empty_factors(rows: torch.Tensor) -> torch.Tensor:
    """Uninitialised factors of (M, K): fp32 (M, K / 128), rounded up, with stride 1 along M."""
    m, k = rows.shape
    padded = ceil(m / _ROWS_ALIGNED) * _ROWS_ALIGNED
    blocks = torch.empty(ceil(k / SCALE_BLOCK), padded, dtype=torch.float32, device=rows.device)
    return blocks.t()[:m]


def run(rows: torch.Tensor, composed: Composed) -> Quantised | None:
    """Elements and factors of rows, enqueued on the current stream; None if no kernel serves them.

    Args:
        rows: (M, K), bf16.
        composed: function whose bits the kernel is compared with before its first launch.
    """
    if not _takes(rows) or guards.unserved((rows,)) is not None:
        return None
    kernel = _kernel_of(rows.device, composed)
    return None if kernel is None else _launch(kernel, rows)


def _takes(rows: torch.Tensor) -> bool:
    """True for rows whose size, type and strides the kernel supports."""
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or rows.numel() == 0:
        return False
    m, k = rows.shape
    stride, step = rows.stride()
    is_dense = (step == 1 or k == 1) and (m == 1 or (stride >= k and stride % _VECTOR == 0))
    return bool(is_dense and k % _VECTOR == 0 and rows.data_ptr() % _ALIGNMENT == 0)


def _kernel_of(device: torch.device, composed: Composed) -> LoadedKernel | None:
    """The kernel of a device; loaded and compared outside of captured graphs."""
    if device in _kernels:
        return _kernels[device]
    try:
        artifact = block_quantiser.find(ArtifactCache())
    except (TunerError, OSError) as exc:
        _log.info("PyTorch's operations quantise: %s", exc)
        artifact = None
    if artifact is not None and devices.is_capturing():
        return None
    with _lock:
        if device not in _kernels:
            kernel: LoadedKernel | None = None
            try:
                if artifact is not None and _is_hopper(device):
                    loaded = load(artifact)
                    kernel = loaded if _is_proven(loaded, device, composed) else None
            except TunerError as exc:
                _log.warning("PyTorch's operations quantise: %s", exc)
            _kernels[device] = kernel
    return _kernels[device]


def _is_hopper(device: torch.device) -> bool:
    return devices.gpu_of(device.index).compute_capability == HOPPER


def _is_proven(kernel: LoadedKernel, device: torch.device, composed: Composed) -> bool:
    """True when its bits are those of PyTorch's operations."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (_PROVEN_ROWS, _PROVEN_COLUMNS)
    rows = torch.randn(shape, generator=generator, device=device)
    rows *= torch.logspace(-30, 30, _PROVEN_ROWS, device=device).unsqueeze(1)
    rows = rows.to(torch.bfloat16)
    rows[0], rows[1] = 0.0, -0.0
    rows[2, 5], rows[3, 130], rows[4, 300] = torch.inf, -torch.inf, torch.nan
    found, wanted = _launch(kernel, rows), composed(rows)
    bits = (torch.uint8, torch.int32)
    is_same = all(
        torch.equal(own.contiguous().view(kind), theirs.contiguous().view(kind))
        for own, theirs, kind in zip(found, wanted, bits, strict=True)
    )
    if not is_same:
        _log.warning("PyTorch's operations quantise: the kernel's bits are not theirs")
    return is_same


def _launch(kernel: LoadedKernel, rows: torch.Tensor) -> Quantised:
    m, k = rows.shape
    index = rows.get_device()
    elements = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=rows.device)
    factors = empty_factors(rows)
    tensors, integers, _ = block_quantiser.ARGUMENTS.ordered(
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
