"""Domains of a portfolio: sets of problems with equal compiled-in features and bottleneck.

Each domain has a few kernels, and time models that hold within it. fp16 and bf16 share a domain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

from tuner.config import Config
from tuner.families.fused_attention import sparse
from tuner.families.fused_attention.registers import INSTANCES, instance
from tuner.families.vendor.sdpa import BACKENDS
from tuner.families.vendor.swiglu import INTERLEAVED
from tuner.families.work import sizes_of
from tuner.problem import E4M3, AttentionProblem, DType, GemmProblem, Problem, SwigluProblem
from tuner.problem.attention import BLOCK_SIZE
from tuner.problem.gemm import Major

Mask = Literal["full", "causal", "windowed"]
Phase = Literal["prompt", "few", "one"]
"""Prompts; decoding with several queries, fewer than a tile's rows; decoding with one query."""
MaskOperand = Literal["", "bool", "additive"]
"""Kind of a mask operand; empty: none."""
#: Page size of the sample problems with paged caches; all kernels' copies divide it.
_PAGE = 64
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
MAX_SIZE_FACTOR = 2
"""Largest factor between a size and the measured ones at which a time model is trusted."""


class Domain(ABC):
    """Interface of the domains of all operations; each is also a `NamedTuple`."""

    __slots__ = ()
    op: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    """Names of `sizes`."""
    reaches_far: ClassVar[bool]
    """True if own kernels are also chosen far from measured sizes. PyTorch's attention is slower
    nearly everywhere, its products seldom."""

    @staticmethod
    def of(problem: Problem) -> AnyDomain | None:
        """The domain of a problem; None for problems without a portfolio."""
        kind = DOMAINS.get(problem.op)
        return None if kind is None else kind.holding(problem)

    @classmethod
    @abstractmethod
    def holding(cls, problem: Any) -> Self | None:
        """As `of`, for problems of the operation."""

    @staticmethod
    @abstractmethod
    def axes_of(sizes: Any) -> tuple[int, ...]:
        """The sizes that decide if a problem is near measured ones; may be traced.

        Args:
            sizes: sizes that work is counted from (`tuner.families.work`).
        """

    @property
    def reach(self) -> tuple[float, ...]:
        """Factors above the largest measured sizes up to which time models are trusted, by axis."""
        return (MAX_SIZE_FACTOR,) * len(self.axes)

    @property
    def fall(self) -> tuple[float, ...]:
        """Factors below the smallest measured sizes down to which they are trusted, by axis."""
        return (MAX_SIZE_FACTOR,) * len(self.axes)

    @classmethod
    def sizes(cls, problem: Problem) -> tuple[int, ...]:
        """`axes_of` a problem."""
        return cls.axes_of(sizes_of(problem))

    @staticmethod
    @abstractmethod
    def group(problem: Any) -> tuple[int, ...]:
        """Key of a problem's model: problems with equal keys are left out of a fit together."""

    def with_known(self, sizes: Any) -> Any:
        """Sizes to trace (`tuner.families.tape`), with constants for the values that all problems
        of the domain share.
        """
        return sizes

    @property
    @abstractmethod
    def kin(self) -> Iterator[Self]:
        """Measured domains whose kernels do nearly the same work, nearest first."""

    @property
    def of_times(self) -> Iterator[Self]:
        """Domains in which a kernel's times follow the same rates."""
        yield from ()

    @property
    def alike(self) -> Iterator[AnyDomain]:
        """Domains in which kernels take the same time at the same sizes, this one first."""
        yield self  # type: ignore[misc]

    def moved(self, problem: Any) -> Any:
        """A problem of one of the `alike` domains, as it is in this one."""
        return problem

    @property
    def without_activation(self) -> AnyDomain | None:
        """The domain of plain products of as many rows; None for other domains than of products
        with an activation.
        """
        return None

    @property
    @abstractmethod
    def varied(self) -> Iterator[Self]:
        """Served domains that have this one among their `kin`."""

    @classmethod
    def others(cls) -> Iterator[Self]:
        """Domains served by measured kin that are not among any domain's `varied`."""
        yield from ()

    @property
    @abstractmethod
    def kin_kernels(self) -> int | None:
        """Most kernels that an unmeasured domain takes from its kin.

        None: the best for each number of packed heads (1 included), with and without splits.
        """

    @property
    def splits_kin(self) -> bool:
        """True if a kernel that an unmeasured domain takes from its kin also splits the keys."""
        return False

    @property
    @abstractmethod
    def max_kernels(self) -> int:
        """Most compiled kernels of the domain, each of which is built and proven.

        One kernel with and without programmatic dependent launch is two candidates.
        """

    @property
    @abstractmethod
    def vendors(self) -> frozenset[str]:
        """Names, in the vendor family, of PyTorch's own kernels for such calls."""

    @property
    def has_rival_kin(self) -> bool:
        """PyTorch serves such calls by the kernels of its kin, whose time models hold there too.
        Else it has no such operator, and composes the call, which takes several times as long.
        """
        return True

    @abstractmethod
    def problems(self, dtype: DType) -> tuple[Problem, ...]:
        """A small problem for each kernel that a config needs in this domain and type."""

    def problem_for(self, config: Config) -> Problem:
        """A small problem that a config of the domain is legal for."""
        return self.problems("float16")[0]

    @abstractmethod
    def label(self) -> str:
        """Short text for people."""


class _Attention(NamedTuple):
    head_dim: int
    """Head dimension of the kernels: the smallest instance that holds D."""
    mask: Mask
    phase: Phase
    has_softcap: bool = False
    is_varlen: bool = False
    is_paged: bool = False
    """True for a paged cache; equal and different sequence lengths share the kernels."""
    has_sinks: bool = False
    operand: MaskOperand = ""
    is_sparse: bool = False
    """A block-sparse mask, of which the domain knows no more: ``full`` is its mask."""
    is_e4m3: bool = False
    """Elements of e4m3: of paged caches only."""


#: Instances whose calls may have a mask operand.
MASKED = (64, 96, 128, 256)
#: Head dimensions of public models with a soft cap, whose calls may have a mask also (Gemma 2).
CAPPED = (128, 256)
#: Phases whose kernels a mask as an operand may have where its own has none, nearest first.
_OTHER_PHASES: Mapping[Phase, tuple[Phase, ...]] = {
    "prompt": (),
    "few": ("one", "prompt"),
    "one": ("few", "prompt"),
}


class AttentionDomain(_Attention, Domain):
    """Head dimension, mask and phase."""

    __slots__ = ()
    op = AttentionProblem.op
    axes = ("rows", "keys")
    reaches_far = True

    @classmethod
    def holding(cls, problem: Any) -> Self | None:
        is_e4m3 = problem.dtype == E4M3
        if (is_e4m3 and not problem.is_paged) or problem.is_alibi:
            return None
        if problem.block_mask:
            width, has_softcap = instance(problem.head_dim), problem.softcap > 0
            tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // BLOCK_SIZE)
            # Under fewer queries FlexAttention splits the keys, which own kernels do not.
            is_served = problem.seqlen_q >= BLOCK_SIZE and tiles >= sparse.MIN_TILES.get(width, 1)
            return cls(width, "full", "prompt", has_softcap, is_sparse=True) if is_served else None
        operand: MaskOperand = "bool" if problem.mask else "additive" if problem.bias else ""
        if operand and problem.is_windowed and problem.is_causal:
            return None
        mask: Mask = "causal" if problem.is_causal else "full"
        few: Phase = "one" if problem.seqlen_q == 1 else "few"
        is_paged = problem.is_paged
        return cls(
            instance(problem.head_dim),
            "windowed" if problem.is_windowed else mask,
            few if problem.is_decoding else "prompt",
            problem.softcap > 0,
            problem.is_varlen and not is_paged,
            is_paged,
            problem.has_sinks,
            operand,
            is_e4m3=is_e4m3,
        )

    @staticmethod
    def axes_of(sizes: Any) -> tuple[int, ...]:
        """Rows of the scores (sequences times query heads times queries), and keys."""
        return sizes.heads * sizes.seqlen_q, sizes.seqlen_kv

    @staticmethod
    def group(problem: Any) -> tuple[int, ...]:
        return problem.heads_q, problem.heads_kv, problem.head_dim

    def with_known(self, sizes: Any) -> Any:
        if self.phase == "one":
            sizes = sizes._replace(seqlen_q=1)
        if self.mask == "causal" and not self.is_paged:
            return sizes._replace(is_masked=True, left=sizes.seqlen_q, right=0)
        return sizes._replace(is_masked=self.mask != "full")

    @property
    def kin(self) -> Iterator[Self]:
        """Related domains whose kernels may serve this one.

        Block-sparse masks use the domain of a mask that hides nothing. Paged caches use dense
        domains, nearest head dimension first: under a bottom-right mask few queries see nearly all
        keys. Calls that PyTorch composes of operations, or serves slowly, use kernels of other
        phases if their own phase was not measured.
        """
        if self.is_sparse:
            yield type(self)(self.head_dim, "full", "prompt")
            return
        if self.is_paged:
            mask: Mask = "causal" if self.phase == "prompt" else "full"
            for width in sorted(INSTANCES, key=lambda width: (abs(width - self.head_dim), width)):
                yield type(self)(width, mask, self.phase)
            return
        masks: tuple[Mask, ...] = ("causal", "full") if self.mask == "windowed" else (self.mask,)
        is_slow_elsewhere = self.operand or self.has_softcap or self.mask == "windowed"
        phases = (self.phase, *(_OTHER_PHASES[self.phase] if is_slow_elsewhere else ()))
        if self._shares_kernels:
            phases = ("few", "one", "prompt")
        elif self.head_dim == 256 and self.operand and self.phase != "prompt":
            phases = ("prompt",)
        for phase, mask in product(phases, masks):
            plain = type(self)(self.head_dim, mask, phase)
            if plain != self:
                yield plain

    @property
    def _shares_kernels(self) -> bool:
        """Both phases of decoding have the same few kernels: public models call them seldom."""
        is_capped = self.has_softcap and self.mask == "full"
        if self.phase == "prompt" or self.operand == "additive":
            return False
        is_masked = self.operand == "bool"
        return (self.head_dim == 256 and (is_capped or is_masked)) or (is_capped and is_masked)

    @property
    def of_times(self) -> Iterator[Self]:
        """Both phases of decoding."""
        other: dict[Phase, Phase] = {"one": "few", "few": "one"}
        if self.phase in other:
            yield self._replace(phase=other[self.phase])

    @property
    def varied(self) -> Iterator[Self]:
        """Public models have plain calls only of D = 136 to 192. Decoding with D = 256 has no
        window: a cache keeps what it lets through.
        """
        if self.head_dim == 192:
            return
        windowed = self._replace(mask="windowed")
        if self.mask == "causal" or (self.phase != "prompt" and self.head_dim <= 128):
            yield windowed
            yield windowed._replace(has_softcap=True)
        yield self._replace(has_softcap=True)
        if self.phase == "prompt":
            yield self._replace(is_varlen=True)

    @classmethod
    def others(cls) -> Iterator[Self]:
        """Domains of paged caches, of mask operands and of block-sparse masks.

        Paged caches: plain ones of every instance, of e4m3 for D = 64 and 128, windows where
        public models have them, and sinks as in GPT-OSS. Mask operands, without a causal flag, have
        every phase.
        """
        kinds: tuple[tuple[Mask, Phase], ...]
        kinds = ("full", "one"), ("causal", "few"), ("causal", "prompt")
        for head_dim in INSTANCES:
            for mask, phase in kinds:
                one = cls(head_dim, mask, phase, is_paged=True)
                yield one
                if head_dim in (64, 128):
                    yield one._replace(is_e4m3=True)
                if head_dim == 64:
                    yield one._replace(has_sinks=True)
                if head_dim in (64, 128, 256):
                    yield one._replace(mask="windowed", has_sinks=head_dim == 64)
        operands = get_args(MaskOperand)[1:]
        for head_dim, phase, operand in product(MASKED, get_args(Phase), operands):
            yield cls(head_dim, "full", phase, operand=operand)
        for head_dim, phase in product(CAPPED, get_args(Phase)):
            yield cls(head_dim, "full", phase, has_softcap=True, operand="bool")
        yield cls(64, "windowed", "prompt", operand="bool")  # padding, as in ModernBERT
        for head_dim in sparse.HEAD_DIMS:
            yield cls(head_dim, "full", "prompt", is_sparse=True)
            if head_dim != 96:
                yield cls(head_dim, "full", "prompt", has_softcap=True, is_sparse=True)

    @property
    def has_named_kernels(self) -> bool:
        """Its kernels are compiled for no dense call: the family names them."""
        return self.is_paged or self.is_sparse

    @property
    def is_composed(self) -> bool:
        """PyTorch has no operator for such calls, and composes them of several operations."""
        return self.mask == "windowed" or self.has_softcap or self.is_varlen

    @property
    def kin_kernels(self) -> int | None:
        """Gemma 2's short prompts have a second kernel, of smaller tiles."""
        if self == type(self)(256, "causal", "prompt", has_softcap=True):
            return 2
        return None if self.operand and not self.is_composed else 1

    @property
    def splits_kin(self) -> bool:
        is_capped = self.has_softcap and self.phase != "prompt" and self.head_dim in CAPPED
        return is_capped or self._shares_kernels

    @property
    def max_kernels(self) -> int:
        return 8

    @property
    def has_rival_kin(self) -> bool:
        """So cuDNN's kernels take additive masks."""
        return self.operand == "additive" and not self.is_composed

    @property
    def vendors(self) -> frozenset[str]:
        return frozenset(BACKENDS)

    def problems(self, dtype: DType) -> tuple[AttentionProblem, ...]:
        """Small problems of the domain; a windowed domain without a mask operand has two, one of
        them causal.

        A paged one has one: a single query needs no causal mask, several queries have one.
        """
        both = (False, True) if self.mask == "windowed" else (self.mask == "causal",)
        both = (False,) if self.operand else both
        queries = 2048 if self.is_sparse else 256  # the tiles that every instance needs
        if self.is_paged:
            both, queries = (self.phase != "one",), {"one": 1, "few": 8, "prompt": 256}[self.phase]
        return tuple(
            AttentionProblem(
                seqlen_q=queries,
                seqlen_kv=512,
                head_dim=self.head_dim,
                is_causal=is_causal,
                dtype=E4M3 if self.is_e4m3 else dtype,
                layout="bshd" if self.is_varlen or self.is_paged else "bhsd",
                window_left=64 if self.mask == "windowed" else -1,
                softcap=50.0 if self.has_softcap else 0.0,
                is_varlen=self.is_varlen,
                mask="1" if self.operand == "bool" else "",
                bias="1" if self.operand == "additive" else "",
                page_size=_PAGE if self.is_paged else 0,
                has_sinks=self.has_sinks,
                block_mask="1" if self.is_sparse else "",
            )
            for is_causal in both
        )

    def problem_for(self, config: Config) -> AttentionProblem:
        packed = int(config.get("packed_heads", 1))
        return replace(self.problems("float16")[0], heads_q=packed, heads_kv=1)

    def label(self) -> str:
        more = (", soft cap" if self.has_softcap else "") + (", packed" if self.is_varlen else "")
        more += (", paged" if self.is_paged else "") + (", sinks" if self.has_sinks else "")
        more += ", e4m3" if self.is_e4m3 else ""
        more += f", {self.operand} mask" if self.operand else ""
        phase = {"prompt": "prompts", "few": "few queries", "one": "one query"}[self.phase]
        mask = "block mask" if self.is_sparse else self.mask
        return f"D={self.head_dim}, {mask}{more}, {phase}"


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
    reaches_far = False

    @classmethod
    def holding(cls, problem: Any) -> Self | None:
        if problem.batch > 1 or problem.scales or problem.dtype != problem.dtype_d:
            return None
        if problem.has_residual:
            return None
        rows = rows_of(problem.m)
        is_tall = rows == "wide" and problem.n <= MAX_TALL_COLUMNS
        rows = "tall" if is_tall else rows
        layouts = problem.layout_a, problem.layout_b
        for gradient, lies in LAYOUTS.items():
            if layouts == lies and (not gradient or (rows == "wide" and not problem.epilogue)):
                return cls(rows, problem.epilogue, gradient)
        return None

    @staticmethod
    def axes_of(sizes: Any) -> tuple[int, ...]:
        """Rows, columns and depth, and their product: kernels that were timed at large products
        only are not trusted where all three are small.
        """
        return sizes.m, sizes.n, sizes.k, sizes.m * sizes.n * sizes.k

    @property
    def reach(self) -> tuple[float, ...]:
        """At up to 16 rows, no more rows than measured: each block keeps all rows of A, and the
        time grows faster than the bytes.
        """
        rows = 1.0 if self.rows == "few" else MAX_SIZE_FACTOR
        return (rows, *(MAX_SIZE_FACTOR,) * (len(self.axes) - 1))

    @property
    def fall(self) -> tuple[float, ...]:
        """No smaller products than measured: seven of them, by a kernel that was timed at larger
        ones, had 0.725 to 0.890 of cuBLAS's speed
        (``scripts/benchmarks/evidence/population-h100.jsonl.gz``).
        """
        return (*(MAX_SIZE_FACTOR,) * (len(self.axes) - 1), 1.0)

    @staticmethod
    def group(problem: Any) -> tuple[int, ...]:
        """A layer's widths."""
        return problem.n, problem.k

    @property
    def kin(self) -> Iterator[Self]:
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

    def moved(self, problem: Any) -> Any:
        return replace(problem, epilogue=self.epilogue)

    @property
    def without_activation(self) -> Self | None:
        return self._replace(epilogue="") if _is_activated(self.epilogue) else None

    @property
    def varied(self) -> Iterator[Self]:
        if not (self.epilogue or self.gradient):
            yield self._replace(epilogue="bias")

    @property
    def kin_kernels(self) -> int:
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
    reaches_far = False
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
    def reach(self) -> tuple[float, ...]:
        """As `ProductDomain.reach`."""
        return ProductDomain(self.rows).reach

    @property
    def fall(self) -> tuple[float, ...]:
        """As `ProductDomain.fall`."""
        return ProductDomain(self.rows).fall

    @property
    def kin(self) -> Iterator[Self]:
        """No related domains: either all were measured, or none."""
        yield from ()

    @property
    def varied(self) -> Iterator[Self]:
        yield from ()

    @property
    def kin_kernels(self) -> int:
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


AnyDomain = AttentionDomain | ProductDomain | GatedDomain
DOMAINS: Mapping[str, type[AnyDomain]] = {
    kind.op: kind for kind in (AttentionDomain, ProductDomain, GatedDomain)
}
"""The kind of domain of each operation that has portfolios."""
