"""A decoder with the shapes of Llama-3-8B and random weights, and its tokens a second.

Three ways are compared: PyTorch's kernels; attention by `tuner.attention`; and the whole block,
with linear layers by `tuner.linear` and gated ones by `tuner.swiglu`.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.problem import AttentionProblem, GemmProblem, Problem, SwigluProblem


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
SLEEP_CLOCKS = 200_000_000
"""A tenth of a second: longer than enqueueing a pass, of up to 1000 launches, takes."""
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
TUNED: Mapping[str, tuple[str, ...]] = {"attention": ("attention",), "block": OPERATIONS}
"""The ways beside `torch`, and which operations the tuner answers there."""


def ways() -> dict[str, Way]:
    """PyTorch's, and those of `TUNED`."""
    import torch

    import tuner

    functional = torch.nn.functional
    plain = Way(functional.scaled_dot_product_attention, functional.linear, gated)
    return {
        "torch": plain,
        "attention": replace(plain, attention=tuner.attention),
        "block": Way(tuner.attention, tuner.linear, tuner.swiglu, is_interleaved=True),
    }


def gated(x: Any, weights: Any) -> Any:
    """SwiGLU by PyTorch: (..., K) and (2 N, K), gate before up, to (..., N)."""
    import torch

    gate, up = torch.nn.functional.linear(x, weights).chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


class Decoder:
    """A pre-norm decoder with grouped heads, rotary positions and a cache of keys and values."""

    def __init__(self, sizes: Sizes, layers: int, length: int, dtype: Any, device: str) -> None:
        import torch

        import tuner

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
        for weights in self._layers:
            weights["interleaved"] = tuner.interleave(*weights["up"].chunk(2))
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

    def __call__(self, tokens: Any, start: int, way: Way) -> Any:
        """Logits of the last of `tokens`, (1, n), which begin at position `start`."""
        import torch

        count, width, head_dim = tokens.shape[1], self._width, self._sizes.head_dim
        end = start + count
        cos, sin = self._cos[:, start:end], self._sin[:, start:end]
        up = "interleaved" if way.is_interleaved else "up"
        x = torch.nn.functional.embedding(tokens, self._embedding)
        for weights, cache in zip(self._layers, self._cache, strict=True):
            mixed = way.linear(_normed(x), weights["qkv"])
            query, key, value = mixed.split([width, self._kv, self._kv], -1)
            heads = (1, count, -1, head_dim)
            cache[0][:, start:end] = turned(key.view(heads), cos, sin)
            cache[1][:, start:end] = value.reshape(heads)
            out = way.attention(
                turned(query.reshape(heads), cos, sin).transpose(1, 2),
                *(part[:, :end].transpose(1, 2) for part in cache),
                is_causal=count > 1,
                enable_gqa=True,
            )
            x = x + way.linear(out.transpose(1, 2).reshape(1, count, width), weights["out"])
            x = x + way.linear(way.swiglu(_normed(x), weights[up]), weights["down"])
        return way.linear(_normed(x[:, -1:]), self._head)


def _normed(x: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def turned(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding of (..., head_dim): ``x`` rotated by the given cosines and sines."""
    import torch

    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def problems(sizes: Sizes = LLAMA_3_8B) -> list[Problem]:
    """Problems of a block; decoding's attention once for all of its lengths, in their middle."""
    found: list[Problem] = [_attention(sizes, n, n, is_causal=True) for n in PREFILLS]
    found.append(_attention(sizes, 1, CONTEXT + GENERATED // 2))
    width = sizes.heads * sizes.head_dim
    mixed = width + 2 * sizes.heads_kv * sizes.head_dim
    for count in (*PREFILLS, 1):
        found += [
            GemmProblem(count, mixed, sizes.hidden),
            GemmProblem(count, sizes.hidden, width),
            SwigluProblem(count, sizes.inner, sizes.hidden),
            GemmProblem(count, sizes.hidden, sizes.inner),
        ]
    found.append(GemmProblem(1, sizes.vocabulary, sizes.hidden))
    return list(dict.fromkeys(found))


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
    """Figures of each pass, as `_compared` gives them."""
    import torch

    found: dict[str, Any] = {"layers": layers}
    with torch.inference_mode():
        model = Decoder(sizes, layers, max(*PREFILLS, CONTEXT + GENERATED), torch.float16, device)
        for length in PREFILLS:
            tokens = torch.randint(sizes.vocabulary, (1, length), device=device)
            found[f"prefill {length}"] = _compared(_prefill(model, tokens), length)
        tokens = torch.randint(sizes.vocabulary, (1, CONTEXT + GENERATED), device=device)
        found[f"decoding at {CONTEXT}"] = _compared(_generation(model, tokens), GENERATED)
    return found


Run = Callable[[Way, bool], Any]
"""A pass by some way; only its beginning, one forward pass of the model, where the flag says so."""


def _prefill(model: Decoder, tokens: Any) -> Run:
    def run(way: Way, _: bool = False) -> Any:
        return model(tokens, 0, way)

    return run


def _generation(model: Decoder, tokens: Any) -> Run:
    """One token after the other, drawn ahead: the likeliest ones would part the ways for good where
    two of them are nearly alike, and `deviation` would say nothing. Whatever way filled the cache
    last, all go on from it.
    """

    def run(way: Way, is_short: bool = False) -> Any:
        for place in range(CONTEXT, CONTEXT + (1 if is_short else GENERATED)):
            logits = model(tokens[:, place : place + 1], place, way)
        return logits

    model(tokens[:, :CONTEXT], 0, ways()["torch"])
    return run


def _compared(run: Run, tokens: int) -> dict[str, Any]:
    """Of a pass of so many tokens by each way: tokens a second (medians of interleaved runs), each
    operation's part of the time on the device, what answered its calls, and how far the logits are
    from PyTorch's (relative Frobenius norm).
    """
    import torch

    compared = ways()
    for way in compared.values():
        for _ in range(2):
            run(way, False)
    times: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(ROUNDS):
        for name, way in compared.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(way, False)
            torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    wanted = run(compared["torch"], False).float()
    return {
        "tokens_per_s": {name: tokens / statistics.median(t) for name, t in times.items()},
        "shares": {name: _shares(run, way) for name, way in compared.items()},
        "calls": {name: _answers(run, compared[name], TUNED[name]) for name in TUNED},
        "deviation": {
            name: float((run(compared[name], False).float() - wanted).norm() / wanted.norm())
            for name in TUNED
        },
    }


def _answers(run: Run, way: Way, tuned: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Of each operation that the tuner is asked for: calls in a pass by what answered them."""
    import tuner

    found: dict[str, Counter[str]] = {name: Counter() for name in tuned}
    fallbacks: dict[str, Counter[str]] = {name: Counter() for name in tuned}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            tuner.stats(reset=True)
            out = function(*tensors, **options)
            stats = tuner.stats()
            found[name].update(hits=stats.hits)
            fallbacks[name].update(stats.fallbacks)
            return out

        return call if name in tuned else function

    run(way.watched(counted), False)
    return {name: {**found[name], "fallbacks": dict(fallbacks[name])} for name in tuned}


def _shares(run: Run, way: Way) -> dict[str, float]:
    """Each operation's part of the time on the device, of one forward pass.

    The device sleeps until all is enqueued: else the parts would hold the gaps in which the device
    waits for the host.
    """
    import torch

    spans: list[tuple[str, Any, Any]] = []

    def event() -> Any:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            start = event()
            out = function(*tensors, **options)
            spans.append((name, start, event()))
            return out

        return call

    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CLOCKS)
    start = event()
    run(way.watched(timed), True)
    end = event()
    torch.cuda.synchronize()
    spent = dict.fromkeys(OPERATIONS, 0.0)
    for name, first, second in spans:
        spent[name] += first.elapsed_time(second)
    whole = start.elapsed_time(end)
    return {name: value / whole for name, value in spent.items()}


def rows(part: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Lines of the report on what `measure` found: figure, value, limit, and what is beside it."""
    for name, found in part.items():
        if name == "layers":
            continue
        speed, shares = found["tokens_per_s"], found["shares"]
        yield (
            name,
            "",
            "",
            f"{part['layers']} layers; PyTorch alone {_said('torch', speed, shares)}",
        )
        for way, calls in found["calls"].items():
            added = [calls[name] for name in calls if way == "attention" or name != "attention"]
            is_tuned = any(map(was_tuned, added))
            beside = _said(way, speed, shares)
            beside += f"; logits {found['deviation'][way]:.1e} from PyTorch's"
            ratio = f"{speed['torch'] / speed[way]:.3f}" if is_tuned else "not tuned"
            yield f"  {way}: time / torch", ratio, "1.000", beside
        for operation, answers in found["calls"]["block"].items():
            yield f"  {operation}: calls", "", "", _answered(answers)


def was_tuned(answers: Mapping[str, Any]) -> bool:
    """True if a measurement decided any of an operation's calls, be it for PyTorch's kernel."""
    from tuner.runtime.call.refusal import Kind

    return bool(answers["hits"] or answers["fallbacks"].get(Kind.VENDOR))


def _answered(answers: Mapping[str, Any]) -> str:
    reasons = [f"{count} {reason}" for reason, count in answers["fallbacks"].items()]
    told = "; ".join([f"{answers['hits']} hits", *reasons])
    return told if was_tuned(answers) else f"nothing tuned ran: {told}"


def _said(way: str, speed: Mapping[str, float], shares: Mapping[str, Mapping[str, float]]) -> str:
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares[way].items())
    return f"{speed[way]:.0f} tokens/s ({told} of the device's time)"
