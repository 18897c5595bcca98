"""Softmax over the rows of a matrix: `SoftmaxProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

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


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """P = softmax(scale * scores + mask) over rows; scores are (batch, rows, cols) fp32.

    `query_rows` is the period of the causal mask: row r of a matrix sees columns
    0..r % query_rows. Grouped query heads stack their rows over one key head.
    """

    op: ClassVar[str] = "softmax"
    keys: ClassVar[Mapping[str, str]] = {
        "B": "batch",
        "M": "rows",
        "N": "cols",
        "SQ": "query_rows",
        "causal": "is_causal",
        "dtype": "dtype",
    }
    meanings: ClassVar[Mapping[str, Meaning]] = {
        "B": Meaning("matrices of the batch", "matrices"),
        "M": Meaning("rows of a matrix", "rows"),
        "N": Meaning("columns of a matrix", "columns"),
        "SQ": Meaning("rows after which the causal mask begins anew", "rows", "as M"),
        "causal": Meaning("1: row r sees columns 0 to r modulo SQ"),
        "dtype": Meaning("type of the result: fp16 or bf16"),
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N")

    rows: int
    cols: int
    batch: int = 1
    query_rows: int = 0
    is_causal: bool = False
    dtype: DType = "float16"

    def __post_init__(self) -> None:
        if self.query_rows == 0:
            object.__setattr__(self, "query_rows", self.rows)
        for key, value in (
            ("M", self.rows),
            ("N", self.cols),
            ("B", self.batch),
            ("SQ", self.query_rows),
        ):
            check_extent(key, value)
        if self.rows % self.query_rows:
            raise ConfigError(f"SQ={self.query_rows} does not divide M={self.rows}")
        check_choice("dtype", self.dtype, ("float16", "bfloat16"))

    def label(self) -> str:
        text = f"M={self.rows},N={self.cols}" + ("" if self.batch == 1 else f",B={self.batch}")
        text += "" if self.query_rows == self.rows else f",SQ={self.query_rows}"
        return text + (",causal=1" if self.is_causal else "") + f",dtype={DTYPE_SHORT[self.dtype]}"

    @property
    def flops(self) -> int:
        """Five operations an element: scale, maximum, subtract, exponential, divide."""
        full = 5 * self.batch * self.rows * self.cols
        return full // 2 if self.is_causal else full

    @property
    def operands(self) -> tuple[Operand, ...]:
        shape = (self.batch, self.rows, self.cols)
        strides = (self.rows * self.cols, self.cols, 1)
        return (
            Operand("scores", shape, strides, "float32"),
            Operand("probabilities", shape, strides, self.dtype, True),
        )
