"""Layers of a model whose calls are problems: linear layers, attention, experts; `Model`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tuner.errors import ConfigError
from tuner.problem.gemm import Major

_Layer = TypeVar("_Layer", "Linear", "Attention", "Experts")

VOCAB_STEP = 64
"""Ranks that share the logits' columns pad them to a multiple of this before, as vLLM does."""
HEAD = "lm_head"
#: Linear layers whose outputs tensor-parallel ranks share, whose inputs they share, and that each
#: rank computes whole.
COLUMNS = frozenset(
    "q_proj k_proj v_proj qkv_proj c_attn query key value query_key_value q_b_proj kv_b_proj "
    "gate_proj up_proj gate_up_proj c_fc fc1 dense_h_to_4h intermediate.dense lm_head".split()
)
ROWS = frozenset(
    "o_proj down_proj c_proj fc2 dense_4h_to_h attention.dense self_attn.dense output.dense".split()
)
WHOLE = frozenset("gate router shared_expert_gate q_a_proj kv_a_proj_with_mqa pooler.dense".split())
KEYS = frozenset(("k_proj", "v_proj", "key", "value"))
"""Layers that make keys or values; ranks beyond the number of heads have copies of a head."""
#: Layers with one input that engines compute as one product, with the columns side by side.
FUSED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Linear:
    """A linear layer: (rows, K) to (rows, N)."""

    name: str
    """Last part of its name in Transformers, with the one before where that is ``dense``."""
    n: int
    k: int
    has_bias: bool = False
    layout_b: Major = "col"
    is_per_token: bool = True
    """False: a row for each sequence, as for the logits of the last token."""
    count: int = field(default=1, compare=False)
    """Such layers in the model."""

    def on_rank(self, ranks: int, head_dim: int = 0) -> Linear:
        """The part of one of several tensor-parallel ranks.

        Raises:
            ConfigError: when the layer cannot be shared.
        """
        if ranks == 1 or self.name in WHOLE:
            return self
        if self.name in ROWS:
            return replace(self, k=_share(self.name, "inputs", self.k, ranks))
        if self.name not in COLUMNS:
            raise ConfigError(
                f"ranks={ranks}: how ranks share the layer {self.name} is not known (allowed: 1)"
            )
        if self.name in KEYS and self.n < ranks * head_dim:
            return replace(self, n=head_dim)
        return replace(self, n=_share(self.name, "outputs", self._padded, ranks))

    @property
    def in_engine(self) -> Linear:
        """The layer as vLLM has it: logits are padded, and every weight is (N, K)."""
        return replace(self, n=self._padded, layout_b="col")

    @property
    def _padded(self) -> int:
        return -(-self.n // VOCAB_STEP) * VOCAB_STEP if self.name == HEAD else self.n


@dataclass(frozen=True)
class Attention:
    """Attention of a kind of layer."""

    heads_q: int
    heads_kv: int
    head_dim: int
    left: int = -1
    """Keys that a query sees before its own; -1: all."""
    right: int = 0
    """Keys that a query sees behind its own; -1: all."""
    softcap: float = 0.0
    has_sinks: bool = False
    is_query_heads_first: bool = False
    """Queries lie as (B, H, S, D), not as (B, S, H, D)."""
    value_dim: int = 0
    """Columns of values; 0: `head_dim`."""
    count: int = field(default=1, compare=False)
    """Such layers in the model."""

    @property
    def is_causal(self) -> bool:
        return self.right == 0

    def on_rank(self, ranks: int) -> Attention:
        """The heads of one of several tensor-parallel ranks.

        Raises:
            ConfigError: when the ranks do not divide the heads.
        """
        keys = self.heads_kv
        if ranks % keys and keys % ranks:
            raise ConfigError(f"ranks={ranks} and {keys} key heads: neither divides the other")
        heads_q = _share("attention", "heads", self.heads_q, ranks)
        return replace(self, heads_q=heads_q, heads_kv=max(1, keys // ranks))


@dataclass(frozen=True)
class Experts:
    """The experts of a layer; each token goes to `top_k` of them."""

    groups: int
    top_k: int
    hidden: int
    up: int
    """Outputs of an expert's first product: twice `inner` with a gate."""
    inner: int
    """Inputs of its second product."""
    count: int = field(default=1, compare=False)
    """Such layers in the model."""

    def on_rank(self, ranks: int) -> Experts:
        """The part of one of several tensor-parallel ranks, which share each expert.

        Raises:
            ConfigError: when the ranks do not divide it.
        """
        up, inner = (_share("experts", "columns", n, ranks) for n in (self.up, self.inner))
        return replace(self, up=up, inner=inner)


@dataclass(frozen=True)
class Model:
    """Layers of a Transformer, each kind once."""

    kind: str
    attentions: tuple[Attention, ...]
    groups: tuple[tuple[Linear, ...], ...]
    """Linear layers; those of a group have one input, and engines compute them as one."""
    gates: tuple[Linear, ...] = ()
    """Gates with SiLU of layers without biases: N columns of the gate and N that it gates."""
    experts: tuple[Experts, ...] = ()
    positions: int = 0
    """Maximum sequence length of the model; 0 if its configuration does not say."""
    dtype: str = ""
    """Type by its configuration; empty if that does not say."""
    is_latent: bool = False
    """Keys and values come from a latent vector, which engines keep in place of them."""
    left_out: tuple[str, ...] = ()
    """Computations that have no problem."""

    @property
    def is_causal(self) -> bool:
        return all(attention.is_causal for attention in self.attentions)

    @property
    def window(self) -> int:
        """Least keys that a query sees in a layer with a window; 0: no layer has one."""
        return min((own.left + 1 for own in self.attentions if own.left >= 0), default=0)

    def linears(self, *, ranks: int = 1, fused: bool = False) -> Iterator[Linear]:
        """Linear layers of one tensor-parallel rank.

        Args:
            ranks: tensor-parallel ranks.
            fused: True for one layer in place of each group, as vLLM has it.

        Raises:
            ConfigError: when a layer cannot be shared.
        """
        head_dim = max((attention.head_dim for attention in self.attentions), default=0)
        for group in self.groups:
            layers = [layer.in_engine for layer in group] if fused else group
            parts = [layer.on_rank(ranks, head_dim) for layer in layers]
            if fused and parts[1:]:
                yield replace(parts[0], n=sum(part.n for part in parts))
            else:
                yield from parts


def counted(layers: Mapping[_Layer, int]) -> tuple[_Layer, ...]:
    """Each kind of layer with its number in the model."""
    return tuple(replace(layer, count=count) for layer, count in layers.items())


def grouped(layers: list[Linear]) -> tuple[tuple[Linear, ...], ...]:
    """Groups of the layers of one module, which engines compute as one."""
    names = {layer.name: layer for layer in layers}
    for members in FUSED:
        if all(name in names for name in members):
            together = tuple(names[name] for name in members)
            if len({(layer.k, layer.has_bias, layer.layout_b) for layer in together}) == 1:
                others_apart = [layer for layer in layers if layer.name not in members]
                return together, *grouped(others_apart)
    return tuple((layer,) for layer in layers)


def _share(name: str, what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ConfigError(f"ranks={ranks} does not divide the {count} {what} of {name}")
    return count // ranks
