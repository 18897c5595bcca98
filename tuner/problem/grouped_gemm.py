"""The products of a mixture of experts, each over its own rows: `GroupedGemmProblem`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, Literal, get_args

from tuner.errors import ConfigError
from tuner.problem.base import (
    DTYPE_BYTES,
    DTYPE_SHORT,
    E4M3,
    MAX_EXTENT,
    MAX_PARTS,
    DType,
    Meaning,
    Operand,
    Problem,
    check_choice,
    check_extent,
)
from tuner.problem.gemm import block_scales

Sizes = Literal["uniform", "zipf", "sparse"]
SIZES: tuple[Sizes, ...] = get_args(Sizes)
#: Of the order in which groups of unlike sizes lie.
_ORDER_SEED = 0


@dataclass(frozen=True)
class GroupedGemmProblem(Problem):
    """D[s:e] = A[s:e] @ B[g]^T of each group g, with s = offsets[g] and e = offsets[g + 1].

    A is (M, K), the rows of all groups one after the other. B is (G, N, K), D is (M, N). All are
    row-major; accumulation is fp32. Offsets are G + 1 int32 on the device, from 0 to M. It is
    ``torch._grouped_mm(a, b.transpose(-2, -1), offs=offsets[1:])``.

    With `dtype` e4m3 the operands have factors of blocks, as `GemmProblem` with ``scales=block``.
    scale_a is (K / 128, M) with the rows of all groups, scale_b (G, N / 128, K / 128). D is then
    bf16.

    M is the number of all rows. Kernels read the offsets when they run and take any. `sizes` names
    the fixed sizes that a problem is measured with:

    - ``uniform``: as equal as they can be
    - ``zipf``: the r-th largest group has a share of 1 / r, in a shuffled order
    - ``sparse``: equal in every other group, none in the rest

    With few rows the first two also have empty groups.
    """

    op: ClassVar[str] = "grouped_gemm"
    keys: ClassVar[Mapping[str, str]] = {
        "G": "groups",
        "M": "m",
        "N": "n",
        "K": "k",
        "sizes": "sizes",
        "dtype": "dtype",
    }
    meanings: ClassVar[Mapping[str, Meaning]] = {
        "G": Meaning("groups, as the experts of a mixture", "groups"),
        "M": Meaning("rows of A and D, those of all groups", "rows"),
        "N": Meaning("columns of D", "columns"),
        "K": Meaning("columns of A, and of B of each group", "elements"),
        "sizes": Meaning(f"how the rows are shared out when measured: {', '.join(SIZES)}"),
        "dtype": Meaning("type of A, B and D: fp16, bf16, or e4m3 of A and B, D then bf16"),
    }
    required: ClassVar[tuple[str, ...]] = ("G", "M", "N", "K")

    groups: int
    m: int
    n: int
    k: int
    sizes: Sizes = "uniform"
    dtype: DType = "float16"

    def __post_init__(self) -> None:
        for key, value in (("G", self.groups), ("M", self.m), ("N", self.n), ("K", self.k)):
            check_extent(key, value)
        if self.groups * self.n > MAX_EXTENT:
            raise ConfigError(
                f"G={self.groups},N={self.n} have over {MAX_EXTENT} columns together "
                f"(allowed: N to {MAX_EXTENT // self.groups})"
            )
        check_extent("G", self.groups, maximum=MAX_PARTS)
        check_choice("sizes", self.sizes, SIZES)
        check_choice("dtype", self.dtype, ("float16", "bfloat16", E4M3))

    def label(self) -> str:
        text = f"G={self.groups},M={self.m},N={self.n},K={self.k}"
        text += "" if self.sizes == "uniform" else f",sizes={self.sizes}"
        return f"{text},dtype={DTYPE_SHORT[self.dtype]}"

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each group as the problem is measured."""
        return rows_of(self.sizes, self.m, self.groups)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Weights of empty groups are not read."""
        idle = sum(1 for rows in self.rows if not rows)
        return super().bytes - idle * self.n * self.k * DTYPE_BYTES[self.dtype]

    @property
    def operands(self) -> tuple[Operand, ...]:
        m, n, k = self.m, self.n, self.k
        inputs = (
            Operand("a", (m, k), (k, 1), self.dtype),
            Operand("b", (self.groups, n, k), (n * k, k, 1), self.dtype),
            Operand("offsets", (self.groups + 1,), (1,), "int32"),
        )
        if self.dtype != E4M3:
            return (*inputs, Operand("d", (m, n), (n, 1), self.dtype, True))
        (blocks, rows), (columns, _) = block_scales(m, n, k)
        return (
            *inputs,
            Operand("scale_a", (blocks, rows), (rows, 1), "float32"),
            Operand(
                "scale_b", (self.groups, columns, blocks), (columns * blocks, blocks, 1), "float32"
            ),
            Operand("d", (m, n), (n, 1), "bfloat16", True),
        )


@lru_cache(maxsize=64)
def rows_of(sizes: Sizes, m: int, groups: int) -> tuple[int, ...]:
    """`m` rows over groups as `sizes` says; they add up to `m`, and are always the same."""
    if sizes == "zipf":
        weights = [1 / (rank + 1) for rank in range(groups)]
        random.Random(_ORDER_SEED).shuffle(weights)
    else:
        weights = [float(sizes == "uniform" or group % 2 == 0) for group in range(groups)]
    total = sum(weights)
    ends = [round(m * part / total) for part in accumulate(weights)]
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
