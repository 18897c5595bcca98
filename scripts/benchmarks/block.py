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
from benchmarks.decoder import (
    LLAMA_3_8B,
    NAMES,
    OPERATIONS,
    Blocks,
    Sizes,
    Way,
    problems_of,
    ways,
)  # fmt: skip
from benchmarks.harness import Bench, Contender, Preset, Row
from benchmarks.rows import PYTORCH, control, markdown
from tuner.cli import Parser
from tuner.problem import DType

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
    for case in cases:
        shape = case.tokens, case.context, case.batch
        yield f"# {case.label}"
        for problem in problems_of(case.sizes, *shape, DTYPES[args.dtype]):
            yield f"- op={problem.op},{problem.label()}"


def measure(case: Pass, args: Namespace) -> Row:
    """A pass by each way: microseconds and parts of a block, and the distance from PyTorch's
    output.
    """
    import torch

    import tuner

    dtype, place = getattr(torch, DTYPES[args.dtype]), case.context - case.tokens
    with torch.inference_mode():
        blocks = Blocks(case.sizes, args.layers, case.context, dtype, "cuda", case.batch)
        shape = case.batch, case.tokens, case.sizes.hidden
        source = torch.randn(shape, dtype=dtype, device="cuda")
        x, outs, answers = source.clone(), dict[str, Any](), dict[str, Row]()
        by_way = {NAMES[name]: way for name, way in ways().items()}
        for name, way in by_way.items():
            tuner.stats(reset=True)
            for _ in range(3):  # loads kernels, chooses algorithms
                outs[name] = blocks(x, place, way).float()
            stats = tuner.stats(reset=True)
            answers[name] = {"hits": stats.hits, "refused": dict(stats.fallbacks)}
        contenders = [
            Contender(name, harness.every_copy(partial(blocks, x, place, way)))
            for name, way in by_way.items()
        ]
        times = harness.time_calls(contenders, lambda _: x.copy_(source), 1)
        parts = {name: _parts(partial(blocks, x, place), way) for name, way in by_way.items()}
    return {
        "us": {name: us / args.layers for name, us in times.us.items()},
        "failed": times.failed,
        "errors": {name: harness.distance(out, outs[PYTORCH]) for name, out in outs.items()},
        "parts": {
            name: {part: us / args.layers for part, us in of.items()} for name, of in parts.items()
        },
        "answers": answers,
    }


def _parts(run: Callable[[Way], Any], way: Way) -> dict[str, float]:
    """Microseconds of each operation's kernels in an eager pass."""
    import torch

    profiler, spent = torch.profiler, dict.fromkeys(OPERATIONS, 0.0)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            torch.cuda.synchronize()
            with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as seen:
                out = function(*tensors, **options)
                torch.cuda.synchronize()
            spent[name] += sum(
                event.self_device_time_total
                for event in seen.key_averages()
                if event.device_type == torch.autograd.DeviceType.CUDA
            )
            return out

        return call

    run(way.watched(watched))
    return spent


def table(rows: Sequence[Row]) -> list[str]:
    """A row for each pass and way: microseconds a block, speed over PyTorch's, and parts."""
    lines = [("pass", "way", "us a block", "over PyTorch", "control", "parts, us", "error")]
    for row in rows:
        us, noise = row.get("us", {}), control(row)
        for name in [name for name in NAMES.values() if name in us]:
            parts = ", ".join(f"{part} {of:.1f}" for part, of in row["parts"][name].items())
            over = f"{us[PYTORCH] / us[name]:.3f}" if PYTORCH in us else ""
            # The control is the first contender's.
            beside = f"{noise:.3f}" if noise and name == next(iter(us)) else ""
            error = f"{row['errors'][name]:.1e}"
            lines.append((row["case"], name, f"{us[name]:.1f}", over, beside, parts, error))
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
