"""Numerics gate: writes beside a buffer, and changed inputs."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from typing import Any

import pytest
from gate_fakes import FakeDevice, FakeKernel, opened

from tuner.measure.device import Pool
from tuner.measure.gate import Gate, kernels
from tuner.measure.gate.kernels import POISON, Guarded
from tuner.measurement import Status
from tuner.problem import (
    GemmProblem,
)

GEMM = GemmProblem(m=4, n=8, k=64)


def test_everything_is_armed() -> None:
    made, device, _ = opened(GEMM)
    made.load("random")
    device.filled.clear()
    made.arm()
    output = made.pointers["d"]
    assert (output, GEMM.output.bytes) in device.filled
    for operand in GEMM.operands:
        pointer = made.pointers[operand.name]
        assert (pointer - kernels.GUARD_BYTES, kernels.GUARD_BYTES) in device.filled
        assert (pointer + operand.bytes, kernels.GUARD_BYTES) in device.filled
    assert (made.pointers["a"], GEMM.operands[0].bytes) not in device.filled


class Memory(FakeDevice):
    """Every allocation's bytes, each filled with zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[int, bytearray] = {}

    def allocate(self, size: int) -> int:
        pointer = super().allocate(size)
        self.blocks[pointer] = bytearray(size)
        return pointer

    def at(self, pointer: int, size: int) -> memoryview:
        """Bytes of one allocation; anything else is an error of the gate's."""
        start = max(start for start in self.blocks if start <= pointer)
        offset = pointer - start
        assert start in self.live and offset + size <= len(self.blocks[start])
        return memoryview(self.blocks[start])[offset : offset + size]

    def fill16(self, pointer: int, pattern: int, size: int) -> None:
        super().fill16(pointer, pattern, size)
        self.at(pointer, size)[:] = struct.pack("<H", pattern) * (size // 2)

    def fill8(self, pointer: int, value: int, size: int) -> None:
        self.at(pointer, size)[:] = bytes([value]) * size

    def write(self, pointer: int, data: bytes) -> None:
        self.at(pointer, len(data))[:] = data

    def read(self, pointer: int, size: int) -> bytes:
        return bytes(self.at(pointer, size))


class MemoryKernel(FakeKernel):
    """The template's three commands that look at memory; the others leave it as it is.

    A comparison finds the output equal to the reference.
    """

    def __init__(self, device: Memory) -> None:
        super().__init__(device)
        self._device = device

    def launch(
        self, tensors: Any, integers: Any, scalars: Any, workspace: int, stream: int
    ) -> None:
        super().launch(tensors, integers, scalars, workspace, stream)
        command, *rest = integers
        if command == 7:
            self._device.write(tensors[2], struct.pack("<2d", 0.0, 1.0))
        elif command == 8:
            words = self._device.at(tensors[0], rest[0]).cast("H")
            changed = 0 if set(words) == {POISON} else sum(word != POISON for word in words)
            self._device.at(tensors[1], 8).cast("Q")[0] += changed
        elif command == 9:
            found = zlib.crc32(self._device.at(tensors[0], rest[0]))
            self._device.write(tensors[1], struct.pack("<Q", found))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, Memory, Guarded]:
    """A gate over real bytes, armed for a product with a bias, and the candidate's own buffer."""
    monkeypatch.setattr(kernels, "GUARD_BYTES", 1 << 10)
    device = Memory()
    made = Gate(device, MemoryKernel(device))  # type: ignore[arg-type]
    made.open(replace(GEMM, epilogue="bias_residual"), 7)
    own = made.allocate(Pool(device), "workspace", 32)  # type: ignore[arg-type]
    made.load("random")
    made.arm([own])
    return made, device, own


def test_an_untouched_memory_passes(guarded: tuple[Gate, Memory, Guarded]) -> None:
    made, _, own = guarded
    assert made.examine([own]).status is Status.OK


@pytest.mark.parametrize("report_bytes", [kernels.REPORT_BYTES, 192])
def test_runs_that_are_read_together_are_judged_apart(
    guarded: tuple[Gate, Memory, Guarded], monkeypatch: pytest.MonkeyPatch, report_bytes: int
) -> None:
    made, device, own = guarded
    monkeypatch.setattr(kernels, "REPORT_BYTES", report_bytes)
    device.write(own.pointer - 2, b"\0\0")
    first = made.watch([own])
    made.arm([own])
    runs = [first, made.watch([own])]
    made.collect()
    verdicts = [made.judge(run).status for run in runs]
    assert verdicts == [Status.OUT_OF_BOUNDS, Status.OK]


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual", "d", "workspace"])
@pytest.mark.parametrize("place", ["first before", "last before", "first behind", "last behind"])
def test_a_word_written_beside_any_buffer_is_seen(
    guarded: tuple[Gate, Memory, Guarded], name: str, place: str
) -> None:
    made, device, own = guarded
    [buffer] = [one for one in (*made.operands.values(), own) if one.name == name]
    word = {
        "first before": -kernels.GUARD_BYTES,
        "last before": -2,
        "first behind": buffer.bytes,
        "last behind": buffer.bytes + kernels.GUARD_BYTES - 2,
    }[place]
    device.write(buffer.pointer + word, b"\0\0")
    verdict = made.examine([own])
    assert verdict.status is Status.OUT_OF_BOUNDS
    assert verdict.log == f"random inputs: 2 bytes beside '{name}' were written"


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_changed_input_is_seen(
    guarded: tuple[Gate, Memory, Guarded], name: str, place: str
) -> None:
    made, device, own = guarded
    buffer = made.operands[name]
    device.write(buffer.pointer + (0 if place == "first" else buffer.bytes - 1), b"\x01")
    verdict = made.examine([own])
    assert verdict.status is Status.OUT_OF_BOUNDS
    assert verdict.log == f"random inputs: input '{name}' was changed"
