"""Matrix products, batched, with what may be fused into their ends: `GemmProblem`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, Literal, Self, get_args

from tuner.errors import ConfigError
from tuner.problem.base import (
    DTYPE_SHORT,
    E4M3,
    DType,
    Meaning,
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
"""Epilogues of a GEMM besides storing the product."""
Scales = Literal["tensor", "row", "block"]
SCALES: tuple[Scales, ...] = get_args(Scales)
EPILOGUE_SCALES = SCALES[:2]
"""Factors that the whole sum over K is multiplied by."""
SCALE_BLOCK = 128
"""Elements of K, and columns of B, that a factor of ``block`` is for."""
SCALE_ROWS = 4
"""Factors of A's rows lie in multiples of as many: 16 bytes, as DeepGEMM's TMA reads them."""


def block_scales(m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of the factors of blocks of A, (M, K), and of B, (K, N)."""
    blocks = ceil(k / SCALE_BLOCK)
    return (blocks, ceil(m / SCALE_ROWS) * SCALE_ROWS), (ceil(n / SCALE_BLOCK), blocks)


@dataclass(frozen=True)
class GemmProblem(Problem):
    """D[b] = A[b] @ B[b], fp32 accumulation; A is (M, K), B is (K, N), D is (M, N) row-major.

    `epilogue` is one of `EPILOGUES`: D = activation(A @ B + bias) or A @ B + bias + residual, with
    what it names of them. The bias is (N), of A's type; the residual is (M, N), of D's.

    With `scales` D = scale_a * (A @ B) * scale_b, with fp32 factors in memory. ``tensor`` has one
    of each operand; ``row`` has one of each row of A, (M), and of each column of B, (N). They come
    without an epilogue and without a batch. With `dtype` e4m3 the default is `tensor`. D is then
    bf16 (the default) or fp16, and both operands lie along K, as 8-bit WGMMA wants them.

    With `dtype_d` e4m3 D is the next product's operand. It is multiplied by a further fp32 factor
    in memory, scale_d (1), and rounded to nearest. Magnitudes above 448 become 448.

    ``block`` is for e4m3 only, with D in bf16. Each row of A has a factor for every `SCALE_BLOCK`
    of K, and B one for every `SCALE_BLOCK` of columns and of K. A block's sum times its two factors
    is added to an fp32 sum, whatever `fast_accum` is, which stays 1. scale_a is (K / 128, M) with M
    contiguous and rounded up to `SCALE_ROWS`; scale_b is (N / 128, K / 128). Blocks at an end may
    be cut off.

    `fast_accum` is `torch._scaled_mm`'s of e4m3 products: whether a kernel may leave the whole sum
    over K in the tensor cores' accumulators, which keep about 14 bits. Without, it adds parts to
    fp32 sums, every 128 of K in CUTLASS. The two are problems of their own, for their results
    differ: of operands that are all positive the first loses a tenth at K = 16384. A text that
    names neither has 0, PyTorch's default; here and in documents 1 is the default.

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
        "scales": "scales",
        "fast_accum": "fast_accum",
    }
    meanings: ClassVar[Mapping[str, Meaning]] = {
        "M": Meaning("rows of A and D", "rows"),
        "N": Meaning("columns of B and D", "columns"),
        "K": Meaning("columns of A, rows of B", "elements"),
        "B": Meaning("products of the batch", "products"),
        "dtype": Meaning("type of A and B: fp16, bf16 or e4m3"),
        "dtype_d": Meaning("type of D: fp16, bf16, fp32 or e4m3", default="as dtype; bf16 of e4m3"),
        "layout_a": Meaning("storage order of A: row or col"),
        "layout_b": Meaning("storage order of B: row or col (weights of nn.Linear)"),
        "epilogue": Meaning("bias, residual, bias_residual, or [bias_]" + "/".join(ACTIVATIONS)),
        "scales": Meaning(f"fp32 factors of A and B: one for each {' or '.join(SCALES)}"),
        "fast_accum": Meaning("0: e4m3 sums are taken over to fp32", default="as PyTorch's"),
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N", "K")
    omitted: ClassVar[Mapping[str, Any]] = {"epilogue": "", "scales": "", "fast_accum": True}

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: DType = "float16"
    dtype_d: DType | Literal[""] = ""
    layout_a: Major = "row"
    layout_b: Major = "col"
    epilogue: str = ""
    scales: Scales | Literal[""] = ""
    fast_accum: bool = True

    def __post_init__(self) -> None:
        is_e4m3 = self.dtype == E4M3
        if self.dtype_d == "":
            object.__setattr__(self, "dtype_d", "bfloat16" if is_e4m3 else self.dtype)
        if is_e4m3 and not self.scales:
            object.__setattr__(self, "scales", "tensor")
        for key, value in (("M", self.m), ("N", self.n), ("K", self.k), ("B", self.batch)):
            check_extent(key, value)
        check_choice("dtype", self.dtype, ("float16", "bfloat16", E4M3))
        outputs = ("bfloat16", "float16", E4M3) if is_e4m3 else (self.dtype, "float32")
        check_choice("dtype_d", self.dtype_d, outputs)
        check_choice("layout_a", self.layout_a, ("row",) if is_e4m3 else ("row", "col"))
        check_choice("layout_b", self.layout_b, ("col",) if is_e4m3 else ("row", "col"))
        if self.epilogue:
            check_choice("epilogue", self.epilogue, EPILOGUES)
        if self.scales:
            check_choice("scales", self.scales, SCALES)
            if self.scales == "block":
                if (self.dtype, self.dtype_d, self.fast_accum) != (E4M3, "bfloat16", True):
                    only = "dtype=e4m3, dtype_d=bf16, fast_accum=1"
                    raise ConfigError(f"scales=block has its own sums of e4m3 (allowed: {only})")
            if self.epilogue or self.batch > 1:
                raise ConfigError(
                    f"scales={self.scales} has no epilogue and no batch (allowed: neither)"
                )
        if not (self.fast_accum or is_e4m3):
            raise ConfigError(f"fast_accum=0 is of e4m3, not {self.dtype} (allowed: 1)")

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Self:
        """The problem of a text, whose sums of e4m3 are exact where it does not say."""
        problem = super().from_keys(values)
        is_said = "fast_accum" in values or not problem.has_sums_of_choice
        return problem if is_said else replace(problem, fast_accum=False)

    @property
    def has_bias(self) -> bool:
        """True when a vector is added to every row."""
        return self.epilogue.startswith("bias")

    @property
    def has_residual(self) -> bool:
        """True when a matrix is added."""
        return self.epilogue.endswith("residual")

    @property
    def has_sums_of_choice(self) -> bool:
        """True where `fast_accum` may be either: e4m3 without factors of blocks."""
        return self.dtype == E4M3 and self.scales != "block"

    @property
    def has_output_scale(self) -> bool:
        """True when D is multiplied by a factor of its own before it is rounded to e4m3."""
        return self.dtype_d == E4M3

    @property
    def activation(self) -> Activation:
        """Activation of the sum, or the empty text."""
        text = self.epilogue.removeprefix("bias").removeprefix("_")
        return next((name for name in ACTIVATIONS if name == text), "")

    def label(self) -> str:
        text = f"M={self.m},N={self.n},K={self.k}" + ("" if self.batch == 1 else f",B={self.batch}")
        text += f",dtype={DTYPE_SHORT[self.dtype]}"
        usual = "bfloat16" if self.dtype == E4M3 else self.dtype
        text += "" if self.dtype_d == usual else f",dtype_d={DTYPE_SHORT[self.dtype_d]}"
        text += "" if self.layout_a == "row" else f",layout_a={self.layout_a}"
        text += "" if self.layout_b == "col" else f",layout_b={self.layout_b}"
        text += f",scales={self.scales}" if self.scales else ""
        if self.has_sums_of_choice:
            text += f",fast_accum={int(self.fast_accum)}"
        return text + (f",epilogue={self.epilogue}" if self.epilogue else "")

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def operands(self) -> tuple[Operand, ...]:
        def matrix(name: str, rows: int, cols: int, major: str, dtype: Any, out: bool) -> Operand:
            strides = (rows * cols, cols, 1) if major == "row" else (rows * cols, 1, rows)
            return Operand(name, (self.batch, rows, cols), strides, dtype, out)

        operands = [
            matrix("a", self.m, self.k, self.layout_a, self.dtype, False),
            matrix("b", self.k, self.n, self.layout_b, self.dtype, False),
        ]
        if self.scales == "block":
            sides = zip(("scale_a", "scale_b"), block_scales(self.m, self.n, self.k), strict=True)
            operands += [Operand(x, side, (side[1], 1), "float32") for x, side in sides]
        elif self.scales:
            sizes = (self.m, self.n) if self.scales == "row" else (1, 1)
            names = ("scale_a", "scale_b")
            operands += [
                Operand(x, (n,), (1,), "float32") for x, n in zip(names, sizes, strict=True)
            ]
        if self.has_output_scale:
            operands.append(Operand("scale_d", (1,), (1,), "float32"))
        if self.has_bias:
            operands.append(Operand("bias", (self.n,), (1,), self.dtype))
        if self.has_residual:
            operands.append(matrix("residual", self.m, self.n, "row", self.dtype_d, False))
        return (*operands, matrix("d", self.m, self.n, "row", self.dtype_d, True))
