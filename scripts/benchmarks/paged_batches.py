"""Batches of sequences over paged caches, as an engine has them, for `scripts/bench paged`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem, DType

#: Cases of the group ``ratios``, and bytes of one copy of a case's keys and values at most.
RATIO_CASES, MAX_RATIO_BYTES = 200, 4 << 30


@dataclass(frozen=True)
class Case:
    """One batch: what each sequence has of queries and keys."""

    group: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    window: int = -1
    has_sinks: bool = False
    dtype: DType = "bfloat16"
    is_halved: bool = False
    """Keys and values are halves of one tensor's rows, head by head, as in vLLM."""

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            batch=len(self.queries),
            seqlen_q=max(self.queries),
            seqlen_kv=max(self.keys),
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
        is_plain = self.window < 0 and not self.has_sinks and self.dtype != E4M3
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
    def cached_bytes(self) -> int:
        """Bytes of the pages of one copy of the keys and values."""
        pages = sum(-(-keys // self.page_size) for keys in self.keys)
        return pages * self.page_size * self.token_bytes

    @property
    def flops(self) -> int:
        parts = zip(self.queries, self.keys, strict=True)
        one = replace(self.problem, batch=1)
        return sum(replace(one, seqlen_q=q, seqlen_kv=k).flops for q, k in parts if q)

    def label(self) -> str:
        heads = f"{self.heads_q}/{self.heads_kv},D={self.head_dim}"
        longest = f"B={len(self.queries)},SQ={max(self.queries)},SKV={max(self.keys)}"
        more = f",window={self.window}" if self.window >= 0 else ""
        more += ",e4m3" if self.dtype == E4M3 else ""
        return f"{self.group} {longest},{heads},page={self.page_size}{more}"


def cases(named: Sequence[str]) -> Iterator[Case]:
    """Cases of the groups named; all where none is."""
    for case in _every():
        if not named or case.group in named:
            yield case


def groups() -> list[str]:
    """Names of all groups, in the order of their cases."""
    return list(dict.fromkeys(case.group for case in _every()))


def _every() -> Iterator[Case]:
    for size in (16, 64):
        for batch in (1, 16, 64, 128):
            for keys in (1024, 4096, 16384):
                yield Case("decode", (1,) * batch, (keys,) * batch, size)
    for batch, keys in ((1, 4096), (16, 4096), (64, 4096)):
        yield Case("few", (4,) * batch, (keys,) * batch, 16)
    draw = random.Random(0)
    for batch in (16, 64, 128):
        lengths = (int(100 * 160 ** draw.random()) for _ in range(batch))
        yield Case("unlike", (1,) * batch, tuple(lengths), 16)
    for queries in (512, 2048):
        for keys in (8192, 32768):
            yield Case("chunk", (queries,), (keys,), 16)
            yield Case("chunk", (queries,), (keys,), 64)
    for keys in (4096, 8192):
        yield Case("mixed", (*(1,) * 63, 2048), (*(keys,) * 63, 8192), 16)
        yield Case("mixed", (*(1,) * 63, 512), (*(keys,) * 63, 8192), 16)
    for window in (-1, 127):
        for batch in (1, 64):
            made = Case("sinks", (1,) * batch, (4096,) * batch, 16, 64, 8, 64, window, True)
            yield made
        yield Case("sinks", (2048,), (8192,), 16, 64, 8, 64, window, True)
    for batch in (1, 16, 128):
        for keys in (1024, 4096):
            yield Case("narrow", (1,) * batch, (keys,) * batch, 16, head_dim=64, is_halved=True)
    for queries in (512, 2048):
        for width in (64, 128):
            yield Case("prompts", (queries,), (queries,), 16, head_dim=width, is_halved=True)
        yield Case("narrow chunk", (queries,), (8192,), 16, head_dim=64, is_halved=True)
    for batch in (1, 16, 64):
        for keys in (4096, 16384):
            yield Case("e4m3", (1,) * batch, (keys,) * batch, 16, dtype=E4M3)
    yield Case("e4m3", (4,) * 16, (4096,) * 16, 16, dtype=E4M3)
    yield Case("e4m3", (2048,), (8192,), 16, dtype=E4M3)
    yield from _ratios()


def _ratios() -> Iterator[Case]:
    """Draws of every number of query heads to a KV head, of unlike lengths, and 1 to 8 queries."""
    draw, count = random.Random("ratios of heads"), 0
    while count < RATIO_CASES:
        ratio, heads_kv = draw.randint(1, 16), draw.choice((1, 2, 4, 8))
        batch, longest = round(2 ** draw.uniform(0, 7)), round(2 ** draw.uniform(7, 14))
        queries = draw.choice((1, draw.randint(2, 8)))
        lengths = [max(queries, round(longest * 2 ** -draw.uniform(0, 4))) for _ in range(batch)]
        case = Case(
            "ratios",
            (queries,) * batch,
            (longest, *lengths[1:]),
            16,
            ratio * heads_kv,
            heads_kv,
            draw.choice((64, 80, 128, 256)),
        )
        if case.cached_bytes <= MAX_RATIO_BYTES:
            count += 1
            yield case
