"""Both products of a mixture of experts that have few rows each, by the kernel `EXPERT_PRODUCTS`.

A thread block has a *tile*, up to so many rows of one expert, and reads the expert's weights for
it. So it serves while most experts' rows are one tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from tuner.compile.loading import LoadedKernel
from tuner.compile.single import EXPERT_PRODUCTS
from tuner.runtime.call import devices
from tuner.runtime.call.sourced import SourcedKernel
from tuner.runtime.products.expert_rows import ComposedRows, LaunchedRows

_PLACE, _LIST, _UP, _DOWN = range(4)
"""Stages of the kernel."""
_NONE: Mapping[str, Any] = {}
_TENSORS, _INTEGERS = EXPERT_PRODUCTS.arguments.tensors, EXPERT_PRODUCTS.arguments.integers
TILES = {10: 16, 34: 32, 60: 64}
"""Rows of a tile, by the mean rows of an expert up to which it is the fastest."""
LARGE, LARGE_TILES = 2 << 20, {1.5: 16, 22: 0, 28: 32, 48: 64}
"""Hidden times inner size from which there are other tiles; 0: grouped products are the faster."""
SMALL, SMALL_ROWS = 400_000, 160
"""Such a size up to which tiles of 64 serve until so many rows."""
WARPS, WARP_COLUMNS = 4, 16
"""Warps of a thread block; columns of gate and of up, or half of down's, that each has."""
PLACED = 128
"""Slots up to which the kernel places them faster than that of `expert_rows` does."""
BLOCKS = 160
"""Thread blocks below which those of half as many columns are taken."""
#: Tokens, experts, top k, hidden and inner size that prove it: tiles of one row and of several,
#: experts without any, cut steps and cut blocks of columns.
_PROVEN = (400, 11, 4, 1160, 520)

Placing = ComposedRows | LaunchedRows
kernels = SourcedKernel(EXPERT_PRODUCTS, "grouped products multiply experts' few rows")


def by_kernel(device: torch.device) -> LaunchedProducts | None:
    """The products by the kernel; None where it is not served."""
    kernel = kernels.of(device, partial(_is_proven, device=device))
    return None if kernel is None else LaunchedProducts(kernel)


def tile_rows(slots: int, count: int, size: int) -> int:
    """Rows of a tile; 0 where the grouped products are expected to be faster.

    By 145 points of vLLM's tables, each measured by every way (an H200, 29 November 2026).

    Args:
        slots: tokens times experts of a token.
        count: experts.
        size: hidden times inner size.
    """
    mean = slots / min(slots, count)
    tiles = LARGE_TILES if size >= LARGE else TILES
    if size <= SMALL and max(TILES) < mean <= SMALL_ROWS:
        return TILES[max(TILES)]
    return next((rows for most, rows in tiles.items() if mean <= most), 0)


class Tiles(NamedTuple):
    """Rows of each expert, cut into tiles."""

    offsets: torch.Tensor
    places: torch.Tensor
    """int32 (T, top_k), as of `expert_rows`."""
    order: torch.Tensor
    """int32 (T top_k): slot of each row; anything behind the last."""
    listed: torch.Tensor
    """int32 (tiles or more, 2): expert and first row; expert -1 behind the last."""
    rows: int
    """Rows of a tile at most."""


class LaunchedProducts:
    """The stages by the kernel, enqueued on the current stream: bf16 rows, no gradients.

    Args:
        kernel: kernel of the tensors' device.
    """

    def __init__(self, kernel: LoadedKernel) -> None:
        self._kernel = kernel

    def place(self, experts: torch.Tensor, count: int, rows: int, by: Placing) -> Tiles:
        """The tiles of contiguous experts, as of `ComposedRows.place`.

        Args:
            experts: (T, top_k), int32 or int64; in any range.
            count: number of experts.
            rows: rows of a tile.
            by: places more slots than `PLACED`.
        """
        slots, device = experts.numel(), experts.device
        most = min(slots, count + slots // rows)
        order = torch.empty(slots, dtype=torch.int32, device=device)
        listed = torch.empty(most, 2, dtype=torch.int32, device=device)
        if slots > PLACED:
            tiles = Tiles(*by.place(experts, count), order, listed, rows)
            self._launch(_LIST, tiles)
        else:
            offsets = torch.empty(count + 1, dtype=torch.int32, device=device)
            places = torch.empty(experts.shape, dtype=torch.int32, device=device)
            tiles = Tiles(offsets, places, order, listed, rows)
            self._launch(_PLACE, tiles, {"experts": experts}, {"width": experts.element_size()})
        return tiles

    def up(self, hidden: torch.Tensor, gate_up: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        """(T top_k, I): silu(gate) * up of each row's token; hidden has stride 1 along H."""
        return self._product(_UP, hidden, gate_up, tiles, gate_up.shape[1] // 2)

    def down(self, products: torch.Tensor, down: torch.Tensor, tiles: Tiles) -> torch.Tensor:
        """(T top_k, H): each row's product with its expert."""
        return self._product(_DOWN, products, down, tiles, down.shape[1])

    def _product(
        self, stage: int, rows: torch.Tensor, weights: torch.Tensor, tiles: Tiles, columns: int
    ) -> torch.Tensor:
        out = torch.empty(len(tiles.order), columns, dtype=rows.dtype, device=rows.device)
        width = WARPS * WARP_COLUMNS * (stage == _DOWN) + WARPS * WARP_COLUMNS
        blocks = len(tiles.listed) * -(-columns // width)
        sizes = {
            "columns": columns,
            "depth": weights.shape[2],
            "row_stride": rows.stride(0) if len(rows) > 1 else weights.shape[2],
            "is_narrow": int(blocks < BLOCKS),
        }
        self._launch(stage, tiles, {"rows": rows, "weights": weights, "out": out}, sizes)
        return out

    def _launch(
        self,
        stage: int,
        tiles: Tiles,
        tensors: Mapping[str, torch.Tensor] = _NONE,
        sizes: Mapping[str, int] = _NONE,
    ) -> None:
        named = {
            **{"offsets": tiles.offsets, "places": tiles.places, "order": tiles.order},
            **{"tiles": tiles.listed, **tensors},
        }
        integers = {
            **dict.fromkeys(_INTEGERS, 0),
            **{
                "stage": stage,
                "slot_count": len(tiles.order),
                "top_k": tiles.places.shape[1],
                "pdl": 1,
            },
            **{"expert_count": len(tiles.offsets) - 1, "tile_rows": tiles.rows},
            **{"tile_count": len(tiles.listed)},
            **sizes,
        }
        addresses, ordered, _ = EXPERT_PRODUCTS.arguments.ordered(
            {name: named[name].data_ptr() if name in named else 0 for name in _TENSORS},
            integers,
            {},
        )
        index = tiles.offsets.get_device()
        with devices.use(index):
            devices.bind(index)
            self._kernel.launch(addresses, ordered, (), 0, devices.stream_of(index))


def _is_proven(kernel: LoadedKernel, device: torch.device) -> bool:
    """True when its results are nearly those of products in fp32, by tiles of all sizes and thread
    blocks of both.
    """
    tokens, count, top_k, hidden, inner = _PROVEN
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return (values * shape[-1] ** -0.25).bfloat16()

    rows, own = ComposedRows(), LaunchedProducts(kernel)
    x, gate_up, down = (
        drawn(*shape)
        for shape in ((tokens, 2 * hidden), (count, 2 * inner, hidden), (count, hidden, inner))
    )
    for used, size in itertools.product((tokens, 9, 1), TILES.values()):
        near = x[:used, :hidden]
        experts = torch.randint(-1, count - 1, (used, top_k), generator=generator, device=device)
        experts[: used // 2].clamp_(max=1)  # two have many rows, the last has none
        offsets, places = rows.place(experts, count)
        tiles = own.place(experts, count, size, rows)
        if not (torch.equal(tiles.offsets, offsets) and torch.equal(tiles.places, places)):
            return False
        products = own.up(near, gate_up, tiles)
        outs = own.down(products, down, tiles)
        copies, ends = rows.copy(near, places).float(), offsets.tolist()
        for expert, (start, end) in enumerate(itertools.pairwise(ends)):
            halves = copies[start:end] @ gate_up[expert].float().T
            sums = products[start:end].float() @ down[expert].float().T
            pairs = (products, rows.gate(halves, offsets)), (outs, sums)
            if not all(_is_near(mine[start:end], right) for mine, right in pairs):
                return False
    return True


def _is_near(rows: torch.Tensor, right: torch.Tensor) -> bool:
    """True when they differ by roundings to bf16 only, but for a few."""
    return bool((rows.float() - right).norm() <= 2**-7 * right.norm())
