"""Base class of problems: a frozen dataclass with text keys, JSON, operands and FLOPs."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple, Self

from tuner.errors import ConfigError
from tuner.hardware import E4M3_RATE

DType = Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int32", "bool"]
E4M3: DType = "float8_e4m3fn"
"""Quantised operands: see `AttentionProblem` and `GemmProblem`."""
DTYPE_BYTES: dict[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    E4M3: 1,
    "int32": 4,
    "bool": 1,
}
DTYPE_ALIASES: dict[str, str] = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "e4m3": E4M3,
    **{name: name for name in DTYPE_BYTES},
}
#: Names of data types in labels.
DTYPE_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", E4M3: "e4m3"}
#: Largest extent of one dimension: CUTLASS's TMA coordinates are 32-bit signed.
MAX_EXTENT = 2**31 - 1
MAX_PARTS = 1 << 16
"""Maximum groups or sequences of different sizes; each one takes time and memory."""


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class Operand:
    """Tensor of a problem: logical `shape`, `strides` in elements, and data type."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    is_output: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the tensor; problems are dense, so elements x width."""
        return self.elements * DTYPE_BYTES[self.dtype]

    def apart(self, strides: tuple[int, ...]) -> Operand:
        """Flat operand that spans the memory from its first to its last element, for strided
        tensors.
        """
        last = sum((n - 1) * stride for n, stride in zip(self.shape, strides, strict=True))
        return Operand(self.name, (last + 1,), (1,), self.dtype, self.is_output)


class Meaning(NamedTuple):
    """Description of one key of a problem's text."""

    text: str
    unit: str = ""
    """Unit of its number; empty if it is not a count."""
    default: str = ""
    """Text to show if the field's default means the value of another key."""


class DescribedKey(NamedTuple):
    """A row of `Problem.described_keys`."""

    key: str
    meaning: str
    unit: str
    default: str
    """Default value, ``required``, or the key that may replace it."""


@dataclass(frozen=True)
class Problem(ABC):
    """Base of all problems. Subclasses set `op`, `keys` (text key -> field) and `meanings`."""

    op: ClassVar[str]
    keys: ClassVar[Mapping[str, str]]
    meanings: ClassVar[Mapping[str, Meaning]]
    required: ClassVar[tuple[str, ...]]
    retired: ClassVar[Mapping[str, str]] = {}
    """Keys and fields of earlier versions, and what to do without them."""
    omitted: ClassVar[Mapping[str, Any]] = {}
    """Fields that the JSON leaves out where they have these values: they came later, and problems
    without them keep their keys."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``KEY=VALUE,...``.

        Raises:
            ConfigError: on an unknown, repeated or missing key or a value out of range.
        """
        values: dict[str, str] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, separator, value = item.partition("=")
            key, value = key.strip(), value.strip()
            if not separator or not value:
                raise ConfigError(
                    f"'{item}' is not KEY=VALUE (allowed keys: {', '.join(cls.keys)})"
                )
            if key not in cls.keys:
                raise ConfigError(cls._unknown("key", key, cls.keys))
            if key in values:
                raise ConfigError(f"key '{key}' is given twice (allowed: once)")
            values[key] = value
        return cls.from_keys(values)

    @classmethod
    def _unknown(cls, kind: str, name: str, allowed: Iterable[str]) -> str:
        """Message for a key or a field that problems do not have."""
        if name in cls.retired:
            return f"{kind} '{name}' of {cls.op} was removed: {cls.retired[name]}"
        return f"unknown {kind} '{name}' for {cls.op} (allowed: {', '.join(allowed)})"

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Self:
        """Build a problem from text keys (`keys`) with string or typed values."""
        unknown = set(values) - set(cls.keys)
        if unknown:
            raise ConfigError(cls._unknown("key", sorted(unknown)[0], cls.keys))
        types = {field.name: str(field.type) for field in fields(cls)}
        parsed: dict[str, Any] = {}
        for key, value in values.items():
            name = cls.keys[key]
            for target in name.split("+"):
                if target in parsed:
                    keys = [k for k in values if target in cls.keys[k].split("+")]
                    raise ConfigError(f"{' and '.join(keys)} set the same (allowed: one of them)")
                parsed[target] = _convert(key, value, types[target])
        if missing := [text for key in cls.required if (text := cls._missing(key, parsed))]:
            allowed = ", ".join(cls.keys)
            raise ConfigError(f"{cls.op} needs {' and '.join(missing)} (allowed keys: {allowed})")
        return cls(**parsed)

    @classmethod
    def described_keys(cls) -> list[DescribedKey]:
        """Every key with its meaning, unit and default, in the order of `keys`."""
        defaults = {field.name: field.default for field in fields(cls)}
        parts = {name: key for key in cls.required for name in cls.keys[key].split("+")}
        texts = []
        for key, names in cls.keys.items():
            name, meaning = names.split("+")[0], cls.meanings[key]
            if key in cls.required:
                default = "required"
            elif name in parts:
                default = f"in place of {parts[name]}"
            else:
                default = meaning.default or _default_text(defaults[name])
            texts.append(DescribedKey(key, meaning.text, meaning.unit, default))
        return texts

    @classmethod
    def _missing(cls, key: str, parsed: Mapping[str, Any]) -> str:
        """Text that names a missing required key: itself, or its missing parts."""
        names = cls.keys[key].split("+")
        absent = [name for name in names if name not in parsed]
        if absent and len(absent) < len(names):
            return " and ".join(k for k, name in cls.keys.items() if name in absent)
        return key if absent else ""

    def to_json(self) -> dict[str, Any]:
        """A flat dict with `op` and every field, but for those that are `omitted`;
        `problem_from_json` reads it back.
        """
        values = {"op": self.op, **asdict(self)}
        absent = {name for name, value in self.omitted.items() if values[name] == value}
        return {name: value for name, value in values.items() if name not in absent}

    @cached_property
    def key(self) -> str:
        """Canonical JSON text: equal problems have equal keys."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @abstractmethod
    def label(self) -> str:
        """Short text in the syntax of `parse`."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the operation. A causal mask counts half, a sliding window
        its visible pairs.
        """

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """Inputs in order, then the outputs."""

    @property
    def inputs(self) -> tuple[Operand, ...]:
        """Operands that are read."""
        return tuple(operand for operand in self.operands if not operand.is_output)

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """Operands that are written, last."""
        return tuple(operand for operand in self.operands if operand.is_output)

    @property
    def output(self) -> Operand:
        """Only output, or the last of several."""
        return self.operands[-1]

    @property
    def tensor_rate(self) -> int:
        """Tensor-core rate relative to that of 16-bit operands."""
        return E4M3_RATE if getattr(self, "dtype", "") == E4M3 else 1

    @property
    def bytes(self) -> int:
        """Minimum bytes moved: each input read once, each output written once."""
        return sum(operand.bytes for operand in self.operands)


def listing(problems: Iterable[Problem]) -> str:
    """Text of a file for ``tuner sweep --problems``: JSON, one line a problem."""
    lines = [json.dumps(f"op={problem.op},{problem.label()}") for problem in problems]
    return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"


def _default_text(value: Any) -> str:
    """Default value as it is typed after its key; ``none`` for an empty string."""
    if isinstance(value, bool | float):
        return f"{value:g}"
    return DTYPE_SHORT.get(value, str(value)) or "none"


def _convert(key: str, value: Any, annotation: str) -> Any:
    if annotation == "int":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigError(f"{key}={value!r} is not a whole number (allowed: as in {key}=1024)")
        if not re.fullmatch(r"[+-]?[0-9]{1,64}", str(value)):
            raise ConfigError(f"{key}={value} is not a whole number (allowed: as in {key}=1024)")
        return int(value)
    if annotation == "bool":
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text in ("1", "true", "yes"):
            return True
        if text in ("0", "false", "no"):
            return False
        raise ConfigError(f"{key}={value} is not a truth value (allowed: 0, 1, true, false)")
    if annotation == "float":
        number = _to_float(value)
        if number is None:
            raise ConfigError(f"{key}={value} is not a number (allowed: as in {key}=50)")
        return number
    text = str(value).lower()
    return DTYPE_ALIASES.get(text, text) if key.startswith("dtype") else text


def _to_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def check_extent(key: str, value: int, minimum: int = 1, maximum: int = MAX_EXTENT) -> None:
    """Check that a dimension is from `minimum` to `maximum`.

    Raises:
        ConfigError: when it is not.
    """
    if not minimum <= value <= maximum:
        raise ConfigError(f"{key}={value} is out of range (allowed: {minimum} to {maximum})")


def check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Check that a value is allowed.

    Raises:
        ConfigError: when it is not.
    """
    if value not in allowed:
        names = ", ".join(DTYPE_SHORT.get(name, name) for name in allowed if name)
        full = DTYPE_SHORT.get(value, value)
        raise ConfigError(f"{key}={full} is not known (allowed: {names})")


def doublings(one: Problem, other: Problem) -> float:
    """Distance of two problems: doublings between their sizes, plus one for every other difference.
    It is finite between different classes of an operation.
    """
    here, away = _facts(one), _facts(other)

    def between(a: Any, b: Any) -> float:  # None if only one of them has a feature
        if type(a) is int and type(b) is int and a and b:
            return abs(math.log2(a / b))
        return float(a != b)

    return sum(between(here.get(name), away.get(name)) for name in {**here, **away})


@lru_cache(1 << 12)
def _facts(problem: Problem) -> Mapping[str, Any]:
    return problem.to_json()
