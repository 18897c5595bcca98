"""Lists of problems: those of a Transformers model, from its ``config.json``, and those of a range
of shapes.

The layers are those of Transformers' own class, where it is installed (`traced`). Without it a few
kinds are known by their configuration alone (`written`). A decoder fills a cache, whose keys lie
head by head. Weights of `nn.Linear` are (N, K), those of GPT-2's `Conv1D` (K, N).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from tuner.base import document
from tuner.errors import ConfigError
from tuner.problem import (
    DTYPE_ALIASES,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)
from tuner.problem.architecture import Attention, Model
from tuner.problem.base import DType
from tuner.problem.swiglu import STEP as SWIGLU_STEP

#: Operations that are listed, in the order of a layer.
OPS = ("attention", "gemm", "swiglu", "grouped_gemm")
DEFAULT_DTYPE = "bfloat16"
"""Type of a model whose configuration does not say one, as serving engines take it."""


@dataclass(frozen=True)
class Listed:
    """Problems of a model, each once, and what has none."""

    calls: dict[Problem, int] = field(default_factory=dict)
    """Number of calls by problem, over all steps that are listed."""
    left_out: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[Problem]:
        """The problems in the order of the layers."""
        return list(self.calls)

    def add(self, kind: type[Problem], *sizes: int, calls: int = 1, **fields: Any) -> None:
        """Add the calls of a problem; one that cannot be is left out, with its reason."""
        try:
            problem = kind(*sizes, **fields)
        except ConfigError as exc:
            if str(exc) not in self.left_out:
                self.left_out.append(str(exc))
            return
        self.calls[problem] = self.calls.get(problem, 0) + calls

    def checked(self) -> Listed:
        """The list, if it has a problem.

        Raises:
            ConfigError: when it is empty; says why.
        """
        if not self.calls:
            reasons = "; ".join(self.left_out) or "the model has none of these operations"
            raise ConfigError(f"no problem to list: {reasons}")
        return self


def read(path: Path, *, without_transformers: bool = False) -> Model:
    """Read a ``config.json``; a model of several parts is its text part.

    Args:
        path: the file.
        without_transformers: True to take the layers from the file alone where it determines them,
            which saves the seconds that Transformers takes to import.

    Raises:
        ConfigError: when it cannot be read, lacks a size, or its layers are not known.
    """
    try:
        data = document.parse(path.read_text())
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise ConfigError(f"model {path} cannot be read: {reason}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"model {path} is not a configuration of Transformers (an object)")
    if without_transformers and not data.get("quantization_config"):
        from tuner.problem import written

        with contextlib.suppress(ConfigError):
            return written.architecture(data)
    return architecture(data)


def architecture(data: Mapping[str, Any]) -> Model:
    """The layers of the model that the fields of a configuration describe.

    Raises:
        ConfigError: as `read`.
    """
    from tuner.problem import written

    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        with contextlib.suppress(ImportError):  # a Transformers before 5
            from tuner.problem import traced

            return traced.architecture(data)
    return written.architecture(data)


def dtype_of(model: Model, dtype: str | None) -> DType:
    """Type of a model's tensors, or `dtype` in its place.

    Raises:
        ConfigError: when no kernel has it.
    """
    text = dtype or model.dtype or DEFAULT_DTYPE
    name = DTYPE_ALIASES.get(text, "")
    if name not in ("float16", "bfloat16"):
        raise ConfigError(f"dtype={text} has no kernels (allowed: float16, bfloat16; name one)")
    return name  # type: ignore[return-value]


def problems(
    model: Model,
    batches: Sequence[int],
    seqlens: Sequence[int],
    *,
    decode: bool = False,
    dtype: str | None = None,
    ops: Sequence[str] = OPS,
    ranks: int = 1,
) -> Listed:
    """Every distinct problem of a forward pass.

    Args:
        model: model to list.
        batches: sequences at a time.
        seqlens: tokens of a sequence; with `decode`, tokens in the cache.
        decode: True for one new token a sequence instead of all tokens.
        dtype: data type, instead of the model's own.
        ops: operations to list.
        ranks: tensor-parallel ranks; the problems are those of one of them.

    Raises:
        ConfigError: when nothing can be listed, or the ranks do not divide the model.
    """
    name = dtype_of(model, dtype)
    if decode and not model.is_causal:
        raise ConfigError(f"model_type={model.kind} does not decode (allowed: causal models)")
    listed = Listed(left_out=list(model.left_out))
    for batch in batches:
        for seqlen in seqlens:
            rows = batch if decode else batch * seqlen
            if "attention" in ops:
                for attention in model.attentions:
                    add_attention(listed, attention.on_rank(ranks), batch, seqlen, decode, name)
            add_products(listed, model, (batch, rows), name, ops, ranks=ranks)
    return listed.checked()


def add_attention(
    listed: Listed, attention: Attention, batch: int, seqlen: int, decode: bool, dtype: DType
) -> None:
    """Add the problems of an attention. A window has two: `tuner.attention` takes it as it is, and
    Transformers makes a mask of it once it may hide a key. Its layers call the second one.
    """
    window = attention.left + 1
    sizes = (1, min(seqlen, window or seqlen)) if decode else (seqlen, seqlen)
    common: dict[str, Any] = {
        "head_dim": attention.head_dim,
        "batch": batch,
        "heads_q": attention.heads_q,
        "heads_kv": attention.heads_kv,
        "dtype": dtype,
        "layout": "bhsd" if decode else _layout(attention),
        "softcap": attention.softcap,
        "has_sinks": attention.has_sinks,
        "value_dim": attention.value_dim,
    }
    is_masked = 0 < window <= seqlen
    common["calls"] = 0 if is_masked else attention.count
    if decode:  # a single new query sees every key: the mask counts from the top
        listed.add(AttentionProblem, *sizes, **common)
    else:
        right = -1 if attention.is_causal else attention.right
        sides = {"window_left": attention.left, "window_right": right}
        listed.add(AttentionProblem, *sizes, **common, **sides, is_causal=attention.is_causal)
    if is_masked:
        listed.add(AttentionProblem, *sizes, **common | {"calls": attention.count}, mask="1")


def _layout(attention: Attention) -> Any:
    """As the runtime reads it off: a single head lies either way."""
    queries = "bhsd" if attention.is_query_heads_first else "bshd"
    if attention.is_causal and attention.heads_kv > 1 and queries == "bshd":
        return "bshd_bhsd"
    return queries


def add_products(
    listed: Listed,
    model: Model,
    rows: tuple[int, int],
    dtype: DType,
    ops: Sequence[str],
    *,
    ranks: int = 1,
    fused: bool = False,
) -> None:
    """Add a pass's products.

    Args:
        listed: list to add to.
        model: model whose layers are computed.
        rows: sequences, and tokens of all of them.
        dtype: type of tokens and weights.
        ops: operations to list.
        ranks: tensor-parallel ranks.
        fused: True for one product in place of several with one input, as engines compute them.

    Raises:
        ConfigError: when the ranks cannot share a layer.
    """
    sequences, tokens = rows
    if "gemm" in ops:
        for layer in model.linears(ranks=ranks, fused=fused):
            m = tokens if layer.is_per_token else sequences
            epilogue = "bias" if layer.has_bias else ""
            ways: dict[str, Any] = {"layout_b": layer.layout_b, "epilogue": epilogue}
            listed.add(GemmProblem, m, layer.n, layer.k, dtype=dtype, calls=layer.count, **ways)
    if "swiglu" in ops:
        for gate in (gate.on_rank(ranks) for gate in model.gates):
            if gate.n % SWIGLU_STEP == 0:
                listed.add(SwigluProblem, tokens, gate.n, gate.k, dtype=dtype)
    if "grouped_gemm" in ops:
        for experts in (experts.on_rank(ranks) for experts in model.experts):
            copies = 1 << (tokens * experts.top_k - 1).bit_length()  # as the runtime rounds rows
            for n, k in ((experts.up, experts.hidden), (experts.hidden, experts.inner)):
                groups = experts.groups
                sizes = groups, copies, n, k
                options: dict[str, Any] = {"sizes": "zipf", "dtype": dtype, "calls": experts.count}
                listed.add(GroupedGemmProblem, *sizes, **options)


def numbers(name: str, text: str) -> list[int]:
    """``1,8,32`` as it says, ``128:4096`` by doubling.

    Raises:
        ConfigError: when it is neither.
    """
    values: list[int] = []
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
            values.append(low)
            low *= 2
    return list(dict.fromkeys(values))


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
        name, listing = (key, value) if separator else (next(reversed(values)), item)
        several = [str(n) for n in numbers(name, listing)] if ":" in listing else [listing]
        values.setdefault(name, []).extend(several)
    rows = (dict(zip(values, row, strict=True)) for row in product(*values.values()))
    return list(dict.fromkeys(kind.from_keys(row) for row in rows))
