"""The gated product of a feed-forward layer: `SwigluProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from tuner.errors import ConfigError
from tuner.problem.base import (
    DTYPE_SHORT,
    DType,
    Meaning,
    Operand,
    Problem,
    check_choice,
    check_extent,
)

Pairing = Literal["interleaved", "concatenated"]
STEP = 32
"""Columns of D that are interleaved together: `SwigluProblem.n` is a multiple."""
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)


@dataclass(frozen=True)
class SwigluProblem(Problem):
    """D = silu(A @ gate) * (A @ up); A is (M, K), gate and up are (K, N), D is (M, N), row-major.

    The two weights are one operand ``weights`` of 2 N rows of K, in one of two `PAIRINGS`.
    ``interleaved`` puts gate and up of output column 32 g + 8 t + c into the rows
    64 g + 8 c + 2 t and the next one. So one thread of a kernel gets both, for eight neighbouring
    columns. ``concatenated`` puts all of gate before all of up.
    """

    op: ClassVar[str] = "swiglu"
    keys: ClassVar[Mapping[str, str]] = {
        "M": "m",
        "N": "n",
        "K": "k",
        "dtype": "dtype",
        "weights": "weights",
    }
    meanings: ClassVar[Mapping[str, Meaning]] = {
        "M": Meaning("rows of A and D", "rows"),
        "N": Meaning("columns of D, of gate and of up, a multiple of 32", "columns"),
        "K": Meaning("columns of A, rows of gate and of up", "elements"),
        "dtype": Meaning("type of A, the weights and D: fp16 or bf16"),
        "weights": Meaning(f"how gate and up lie: {' or '.join(PAIRINGS)}"),
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N", "K")

    m: int
    n: int
    k: int
    dtype: DType = "float16"
    weights: Pairing = "interleaved"

    def __post_init__(self) -> None:
        for key, value in (("M", self.m), ("N", self.n), ("K", self.k)):
            check_extent(key, value)
        if self.n % STEP:
            raise ConfigError(f"N={self.n} cannot be interleaved (allowed: multiples of {STEP})")
        check_choice("dtype", self.dtype, ("float16", "bfloat16"))
        check_choice("weights", self.weights, PAIRINGS)

    def label(self) -> str:
        text = f"M={self.m},N={self.n},K={self.k},dtype={DTYPE_SHORT[self.dtype]}"
        return text + ("" if self.weights == "interleaved" else f",weights={self.weights}")

    @property
    def flops(self) -> int:
        return 4 * self.m * self.n * self.k

    @property
    def operands(self) -> tuple[Operand, ...]:
        k, n = self.k, self.n
        rows = (1, 64, 2, 8) if self.weights == "interleaved" else (n, 32, 8, 1)
        shape, strides = (2, n // 32, 4, 8, k), (*(row * k for row in rows), 1)
        return (
            Operand("a", (self.m, k), (k, 1), self.dtype),
            Operand("weights", shape, strides, self.dtype),
            Operand("d", (self.m, n), (n, 1), self.dtype, True),
        )
