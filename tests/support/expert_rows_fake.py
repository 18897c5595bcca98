"""The kernels of experts over a host's memory: a loaded kernel's interface, PyTorch inside."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tuner.compile.single import EXPERT_PRODUCTS, EXPERT_ROWS


def at(address: int, shape: Sequence[int], dtype: Any, stride: Sequence[int] | None = None) -> Any:
    """A tensor over memory that another one owns."""
    steps = stride or torch.empty(shape, device="meta").stride()
    elements = 1 + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    buffer = (ctypes.c_byte * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(tuple(shape), tuple(steps))


class FakeRows:
    """Takes launches down; with `wrong` a stage whose result has a wrong bit."""

    def __init__(self, wrong: int = -1) -> None:
        self.wrong = wrong
        self.launches: list[tuple[int, ...]] = []

    def launch(self, tensors: Sequence[int], integers: Sequence[int], *_: Any) -> None:
        from tuner.runtime.products.expert_rows import ComposedRows

        self.launches.append(tuple(integers))
        stage, rows, parts, columns, stride, block, width, _ = integers
        given = dict(zip(EXPERT_ROWS.arguments.tensors, tensors, strict=True))
        composed = ComposedRows()
        if stage == 0:
            kind = torch.int64 if width == 8 else torch.int32
            offsets, places = composed.place(at(given["experts"], (rows, 1), kind), parts)
            out = at(given["offsets"], offsets.shape, torch.int32)
            out.copy_(offsets)
            at(given["places"], places.shape, torch.int32).copy_(places)
        elif stage == 1:
            source = at(given["rows"], (rows, columns), torch.bfloat16, (stride, 1))
            places = at(given["places"], (rows, parts), torch.int32)
            copies, kept = composed.copy(source, places), places[places >= 0].long()
            out = self._written(given, copies, kept, block)
        elif stage == 2:
            both = at(given["rows"], (rows, 2 * columns), torch.bfloat16)
            offsets = at(given["offsets"], (parts + 1,), torch.int32)
            kept = torch.arange(min(rows, int(offsets[-1])))
            out = self._written(given, composed.gate(both, offsets), kept, block)
        else:
            places = at(given["places"], (rows, parts), torch.int32)
            kind = torch.float32 if width == 4 else torch.bfloat16
            source = at(given["rows"], (rows * parts, columns), torch.bfloat16)
            weights = at(given["weights"], (rows, parts), kind)
            out = at(given["out"], (rows, columns), torch.bfloat16)
            out.copy_(composed.combine(source, places, weights))
        if stage == self.wrong:
            out.view(torch.uint8).view(-1)[1] ^= 64

    @staticmethod
    def _written(given: Mapping[str, int], rows: Any, kept: Any, block: int) -> Any:
        """Only the rows that a slot has are written."""
        from tuner.runtime.products import block_scaled

        if not block:
            out = at(given["out"], rows.shape, torch.bfloat16)
            out[kept] = rows[kept]
            return out
        elements, factors = block_scaled.composed(rows)
        out = at(given["out"], rows.shape, torch.float8_e4m3fn)
        out.view(torch.uint8)[kept] = elements.view(torch.uint8)[kept]
        at(given["factors"], factors.shape, torch.float32, (1, block))[kept] = factors[kept]
        return out


class FakeProducts:
    """As `FakeRows`, of the products of few rows."""

    def __init__(self, wrong: int = -1) -> None:
        self.wrong = wrong
        self.launches: list[dict[str, int]] = []

    def launch(self, tensors: Sequence[int], integers: Sequence[int], *_: Any) -> None:
        arguments = EXPERT_PRODUCTS.arguments
        given = dict(zip(arguments.tensors, tensors, strict=True))
        call = dict(zip(arguments.integers, integers, strict=True))
        self.launches.append(call)
        slots, count = call["slot_count"], call["expert_count"]
        if call["stage"] == 0:
            from tuner.runtime.products.expert_rows import ComposedRows

            kind = torch.int64 if call["width"] == 8 else torch.int32
            placed = ComposedRows().place(at(given["experts"], (slots, 1), kind), count)
            at(given["offsets"], (count + 1,), torch.int32).copy_(placed[0])
            at(given["places"], (slots, 1), torch.int32).copy_(placed[1])
        offsets = at(given["offsets"], (count + 1,), torch.int32).tolist()
        order = at(given["order"], (slots,), torch.int32)
        tiles = at(given["tiles"], (call["tile_count"], 2), torch.int32)
        if call["stage"] < 2:
            places = at(given["places"], (slots,), torch.int32)
            inside = torch.nonzero(places >= 0).flatten().int()
            order[places[inside].long()] = inside
            listed = [
                (expert, row)
                for expert in range(count)
                for row in range(offsets[expert], offsets[expert + 1], call["tile_rows"])
            ]
            tiles.fill_(-1)[: len(listed)] = torch.tensor(listed, dtype=torch.int32).view(-1, 2)
            written = order
        else:
            written = self._product(given, call, offsets, order, tiles)
        if call["stage"] == self.wrong:
            written.view(torch.uint8).view(-1)[1] ^= 64

    @staticmethod
    def _product(
        given: Mapping[str, int], call: Mapping[str, int], offsets: Any, order: Any, tiles: Any
    ) -> Any:
        columns, depth, is_up = call["columns"], call["depth"], call["stage"] == 2
        shape = call["expert_count"], columns * (1 + is_up), depth
        weights = at(given["weights"], shape, torch.bfloat16)
        height = call["slot_count"] // call["top_k"] if is_up else call["slot_count"]
        rows = at(given["rows"], (height, depth), torch.bfloat16, (call["row_stride"], 1))
        out = at(given["out"], (call["slot_count"], columns), torch.bfloat16)
        for expert, first in (tile for tile in tiles.tolist() if tile[0] >= 0):
            end = min(first + call["tile_rows"], offsets[expert + 1])
            own = order[first:end].long() // call["top_k"] if is_up else torch.arange(first, end)
            sums = rows[own].float() @ weights[expert].float().T
            if is_up:
                gate, up = sums.chunk(2, -1)
                sums = torch.nn.functional.silu(gate) * up
            out[first:end] = sums.bfloat16()
        return out
