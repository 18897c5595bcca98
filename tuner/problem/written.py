"""A model's layers from its ``config.json`` alone, where Transformers is not installed.

It serves a few kinds of models whose layers are alike. Values that a file leaves out are
Transformers' defaults only where these follow from other values; else the file is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tuner.base.install import extra_command
from tuner.errors import ConfigError
from tuner.problem.architecture import HEAD, Attention, Linear, Model, counted

#: Encoders, in which every token sees every other.
ENCODERS = ("bert", "roberta", "xlm-roberta")
#: Causal decoders of one layout: separate projections, grouped keys, a gate of the shape of the
#: projection that it gates.
GATED = ("gemma", "llama", "mistral", "qwen2", "qwen3")
#: A causal decoder with one projection for queries, keys and values.
GPT2 = "gpt2"
KINDS = (*ENCODERS, GPT2, *GATED)
FULL, SLIDING = "full_attention", "sliding_attention"


def architecture(data: Mapping[str, Any]) -> Model:
    """The layers of the model that a configuration describes; of several parts, its text part.

    Raises:
        ConfigError: when a size is missing, or the kind of model is not known here.
    """
    text = data.get("text_config")
    values = _Values({**data, **text} if isinstance(text, dict) else data)
    kind = values.data.get("model_type")
    if kind not in KINDS:
        raise ConfigError(
            f"model_type={kind} needs Transformers: `{extra_command('transformers')}` (without it: "
            f"{', '.join(KINDS)})"
        )
    if any(values.data.get(name) for name in ("is_decoder", "add_cross_attention")):
        values.fail("is_decoder and add_cross_attention are")
    if kind in GATED:
        return _gated(kind, values)
    return _gpt2(values) if kind == GPT2 else _encoder(kind, values)


class _Values:
    """Checked values of a configuration."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.dtype = str(data.get("dtype") or data.get("torch_dtype") or "")

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.data.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(
                f"the model's configuration lacks {name}, whose default Transformers knows: "
                f"`{extra_command('transformers')}`"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name}={value!r} of the model is not a whole number from {least}")
        return value

    def layers(self, name: str) -> int:
        """Number of layers; one where the file does not say, for which problems are the same."""
        return self.whole(name, 1)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.data.get(name)
        return default if value is None else bool(value)

    def heads_of(self, hidden: int, heads: int) -> int:
        if hidden % heads:
            raise ConfigError(f"hidden_size={hidden} is not a multiple of {heads} heads")
        return hidden // heads

    def fail(self, what: str) -> None:
        raise ConfigError(f"{what} not known here: `{extra_command('transformers')}`")


def _gated(kind: str, values: _Values) -> Model:
    hidden, heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    keys = values.whole("num_key_value_heads", heads if kind == "llama" else None)
    has_own_width = kind in ("gemma", "qwen3")
    default = None if has_own_width else values.heads_of(hidden, heads)
    width, inner = values.whole("head_dim", default), values.whole("intermediate_size")
    biased = kind == "qwen2" or (kind != "mistral" and values.flag("attention_bias"))
    inner_biased = kind == "llama" and values.flag("mlp_bias")
    groups = (
        (
            Linear("q_proj", heads * width, hidden, biased),
            Linear("k_proj", keys * width, hidden, biased),
            Linear("v_proj", keys * width, hidden, biased),
        ),
        (Linear("o_proj", hidden, heads * width, biased and kind != "qwen2"),),
        tuple(Linear(f"{name}_proj", inner, hidden, inner_biased) for name in ("gate", "up")),
        (Linear("down_proj", hidden, inner, inner_biased),),
        (Linear(HEAD, values.whole("vocab_size"), hidden, is_per_token=False),),
    )
    gates = (Linear("gate_proj", inner, hidden),) if _has_silu(kind, values) else ()
    layers = values.layers("num_hidden_layers")
    windows = _windows(kind, values, layers).items()
    attentions = {Attention(heads, keys, width, left=left - 1): count for left, count in windows}
    return Model(
        kind,
        counted(attentions),
        _repeated(groups, layers),
        () if inner_biased else gates,
        positions=values.whole("max_position_embeddings", 0, least=0),
        dtype=values.dtype,
    )


def _has_silu(kind: str, values: _Values) -> bool:
    default = "gelu_pytorch_tanh" if kind == "gemma" else "silu"
    return values.data.get("hidden_act", default) in ("silu", "swish")


def _repeated(groups: Iterable[tuple[Linear, ...]], layers: int) -> tuple[tuple[Linear, ...], ...]:
    """Groups with the numbers of their layers: one of those of the last token, else `layers`."""
    return tuple(
        counted({call: layers if call.is_per_token else 1 for call in group}) for group in groups
    )


def _windows(kind: str, values: _Values, layers: int) -> Mapping[int, int]:
    """Number of layers by the keys that a query sees, in the order of the layers; 0: all keys."""
    if kind == "mistral":
        if "sliding_window" not in values.data:
            values.whole("sliding_window")
        return {values.whole("sliding_window", 0, least=0): layers}
    if not (kind.startswith("qwen") and values.flag("use_sliding_window")):
        return {0: layers}
    types = values.data.get("layer_types")
    if types is None:
        first = values.whole("max_window_layers", least=0)
        count = values.whole("num_hidden_layers")
        types = [SLIDING if layer >= first else FULL for layer in range(count)]
    if not isinstance(types, list) or not types or set(types) - {FULL, SLIDING}:
        raise ConfigError(f"layer_types={types!r} of the model is not a list of {FULL}, {SLIDING}")
    widths = {FULL: 0, SLIDING: values.whole("sliding_window") if SLIDING in types else 0}
    return Counter(widths[name] for name in types)


def _gpt2(values: _Values) -> Model:
    hidden, heads = values.whole("n_embd"), values.whole("n_head")
    inner = values.whole("n_inner", 4 * hidden)
    sizes = {
        "c_attn": (3 * hidden, hidden),
        "attention": (hidden, hidden),
        "c_fc": (inner, hidden),
        "c_proj": (hidden, inner),
    }
    layers = [
        (Linear("c_proj" if name == "attention" else name, *size, True, "row"),)
        for name, size in sizes.items()
    ]
    layers.append((Linear(HEAD, values.whole("vocab_size"), hidden, is_per_token=False),))
    count = values.layers("n_layer")
    attention = Attention(heads, heads, values.heads_of(hidden, heads), count=count)
    positions = values.whole("n_positions", 0, least=0)
    groups = _repeated(layers, count)
    return Model(GPT2, (attention,), groups, positions=positions, dtype=values.dtype)


def _encoder(kind: str, values: _Values) -> Model:
    hidden, heads = values.whole("hidden_size"), values.whole("num_attention_heads")
    inner = values.whole("intermediate_size")
    projections = tuple(Linear(name, hidden, hidden, True) for name in ("query", "key", "value"))
    groups = (
        projections,
        (Linear("output.dense", hidden, hidden, True),),
        (Linear("intermediate.dense", inner, hidden, True),),
        (Linear("output.dense", hidden, inner, True),),
        (Linear("pooler.dense", hidden, hidden, True, is_per_token=False),),
    )
    layers = values.layers("num_hidden_layers")
    attention = Attention(heads, heads, values.heads_of(hidden, heads), right=-1, count=layers)
    positions = values.whole("max_position_embeddings", 0, least=0)
    every = _repeated(groups, layers)
    return Model(kind, (attention,), every, positions=positions, dtype=values.dtype)
