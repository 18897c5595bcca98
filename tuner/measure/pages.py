"""Paged KV cache as the numerics gate fills it: lengths, page tables and masks. Pure functions.

Keys and values are drawn as packed rows, which the reference reads, and then copied to shuffled
pages. All other slots hold the gate's poison, a NaN.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from tuner.problem import DTYPE_BYTES, AttentionProblem, Operand

PACKED = "packed"
"""Name of a quantised cache's packed rows."""
UNSET = -1
"""Table entry behind a sequence's last page."""


class PagedSequence(NamedTuple):
    """One sequence of a paged problem, posed as dense attention."""

    problem: AttentionProblem
    """Problem of one sequence without a mask. A sequence without keys gets one key that no query
    sees."""
    keys: int
    left: int
    """Query i sees keys i - left to i + right."""
    right: int


def lengths_of(problem: AttentionProblem, kind: str) -> tuple[int, ...]:
    """Number of keys of each sequence for one kind of inputs.

    A kernel that is timed on one distribution of lengths serves any. `random` has the timed
    lengths. All other kinds have lengths at the edges of pages, and zero.
    """
    if kind == "random":
        return problem.lengths_kv
    size = problem.page_size
    edges = (problem.seqlen_kv, 0, size + 1, 1, size, size - 1)
    return tuple(
        min(longest, edges[index % len(edges)]) for index, longest in enumerate(problem.lengths_kv)
    )


def table_of(problem: AttentionProblem, kind: str, seed: int) -> list[list[int]]:
    """Page numbers of each sequence, in order. All rows are as long as the longest."""
    places = list(range(sum(problem.pages)))
    random.Random(f"{seed}:pages").shuffle(places)
    columns, rows = max(problem.pages), []
    free = iter(places)
    for count, length in zip(problem.pages, lengths_of(problem, kind), strict=True):
        own = [next(free) for _ in range(count)][: -(-length // problem.page_size)]
        rows.append([*own, *[UNSET] * (columns - len(own))])
    return rows


def written(problem: AttentionProblem, name: str, kind: str, seed: int) -> bytes:
    """Contents of the operands `page_table` and `seqused_k`."""
    values = lengths_of(problem, kind)
    if name == "page_table":
        values = tuple(chain.from_iterable(table_of(problem, kind, seed)))
    return struct.pack(f"<{len(values)}i", *values)


def row_bytes(problem: AttentionProblem) -> Iterator[tuple[str, int]]:
    """Bytes of the packed rows in which keys and values are drawn, by operand. A quantised cache
    has those of its own form as well, and one with a factor also ones for the queries.
    """
    rows, width = problem.total_kv * problem.heads_kv, DTYPE_BYTES[problem.dtype]
    for operand in caches_of(problem):
        columns = problem.head_dim if operand.name == "key" else problem.value_width
        yield operand.name, width * columns * rows
        if problem.cache:
            yield PACKED, DTYPE_BYTES[operand.dtype] * operand.shape[-1] * rows
    if problem.cache == "e4m3":
        yield "descale_q", 4 * problem.heads_q


def caches_of(problem: AttentionProblem) -> tuple[Operand, ...]:
    """Operands that lie in pages; latent values lie in the keys."""
    _, key, value, _ = problem.matrices
    return (key,) if problem.is_latent else (key, value)


def parts(problem: AttentionProblem, kind: str) -> Iterator[PagedSequence]:
    """Sequences of a paged problem, in order."""
    left, right = problem.visible
    for queries, keys in zip(problem.lengths_q, lengths_of(problem, kind), strict=True):
        position = keys - queries
        dense = replace(
            problem, batch=1, seqlen_q=queries, seqlen_kv=max(1, keys), is_varlen=False,
            is_causal=False, window_left=-1, window_right=-1, page_size=0, has_sinks=False,
            layout="bshd", cache="",
        )  # fmt: skip
        sides = (left - position, right + position) if keys else (0, -queries - 1)
        yield PagedSequence(dense, keys, *sides)
