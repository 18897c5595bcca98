"""Lists of problems: those of a dense Transformers model, from its ``config.json``, and those of a
range of shapes.

A layer is one attention and the GEMMs around it, as Transformers computes them. A decoder fills a
cache, whose keys lie head by head. Each projection is a product of its own. Weights of `nn.Linear`
are (N, K), those of GPT-2's `Conv1D` (K, N).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from tuner.base import document
from tuner.errors import ConfigError
from tuner.problem import (
    DTYPE_ALIASES,
    AttentionProblem,
    GemmProblem,
    Problem,
    SwigluProblem,
)
from tuner.problem.swiglu import STEP as SWIGLU_STEP

#: Encoders, in which every token sees every other.
ENCODERS = ("bert", "roberta", "xlm-roberta")
#: Causal decoders of one layout: separate projections, grouped keys, a gate of the shape of the
#: projection that it gates.
GATED = ("gemma", "llama", "mistral", "qwen2", "qwen3")
#: Decoders of these whose gate is SiLU if the configuration does not name an activation.
SILU = ("llama", "mistral", "qwen2", "qwen3")
#: Operations that are listed, in the order of a layer.
OPS = ("attention", "gemm", "swiglu")
#: A causal decoder with one projection for queries, keys and values.
GPT2 = "gpt2"
KINDS = (*ENCODERS, GPT2, *GATED)
#: Names of one quantity in different models, the common one first.
NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "intermediate_size": ("intermediate_size", "n_inner"),
    "positions": ("max_position_embeddings", "n_positions"),
}


@dataclass(frozen=True)
class Model:
    """Sizes of a dense Transformer."""

    kind: str
    hidden_size: int
    heads_q: int
    heads_kv: int
    head_dim: int
    intermediate_size: int
    vocabulary: int
    positions: int
    """Maximum sequence length of the model; 0 if its configuration does not say."""
    window: int
    """Maximum keys that a query sees; 0 for all."""
    dtype: str
    has_swiglu: bool = False
    """True if the feed-forward layer is gated with SiLU."""

    @classmethod
    def read(cls, path: Path) -> Model:
        """Read a ``config.json``. For a model of several parts, read its text part.

        Raises:
            ConfigError: when it cannot be read, lacks a size, or is of a kind whose layers are not
                known here.
        """
        return cls.of(configuration(path))

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Model:
        """Make a model from the fields of a configuration.

        Raises:
            ConfigError: as in `read`.
        """
        kind = data.get("model_type")
        if kind not in KINDS:
            raise ConfigError(f"model_type={kind} is not known (allowed: {', '.join(KINDS)})")
        hidden, heads = size(data, "hidden_size"), size(data, "heads")
        head_dim = data.get("head_dim") or hidden // heads
        windowed = data.get("use_sliding_window", True) and kind not in ENCODERS
        window = data.get("sliding_window") if windowed else None
        activation = data.get("hidden_act", "silu" if kind in SILU else "")
        return cls(
            kind=kind,
            hidden_size=hidden,
            heads_q=heads,
            heads_kv=whole("num_key_value_heads", data.get("num_key_value_heads") or heads),
            head_dim=whole("head_dim", head_dim),
            intermediate_size=size(data, "intermediate_size", 4 * hidden),
            vocabulary=whole("vocab_size", data.get("vocab_size", 0), least=0),
            positions=size(data, "positions", 0),
            window=whole("sliding_window", window or 0, least=0),
            dtype=str(data.get("dtype") or data.get("torch_dtype") or "float16"),
            has_swiglu=kind in GATED and activation == "silu",
        )

    @property
    def is_causal(self) -> bool:
        return self.kind not in ENCODERS


def problems(
    model: Model,
    batches: Sequence[int],
    seqlens: Sequence[int],
    *,
    decode: bool = False,
    dtype: str | None = None,
    ops: Sequence[str] = OPS,
) -> list[Problem]:
    """Every distinct problem of a forward pass.

    Args:
        model: model to list.
        batches: sequences at a time.
        seqlens: tokens of a sequence; with `decode`, tokens in the cache.
        decode: True for one new token a sequence instead of all tokens.
        dtype: data type, instead of the model's own.
        ops: operations to list.

    Raises:
        ConfigError: when a shape is not supported.
    """
    name = DTYPE_ALIASES.get(dtype or model.dtype, "")
    if name not in ("float16", "bfloat16"):
        raise ConfigError(
            f"dtype={dtype or model.dtype} has no kernels (allowed: float16, bfloat16; name one)"
        )
    found: dict[Problem, None] = {}
    for batch in batches:
        for seqlen in seqlens:
            rows = batch if decode else batch * seqlen
            if "attention" in ops and not 0 < model.window < seqlen:
                found[_attention(model, batch, seqlen, decode, name)] = None
            if "gemm" in ops:
                found |= dict.fromkeys(_gemms(model, batch, rows, name))
            if "swiglu" in ops and model.has_swiglu:
                found |= dict.fromkeys(_swiglus(model, rows, name))
    return list(found)


def _attention(model: Model, batch: int, seqlen: int, decode: bool, dtype: str) -> Problem:
    return AttentionProblem.from_keys(
        {
            "B": batch,
            "H": model.heads_q,
            "HKV": model.heads_kv,
            "SQ": 1 if decode else seqlen,
            "SKV": seqlen,
            "D": model.head_dim,
            # A single new query sees every key: the mask counts from the top.
            "causal": model.is_causal and not decode,
            "dtype": dtype,
            "layout": "bhsd" if decode else _layout(model),
        }
    )


def _layout(model: Model) -> str:
    """A single head lies either way: then the runtime reads off the first that fits."""
    return "bshd_bhsd" if model.is_causal and model.heads_kv > 1 else "bshd"


def _gemms(model: Model, batch: int, rows: int, dtype: str) -> Iterator[Problem]:
    heads, keys = model.heads_q * model.head_dim, model.heads_kv * model.head_dim
    hidden, inner = model.hidden_size, model.intermediate_size
    is_conv1d = model.kind == GPT2
    layers = [(heads, hidden), (keys, hidden)]
    if is_conv1d:  # one projection for queries, keys and values
        layers = [(heads + 2 * keys, hidden)]
    layers += [(hidden, heads), (inner, hidden), (hidden, inner)]
    layout = "row" if is_conv1d else "col"
    for n, k in layers:
        yield GemmProblem.from_keys({"M": rows, "N": n, "K": k, "dtype": dtype, "layout_b": layout})
    if model.vocabulary and model.is_causal:  # the logits of each sequence's last token
        yield GemmProblem.from_keys(
            {"M": batch, "N": model.vocabulary, "K": hidden, "dtype": dtype}
        )


def _swiglus(model: Model, rows: int, dtype: str) -> Iterator[Problem]:
    """Both up projections of a gated layer as one product; none where no kernel has the size."""
    if model.intermediate_size % SWIGLU_STEP == 0:
        sizes = {"M": rows, "N": model.intermediate_size, "K": model.hidden_size}
        yield SwigluProblem.from_keys({**sizes, "dtype": dtype})


def numbers(name: str, text: str) -> list[int]:
    """``1,8,32`` as it says, ``128:4096`` by doubling.

    Raises:
        ConfigError: when it is neither.
    """
    found: list[int] = []
    for part in text.split(","):
        first, colon, last = part.partition(":")
        try:
            low, high = int(first), int(last if colon else first)
        except ValueError:
            low, high = 0, 0
        if not 1 <= low <= high:
            raise ConfigError(
                f"{name}={text} is not a list of sizes (allowed: as 1,8,32, or 128:4096, which "
                "doubles)"
            )
        while low <= high:
            found.append(low)
            low *= 2
    return list(dict.fromkeys(found))


def expand(kind: type[Problem], text: str) -> list[Problem]:
    """Every problem of ``S=512:8192,D=64,128,causal=0,1``: a key's values are those up to the next
    key, sizes as `numbers` reads them; the last key varies fastest.

    Raises:
        ConfigError: when a key, a value or one of the problems is wrong.
    """
    values: dict[str, list[str]] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (part.strip() for part in item.partition("="))
        if separator and key in values:
            raise ConfigError(f"key '{key}' is given twice (allowed: once, as {key}=512,1024)")
        if not separator and not values:
            raise ConfigError(f"'{item}' is not KEY=VALUE (allowed keys: {', '.join(kind.keys)})")
        name, found = (key, value) if separator else (next(reversed(values)), item)
        several = [str(n) for n in numbers(name, found)] if ":" in found else [found]
        values.setdefault(name, []).extend(several)
    rows = (dict(zip(values, row, strict=True)) for row in product(*values.values()))
    return list(dict.fromkeys(kind.from_keys(row) for row in rows))


def configuration(path: Path) -> Mapping[str, Any]:
    """The fields of a ``config.json``; of a model of several parts, with its text part's.

    Raises:
        ConfigError: when it cannot be read.
    """
    try:
        data = document.parse(path.read_text())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"model {path} cannot be read: {reason}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"model {path} is not a configuration of Transformers (an object)")
    text = data.get("text_config")
    return {**data, **text} if isinstance(text, dict) else data


def size(data: Mapping[str, Any], quantity: str, default: int | None = None) -> int:
    """Value of a quantity under any of its names in the configuration.

    Raises:
        ConfigError: when it has none of the names and there is no default, or it is not a number.
    """
    for name in NAMES[quantity]:
        if data.get(name) is not None:
            return whole(name, data[name])
    if default is None:
        raise ConfigError(f"the model's configuration lacks {' or '.join(NAMES[quantity])}")
    return default


def whole(name: str, value: Any, least: int = 1) -> int:
    """Integer value of a field.

    Raises:
        ConfigError: when it is not an integer, or less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} of the model is not a whole number from {least} up")
    return value
