"""Public models whose sizes ship as data (``cache/population/models.yaml``), read and checked.

A model is one or several stacks of equal layers. A decoder has one; one whose layers alternate
between a window and all keys has two. An encoder with a decoder has three: cross attention is a
stack of its own. Fields of the file are the attributes of `PublicModel` and `Stack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

from tuner.base import document, resources
from tuner.errors import ConfigError
from tuner.problem.attention import MAX_HEAD_DIM
from tuner.problem.base import DTYPE_BYTES, DType
from tuner.problem.gemm import Activation

FILE = "population/models.yaml"
FIELDS = ("language", "encoder", "vision", "speech", "diffusion", "multimodal")
MASKS = ("causal", "full", "cross")
"""Masks of a stack's attention; ``cross`` has keys from elsewhere and hides none of them."""
GATED: Mapping[str, Activation] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Feed-forward layers with a gate, by the activation of the gate."""
PLAIN = tuple(name for name in get_args(Activation) if name)
OTHER = "other"
"""An activation that no epilogue has, as CLIP's."""
BIASED = ("qkv", "out", "mlp", "router", "logits")
"""Groups of linear layers that may have a bias."""
ATTENTIONS = ("plain", "sinks", "none")
"""``sinks`` and ``none`` cannot be written as an `AttentionProblem`: products only are drawn."""

BSHD, BHSD, JOINED, PER_HEAD = "bshd", "bhsd", "joined", "per_head"
TENSORS: Mapping[str, tuple[str, str, str]] = {
    "separate": (BSHD, BSHD, BSHD),
    "contiguous": (BHSD, BHSD, BHSD),
    "rotated": (BHSD, BHSD, BSHD),
    "fused": (JOINED, JOINED, JOINED),
    "fused_value": (BHSD, BHSD, JOINED),
    "fused_value_bshd": (BSHD, BSHD, JOINED),
    "per_head": (PER_HEAD, PER_HEAD, PER_HEAD),
    "per_head_value": (BHSD, BHSD, PER_HEAD),
}
"""Memory layout of query, key and value that a layer without a cache passes to attention.

``bshd`` and ``bhsd`` are dense. ``joined`` is a view of one projection, whose rows hold all query
heads, then all key heads, then all value heads. In ``per_head`` the rows hold query, key and value
of a head side by side. Rotary positions leave dense tensors: element-wise operations keep the
order of the dimensions, a concatenation of rotated and other columns has heads first.
"""


@dataclass(frozen=True)
class Stack:
    """Layers of one kind of a model; counts of one device that holds all of it."""

    name: str
    layers: int
    hidden: int
    heads: int
    heads_kv: int = 0
    """0: as `heads`."""
    head_dim: int = 0
    """0: `hidden` over `heads`."""
    intermediate: int = 0
    """Width of the feed-forward layer; 0 if the stack has none, or experts instead."""
    activation: str = OTHER
    mask: str = "causal"
    positions: int = 0
    """Maximum tokens of a sequence; 0 if `lengths` lists all."""
    lengths: tuple[int, ...] = ()
    """Only possible numbers of tokens, as of patches."""
    keys: tuple[int, ...] = ()
    """Numbers of keys of cross attention."""
    context: int = 0
    """Input width of cross attention's keys; 0: `hidden`."""
    window: int = 0
    """Keys that a query sees, its own among them; under a full mask those on each side. 0: all."""
    softcap: float = 0.0
    is_alibi: bool = False
    is_relative: bool = False
    """A learned bias of each head and distance is added to the scores."""
    attention: str = "plain"
    tensors: str = "separate"
    is_qkv_joined: bool = False
    """One projection makes queries, keys and values, though `tensors` does not show it."""
    is_up_joined: bool = False
    """One projection makes the gate and what it gates."""
    bias: tuple[str, ...] = ()
    experts: int = 0
    vocab: int = 0
    """Columns of the logits, which causal stacks make; 0 where the model makes none."""
    embeddings: int = 0
    """Rows of an embedding that makes no logits."""
    products: Mapping[str, tuple[int, int]] | None = None
    """Further linear layers, by name: output and input width."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads_kv", self.heads_kv or self.heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden // max(1, self.heads))
        object.__setattr__(self, "context", self.context or self.hidden)
        for name, value, allowed in (
            ("activation", self.activation, (*GATED, *PLAIN, OTHER)),
            ("mask", self.mask, MASKS),
            ("attention", self.attention, ATTENTIONS),
            ("tensors", self.tensors, tuple(TENSORS)),
            *(("bias", group, BIASED) for group in self.bias),
        ):
            if value not in allowed:
                raise ConfigError(f"{name}={value} is not known (allowed: {', '.join(allowed)})")
        if self.heads % self.heads_kv:
            raise ConfigError(f"heads_kv={self.heads_kv} does not divide heads={self.heads}")
        if self.head_dim % 8 or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise ConfigError(f"head_dim={self.head_dim} is not a multiple of 8 to {MAX_HEAD_DIM}")
        if not (self.positions or self.lengths):
            raise ConfigError("positions or lengths has to be given")
        if (self.mask == "cross") != bool(self.keys):
            raise ConfigError("keys go with mask=cross, and with no other")

    @property
    def is_generating(self) -> bool:
        """True if it generates tokens one by one, with a cache."""
        return self.mask != "full" and not self.lengths

    @property
    def has_logits(self) -> bool:
        """True if its last layer is followed by the projection to the vocabulary."""
        return bool(self.vocab) and self.mask == "causal"

    @property
    def has_position_bias(self) -> bool:
        """True if a bias that depends on the positions is added to the scores."""
        return self.is_alibi or self.is_relative

    @property
    def has_joined_projection(self) -> bool:
        """True if one linear layer computes queries, keys and values."""
        lies = set(TENSORS[self.tensors])
        return self.is_qkv_joined or bool(lies & {JOINED, PER_HEAD})


@dataclass(frozen=True)
class PublicModel:
    """A model of the population."""

    name: str
    source: str
    """Repository whose configuration the sizes are from."""
    field: str
    dtype: DType
    """Type of the checkpoint, or of its model card's example where it has several."""
    stacks: tuple[Stack, ...]
    shards: tuple[int, ...] = (1,)
    """Numbers of tensor-parallel ranks that it is run on."""
    parameters: float = 0.0
    """Millions of parameters as its publisher counts them; 0 where not compared."""

    def __post_init__(self) -> None:
        if self.field not in FIELDS:
            raise ConfigError(f"field={self.field} is not known (allowed: {', '.join(FIELDS)})")
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"dtype={self.dtype} is not known (allowed: {', '.join(DTYPE_BYTES)})"
            )
        for ranks in self.shards:
            for stack in self.stacks:
                if any(n % ranks for n in (stack.heads, stack.heads_kv, stack.intermediate)):
                    raise ConfigError(f"{stack.name}: {ranks} shards do not divide its sizes")


@cache
def public_models() -> Mapping[str, PublicModel]:
    """All models that ship, by name, in the order of the file.

    Raises:
        ConfigError: when the file cannot be read, or a row is wrong; names the row.
    """
    return read(resources.cache() / FILE)


def read(path: Path) -> Mapping[str, PublicModel]:
    """Read the models of a file of that form.

    Raises:
        ConfigError: as `public_models`.
    """
    try:
        rows = document.parse_yaml(path.read_text(), _unique)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path.name} cannot be read: {exc}") from exc
    if not isinstance(rows, dict):
        raise ConfigError(f"{path.name} is not an object of models by name")
    models = {}
    for name, row in rows.items():
        try:
            # A row: fields of the model, and those of its stacks, which are defaults of each of
            # them.
            if not isinstance(row, dict):
                raise ConfigError("it is not an object")
            common = {k: v for k, v in row.items() if k not in _OF_MODEL and k != "stacks"}
            stacks = row.get("stacks", {"layers": {}})
            own = {k: _tuples(v) for k, v in row.items() if k in _OF_MODEL}
            models[name] = PublicModel(
                name=name,
                stacks=tuple(_stack(key, {**common, **values}) for key, values in stacks.items()),
                **own,
            )
        except (ConfigError, TypeError) as exc:
            raise ConfigError(f"{path.name}: {name}: {exc}") from exc
    return models


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        raise ConfigError("a key is given twice")
    return unique


_OF_MODEL = frozenset(field.name for field in fields(PublicModel)) - {"name", "stacks"}


def _stack(name: str, values: Mapping[str, Any]) -> Stack:
    if values.get("lengths"):  # they say all
        values = {**values, "positions": 0}
    products = values.get("products")
    if products is not None:
        values = {**values, "products": {key: tuple(pair) for key, pair in products.items()}}
    document.checked(Stack, {"name": name, **values})
    return Stack(name=name, **{key: _tuples(value) for key, value in values.items()})


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
