"""Arguments of a launch: their declaration, and the strides of a mask operand."""

from __future__ import annotations

from tuner.families.arguments import EXTENTS, WINDOW, Arguments, stride_names
from tuner.families.base import LSE, Strides
from tuner.problem import AttentionProblem, Operand

MASK_STRIDES = ("mask_batch", "mask_head", "mask_row", "mask_key")
"""Names of the strides of a mask or bias."""


def arguments_of(problem: AttentionProblem) -> Arguments:
    """Declaration of a launch's arguments."""
    names = [matrix.name for matrix in problem.matrices]
    unnamed = [operand.name for operand in problem.operands if operand.name not in names]
    rows: tuple[str, ...] = ()
    if problem.is_paged:
        rows = ("total_q", "page_size", "pages", "table_stride")
    elif problem.is_varlen:
        rows = ("total_q", "total_kv")
    return Arguments(
        tensors=(*names, LSE, *map(argument, unnamed)),
        integers=(
            *EXTENTS,
            *(("value_dim",) if problem.value_dim else ()),
            *stride_names(*names),
            *("splits", "pdl", "clustered"),
            *(WINDOW if problem.is_windowed else ()),
            *rows,
            *(MASK_STRIDES if problem.mask_operand else ()),
            *(("blocks_batch", "blocks_head", "block_columns") if problem.block_mask else ()),
        ),
        scalars=("scale", "softcap") if problem.softcap else ("scale",),
    )


def argument(operand: str) -> str:
    """The kernel's name of an operand: a bias and a boolean mask are one argument."""
    return "mask" if operand == "bias" else operand


def mask_strides(problem: AttentionProblem, operand: Operand, own: Strides) -> tuple[int, ...]:
    """Strides of a mask operand over batch, heads, queries and keys, 0 along axes that it has
    not.
    """
    strides = own.get(operand.name, (*problem.mask_strides, 1))
    return tuple(
        0 if size == 1 else stride for size, stride in zip(operand.shape, strides, strict=True)
    )
