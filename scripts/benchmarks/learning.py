"""``scripts/bench learning``: the first calls of shapes under ``TUNER_BENCHMARK=1``.

The first call of a shape times the portfolio's kernels and PyTorch's on its own tensors, and keeps
the fastest. The second call shows that the choice is kept. Then the chosen kernel and PyTorch's are
timed behind an ordinary kernel, interleaved. The journal of choices is a new one; artifacts and
kernel lists are the user's.

Weights of products are rotated, and so are keys and values of one query: a model reads them once a
token, from memory. The choice is made for that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.call_times import Contender, time_calls
from benchmarks.gpu import no_gpu
from benchmarks.models import environment
from tuner import settings
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.measure.device import detect
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.selection.describe import table

CALLS: Mapping[str, str] = {
    "GPT-2 XL, prompt": "B=4,H=25,S=700,D=64,causal=1",
    "Llama-3-8B, prompt": "B=3,H=32,HKV=8,S=1300,D=128,causal=1",
    "Llama-3-8B, one query": "B=2,H=32,HKV=8,SQ=1,SKV=2048,D=128",
    "32 heads, one query": "B=2,H=32,SQ=1,SKV=2048,D=128",
    "BERT-large": "B=16,H=16,S=512,D=64",
    "Whisper-large's encoder": "B=8,H=20,S=1500,D=64",
}
"""Shapes of models' attention, in bf16 and in memory token by token."""
PRODUCTS: Mapping[str, str] = {
    "Llama-3-8B qkv, 2 rows": "M=2,N=6144,K=4096",
    "Llama-3-8B down, 12 rows": "M=12,N=4096,K=14336",
    "Qwen2.5-7B down, 96 rows": "M=96,N=3584,K=18944",
    "GPT-2 XL out, 700 rows": "M=700,N=1600,K=1600,epilogue=bias",
    "ViT-B up, 1576 rows": "M=1576,N=3072,K=768,epilogue=bias_gelu",
    "BERT-large up, 8192 rows": "M=8192,N=4096,K=1024,epilogue=bias_gelu",
}
"""Linear layers of models, in bf16."""
ROTATED_BYTES, MAX_COPIES = 128 << 20, 16
"""Bytes of all copies of weights, or of keys and values: over twice the L2. Most copies."""
OURS, PYTORCH = "tuner", "PyTorch"
MAX_ERROR = 8e-3
"""The gate's limit in bf16, here of the difference from PyTorch's output."""
JOURNAL = "benchmarked.jsonl"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every shape; 1 if an output differs from PyTorch's by more than `MAX_ERROR`."""
    parser = Parser(
        prog="scripts/bench learning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--op", choices=("attention", "gemm"), help="only calls of attention or of products"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    args = parser.parse_args(argv)
    check_place(args.json)
    if detect() is None:
        raise no_gpu()
    with tempfile.TemporaryDirectory() as folder:
        _set_out(Path(folder))
        rows = []
        if args.op != "gemm":
            rows += [measure(name, attention(shape)) for name, shape in CALLS.items()]
        if args.op != "attention":
            rows += [measure(name, product(shape)) for name, shape in PRODUCTS.items()]
        document = {"environment": environment(), "rows": rows}
    if args.json:
        write_json(args.json, document)
    print(report(rows))
    return int(any(row["error"] > MAX_ERROR for row in rows))


def _set_out(cache: Path) -> None:
    """Use a new cache folder with the user's artifacts and kernel lists, and time first calls."""
    for place in (settings.artifacts_dir(), settings.kernels_dir()):
        place.mkdir(parents=True, exist_ok=True)
        (cache / place.name).symlink_to(place.resolve())
    os.environ["TUNER_CACHE_DIR"] = str(cache)
    os.environ["TUNER_BENCHMARK"] = "1"


@dataclass(frozen=True)
class Call:
    """A problem's calls over some copies of its tensors."""

    problem: Problem
    copies: int
    ours: Callable[[int], Any]
    """Enqueues the tuner's call over copy i, and returns the output."""
    pytorchs: Callable[[int], Any]
    """The same of PyTorch."""
    before: Callable[[int], Any]
    """Enqueues the element-wise kernel that writes the call's first operand."""


def attention(shape: str) -> Call:
    """A shape's attention, over warm tensors; one query over rotated keys and values."""
    import torch

    import tuner

    problem = AttentionProblem.parse(f"{shape},dtype=bf16,layout=bshd")

    def random(one: Any) -> Any:
        made = torch.empty_strided(one.shape, one.strides, dtype=torch.bfloat16, device="cuda")
        return made.normal_()

    query, key, value = map(random, problem.inputs)
    caches = [(key, value)]
    if problem.seqlen_q == 1:
        copied = key.numel() + value.numel()
        copies = min(MAX_COPIES, math.ceil(ROTATED_BYTES / (2 * copied)) + 1)
        caches += [tuple(map(random, problem.inputs[1:])) for _ in range(copies - 1)]
    options = {
        "is_causal": problem.is_causal,
        "enable_gqa": problem.heads_q != problem.heads_kv,
    }
    usual, source = torch.nn.functional.scaled_dot_product_attention, query.clone()
    return Call(
        problem,
        len(caches),
        lambda i: tuner.attention(query, *caches[i], **options),
        lambda i: usual(query, *caches[i], **options),
        lambda _: torch.add(source, 0.0, out=query),
    )


def product(shape: str) -> Call:
    """A shape's linear layer, over rotated weights."""
    import torch

    import tuner

    problem = GemmProblem.parse(f"{shape},dtype=bf16")
    n, k = problem.n, problem.k
    copies = min(MAX_COPIES, math.ceil(ROTATED_BYTES / (2 * n * k)) + 1)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    source = torch.randn(problem.m, k, **options)
    rows = source.clone()
    weights = [torch.randn(n, k, **options) / math.sqrt(k) for _ in range(copies)]
    bias = torch.randn(n, **options) if problem.has_bias else None
    activation = problem.activation or None

    def pytorchs(i: int) -> Any:
        out = torch.nn.functional.linear(rows, weights[i], bias)
        return out if activation is None else torch.nn.functional.gelu(out)

    return Call(
        problem,
        copies,
        lambda i: tuner.linear(rows, weights[i], bias, activation=activation),
        pytorchs,
        lambda _: torch.add(source, 0.0, out=rows),
    )


def measure(name: str, call: Call) -> dict[str, Any]:
    """A shape's first calls, the choice, and the times after it."""
    import torch

    import tuner

    with torch.inference_mode():
        wanted = call.pytorchs(0).float()
        tuner.stats(reset=True)
        first_ms = _wall_ms(lambda: call.ours(0))
        second_ms = _wall_ms(lambda: call.ours(0))
        stats = tuner.stats(reset=True)
        error = float((call.ours(0).float() - wanted).norm() / wanted.norm())
        contenders = [Contender(OURS, call.ours), Contender(PYTORCH, call.pytorchs)]
        times = time_calls(contenders, call.before, call.copies)
    return {
        "name": name,
        "shape": call.problem.label(),
        "copies": call.copies,
        "first_ms": first_ms,
        "second_ms": second_ms,
        "hits": stats.hits,
        "fallbacks": dict(stats.fallbacks),
        "error": error,
        "us": times.us.get(OURS, math.nan),
        "pytorch_us": times.us.get(PYTORCH, math.nan),
        "choice": _choice(call.problem),
    }


def _choice(problem: Problem) -> dict[str, Any] | None:
    """The journal's line on a problem; None if nothing was timed."""
    journal = settings.cache_dir() / JOURNAL
    lines = journal.read_text().splitlines() if journal.exists() else []
    rows = [json.loads(line) for line in lines]
    kept = [row for row in rows if row["problem"] == problem.to_json()]
    return kept[-1] if kept else None


def _wall_ms(call: Callable[[], Any]) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def report(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each shape."""
    lines: list[tuple[str, ...]] = [
        ("call", "first ms", "second ms", "chosen", "us", "PyTorch us", "PyTorch / ours", "error")
    ]
    for row in rows:
        choice = row["choice"]
        chosen = "not timed" if choice is None else "PyTorch's"
        if choice is not None and choice["config"] is not None:
            chosen = str(choice["config"]["family"])
        times = f"{row['us']:.1f}", f"{row['pytorch_us']:.1f}"
        ratio, error = f"{row['pytorch_us'] / row['us']:.3f}", f"{row['error']:.1e}"
        calls = f"{row['first_ms']:.0f}", f"{row['second_ms']:.2f}"
        lines.append((row["name"], *calls, chosen, *times, ratio, error))
    return table(lines, frozenset({1, 2, 4, 5, 6, 7}))
