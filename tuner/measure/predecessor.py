"""Ordinary kernel that runs before each timed call, as another operation does in a model.

It is launched without attributes, so no kernel behind it starts before it ends. It writes the
call's first operand, which is then as warm as in a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Any

from tuner.errors import BenchmarkError
from tuner.measure.device import Device, Pool
from tuner.measure.gate import Gate
from tuner.measure.subjects import Bound, Call, CudaArray, Subject, import_torch
from tuner.measurement import Regime
from tuner.problem import Operand, Problem

#: Maximum columns of the GEMM that calls are timed behind: a model's hidden size.
MAX_COLUMNS = 4096


class Predecessor(ABC):
    """Kernel that writes the first operand of calls."""

    @abstractmethod
    def bind(self, call: Bound, subject: Subject) -> Call:
        """Launch that writes the first operand of `call`, on the subject's stream at that time."""


class ElementWise(Predecessor):
    """Copies the operand from a buffer of its own, 16 bytes a thread. It has the reads and writes
    of any element-wise kernel. It does no arithmetic, so it supports every type.
    """

    def __init__(self, gate: Gate, source: int, size: int) -> None:
        """Args: gate: owner of the kernel; source: device address; size: bytes of the operand."""
        self._gate, self._source, self._size = gate, source, size

    def bind(self, call: Bound, subject: Subject) -> Call:
        return self._gate.copying(self._source, call.first, self._size, subject.stream)


class ProductPredecessor(Predecessor):
    """Computes the operand as a product of random matrices with PyTorch's GEMM. The operand's
    former contents are lost.
    """

    def __init__(self, device: Device, operand: Operand) -> None:
        """Imports torch.

        Raises:
            BenchmarkError: with status UNAVAILABLE without torch or a GPU, and for types other than
                fp16 and bf16.
        """
        self._torch = torch = import_torch(device)
        if operand.dtype not in ("float16", "bfloat16"):
            raise BenchmarkError(
                f"a GEMM cannot write a first operand of {operand.dtype} (allowed: fp16, bf16)"
            )
        columns = largest_factor(operand.elements, MAX_COLUMNS)
        self._shape = (operand.elements // columns, columns)
        self._dtype = getattr(torch, operand.dtype)
        self._device, self._operand = device, operand
        draw = partial(torch.randn, device=f"cuda:{device.index}", dtype=self._dtype)
        self._a, self._b = draw(self._shape), draw((columns, columns)) / columns**0.5

    def bind(self, call: Bound, subject: Subject) -> Call:
        torch = self._torch
        flat = replace(self._operand, shape=self._shape, strides=(self._shape[1], 1))
        array = CudaArray(call.first, flat)
        out = torch.as_tensor(array, device=f"cuda:{self._device.index}").view(self._dtype)

        def write() -> Any:
            with torch.no_grad():
                torch.mm(self._a, self._b, out=out)

        return write


def largest_factor(number: int, most: int) -> int:
    """Largest divisor of a number that is at most `most`."""
    return next(n for n in range(min(most, number), 0, -1) if number % n == 0)


def predecessor(
    regime: Regime, device: Device, gate: Gate, problem: Problem, pool: Pool
) -> Predecessor | None:
    """Predecessor for a regime; None if calls follow one another.

    Args:
        regime: regime of the timing.
        device: device to run on.
        gate: gate that has the problem open, with the timed inputs.
        problem: timed problem.
        pool: pool for the element-wise kernel's source.

    Raises:
        BenchmarkError: when memory is short, or PyTorch is missing for a GEMM.
    """
    first = problem.operands[0]
    if not regime.behind:
        return None
    if regime.behind == "gemm":
        return ProductPredecessor(device, first)
    source = pool.allocate(first.bytes)
    device.copy(source, gate.pointers[first.name], first.bytes)
    return ElementWise(gate, source, first.bytes)
