"""Matrix products, batched, with what may be fused into their ends: `GemmProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from tuner.problem.base import (
    DTYPE_SHORT,
    DType,
    Operand,
    Problem,
    check_choice,
    check_extent,
)

Major = Literal["row", "col"]
Activation = Literal["", "relu", "gelu", "gelu_tanh", "silu"]
"""``gelu`` is by erf, ``gelu_tanh`` its approximation; no text is none."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)[1:]
EPILOGUES = (
    *("bias", "residual", "bias_residual"),
    *ACTIVATIONS,
    *(f"bias_{activation}" for activation in ACTIVATIONS),
)
"""What a GEMM may do with its product besides storing it."""


@dataclass(frozen=True)
class GemmProblem(Problem):
    """D[b] = A[b] @ B[b], fp32 accumulation; A is (M, K), B is (K, N), D is (M, N) row-major.

    `epilogue` is one of `EPILOGUES`: D = activation(A @ B + bias) or A @ B + bias + residual, with
    what it names of them. The bias is (N), of A's type; the residual is (M, N), of D's.

    `layout_a` and `layout_b` are the storage order of A and B: ``row`` makes A K-major and B
    N-major, ``col`` makes A M-major and B K-major. The default (row, col) is
    `torch.nn.functional.linear`'s, cuBLAS's TN.
    """

    op: ClassVar[str] = "gemm"
    keys: ClassVar[Mapping[str, str]] = {
        "M": "m",
        "N": "n",
        "K": "k",
        "B": "batch",
        "dtype": "dtype",
        "dtype_d": "dtype_d",
        "layout_a": "layout_a",
        "layout_b": "layout_b",
        "epilogue": "epilogue",
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N", "K")

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: DType = "float16"
    dtype_d: DType | Literal[""] = ""
    layout_a: Major = "row"
    layout_b: Major = "col"
    epilogue: str = ""

    def __post_init__(self) -> None:
        if self.dtype_d == "":
            object.__setattr__(self, "dtype_d", self.dtype)
        for key, value in (("M", self.m), ("N", self.n), ("K", self.k), ("B", self.batch)):
            check_extent(key, value)
        check_choice("dtype", self.dtype, ("float16", "bfloat16"))
        check_choice("dtype_d", self.dtype_d, (self.dtype, "float32"))
        check_choice("layout_a", self.layout_a, ("row", "col"))
        check_choice("layout_b", self.layout_b, ("row", "col"))
        if self.epilogue:
            check_choice("epilogue", self.epilogue, EPILOGUES)

    @property
    def has_bias(self) -> bool:
        """Whether a vector is added to every row."""
        return self.epilogue.startswith("bias")

    @property
    def has_residual(self) -> bool:
        """Whether a matrix is added."""
        return self.epilogue.endswith("residual")

    @property
    def activation(self) -> Activation:
        """What is applied to the sum, if anything."""
        text = self.epilogue.removeprefix("bias").removeprefix("_")
        return next((known for known in ACTIVATIONS if known == text), "")

    def to_json(self) -> dict[str, Any]:
        """As every problem's; without an epilogue it is not mentioned, so that plain ones keep the
        keys that they had before there were any.
        """
        values = super().to_json()
        return values if self.epilogue else {k: v for k, v in values.items() if k != "epilogue"}

    def label(self) -> str:
        text = f"M={self.m},N={self.n},K={self.k}" + ("" if self.batch == 1 else f",B={self.batch}")
        text += f",dtype={DTYPE_SHORT[self.dtype]}"
        text += "" if self.dtype_d == self.dtype else f",dtype_d={DTYPE_SHORT[self.dtype_d]}"
        text += "" if self.layout_a == "row" else f",layout_a={self.layout_a}"
        text += "" if self.layout_b == "col" else f",layout_b={self.layout_b}"
        return text + (f",epilogue={self.epilogue}" if self.epilogue else "")

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def operands(self) -> tuple[Operand, ...]:
        def matrix(name: str, rows: int, cols: int, major: str, dtype: Any, out: bool) -> Operand:
            strides = (rows * cols, cols, 1) if major == "row" else (rows * cols, 1, rows)
            return Operand(name, (self.batch, rows, cols), strides, dtype, out)

        found = [
            matrix("a", self.m, self.k, self.layout_a, self.dtype, False),
            matrix("b", self.k, self.n, self.layout_b, self.dtype, False),
        ]
        if self.has_bias:
            found.append(Operand("bias", (self.n,), (1,), self.dtype))
        if self.has_residual:
            found.append(matrix("residual", self.m, self.n, "row", self.dtype_d, False))
        return (*found, matrix("d", self.m, self.n, "row", self.dtype_d, True))
