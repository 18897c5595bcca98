"""Rows of a quantised latent cache as the numerics gate draws them. Pure functions.

Elements are quantiles of a normal distribution, rounded to e4m3, some of them below its normal
numbers. The reference reads what a row means in bf16. That has the factors of ``e4m3_blocks``, but
not the one factor of ``e4m3``, which the reference multiplies.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

from tuner.measure.gate.inputs import moments
from tuner.problem import AttentionProblem
from tuner.problem.attention import LATENT_BLOCK, LATENT_VALUE_DIM

FACTORS = tuple(0.55 + 0.1234567 * i for i in range(8))
"""Factors of blocks; a table for each turns elements into bf16."""
_HUGE_CODES = {0x00: 0x70, 0x80: 0x78}
"""Elements of e4m3 by the lower byte of 128 and 256 in bf16."""
_ROTARY = bytes(sign | exponent for sign in (0, 0x80) for exponent in (0x3C, 0x3D, 0x3E, 0x3F))
"""Upper bytes of rotary elements in bf16."""


def value_of(code: int) -> float:
    """The number that a byte of e4m3 means, but for its NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if code & 0x80 else size


def bf16_of(value: float) -> int:
    """Bits of a number in bf16, to nearest even."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@lru_cache
def codes_of(mean: float) -> bytes:
    """e4m3 by uniform bytes: nearest to quantiles of a normal distribution."""
    every = [code for code in range(256) if code & 0x7F != 0x7F]
    quantiles = (NormalDist(mean).inv_cdf((i + 0.5) / 256) for i in range(256))
    return bytes(min(every, key=lambda code: abs(value_of(code) - x)) for x in quantiles)


@lru_cache
def halves_of(factor: float) -> tuple[bytes, bytes]:
    """Lower and upper bytes of e4m3 times a factor of fp32 in bf16, by codes."""
    (single,) = struct.unpack("<f", struct.pack("<f", factor))
    words = [bf16_of(value_of(code) * single) for code in range(256)]
    return bytes(word & 0xFF for word in words), bytes(word >> 8 for word in words)


def drawn(problem: AttentionProblem, kind: str, seed: int) -> tuple[bytes, bytes]:
    """All rows of a problem's sequences: as the cache has them, and in bf16."""
    rows, draw = problem.total_kv, random.Random(seed)
    if kind == "huge_scores":
        elements = struct.pack("<H", 0x4300) * (rows * problem.head_dim)
        return packed_huge(problem, elements), elements
    means, _ = moments(problem, kind)
    width = problem.head_dim if problem.cache == "e4m3" else LATENT_VALUE_DIM
    codes = draw.randbytes(rows * width).translate(codes_of(means["key"]))
    if problem.cache == "e4m3":
        return codes, _interleaved(*(codes.translate(table) for table in halves_of(1.0)))
    return _blocks(codes, rows, problem.head_dim - width, draw)


def packed_huge(problem: AttentionProblem, elements: bytes) -> bytes:
    """Rows as the cache has them, of elements of 128 and 256 in bf16."""
    codes = elements[::2].translate(bytes(_HUGE_CODES.get(low, 0) for low in range(256)))
    if problem.cache == "e4m3":
        return codes
    ones = struct.pack("<f", 1.0) * (LATENT_VALUE_DIM // LATENT_BLOCK)
    width, latent = problem.head_dim, LATENT_VALUE_DIM
    return b"".join(
        codes[at : at + latent] + ones + elements[2 * (at + latent) : 2 * (at + width)]
        for at in range(0, len(codes), width)
    )


def _blocks(codes: bytes, rows: int, rotary: int, draw: random.Random) -> tuple[bytes, bytes]:
    """Rows of blocks, each of one of `FACTORS`, and rotary columns."""
    packed, lower, upper = [], [], []
    blocks = LATENT_VALUE_DIM // LATENT_BLOCK
    for row in range(rows):
        factors = draw.choices(FACTORS, k=blocks)
        for block, factor in enumerate(factors, row * blocks):
            part = codes[block * LATENT_BLOCK : (block + 1) * LATENT_BLOCK]
            low, high = halves_of(factor)
            packed.append(part)
            lower.append(part.translate(low))
            upper.append(part.translate(high))
        lower.append(draw.randbytes(rotary))
        upper.append(draw.randbytes(rotary).translate(_ROTARY * 32))
        packed += [struct.pack(f"<{blocks}f", *factors), _interleaved(lower[-1], upper[-1])]
    return b"".join(packed), _interleaved(b"".join(lower), b"".join(upper))


def _interleaved(*halves: Sequence[int]) -> bytes:
    words = bytearray(2 * len(halves[0]))
    words[::2], words[1::2] = halves
    return bytes(words)
