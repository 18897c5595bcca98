"""Domains of attention: head dimension, mask and phase, and the features compiled in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple, Self, get_args

from tuner.config import Config, Value
from tuner.families.attention_instances import INSTANCES, instance
from tuner.families.domain import MAX_SHORT, Domain
from tuner.families.fused_attention import paged, prompts, sparse
from tuner.families.fused_attention.grid import lazily
from tuner.families.fused_attention.packing import NAME
from tuner.families.fused_attention.paged import QUANTISED, SINKS, WINDOWED
from tuner.families.peers.sdpa import BACKENDS
from tuner.problem import E4M3, AttentionProblem, DType
from tuner.problem.attention_masks import BLOCK_SIZE

Mask = Literal["full", "causal", "windowed"]
Phase = Literal["prompt", "few", "one"]
"""Prompts; decoding with several queries, fewer than a tile's rows; decoding with one query."""
MaskOperand = Literal["", "bool", "additive"]
"""Kind of a mask operand; empty: none."""
#: Page size of the sample problems with paged caches; all kernels' copies divide it.
_PAGE = 64


#: Head dimension of few public models, D = 136 to 192: prompts and decoding were measured without a
#: mask only.
_RARE = 192


#: Clocks of a multiprocessor for a score by the instance, with rows and keys that tiles compute in
#: vain: the least of 1,600 times of kernels at 537 calls (an H200, 29 November 2026). Tiles of one
#: group took 1.2 times these at least, and those of a soft cap 1.25 times.
_CLOCKS = {64: 0.116, 96: 0.16, 128: 0.19, 192: 0.26, 256: 0.35}
_ALONE, _CAPPED = 1.2, 1.25


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
MASKED = INSTANCES
#: Head dimensions of public models with a soft cap, whose calls may have a mask also (Gemma 2).
CAPPED = (128, 256)
MAX_SHARED_SHORT = 64
"""As `MAX_SHORT`, where query heads may share a tile's rows, or for the longest packed sequence."""
MAX_CAPPED = 4
"""Most query heads to a KV head of public models with a soft cap."""
MAX_MASKED = 16
"""Packed heads of kernels under a mask of booleans, but for D = 64 and 128."""
PADDED = 8
"""Heads of a kernel that packs any number of query heads to a KV head: most that are not a power of
two are 3 to 7."""
_PADDING: Mapping[int, Mapping[str, Value]] = {
    64: {"blocks_per_sm": 2, "early_exp": 0, "q_in_registers": False, "stages_output": True},
    128: {"blocks_per_sm": 2, "early_exp": 0, "q_in_registers": True, "stages_output": True},
    256: {"blocks_per_sm": 1, "early_exp": 50, "q_in_registers": False},
}
"""Levers of the kernels that pad heads, by head dimension: those of kernels that pack four."""
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
    extrapolates = True

    @classmethod
    def holding(cls, problem: Any) -> Self | None:
        is_e4m3 = problem.dtype == E4M3
        if problem.value_dim or problem.is_wide or (is_e4m3 and not problem.is_paged):
            return None
        if problem.block_mask:
            width, has_softcap = instance(problem.head_dim), problem.softcap > 0
            tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // BLOCK_SIZE)
            # Under fewer queries FlexAttention splits the keys, which own kernels do not.
            is_served = problem.seqlen_q >= BLOCK_SIZE and tiles >= sparse.MIN_TILES.get(width, 1)
            return cls(width, "full", "prompt", has_softcap, is_sparse=True) if is_served else None
        operand: MaskOperand = "bool" if problem.mask else "additive" if problem.bias else ""
        if operand and problem.is_causal:
            return None
        mask: Mask = "causal" if problem.is_causal else "full"
        mask = "windowed" if problem.is_windowed else mask
        few: Phase = "one" if problem.seqlen_q == 1 else "few"
        is_paged = problem.is_paged
        has_softcap = problem.softcap > 0
        is_masked = problem.is_causal or problem.is_varlen
        if is_masked and not is_paged:  # one query has the kernels of several
            few = "few"
        is_shared = problem.is_varlen or problem.heads_q > problem.heads_kv
        most = MAX_SHARED_SHORT if is_shared else MAX_SHORT
        is_plain = mask != "windowed" and not (is_paged or operand or (has_softcap and is_masked))
        is_short = is_plain and problem.seqlen_q <= most
        return cls(
            instance(problem.head_dim),
            mask,
            few if problem.is_decoding or is_short else "prompt",
            has_softcap,
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

    def clocks(self, kernel: Config) -> float:
        if self.is_paged or self.is_sparse or not (self.is_varlen or self.has_softcap):
            return 0.0  # rates hold there for the lengths that they are of
        factor = _ALONE if kernel.get("warp_groups") == 1 else 1.0
        return _CLOCKS[self.head_dim] * factor * (_CAPPED if self.has_softcap else 1.0)

    def with_known(self, sizes: Any) -> Any:
        if not self.is_varlen:
            sizes = sizes._replace(sequences=0)
        if self.phase == "one":
            sizes = sizes._replace(seqlen_q=1)
        if self.mask == "causal" and not self.is_paged:
            return sizes._replace(is_masked=True, left=sizes.seqlen_q, right=0)
        return sizes._replace(is_masked=self.mask != "full")

    @property
    def donors(self) -> Iterator[Self]:
        """Related domains whose kernels may serve this one.

        Block-sparse masks use the domain of a mask that hides nothing. Paged caches use dense
        domains, nearest head dimension first: under a bottom-right mask few queries see nearly all
        keys. Calls that PyTorch composes of operations, or serves slowly, use kernels of other
        phases if their own phase was not measured. D = 136 to 192 use kernels of prompts without a
        mask.
        """
        if self.is_sparse:
            yield type(self)(self.head_dim, "full", "prompt")
            return
        if self.is_paged:
            mask: Mask = "causal" if self.phase == "prompt" else "full"
            for width in sorted(INSTANCES, key=lambda width: (abs(width - self.head_dim), width)):
                yield type(self)(width, mask, self.phase)
            return
        if self.head_dim == _RARE:
            if self.takes_packs or (self.operand == "bool" and self.phase != "prompt"):
                yield type(self)(_RARE, "full", self.phase)
            yield type(self)(_RARE, "full", "prompt")
            return
        if self._is_capped_and_masked:
            yield self._replace(operand="", phase="few")
        masks: tuple[Mask, ...] = (self.mask,)
        if self.mask == "windowed" or self.is_short_prompt:
            masks = ("causal", "full")
        is_slow_elsewhere = self.operand or self.has_softcap or self.mask == "windowed"
        phases = (self.phase, *(_OTHER_PHASES[self.phase] if is_slow_elsewhere else ()))
        if self._shares_kernels:
            phases = ("few", "one", "prompt")
        elif self.head_dim == 256 and self.operand and self.phase != "prompt":
            phases = ("prompt",)
        for phase, mask in product(phases, masks):
            plain = type(self)(self.head_dim, mask, phase)
            if plain != self and not plain.is_short_prompt:  # which has a donor itself
                yield plain

    @property
    def takes_packs(self) -> bool:
        """Decoding with a soft cap, where a KV head of public models has few query heads; and short
        prompts.
        """
        is_plain = self.mask == "full" and not self.operand
        is_capped = is_plain and self.has_softcap and self.phase != "prompt"
        return is_capped or self.is_short_prompt

    @property
    def is_short_prompt(self) -> bool:
        """Causal or packed prompts of few queries, by kernels that decode."""
        is_masked = self.mask == "causal" or (self.is_varlen and self.mask == "full")
        is_plain = not (self.is_paged or self.operand or self.has_softcap)
        return is_masked and is_plain and self.phase == "few"

    @property
    def decodes_pages(self) -> bool:
        """Decoding over a paged cache, of one query or few."""
        return self.is_paged and self.phase != "prompt"

    @property
    def _shares_kernels(self) -> bool:
        """Both phases of decoding have the same few kernels: public models call them seldom."""
        is_capped = self.has_softcap and self.mask == "full"
        if self.phase == "prompt" or self.operand == "additive":
            return False
        is_masked = self.operand == "bool"
        return (self.head_dim == 256 and (is_capped or is_masked)) or (is_capped and is_masked)

    @property
    def is_fitted(self) -> bool:
        """Not under a mask operand: its donors' kernels have few measurements of each there."""
        return not self.operand

    def takes(self, kernel: Config) -> bool:
        """False for kernels that pad heads where none was proven with the mask operand."""
        is_padded = not self.operand or self.has_softcap or self.head_dim in (64, 128)
        is_widest = self.operand == "bool" and kernel.get("packed_heads") == MAX_MASKED
        return is_padded or is_widest or "pads_heads" not in kernel.params

    @property
    def shares_phases(self) -> bool:
        """True if kernels of both phases of decoding serve it: under a mask of booleans, at head
        dimensions where both were measured.
        """
        is_decoding = self.phase != "prompt" and self.operand == "bool"
        return is_decoding and self.head_dim <= 128 and not self.is_composed

    @property
    def of_times(self) -> Iterator[Self]:
        """Both phases of decoding."""
        other: dict[Phase, Phase] = {"one": "few", "few": "one"}
        if self.phase in other:
            yield self._replace(phase=other[self.phase])

    @property
    def recipients(self) -> Iterator[Self]:
        """Decoding with D = 256 has no window: a cache keeps what it lets through."""
        if self.head_dim == _RARE or self.is_composed or self.is_short_prompt:  # others have them
            return
        windowed = self._replace(mask="windowed")
        if self.mask == "causal" or (self.phase != "prompt" and self.head_dim <= 128):
            yield windowed
            yield windowed._replace(has_softcap=True)
        yield self._replace(has_softcap=True)
        if self.phase == "prompt":
            yield self._replace(is_varlen=True)
        if self.phase == "few" and not self.has_softcap:
            yield from self._short_prompts()

    def _short_prompts(self) -> Iterator[Self]:
        """Recipients with `is_short_prompt`."""
        causal = self._replace(mask="causal")
        yield from (causal, causal._replace(is_varlen=True), self._replace(is_varlen=True))

    @classmethod
    def other_recipients(cls) -> Iterator[Self]:
        """Domains of paged caches, of mask operands and of block-sparse masks.

        Paged caches: one query of every instance, plain, with windows, sinks and of e4m3; few also
        of e4m3. Several queries have windows, and prompts e4m3, where public models have them, and
        sinks as in GPT-OSS. Mask operands, without a causal flag, have every phase.
        """
        kinds: tuple[tuple[Mask, Phase], ...]
        kinds = ("full", "one"), ("causal", "few"), ("causal", "prompt")
        for head_dim in INSTANCES:
            for mask, phase in kinds:
                paged = cls(head_dim, mask, phase, is_paged=True)
                yield paged
                if phase != "prompt" or head_dim in QUANTISED:
                    yield paged._replace(is_e4m3=True)
                if phase == "one" or head_dim in SINKS:
                    yield paged._replace(has_sinks=True)
                if phase == "one" or head_dim in WINDOWED:
                    yield paged._replace(mask="windowed")
                if head_dim in SINKS:
                    yield paged._replace(mask="windowed", has_sinks=True)
        operands = get_args(MaskOperand)[1:]
        for head_dim, phase, operand in product(MASKED, get_args(Phase), operands):
            yield cls(head_dim, "full", phase, operand=operand)
        for head_dim, phase in product(CAPPED, get_args(Phase)):
            yield cls(head_dim, "full", phase, has_softcap=True, operand="bool")
        yield cls(64, "windowed", "prompt", operand="bool")  # padding, as in ModernBERT
        yield from cls._rare()
        for head_dim in sparse.HEAD_DIMS:
            yield cls(head_dim, "full", "prompt", is_sparse=True)
            if head_dim != 96:
                yield cls(head_dim, "full", "prompt", has_softcap=True, is_sparse=True)

    @classmethod
    def _rare(cls) -> Iterator[Self]:
        """Domains of D = 136 to 192 beside paged caches and mask operands."""
        causal = cls(_RARE, "causal", "prompt")
        yield causal
        yield causal._replace(mask="windowed")
        for phase in get_args(Phase)[1:]:
            yield cls(_RARE, "full", phase, has_softcap=True)
        for domain in (causal, cls(_RARE, "full", "prompt")):
            yield domain._replace(has_softcap=True)
            yield domain._replace(is_varlen=True)
        yield from cls(_RARE, "full", "few")._short_prompts()

    @property
    def has_named_kernels(self) -> bool:
        """Its kernels are compiled for no dense call: the family names them."""
        return self.is_paged or self.is_sparse

    @property
    def named_kernels(self) -> tuple[Config, ...]:
        """The kernels that the family names for a domain with `has_named_kernels`."""
        if self.is_sparse:
            return sparse.kernels(self.head_dim)
        is_windowed = self.mask == "windowed"
        return paged.kernels(
            self.head_dim,
            self.phase,
            is_plain=not (is_windowed or self.has_sinks),
            has_sinks=self.has_sinks,
            is_e4m3=self.is_e4m3,
            is_windowed=is_windowed,
        )

    @property
    def further_kernels(self) -> Iterator[Config]:
        if not (self.has_named_kernels or self.operand):
            kinds = {"has_softcap": self.has_softcap, "is_varlen": self.is_varlen}
            yield from prompts.kernels(self.head_dim, self.mask, self.phase, **kinds)

    def splits(self, kernel: Config) -> bool:
        """True if one of `further_kernels` also splits the keys."""
        return self.phase == "few" and self.mask == "full" and not kernel["persistent"]

    def alike_kernels(self, kernel: Config) -> Iterator[Self]:
        """Domains whose kernels' rates hold for one of `further_kernels`, nearest first."""
        phase: Phase = "few" if kernel["warp_groups"] == 1 else "prompt"
        if self.mask != "full":
            yield type(self)(self.head_dim, "causal", phase)
        yield type(self)(self.head_dim, "full", phase)

    def further_rates(self, kernel: Config, rates: Mapping[str, float]) -> dict[str, float]:
        """Rates of one of `further_kernels`, from those of a kernel like it of another domain."""
        return prompts.rates(kernel, rates, self.mask)

    def donor_factor(self, kernel: Config) -> float:
        """Time of a kernel that the family names, over that by the rates of a dense one like it."""
        is_prompt = self.is_paged and self.phase == "prompt"
        return paged.AT_PROMPTS.get(int(kernel["warp_groups"]), 1.0) if is_prompt else 1.0

    def padded_kernels(self, problems: Sequence[AttentionProblem]) -> Iterator[Config]:
        """The kernel that packs any number of heads, where one is needed.

        A problem's number may be no power of two, as in public models of D = 64 and 128. Few
        kernels have a soft cap, so that one always takes part.
        """
        groups = {problem.heads_q // problem.heads_kv for problem in problems}
        is_odd = self.head_dim in (64, 128) and any(group & (group - 1) for group in groups)
        if self.has_softcap or is_odd:
            params: dict[str, Value] = {
                "warp_groups": 1,
                "tile_n": 64,
                "kv_stages": 2,
                "score_buffers": 1,
                "persistent": False,
                "packed_heads": MAX_CAPPED if self.has_softcap else PADDED,
                "pads_heads": True,
            }
            yield Config(NAME, {**params, **_PADDING[self.head_dim]})

    def lazy_kernels(self, kernels: Sequence[Config]) -> Iterator[Config]:
        """Kernels of prompts in a form that rescales lazily (`grid.lazily`).

        Args:
            kernels: compiled kernels, without parameters of a launch.
        """
        if self.phase == "prompt":
            problem = self.problems("bfloat16")[0]
            for config in kernels:
                if config.family == NAME and "rescale" not in config.params:
                    yield from lazily(problem, config)

    @property
    def is_composed(self) -> bool:
        return self.mask == "windowed" or self.has_softcap or self.is_varlen

    @property
    def donor_kernels(self) -> int | None:
        """Gemma 2's short prompts have a second kernel, of smaller tiles. So have causal prompts of
        D = 136 to 192.
        """
        causal = type(self)(_RARE, "causal", "prompt")
        if self in (causal, type(self)(256, "causal", "prompt", has_softcap=True)):
            return 2
        if self.is_short_prompt:
            return 1
        is_plain = self.operand and not self.is_composed
        return None if is_plain or self._is_capped_and_masked else 1

    @property
    def _is_capped_and_masked(self) -> bool:
        """Decoding at D = 256 with a soft cap and a mask of booleans has the kernels of the cap, in
        both phases those of several queries.
        """
        is_decoding = self.phase != "prompt" and self.mask == "full" and self.head_dim == 256
        return is_decoding and self.has_softcap and self.operand == "bool"

    @property
    def donors_split(self) -> bool:
        is_capped = self.has_softcap and self.phase != "prompt" and self.head_dim in CAPPED
        return is_capped or self._shares_kernels

    @property
    def max_kernels(self) -> int:
        return 8

    @property
    def has_donor_vendors(self) -> bool:
        """So cuDNN's kernels take additive masks, and plain calls of every D."""
        is_rival = self.operand == "additive" or (self.head_dim == _RARE and not self.operand)
        return (is_rival or self.is_short_prompt) and not self.is_composed

    @property
    def vendors(self) -> frozenset[str]:
        return frozenset(BACKENDS)

    def problems(self, dtype: DType) -> tuple[AttentionProblem, ...]:
        """Small problems of the domain; a windowed domain without a mask operand has two, one of
        them causal.

        A paged one has one: a single query needs no causal mask, several queries have one.
        """
        masks = (False, True) if self.mask == "windowed" else (self.mask == "causal",)
        masks = (False,) if self.operand else masks
        queries = 2048 if self.is_sparse else 256  # the tiles that every instance needs
        if self.is_paged:
            masks, queries = (self.phase != "one",), {"one": 1, "few": 8, "prompt": 256}[self.phase]
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
            for is_causal in masks
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
