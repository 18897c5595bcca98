"""JSON that somebody else may have written or changed: read and checked before it is believed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from tuner.errors import ConfigError

_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text", (str,)),
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "int | None": ("a whole number or null", (int, type(None))),
    "float | None": ("a number or null", (int, float, type(None))),
}
"""Annotations of fields that `checked` knows, in words and as types."""


def parse(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """`json.loads`, where what is nested too deeply is wrong input like any other.

    Args:
        text: JSON.
        pairs: makes an object of its keys and values (``object_pairs_hook``).

    Raises:
        ValueError: when it is not JSON; a ConfigError where it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError as exc:
        raise ConfigError("it is nested too deeply") from exc


def checked(cls: type, data: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON gave them, each that is there of its type.

    Fields of composite types are passed over, and so is what is no field.

    Raises:
        ConfigError: names the field, what it is and what it has to be.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{cls.__name__}: {data!r} is not an object")
    for field in fields(cls):
        if field.name in data and str(field.type) in _TYPES:
            value, (words, types) = data[field.name], _TYPES[str(field.type)]
            is_flag = isinstance(value, bool)
            if not isinstance(value, types) or (is_flag and bool not in types):
                raise ConfigError(f"{field.name}={value!r} is not {words}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field.name}={value!r} is not finite")
    return dict(data)
