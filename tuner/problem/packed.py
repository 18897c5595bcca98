"""Packed sequences, as far as the host knows their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tuner.problem.attention import AttentionProblem

SIZES = "batch", "seqlen_q", "seqlen_kv", "rows_q", "rows_kv"
"""Fields of what a call's tensors and its longest lengths tell."""


@dataclass(frozen=True)
class PackedProblem(AttentionProblem):
    """Attention over packed sequences with a call's own numbers of rows, in place of those that
    kernels are measured with.
    """

    rows_q: int = 0
    rows_kv: int = 0
    is_alike: bool = True
    """True if each sequence has as many queries as keys, as far as the host knows."""

    @classmethod
    def of(cls, problem: AttentionProblem, lengths: Sequence[int]) -> PackedProblem:
        """The problem of sequences of these lengths, of queries as of keys."""
        longest, rows = max(lengths), sum(lengths)
        return cls.sized(problem, len(lengths), longest, longest, rows, rows)

    @classmethod
    def sized(cls, problem: AttentionProblem, *sizes: int) -> PackedProblem:
        """A problem with other `SIZES`."""
        return cls(**{**asdict(problem), **dict(zip(SIZES, sizes, strict=True))})

    @property
    def total_q(self) -> int:
        return self.rows_q

    @property
    def total_kv(self) -> int:
        return self.rows_kv

    @property
    def stepped(self) -> PackedProblem:
        """The problem with its sizes rounded up, so that few kinds of calls occur: four between a
        power of two and the next.
        """
        return self.sized(self, *(stepped(getattr(self, name)) for name in SIZES))


def stepped(size: int) -> int:
    """Size rounded up to one of four between a power of two and the next."""
    step = 1 << max(0, (size - 1).bit_length() - 3)
    return -(-size // step) * step
