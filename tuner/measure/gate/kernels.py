"""Launches of the kernels of ``templates/reference.cu.j2``, and their buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.compile.loading import LoadedKernel
from tuner.errors import BenchmarkError
from tuner.families.arguments import extents_of, named_strides
from tuner.families.base import Strides
from tuner.measure import pages
from tuner.measure.device import Device, Pool
from tuner.measure.gate.commands import COMMANDS, MATRIX_STRIDES, Command
from tuner.measure.subjects import Call
from tuner.measure.tolerance import Limits
from tuner.problem import E4M3, AttentionProblem, DType, Operand, Problem, SoftmaxProblem

POISON = 0x7FA5
"""NaN in fp16 and bf16, and doubled in fp32, with a payload that arithmetic never produces."""
E4M3_POISON = 0x7F7F
"""The same for e4m3, of which both bytes are NaNs."""
GUARD_BYTES = 1 << 20
"""Bytes of poison on both sides of every buffer. A stray tile (at most 256 x 256 x 4 bytes)
fits."""

DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, E4M3: 3}
"""Element types by the template's numbers."""
_RESULT_BYTES = 64
_ALIGN = 256
ARENA_BYTES = 96 << 20
"""Bytes of the arena, enough for most trials of a proof."""
REPORT_BYTES = 4 << 20
"""Bytes of results that wait on the device to be read together."""


def poison_of(dtype: DType) -> int:
    """The 16-bit word that outputs of a type hold before they are written: NaN, or two of them."""
    return E4M3_POISON if dtype == E4M3 else POISON


@dataclass(frozen=True)
class Guarded:
    """Buffer between two guard bands."""

    name: str
    pointer: int
    bytes: int


def guarded(pool: Pool, sizes: Iterable[tuple[str, int]]) -> dict[str, Guarded]:
    """Allocate buffers between guard bands from `pool`, 256-byte aligned, of even size: at once,
    since each allocation takes as long as many kernels.
    """
    buffers, end = [], 0
    for name, size in sizes:
        size += size % 2
        buffers.append(Guarded(name, end + GUARD_BYTES, size))
        end += 2 * GUARD_BYTES + -(-size // _ALIGN) * _ALIGN
    start = pool.allocate(end) if buffers else 0
    return {one.name: replace(one, pointer=start + one.pointer) for one in buffers}


class Arena:
    """Device memory of one allocation, for buffers of short problems; others are allocated alone.

    Allocating and freeing wait for a time slice of each other process of the GPU. Memory that no
    buffer has holds the poison, up to the arena's end, so that it is one more guard band.

    Args:
        device: device of the memory.
        size: its bytes, a multiple of 256; 0: each buffer is allocated alone.
    """

    def __init__(self, device: Device, size: int) -> None:
        self._device, self._size = device, size
        self._start = self._used = 0
        self._blocks: list[tuple[int, bool]] = []
        """Where each block begins, and whether it is in use: in their order, the last in use."""

    def allocate(self, size: int) -> int:
        """Address of `size` bytes, 256-byte aligned."""
        size = -(-size // _ALIGN) * _ALIGN
        if self._used + size > self._size:
            return self._device.allocate(size)
        if not self._start:
            self._start = self._device.allocate(self._size)
            self.poison_rest()
        begin = self._start + self._used
        self._blocks.append((begin, True))
        self._used += size
        return begin

    def free(self, pointer: int) -> None:
        """Free what was allocated at `pointer`; poison it once nothing behind it is in use."""
        if (pointer, True) not in self._blocks:
            self._device.free(pointer)
            return
        self._blocks[self._blocks.index((pointer, True))] = (pointer, False)
        end = self._used
        while self._blocks and not self._blocks[-1][1]:
            self._used = self._blocks.pop()[0] - self._start
        self._device.fill16(self._start + self._used, POISON, end - self._used)

    def rest(self) -> tuple[int, int]:
        """Address and bytes of what no buffer has."""
        return self._start + self._used, self._size - self._used if self._start else 0

    def poison_rest(self) -> None:
        """Poison what no buffer has."""
        address, size = self.rest()
        self._device.fill16(address, POISON, size)


def _bands(buffer: Guarded) -> tuple[int, int]:
    """Addresses of the guard bands before and behind a buffer."""
    return buffer.pointer - GUARD_BYTES, buffer.pointer + buffer.bytes


class Answer:
    """Bytes of a result, which are there after `Kernels.collect`."""

    def __init__(self) -> None:
        self.data = b""

    @property
    def number(self) -> int:
        """Its first word: a count or a sum."""
        return int.from_bytes(self.data[:8], "little")


class Kernels:
    """Kernels of the reference, on one device.

    Results stay on the device until `collect` reads them together. Every wait costs a process that
    shares its GPU a time slice of each other one.

    Args:
        device: device to run on.
        kernel: loaded kernel of `REFERENCE`.
        arena: bytes of the arena.
    """

    def __init__(self, device: Device, kernel: LoadedKernel, arena: int) -> None:
        self.device, self._kernel = device, kernel
        self.memory = Arena(device, arena)
        self._report = device.allocate(REPORT_BYTES)
        device.fill8(self._report, 0, REPORT_BYTES)
        self._answers: dict[Answer, tuple[int, int]] = {}
        """Start and size of each result in the report."""
        self._reported = 0

    def run(
        self,
        command: Command,
        tensors: Mapping[str, int],
        integers: Mapping[str, int],
        scalars: Mapping[str, float] | None = None,
        more: Sequence[int] = (),
        stream: int | None = None,
    ) -> None:
        """Launch a command's kernel.

        Args:
            command: command to run.
            tensors: addresses, by the names in `COMMANDS`.
            integers: integers by name, without the command.
            scalars: scalars by name.
            more: further integers, which follow.
            stream: stream to launch on; default: the device's.
        """
        on = self.device.stream if stream is None else stream
        self._kernel.launch(*_ordered(command, tensors, integers, scalars, more), 0, on)

    def poison(self, buffer: Guarded) -> None:
        """Poison both guard bands of a buffer."""
        for band in _bands(buffer):
            self.device.fill16(band, POISON, GUARD_BYTES)

    def write(self, pointer: int, data: bytes) -> None:
        """Copy from the host, on the stream."""
        self._copy(self.device.stage(data), pointer, len(data))

    def fetch(self, pointer: int, size: int) -> Answer:
        """Copy `size` bytes into the report."""
        answer, at = self._place(size)
        self._copy(pointer, at, size)
        return answer

    def strayed(self, buffer: Guarded) -> Answer:
        """Count the 16-bit words in both guard bands of a buffer that do not hold the poison."""
        return self.changed(*((band, GUARD_BYTES) for band in _bands(buffer)))

    def changed(self, *places: tuple[int, int]) -> Answer:
        """Count the 16-bit words that do not hold the poison, in places of some bytes each."""
        answer, at = self._place(_RESULT_BYTES)
        for address, size in places:
            tensors = {"data": address, "result": at}
            self.run(Command.COUNT_CHANGED, tensors, {"bytes": size})
        return answer

    def checksum(self, pointer: int, size: int) -> Answer:
        """Sum up `size` bytes of device memory."""
        answer, at = self._place(_RESULT_BYTES)
        self.run(Command.CHECKSUM, {"data": pointer, "result": at}, {"bytes": size})
        return answer

    def compare(self, output: int, reference: int, operand: Operand, limits: Limits) -> Answer:
        """Compare an output with an fp32 reference of the same memory order. The answer is for
        `OutputComparison.unpack`.
        """
        width = max(
            extent
            for extent, stride in zip(operand.shape, operand.strides, strict=True)
            if stride == 1
        )
        answer, at = self._place(_RESULT_BYTES)
        self.run(
            Command.COMPARE,
            {"out": output, "reference": reference, "result": at},
            {"dtype": DTYPES[operand.dtype], "n": operand.elements, "width": width},
            {"absolute": limits.absolute, "relative": limits.relative, "row": limits.row},
        )
        return answer

    def collect(self) -> None:
        """Wait for the stream, and read all results since the last time."""
        if not self._reported:
            self.device.wait()
            return
        data = self.device.read(self._report, self._reported)
        for answer, (start, size) in self._answers.items():
            answer.data = data[start : start + size]
        self.device.fill8(self._report, 0, self._reported)
        self._answers.clear()
        self._reported = 0

    def _place(self, size: int) -> tuple[Answer, int]:
        """An answer, and the address of its bytes, which are zero."""
        if size > REPORT_BYTES:
            raise BenchmarkError(f"a result has {size} bytes, at most {REPORT_BYTES} are read")
        if self._reported + size > REPORT_BYTES:
            self.collect()
        answer, start = Answer(), self._reported
        self._answers[answer] = (start, size)
        self._reported += -(-size // _RESULT_BYTES) * _RESULT_BYTES
        return answer, self._report + start

    def _copy(self, source: int, target: int, size: int) -> None:
        self.run(Command.COPY, {"source": source, "target": target}, {"bytes": size})

    def copying(self, source: int, target: int, size: int, stream: Callable[[], int]) -> Call:
        """Bound launch of the element-wise kernel that copies `size` bytes, on the stream at
        that time.
        """
        tensors = {"source": source, "target": target}
        ordered = _ordered(Command.COPY, tensors, {"bytes": size})
        return lambda: self._kernel.launch(*ordered, 0, stream())


def _ordered(
    command: Command,
    tensors: Mapping[str, int],
    integers: Mapping[str, int],
    scalars: Mapping[str, float] | None = None,
    more: Sequence[int] = (),
) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
    numbered = {"command": command, **integers}
    addresses, numbers, factors = COMMANDS[command].ordered(tensors, numbered, scalars or {})
    return addresses, (*numbers, *more), factors


class Buffers:
    """Operands of one problem on a device, each between guard bands.

    Args:
        memory: memory of the device.
        problem: problem whose operands they are.
        strides: strides of a GEMM's matrices that differ from the problem's.
    """

    def __init__(self, memory: Arena, problem: Problem, strides: Strides) -> None:
        self.problem, self.strides = problem, strides
        self._pool = Pool(memory)
        self.operands = guarded(self._pool, ((one.name, one.bytes) for one in self._memory()))
        self.rows: dict[str, Guarded] = {}
        """Tensors that only the gate reads: keys and values of a paged cache as packed rows, which
        are copied to its pages, and the dense form of a block-sparse mask.
        """
        if isinstance(problem, AttentionProblem) and problem.is_paged:
            self.rows = guarded(self._pool, pages.row_bytes(problem))
        if isinstance(problem, AttentionProblem) and problem.block_mask:
            batches, heads, *_ = problem.block_shape
            size = batches * heads * problem.seqlen_q * problem.seqlen_kv
            self.rows = guarded(self._pool, [("mask", size)])

    @property
    def pointers(self) -> dict[str, int]:
        """Device address of each operand."""
        return {name: at.pointer for name, at in self.operands.items()}

    @property
    def sources(self) -> dict[str, int]:
        """Device address of each operand as the reference reads it."""
        pointers = {**self.pointers, **{name: rows.pointer for name, rows in self.rows.items()}}
        shared = (("value", "key"), ("descale_v", "descale_k"))  # where a tensor stands for both
        return {**{name: pointers[of] for name, of in shared if of in pointers}, **pointers}

    @property
    def inputs(self) -> list[Operand]:
        """Memory of the operands that are read."""
        return [operand for operand in self._memory() if not operand.is_output]

    def lying(self, operand: Operand) -> Operand:
        """An operand with its strides in these buffers."""
        return replace(operand, strides=self.strides.get(operand.name, operand.strides))

    def close(self) -> None:
        """Free them."""
        self._pool.close()

    def _memory(self) -> list[Operand]:
        """Memory of each operand, outputs last."""
        return [
            of.apart(self.strides[of.name]) if of.name in self.strides else of
            for of in self.problem.operands
        ]


def attention_integers(problem: AttentionProblem, tensors: int) -> dict[str, int]:
    """Extents of an attention and strides of its first matrices, in the commands' order."""
    matrices = problem.matrices[:tensors]
    return {**extents_of(problem), **named_strides({m.name: m.strides for m in matrices})}


def softmax_integers(problem: Problem) -> dict[str, int]:
    """Extents of a softmax, in the commands' order.

    Raises:
        BenchmarkError: when the problem is not a softmax.
    """
    if not isinstance(problem, SoftmaxProblem):
        raise BenchmarkError(f"the numerics gate has no reference for '{problem.op}'")
    return {
        "rows": problem.batch * problem.rows,
        "cols": problem.cols,
        "query_rows": problem.query_rows,
        "causal": int(problem.is_causal),
    }


def matrices(operand: Operand, name: str) -> tuple[int, int, dict[str, int]]:
    """Batch, rows, and strides of batch, row and column of an operand, which may lack a batch.

    Args:
        operand: a matrix, or a batch of them.
        name: name of the matrix in its command.
    """
    *batch, rows, _ = operand.shape
    *outer, row, column = operand.strides
    strides = (outer[0] if outer else operand.elements, row, column)
    return math.prod(batch), rows, matrix_strides({name: strides})


def matrix_strides(matrices: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Strides of a product's matrices, by their names to its commands."""
    return {
        f"{name}_{axis}": stride
        for name, strides in matrices.items()
        for axis, stride in zip(MATRIX_STRIDES, strides, strict=True)
    }
