"""Commands of the gate's own kernels (``templates/reference.cu.j2``) and arguments of each.

The first integer of every launch is the command. The template makes its enum and its structs of
this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, auto

from tuner.families.arguments import EXTENTS, WINDOW, Arguments, stride_names


class Command(IntEnum):
    """The first integer of a launch."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last: list[int]) -> int:
        return count

    FILL = auto()
    PLANT_ATTENTION = auto()
    SCALE_COLUMNS = auto()
    PLANT_SOFTMAX = auto()
    ATTENTION = auto()
    GEMM = auto()
    SOFTMAX = auto()
    COMPARE = auto()
    COUNT_CHANGED = auto()
    CHECKSUM = auto()
    GATE_PAIRS = auto()
    PLANT_HUGE_ATTENTION = auto()
    PLANT_HUGE_SOFTMAX = auto()
    COPY = auto()
    TO_PAGES = auto()
    GRADIENTS = auto()
    KEEP_ATTENTION = auto()
    PLANT_MASK = auto()


MATRIX_STRIDES = ("batch", "row", "column")
"""Endings of the names of the strides of a product's matrix."""


def _matrix_strides(*matrices: str) -> tuple[str, ...]:
    return tuple(f"{matrix}_{axis}" for matrix in matrices for axis in MATRIX_STRIDES)


def _typed(
    tensors: tuple[str, ...], integers: tuple[str, ...], scalars: tuple[str, ...] = ()
) -> Arguments:
    """A command whose kernel is compiled for each type of elements."""
    return Arguments(tensors, ("command", "dtype", *integers), scalars)


def _plain(
    tensors: tuple[str, ...], integers: tuple[str, ...], scalars: tuple[str, ...] = ()
) -> Arguments:
    return Arguments(tensors, ("command", *integers), scalars)


_SOFTMAX = ("rows", "cols", "query_rows", "causal")
_MATRICES = ("query", "key", "value", "out")
ATTENTION_OTHERS = ("descale_q", "descale_k", "descale_v", "bias", "slopes", "sinks", "mask")
"""Attention's operands beside the matrices; null where there is none. No problem has `slopes`; the
reference takes them."""
MASK_STRIDES = ("mask_batch", "mask_head", "mask_row")
"""Names of the strides of a bias or mask."""

COMMANDS: Mapping[Command, Arguments] = {
    Command.FILL: _typed(("target",), ("n", "seed"), ("mean", "deviation")),
    Command.PLANT_ATTENTION: _typed(
        ("query", "key"), (*EXTENTS, *stride_names("query", "key"), *WINDOW, "seed"), ("strength",)
    ),
    Command.SCALE_COLUMNS: _typed(
        ("a",), ("batch", "rows", *_matrix_strides("a"), "count"), ("factor",)
    ),
    Command.PLANT_SOFTMAX: _plain(("scores",), (*_SOFTMAX, "seed"), ("height",)),
    Command.ATTENTION: _typed(
        (*_MATRICES, "statistics", *ATTENTION_OTHERS),
        (*EXTENTS, *stride_names(*_MATRICES), *WINDOW, *MASK_STRIDES, "value_dim"),
        ("scale", "softcap"),
    ),
    Command.GEMM: _typed(
        ("a", "b", "d", "bias", "residual", "scale_a", "scale_b"),
        (
            *("batch", "m", "n", "k"),
            *_matrix_strides("a", "b", "d"),
            *("activation", "residual_dtype", "scales_each", "scale_a_block"),
        ),
        ("alpha", "beta"),
    ),
    Command.SOFTMAX: _plain(("scores", "out"), _SOFTMAX, ("scale",)),
    Command.COMPARE: _typed(
        ("out", "reference", "result"), ("n", "width"), ("absolute", "relative", "row")
    ),
    Command.COUNT_CHANGED: _plain(("data", "result"), ("bytes",)),
    Command.CHECKSUM: _plain(("data", "result"), ("bytes",)),
    Command.GATE_PAIRS: _plain(("both", "out"), ("rows", "n", "pair", "group", "lane", "chunk")),
    Command.PLANT_HUGE_ATTENTION: _typed(
        ("query", "key"),
        (*EXTENTS, *stride_names("query", "key"), "seed", "every"),
        ("least_exponent", "count"),
    ),
    Command.PLANT_HUGE_SOFTMAX: _plain(
        ("scores",), ("rows", "cols", "seed"), ("least_exponent", "count")
    ),
    Command.COPY: _plain(("source", "target"), ("bytes",)),
    Command.TO_PAGES: _plain(
        ("source", "cache", "table"),
        ("rows", "heads", "head_dim", "page_stride", "head_stride", "slot_stride", "page_size"),
    ),
    Command.GRADIENTS: _typed(
        (
            *("query", "key", "value", "grad_out", "out", "statistics", "delta"),
            *("grad_query", "grad_key", "grad_value"),
        ),
        (*EXTENTS, *stride_names(*_MATRICES), *WINDOW),
        ("scale", "softcap"),
    ),
    Command.KEEP_ATTENTION: _typed(("exact", "statistics", "out", "logsumexp"), ("n", "rows")),
    Command.PLANT_MASK: _plain(("mask",), ("rows", "query_rows", "cols", "seed")),
}
"""Arguments of each command. Behind those of `SCALE_COLUMNS` come as many columns as it counts."""
