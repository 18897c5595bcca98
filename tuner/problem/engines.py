"""Problems of serving engines: attention over a paged cache, from a model's ``config.json``.

An engine's step decodes many sequences, takes a chunk of a long prompt, or takes as many whole
prompts as fill it. Sizes are rounded as the runtime rounds those of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import ConfigError
from tuner.problem import shapes
from tuner.problem.attention import AttentionProblem, rounded
from tuner.problem.base import DTYPE_ALIASES

WINDOW_PAGE = 64
"""Keys of a page where the runtime copies those of a window out of Transformers' ring: the rows of
the kernels' smallest tile."""
FULL, SLIDING = "full_attention", "sliding_attention"
DECODERS = (
    *(shapes.GPT2, *shapes.GATED),
    *("gemma2", "gemma3", "gemma3_text", "gpt_oss", "granite", "mixtral", "olmo2", "phi3"),
    *("qwen2_moe", "qwen3_moe"),
)
"""Model types with plain attention, by `model_type`."""
#: Model types without `layer_types` whose layers alternate between a window and all keys.
ALTERNATING = ("gemma2", "gemma3", "gemma3_text", "gpt_oss")
#: Kinds whose window is off where their configuration does not say `use_sliding_window`.
OFF = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Engine:
    """Cache layout of an engine and its default batch of a step."""

    page_size: int
    """Keys of a page."""
    chunk: int
    """New tokens of a step."""
    copies_windows: bool = False
    """Layers with a window have the keys that it shows in pages of a step's own."""


#: vLLM's `block_size` and `max_num_batched_tokens`; Transformers' `page_size` (before 5.23,
#: `block_size`) and `max_batch_tokens`.
ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(16, 8192),
    "transformers": Engine(256, 8192, copies_windows=True),
}


@dataclass(frozen=True)
class Decoder:
    """Sizes that decide the attention problems of a decoder."""

    heads_q: int
    heads_kv: int
    head_dim: int
    positions: int
    """Maximum sequence length of the model; 0 if its configuration does not say."""
    windows: tuple[int, ...]
    """Keys that a query sees, its own among them, by kind of layer; 0: all."""
    softcap: float
    has_sinks: bool
    dtype: str

    @classmethod
    def read(cls, path: Path) -> Decoder:
        """Read a ``config.json``; of a model of several parts, its text part.

        Raises:
            ConfigError: when it cannot be read, lacks a size, or is of a kind whose attention is
                not known here.
        """
        data = shapes.configuration(path)
        kind = data.get("model_type")
        if kind not in DECODERS:
            raise ConfigError(f"model_type={kind} is not known (allowed: {', '.join(DECODERS)})")
        heads, hidden = shapes.size(data, "heads"), shapes.size(data, "hidden_size")
        softcap = data.get("attn_logit_softcapping") or 0.0
        if isinstance(softcap, bool) or not isinstance(softcap, int | float):
            raise ConfigError(f"attn_logit_softcapping={softcap!r} of the model is not a number")
        return cls(
            heads_q=heads,
            heads_kv=shapes.whole("num_key_value_heads", data.get("num_key_value_heads") or heads),
            head_dim=shapes.whole("head_dim", data.get("head_dim") or hidden // heads),
            positions=shapes.size(data, "positions", 0),
            windows=_windows(data),
            softcap=float(softcap),
            has_sinks=kind == "gpt_oss",
            dtype=str(data.get("dtype") or data.get("torch_dtype") or "float16"),
        )


def _windows(data: Mapping[str, Any]) -> tuple[int, ...]:
    """One number for each kind of layer."""
    kind = data["model_type"]
    width = data.get("sliding_window") or 0
    if not data.get("use_sliding_window", kind not in OFF):
        width = 0
    width = shapes.whole("sliding_window", width, least=0)
    types = data.get("layer_types")
    if types is None:
        default = {FULL, SLIDING} if kind in ALTERNATING else {SLIDING}
        types = default if width else {FULL}
    if not isinstance(types, list | set) or not types:
        raise ConfigError(f"layer_types={types!r} of the model is not a list of names")
    if unknown := sorted({str(name) for name in types} - {FULL, SLIDING}):
        raise ConfigError(
            f"layer_types of the model has {', '.join(unknown)} (allowed: {FULL}, {SLIDING})"
        )
    if SLIDING in types and not width:
        raise ConfigError(f"the model has layers of {SLIDING} and no sliding_window")
    return tuple(width if name == SLIDING else 0 for name in sorted(set(types)))


def problems(
    model: Decoder,
    engine: Engine,
    concurrencies: Sequence[int],
    seqlens: Sequence[int],
    dtype: str | None = None,
) -> list[AttentionProblem]:
    """Every distinct problem: decoding, and steps of prompts.

    Args:
        model: shape of the model.
        engine: engine, which determines cache and steps.
        concurrencies: numbers of sequences that are decoded together.
        seqlens: keys of a sequence, including the new ones.
        dtype: data type; None: the model's own.

    Raises:
        ConfigError: when a shape has no problem here.
    """
    name = DTYPE_ALIASES.get(dtype or model.dtype, "")
    if name not in ("float16", "bfloat16"):
        raise ConfigError(
            f"dtype={dtype or model.dtype} has no kernels (allowed: float16, bfloat16; name one)"
        )
    found = [
        _problem(model, engine, window, batch, queries, keys, name)
        for window in model.windows
        for batch, queries, keys in _calls(engine, concurrencies, seqlens)
    ]
    return list(dict.fromkeys(found))


def _calls(
    engine: Engine, concurrencies: Sequence[int], seqlens: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Sequences, queries and keys of each."""
    for keys in seqlens:
        for batch in concurrencies:
            yield batch, 1, keys
    for keys in seqlens:  # a chunk at the end of a longer prompt, or a step full of prompts
        yield max(1, engine.chunk // keys), min(engine.chunk, keys), keys


def _problem(
    model: Decoder, engine: Engine, window: int, batch: int, queries: int, keys: int, dtype: str
) -> AttentionProblem:
    left, page_size = window - 1, engine.page_size
    if window and engine.copies_windows:
        page_size, keys = WINDOW_PAGE, min(keys, queries + left)
        left = left if queries > 1 else -1
    return AttentionProblem(
        seqlen_q=rounded(queries),
        seqlen_kv=rounded(keys),
        head_dim=model.head_dim,
        batch=rounded(batch),
        heads_q=model.heads_q,
        heads_kv=model.heads_kv,
        is_causal=queries > 1,
        dtype=dtype,  # type: ignore[arg-type]
        layout="bshd",
        window_left=left,
        softcap=model.softcap,
        page_size=page_size,
        has_sinks=model.has_sinks,
    )
