"""JSON and YAML that somebody else may have written or changed, read and checked before use."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, cast

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

FAULTS = (
    OSError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Exceptions of reading a file that is damaged or of another version, and of making objects of it.
"""

MAX_YAML_DEPTH = 8
MAX_YAML_CHARACTERS = 256
"""Longest value; the text of a problem is shorter."""

_YAML_VALUES: Mapping[str, tuple[re.Pattern[str], list[str]]] = {
    "null": (re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    "int": (re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")),
    "float": (
        re.compile(
            r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
            r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
        ),
        list("-+.0123456789"),
    ),
}
"""Plain values of YAML 1.2's core schema (yaml.org/spec/1.2.2, 10.3.2), and their first characters.
Everything else is text."""

_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)
"""Strings, brackets and commas. No place is tried twice: the time is linear in the text."""


def check_extent(text: bytes, *, tokens: int, depth: int) -> None:
    """Refuse JSON that would take too much memory or stack, before it is parsed.

    Args:
        text: text to parse.
        tokens: maximum number of strings, brackets and commas, which bounds the number of values.
        depth: maximum nesting of objects and lists.

    Raises:
        ConfigError: when a limit is exceeded.
    """
    level = 0
    for count, match in enumerate(_TOKENS.finditer(text), 1):
        if count > tokens:
            raise ConfigError(f"it is too large (allowed: {tokens} strings, brackets and commas)")
        first = match[0][:1]
        if first in b"[{":
            level += 1
            if level > depth:
                raise ConfigError(f"it is nested too deeply (allowed: {depth} levels)")
        elif first in b"]}":
            level -= 1


def parse(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """`json.loads` that reports too deep nesting as wrong input.

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


def parse_yaml(text: str, pairs: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    """Read YAML 1.2 of lists, objects and short values: ``0100`` is 100, and ``1:30`` is text.

    Args:
        text: YAML.
        pairs: makes an object of its keys and values.

    Raises:
        ValueError: when it is not YAML; a ConfigError where it has an alias, a tag, a long value or
            too many levels.
    """
    import yaml

    try:
        return yaml.load(text, Loader=_yaml_loader(pairs))
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def _yaml_loader(pairs: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's safe loader with limits and the values of YAML 1.2 (`_YAML_VALUES`)."""

        level = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            where = f"line {event.start_mark.line + 1}"
            if isinstance(event, yaml.AliasEvent):
                raise ConfigError(f"{where}: an alias is not allowed (write the value again)")
            if event.tag is not None:
                raise ConfigError(f"{where}: a tag is not allowed (quote what is text)")
            size = len(event.value) if isinstance(event, yaml.ScalarEvent) else 0
            if size > MAX_YAML_CHARACTERS:
                raise ConfigError(
                    f"{where}: a value of {size} characters (allowed: {MAX_YAML_CHARACTERS})"
                )
            if self.level >= MAX_YAML_DEPTH:
                raise ConfigError(
                    f"{where}: it is nested too deeply (allowed: {MAX_YAML_DEPTH} levels)"
                )
            self.level += 1
            try:
                return super().compose_node(parent, index)
            finally:
                self.level -= 1

    def mapping(loader: Any, node: Any) -> Any:
        construct = loader.construct_object
        return pairs([(str(construct(key)), construct(value)) for key, value in node.value])

    def number(loader: Any, node: Any) -> int:
        return int(node.value, 0 if node.value[1:2] in ("o", "x") else 10)

    Loader.yaml_implicit_resolvers = {}
    for kind, (pattern, first) in _YAML_VALUES.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", pattern, first)
    Loader.add_constructor("tag:yaml.org,2002:int", number)
    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader


def checked(cls: type, data: Any) -> dict[str, Any]:
    """The fields of a dataclass, from JSON, with their types checked. Fields of composite types are
    not checked; unknown keys are dropped.

    Raises:
        ConfigError: names the field, its type and the wanted type.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{cls.__name__}: {data!r} is not an object")
    for name, words, types in _known_fields(cls):
        if name in data:
            value = data[name]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise ConfigError(f"{name}={value!r} is not {words}")
            if float in types and value is not None:
                try:
                    is_finite = math.isfinite(cast(float, value))
                except OverflowError as exc:  # a whole number of more than 308 digits
                    raise ConfigError(f"{name} is too large for a floating-point number") from exc
                if not is_finite:
                    raise ConfigError(f"{name}={value!r} is not finite")
    return dict(data)


@cache
def _known_fields(cls: type) -> tuple[tuple[str, str, tuple[type, ...]], ...]:
    """Names of a dataclass's fields that `checked` checks, and their `_TYPES`."""
    return tuple(
        (field.name, *_TYPES[str(field.type)]) for field in fields(cls) if str(field.type) in _TYPES
    )
