"""Filling of the numerics gate's inputs on the device: random elements, planted ones, pages and
masks.
"""

from __future__ import annotations

import math
import random
import struct

from tuner.families.arguments import WINDOW
from tuner.measure import block_masks, pages
from tuner.measure.gate import quantised_rows
from tuner.measure.gate.commands import Command
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
    huge_every,
    moments,
    parts_of,
    prominence,
    sees_nothing,
    starts_of,
)
from tuner.measure.gate.kernels import (
    DTYPES,
    Buffers,
    Kernels,
    attention_integers,
    matrices,
    matrix_strides,
    poison_of,
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
    """Write inputs of one kind into the buffers.

    Args:
        kernels: kernels of the reference.
        buffers: operands of the problem.
        kind: kind of the inputs, one of `inputs.KINDS`.
        seed: random seed; equal seeds give equal inputs.
    """
    problem = buffers.problem
    means, deviations = moments(problem, kind)
    draw = random.Random(f"{seed}:{kind}")
    for operand in buffers.inputs:
        if operand.name in STARTS:
            kernels.write(buffers.operands[operand.name].pointer, starts_of(problem, operand, kind))
            continue
        if operand.dtype == "bool":
            *parts, rows, keys = operand.shape
            kernels.run(
                Command.PLANT_MASK,
                {"mask": buffers.operands[operand.name].pointer},
                {
                    **{"rows": math.prod(parts) * rows, "query_rows": rows, "cols": keys},
                    "seed": draw.getrandbits(62),
                },
            )
            continue
        if operand.name in _BLOCKS and isinstance(problem, AttentionProblem):
            data = getattr(block_masks.tables(problem, kind, seed), operand.name)
            kernels.write(buffers.operands[operand.name].pointer, data)
            continue
        if operand.name in _TABLES and isinstance(problem, AttentionProblem):
            data = pages.written(problem, operand.name, kind, seed)
            kernels.write(buffers.operands[operand.name].pointer, data)
            continue
        if isinstance(problem, AttentionProblem) and problem.cache and operand.name == "key":
            _fill_quantised(kernels, buffers, problem, kind, draw.getrandbits(62))
            continue
        elements = operand.elements
        if operand.name in buffers.rows:
            elements = buffers.rows[operand.name].bytes // DTYPE_BYTES[operand.dtype]
        kernels.run(
            Command.FILL,
            {"target": buffers.sources[operand.name]},
            {"dtype": DTYPES[operand.dtype], "n": elements, "seed": draw.getrandbits(62)},
            {
                "mean": means.get(operand.name, 0.0),
                "deviation": deviations.get(operand.name, 1.0),
            },
        )
    if kind == "dominant" or kind == "planted":
        _plant(kernels, buffers, problem, kind, seed, draw.getrandbits(62))
    elif kind == "huge_scores":
        _plant_huge(kernels, buffers, problem, kind, draw.getrandbits(62))
    if isinstance(problem, AttentionProblem) and problem.is_paged:
        if problem.cache and kind == "huge_scores":
            _pack_huge(kernels, buffers, problem)
        _fill_pages(kernels, buffers, problem, kind)
    if isinstance(problem, AttentionProblem) and problem.block_mask:
        dense = block_masks.tables(problem, kind, seed).dense
        kernels.write(buffers.rows["mask"].pointer, dense)


def _fill_quantised(
    kernels: Kernels, buffers: Buffers, problem: AttentionProblem, kind: str, seed: int
) -> None:
    """Write the rows of a quantised cache, and what they stand for."""
    packed, rows = quantised_rows.drawn(problem, kind, seed)
    kernels.write(buffers.rows["key"].pointer, rows)
    kernels.write(buffers.rows[pages.PACKED].pointer, packed)
    if "descale_q" in buffers.rows:
        ones = struct.pack("<f", 1.0) * problem.heads_q
        kernels.write(buffers.rows["descale_q"].pointer, ones)


def _pack_huge(kernels: Kernels, buffers: Buffers, problem: AttentionProblem) -> None:
    """Quantise keys in which elements were doubled."""
    rows = buffers.rows["key"]
    packed = quantised_rows.packed_huge(problem, kernels.device.read(rows.pointer, rows.bytes))
    kernels.write(buffers.rows[pages.PACKED].pointer, packed)


def _fill_pages(kernels: Kernels, buffers: Buffers, problem: AttentionProblem, kind: str) -> None:
    """Copy keys and values to their pages, by 16 bits. All other slots hold the poison."""
    heads, columns = problem.heads_kv, max(problem.pages)
    for operand in pages.caches_of(problem):
        size, poison = DTYPE_BYTES[operand.dtype], poison_of(operand.dtype)
        width = size * operand.shape[-1] // 2
        cache = buffers.operands[operand.name]
        kernels.device.fill16(cache.pointer, poison, cache.bytes)
        rows = buffers.rows[pages.PACKED if problem.cache else operand.name]
        source, table = rows.pointer, buffers.pointers["page_table"]
        for part in pages.parts(problem, kind):
            page, head, slot = (size * stride // 2 for stride in operand.strides[:3])
            integers = {
                **{"rows": part.keys, "heads": heads, "head_dim": width},
                **{"page_stride": page, "head_stride": head, "slot_stride": slot},
                "page_size": problem.page_size,
            }
            tensors = {"source": source, "cache": cache.pointer, "table": table}
            if part.keys:
                kernels.run(Command.TO_PAGES, tensors, integers)
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
                Command.PLANT_ATTENTION,
                {name: at[name] + shift[name] for name in ("query", "key")},
                {
                    "dtype": DTYPES[one.dtype],
                    **attention_integers(one, 2),
                    **dict(zip(WINDOW, sides, strict=True)),
                    "seed": row_seed,
                },
                {"strength": strength},
            )
    elif isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        columns = border_columns(problem.k, seed)
        batch, rows, strides = matrices(buffers.lying(problem.operands[0]), "a")
        kernels.run(
            Command.SCALE_COLUMNS,
            {"a": at["a"]},
            {
                "dtype": DTYPES[problem.dtype],
                **{"batch": batch, "rows": rows, **strides, "count": len(columns)},
            },
            {"factor": E4M3_COLUMN_FACTOR if problem.dtype == E4M3 else COLUMN_FACTOR},
            columns,
        )
        if isinstance(problem, GemmProblem) and problem.scales == "block":
            _plant_factors(kernels, buffers, problem, seed)
    else:
        kernels.run(
            Command.PLANT_SOFTMAX,
            {"scores": at["scores"]},
            {**softmax_integers(problem), "seed": row_seed},
            {"height": LARGE / SOFTMAX_SCALE},
        )


def _plant_factors(kernels: Kernels, buffers: Buffers, problem: GemmProblem, seed: int) -> None:
    """Plant small factors for A's rows at tile borders and for the last block of B's columns: a
    neighbour's factor in their place makes a result 16 times too large.
    """
    _, _, scale_a, scale_b, _ = problem.operands
    (blocks, _), (columns, _) = scale_a.shape, scale_b.shape
    rows = border_columns(problem.m, seed)
    for operand, strides, places in (
        (scale_a, scale_a.strides, rows),
        (scale_b, scale_b.strides[::-1], [columns - 1]),
    ):
        kernels.run(
            Command.SCALE_COLUMNS,
            {"a": buffers.pointers[operand.name]},
            {
                **{"dtype": DTYPES[operand.dtype], "batch": 1, "rows": blocks},
                **matrix_strides({"a": (operand.elements, *strides)}),
                "count": len(places),
            },
            {"factor": SMALL_FACTOR},
            places,
        )


def _plant_huge(
    kernels: Kernels, buffers: Buffers, problem: Problem, kind: str, row_seed: int
) -> None:
    """Plant scores that are all equal except one, as large as the type allows, in one query of
    `huge_every`.
    """
    at, every = buffers.sources, huge_every(problem)
    if isinstance(problem, AttentionBackwardProblem):
        problem = problem.forward
    if not isinstance(problem, AttentionProblem):
        extents = softmax_integers(problem)
        kernels.run(
            Command.PLANT_HUGE_SOFTMAX,
            {"scores": at["scores"]},
            {"rows": extents["rows"], "cols": extents["cols"], "seed": row_seed},
            {"least_exponent": HUGE_SOFTMAX.start, "count": len(HUGE_SOFTMAX)},
        )
        return
    exponents, _ = HUGE_EXPONENTS[problem.dtype]
    for one, shift, sides in parts_of(problem, kind):
        if sees_nothing(one, sides):
            continue
        kernels.run(
            Command.PLANT_HUGE_ATTENTION,
            {name: at[name] + shift[name] for name in ("query", "key")},
            {
                "dtype": DTYPES[one.dtype],
                **attention_integers(one, 2),
                **{"seed": row_seed, "every": every},
            },
            {"least_exponent": exponents.start, "count": len(exponents)},
        )
