"""Problems of serving engines: attention over a paged cache, and the products of its steps.

An engine's step decodes many sequences, takes a chunk of a long prompt, or takes as many whole
prompts as fill it. Sizes are rounded as the runtime rounds those of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.errors import ConfigError
from tuner.problem.architecture import Attention, Model
from tuner.problem.attention import AttentionProblem, rounded
from tuner.problem.base import DType
from tuner.problem.shapes import Listed, add_products, dtype_of

WINDOW_PAGE = 64
"""Keys of a page where the runtime copies those of a window out of Transformers' ring: the rows of
the kernels' smallest tile."""


Call = tuple[int, int, int]
"""A step: its sequences, and the queries and keys of each."""


@dataclass(frozen=True)
class Engine:
    """Cache layout of an engine and its default batch of a step."""

    page_size: int
    """Keys of a page."""
    chunk: int
    """New tokens of a step."""
    copies_windows: bool = False
    """Layers with a window have the keys that it shows in pages of a step's own."""
    fuses_projections: bool = False
    """One product makes queries, keys and values, and one the gate and what it gates."""
    has_attention: bool = False
    """Its own attention answers calls where that is faster."""


#: vLLM's `block_size` and `max_num_batched_tokens`; Transformers' `page_size` (before 5.23,
#: `block_size`) and `max_batch_tokens`. SGLang's pages are those that its plug-in asks for.
ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(16, 8192, fuses_projections=True, has_attention=True),
    "sglang": Engine(64, 8192, fuses_projections=True, has_attention=True),
    "transformers": Engine(256, 8192, copies_windows=True),
}


def problems(
    model: Model,
    engine: Engine,
    concurrencies: Sequence[int],
    seqlens: Sequence[int],
    dtype: str | None = None,
    *,
    ops: Sequence[str] = ("attention",),
    ranks: int = 1,
) -> Listed:
    """Every distinct problem: decoding, and steps of prompts.

    Args:
        model: layers of the model.
        engine: engine, which determines cache and steps.
        concurrencies: numbers of sequences that are decoded together.
        seqlens: keys of a sequence, including the new ones.
        dtype: data type; None: the model's own.
        ops: operations to list.
        ranks: tensor-parallel ranks; the problems are those of one of them.

    Raises:
        ConfigError: when nothing can be listed, or the ranks do not divide the model.
    """
    every = calls(engine, concurrencies, seqlens)
    return of_calls(model, engine, every, dtype, ops=ops, ranks=ranks)


def of_calls(
    model: Model,
    engine: Engine,
    every: Sequence[Call],
    dtype: str | None = None,
    *,
    ops: Sequence[str] = ("attention",),
    ranks: int = 1,
) -> Listed:
    """As `problems`, of named steps.

    Args:
        model: layers of the model.
        engine: engine, which determines the cache.
        every: the steps.
        dtype: data type; None: the model's own.
        ops: operations to list.
        ranks: tensor-parallel ranks.

    Raises:
        ConfigError: as `problems`.
    """
    name = dtype_of(model, dtype)
    if not model.is_causal:
        raise ConfigError(f"model_type={model.kind} does not decode (allowed: causal models)")
    if model.is_latent and "attention" in ops:
        reason = "attention of latent keys, over which engines have a cache of another form"
        model = replace(model, attentions=(), left_out=(*model.left_out, reason))
    listed = Listed(left_out=list(model.left_out))
    if "attention" in ops:
        for attention in (attention.on_rank(ranks) for attention in model.attentions):
            for call in every:
                _add_attention(listed, attention, engine, *call, name)
    for batch, queries, _ in every:
        rows = batch, batch * queries
        add_products(listed, model, rows, name, ops, ranks=ranks, fused=engine.fuses_projections)
    return listed.checked()


def calls(engine: Engine, concurrencies: Sequence[int], seqlens: Sequence[int]) -> list[Call]:
    """Steps that decode, then a chunk at the end of a longer prompt, or a step full of prompts."""
    decoding = [(batch, 1, keys) for keys in seqlens for batch in concurrencies]
    chunk = engine.chunk
    return decoding + [(max(1, chunk // keys), min(chunk, keys), keys) for keys in seqlens]


def _add_attention(
    listed: Listed,
    attention: Attention,
    engine: Engine,
    batch: int,
    queries: int,
    keys: int,
    dtype: DType,
) -> None:
    left, page_size = attention.left, engine.page_size
    if left >= 0 and engine.copies_windows:
        page_size, keys = WINDOW_PAGE, min(keys, queries + left)
        left = left if queries > 1 else -1
    listed.add(
        AttentionProblem,
        rounded(queries),
        rounded(keys),
        head_dim=attention.head_dim,
        batch=rounded(batch),
        heads_q=attention.heads_q,
        heads_kv=attention.heads_kv,
        is_causal=queries > 1,
        dtype=dtype,
        layout="bshd",
        window_left=left,
        softcap=attention.softcap,
        page_size=page_size,
        has_sinks=attention.has_sinks,
        calls=attention.count,
    )
