"""Batches of sequences over paged caches, as an engine has them, for `scripts/bench paged`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem, DType

#: Cases of `ratios` and `quantised`, and bytes of one copy of a case's keys and values at most.
RATIO_CASES, QUANTISED_CASES, MAX_RATIO_BYTES = 200, 100, 4 << 30
#: Longest lengths that captured graphs are made for, and lengths that they are replayed at.
ROOMS = {4096: (64, 256, 1024, 4096), 32768: (64, 1024, 8192, 32768)}


@dataclass(frozen=True)
class Case:
    """One batch: what each sequence has of queries and keys."""

    group: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int = 16
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: int = -1
    has_sinks: bool = False
    dtype: DType = "bfloat16"
    is_halved: bool = False
    """Keys and values are halves of one tensor's rows, head by head, as in vLLM."""
    room: int = 0
    """Keys of a sequence that a captured graph is made for: its launches know no other length. 0:
    every launch knows the longest and all lengths' sum."""

    @property
    def longest(self) -> int:
        """Keys of a sequence at most, as a launch knows it."""
        return self.room or max(self.keys)

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            batch=len(self.queries),
            seqlen_q=max(self.queries),
            seqlen_kv=self.longest,
            head_dim=self.head_dim,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            dtype=self.dtype,
            is_causal=max(self.queries) > 1,
            window_left=self.window,
            page_size=self.page_size,
            has_sinks=self.has_sinks,
        )

    @property
    def is_even(self) -> bool:
        """All sequences have as many queries and keys."""
        return len(set(self.queries)) == len(set(self.keys)) == 1

    @property
    def has_dense(self) -> bool:
        """`tuner.attention` computes the same over a dense cache."""
        is_plain = self.window < 0 and not (self.has_sinks or self.room or self.dtype == E4M3)
        is_whole = self.keys[0] % self.page_size == 0
        return is_plain and self.is_even and is_whole and self.queries[0] == 1

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that queries see."""
        seen = sum(
            min(keys, self.window + queries) if self.window >= 0 else keys
            for queries, keys in zip(self.queries, self.keys, strict=True)
        )
        return seen * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of a key and a value of all heads."""
        return 2 * DTYPE_BYTES[self.dtype] * self.heads_kv * self.head_dim

    @property
    def pages(self) -> list[int]:
        """Pages of each sequence in one copy of the keys and values."""
        return [-(-keys // self.page_size) for keys in self.keys]

    @property
    def cached_bytes(self) -> int:
        """Bytes of these pages."""
        return sum(self.pages) * self.page_size * self.token_bytes

    @property
    def flops(self) -> int:
        parts = zip(self.queries, self.keys, strict=True)
        one = replace(self.problem, batch=1)
        return sum(replace(one, seqlen_q=q, seqlen_kv=k).flops for q, k in parts if q)

    @property
    def label(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv},D={self.head_dim}"
        longest = f"B={len(self.queries)},SQ={max(self.queries)},SKV={max(self.keys)}"
        more = f",window={self.window}" if self.window >= 0 else ""
        more += ",e4m3" if self.dtype == E4M3 else ""
        more += f",least={min(self.keys)}" if self.group == "mixed" else ""
        more += f",room={self.room}" if self.room else ""
        return f"{self.group} {longest},{heads},page={self.page_size}{more}"


def even(group: str, batch: int, queries: int, keys: int, size: int = 16, **more: object) -> Case:
    """A batch of equal sequences."""
    return Case(group, (queries,) * batch, (keys,) * batch, size, **more)  # type: ignore[arg-type]


def served() -> list[Case]:
    """Every group but ``ratios``."""
    draw, narrow = random.Random(0), {"head_dim": 64, "is_halved": True}
    unlike = [tuple(int(100 * 160 ** draw.random()) for _ in range(n)) for n in (16, 64, 128)]
    sinks = {"heads_q": 64, "head_dim": 64, "has_sinks": True}
    chunks = (512, 2048)
    return [
        *(even("decode", batch, 1, keys, size) for size in (16, 64)
          for batch in (1, 16, 64, 128) for keys in (1024, 4096, 16384)),
        *(even("few", batch, 4, 4096) for batch in (1, 16, 64)),
        *(Case("unlike", (1,) * len(keys), keys) for keys in unlike),
        *(even("chunk", 1, queries, keys, size)
          for queries in chunks for keys in (8192, 32768) for size in (16, 64)),
        *(Case("mixed", (*(1,) * 63, queries), (*(keys,) * 63, 8192))
          for keys in (4096, 8192) for queries in (2048, 512)),
        *(even("sinks", batch, queries, keys, window=window, **sinks) for window in (-1, 127)
          for batch, queries, keys in ((1, 1, 4096), (64, 1, 4096), (1, 2048, 8192))),
        *(even("narrow", batch, 1, keys, **narrow) for batch in (1, 16, 128)
          for keys in (1024, 4096)),
        *(even("prompts", 1, queries, queries, head_dim=width, is_halved=True)
          for queries in chunks for width in (64, 128)),
        *(even("narrow chunk", 1, queries, 8192, **narrow) for queries in chunks),
        *(even("e4m3", batch, 1, keys, dtype=E4M3) for batch in (1, 16, 64)
          for keys in (4096, 16384)),
        *(even("e4m3", batch, queries, keys, dtype=E4M3)
          for batch, queries, keys in ((16, 4, 4096), (1, 2048, 8192))),
    ]  # fmt: skip


def engines() -> list[Case]:
    """Prompts, chunks of them, and decoding, at the head dimensions of kernels."""
    sizes = [(1, 512, 512), (1, 2048, 8192), (4, 2048, 2048), (8, 128, 4096), (1, 512, 8192)]
    sizes += [(1, 2048, 2048), (16, 1, 1024), (16, 4, 4096), (64, 1, 4096), (1, 1, 4096)]
    return [
        even("engine", batch, queries, keys, head_dim=width, is_halved=True)
        for batch, queries, keys in sizes
        for width in (64, 80, 128, 256)
    ]


def wide() -> list[Case]:
    """One query, a few, and chunks of prompts, of heads wider than 256 columns."""
    sizes = [
        (16, 1, 16384, 8, 1),
        (16, 1, 16384, 16, 1),
        (64, 1, 4096, 16, 2),
        (1, 1, 65536, 32, 4),
    ]
    sizes += [
        (8, 1, 8192, 8, 1),
        (16, 4, 8192, 16, 2),
        (1, 512, 8192, 16, 2),
        (4, 128, 4096, 16, 2),
    ]
    cases = [
        even("wide", batch, queries, keys, 64, heads_q=heads, heads_kv=heads_kv, head_dim=512)
        for batch, queries, keys, heads, heads_kv in sizes
    ]
    return [*cases, even("wide", 32, 1, 4096, heads_q=16, heads_kv=4, head_dim=320)]


def ratios() -> list[Case]:
    """Draws of every number of query heads to a KV head, of unlike lengths, and 1 to 8 queries."""
    case = Case("ratios", (), ())
    return list(islice(_drawn(case, 16, (64, 80, 128, 256)), RATIO_CASES))


def quantised() -> list[Case]:
    """As `ratios`, of elements in e4m3 and of up to 32 heads."""
    case = Case("ratios of e4m3", (), (), dtype=E4M3)
    return list(islice(_drawn(case, 32, (64, 80, 96, 128, 256)), QUANTISED_CASES))


def _drawn(like: Case, most: int, widths: Sequence[int]) -> Iterator[Case]:
    draw = random.Random("ratios of heads")
    while True:
        ratio, heads_kv = draw.randint(1, most), draw.choice((1, 2, 4, 8))
        batch, longest = round(2 ** draw.uniform(0, 7)), round(2 ** draw.uniform(7, 14))
        queries = draw.choice((1, draw.randint(2, 8)))
        lengths = [max(queries, round(longest * 2 ** -draw.uniform(0, 4))) for _ in range(batch)]
        case = replace(
            like,
            queries=(queries,) * batch,
            keys=(longest, *lengths[1:]),
            head_dim=draw.choice(widths),
            heads_q=ratio * heads_kv,
            heads_kv=heads_kv,
        )
        if case.cached_bytes <= MAX_RATIO_BYTES:
            yield case


def graphs() -> list[Case]:
    """One query of captured graphs for 4K and 32K keys, replayed at all lengths, and at unlike
    ones.
    """
    draw, cases = random.Random("captured graphs"), list[Case]()
    for width, (room, lengths), batch in product((64, 128), ROOMS.items(), (1, 16, 64, 128)):
        unlike = tuple(round(64 * (room / 64) ** draw.random()) for _ in range(batch))
        for keys in (*((length,) * batch for length in lengths), unlike):
            group = f"graph for {room}, {'alike' if len(set(keys)) == 1 else 'unlike'}"
            cases.append(Case(group, (1,) * batch, keys, head_dim=width, room=room))
    return [case for case in cases if case.cached_bytes <= MAX_RATIO_BYTES]
