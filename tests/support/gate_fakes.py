"""A device and a kernel of the numerics gate that note what they are given."""

from __future__ import annotations

import struct
from typing import Any

from tuner.measure.gate.kernels import E4M3_POISON, POISON


class FakeDevice:
    """Memory as numbers, and what was done with it."""

    stream = 0

    def __init__(self) -> None:
        self.free_at, self.live, self.filled = 1 << 20, set[int](), list[tuple[int, int]]()
        self.written: dict[int, bytes] = {}
        self.patterns: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        pointer, self.free_at = self.free_at, self.free_at + size + 4096
        self.live.add(pointer)
        return pointer

    def free(self, pointer: int) -> None:
        self.live.remove(pointer)

    def fill16(self, pointer: int, pattern: int, size: int) -> None:
        assert pattern in (POISON, E4M3_POISON) and size % 2 == 0
        self.filled.append((pointer, size))
        self.patterns[pointer] = pattern

    def fill8(self, pointer: int, value: int, size: int) -> None:
        pass

    def write(self, pointer: int, data: bytes) -> None:
        self.written[pointer] = data

    def read(self, pointer: int, size: int) -> bytes:
        return struct.pack("<2d6Q", 0.0, 1.0, 0, 0, 0, 0, 0, 0)[:size]

    def wait(self) -> None:
        pass


class FakeKernel:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []
        self.given: list[tuple[list[int], list[int]]] = []
        self.scalars: list[tuple[float, ...]] = []

    def launch(
        self, tensors: Any, integers: Any, scalars: Any, workspace: int, stream: int
    ) -> None:
        assert all(isinstance(i, int) and -(2**63) <= i < 2**63 for i in integers)
        self.calls.append((integers[0], len(tensors), len(integers), len(scalars)))
        self.given.append((list(tensors), list(integers)))
        self.scalars.append(tuple(scalars))
