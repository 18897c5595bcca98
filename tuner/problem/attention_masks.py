"""Sizes and masks of an attention problem, and what follows from them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from tuner.problem.base import DType, Problem

Layout = Literal["bhsd", "bshd", "bshd_bhsd"]
"""Order of the dimensions in memory. ``bshd_bhsd``: queries and output bshd, keys and values bhsd,
as in Transformers' models that fill a cache.
"""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Axes = Literal["", "1", "b", "h", "bh", "k", "bk", "hk", "bhk"]
"""Axes of a mask operand beside the keys. ``b`` and ``h``: it has B and H; 1: neither; ``k``: one
row for all queries."""
PAGE_MULTIPLE = 16
"""Granularity of a page's size in keys: the rows of the smallest copy to shared memory."""
BLOCK_SIZE = 128
"""Queries and keys of a block in a block-sparse mask: FlexAttention's default."""
Cache = Literal["", "e4m3", "e4m3_blocks"]
"""Form of a latent cache: rows of the queries' type, of e4m3 with one factor, or in the layout of
FlashMLA and vLLM's ``fp8_ds_mla``."""
BLOCK_AXES: tuple[Axes, ...] = ("1", "b", "h", "bh")
"""Axes that a block-sparse mask may have."""
#: Seed of the order of sequences of different lengths.
_LENGTHS_SEED = 0


@dataclass(frozen=True)
class MaskedAttention(Problem):
    """Fields of `AttentionProblem`, with visible keys and lengths of sequences."""

    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    batch: int = 1
    heads_q: int = 16
    heads_kv: int = 0
    is_causal: bool = False
    dtype: DType = "float16"
    layout: Layout = "bhsd"
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    is_varlen: bool = False
    bias: Axes = ""
    mask: Axes = ""
    page_size: int = 0
    has_sinks: bool = False
    block_mask: Axes = ""
    value_dim: int = 0
    cache: Cache = ""

    @property
    def value_width(self) -> int:
        """Columns of a value and of the output."""
        return self.value_dim or self.head_dim

    @property
    def is_paged(self) -> bool:
        """True if keys and values are in a paged cache."""
        return self.page_size > 0

    @property
    def is_packed(self) -> bool:
        """True if queries of all sequences are packed."""
        return self.is_varlen or self.is_paged

    @property
    def position(self) -> int:
        """Key at which the mask's diagonal starts, that of the first query."""
        return self.seqlen_kv - self.seqlen_q if self.is_paged else 0

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each sequence with which a paged problem is measured."""
        return tuple(-(-length // self.page_size) for length in self.lengths_kv)

    @property
    def is_windowed(self) -> bool:
        """True if a sliding window hides keys that the causal mask does not."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def is_decoding(self) -> bool:
        """True for fewer queries than a tile has rows, against a cache of keys, which is then in
        memory and not in the L2.
        """
        return self.seqlen_q < 64 and self.seqlen_kv > self.seqlen_q

    @property
    def visible(self) -> tuple[int, int]:
        """(left, right): query i sees the existing keys i - left to i + right, counted from
        `position`.
        """
        most_left, most_right = self.seqlen_q, self.seqlen_kv
        if self.is_paged:
            most_left = most_right = max(most_left, most_right)
        left = most_left if self.window_left < 0 else self.window_left
        right = most_right if self.window_right < 0 else self.window_right
        return left, 0 if self.is_causal else right

    def keys_of(self, first: int, last: int) -> range:
        """Range of keys that queries first to last see."""
        if self.block_mask:
            shown = min(last, self.seqlen_q - 1) + 1 + self.seqlen_kv - self.seqlen_q
            return range(max(self.block_prefix, min(shown, self.seqlen_kv)))
        left, right = self.visible
        end = min(self.seqlen_kv, self.position + min(last, self.seqlen_q - 1) + right + 1)
        return range(max(0, self.position + first - left), end)

    @property
    def pairs(self) -> int:
        """Number of visible (query, key) pairs of one head."""
        if self.block_mask:
            prefix, behind = self.block_prefix, self.seqlen_kv - self.block_prefix
            offset = self.seqlen_kv - self.seqlen_q + 1 - prefix
            return prefix * self.seqlen_q + self._keys_below(offset, behind)
        left, right = self.visible
        at = self.position
        most = self.seqlen_kv
        return self._keys_below(at + right + 1, most) - self._keys_below(at - left, most)

    def _keys_below(self, offset: int, most: int) -> int:
        """Sum over all queries i of the number of the first `most` keys that are below i +
        offset.
        """

        def total(end: int) -> int:  # of x clamped to [0, most], over x < end
            rising = max(0, min(end, most))
            return rising * (rising - 1) // 2 + max(0, end - most) * most

        return total(self.seqlen_q + offset) - total(offset)

    @property
    def block_prefix(self) -> int:
        """Keys visible to all queries in the mask that a block-sparse problem is measured with."""
        return -(-self.seqlen_kv // 4)

    @property
    def lengths_q(self) -> tuple[int, ...]:
        """Lengths of the sequences of queries with which a problem of variable lengths is
        measured.
        """
        return self._lengths(self.seqlen_q)

    @property
    def lengths_kv(self) -> tuple[int, ...]:
        """Lengths of the sequences of keys, in the order of `lengths_q`."""
        return self._lengths(self.seqlen_kv)

    def _lengths(self, longest: int) -> tuple[int, ...]:
        """Lengths evenly spread from `longest` down to a quarter of it, in a fixed order; all
        `longest` if lengths do not vary.
        """
        return _spread(longest, self.batch) if self.is_varlen else (longest,) * self.batch

    @property
    def total_q(self) -> int:
        """Total rows of queries over all sequences."""
        return sum(self.lengths_q)

    @property
    def total_kv(self) -> int:
        """Total rows of keys over all sequences."""
        return sum(self.lengths_kv)

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """(B, H, QB, KB) of the tables of a block-sparse mask, 1 along axes that it lacks."""
        return (
            self.batch if "b" in self.block_mask else 1,
            self.heads_q if "h" in self.block_mask else 1,
            -(-self.seqlen_q // BLOCK_SIZE),
            -(-self.seqlen_kv // BLOCK_SIZE),
        )


@lru_cache(1024)
def _spread(longest: int, count: int) -> tuple[int, ...]:
    step = (longest - -(-longest // 4)) / max(1, count - 1)
    spread = [longest - round(index * step) for index in range(count)]
    random.Random(_LENGTHS_SEED).shuffle(spread)
    return tuple(spread)
