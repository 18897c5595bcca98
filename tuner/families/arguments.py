"""Declaration of a launch's arguments: their names, in order, stated once by the family.

The declaration makes both sides of a call. `templates/arguments.cu.j2` renders it as structs of the
CUDA text, which names arguments in place of counting them. `Arguments.launch` orders the values
that a family gives by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EXTENTS = ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_kv", "head_dim")
"""Names of an attention's sizes."""
WINDOW = ("left", "right")
"""Names of the keys before and behind its own that a query sees."""
STRIDES = ("batch", "head", "row")
"""Endings of the names of a matrix's strides."""


def extents_of(problem: object) -> dict[str, int]:
    """The sizes of an attention problem under `EXTENTS`."""
    return {name: getattr(problem, name) for name in EXTENTS}


def stride_names(*matrices: str) -> tuple[str, ...]:
    """Names of the strides of matrices with a batch and heads, elements."""
    return tuple(f"{matrix}_{ending}" for matrix in matrices for ending in STRIDES)


def named_strides(matrices: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The strides of matrices under `stride_names`; those of the last dimension are left out."""
    return {
        f"{matrix}_{ending}": strides[axis]
        for matrix, strides in matrices.items()
        for axis, ending in enumerate(STRIDES)
    }


@dataclass(frozen=True)
class Arguments:
    """Names of a kernel's tensors, integers and scalars, in the order of its launch."""

    tensors: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()

    def ordered(
        self, tensors: Mapping[str, Any], integers: Mapping[str, int], scalars: Mapping[str, float]
    ) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[float, ...]]:
        """The values of a launch in its order.

        Raises:
            ValueError: when a name is missing, or is not declared.
        """
        return (
            _ordered("tensors", self.tensors, tensors),
            _ordered("integers", self.integers, integers),
            _ordered("scalars", self.scalars, scalars),
        )


def _ordered(kind: str, names: tuple[str, ...], values: Mapping[str, Any]) -> tuple[Any, ...]:
    if len(values) != len(names) or not values.keys() >= set(names):
        missing = ", ".join(name for name in names if name not in values) or "none"
        unknown = ", ".join(name for name in values if name not in names) or "none"
        raise ValueError(f"{kind} of a launch: missing {missing}; not declared {unknown}")
    return tuple(values[name] for name in names)
