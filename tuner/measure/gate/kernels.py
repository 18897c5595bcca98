"""Launches of the kernels of ``templates/reference.cu.j2``, and the buffers they work on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from tuner.compile.artifacts import LoadedKernel
from tuner.errors import BenchmarkError
from tuner.families.base import Strides
from tuner.measure import pages
from tuner.measure.device import Device, Pool
from tuner.measure.subjects import Call
from tuner.measure.tolerance import Limits, OutputComparison
from tuner.problem import E4M3, AttentionProblem, Operand, Problem, SoftmaxProblem

POISON = 0x7FA5
"""A NaN in fp16 and bf16, and twice over in fp32, with a payload that arithmetic never makes."""
GUARD_BYTES = 1 << 20
"""Poisoned on both sides of every buffer; a stray tile (at most 256 x 256 x 4 bytes) fits."""

DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, E4M3: 3}
"""Element types by the template's numbers."""
_RESULT_BYTES = 64


class Command(IntEnum):
    """The first integer of a launch, by the template's numbers."""

    FILL = 0
    PLANT_ATTENTION = 1
    SCALE_COLUMNS = 2
    PLANT_SOFTMAX = 3
    ATTENTION = 4
    GEMM = 5
    SOFTMAX = 6
    COMPARE = 7
    COUNT_CHANGED = 8
    CHECKSUM = 9
    GATE_PAIRS = 10
    PLANT_HUGE_ATTENTION = 11
    PLANT_HUGE_SOFTMAX = 12
    COPY = 13
    TO_PAGES = 14
    GRADIENTS = 15
    KEEP_ATTENTION = 16
    PLANT_MASK = 17


@dataclass(frozen=True)
class Guarded:
    """A buffer between two guard bands."""

    name: str
    pointer: int
    bytes: int


def guarded(pool: Pool, name: str, size: int) -> Guarded:
    """A buffer of `pool` with guard bands, 256-byte aligned, an even number of bytes."""
    size += size % 2
    return Guarded(name, pool.allocate(size + 2 * GUARD_BYTES) + GUARD_BYTES, size)


def _bands(buffer: Guarded) -> tuple[int, int]:
    """Addresses of the guard bands before and behind a buffer."""
    return buffer.pointer - GUARD_BYTES, buffer.pointer + buffer.bytes


class Kernels:
    """The reference's kernels on one device.

    Args:
        device: where they run.
        kernel: `REFERENCE`, compiled and loaded.
    """

    def __init__(self, device: Device, kernel: LoadedKernel) -> None:
        self.device, self._kernel = device, kernel
        self._result = device.allocate(_RESULT_BYTES)

    def run(
        self, tensors: Sequence[int], integers: Sequence[int], scalars: Sequence[float] = ()
    ) -> None:
        """Launch one on the device's stream: addresses, then a `Command` and its integers."""
        self._kernel.launch(tensors, integers, scalars, 0, self.device.stream)

    def poison(self, buffer: Guarded) -> None:
        """Poison both guard bands of a buffer."""
        for band in _bands(buffer):
            self.device.fill16(band, POISON, GUARD_BYTES)

    def strayed(self, buffer: Guarded) -> int:
        """16-bit words of both guard bands of a buffer that do not hold the poison."""
        integers = (Command.COUNT_CHANGED, GUARD_BYTES)
        counts = (self._ask((band, self._result), integers) for band in _bands(buffer))
        return sum(int.from_bytes(data[:8], "little") for data in counts)

    def checksum(self, pointer: int, size: int) -> int:
        """Checksum of `size` bytes."""
        data = self._ask((pointer, self._result), (Command.CHECKSUM, size))
        return int.from_bytes(data[:8], "little")

    def compare(
        self, output: int, reference: int, operand: Operand, limits: Limits
    ) -> OutputComparison:
        """Compare an output's memory with fp32 reference memory of the same order."""
        width = max(
            extent
            for extent, stride in zip(operand.shape, operand.strides, strict=True)
            if stride == 1
        )
        data = self._ask(
            (output, reference, self._result),
            (Command.COMPARE, DTYPES[operand.dtype], operand.elements, width),
            (limits.absolute, limits.relative, limits.row),
        )
        return OutputComparison.unpack(data, operand.elements)

    def copying(self, source: int, target: int, size: int, stream: Callable[[], int]) -> Call:
        """A launch of the element-wise kernel that copies `size` bytes, on the stream of then."""
        return lambda: self._kernel.launch((source, target), (Command.COPY, size), (), 0, stream())

    def _ask(
        self, tensors: Sequence[int], integers: Sequence[int], scalars: Sequence[float] = ()
    ) -> bytes:
        self.device.fill8(self._result, 0, _RESULT_BYTES)
        self.run(tensors, integers, scalars)
        return self.device.read(self._result, _RESULT_BYTES)


class Buffers:
    """The operands of one problem on a device, each between guard bands.

    Args:
        device: where they are allocated.
        problem: whose operands they are.
        strides: of a product's matrices that lie otherwise than the problem's.
    """

    def __init__(self, device: Device, problem: Problem, strides: Strides) -> None:
        self.problem, self.strides = problem, strides
        self._pool = Pool(device)
        self.operands = {
            operand.name: guarded(self._pool, operand.name, operand.bytes)
            for operand in self._memory()
        }
        self.rows: dict[str, Guarded] = {}
        """Tensors that the reference alone reads: keys and values of a paged cache as packed rows,
        which are copied to its pages; the dense form of a block-sparse mask.
        """
        if isinstance(problem, AttentionProblem) and problem.is_paged:
            size = pages.row_bytes(problem)
            self.rows = {name: guarded(self._pool, name, size) for name in ("key", "value")}
        if isinstance(problem, AttentionProblem) and problem.block_mask:
            batches, heads, *_ = problem.block_shape
            size = batches * heads * problem.seqlen_q * problem.seqlen_kv
            self.rows = {"mask": guarded(self._pool, "mask", size)}

    @property
    def pointers(self) -> dict[str, int]:
        """Device address of each operand."""
        return {name: one.pointer for name, one in self.operands.items()}

    @property
    def sources(self) -> dict[str, int]:
        """Device address of each operand as the reference reads it."""
        return {**self.pointers, **{name: rows.pointer for name, rows in self.rows.items()}}

    @property
    def inputs(self) -> list[Operand]:
        """The memory of what is read."""
        return [operand for operand in self._memory() if not operand.is_output]

    def lying(self, operand: Operand) -> Operand:
        """An operand with the strides that it has here."""
        return replace(operand, strides=self.strides.get(operand.name, operand.strides))

    def close(self) -> None:
        """Free them."""
        self._pool.close()

    def _memory(self) -> list[Operand]:
        """The memory of each operand, the outputs' last."""
        return [
            one.apart(self.strides[one.name]) if one.name in self.strides else one
            for one in self.problem.operands
        ]


def attention_integers(problem: AttentionProblem, tensors: int) -> list[int]:
    """Extents of an attention, and the strides of its first matrices, as its commands take them."""
    strides = [s for matrix in problem.matrices[:tensors] for s in matrix.strides[:3]]
    extents = [problem.batch, problem.heads_q, problem.heads_kv]
    return [*extents, problem.seqlen_q, problem.seqlen_kv, problem.head_dim, *strides]


def softmax_integers(problem: Problem) -> list[int]:
    """Extents of a softmax as its commands take them.

    Raises:
        BenchmarkError: when it is another problem.
    """
    if not isinstance(problem, SoftmaxProblem):
        raise BenchmarkError(f"the numerics gate has no reference for '{problem.op}'")
    rows = problem.batch * problem.rows
    return [rows, problem.cols, problem.query_rows, int(problem.is_causal)]


def matrices(operand: Operand) -> tuple[int, int, tuple[int, int, int]]:
    """Batch, rows, and strides of batch, row and column of an operand with or without a batch."""
    *batch, rows, _ = operand.shape
    *outer, row, column = operand.strides
    return math.prod(batch), rows, (outer[0] if outer else operand.elements, row, column)
