"""Sampled chunks of a long attention, which a final pass checks instead of all rows. Pure
functions.

The quick pass compares every element of every candidate. A final pass has new inputs, whose full
reference would take longer than all timing. If a share f of the chunks is wrong, one kind of inputs
misses the fault with probability (1 - f) ** `CHUNKS`. That is 0.7 % for one chunk in 20, and 38 %
for one in 100. Each kind of inputs has its own sample. Guard bands and inputs are checked
completely.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tuner.measure.gate.commands import MASK_STRIDES
from tuner.measure.gate.kernels import attention_integers
from tuner.problem import E4M3, AttentionProblem, Operand, Problem

CHUNKS = 96
ROWS = 128
"""Queries in a chunk, the tile of most kernels."""
LONG_REFERENCE_S = 10.0
"""Value of `reference_seconds`, an upper estimate, from which a reference counts as long. One of
16.5 took 6 s on an H200, and a final pass has four kinds of inputs."""


@dataclass(frozen=True)
class RowChunk:
    """Consecutive queries of one batch and head; of all heads if a query's heads are contiguous."""

    batch: int
    head: int
    heads: int
    first: int
    rows: int

    @property
    def text(self) -> str:
        """Description for a verdict's log."""
        last = self.first + self.rows - 1
        heads = f"head {self.head}" if self.heads == 1 else "all heads"
        return f"queries {self.first} to {last} of batch {self.batch}, {heads}"

    def output(self, problem: AttentionProblem) -> Operand:
        """Its contiguous part of the output, which starts at the out element of `shifts`."""
        width = problem.value_width
        *_, out = problem.matrices
        return replace(out, shape=(self.rows * self.heads, width), strides=(width, 1))

    def shifts(self, problem: AttentionProblem) -> Mapping[str, int]:
        """Offsets of its first elements in query, key, value and out."""
        group = problem.heads_q // problem.heads_kv
        heads = {"key": self.head // group, "value": self.head // group}
        starts = {}
        for matrix in problem.matrices:
            batch, head, row, _ = matrix.strides
            rows = 0 if matrix.name in heads else self.first
            starts[matrix.name] = (
                self.batch * batch + heads.get(matrix.name, self.head) * head + rows * row
            )
        return starts

    def integers(self, problem: AttentionProblem) -> dict[str, int]:
        """Extents, strides and mask, in the form of the reference's attention."""
        left, right = problem.visible
        return {
            **attention_integers(problem, 4),
            "batch": 1,
            "heads_q": self.heads,
            "heads_kv": 1 if self.heads == 1 else problem.heads_kv,
            "seqlen_q": self.rows,
            **{"left": left - self.first, "right": right + self.first},
            **dict.fromkeys(MASK_STRIDES, 0),
            "value_dim": problem.value_width,
        }


def is_sampled(problem: Problem) -> bool:
    """True for 16-bit attention with sequences of one length, and without operands that change
    scores.
    """
    if not isinstance(problem, AttentionProblem) or problem.is_packed or problem.block_mask:
        return False
    has_more = problem.mask_operand is not None or problem.has_sinks
    return problem.dtype != E4M3 and not has_more


def chunks_of(problem: AttentionProblem, kind: str, seed: int) -> list[RowChunk]:
    """Draw `CHUNKS` different chunks, or all if there are fewer.

    Args:
        problem: problem for which `is_sampled` is true.
        kind: kind of the inputs.
        seed: random seed of the request.
    """
    *_, out = problem.matrices
    heads = problem.heads_q if out.strides[2] == problem.heads_q * problem.value_width else 1
    of_heads = problem.heads_q // heads
    tiles = -(-problem.seqlen_q // ROWS)
    count = problem.batch * of_heads * tiles
    drawn = random.Random(f"{seed}:{kind}:chunks").sample(range(count), min(CHUNKS, count))
    chunks = []
    for number in sorted(drawn):
        outer, tile = divmod(number, tiles)
        batch, head = divmod(outer, of_heads)
        first = tile * ROWS
        chunks.append(RowChunk(batch, head, heads, first, min(ROWS, problem.seqlen_q - first)))
    return chunks
