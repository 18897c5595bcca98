"""What is asked: one frozen dataclass an operation, parsed from ``S=1024,D=64``.

A problem is the first of the three identities (problem, artifact, environment). It holds the
operation, data types, layouts, mask and shape; the GPU is named beside it by `hardware.Gpu`.
"""

from __future__ import annotations

import json
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, get_args

from tuner.errors import ConfigError

DType = Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "int32"]
Layout = Literal["bhsd", "bshd", "bshd_bhsd"]
"""Order of the dimensions in memory. ``bshd_bhsd``: queries and output bshd, keys and values bhsd,
as Transformers' models have them that fill a cache.
"""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Major = Literal["row", "col"]
Activation = Literal["", "relu", "gelu", "gelu_tanh", "silu"]
"""``gelu`` is by erf, ``gelu_tanh`` its approximation; no text is none."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)[1:]
Pairing = Literal["interleaved", "concatenated"]
PAIRINGS: tuple[Pairing, ...] = get_args(Pairing)
EPILOGUES = (
    *("bias", "residual", "bias_residual"),
    *ACTIVATIONS,
    *(f"bias_{activation}" for activation in ACTIVATIONS),
)
"""What a GEMM may do with its product besides storing it."""

E4M3: DType = "float8_e4m3fn"
"""Quantised attention: see `AttentionProblem`."""
DTYPE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, E4M3: 1, "int32": 4}
DTYPE_ALIASES: dict[str, str] = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "e4m3": E4M3,
    **{name: name for name in DTYPE_BYTES},
}
#: Head dimensions above this have no instance on Hopper (a 64 x 256 output fills the registers).
MAX_HEAD_DIM = 256
#: Largest extent of one dimension: CUTLASS's TMA coordinates are 32-bit signed.
MAX_EXTENT = 2**31 - 1


@dataclass(frozen=True)
class Operand:
    """One tensor of a problem: logical `shape`, `strides` in elements, and its data type."""

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


@dataclass(frozen=True)
class Problem(ABC):
    """Base of all problems. Subclasses set `op` and `keys` (text key -> field)."""

    op: ClassVar[str]
    keys: ClassVar[Mapping[str, str]]
    required: ClassVar[tuple[str, ...]]

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
                raise ConfigError(
                    f"unknown key '{key}' for {cls.op} (allowed: {', '.join(cls.keys)})"
                )
            if key in values:
                raise ConfigError(f"key '{key}' is given twice (allowed: once)")
            values[key] = value
        return cls.from_keys(values)

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Self:
        """Build from the textual keys (`keys`) with string or typed values."""
        unknown = set(values) - set(cls.keys)
        if unknown:
            raise ConfigError(
                f"unknown key '{sorted(unknown)[0]}' for {cls.op} (allowed: {', '.join(cls.keys)})"
            )
        types = {field.name: str(field.type) for field in fields(cls)}
        parsed: dict[str, Any] = {}
        for key, value in values.items():
            name = cls.keys[key]
            for target in name.split("+"):
                if target in parsed:
                    raise ConfigError(f"key '{key}' sets {target}, which another key sets already")
                parsed[target] = _convert(key, value, types[target])
        if missing := [text for key in cls.required if (text := cls._missing(key, parsed))]:
            allowed = ", ".join(cls.keys)
            raise ConfigError(f"{cls.op} needs {' and '.join(missing)} (allowed keys: {allowed})")
        return cls(**parsed)

    @classmethod
    def _missing(cls, key: str, parsed: Mapping[str, Any]) -> str:
        """What is to be given for a required key: itself, or the parts of it that are left."""
        names = cls.keys[key].split("+")
        absent = [name for name in names if name not in parsed]
        if absent and len(absent) < len(names):
            return " and ".join(k for k, name in cls.keys.items() if name in absent)
        return key if absent else ""

    def to_json(self) -> dict[str, Any]:
        """A flat dict with `op` and every field; `problem_from_json` reads it back."""
        return {"op": self.op, **asdict(self)}

    @cached_property
    def key(self) -> str:
        """Canonical JSON text: equal problems have equal keys."""
        return json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))

    @abstractmethod
    def label(self) -> str:
        """Short text for people, in the syntax of `parse`."""

    @property
    @abstractmethod
    def flops(self) -> int:
        """Floating-point operations of the operation itself; a causal mask counts half, a sliding
        window what it lets through.
        """

    @property
    @abstractmethod
    def operands(self) -> tuple[Operand, ...]:
        """Inputs in order, then the output."""

    @property
    def output(self) -> Operand:
        return self.operands[-1]

    @property
    def tensor_rate(self) -> int:
        """Operations a clock of the tensor cores, over those that 16-bit operands get."""
        return 1

    @property
    def bytes(self) -> int:
        """Fewest bytes moved: each input read once, each output written once."""
        return sum(operand.bytes for operand in self.operands)


def _convert(key: str, value: Any, annotation: str) -> Any:
    if annotation == "int":
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ConfigError(f"{key}={value!r} is not a whole number (allowed: as in {key}=1024)")
        try:
            return int(value)
        except ValueError:
            raise ConfigError(
                f"{key}={value} is not a whole number (allowed: as in {key}=1024)"
            ) from None
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
    except ValueError:
        return None


def _check_extent(key: str, value: int, minimum: int = 1) -> None:
    if not minimum <= value <= MAX_EXTENT:
        raise ConfigError(f"{key}={value} is out of range (allowed: {minimum} to {MAX_EXTENT})")


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value} is not known (allowed: {', '.join(allowed)})")


_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", E4M3: "e4m3"}


@dataclass(frozen=True)
class AttentionProblem(Problem):
    """softmax(scale * Q K^T + mask) V; Q is (B, H, SQ, D), K and V are (B, HKV, SKV, D).

    The causal mask is PyTorch's SDPA's: query i sees keys 0..i (top-left). The default scale is
    1/sqrt(D); it is a run-time argument and no part of the problem.

    With `dtype` e4m3 Q, K and V are quantised: what they stand for is their elements times fp32
    factors, `descale_q` (B, H) of each query head, `descale_k` and `descale_v` (B, HKV) of each
    key and value head. The output is bf16. D must be a multiple of 16, the bytes of TMA's pitch.

    A sliding window is FlashAttention's ``window_size=(left, right)``, laid along the same
    diagonal: query i sees keys i - left..i + right, its own among them, and -1 is no limit.
    ``window=W`` sets both sides, ``left=`` and ``right=`` one. One form stands for each mask: under
    a causal one the right side is -1, ``right=0`` alone is causal, and a side that cuts nothing off
    is -1. A query that sees no key has zeros for its output.

    A soft cap replaces each scaled score s by ``softcap * tanh(s / softcap)``, before the mask; 0
    is none. Neither comes with e4m3.

    With ``varlen=1`` the B sequences differ in length, SQ and SKV being the longest's, and lie one
    after the other in packed tensors: query and out (total_q, H, D), key and value (total_kv, HKV,
    D), whose layout is called bshd. Two int32 operands, `cu_seqlens_q` and `cu_seqlens_kv` (B + 1),
    hold the rows where each sequence starts, and the last one's end. Each sequence is attention of
    its own, a causal mask top-left in each. Tuned and measured on `lengths_q` and `lengths_kv`.
    It comes with no window, no soft cap, and not with e4m3.
    """

    op: ClassVar[str] = "attention"
    keys: ClassVar[Mapping[str, str]] = {
        "B": "batch",
        "H": "heads_q",
        "HKV": "heads_kv",
        "S": "seqlen_q+seqlen_kv",
        "SQ": "seqlen_q",
        "SKV": "seqlen_kv",
        "D": "head_dim",
        "causal": "is_causal",
        "window": "window_left+window_right",
        "left": "window_left",
        "right": "window_right",
        "softcap": "softcap",
        "varlen": "is_varlen",
        "dtype": "dtype",
        "layout": "layout",
    }
    required: ClassVar[tuple[str, ...]] = ("S", "D")

    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    batch: int = 1
    heads_q: int = 16
    heads_kv: int = 0
    is_causal: bool = False
    dtype: DType = "float16"
    layout: Layout = "bhsd"
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    is_varlen: bool = False

    def __post_init__(self) -> None:
        if self.heads_kv == 0:
            object.__setattr__(self, "heads_kv", self.heads_q)
        _check_extent("B", self.batch)
        _check_extent("H", self.heads_q)
        _check_extent("HKV", self.heads_kv)
        _check_extent("SQ" if self.seqlen_q != self.seqlen_kv else "S", self.seqlen_q)
        _check_extent("SKV", self.seqlen_kv)
        _check_extent("D", self.head_dim)
        if self.head_dim % 8 or self.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"D={self.head_dim} has no tuned kernel (allowed: multiples of 8 to {MAX_HEAD_DIM})"
            )
        if self.dtype == E4M3 and self.head_dim % 16:
            raise ConfigError(
                f"D={self.head_dim} has no e4m3 kernel (allowed: multiples of 16 to {MAX_HEAD_DIM})"
            )
        if self.heads_q % self.heads_kv:
            raise ConfigError(
                f"H={self.heads_q},HKV={self.heads_kv}: HKV must divide H "
                f"(allowed: {', '.join(str(d) for d in _divisors(self.heads_q))})"
            )
        _check_choice("dtype", self.dtype, ("float16", "bfloat16", E4M3))
        _check_choice("layout", self.layout, LAYOUTS)
        _check_extent("left", self.window_left, -1)
        _check_extent("right", self.window_right, -1)
        if not 0 <= self.softcap < math.inf:
            raise ConfigError(f"softcap={self.softcap} is out of range (allowed: 0, none, or more)")
        object.__setattr__(self, "softcap", float(self.softcap))
        self._reduce_window()
        if self.dtype == E4M3 and self.extras:
            raise ConfigError(f"dtype=e4m3 has no {self.extras} (allowed: fp16 and bf16 with it)")
        if self.is_varlen:
            self._check_varlen()

    def _check_varlen(self) -> None:
        if self.is_windowed or self.softcap:
            raise ConfigError("varlen=1 has no sliding window and no soft cap (allowed: neither)")
        if self.layout == "bshd_bhsd":
            raise ConfigError(f"layout={self.layout} is not for varlen=1 (allowed: bshd)")
        object.__setattr__(self, "layout", "bshd")

    def _reduce_window(self) -> None:
        """Give equal masks equal fields."""
        left, right, is_causal = self.window_left, self.window_right, self.is_causal
        if left >= self.seqlen_q - 1:  # the last query sees key 0
            left = -1
        if right == 0:
            is_causal = True
        if is_causal or right >= self.seqlen_kv - 1:  # the first query sees the last key
            right = -1
        object.__setattr__(self, "window_left", left)
        object.__setattr__(self, "window_right", right)
        object.__setattr__(self, "is_causal", is_causal)

    @property
    def is_windowed(self) -> bool:
        """A sliding window hides keys beyond what the causal mask does."""
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def visible(self) -> tuple[int, int]:
        """(left, right): query i sees keys i - left..i + right of those that there are."""
        left = self.seqlen_q if self.window_left < 0 else self.window_left
        right = self.seqlen_kv if self.window_right < 0 else self.window_right
        return left, 0 if self.is_causal else right

    def keys_of(self, first: int, last: int) -> range:
        """The keys that queries first..last see; beyond the last query there is none."""
        left, right = self.visible
        end = min(self.seqlen_kv, min(last, self.seqlen_q - 1) + right + 1)
        return range(max(0, first - left), end)

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one head that the mask lets through."""
        left, right = self.visible
        return self._keys_below(right + 1) - self._keys_below(-left)

    def _keys_below(self, offset: int) -> int:
        """Over all queries i, the sum of the numbers of keys below i + offset."""

        def total(end: int) -> int:  # of x clamped to [0, seqlen_kv], over x < end
            rising = max(0, min(end, self.seqlen_kv))
            return rising * (rising - 1) // 2 + max(0, end - self.seqlen_kv) * self.seqlen_kv

        return total(self.seqlen_q + offset) - total(offset)

    @property
    def extras(self) -> str:
        """What a kernel of plain attention, full or causal, lacks for this problem; or empty."""
        parts = (
            ("sliding window", self.is_windowed),
            ("soft cap", self.softcap > 0),
            ("variable lengths", self.is_varlen),
        )
        return " or ".join(name for name, is_on in parts if is_on)

    @property
    def lengths_q(self) -> tuple[int, ...]:
        """Rows of each sequence of queries, as a problem of unlike lengths is measured."""
        return self._lengths(self.seqlen_q)

    @property
    def lengths_kv(self) -> tuple[int, ...]:
        """Rows of each sequence of keys, in the order of `lengths_q`."""
        return self._lengths(self.seqlen_kv)

    @property
    def evened(self) -> AttentionProblem:
        """As many sequences, all of the mean length, for estimates; itself where all are equal."""
        if not self.is_varlen:
            return self
        queries, keys = (-(-total // self.batch) for total in (self.total_q, self.total_kv))
        return replace(self, seqlen_q=queries, seqlen_kv=keys, is_varlen=False)

    def _lengths(self, longest: int) -> tuple[int, ...]:
        """Evenly spread from `longest` down to a quarter of it, in an order that is always the
        same; all `longest` where lengths do not vary.
        """
        if not self.is_varlen:
            return (longest,) * self.batch
        step = (longest - -(-longest // 4)) / max(1, self.batch - 1)
        spread = [longest - round(index * step) for index in range(self.batch)]
        random.Random(_LENGTHS_SEED).shuffle(spread)
        return tuple(spread)

    @property
    def total_q(self) -> int:
        """Rows of queries over all sequences."""
        return sum(self.lengths_q)

    @property
    def total_kv(self) -> int:
        """Rows of keys over all sequences."""
        return sum(self.lengths_kv)

    @property
    def sequences(self) -> tuple[AttentionProblem, ...]:
        """Each sequence of a problem of unlike lengths as a problem of its own, in order."""
        return tuple(
            replace(self, batch=1, seqlen_q=queries, seqlen_kv=keys, is_varlen=False)
            for queries, keys in zip(self.lengths_q, self.lengths_kv, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """What is off is absent, as it was before there was any: window, soft cap, varlen."""
        absent = {name for name, off in _OFF.items() if getattr(self, name) == off}
        return {name: value for name, value in super().to_json().items() if name not in absent}

    @classmethod
    def from_keys(cls, values: Mapping[str, Any]) -> Self:
        if "HKV" in values and str(values["HKV"]).strip() == "0":
            raise ConfigError(f"HKV=0 is out of range (allowed: 1 to {MAX_EXTENT})")
        return super().from_keys(values)

    def label(self) -> str:
        heads = f"H={self.heads_q}" + (
            "" if self.heads_kv == self.heads_q else f",HKV={self.heads_kv}"
        )
        length = (
            f"S={self.seqlen_q}"
            if self.seqlen_q == self.seqlen_kv
            else f"SQ={self.seqlen_q},SKV={self.seqlen_kv}"
        )
        tail = ",varlen=1" if self.is_varlen else ""
        tail += (",causal=1" if self.is_causal else "") + self._window_label()
        tail += f",softcap={self.softcap:g}" if self.softcap else ""
        tail += f",dtype={_SHORT[self.dtype]}"
        is_implied = self.is_varlen or self.layout == "bhsd"
        tail += "" if is_implied else f",layout={self.layout}"
        return f"B={self.batch},{heads},{length},D={self.head_dim}{tail}"

    def _window_label(self) -> str:
        left, right = self.window_left, self.window_right
        if left >= 0 and (self.is_causal or left == right):
            return f",window={left}"
        return (f",left={left}" if left >= 0 else "") + (f",right={right}" if right >= 0 else "")

    @property
    def flops(self) -> int:
        if self.is_varlen:
            return sum(sequence.flops for sequence in self.sequences)
        if self.is_windowed:
            return 4 * self.batch * self.heads_q * self.head_dim * self.pairs
        full = 4 * self.batch * self.heads_q * self.seqlen_q * self.seqlen_kv * self.head_dim
        return full // 2 if self.is_causal else full

    @property
    def tensor_rate(self) -> int:
        """8-bit operands are multiplied twice as fast (H100 whitepaper, table 2)."""
        return 2 if self.dtype == E4M3 else 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        *inputs, out = self.matrices
        if self.is_varlen:
            return (*inputs, *self._starts(), out)
        return (*inputs, *(self._descales() if self.dtype == E4M3 else ()), out)

    def _starts(self) -> Iterator[Operand]:
        for name in ("q", "kv"):
            yield Operand(f"cu_seqlens_{name}", (self.batch + 1,), (1,), "int32")

    def _descales(self) -> Iterator[Operand]:
        for name, heads in (("q", self.heads_q), ("k", self.heads_kv), ("v", self.heads_kv)):
            yield Operand(f"descale_{name}", (self.batch, heads), (heads, 1), "float32")

    @property
    def matrices(self) -> tuple[Operand, Operand, Operand, Operand]:
        """Of the operands query, key, value and out, all (B, H, S, D); packed sequences are a batch
        of one.
        """
        batch, rows_q, rows_kv = self.batch, self.seqlen_q, self.seqlen_kv
        if self.is_varlen:
            batch, rows_q, rows_kv = 1, self.total_q, self.total_kv
        of_queries, _, of_keys = self.layout.partition("_")

        def tensor(name: str, heads: int, seqlen: int, layout: str) -> Operand:
            shape = (batch, heads, seqlen, self.head_dim)
            if layout == "bhsd":
                strides = (heads * seqlen * self.head_dim, seqlen * self.head_dim, self.head_dim, 1)
            else:
                strides = (seqlen * heads * self.head_dim, self.head_dim, heads * self.head_dim, 1)
            is_output = name == "out"
            dtype: DType = "bfloat16" if is_output and self.dtype == E4M3 else self.dtype
            return Operand(name, shape, strides, dtype, is_output)

        return (
            tensor("query", self.heads_q, rows_q, of_queries),
            tensor("key", self.heads_kv, rows_kv, of_keys or of_queries),
            tensor("value", self.heads_kv, rows_kv, of_keys or of_queries),
            tensor("out", self.heads_q, rows_q, of_queries),
        )


#: Fields of `AttentionProblem` that its JSON leaves out where they have these values.
_OFF: Mapping[str, Any] = {
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "is_varlen": False,
}
#: Of the order in which the sequences of unlike lengths lie.
_LENGTHS_SEED = 0


@dataclass(frozen=True)
class GemmProblem(Problem):
    """D[b] = A[b] @ B[b], fp32 accumulation; A is (M, K), B is (K, N), D is (M, N) row-major.

    `epilogue` is one of `EPILOGUES`: D = activation(A @ B + bias) or A @ B + bias + residual, with
    what it names of them. The bias is (N), of A's type; the residual is (M, N), of D's.

    `layout_a` and `layout_b` are the storage order of A and B: ``row`` makes A K-major and B
    N-major, ``col`` makes A M-major and B K-major. The default (row, col) is
    `torch.nn.functional.linear`'s, cuBLAS's TN.
    """

    op: ClassVar[str] = "gemm"
    keys: ClassVar[Mapping[str, str]] = {
        "M": "m",
        "N": "n",
        "K": "k",
        "B": "batch",
        "dtype": "dtype",
        "dtype_d": "dtype_d",
        "layout_a": "layout_a",
        "layout_b": "layout_b",
        "epilogue": "epilogue",
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N", "K")

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: DType = "float16"
    dtype_d: DType | Literal[""] = ""
    layout_a: Major = "row"
    layout_b: Major = "col"
    epilogue: str = ""

    def __post_init__(self) -> None:
        if self.dtype_d == "":
            object.__setattr__(self, "dtype_d", self.dtype)
        for key, value in (("M", self.m), ("N", self.n), ("K", self.k), ("B", self.batch)):
            _check_extent(key, value)
        _check_choice("dtype", self.dtype, ("float16", "bfloat16"))
        _check_choice("dtype_d", self.dtype_d, (self.dtype, "float32"))
        _check_choice("layout_a", self.layout_a, ("row", "col"))
        _check_choice("layout_b", self.layout_b, ("row", "col"))
        if self.epilogue:
            _check_choice("epilogue", self.epilogue, EPILOGUES)

    @property
    def has_bias(self) -> bool:
        """Whether a vector is added to every row."""
        return self.epilogue.startswith("bias")

    @property
    def has_residual(self) -> bool:
        """Whether a matrix is added."""
        return self.epilogue.endswith("residual")

    @property
    def activation(self) -> Activation:
        """What is applied to the sum, if anything."""
        text = self.epilogue.removeprefix("bias").removeprefix("_")
        return next((known for known in ACTIVATIONS if known == text), "")

    def to_json(self) -> dict[str, Any]:
        """As every problem's; without an epilogue it is not mentioned, so that plain ones keep the
        keys that they had before there were any.
        """
        values = super().to_json()
        return values if self.epilogue else {k: v for k, v in values.items() if k != "epilogue"}

    def label(self) -> str:
        text = f"M={self.m},N={self.n},K={self.k}" + ("" if self.batch == 1 else f",B={self.batch}")
        text += f",dtype={_SHORT[self.dtype]}"
        text += "" if self.dtype_d == self.dtype else f",dtype_d={_SHORT[self.dtype_d]}"
        text += "" if self.layout_a == "row" else f",layout_a={self.layout_a}"
        text += "" if self.layout_b == "col" else f",layout_b={self.layout_b}"
        return text + (f",epilogue={self.epilogue}" if self.epilogue else "")

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def operands(self) -> tuple[Operand, ...]:
        def matrix(name: str, rows: int, cols: int, major: str, dtype: Any, out: bool) -> Operand:
            strides = (rows * cols, cols, 1) if major == "row" else (rows * cols, 1, rows)
            return Operand(name, (self.batch, rows, cols), strides, dtype, out)

        found = [
            matrix("a", self.m, self.k, self.layout_a, self.dtype, False),
            matrix("b", self.k, self.n, self.layout_b, self.dtype, False),
        ]
        if self.has_bias:
            found.append(Operand("bias", (self.n,), (1,), self.dtype))
        if self.has_residual:
            found.append(matrix("residual", self.m, self.n, "row", self.dtype_d, False))
        return (*found, matrix("d", self.m, self.n, "row", self.dtype_d, True))


@dataclass(frozen=True)
class SwigluProblem(Problem):
    """D = silu(A @ gate) * (A @ up); A is (M, K), gate and up are (K, N), D is (M, N), row-major.

    The two weights are one operand ``weights`` of 2 N rows of K, in one of two `PAIRINGS`, with
    axes (gate or up, N / 32, 4, 8, K): ``interleaved`` puts gate and up of output column
    32 g + 8 t + c into the rows 64 g + 8 c + 2 t and the next one, so that one thread of a kernel
    gets both, and those of eight neighbours; ``concatenated`` puts all of gate before all of up.
    """

    op: ClassVar[str] = "swiglu"
    keys: ClassVar[Mapping[str, str]] = {
        "M": "m",
        "N": "n",
        "K": "k",
        "dtype": "dtype",
        "weights": "weights",
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N", "K")

    m: int
    n: int
    k: int
    dtype: DType = "float16"
    weights: Pairing = "interleaved"

    def __post_init__(self) -> None:
        for key, value in (("M", self.m), ("N", self.n), ("K", self.k)):
            _check_extent(key, value)
        if self.n % 32:
            raise ConfigError(f"N={self.n} cannot be interleaved (allowed: multiples of 32)")
        _check_choice("dtype", self.dtype, ("float16", "bfloat16"))
        _check_choice("weights", self.weights, PAIRINGS)

    def label(self) -> str:
        text = f"M={self.m},N={self.n},K={self.k},dtype={_SHORT[self.dtype]}"
        return text + ("" if self.weights == "interleaved" else f",weights={self.weights}")

    @property
    def flops(self) -> int:
        return 4 * self.m * self.n * self.k

    @property
    def operands(self) -> tuple[Operand, ...]:
        k, n = self.k, self.n
        rows = (1, 64, 2, 8) if self.weights == "interleaved" else (n, 32, 8, 1)
        shape, strides = (2, n // 32, 4, 8, k), (*(row * k for row in rows), 1)
        return (
            Operand("a", (self.m, k), (k, 1), self.dtype),
            Operand("weights", shape, strides, self.dtype),
            Operand("d", (self.m, n), (n, 1), self.dtype, True),
        )


@dataclass(frozen=True)
class SoftmaxProblem(Problem):
    """P = softmax(scale * scores + mask) over rows; scores are (batch, rows, cols) fp32.

    `query_rows` is the period of the causal mask: row r of a matrix is query r % query_rows and
    sees columns 0..r % query_rows (grouped query heads stack their rows over one key head).
    """

    op: ClassVar[str] = "softmax"
    keys: ClassVar[Mapping[str, str]] = {
        "B": "batch",
        "M": "rows",
        "N": "cols",
        "SQ": "query_rows",
        "causal": "is_causal",
        "dtype": "dtype",
    }
    required: ClassVar[tuple[str, ...]] = ("M", "N")

    rows: int
    cols: int
    batch: int = 1
    query_rows: int = 0
    is_causal: bool = False
    dtype: DType = "float16"

    def __post_init__(self) -> None:
        if self.query_rows == 0:
            object.__setattr__(self, "query_rows", self.rows)
        for key, value in (
            ("M", self.rows),
            ("N", self.cols),
            ("B", self.batch),
            ("SQ", self.query_rows),
        ):
            _check_extent(key, value)
        if self.rows % self.query_rows:
            raise ConfigError(f"SQ={self.query_rows} does not divide M={self.rows}")
        _check_choice("dtype", self.dtype, ("float16", "bfloat16"))

    def label(self) -> str:
        text = f"M={self.rows},N={self.cols}" + ("" if self.batch == 1 else f",B={self.batch}")
        text += "" if self.query_rows == self.rows else f",SQ={self.query_rows}"
        return text + (",causal=1" if self.is_causal else "") + f",dtype={_SHORT[self.dtype]}"

    @property
    def flops(self) -> int:
        """Five operations an element: scale, maximum, subtract, exponential, divide."""
        full = 5 * self.batch * self.rows * self.cols
        return full // 2 if self.is_causal else full

    @property
    def operands(self) -> tuple[Operand, ...]:
        shape = (self.batch, self.rows, self.cols)
        strides = (self.rows * self.cols, self.cols, 1)
        return (
            Operand("scores", shape, strides, "float32"),
            Operand("probabilities", shape, strides, self.dtype, True),
        )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


PROBLEMS: dict[str, type[Problem]] = {
    cls.op: cls for cls in (AttentionProblem, GemmProblem, SwigluProblem, SoftmaxProblem)
}


def problem_from_json(data: Mapping[str, Any]) -> Problem:
    """The inverse of `Problem.to_json`.

    Raises:
        ConfigError: when `op` or a field is unknown, missing or of the wrong type.
    """
    values = dict(data)
    op = values.pop("op", None)
    if op not in PROBLEMS:
        raise ConfigError(f"op={op!r} is not known (allowed: {', '.join(PROBLEMS)})")
    cls = PROBLEMS[op]
    types = {field.name: str(field.type) for field in fields(cls)}
    unknown = set(values) - set(types)
    if unknown:
        raise ConfigError(
            f"unknown field '{sorted(unknown)[0]}' for {op} (allowed: {', '.join(types)})"
        )
    for name, value in values.items():
        expected = {"int": int, "bool": bool, "float": float}.get(types[name], str)
        if type(value) is not expected:
            raise ConfigError(f"{op}.{name}={value!r} is not of type {expected.__name__}")
    try:
        return cls(**values)
    except TypeError as exc:
        raise ConfigError(f"{op}: {exc}") from exc
