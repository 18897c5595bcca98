"""The rows of a mixture of experts around its products: by the kernel `EXPERT_ROWS`, or PyTorch.

A *slot* is a token and one of its experts. Its *place* is its row in the products' operands: expert
after expert, and in an expert in the slots' order. A slot whose expert is out of range has place
-1. Rows behind the last expert's are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import ceil

import torch
from torch.nn import functional

from tuner.compile.loading import LoadedKernel
from tuner.compile.single import EXPERT_ROWS
from tuner.runtime.call import devices
from tuner.runtime.call.sourced import SourcedKernel
from tuner.runtime.products import block_scaled, quantiser

MAX_EXPERTS, MAX_TOP_K, MAX_SLOTS = 512, 32, 1 << 30
"""Largest sizes that the kernel takes."""
VECTOR = 8
"""Columns that a lane of the kernel reads at once."""
_CHUNK = 4096
"""Slots that a thread block places."""
_PLACE, _COPY, _GATE, _COMBINE = range(4)
"""Stages of the kernel."""
_TENSORS = EXPERT_ROWS.arguments.tensors
#: Tokens, experts, top k and columns that prove it: two chunks of slots, cut blocks of columns.
_PROVEN = (700, 37, 6, 1160)

kernels = SourcedKernel(EXPERT_ROWS, "PyTorch's operations move the rows of experts")


def by_kernel(device: torch.device) -> LaunchedRows | None:
    """The stages by the kernel; None where it is not served."""
    kernel = kernels.of(device, partial(_is_proven, device=device))
    return None if kernel is None else LaunchedRows(kernel)


class ComposedRows:
    """The stages by PyTorch's operations, of any floating type, with gradients."""

    def place(self, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Offsets and places of experts.

        Args:
            experts: (T, top_k), int32 or int64; in any range.
            count: number of experts.

        Returns:
            int32 (count + 1): first row of each expert, and the last one's end; int32 (T, top_k).
        """
        flat = experts.reshape(-1)
        is_valid = (flat >= 0) & (flat < count)
        ordered, slots = flat.masked_fill(~is_valid, count).sort(stable=True)
        bounds = torch.arange(count + 1, dtype=ordered.dtype, device=flat.device)
        offsets = torch.searchsorted(ordered, bounds, out_int32=True)
        rows = torch.arange(len(flat), dtype=torch.int32, device=flat.device)
        places = torch.empty_like(rows).scatter(0, slots, rows)
        return offsets, places.masked_fill(~is_valid, -1).view(experts.shape)

    def copy(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(T top_k, N): the row (T, N) of each slot's token at its place."""
        slots = places.numel()
        at = places.reshape(-1).long()
        copies = rows.new_zeros(slots + 1, rows.shape[1])
        # Slots without a place share one more row.
        at = at.masked_fill(at < 0, slots)
        return copies.index_copy(0, at, rows.repeat_interleave(places.shape[1], 0))[:slots]

    def gate(self, halves: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """(n, N): silu(gate) * up of (n, 2 N), gate before up, rounded once."""
        gate, up = halves.to(_accumulator(halves)).chunk(2, -1)
        return (functional.silu(gate) * up).to(halves.dtype)

    def combine(
        self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, N): each token's sum of its slots' rows by their weights, in fp32."""
        is_there = places.unsqueeze(-1) >= 0
        parts = rows[places.clamp(min=0).long()].masked_fill(~is_there, 0.0)
        kind = _accumulator(rows)
        weighted = parts.to(kind) * weights.to(kind).masked_fill(places < 0, 0.0).unsqueeze(-1)
        return weighted.sum(1).to(rows.dtype)


def _accumulator(rows: torch.Tensor) -> torch.dtype:
    return torch.promote_types(rows.dtype, torch.float32)


class LaunchedRows:
    """The stages by the kernel, enqueued on the current stream: bf16 rows, no gradients.

    With `quantises` the rows become e4m3 elements and factors of blocks, as of
    `block_scaled.quantised`.

    Args:
        kernel: kernel of the tensors' device.
    """

    def __init__(self, kernel: LoadedKernel) -> None:
        self._kernel = kernel

    def place(self, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ComposedRows.place`, of contiguous experts."""
        slots, device = experts.numel(), experts.device
        offsets = torch.empty(count + 1, dtype=torch.int32, device=device)
        places = torch.empty(experts.shape, dtype=torch.int32, device=device)
        counts = torch.empty(ceil(slots / _CHUNK) * count, dtype=torch.int32, device=device)
        tensors = {"experts": experts, "offsets": offsets, "places": places, "counts": counts}
        self._launch(_PLACE, tensors, slots, count, width=experts.element_size())
        return offsets, places

    def copy(
        self, rows: torch.Tensor, places: torch.Tensor, *, quantises: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `ComposedRows.copy`, of rows with stride 1 along N; and the factors, if quantised."""
        tokens, columns = rows.shape
        copies, factors = _empty(places.numel(), columns, rows.device, quantises=quantises)
        stride = rows.stride(0) if tokens > 1 else columns
        block = _block_stride(factors, places.numel())
        tensors = {"rows": rows, "places": places, "out": copies, "factors": factors}
        self._launch(_COPY, tensors, tokens, places.shape[1], columns, stride=stride, block=block)
        return copies, factors

    def gate(
        self, halves: torch.Tensor, offsets: torch.Tensor, *, quantises: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `ComposedRows.gate`, of contiguous rows; and the factors, if quantised."""
        rows, columns = halves.shape[0], halves.shape[1] // 2
        products, factors = _empty(rows, columns, halves.device, quantises=quantises)
        block = _block_stride(factors, rows)
        tensors = {"rows": halves, "offsets": offsets, "out": products, "factors": factors}
        self._launch(_GATE, tensors, rows, len(offsets) - 1, columns, block=block)
        return products, factors

    def combine(
        self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As `ComposedRows.combine`, in the slots' order; of contiguous bf16 or fp32 weights."""
        (tokens, top_k), columns = places.shape, rows.shape[1]
        sums = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
        tensors = {"rows": rows, "places": places, "weights": weights, "out": sums}
        width = weights.element_size()
        self._launch(_COMBINE, tensors, tokens, top_k, columns, width=width)
        return sums

    def _launch(
        self,
        stage: int,
        tensors: Mapping[str, torch.Tensor | None],
        rows: int,
        parts: int,
        columns: int = 0,
        *,
        stride: int = 0,
        block: int = 0,
        width: int = 0,
    ) -> None:
        named = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        index = next(iter(named.values())).get_device()
        addresses, integers, _ = EXPERT_ROWS.arguments.ordered(
            {name: named[name].data_ptr() if name in named else 0 for name in _TENSORS},
            {
                "stage": stage,
                "row_count": rows,
                "part_count": parts,
                "columns": columns,
                "row_stride": stride,
                "block_stride": block,
                "width": width,
                "pdl": 1,
            },
            {},
        )
        with devices.use(index):
            devices.bind(index)
            self._kernel.launch(addresses, integers, (), 0, devices.stream_of(index))


def _empty(
    rows: int, columns: int, device: torch.device, *, quantises: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised rows in bf16, or in e4m3 with factors."""
    if not quantises:
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device), None
    elements = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    return elements, quantiser.empty_factors(rows, columns, device)


def _block_stride(factors: torch.Tensor | None, rows: int) -> int:
    """Stride of the factors between blocks of columns, also where there is one block; 0: none."""
    if factors is None:
        return 0
    return factors.stride(1) if factors.shape[1] > 1 else rows


def _is_proven(kernel: LoadedKernel, device: torch.device) -> bool:
    """True when its rows are those of PyTorch's operations, and its sums nearly."""
    tokens, count, top_k, columns = _PROVEN
    generator = torch.Generator(device).manual_seed(0)
    own, theirs = LaunchedRows(kernel), ComposedRows()
    experts = torch.randint(-1, count + 1, (tokens, top_k), generator=generator, device=device)
    offsets, places = own.place(experts, count)
    due = theirs.place(experts, count)
    if not (torch.equal(offsets, due[0]) and torch.equal(places, due[1])):
        return False
    end = int(offsets[-1])
    weights = torch.rand(tokens, top_k, generator=generator, device=device)
    pairs = torch.randn(tokens * top_k, 2 * columns, generator=generator, device=device).bfloat16()
    rows = pairs[:tokens, :columns]
    copies, products = own.copy(rows, places)[0], own.gate(pairs, offsets)[0][:end]
    if not torch.equal(copies[:end], theirs.copy(rows, places)[:end]):
        return False
    near = (
        (products, theirs.gate(pairs, offsets)[:end]),
        (own.combine(copies, places, weights), theirs.combine(copies, places, weights)),
    )
    if not all(torch.allclose(own_rows, other, rtol=2**-7, atol=2**-7) for own_rows, other in near):
        return False
    quantised = own.copy(rows, places, quantises=True), own.gate(pairs, offsets, quantises=True)
    for (elements, factors), bf16 in zip(quantised, (copies[:end], products), strict=True):
        small, scale = block_scaled.composed(bf16)
        is_same = torch.equal(elements[:end].view(torch.uint8), small.view(torch.uint8))
        if factors is None or not (is_same and torch.equal(factors[:end], scale)):
            return False
    return True
