"""Problems: one frozen dataclass for each operation, parsed from text such as ``S=1024,D=64``.

A problem is one of three identities (problem, artifact, environment). It has the operation, data
types, layouts, mask and shape. The GPU is a separate `hardware.Gpu`. A new operation is a file in
this package and an entry in `PROBLEMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from tuner.errors import ConfigError
from tuner.problem.attention import AttentionProblem, as_attention
from tuner.problem.attention_backward import AttentionBackwardProblem
from tuner.problem.attention_masks import LAYOUTS, Axes, Layout
from tuner.problem.base import (
    DTYPE_ALIASES,
    DTYPE_BYTES,
    E4M3,
    MAX_EXTENT,
    DType,
    Operand,
    Problem,
    listing,
)
from tuner.problem.gemm import (
    ACTIVATIONS,
    EPILOGUE_SCALES,
    EPILOGUES,
    SCALE_BLOCK,
    SCALES,
    GemmProblem,
    Major,
    Scales,
)
from tuner.problem.grouped_gemm import SIZES, GroupedGemmProblem, rows_of
from tuner.problem.softmax import SoftmaxProblem
from tuner.problem.swiglu import PAIRINGS, Pairing, SwigluProblem

__all__ = [
    "ACTIVATIONS",
    "DTYPE_ALIASES",
    "DTYPE_BYTES",
    "E4M3",
    "EPILOGUES",
    "EPILOGUE_SCALES",
    "LAYOUTS",
    "MAX_EXTENT",
    "PAIRINGS",
    "PROBLEMS",
    "SCALES",
    "SCALE_BLOCK",
    "SIZES",
    "AttentionBackwardProblem",
    "AttentionProblem",
    "Axes",
    "DType",
    "GemmProblem",
    "GroupedGemmProblem",
    "Layout",
    "Major",
    "Operand",
    "Pairing",
    "Problem",
    "Scales",
    "SoftmaxProblem",
    "SwigluProblem",
    "as_attention",
    "as_problem",
    "listing",
    "problem_from_json",
    "rows_of",
]

#: Problem classes by `op`, in the order of messages.
PROBLEMS: dict[str, type[Problem]] = {
    cls.op: cls
    for cls in (
        AttentionProblem,
        AttentionBackwardProblem,
        GemmProblem,
        SwigluProblem,
        GroupedGemmProblem,
        SoftmaxProblem,
    )
}


def as_problem(text: Problem | str) -> Problem:
    """A problem from itself, or from the text of an attention shape, as ``S=1024,D=64``.

    Raises:
        ConfigError: on a text that is not such a shape, or an object of another type.
    """
    if isinstance(text, str):
        return AttentionProblem.parse(text)
    if not isinstance(text, Problem):
        allowed = "a problem, as tuner.GemmProblem(64, 4096, 4096), or text, as 'S=1024,D=64'"
        raise ConfigError(f"{text!r:.60} is not a problem (allowed: {allowed})")
    return text


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """Inverse of `Problem.to_json`.

    Raises:
        ConfigError: when `op` or a field is unknown, missing or of the wrong type.
    """
    values = dict(data)
    op = values.pop("op", None)
    if op not in PROBLEMS:
        raise ConfigError(f"op={op!r} is not known (allowed: {', '.join(PROBLEMS)})")
    cls = PROBLEMS[op]
    types = _types(cls)
    unknown = set(values) - set(types)
    if unknown:
        raise ConfigError(cls._unknown("field", sorted(unknown)[0], types))
    for name, value in values.items():
        if type(value) is not types[name]:
            raise ConfigError(f"{op}.{name}={value!r} is not of type {types[name].__name__}")
    try:
        return cls(**values)
    except TypeError as exc:
        raise ConfigError(f"{op}: {exc}") from exc


@cache
def _types(cls: type[Problem]) -> dict[str, type]:
    """JSON type of each field."""
    kinds = {"int": int, "bool": bool, "float": float}
    return {field.name: kinds.get(str(field.type), str) for field in fields(cls)}
