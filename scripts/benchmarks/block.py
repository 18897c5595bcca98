"""A block of Llama-3-8B in one CUDA graph: by PyTorch, with own attention, and all own.

A pass runs several blocks in sequence, each with its own weights, so that weights come from memory
as in a model. A block is RMSNorm, QKV product, rotary embedding, attention, output product,
residual, RMSNorm, SwiGLU MLP, and residual. Times are microseconds a block. Parts are the kernels
of each operation, by the profiler, in an eager pass of operations that wait for each other.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.decoder import LLAMA_3_8B, OPERATIONS, ROTARY_BASE, Sizes, Way, turned, ways
from benchmarks.harness import Bench, Contender, Preset, Row
from benchmarks.rows import PYTORCH, TUNER, control, markdown
from tuner.cli import Parser
from tuner.problem import DType, GemmProblem, SwigluProblem

ATTENTION = "attention"
NAMES = {PYTORCH: "torch", TUNER: "block", ATTENTION: "attention"}
"""Contenders, and their names of `decoder.ways`."""
PREFILLS, BATCHES = (512, 2048, 8192), (1, 16, 64)
CONTEXT = 4096
"""Keys in the cache of each sequence that is decoded."""
DTYPES: Mapping[str, DType] = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Pass:
    """Tokens and sequences that go through the blocks at once."""

    batch: int
    tokens: int
    """New tokens of each sequence."""
    context: int
    """Keys of each sequence, the new ones' among them."""
    sizes: Sizes = LLAMA_3_8B

    @property
    def group(self) -> str:
        """Prompts or decoding."""
        return "prefill" if self.tokens > 1 else "decoding"

    @property
    def label(self) -> str:
        """Its sizes."""
        if self.tokens > 1:
            return f"prefill {self.tokens}"
        return f"decoding at {self.context}, batch {self.batch}"


def passes(_: Namespace) -> list[Pass]:
    """Prompts of one sequence, then decoding by one token."""
    prompts = [Pass(1, length, length) for length in PREFILLS]
    return prompts + [Pass(batch, 1, CONTEXT) for batch in BATCHES]


def listing(cases: Sequence[Pass], args: Namespace) -> Iterator[str]:
    """The passes as comments, each before its problems, for ``scripts/tuner sweep --problems``."""
    dtype = DTYPES[args.dtype]
    for case in cases:
        sizes, rows = case.sizes, case.batch * case.tokens
        width = sizes.heads * sizes.head_dim
        mixed = width + 2 * sizes.heads_kv * sizes.head_dim
        heads = f"B={case.batch},H={sizes.heads},HKV={sizes.heads_kv},D={sizes.head_dim}"
        lengths = f"SQ={case.tokens},SKV={case.context},causal={int(case.tokens > 1)}"
        yield f"# {case.label}"
        yield f"- op=attention,{heads},{lengths},dtype={args.dtype},layout=bshd"
        for problem in (
            GemmProblem(rows, mixed, sizes.hidden, dtype=dtype),
            GemmProblem(rows, sizes.hidden, width, dtype=dtype),
            SwigluProblem(rows, sizes.inner, sizes.hidden, dtype=dtype),
            GemmProblem(rows, sizes.hidden, sizes.inner, dtype=dtype),
        ):
            yield f"- op={problem.op},{problem.label()}"


class Blocks:
    """Pre-norm blocks with grouped heads, rotary positions and a cache of keys and values.

    Args:
        what: the pass; its cache is filled with random keys and values.
        count: blocks.
        dtype: torch's type of weights and activations.
        device: torch's name of it.
    """

    def __init__(self, what: Pass, count: int, dtype: Any, device: str) -> None:
        import torch

        import tuner

        self._what, sizes = what, what.sizes
        hidden, inner, head_dim = sizes.hidden, sizes.inner, sizes.head_dim
        self._width, self._kv = sizes.heads * head_dim, sizes.heads_kv * head_dim

        def weight(rows: int, columns: int) -> Any:
            drawn = torch.randn(rows, columns, dtype=dtype, device=device)
            return drawn.mul_(columns**-0.5)

        cached = torch.randn(
            (count, 2, what.batch, what.context, sizes.heads_kv, head_dim),
            dtype=dtype,
            device=device,
        )
        self.layers: list[dict[str, Any]] = []
        for keys, values in cached:
            up = weight(2 * inner, hidden)
            self.layers.append(
                {
                    "qkv": weight(self._width + 2 * self._kv, hidden),
                    "out": weight(hidden, self._width),
                    "up": up,
                    "interleaved": tuner.interleave(*up.chunk(2)),
                    "down": weight(hidden, inner),
                    "norms": torch.rand(2, hidden, dtype=dtype, device=device) + 0.5,
                    "keys": keys,
                    "values": values,
                }
            )
        frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
        places = torch.arange(what.context - what.tokens, what.context, device=device)
        angle = places[:, None] * frequency
        turns = torch.cat([angle, angle], -1)[None, :, None]
        self._cos, self._sin = turns.cos().to(dtype), turns.sin().to(dtype)

    def __call__(self, x: Any, way: Way) -> Any:
        """Activations (batch, tokens, hidden) of a pass to those behind the last block."""
        for weights in self.layers:
            x = self._block(x, weights, way)
        return x

    def _block(self, x: Any, weights: Mapping[str, Any], way: Way) -> Any:
        import torch

        what = self._what
        first, second = weights["norms"]
        mixed = way.linear(_normed(x, first), weights["qkv"])
        heads = (what.batch, what.tokens, -1, what.sizes.head_dim)
        query, key, value = (
            part.reshape(heads) for part in mixed.split([self._width, self._kv, self._kv], -1)
        )
        new = slice(what.context - what.tokens, what.context)
        weights["keys"][:, new] = turned(key, self._cos, self._sin)
        weights["values"][:, new] = value
        out = way.attention(
            turned(query, self._cos, self._sin).transpose(1, 2),
            weights["keys"].transpose(1, 2),
            weights["values"].transpose(1, 2),
            is_causal=what.tokens > 1,
            enable_gqa=True,
        )
        flat = out.transpose(1, 2).reshape(what.batch, what.tokens, self._width)
        x = torch.add(x, way.linear(flat, weights["out"]))
        up = weights["interleaved" if way.is_interleaved else "up"]
        return torch.add(x, way.linear(way.swiglu(_normed(x, second), up), weights["down"]))


def _normed(x: Any, weight: Any) -> Any:
    import torch

    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)


def measure(case: Pass, args: Namespace) -> Row:
    """A pass by each way: microseconds and parts of a block, and the distance from PyTorch's
    output.
    """
    import torch

    import tuner

    dtype = getattr(torch, DTYPES[args.dtype])
    with torch.inference_mode():
        blocks = Blocks(case, args.layers, dtype, "cuda")
        shape = case.batch, case.tokens, case.sizes.hidden
        source = torch.randn(shape, dtype=dtype, device="cuda")
        x, outs, answers = source.clone(), dict[str, Any](), dict[str, Row]()
        by_way = {name: ways()[way] for name, way in NAMES.items()}
        for name, way in by_way.items():
            tuner.stats(reset=True)
            for _ in range(3):  # loads kernels, chooses algorithms
                outs[name] = blocks(x, way).float()
            stats = tuner.stats(reset=True)
            answers[name] = {"hits": stats.hits, "refused": dict(stats.fallbacks)}
        contenders = [
            Contender(name, partial(_called, blocks, x, way)) for name, way in by_way.items()
        ]
        times = harness.time_calls(contenders, lambda _: x.copy_(source), 1)
        parts = {name: _parts(blocks, x, way) for name, way in by_way.items()}
    wanted = outs[PYTORCH]
    return {
        "us": {name: us / args.layers for name, us in times.us.items()},
        "failed": times.failed,
        "errors": {name: float((o - wanted).norm() / wanted.norm()) for name, o in outs.items()},
        "parts": {
            name: {part: us / args.layers for part, us in of.items()} for name, of in parts.items()
        },
        "answers": answers,
    }


def _called(blocks: Blocks, x: Any, way: Way, _: int) -> Any:
    return blocks(x, way)


def _parts(blocks: Blocks, x: Any, way: Way) -> dict[str, float]:
    """Microseconds of each operation's kernels in an eager pass."""
    import torch

    profiler, spent = torch.profiler, dict.fromkeys(OPERATIONS, 0.0)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            torch.cuda.synchronize()
            with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
                out = function(*tensors, **options)
                torch.cuda.synchronize()
            on_device = [
                event.self_device_time_total
                for event in seen.key_averages()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
            spent[name] += sum(on_device)
            return out

        return call

    blocks(x, way.watched(watched))
    return spent


def table(rows: Sequence[Row]) -> list[str]:
    """A row for each pass and way: microseconds a block, speed over PyTorch's, and parts."""
    lines = [("pass", "way", "us a block", "over PyTorch", "control", "parts, us", "error")]
    for row in rows:
        for name in [name for name in NAMES if name in row.get("us", {})]:
            parts = ", ".join(f"{part} {us:.1f}" for part, us in row["parts"][name].items())
            ratio, noise = row["us"][PYTORCH] / row["us"][name], control(row)
            lines.append((
                *(row["case"], name, f"{row['us'][name]:.1f}"),
                "" if name == PYTORCH else f"{ratio:.3f}",
                f"{noise:.3f}" if name == PYTORCH and noise else "",
                *(parts, f"{row['errors'][name]:.1e}"),
            ))  # fmt: skip
    return markdown(lines)


def _options(parser: Parser) -> None:
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="default bf16")
    parser.add_argument("--layers", type=int, default=4, help="blocks of a graph (default 4)")


SMALL = Sizes(hidden=48, heads=4, heads_kv=2, head_dim=16, inner=96, vocabulary=10)
BENCH = Bench(
    "block",
    __doc__,
    {
        "llama": Preset(
            "prompts and decoding of Llama-3-8B",
            passes,
            measure,
            table=table,
            listing=listing,
            smoke=Pass(2, 7, 7, SMALL),
        )
    },
    _options,
)
