"""Domains of products and of gated products: rows, epilogue, and the gradient computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

from tuner.families.domain import MAX_SIZE_FACTOR, Domain
from tuner.families.peers.swiglu import INTERLEAVED
from tuner.problem import DType, GemmProblem, SwigluProblem
from tuner.problem.gemm import Major

Rows = Literal["few", "narrow", "wide", "tall"]
"""Rows of a product: few enough for one block; up to two tiles (bound by reading the weights); or
more (bound by tensor cores). Tall ones are wide, with so few columns that their K is divided."""

MAX_FEW, MAX_NARROW = 16, 256
"""Most rows of a product of few rows, and of a narrow one."""
MAX_TALL_COLUMNS = 128
"""Most columns of a tall product. PyTorch's times there follow none of the wide ones'."""
EPILOGUES = "", "bias", "bias_gelu", "bias_gelu_tanh", "gelu", "gelu_tanh"
"""Epilogues that portfolios have kernels for: the most frequent in public models. Each needs a
kernel of its own. PyTorch answers all others."""

#: Kernels of few rows hold all of A in shared memory, and are compiled for half of the rows and for
#: all.
_SMALL: Mapping[Rows, tuple[tuple[int, int], ...]] = {
    "few": ((1, 256), (MAX_FEW // 2 + 1, 256)),
    "narrow": ((128, 4096),),
    "wide": ((1024, 4096),),
    "tall": ((1024, 4096),),
}
_ROWS_TEXT: Mapping[Rows, str] = {
    "few": f"M to {MAX_FEW}",
    "narrow": f"M to {MAX_NARROW}",
    "wide": f"M above {MAX_NARROW}",
    "tall": f"M above {MAX_NARROW}, N to {MAX_TALL_COLUMNS}",
}


def _is_activated(epilogue: str) -> bool:
    return epilogue not in ("", "bias")


def rows_of(m: int) -> Rows:
    """The kind of product with so many rows and many columns."""
    return "few" if m <= MAX_FEW else "narrow" if m <= MAX_NARROW else "wide"


Gradient = Literal["", "input", "weight"]
"""The tensor of a linear layer whose gradient a product is; empty: the layer's output."""
LAYOUTS: Mapping[Gradient, tuple[Major, Major]] = {
    "": ("row", "col"),
    "input": ("row", "row"),
    "weight": ("col", "row"),
}
"""Storage orders of A and B."""
_GRADIENTS = {layouts: gradient for gradient, layouts in LAYOUTS.items()}
ODD_ROW, ODD_ROWS = 1.3, 2.5
"""Time of cuBLAS at an odd number of columns, over that of its time model: at one row, and at 2 to
`MAX_FEW`. Rows of D are not aligned there. Measured with N of 49155 and 50257, 1.33 and 2.78
(``cache/recordings``)."""
LONG_COLUMNS, EVEN_ROW, EVEN_ROWS = 16384, 1.25, 1.5
"""Fewest columns of a vocabulary; and the same times at an even number of them that is not a
multiple of 8. Measured with N of 30522 to 250002: 1.23 to 1.30, and 1.33 to 1.68
(an H200, 27 November 2026).
"""
_known: dict[tuple[Rows, str, Gradient], Any] = {}
"""Domains made so far, by their fields."""


class _Product(NamedTuple):
    rows: Rows
    epilogue: str = ""
    gradient: Gradient = ""


class ProductDomain(_Product, Domain):
    """Products as `tuner.linear` calls them, both operands along K, by their rows and epilogue; and
    those of its gradients, wide and plain.
    """

    __slots__ = ()
    op = GemmProblem.op
    axes = ("m", "n", "k", "work")
    extrapolates = False

    @classmethod
    def holding(cls, problem: Any) -> Self | None:
        if problem.batch > 1 or problem.scales or problem.dtype != problem.dtype_d:
            return None
        if problem.has_residual:
            return None
        rows = rows_of(problem.m)
        if rows == "wide" and problem.n <= MAX_TALL_COLUMNS:
            rows = "tall"
        gradient = _GRADIENTS.get((problem.layout_a, problem.layout_b))
        if gradient is None or (gradient and (rows != "wide" or problem.epilogue)):
            return None
        key = rows, problem.epilogue, gradient
        domain: Self | None = _known.get(key)
        if domain is None:
            domain = _known[key] = cls(*key)
        return domain

    @staticmethod
    def axes_of(sizes: Any) -> tuple[int, ...]:
        """Rows, columns and depth, and their product: kernels that were timed at large products
        only are not trusted where all three are small.
        """
        return sizes.m, sizes.n, sizes.k, sizes.m * sizes.n * sizes.k

    @property
    def trusted_above(self) -> tuple[float, ...]:
        """At up to 16 rows, no more rows than measured: each block keeps all rows of A, and the
        time grows faster than the bytes.
        """
        rows = 1.0 if self.rows == "few" else MAX_SIZE_FACTOR
        return (rows, *(MAX_SIZE_FACTOR,) * (len(self.axes) - 1))

    @property
    def trusted_below(self) -> tuple[float, ...]:
        """No smaller products than measured: seven of them, by a kernel that was timed at larger
        ones, had 0.725 to 0.890 of cuBLAS's speed (an H100, 25 November 2026).
        """
        return (*(MAX_SIZE_FACTOR,) * (len(self.axes) - 1), 1.0)

    @staticmethod
    def group(problem: Any) -> tuple[int, ...]:
        """A layer's widths."""
        return problem.n, problem.k

    @property
    def donors(self) -> Iterator[Self]:
        """The product without the epilogue, which PyTorch fuses or computes by further kernels."""
        if self.epilogue:
            yield self._replace(epilogue="")

    @property
    def alike(self) -> Iterator[Self]:
        """A bias adds nothing that was measured, and all activations the same."""
        yield self
        for epilogue in () if self.gradient else EPILOGUES:
            is_like = _is_activated(epilogue) == _is_activated(self.epilogue)
            if is_like and epilogue != self.epilogue:
                yield self._replace(epilogue=epilogue)

    @property
    def filled(self) -> Iterator[Self]:
        """Activated products: the same kernels serve all activations.

        Times rescaled from another GPU chose kernels of many rows that took 10 % longer than the
        best (68 layers, H200, 27 November 2026).
        """
        if _is_activated(self.epilogue):
            yield from (d for d in self.alike if d != self)

    def moved(self, problem: Any) -> Any:
        return replace(problem, epilogue=self.epilogue)

    @property
    def without_activation(self) -> Self | None:
        return self._replace(epilogue="") if _is_activated(self.epilogue) else None

    @property
    def recipients(self) -> Iterator[Self]:
        if not (self.epilogue or self.gradient):
            yield self._replace(epilogue="bias")

    @property
    def donor_kernels(self) -> int:
        """Two with a bias. PyTorch's time with an activation is not that of the plain product."""
        return 2 if self.epilogue == "bias" else 0

    @property
    def max_kernels(self) -> int:
        if _is_activated(self.epilogue) or self.gradient:
            return 6
        return {"few": 6, "narrow": 12, "wide": 16, "tall": 6}[self.rows]

    @property
    def vendors(self) -> frozenset[str]:
        """Kernels of `torch.nn.functional.linear`, whose call also adds the bias."""
        return frozenset(("addmm",) if self.epilogue.startswith("bias") else ("cublas",))

    def pytorchs_factor(self, problem: Any) -> float:
        if problem.n % 8 == 0 or self.rows != "few":
            return 1.0
        if problem.n % 2:
            return ODD_ROW if problem.m == 1 else ODD_ROWS
        if problem.n < LONG_COLUMNS:
            return 1.0
        return EVEN_ROW if problem.m == 1 else EVEN_ROWS

    def problems(self, dtype: DType) -> tuple[GemmProblem, ...]:
        n = MAX_TALL_COLUMNS if self.rows == "tall" else 4096
        layout_a, layout_b = LAYOUTS[self.gradient]
        facts: dict[str, Any] = {"layout_a": layout_a, "layout_b": layout_b, "dtype": dtype}
        return tuple(
            GemmProblem(m, n, k, epilogue=self.epilogue, **facts) for m, k in _SMALL[self.rows]
        )

    def label(self) -> str:
        more = f", gradient of the {self.gradient}" if self.gradient else ""
        return _ROWS_TEXT[self.rows] + (f", {self.epilogue}" if self.epilogue else "") + more


class _Gated(NamedTuple):
    rows: Rows


class GatedDomain(_Gated, Domain):
    """Gated products, by their rows."""

    __slots__ = ()
    op = SwigluProblem.op
    axes = ProductDomain.axes
    extrapolates = False
    group = staticmethod(ProductDomain.group)

    @classmethod
    def holding(cls, problem: Any) -> Self | None:
        return cls(rows_of(problem.m)) if problem.weights == "interleaved" else None

    @staticmethod
    def axes_of(sizes: Any) -> tuple[int, ...]:
        """As `ProductDomain.axes_of`, with the columns of D: sizes have those of both
        projections.
        """
        return sizes.m, sizes.n // 2, sizes.k, sizes.m * (sizes.n // 2) * sizes.k

    @property
    def trusted_above(self) -> tuple[float, ...]:
        """As `ProductDomain.trusted_above`. Wide ones with each side near are near: tensor cores
        bind, and PyTorch's composition writes and reads both projections at any size.
        """
        *sides, work = ProductDomain(self.rows).trusted_above
        return (*sides, math.inf if self.rows == "wide" else work)

    @property
    def trusted_below(self) -> tuple[float, ...]:
        """As `ProductDomain.trusted_below`."""
        return ProductDomain(self.rows).trusted_below

    @property
    def donors(self) -> Iterator[Self]:
        """No related domains: either all were measured, or none."""
        yield from ()

    @property
    def recipients(self) -> Iterator[Self]:
        yield from ()

    @property
    def donor_kernels(self) -> int:
        return 0

    @property
    def max_kernels(self) -> int:
        return 4

    @property
    def vendors(self) -> frozenset[str]:
        """PyTorch's answer over interleaved weights, and its composition over concatenated ones.
        The latter takes as long: 0.98 to 1.02 at 16 of 18 problems on an H100, 1.07 and 1.19 at
        two.
        """
        return frozenset({"torch", INTERLEAVED})

    def problems(self, dtype: DType) -> tuple[SwigluProblem, ...]:
        return tuple(SwigluProblem(m, 4096, k, dtype=dtype) for m, k in _SMALL[self.rows][-1:])

    def label(self) -> str:
        return f"{_ROWS_TEXT[self.rows]}, gated"
