"""A device and a kernel of the numerics gate that note what they are given."""

from __future__ import annotations

import struct
from typing import Any

from tuner.measure.gate import Gate
from tuner.measure.gate.commands import Command
from tuner.measure.gate.kernels import E4M3_POISON, POISON, Answer
from tuner.measure.tolerance import OutputComparison
from tuner.problem import AttentionProblem, Problem

ATTENTION = AttentionProblem(seqlen_q=70, seqlen_kv=90, head_dim=64, heads_q=2, layout="bshd")
BIASED = AttentionProblem.parse("B=2,H=4,HKV=2,SQ=70,SKV=90,D=64,bias=h,causal=1")
PACKED = AttentionProblem.parse("B=3,H=4,HKV=2,SQ=8,SKV=16,D=64,varlen=1")
LATENT = AttentionProblem.parse(
    "B=3,H=4,HKV=1,SQ=2,SKV=40,D=576,DV=512,causal=1,page_size=16,dtype=bf16"
)
PAGED = AttentionProblem.parse(
    "B=3,H=4,HKV=2,SQ=8,SKV=40,D=64,varlen=1,causal=1,page_size=16,sinks=1"
)


class FakeDevice:
    """Memory as numbers, and what was done with it."""

    stream = 0

    def __init__(self) -> None:
        self.free_at, self.live, self.filled = 1 << 20, set[int](), list[tuple[int, int]]()
        self.written: dict[int, bytes] = {}
        self.staged: dict[int, bytes] = {}
        self.patterns: dict[int, int] = {}
        self.joined = 0
        """Streams of the latest `fork` whose work the device's stream waits for."""

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

    def stage(self, data: bytes) -> int:
        self.staged[-1 - len(self.staged)] = data
        return -len(self.staged)

    def read(self, pointer: int, size: int) -> bytes:
        return (struct.pack("<2d6Q", 0.0, 1.0, 0, 0, 0, 0, 0, 0) * -(-size // 64))[:size]

    def wait(self) -> None:
        pass

    def fork(self, count: int) -> list[int]:
        return list(range(count))

    def join(self, count: int) -> None:
        self.joined = count


class FakeKernel:
    """Notes what it is given, and copies what the host staged for the device."""

    def __init__(self, device: FakeDevice | None = None) -> None:
        self.device = device or FakeDevice()
        self.calls: list[tuple[int, int, int, int]] = []
        self.given: list[tuple[list[int], list[int]]] = []
        self.scalars: list[tuple[float, ...]] = []
        self.streams: list[int] = []

    def launch(
        self, tensors: Any, integers: Any, scalars: Any, workspace: int, stream: int
    ) -> None:
        assert all(isinstance(i, int) and -(2**63) <= i < 2**63 for i in integers)
        if integers[0] == Command.COPY and tensors[0] in self.device.staged:
            self.device.write(tensors[1], self.device.staged[tensors[0]])
            return
        self.calls.append((integers[0], len(tensors), len(integers), len(scalars)))
        self.given.append((list(tensors), list(integers)))
        self.scalars.append(tuple(scalars))
        self.streams.append(stream)


def answer_of(comparison: OutputComparison) -> Answer:
    """The answer of the template's compare command."""
    answer, c = Answer(), comparison
    answer.data = struct.pack(
        "<2d3Qd2Q",
        *(c.error_squares, c.reference_squares, c.beyond, c.not_finite, c.poisoned, c.worst),
        *(2**64 - 1 - c.first, 0),
    )
    return answer


def opened(problem: Problem) -> tuple[Gate, FakeDevice, FakeKernel]:
    device = FakeDevice()
    kernel = FakeKernel(device)
    made = Gate(device, kernel, 0)  # type: ignore[arg-type]
    made.open(problem, 7)
    return made, device, kernel
