"""Block-sparse masks that the numerics gate draws, and their tables. Pure functions.

A row of a mask is an integer whose bit k is set if the query attends to key k. The reference reads
the dense mask, one byte for each query and key. Kernels read the tables. Unused entries of the
tables hold values that would show in a result.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from operator import and_, or_
from typing import NamedTuple

from tuner.problem import AttentionProblem
from tuner.problem.attention_masks import BLOCK_SIZE

UNSET = -1
"""Entries of a row of `block_indices` behind its last block."""
#: Number of distinct masks; further batches and heads repeat them.
_DISTINCT = 5
#: Bits of an unused block: all visible.
_ROW_BYTES = BLOCK_SIZE // 8
_SEEN = b"\xff" * _ROW_BYTES

Rows = Callable[[int], int]
"""Visible keys of each query, as bits."""


class Tables(NamedTuple):
    """Mask in both forms: tables by operand name, and the dense mask, (B, H, SQ, SKV) bytes."""

    block_counts: bytes
    block_indices: bytes
    block_bits: bytes
    dense: bytes


@lru_cache(4)
def tables(problem: AttentionProblem, kind: str, seed: int) -> Tables:
    """Mask of a problem for one kind of inputs.

    A kernel that is timed on one mask serves any mask. The inputs of `random` are the timed ones.
    All other kinds have a different pattern in each block of queries.

    Args:
        problem: attention with a block-sparse mask.
        kind: kind of the gate's inputs.
        seed: random seed.
    """
    batches, heads, *_ = problem.block_shape
    count = 1 if kind == "random" else min(_DISTINCT, batches * heads)
    distinct = []
    for index in range(count):
        rng = random.Random(f"{seed}:{kind}:{index}")
        rows = timed(problem) if kind == "random" else list(drawn(problem, rng))
        distinct.append(tables_of(rows, problem.seqlen_kv))
    every = [distinct[index % count] for index in range(batches * heads)]
    return Tables(*(b"".join(parts) for parts in zip(*every, strict=True)))


def timed(problem: AttentionProblem) -> list[int]:
    """Rows of the timed mask: a prefix visible to all queries, and a causal mask."""
    return [(1 << len(problem.keys_of(query, query))) - 1 for query in range(problem.seqlen_q)]


def drawn(problem: AttentionProblem, rng: random.Random) -> Iterator[int]:
    """Rows of a mask with a different pattern in each block of queries."""
    for first in range(0, problem.seqlen_q, BLOCK_SIZE):
        row = rng.choice(_PATTERNS)(problem, rng)
        for query in range(first, min(first + BLOCK_SIZE, problem.seqlen_q)):
            yield row(query)


def tables_of(rows: Sequence[int], keys: int) -> Tables:
    """Tables of the mask of one batch and head."""
    columns = -(-keys // BLOCK_SIZE)
    counts, indices, bits = bytearray(), bytearray(), bytearray()
    for first in range(0, len(rows), BLOCK_SIZE):
        band = rows[first : first + BLOCK_SIZE]
        common = reduce(and_, band).to_bytes(columns * _ROW_BYTES, "little")
        union = reduce(or_, band).to_bytes(columns * _ROW_BYTES, "little")
        full = [c for c in range(columns) if _block(common, c) == _SEEN]
        partly = [c for c in range(columns) if any(_block(union, c)) and c not in set(full)]
        listed = [*full, *partly]
        counts += struct.pack("<2i", len(full), len(partly))
        indices += struct.pack(f"<{columns}i", *listed, *[UNSET] * (columns - len(listed)))
        joined = b"".join(row.to_bytes(columns * _ROW_BYTES, "little") for row in band)
        ordered, row_bytes = _in_order(joined), columns * _ROW_BYTES
        starts = range(0, len(joined), row_bytes)
        for column in listed:
            bits += b"".join(_block(ordered[at : at + row_bytes], column) for at in starts)
            bits += _SEEN * (BLOCK_SIZE - len(band))
        bits += _SEEN * (BLOCK_SIZE * (columns - len(listed)))
    dense = b"".join(_bytes(row, keys) for row in rows)
    return Tables(bytes(counts), bytes(indices), bytes(bits), dense)


def _block(row: bytes, column: int) -> bytes:
    return row[column * _ROW_BYTES : (column + 1) * _ROW_BYTES]


def _in_order(blocks: bytes) -> bytes:
    """Reorder each 128 bits of some rows as `AttentionProblem` describes: a word for each lane of a
    quad. A lane has two bits of every octet, which are gathered in all rows at once.
    """
    size, words = len(blocks), 0
    every = int.from_bytes(blocks, "little")
    for lane in range(4):
        part = every >> 2 * lane & _repeated(3, 1, size)
        for octets in (2, 4, 8, 16):  # their bits now, of half as many each before
            part = (part | part >> 3 * octets) & _repeated((1 << 2 * octets) - 1, octets, size)
        words |= part << 32 * lane
    return words.to_bytes(size, "little")


@lru_cache(256)
def _repeated(word: int, octets: int, size: int) -> int:
    """Integer of `size` octets that repeats `word`."""
    return int.from_bytes(word.to_bytes(octets, "little") * (size // octets), "little")


_ZEROS_AND_ONES = bytes.maketrans(b"01", b"\0\1")


def _bytes(row: int, keys: int) -> bytes:
    """One byte for each key."""
    return f"{row:0{keys}b}"[::-1].encode().translate(_ZEROS_AND_ONES)


def _between(first: int, last: int, keys: int) -> int:
    """Bits of keys first..last, clipped to the existing keys."""
    first, end = max(0, first), min(last + 1, keys)
    return ((1 << end) - (1 << first)) if first < end else 0


def _documents(problem: AttentionProblem, rng: random.Random) -> Rows:
    keys, length = problem.seqlen_kv, rng.choice((1, 65, 200, 512))
    return lambda query: _between(query // length * length, query, keys)


def _prefix(problem: AttentionProblem, rng: random.Random) -> Rows:
    keys, prefix = problem.seqlen_kv, rng.randint(1, problem.seqlen_kv)
    return lambda query: _between(0, max(prefix - 1, query), keys)


def _window(problem: AttentionProblem, rng: random.Random) -> Rows:
    """Sliding window, and tokens visible to all."""
    keys, left = problem.seqlen_kv, rng.choice((0, 7, 128, 300))
    tokens = sum(1 << key for key in {rng.randrange(keys) for _ in range(3)})
    return lambda query: _between(query - left, query, keys) | tokens


def _blocks(problem: AttentionProblem, rng: random.Random) -> Rows:
    """Random whole blocks of keys."""
    keys = problem.seqlen_kv
    starts = [key for key in range(0, keys, BLOCK_SIZE) if rng.random() < 0.4]
    row = sum(_between(start, start + BLOCK_SIZE - 1, keys) for start in starts)
    return lambda query: row


def _ragged(problem: AttentionProblem, rng: random.Random) -> Rows:
    """Random keys, one key, or none, by row."""
    keys, base = problem.seqlen_kv, rng.getrandbits(32)

    def row(query: int) -> int:
        own = random.Random(base + query)
        some = own.getrandbits(keys) & own.getrandbits(keys)
        return own.choice((0, 1 << own.randrange(keys), some))

    return row


def _empty(problem: AttentionProblem, rng: random.Random) -> Rows:
    return lambda query: 0


def _full(problem: AttentionProblem, rng: random.Random) -> Rows:
    row = (1 << problem.seqlen_kv) - 1
    return lambda query: row


_PATTERNS = (_documents, _prefix, _window, _blocks, _ragged, _empty, _full)
