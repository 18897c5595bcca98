"""Inputs of the numerics gate on the device: random elements, planted ones, pages and masks."""

from __future__ import annotations

import math
import random

from tuner.measure import block_masks, pages
from tuner.measure.gate.inputs import (
    COLUMN_FACTOR,
    DOMINANCE,
    E4M3_COLUMN_FACTOR,
    HUGE_EXPONENTS,
    HUGE_SOFTMAX,
    LARGE,
    SMALL_FACTOR,
    SOFTMAX_SCALE,
    STARTS,
    border_columns,
    moments,
    parts_of,
    prominence,
    sees_nothing,
    starts_of,
)
from tuner.measure.gate.kernels import (
    DTYPES,
    POISON,
    Buffers,
    Command,
    Kernels,
    attention_integers,
    matrices,
    softmax_integers,
)
from tuner.problem import (
    DTYPE_BYTES,
    E4M3,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)

_TABLES = ("page_table", "seqused_k")
_BLOCKS = ("block_counts", "block_indices", "block_bits")


def fill(kernels: Kernels, buffers: Buffers, kind: str, seed: int) -> None:
    """Put inputs of a kind into the buffers.

    Args:
        kernels: of the reference.
        buffers: of a problem.
        kind: of `inputs.KINDS`.
        seed: equal seeds, equal inputs.
    """
    problem = buffers.problem
    means, deviations = moments(problem, kind)
    draw = random.Random(f"{seed}:{kind}")
    for operand in buffers.inputs:
        if operand.name in STARTS:
            kernels.device.write(
                buffers.operands[operand.name].pointer, starts_of(problem, operand, kind)
            )
            continue
        if operand.dtype == "bool":
            *parts, rows, keys = operand.shape
            extents = math.prod(parts) * rows, rows, keys
            pointer = buffers.operands[operand.name].pointer
            kernels.run((pointer,), (Command.PLANT_MASK, *extents, draw.getrandbits(62)))
            continue
        if operand.name in _BLOCKS and isinstance(problem, AttentionProblem):
            data = getattr(block_masks.tables(problem, kind, seed), operand.name)
            kernels.device.write(buffers.operands[operand.name].pointer, data)
            continue
        if operand.name in _TABLES and isinstance(problem, AttentionProblem):
            data = pages.written(problem, operand.name, kind, seed)
            kernels.device.write(buffers.operands[operand.name].pointer, data)
            continue
        elements = operand.elements
        if operand.name in buffers.rows:
            elements = buffers.rows[operand.name].bytes // DTYPE_BYTES[operand.dtype]
        kernels.run(
            (buffers.sources[operand.name],),
            (Command.FILL, DTYPES[operand.dtype], elements, draw.getrandbits(62)),
            (means.get(operand.name, 0.0), deviations.get(operand.name, 1.0)),
        )
    if kind == "dominant" or kind == "planted":
        _plant(kernels, buffers, problem, kind, seed, draw.getrandbits(62))
    elif kind == "huge_scores":
        _plant_huge(kernels, buffers, problem, kind, draw.getrandbits(62))
    if isinstance(problem, AttentionProblem) and problem.is_paged:
        _fill_pages(kernels, buffers, problem, kind)
    if isinstance(problem, AttentionProblem) and problem.block_mask:
        dense = block_masks.tables(problem, kind, seed).dense
        kernels.device.write(buffers.rows["mask"].pointer, dense)


def _fill_pages(kernels: Kernels, buffers: Buffers, problem: AttentionProblem, kind: str) -> None:
    """Copy keys and values to their pages; all other slots hold the poison."""
    heads, width = problem.heads_kv, problem.head_dim
    columns = max(problem.pages)
    for operand in problem.matrices[1:3]:
        cache = buffers.operands[operand.name]
        kernels.device.fill16(cache.pointer, POISON, cache.bytes)
        source, table = buffers.rows[operand.name].pointer, buffers.pointers["page_table"]
        for part in pages.parts(problem, kind):
            integers = (part.keys, heads, width, *operand.strides[:3], problem.page_size)
            if part.keys:
                kernels.run((source, cache.pointer, table), (Command.TO_PAGES, *integers))
            source += 2 * part.keys * heads * width
            table += 4 * columns


def _plant(
    kernels: Kernels, buffers: Buffers, problem: Problem, kind: str, seed: int, row_seed: int
) -> None:
    at = buffers.sources
    if isinstance(problem, AttentionProblem | AttentionBackwardProblem):
        strength = DOMINANCE
        if isinstance(problem, AttentionBackwardProblem):
            strength, problem = prominence(problem), problem.forward
        for one, shift, sides in parts_of(problem, kind):
            if sees_nothing(one, sides):
                continue
            kernels.run(
                (at["query"] + shift["query"], at["key"] + shift["key"]),
                (
                    Command.PLANT_ATTENTION,
                    DTYPES[one.dtype],
                    *attention_integers(one, 2),
                    *sides,
                    row_seed,
                ),
                (strength,),
            )
    elif isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        columns = border_columns(problem.k, seed)
        batch, rows, strides = matrices(buffers.lying(problem.operands[0]))
        kernels.run(
            (at["a"],),
            (
                *(Command.SCALE_COLUMNS, DTYPES[problem.dtype], batch, rows),
                *(*strides, len(columns), *columns),
            ),
            (E4M3_COLUMN_FACTOR if problem.dtype == E4M3 else COLUMN_FACTOR,),
        )
        if isinstance(problem, GemmProblem) and problem.scales == "block":
            _plant_factors(kernels, buffers, problem, seed)
    else:
        kernels.run(
            (at["scores"],),
            (Command.PLANT_SOFTMAX, *softmax_integers(problem), row_seed),
            (LARGE / SOFTMAX_SCALE,),
        )


def _plant_factors(kernels: Kernels, buffers: Buffers, problem: GemmProblem, seed: int) -> None:
    """Small factors of A's rows at the borders of tiles, and of the last block of B's columns:
    a neighbour's factor in their place makes a result 16 times too large.
    """
    _, _, scale_a, scale_b, _ = problem.operands
    (blocks, _), (columns, _) = scale_a.shape, scale_b.shape
    rows = border_columns(problem.m, seed)
    for operand, strides, chosen in (
        (scale_a, scale_a.strides, rows),
        (scale_b, scale_b.strides[::-1], [columns - 1]),
    ):
        kernels.run(
            (buffers.pointers[operand.name],),
            (
                *(Command.SCALE_COLUMNS, DTYPES[operand.dtype], 1, blocks, operand.elements),
                *(*strides, len(chosen), *chosen),
            ),
            (SMALL_FACTOR,),
        )


def _plant_huge(
    kernels: Kernels, buffers: Buffers, problem: Problem, kind: str, row_seed: int
) -> None:
    """Scores that are all equal, and one that differs, as large as the type allows."""
    at = buffers.sources
    if isinstance(problem, AttentionBackwardProblem):
        problem = problem.forward
    if not isinstance(problem, AttentionProblem):
        rows, cols, *_ = softmax_integers(problem)
        limits = (HUGE_SOFTMAX.start, len(HUGE_SOFTMAX))
        kernels.run((at["scores"],), (Command.PLANT_HUGE_SOFTMAX, rows, cols, row_seed), limits)
        return
    exponents, _ = HUGE_EXPONENTS[problem.dtype]
    for one, shift, sides in parts_of(problem, kind):
        if sees_nothing(one, sides):
            continue
        kernels.run(
            (at["query"] + shift["query"], at["key"] + shift["key"]),
            (
                *(Command.PLANT_HUGE_ATTENTION, DTYPES[one.dtype]),
                *attention_integers(one, 2),
                row_seed,
            ),
            (exponents.start, len(exponents)),
        )
