"""A block of Llama-3-8B in one CUDA graph: by PyTorch, with own attention, and all own.

A pass runs `LAYERS` blocks in sequence, each with its own weights, so that weights come from memory
as in a model. A block is RMSNorm, QKV product, rotary embedding, attention, output product,
residual, RMSNorm, SwiGLU MLP, and residual.

The graphs of all ways are replayed in shuffled order in each round. PyTorch takes part twice; the
difference of its two times is the control. The tuner takes part again with plain launches, without
the overlap of programmatic dependent launch. The times of single kernels are the profiler's, from a
separate replay.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.decoder import LLAMA_3_8B, OPERATIONS, ROTARY_BASE, Sizes, Way, turned, ways
from benchmarks.gpu import need_gpu
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.measurement import speedup_text
from tuner.problem import AttentionProblem, DType, GemmProblem, Problem, SwigluProblem
from tuner.selection.describe import microseconds, table

LAYERS = 4
"""Blocks a graph: the gap between a graph's launch and its first kernel is shared by them."""
PREFILLS = (512, 2048, 8192)
BATCHES = (1, 16, 64)
CONTEXT = 4096
"""Keys in the cache of each sequence that is decoded."""
ROUNDS = 15
REPLAYS = 3
"""Replays of a graph a round, after one that is not timed; the median counts."""
CONTROL = "torch again"
PLAIN = "plain launches"
REST = "rest"
"""Kernels of no operation of a `Way`: norms, rotary embedding, residuals, copies to the cache."""
DTYPES: Mapping[str, DType] = {"fp16": "float16", "bf16": "bfloat16"}
NAMES = {
    "torch": "PyTorch",
    "attention": "attention replaced",
    "block": "all of the tuner",
    PLAIN: "the same, plain launches",
    CONTROL: "PyTorch again",
}


@dataclass(frozen=True)
class Pass:
    """Tokens and sequences that go through the blocks at once."""

    batch: int
    tokens: int
    """New tokens of each sequence."""
    context: int
    """Keys of each sequence, the new ones' among them."""

    @property
    def name(self) -> str:
        if self.tokens > 1:
            return f"prefill {self.tokens}"
        return f"decoding at {self.context}, batch {self.batch}"


class Block:
    """Pre-norm blocks with grouped heads, rotary positions and a cache of keys and values.

    Args:
        sizes: sizes of a block.
        layers: blocks.
        what: the pass; its cache is filled with random keys and values.
        dtype: torch's type of weights and activations.
        device: torch's name of it.
    """

    def __init__(self, sizes: Sizes, layers: int, what: Pass, dtype: Any, device: str) -> None:
        import torch

        import tuner

        self._sizes, self._what = sizes, what
        hidden, inner, head_dim = sizes.hidden, sizes.inner, sizes.head_dim
        self._width, self._kv = sizes.heads * head_dim, sizes.heads_kv * head_dim

        def weight(rows: int, columns: int) -> Any:
            made = torch.randn(rows, columns, dtype=dtype, device=device)
            return made.mul_(columns**-0.5)

        shape = (what.batch, what.context, sizes.heads_kv, head_dim)
        self.layers: list[dict[str, Any]] = []
        for _ in range(layers):
            up = weight(2 * inner, hidden)
            self.layers.append(
                {
                    "qkv": weight(self._width + 2 * self._kv, hidden),
                    "out": weight(hidden, self._width),
                    "up": up,
                    "interleaved": tuner.interleave(*up.chunk(2)),
                    "down": weight(hidden, inner),
                    "norms": torch.rand(2, hidden, dtype=dtype, device=device) + 0.5,
                    "keys": torch.randn(shape, dtype=dtype, device=device),
                    "values": torch.randn(shape, dtype=dtype, device=device),
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

        what, head_dim = self._what, self._sizes.head_dim
        first, second = weights["norms"]
        mixed = way.linear(_normed(x, first), weights["qkv"])
        heads = (what.batch, what.tokens, -1, head_dim)
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


def passes(
    prefills: Iterable[int] = PREFILLS, batches: Iterable[int] = BATCHES, context: int = CONTEXT
) -> list[Pass]:
    """Prompts of one sequence, then decoding by one token."""
    return [Pass(1, n, n) for n in prefills] + [Pass(batch, 1, context) for batch in batches]


def problems(chosen: Sequence[Pass], dtype: DType, sizes: Sizes = LLAMA_3_8B) -> list[Problem]:
    """Problems that the blocks pose, for `tuner sweep --problems`."""
    found: dict[Problem, None] = {}
    width = sizes.heads * sizes.head_dim
    for what in chosen:
        rows = what.batch * what.tokens
        attention = AttentionProblem(
            what.tokens,
            what.context,
            sizes.head_dim,
            what.batch,
            sizes.heads,
            sizes.heads_kv,
            is_causal=what.tokens > 1,
            dtype=dtype,
            layout="bshd",
        )
        mixed = width + 2 * sizes.heads_kv * sizes.head_dim
        called = (
            attention,
            GemmProblem(rows, mixed, sizes.hidden, dtype=dtype),
            GemmProblem(rows, sizes.hidden, width, dtype=dtype),
            SwigluProblem(rows, sizes.inner, sizes.hidden, dtype=dtype),
            GemmProblem(rows, sizes.hidden, sizes.inner, dtype=dtype),
        )
        found.update(dict.fromkeys(called))
    return list(found)


Replay = Callable[[], None]


def measure(what: Pass, layers: int, rounds: int, dtype: DType) -> dict[str, Any]:
    """One pass by each way: microseconds a block, kernels, and how far the result is from
    PyTorch's (relative Frobenius norm).
    """
    import torch

    import tuner

    with torch.inference_mode():
        model = Block(LLAMA_3_8B, layers, what, getattr(torch, dtype), "cuda")
        x = torch.randn(
            what.batch, what.tokens, LLAMA_3_8B.hidden, dtype=getattr(torch, dtype), device="cuda"
        )
        found: dict[str, dict[str, Any]] = {}
        graphs: dict[str, tuple[Any, Any]] = {}
        known = ways()
        known |= {PLAIN: known["block"], CONTROL: known["torch"]}
        for name, way in known.items():
            tuner.stats(reset=True)
            with plain_launches() if name == PLAIN else contextlib.nullcontext():
                for _ in range(3):
                    model(x, way)  # loads kernels, chooses algorithms
                torch.cuda.synchronize()
                stats = tuner.stats()
                graphs[name] = _captured(model, x, way)
            found[name] = {
                "calls": {
                    "hits": stats.hits,
                    "fallbacks": dict(stats.fallbacks),
                }
            }
        times = interleaved({n: graph.replay for n, (graph, _) in graphs.items()}, rounds, _timed)
        wanted = graphs["torch"][1].float()
        for name, series in times.items():
            graph, out = graphs[name]
            found[name]["us"] = statistics.median(series) / layers
            found[name]["std_us"] = statistics.stdev(series) / layers
            found[name]["deviation"] = float((out.float() - wanted).norm() / wanted.norm())
            if name in (CONTROL, PLAIN):
                continue
            kernels = _kernels(graph.replay)
            called = _launches(model, x, known[name])
            found[name]["kernels"] = {
                kernel: {
                    "part": part_of(kernel, count / layers, called),
                    "count": count,
                    "us": us / layers,
                }
                for kernel, (count, us) in kernels.items()
            }
    return {**asdict(what), "ways": found}


@contextlib.contextmanager
def plain_launches() -> Iterator[None]:
    """Own kernels are planned without programmatic launch here, and anew afterwards."""
    from tuner.runtime.call.table import table

    members = [one for one in families().values() if "pdl" in one.runtime_parameters]
    names = ("launches", "strided_launches")
    try:
        for member, name in itertools.product(members, names):
            setattr(member, name, partial(_plainly, getattr(member, name)))
        table.forget()
        yield
    finally:
        for member, name in itertools.product(members, names):
            vars(member).pop(name, None)
        table.forget()


def _plainly(usual: Callable[..., Any], problem: Problem, config: Config, *others: Any) -> Any:
    """The launches of a config without programmatic launch, and without what is fetched ahead."""
    changed = {"pdl": False, "lead": 0}
    params = {name: changed.get(name, value) for name, value in config.params.items()}
    return usual(problem, Config(config.family, params), *others)


def _captured(model: Block, x: Any, way: Way) -> tuple[Any, Any]:
    """A graph of a pass, and the tensor that it leaves."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x, way)
    return graph, out


def interleaved(
    replays: Mapping[str, Replay], rounds: int, timed: Callable[[Replay], float]
) -> dict[str, list[float]]:
    """Times of several graphs, each round in another order.

    Args:
        replays: by name.
        rounds: number of rounds; one more comes first and is not kept.
        timed: microseconds of one replay.
    """
    chance = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(rounds + 1):
        for name in chance.sample(sorted(replays), len(replays)):
            us = timed(replays[name])
            if turn:
                times[name].append(us)
    return times


def _timed(replay: Replay) -> float:
    """The median of `REPLAYS`, after one that is not timed."""
    import torch

    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    replay()
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    spans = [float(a.elapsed_time(b)) * 1e3 for a, b in itertools.pairwise(events)]
    return statistics.median(spans)


def _kernels(work: Callable[[], Any]) -> dict[str, tuple[int, float]]:
    """Count and microseconds of each kernel that some work launches, by the profiler."""
    import torch

    profiler = torch.profiler
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        work()
        torch.cuda.synchronize()
    return {
        event.key: (event.count, event.self_device_time_total)
        for event in seen.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    }


def _launches(model: Block, x: Any, way: Way) -> dict[str, Counter[str]]:
    """Launches of each kernel by each operation of a way, in an eager pass through a block."""
    found: dict[str, Counter[str]] = {name: Counter() for name in OPERATIONS}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            kept: list[Any] = []
            seen = _kernels(lambda: kept.append(function(*tensors, **options)))
            found[name].update({kernel: count for kernel, (count, _) in seen.items()})
            return kept[0]

        return call

    model._block(x, model.layers[0], replace(way).watched(watched))
    return found


def part_of(kernel: str, launches: float, called: Mapping[str, Mapping[str, int]]) -> str:
    """The operations that launch a kernel of this name, as ``linear+swiglu``; `REST` is among them
    where they do not account for all launches.

    Args:
        kernel: name of the kernel.
        launches: launches a block.
        called: launches a block of each operation, by kernel.
    """
    counts = {name: called.get(name, {}).get(kernel, 0) for name in OPERATIONS}
    parts = [name for name, count in counts.items() if count]
    return "+".join(parts if sum(counts.values()) >= launches else [*parts, REST])


def parts_us(way: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds a block of each part, the longest first."""
    found: dict[str, float] = {}
    for kernel in way.get("kernels", {}).values():
        found[kernel["part"]] = found.get(kernel["part"], 0.0) + kernel["us"]
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def report(document: Mapping[str, Any]) -> str:
    """A line a pass and way: microseconds a block, speed over PyTorch's, and parts."""
    heading = ("pass", "way", "us a block", "+-", "speed", "parts, us")
    lines: list[Sequence[str]] = [heading]
    for name, one in document["passes"].items():
        base = one["ways"]["torch"]["us"]
        noise = abs(one["ways"][CONTROL]["us"] / base - 1)
        for way, seen in one["ways"].items():
            ratio = base / seen["us"]
            is_tie = way not in ("torch", CONTROL) and abs(ratio - 1) <= noise
            parts = ", ".join(f"{part} {us:.1f}" for part, us in parts_us(seen).items())
            lines.append(
                (
                    name,
                    NAMES[way],
                    microseconds(seen["us"]),
                    f"{100 * seen['std_us'] / seen['us']:.1f} %",
                    "" if way == "torch" else speedup_text(ratio, is_tie=is_tie),
                    parts,
                )
            )
    said = ", ".join(f"{name} {value}" for name, value in document["environment"].items())
    return f"{said}\n\n{table(lines, frozenset((2, 3)))}"


def environment(dtype: str, layers: int) -> dict[str, Any]:
    """Facts that the run depends on.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
    """
    need_gpu()
    import torch

    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "dtype": dtype,
        "layers": layers,
    }
    return file_head.complete(facts)


def _numbers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas; none of the empty text."""
    try:
        found = tuple(int(part) for part in filter(None, text.split(",")))
    except ValueError as exc:
        raise ConfigError(f"'{text}' is wrong (allowed: whole numbers, as 1,16)") from exc
    if any(number < 1 for number in found):
        raise ConfigError(f"'{text}' is out of range (allowed: 1 and more)")
    return found


def main(argv: Sequence[str]) -> int:
    """Run it; writes a file after each pass, and prints the table last.

    Raises:
        BenchmarkError: when there is no GPU or no PyTorch.
        ConfigError: when the options are out of range.
    """
    parser = Parser(prog="scripts/bench block", description=__doc__)
    parser.add_argument(
        "--prefill",
        default=",".join(map(str, PREFILLS)),
        metavar="N,...",
        help="lengths of prompts",
    )
    parser.add_argument(
        "--batch",
        default=",".join(map(str, BATCHES)),
        metavar="N,...",
        help="sequences of the decoding steps",
    )
    parser.add_argument("--context", type=int, default=CONTEXT, help="keys of what is decoded")
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        default="bf16",
        help="type of weights and activations (default bf16)",
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="blocks a graph")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of the ways in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, kernel by kernel")
    parser.add_argument(
        "--list-problems", action="store_true", help="only print them, for `tuner sweep --problems`"
    )
    args = parser.parse_args(argv)
    for name, value, least in (
        ("context", args.context, 2),
        ("layers", args.layers, 1),
        ("rounds", args.rounds, 2),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value} is out of range (allowed: {least} and more)")
    chosen = passes(_numbers(args.prefill), _numbers(args.batch), args.context)
    if args.list_problems:
        for problem in problems(chosen, DTYPES[args.dtype]):
            print(f"- op={problem.op},{problem.label()}")
        return 0
    check_place(args.json)
    document: dict[str, Any] = {
        "environment": environment(args.dtype, args.layers),
        "passes": {},
    }
    for what in chosen:
        document["passes"][what.name] = measure(what, args.layers, args.rounds, DTYPES[args.dtype])
        print(f"{what.name}: done", file=sys.stderr)
        if args.json:
            write_json(args.json, document)
    print(report(document))
    return 0
