"""Blocks of a decoder with random weights.

Three ways are compared: PyTorch's kernels; attention by `tuner.attention`; and the whole block,
with linear layers by `tuner.linear` and gated ones by `tuner.swiglu`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tuner.problem import AttentionProblem, DType, GemmProblem, Problem, SwigluProblem


@dataclass(frozen=True)
class Sizes:
    """Extents of a decoder's tensors."""

    hidden: int
    heads: int
    heads_kv: int
    head_dim: int
    inner: int
    vocabulary: int


#: The model card's config.json: 32 such layers.
LLAMA_3_8B = Sizes(4096, 32, 8, 128, 14336, 128256)
ROTARY_BASE = 500000.0


@dataclass(frozen=True)
class Way:
    """Functions that compute the parts of a pass."""

    attention: Callable[..., Any]
    linear: Callable[..., Any]
    swiglu: Callable[..., Any]
    """silu(x @ gate^T) * (x @ up^T) of x and both weights in one."""
    is_interleaved: bool = False
    """How `swiglu` wants the weights: as `tuner.interleave` makes them, else gate before up."""

    def watched(self, watch: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> Way:
        """This way through `watch(operation, function)` in each function's place."""
        return replace(
            self,
            attention=watch("attention", self.attention),
            linear=watch("linear", self.linear),
            swiglu=watch("swiglu", self.swiglu),
        )


OPERATIONS = ("attention", "linear", "swiglu")
"""The functions of a `Way`."""
NAMES = {"block": "tuner", "torch": "pytorch", "attention": "tuner attention"}
"""Contenders by way: the whole block or attention alone by the tuner."""


def ways() -> dict[str, Way]:
    """The functions of each way."""
    import torch

    import tuner

    functional = torch.nn.functional
    plain = Way(functional.scaled_dot_product_attention, functional.linear, gated)
    return {
        "block": Way(tuner.attention, tuner.linear, tuner.swiglu, is_interleaved=True),
        "torch": plain,
        "attention": replace(plain, attention=tuner.attention),
    }


def gated(x: Any, weights: Any) -> Any:
    """SwiGLU by PyTorch: (..., K) and (2 N, K), gate before up, to (..., N)."""
    import torch

    gate, up = torch.nn.functional.linear(x, weights).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Blocks:
    """Pre-norm blocks with grouped heads, rotary positions and a cache of keys and values.

    Args:
        sizes: sizes of a block.
        count: blocks.
        length: keys of each sequence in the cache, random at first.
        dtype: torch's type of weights and activations.
        device: torch's name of it.
        batch: sequences.
    """

    def __init__(
        self, sizes: Sizes, count: int, length: int, dtype: Any, device: str, batch: int = 1
    ) -> None:
        import torch

        import tuner

        self._sizes, self._on = sizes, {"dtype": dtype, "device": device}
        hidden, inner, head_dim = sizes.hidden, sizes.inner, sizes.head_dim
        self._width, self._kv = sizes.heads * head_dim, sizes.heads_kv * head_dim
        self._layers = []
        for _ in range(count):
            up = self.weight(2 * inner, hidden)
            self._layers.append(
                {
                    "qkv": self.weight(self._width + 2 * self._kv, hidden),
                    "out": self.weight(hidden, self._width),
                    "up": up,
                    "interleaved": tuner.interleave(*up.chunk(2)),
                    "down": self.weight(hidden, inner),
                    "norms": torch.rand(2, hidden, **self._on) + 0.5,
                }
            )
        # (B, S, H, D): a prefix of it is a tensor of its own, dense for one sequence.
        shape = (batch, length, sizes.heads_kv, head_dim)
        self._cache = [[torch.randn(shape, **self._on) for _ in range(2)] for _ in range(count)]
        frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        angle = torch.arange(length, device=device)[:, None] * frequency
        turns = torch.cat([angle, angle], -1)[None, :, None]
        self._cos, self._sin = turns.cos().to(dtype), turns.sin().to(dtype)

    def weight(self, rows: int, columns: int) -> Any:
        """Random weights of a layer that keeps the size of activations."""
        import torch

        return torch.randn(rows, columns, **self._on).mul_(columns**-0.5)

    def __call__(self, x: Any, start: int, way: Way) -> Any:
        """Activations (batch, n, hidden), which begin at position `start`, to those behind the last
        block.
        """
        batch, count, _ = x.shape
        end, heads = start + count, (batch, count, -1, self._sizes.head_dim)
        cos, sin = self._cos[:, start:end], self._sin[:, start:end]
        up = "interleaved" if way.is_interleaved else "up"
        for weights, cache in zip(self._layers, self._cache, strict=True):
            first, second = weights["norms"]
            mixed = way.linear(normed(x, first), weights["qkv"])
            query, key, value = mixed.split([self._width, self._kv, self._kv], -1)
            cache[0][:, start:end] = turned(key.reshape(heads), cos, sin)
            cache[1][:, start:end] = value.reshape(heads)
            out = way.attention(
                turned(query.reshape(heads), cos, sin).transpose(1, 2),
                *(part[:, :end].transpose(1, 2) for part in cache),
                is_causal=count > 1,
                enable_gqa=True,
            )
            flat = out.transpose(1, 2).reshape(batch, count, self._width)
            x = x + way.linear(flat, weights["out"])
            x = x + way.linear(way.swiglu(normed(x, second), weights[up]), weights["down"])
        return x


def normed(x: Any, weight: Any = None) -> Any:
    """RMSNorm of (..., hidden)."""
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of (..., head_dim): ``x`` rotated by the given cosines and sines."""
    import torch

    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def problems_of(
    sizes: Sizes, queries: int, keys: int, batch: int = 1, dtype: DType = "float16"
) -> list[Problem]:
    """Problems of a block; more than one query of a sequence is a prompt."""
    rows, width = batch * queries, sizes.heads * sizes.head_dim
    heads = batch, sizes.heads, sizes.heads_kv
    is_causal, mixed = queries > 1, width + 2 * sizes.heads_kv * sizes.head_dim
    return [
        AttentionProblem(
            queries, keys, sizes.head_dim, *heads, is_causal=is_causal, dtype=dtype, layout="bshd"
        ),
        GemmProblem(rows, mixed, sizes.hidden, dtype=dtype),
        GemmProblem(rows, sizes.hidden, width, dtype=dtype),
        SwigluProblem(rows, sizes.inner, sizes.hidden, dtype=dtype),
        GemmProblem(rows, sizes.hidden, sizes.inner, dtype=dtype),
    ]
