"""A decoder with the shapes of Llama-3-8B and random weights, and its tokens a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.problem import AttentionProblem


@dataclass(frozen=True)
class Sizes:
    """What a decoder's tensors measure."""

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
"""Of Llama-3-8B's 32: they are alike, and so a layer's time is."""
PREFILLS = (1024, 8192)
CONTEXT, GENERATED = 1024, 64
SLEEP_CLOCKS = 200_000_000
"""A tenth of a second: longer than enqueueing a pass, of up to 1000 launches, takes."""


class Decoder:
    """A pre-norm decoder with grouped heads, rotary positions and a cache of keys and values."""

    def __init__(self, sizes: Sizes, layers: int, length: int, dtype: Any, device: str) -> None:
        import torch

        self._sizes = sizes
        hidden, inner, head_dim = sizes.hidden, sizes.inner, sizes.head_dim
        self._width, self._kv = sizes.heads * head_dim, sizes.heads_kv * head_dim

        def weight(rows: int, columns: int) -> Any:
            made = torch.randn(rows, columns, dtype=dtype, device=device)
            return made.mul_(columns**-0.5)

        self._embedding = weight(sizes.vocabulary, hidden)
        self._head = weight(sizes.vocabulary, hidden)
        self._layers = [
            {
                "qkv": weight(self._width + 2 * self._kv, hidden),
                "out": weight(hidden, self._width),
                "up": weight(2 * inner, hidden),
                "down": weight(hidden, inner),
            }
            for _ in range(layers)
        ]
        # (B, S, H, D): a prefix of it is a tensor of its own, dense for one sequence.
        shape = (1, length, sizes.heads_kv, head_dim)
        self._cache = [
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
            for _ in range(layers)
        ]
        frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        angle = torch.arange(length, device=device)[:, None] * frequency
        turns = torch.cat([angle, angle], -1)[None, :, None]
        self._cos, self._sin = turns.cos().to(dtype), turns.sin().to(dtype)

    def __call__(self, tokens: Any, start: int, attend: Callable[..., Any]) -> Any:
        """Logits of the last of `tokens`, (1, n), which begin at position `start`."""
        import torch

        functional = torch.nn.functional
        count, width, head_dim = tokens.shape[1], self._width, self._sizes.head_dim
        end = start + count
        cos, sin = self._cos[:, start:end], self._sin[:, start:end]
        x = functional.embedding(tokens, self._embedding)
        for weights, cache in zip(self._layers, self._cache, strict=True):
            mixed = functional.linear(_normed(x), weights["qkv"])
            query, key, value = mixed.split([width, self._kv, self._kv], -1)
            heads = (1, count, -1, head_dim)
            cache[0][:, start:end] = _turned(key.view(heads), cos, sin)
            cache[1][:, start:end] = value.reshape(heads)
            out = attend(
                _turned(query.reshape(heads), cos, sin).transpose(1, 2),
                *(part[:, :end].transpose(1, 2) for part in cache),
                is_causal=count > 1,
                enable_gqa=True,
            )
            x = x + functional.linear(out.transpose(1, 2).reshape(1, count, width), weights["out"])
            gate, up = functional.linear(_normed(x), weights["up"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, weights["down"])
        return functional.linear(_normed(x[:, -1:]), self._head)


def _normed(x: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def _turned(x: Any, cos: Any, sin: Any) -> Any:
    import torch

    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def problems(sizes: Sizes = LLAMA_3_8B) -> list[AttentionProblem]:
    """What the decoder calls; decoding once for all of its lengths, in their middle."""
    prefills = [_attention(sizes, n, n, is_causal=True) for n in PREFILLS]
    return [*prefills, _attention(sizes, 1, CONTEXT + GENERATED // 2)]


def _attention(
    sizes: Sizes, seqlen_q: int, seqlen_kv: int, *, is_causal: bool = False
) -> AttentionProblem:
    return AttentionProblem(
        seqlen_q,
        seqlen_kv,
        sizes.head_dim,
        1,
        sizes.heads,
        sizes.heads_kv,
        is_causal=is_causal,
        layout="bshd",
    )


def measure(layers: int, sizes: Sizes = LLAMA_3_8B, device: str = "cuda") -> dict[str, Any]:
    """Tokens a second with `sdpa` and with `tuner`, interleaved, and attention's share."""
    import torch

    import tuner

    ways = {"sdpa": torch.nn.functional.scaled_dot_product_attention, "tuner": tuner.attention}
    found: dict[str, Any] = {"layers": layers}
    with torch.inference_mode():
        model = Decoder(sizes, layers, max(*PREFILLS, CONTEXT + GENERATED), torch.float16, device)
        for length in PREFILLS:
            tokens = torch.randint(sizes.vocabulary, (1, length), device=device)
            runs = {name: _prefill(model, tokens, attend) for name, attend in ways.items()}
            found[f"prefill {length}"] = _compared(runs, length)
        shape = (1, CONTEXT + GENERATED)
        tokens = torch.randint(sizes.vocabulary, shape, device=device)
        runs = {name: _generation(model, tokens, attend) for name, attend in ways.items()}
        found[f"decoding at {CONTEXT}"] = _compared(runs, GENERATED)
    return found


def _prefill(model: Decoder, tokens: Any, attend: Callable[..., Any]) -> Callable[..., Any]:
    def run(wrapped: Callable[..., Any] = attend, _: int = 1) -> Any:
        return model(tokens, 0, wrapped)

    return run


def _generation(model: Decoder, tokens: Any, attend: Callable[..., Any]) -> Callable[..., Any]:
    """One token after the other, drawn ahead: the likeliest ones would part the two ways for good
    where two of them are nearly alike, and `deviation` would say nothing.
    """

    def run(wrapped: Callable[..., Any] = attend, count: int = GENERATED) -> Any:
        for place in range(CONTEXT, CONTEXT + count):
            logits = model(tokens[:, place : place + 1], place, wrapped)
        return logits

    model(tokens[:, :CONTEXT], 0, attend)
    return run


def _compared(runs: Mapping[str, Callable[..., Any]], tokens: int) -> dict[str, Any]:
    """Tokens a second of each way, medians of interleaved runs; share and agreement."""
    import torch

    import tuner

    for run in runs.values():
        for _ in range(2):
            run()
    tuner.stats(reset=True)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(7):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    stats = tuner.stats()
    found: dict[str, Any] = {
        name: tokens / statistics.median(values) for name, values in times.items()
    }
    attends = {
        "sdpa": torch.nn.functional.scaled_dot_product_attention,
        "tuner": tuner.attention,
    }
    for name, run in runs.items():
        found[f"{name} share"] = _share(run, attends[name])
    results = [run().float() for run in runs.values()]
    found["deviation"] = float((results[0] - results[1]).norm() / results[0].norm())
    found["hits"], found["nearest_hits"] = stats.hits, stats.nearest_hits
    found["fallbacks"] = dict(stats.fallbacks)
    return found


def _share(run: Callable[..., Any], attend: Callable[..., Any]) -> float:
    """Attention's part of the time on the device, of a forward pass (of one token in decoding).

    The device sleeps until all is enqueued: else attention's part would hold the gaps in which the
    device waits for the host.
    """
    import torch

    pairs = []

    def timed(*tensors: Any, **options: Any) -> Any:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        out = attend(*tensors, **options)
        events[1].record()
        pairs.append(events)
        return out

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP_CLOCKS)
    start.record()
    run(timed, 1)
    end.record()
    torch.cuda.synchronize()
    spent = sum(first.elapsed_time(second) for first, second in pairs)
    return float(spent / start.elapsed_time(end))
