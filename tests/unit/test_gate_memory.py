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
from tuner.measure.gate.kernels import POISON, Arena, Guarded
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
        if size:
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


@pytest.fixture(params=[0, 1 << 16], ids=["alone", "arena"])
def guarded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Gate, Memory, Guarded]:
    """A gate over real bytes, armed for a product with a bias, and the candidate's own buffer."""
    monkeypatch.setattr(kernels, "GUARD_BYTES", 1 << 10)
    device = Memory()
    made = Gate(device, MemoryKernel(device), request.param)  # type: ignore[arg-type]
    made.open(replace(GEMM, epilogue="bias_residual"), 7)
    own = made.allocate(Pool(made.memory), "workspace", 32)
    made.load("random")
    made.arm([own])
    return made, device, own


def test_an_untouched_memory_passes(guarded: tuple[Gate, Memory, Guarded]) -> None:
    made, _, own = guarded
    assert made.examine([own]).status is Status.OK


@pytest.mark.parametrize("guarded", [1 << 16], indirect=True, ids=["arena"])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_word_written_behind_all_buffers_is_seen(
    guarded: tuple[Gate, Memory, Guarded], place: str
) -> None:
    made, device, own = guarded
    address, size = made.memory.rest()
    device.write(address + (0 if place == "first" else size - 2), b"\0\0")
    verdict = made.examine([own])
    assert verdict.status is Status.OUT_OF_BOUNDS
    assert verdict.log == "random inputs: 2 bytes beside 'all buffers' were written"
    made.arm([own])
    assert made.examine([own]).status is Status.OK, "nor is the next one blamed for it"


class TestArena:
    def test_freed_memory_is_poisoned_and_used_again(self) -> None:
        device = Memory()
        arena = Arena(device, 1 << 10)  # type: ignore[arg-type]
        first, second, third = (arena.allocate(200) for _ in range(3))
        assert (second - first, third - second, arena.rest()) == (256, 256, (third + 256, 256))
        device.write(second, bytes(256))
        arena.free(second)
        assert arena.rest() == (third + 256, 256), "a block behind it is in use"
        arena.free(third)
        assert arena.rest() == (second, 768)
        assert set(device.at(second, 768).cast("H")) == {POISON}
        assert arena.allocate(1) == second and len(device.live) == 1

    def test_what_does_not_fit_is_allocated_alone(self) -> None:
        device = Memory()
        arena = Arena(device, 1 << 10)  # type: ignore[arg-type]
        arena.allocate(800)
        alone = arena.allocate(400)
        assert alone in device.live
        arena.free(alone)
        assert alone not in device.live


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
