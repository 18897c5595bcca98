"""Activations in e4m3 with factors of blocks, for the next product: `quantise`."""

from __future__ import annotations

import torch

from tuner.errors import ConfigError
from tuner.runtime.call import guards
from tuner.runtime.products import block_scaled, expert_rows

_ENDLESS = 2**31 - 1
_offsets: dict[torch.device, torch.Tensor] = {}
"""Offsets of one group with all rows, by device; captured graphs read them."""


def quantise(rows: torch.Tensor, *, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 elements with a factor for each row and block of 128 columns, as `scaled_mm` takes them.

    Activations that several products read are quantised once so. With `gated` a kernel computes
    SwiGLU on the way, which saves a launch and the bf16 rows between. PyTorch's operations answer
    where no kernel serves the rows, with the same bits but for SwiGLU's last one.

    Args:
        rows: (M, K), bf16; with `gated` contiguous (M, 2 K), gate before up.
        gated: True for silu(gate) * up, rounded to bf16 before it is quantised.

    Returns:
        (M, K) float8_e4m3fn, and fp32 (M, K / 128), rounded up, with stride 1 along M.

    Raises:
        ConfigError: on another type or number of dimensions, or an odd number of gated columns.
    """
    if rows.dtype != torch.bfloat16 or rows.dim() != 2 or (gated and rows.shape[1] % 2):
        came = f"{rows.dtype} {tuple(rows.shape)}"
        raise ConfigError(f"rows are {came} (allowed: bf16 (M, K), gated ones bf16 (M, 2 K))")
    if not gated:
        return block_scaled.quantised(rows)
    kernel = expert_rows.by_kernel(rows.device) if _is_served(rows) else None
    if kernel is None:
        return block_scaled.quantised(expert_rows.ComposedRows().gate(rows, rows))
    elements, factors = kernel.gate(rows, _all_rows(rows.device), quantises=True)
    assert factors is not None
    return elements, factors


def _is_served(rows: torch.Tensor) -> bool:
    columns = rows.shape[1] // 2
    is_whole = rows.is_contiguous() and rows.numel() > 0 and columns % expert_rows.VECTOR == 0
    if not is_whole or torch.compiler.is_compiling() or guards.wants_gradient(rows):
        return False
    return guards.unserved((rows,)) is None and not guards.is_misaligned((rows,))


def _all_rows(device: torch.device) -> torch.Tensor:
    """Offsets of a group that has every row."""
    if device not in _offsets:
        _offsets[device] = torch.tensor([0, _ENDLESS], dtype=torch.int32, device=device)
    return _offsets[device]
