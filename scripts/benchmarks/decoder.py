"""A decoder with the shapes of Llama-3-8B and random weights, and its tokens a second.

Three ways are compared: PyTorch's kernels; attention by `tuner.attention`; and the whole block,
with linear layers by `tuner.linear` and gated ones by `tuner.swiglu`.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.harness import Contender, Row
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

LAYERS = 4
"""Layers of the decoder; Llama-3-8B has 32, all alike, so the time of a layer is the same."""
PREFILLS = (1024, 8192)
CONTEXT, GENERATED = 1024, 64
ROUNDS = 7


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


class Decoder(Blocks):
    """These blocks of one sequence between an embedding and a head."""

    def __init__(self, sizes: Sizes, layers: int, length: int, dtype: Any, device: str) -> None:
        super().__init__(sizes, layers, length, dtype, device)
        self._embedding = self.weight(sizes.vocabulary, sizes.hidden)
        self._head = self.weight(sizes.vocabulary, sizes.hidden)

    def __call__(self, tokens: Any, start: int, way: Way) -> Any:
        """Logits of the last of `tokens`, (1, n), which begin at position `start`."""
        import torch

        x = super().__call__(torch.nn.functional.embedding(tokens, self._embedding), start, way)
        return way.linear(normed(x[:, -1:]), self._head)


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


def problems(sizes: Sizes = LLAMA_3_8B) -> list[Problem]:
    """Problems of a decoder; decoding's attention once for all of its lengths, in their middle."""
    lengths = *((n, n) for n in PREFILLS), (1, CONTEXT + GENERATED // 2)
    asked = [problem for each in lengths for problem in problems_of(sizes, *each)]
    return list(dict.fromkeys([*asked, GemmProblem(1, sizes.vocabulary, sizes.hidden)]))


@dataclass(frozen=True)
class Pass:
    """A prompt, or tokens one after the other."""

    label: str
    start: int
    count: int
    layers: int = LAYERS
    sizes: Sizes = LLAMA_3_8B
    group = "decoder"

    @property
    def is_prompt(self) -> bool:
        return self.start == 0


PASSES = (
    *(Pass(f"prefill {length}", 0, length) for length in PREFILLS),
    Pass(f"decoding at {CONTEXT}", CONTEXT, GENERATED),
)


def measure(case: Pass, _: Namespace) -> Row:
    """Microseconds of a pass by each way in an eager loop, and tokens a second.

    Beside them stand what answered the calls, and the distance of the logits from PyTorch's.
    """
    import torch

    import tuner

    end = case.start + case.count
    with torch.inference_mode():
        model = Decoder(case.sizes, case.layers, end, torch.float16, "cuda")
        tokens = torch.randint(case.sizes.vocabulary, (1, end), device="cuda")

        def run(way: Way) -> Any:
            """All tokens; those behind a context one after the other. They are drawn ahead: the
            likeliest ones would part the ways where two of them are nearly alike.
            """
            if case.is_prompt:
                return model(tokens, 0, way)
            for place in range(case.start, end):
                logits = model(tokens[:, place : place + 1], place, way)
            return logits

        by_way, answered, outs = ways(), {}, {}
        model(tokens[:, : max(1, case.start)], 0, by_way["torch"])  # fills the cache
        for name, way in by_way.items():
            run(way)
            tuner.stats(reset=True)
            outs[name] = run(way).float()
            stats = tuner.stats(reset=True)
            answered[name] = {"hits": stats.hits, "fallbacks": dict(stats.fallbacks)}
        contenders = [
            Contender(NAMES[name], harness.every_copy(partial(run, way)))
            for name, way in by_way.items()
        ]
        times = harness.time_host(contenders, 1, ROUNDS, is_waiting=True)
    torchs = outs.pop("torch")
    return {
        "us": times.us,
        "figures": {
            f"{name}, tokens a second": case.count * 1e6 / us for name, us in times.us.items()
        },
        "answered": {NAMES[name]: counts for name, counts in answered.items() if name in outs},
        "errors": {NAMES[name]: harness.distance(out, torchs) for name, out in outs.items()},
    }


def listing(cases: Sequence[Pass], _: Namespace) -> Iterator[str]:
    """The passes as comments, then what they call, for ``scripts/tuner sweep --problems``."""
    yield from (f"# {case.label}" for case in cases)
    yield from (f"- op={problem.op},{problem.label()}" for problem in problems())
