"""Attention problem: `AttentionProblem`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, get_args

from tuner.errors import ConfigError
from tuner.problem.attention_masks import (
    BLOCK_AXES,
    BLOCK_SIZE,
    LAYOUTS,
    PAGE_MULTIPLE,
    Axes,
    Cache,
    MaskedAttention,
)
from tuner.problem.base import (
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
    contiguous,
)

MAX_HEAD_DIM = 512
"""Largest head dimension of fp16 and bf16: two warp groups share an output of 64 rows."""
NARROW_HEAD_DIM = 256
"""The same of e4m3 and of values of another width: one warp group holds 64 rows."""
LATENT_DIM, LATENT_VALUE_DIM = 576, 512
"""Columns of a row of DeepSeek's latent cache, and of its values."""
LATENT_BLOCK = 128
"""Columns that share a factor in a row of ``e4m3_blocks``."""
LATENT_BLOCKS_BYTES = 656
"""Bytes of a row of ``e4m3_blocks``: 512 of e4m3, four factors, and 64 columns of bf16."""
MAX_LISTED_HEADS = 1024
"""Maximum heads whose divisors a message lists; finding those of 2^31 - 1 takes minutes."""


@dataclass(frozen=True)
class AttentionProblem(MaskedAttention):
    """softmax(scale * Q K^T + mask) V; Q is (B, H, SQ, D), K and V are (B, HKV, SKV, D).

    The causal mask is PyTorch's SDPA's: query i sees keys 0..i (top-left). The default scale is
    1/sqrt(D); it is a run-time argument and no part of the problem.

    With `dtype` e4m3 Q, K and V are quantised: their elements times fp32 factors are their values.
    The factors are `descale_q` (B, H), `descale_k` and `descale_v` (B, HKV). The output is bf16. D
    must be a multiple of 16, the bytes of TMA's pitch. With a paged cache the factors are (H,) and
    (HKV,): sequences share pages.

    A sliding window is FlashAttention's ``window_size=(left, right)``, laid along the same
    diagonal: query i sees keys i - left..i + right, its own among them, and -1 means all.
    ``window=W`` sets both sides, ``left=`` and ``right=`` one. Each mask has one form. Under a
    causal mask the right side is -1; ``right=0`` alone is causal; a side that cuts nothing off is
    -1. A query that sees no key has zeros for its output.

    A soft cap replaces each scaled score s by ``softcap * tanh(s / softcap)``, before the mask; 0
    is none. Neither comes with e4m3.

    An additive bias is SDPA's float `attn_mask`: `bias`, of Q's type, is added to the scaled scores
    behind the soft cap. -inf hides a key. As an operand it is (B or 1, H
    or 1, SQ or 1, SKV), contiguous.

    - ``bias=1``: one (SQ, SKV) for everything, a mask by position
    - ``b``: one for each sequence
    - ``h``: one for each head, as relative positions
    - ``bh``: one for each of both, as pair representations
    - ``k`` behind it: all queries share one row, so ``bk`` is padding

    A boolean one is `mask`, with the same axes: a query sees the keys at which it is true. A query
    that sees no key has zeros for its output, as with SDPA's math, flash and efficient kernels. A
    problem has one of both.

    Neither comes with e4m3 or varlen.

    With ``varlen=1`` the B sequences differ in length, and lie one after the other in packed
    tensors. SQ and SKV are the longest lengths. Query and out are (total_q, H, D), key and value
    (total_kv, HKV, D), in a layout called bshd. int32 `cu_seqlens_q` and `cu_seqlens_kv` (B + 1)
    hold each sequence's first row, and the last one's end.

    A causal mask is top-left in each sequence. It is tuned and measured on `lengths_q` and
    `lengths_kv`. It excludes windows, soft caps, biases, masks and e4m3.

    With ``page_size=P`` keys and values lie in a cache of pages, (pages, HKV, P, D) with any
    strides. int32 `page_table` (B, ceil(SKV / P)) names each sequence's pages in order, and int32
    `seqused_k` (B) holds its keys. Query and out are packed as with ``varlen=1``, with
    `cu_seqlens_q`. Masks are bottom-right: the last query of a sequence is at its last key, as in
    serving engines.

    With ``varlen=1`` lengths differ as there. ``sinks=1``: fp32 `sinks` (H,), a logit for each head
    that takes part in the softmax and has no value. Windows and soft caps may come with it, bias
    and mask not. Nor may windows, soft caps or sinks come with e4m3. A query that sees no key
    has zeros for its output.

    A block-sparse mask is FlexAttention's `BlockMask` as tables over blocks of 128 queries and 128
    keys. ``block_mask=1`` is one for all; ``b``, ``h`` and ``bh`` are as of a bias. With QB and KB
    blocks of queries and keys it has three int32 operands. B and H are 1 along axes that the mask
    lacks.

    - `block_counts` (B, H, QB, 2): blocks of keys that a block of queries sees whole, and in part
    - `block_indices` (B, H, QB, KB): numbers of the whole ones, then of the others
    - `block_bits` (B, H, QB, KB, 128, 4): 128 bits a query, set where it sees a key

    Word q of the four holds the keys 8 j + 2 q and 8 j + 2 q + 1 of the block as its bits 2 j and
    2 j + 1. A query that sees no key has zeros for its output. A soft cap may come with it, other
    masks, e4m3, varlen and pages not. It is timed on `block_prefix` keys seen by all, and a causal
    mask that ends at the last query and key.

    With ``DV=N`` values and output have N columns. ``D=576,DV=512`` is multi-head latent attention
    with the up-projections absorbed. It has one KV head. The values are the first 512 columns of
    the keys, and no operand.

    A latent cache of bf16 queries may be quantised. ``cache=e4m3`` has rows of 576 columns of e4m3,
    and `descale_k` (1,), an fp32 factor of all of them. ``cache=e4m3_blocks`` has rows of 656
    bytes: 512 columns of e4m3, an fp32 factor of each 128 of them, and 64 rotary columns of bf16.
    """

    op: ClassVar[str] = "attention"
    keys: ClassVar[Mapping[str, str]] = {
        "B": "batch",
        "H": "heads_q",
        "HKV": "heads_kv",
        "S": "seqlen_q+seqlen_kv",
        "SQ": "seqlen_q",
        "SKV": "seqlen_kv",
        "D": "head_dim",
        "DV": "value_dim",
        "cache": "cache",
        "causal": "is_causal",
        "window": "window_left+window_right",
        "left": "window_left",
        "right": "window_right",
        "softcap": "softcap",
        "bias": "bias",
        "mask": "mask",
        "varlen": "is_varlen",
        "page_size": "page_size",
        "sinks": "has_sinks",
        "block_mask": "block_mask",
        "dtype": "dtype",
        "layout": "layout",
    }
    meanings: ClassVar[Mapping[str, Meaning]] = {
        "B": Meaning("sequences of the batch", "sequences"),
        "H": Meaning("query heads", "heads"),
        "HKV": Meaning("key and value heads, a divisor of H", "heads", "as H"),
        "S": Meaning("queries and keys of a sequence", "tokens"),
        "SQ": Meaning("queries of a sequence", "tokens"),
        "SKV": Meaning("keys of a sequence", "tokens"),
        "D": Meaning(f"size of a head, a multiple of 8 to {MAX_HEAD_DIM}", "elements"),
        "DV": Meaning("size of a value and of an output", "elements", "as D"),
        "cache": Meaning("form of a quantised latent cache: e4m3 or e4m3_blocks"),
        "causal": Meaning("1: query i sees keys 0 to i"),
        "window": Meaning("keys that a query sees on each side; -1: all", "tokens"),
        "left": Meaning("keys that a query sees before its own; -1: all", "tokens"),
        "right": Meaning("keys that a query sees behind its own; -1: all", "tokens"),
        "softcap": Meaning("bound of the scaled scores, by tanh; 0: none"),
        "bias": Meaning("axes of an additive bias: 1 (neither), b, h or bh, k for one row"),
        "mask": Meaning("axes of a boolean mask, as of a bias"),
        "varlen": Meaning("1: packed sequences of several lengths, S the longest"),
        "page_size": Meaning(
            f"keys of a page of a paged cache, a multiple of {PAGE_MULTIPLE}; 0: none", "tokens"
        ),
        "sinks": Meaning("1: a learned logit of each head in the softmax; paged caches only"),
        "block_mask": Meaning("axes of a block-sparse mask: 1 (neither), b, h or bh"),
        "dtype": Meaning("type of Q, K and V: fp16, bf16 or e4m3"),
        "layout": Meaning(f"order of the dimensions in memory: {', '.join(LAYOUTS)}"),
    }
    required: ClassVar[tuple[str, ...]] = ("S", "D")
    retired = dict.fromkeys(
        ("alibi", "is_alibi"), "no kernel has ALiBi (allowed: bias=h, a bias of each head)"
    )
    omitted: ClassVar[Mapping[str, Any]] = {
        "window_left": -1,
        "window_right": -1,
        "softcap": 0.0,
        "is_varlen": False,
        "bias": "",
        "mask": "",
        "page_size": 0,
        "has_sinks": False,
        "block_mask": "",
        "value_dim": 0,
        "cache": "",
    }

    def __post_init__(self) -> None:
        if self.heads_kv == 0:
            object.__setattr__(self, "heads_kv", self.heads_q)
        check_extent("B", self.batch)
        check_extent("H", self.heads_q)
        check_extent("HKV", self.heads_kv)
        check_extent("SQ" if self.seqlen_q != self.seqlen_kv else "S", self.seqlen_q)
        check_extent("SKV", self.seqlen_kv)
        check_extent("D", self.head_dim)
        self._check_values()
        if self.head_dim % 8 or (self.head_dim > MAX_HEAD_DIM and not self.is_latent):
            raise ConfigError(
                f"D={self.head_dim} has no tuned kernel (allowed: multiples of 8 to "
                f"{MAX_HEAD_DIM}, {LATENT_DIM} with DV={LATENT_VALUE_DIM})"
            )
        if self.dtype == E4M3 and (self.head_dim % 16 or self.is_wide):
            raise ConfigError(
                f"D={self.head_dim} has no e4m3 kernel "
                f"(allowed: multiples of 16 to {NARROW_HEAD_DIM})"
            )
        if self.heads_q % self.heads_kv:
            raise ConfigError(
                f"H={self.heads_q},HKV={self.heads_kv}: HKV must divide H "
                f"(allowed: {_divisors(self.heads_q)})"
            )
        check_choice("dtype", self.dtype, ("float16", "bfloat16", E4M3))
        check_choice("layout", self.layout, LAYOUTS)
        check_choice("cache", self.cache, get_args(Cache))
        if self.cache and not (self.is_latent and self.is_paged and self.dtype == "bfloat16"):
            raise ConfigError(
                f"cache={self.cache} is for pages of D={LATENT_DIM},DV={LATENT_VALUE_DIM} and bf16 "
                "queries"
            )
        check_extent(
            "left" if self.window_left != self.window_right else "window", self.window_left, -1
        )
        check_extent("right", self.window_right, -1)
        if not 0 <= self.softcap < math.inf:
            raise ConfigError(f"softcap={self.softcap} is out of range (allowed: 0, none, or more)")
        object.__setattr__(self, "softcap", float(self.softcap))
        self._reduce_axes("bias")
        self._reduce_axes("mask")
        if self.bias and self.mask:
            raise ConfigError("mask beside bias is not known (allowed: one of both)")
        self._reduce_axes("block_mask", BLOCK_AXES)
        check_extent("page_size", self.page_size, 0)
        self._reduce_window()
        if self.block_mask and (self.is_causal or self.is_windowed or self.mask_operand):
            raise ConfigError("block_mask beside another mask is not known (allowed: one of both)")
        allowed = ("variable lengths", "paged cache") if self.is_paged else ()
        if self.dtype == E4M3 and (absent := [f for f in self._features if f not in allowed]):
            text = " or ".join(absent)
            raise ConfigError(f"dtype=e4m3 has no {text} (allowed: fp16 and bf16 with it)")
        if self.is_paged:
            self._check_paged()
        elif self.has_sinks:
            raise ConfigError("sinks=1 is for paged caches (allowed: with page_size)")
        elif self.is_varlen:
            self._check_varlen()

    def _check_values(self) -> None:
        """Check and normalise the width of values."""
        check_extent("DV", self.value_dim, 0)
        if self.value_dim == self.head_dim:
            object.__setattr__(self, "value_dim", 0)
        is_wide = max(self.value_dim, self.head_dim) > NARROW_HEAD_DIM and not self.is_latent
        if self.value_dim % 8 or (self.value_dim and is_wide):
            raise ConfigError(
                f"DV={self.value_dim} has no tuned kernel (allowed: multiples of 8 to "
                f"{NARROW_HEAD_DIM} with D to {NARROW_HEAD_DIM}, {LATENT_VALUE_DIM} with "
                f"D={LATENT_DIM})"
            )
        if self.is_latent and self.heads_kv != 1:
            raise ConfigError(f"HKV={self.heads_kv} with D={LATENT_DIM} (allowed: 1)")

    def _check_paged(self) -> None:
        if self.page_size % PAGE_MULTIPLE:
            raise ConfigError(
                f"page_size={self.page_size} has no kernel (allowed: multiples of {PAGE_MULTIPLE})"
            )
        check_extent("B", self.batch, maximum=MAX_PARTS)
        if self.modifiers:
            raise ConfigError(f"page_size has no {self.modifiers} (allowed: neither)")
        if self.layout == "bshd_bhsd":
            raise ConfigError(f"layout={self.layout} is not for page_size (allowed: bhsd, bshd)")
        if self.is_latent:  # of one head both are the same
            object.__setattr__(self, "layout", "bhsd")

    def _check_varlen(self) -> None:
        check_extent("B", self.batch, maximum=MAX_PARTS)
        if self.is_windowed or self.softcap:
            raise ConfigError("varlen=1 has no sliding window and no soft cap (allowed: neither)")
        if self.modifiers:
            raise ConfigError(f"varlen=1 has no {self.modifiers} (allowed: neither)")
        if self.layout == "bshd_bhsd":
            raise ConfigError(f"layout={self.layout} is not for varlen=1 (allowed: bshd)")
        object.__setattr__(self, "layout", "bshd")

    def _reduce_axes(self, name: str, known: tuple[Axes, ...] = get_args(Axes)[1:]) -> None:
        """Normalise biases and masks: remove axes of one element."""
        axes: str = getattr(self, name)
        axes = "" if axes == "0" else axes
        check_choice(name, axes or "0", ("0", *known))
        if axes:
            axes = axes.replace("b", "" if self.batch == 1 else "b")
            axes = axes.replace("h", "" if self.heads_q == 1 else "h")
            axes = axes.replace("k", "" if self.seqlen_q == 1 else "k") or "1"
        object.__setattr__(self, name, axes)

    def _reduce_window(self) -> None:
        """Normalise windows, so that equal masks have equal fields."""
        left, right, is_causal = self.window_left, self.window_right, self.is_causal
        last, behind = self.seqlen_q - 1, self.seqlen_kv - 1
        if self.is_paged:  # masks are bottom-right
            last, behind = behind, last
        if left >= last:  # the last query sees key 0
            left = -1
        if right == 0:
            is_causal = True
        if is_causal or right >= behind:  # the first query sees the last key
            right = -1
        object.__setattr__(self, "window_left", left)
        object.__setattr__(self, "window_right", right)
        object.__setattr__(self, "is_causal", is_causal)

    def windowed(self, left: int, right: int) -> Self:
        """The problem with a window compiled in, even where it hides none of so few keys."""
        kept = replace(self)
        object.__setattr__(kept, "window_left", left)
        object.__setattr__(kept, "window_right", -1 if self.is_causal else right)
        return kept

    @property
    def extras(self) -> str:
        """Text naming the features beyond plain full or causal attention; empty without any."""
        return " or ".join(self._features)

    @property
    def _features(self) -> list[str]:
        parts = (
            ("sliding window", self.is_windowed),
            ("soft cap", self.softcap > 0),
            ("variable lengths", self.is_varlen),
            ("paged cache", self.is_paged),
            ("sinks", self.has_sinks),
            ("values of another width", self.value_dim > 0),
            (self.modifiers, bool(self.modifiers)),
        )
        return [name for name, is_on in parts if is_on]

    @property
    def is_wide(self) -> bool:
        """True if the head dimension is above `NARROW_HEAD_DIM`."""
        return self.head_dim > NARROW_HEAD_DIM

    @property
    def is_latent(self) -> bool:
        """True if the values are the first columns of the keys."""
        return (self.head_dim, self.value_dim) == (LATENT_DIM, LATENT_VALUE_DIM)

    @property
    def modifiers(self) -> str:
        """Text naming the extras that change single scores; empty without any."""
        parts = (
            ("additive bias", bool(self.bias)),
            ("boolean mask", bool(self.mask)),
            ("block-sparse mask", bool(self.block_mask)),
        )
        return " or ".join(name for name, is_on in parts if is_on)

    @property
    def evened(self) -> AttentionProblem:
        """Problem with as many sequences of the mean length, for estimates; itself if all are
        equal.
        """
        if not self.is_varlen:
            return self
        queries, keys = (-(-total // self.batch) for total in (self.total_q, self.total_kv))
        return replace(self, seqlen_q=queries, seqlen_kv=keys, is_varlen=False)

    @property
    def sequences(self) -> tuple[AttentionProblem, ...]:
        """Sequences of a problem of variable lengths, each as a problem, in order."""
        return tuple(
            replace(self, batch=1, seqlen_q=queries, seqlen_kv=keys, is_varlen=False)
            for queries, keys in zip(self.lengths_q, self.lengths_kv, strict=True)
        )

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Self:
        if "HKV" in values and str(values["HKV"]).strip() == "0":
            raise ConfigError(f"HKV=0 is out of range (allowed: 1 to {MAX_EXTENT})")
        return super().from_keys(values)

    def label(self) -> str:
        heads = f"H={self.heads_q}" + (
            "" if self.heads_kv == self.heads_q else f",HKV={self.heads_kv}"
        )
        length = (
            f"S={self.seqlen_q}"
            if self.seqlen_q == self.seqlen_kv
            else f"SQ={self.seqlen_q},SKV={self.seqlen_kv}"
        )
        tail = ",varlen=1" if self.is_varlen else ""
        tail += (",causal=1" if self.is_causal else "") + self._window_label()
        tail += f",softcap={_exact(self.softcap)}" if self.softcap else ""
        tail += f",bias={self.bias}" if self.bias else ""
        tail += f",mask={self.mask}" if self.mask else ""
        tail += f",block_mask={self.block_mask}" if self.block_mask else ""
        tail += f",dtype={DTYPE_SHORT[self.dtype]}"
        tail += f",page_size={self.page_size}" if self.is_paged else ""
        tail += ",sinks=1" if self.has_sinks else ""
        is_packed = self.is_varlen and not self.is_paged
        is_implied = is_packed or self.layout == "bhsd"
        tail += "" if is_implied else f",layout={self.layout}"
        width = f"D={self.head_dim}" + (f",DV={self.value_dim}" if self.value_dim else "")
        width += f",cache={self.cache}" if self.cache else ""
        return f"B={self.batch},{heads},{length},{width}{tail}"

    def _window_label(self) -> str:
        left, right = self.window_left, self.window_right
        if left >= 0 and (self.is_causal or left == right):
            return f",window={left}"
        return (f",left={left}" if left >= 0 else "") + (f",right={right}" if right >= 0 else "")

    @property
    def flops(self) -> int:
        if self.is_varlen:
            return sum(sequence.flops for sequence in self.sequences)
        if self.is_windowed or self.block_mask or (self.is_paged and self.is_causal):
            return 2 * self.batch * self.heads_q * self.widths * self.pairs
        full = 2 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv * self.widths
        return full // 2 if self.is_causal else full

    @property
    def widths(self) -> int:
        """Columns of both products."""
        return self.head_dim + self.value_width

    @property
    def operands(self) -> tuple[Operand, ...]:
        *inputs, out = self.matrices
        if self.is_latent:
            del inputs[2]
        if self.is_paged:
            return (*inputs, *self._tables(), out)
        if self.is_varlen:
            return (*inputs, *self._starts(), out)
        if self.dtype == E4M3:
            return (*inputs, *self._descales(), out)
        return (*inputs, *self._modifiers(), out)

    def _starts(self) -> Iterator[Operand]:
        for name in ("q", "kv"):
            yield Operand(f"cu_seqlens_{name}", (self.batch + 1,), (1,), "int32")

    def _tables(self) -> Iterator[Operand]:
        most = max(self.pages)
        yield Operand("page_table", (self.batch, most), (most, 1), "int32")
        yield Operand("seqused_k", (self.batch,), (1,), "int32")
        yield Operand("cu_seqlens_q", (self.batch + 1,), (1,), "int32")
        if self.has_sinks:
            yield Operand("sinks", (self.heads_q,), (1,), "float32")
        if self.dtype == E4M3:
            yield from self._descales()
        if self.cache == "e4m3":
            yield Operand("descale_k", (1,), (1,), "float32")

    def _descales(self) -> Iterator[Operand]:
        of_batch = () if self.is_paged else (self.batch,)
        for name, heads in (("q", self.heads_q), ("k", self.heads_kv), ("v", self.heads_kv)):
            shape = (*of_batch, heads)
            yield Operand(f"descale_{name}", shape, contiguous(shape), "float32")

    def _modifiers(self) -> Iterator[Operand]:
        if (operand := self.mask_operand) is not None:
            yield operand
        if self.block_mask:
            *rows, columns = self.block_shape
            for name, tail in (
                ("block_counts", (2,)),
                ("block_indices", (columns,)),
                ("block_bits", (columns, BLOCK_SIZE, BLOCK_SIZE // 32)),
            ):
                shape = (*rows, *tail)
                yield Operand(name, shape, contiguous(shape), "int32")

    @property
    def mask_operand(self) -> Operand | None:
        """Operand of the additive bias or the boolean mask; None without either."""
        axes = self.bias or self.mask
        if not axes:
            return None
        batch = self.batch if "b" in axes else 1
        heads = self.heads_q if "h" in axes else 1
        rows, row = 1 if "k" in axes else self.seqlen_q, self.seqlen_kv
        strides = (heads * rows * row, rows * row, row, 1)
        dtype: DType = self.dtype if self.bias else "bool"
        return Operand("bias" if self.bias else "mask", (batch, heads, rows, row), strides, dtype)

    @property
    def mask_strides(self) -> tuple[int, int, int]:
        """Batch, head and query strides of the bias or mask in elements; 0 along an axis that it
        lacks, and without either. A block-sparse mask has the strides of its dense form.
        """
        if self.block_mask:
            of_batch, of_heads, *_ = self.block_shape
            row = self.seqlen_q * self.seqlen_kv
            return of_heads * row * (of_batch > 1), row * (of_heads > 1), self.seqlen_kv
        operand = self.mask_operand
        if operand is None:
            return 0, 0, 0
        axes = self.bias or self.mask
        batch, head, query, _ = operand.strides
        has_rows = self.seqlen_q > 1 and "k" not in axes
        return batch * ("b" in axes), head * ("h" in axes), query * has_rows

    @property
    def matrices(self) -> tuple[Operand, Operand, Operand, Operand]:
        """Operands query, key, value and out, all (B, H, S, D) or of a value's width. Packed
        sequences have B = 1. In a paged cache B counts the pages. Latent values lie in the keys.
        """
        parts_q, rows_q = self.batch, self.seqlen_q
        parts_kv, rows_kv = self.batch, self.seqlen_kv
        of_queries, _, of_keys = self.layout.partition("_")
        if self.is_packed:
            parts_q, rows_q, of_keys, of_queries = 1, self.total_q, of_queries, "bshd"
        if self.is_paged:
            parts_kv, rows_kv = sum(self.pages), self.page_size
        elif self.is_varlen:
            parts_kv, rows_kv = 1, self.total_kv

        def tensor(name: str, heads: int, batch: int, seqlen: int, layout: str) -> Operand:
            is_output, row = name == "out", self.head_dim
            width = self.value_width if name in ("value", "out") else row
            if name == "key" and self.cache == "e4m3_blocks":
                width = row = LATENT_BLOCKS_BYTES
            row = width if is_output or not self.is_latent else row
            shape = (batch, heads, seqlen, width)
            if layout == "bhsd":
                strides = (heads * seqlen * row, seqlen * row, row, 1)
            else:
                strides = (seqlen * heads * row, row, heads * row, 1)
            dtype: DType = "bfloat16" if is_output and self.dtype == E4M3 else self.dtype
            dtype = E4M3 if name == "key" and self.cache else dtype
            return Operand(name, shape, strides, dtype, is_output)

        return (
            tensor("query", self.heads_q, parts_q, rows_q, of_queries),
            tensor("key", self.heads_kv, parts_kv, rows_kv, of_keys or of_queries),
            tensor("value", self.heads_kv, parts_kv, rows_kv, of_keys or of_queries),
            tensor("out", self.heads_q, parts_q, rows_q, of_queries),
        )


def rounded(size: int) -> int:
    """Size rounded up to a power of two. Calls over packed sequences are looked up by it, so that
    few kinds of calls occur.
    """
    return 1 << (max(1, size) - 1).bit_length()


def _divisors(n: int) -> str:
    """Text listing the divisors of a number of heads, up to `MAX_LISTED_HEADS`."""
    if n > MAX_LISTED_HEADS:
        return "a divisor of H"
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _exact(value: float) -> str:
    """Shortest text that parses to this number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def as_attention(problem: Problem) -> AttentionProblem:
    """The same problem, which must be attention.

    Raises:
        TypeError: when it is of another operation.
    """
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"expected an attention problem, got {problem.op}")
    return problem
