"""The order in which a kernel adds: kernels of one order give a row the same bits.

A row's bits depend on how its sum over K, or over the keys, is divided and in which order its parts
are added. Tiles along M and N, clusters, stages, schedules and an exchange of the operands do not
matter. `tuner.runtime.bits` compares the bits of kernels of one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from tuner.config import Config
from tuner.hardware import Gpu
from tuner.problem import DType, Problem


@dataclass(frozen=True, order=True)
class ReductionClass:
    """An order of additions. Kernels of equal classes, of one operation, types and epilogue, give
    equal rows equal bits, whatever other rows there are.
    """

    depth: int
    """Terms that an instruction of the tensor cores adds."""
    unit: str = "wgmma"
    """Instruction: ``wgmma``, or ``mma`` with the order of terms of `gemv`."""
    promoted: int = 0
    """Terms after which the accumulators are added to an fp32 sum; 0: at the end only."""
    splits: int = 1
    """Parts that a sum is divided into; 0: one every `step` terms, however many there are."""
    step: int = 0
    """Terms that the parts are whole multiples of; 0 for one part."""
    merge: str = ""
    """How parts are added: in ``turns``, in a ``cluster``, of ``warps``, by a ``kernel``, or in the
    ``order`` of the keys, one after another.
    """
    epilogue: str = ""
    """Operations after the sum, where families do them unlike; empty: all do them alike."""
    keys: int = 0
    """Keys after which the online softmax rescales, of attention."""
    key_groups: int = 1
    """Groups of warps that take such blocks of keys in turn."""
    rescale: str = ""
    """``lazy``: the online softmax keeps its maximum while a row's grows little."""

    def label(self) -> str:
        """The fields that differ from their defaults, for people."""
        named = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return ",".join(
            f"{name}={value}" for name, (value, usual) in named.items() if value != usual
        )


class Invariance:
    """The guarantee of a family's kernels. The default is that of a family without one."""

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        """The order in which the kernel of a config adds.

        None where it depends on more than the row itself, as on the number of rows or the moment.

        Args:
            problem: problem to compute, of whose sizes only K and the head dimension count.
            config: a legal config of the family.
        """
        return None

    def invariant_kernels(self, problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
        """Expected microseconds and configs of kernels that serve batch-invariant calls alone."""
        yield from ()

    def invariant_builds(self, dtype: DType) -> Iterator[tuple[Config, Problem]]:
        """All such kernels for a type, each with a small problem of its calls."""
        yield from ()
