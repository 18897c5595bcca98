"""``scripts/bench odd_columns``: products over vocabularies whose size is not a multiple of 8.

`tuner.linear` beside PyTorch's, at the vocabularies of `VOCABULARIES` and the numbers of `ROWS`, in
bf16, each behind an element-wise kernel that writes the rows. The weights are larger than the L2.
``parts`` is PyTorch's product of the aligned columns, that of the last few, and both side by side.
Outputs are compared with fp32 products of the same elements.

``--heads`` takes the heads of masked language models, with their bias or without. Three of their
sizes are even. ``--gradients`` times the output and all gradients of a training step together.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.call_times import Contender, time_calls
from benchmarks.gpu import need_gpu
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.selection.describe import table

VOCABULARIES = {
    "gpt2-xl": (50257, 1600),
    "whisper-medium": (51865, 1024),
    "whisper-large-v3": (51866, 1280),
    "bart-large": (50265, 1024),
}
"""Columns and depth, of models that make selections."""
HEADS = {
    "bert-base": (30522, 768),
    "roberta-base": (50265, 768),
    "deberta-v3-base": (128100, 768),
    "xlm-roberta-large": (250002, 1024),
}
"""The same of heads of masked language models, whose layer has a bias."""
GRADIENT_ROWS = (1024, 4096, 8192)
MAX_OUTPUTS = 6e8
"""Most elements of an output."""
ROWS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_ERROR = 4e-3
"""Largest relative error of an output in bf16."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and time; 1 when an output is wrong or a time is missing.

    Raises:
        BenchmarkError: without a GPU.
    """
    parser = Parser(
        prog="scripts/bench odd_columns",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--heads", choices=("bias", "plain"), help="heads of masked language models in their place"
    )
    parser.add_argument("--gradients", action="store_true", help="with all gradients")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="SECONDS", help="end after so long"
    )
    args = parser.parse_args(argv)
    need_gpu()
    if args.json:
        check_place(args.json)
    started, rows = time.monotonic(), list[dict[str, Any]]()
    for m in GRADIENT_ROWS if args.gradients else ROWS:
        for model, (n, k) in (HEADS if args.heads else VOCABULARIES).items():
            if time.monotonic() - started > args.time_limit:
                break
            if m * n > MAX_OUTPUTS:
                continue
            of = with_gradients if args.gradients else measured
            rows.append({"model": model, **of(m, n, k, args.heads == "bias")})
            if args.json:
                write_json(args.json, file_head.complete({"rows": rows}))
    print(report(rows))
    return int(any(row["failed"] or not is_right(row) for row in rows))


def measured(m: int, n: int, k: int, has_bias: bool) -> dict[str, Any]:
    """Microseconds and errors of every way to multiply (m, k) by (n, k), and to add (n,)."""
    import torch
    from torch.nn import functional

    import tuner

    source, weight, bias, _ = _tensors(m, n, k, has_bias)
    rows, at = source.clone(), n // 8 * 8
    halves = [
        (weight[one], None if bias is None else bias[one]) for one in (slice(at), slice(at, n))
    ]
    ways = (
        Contender("tuner", lambda _: tuner.linear(rows, weight, bias)),
        Contender("parts", lambda _: torch.cat([functional.linear(rows, *h) for h in halves], -1)),
        Contender("pytorch", lambda _: functional.linear(rows, weight, bias)),
        Contender("pytorch again", lambda _: functional.linear(rows, weight, bias)),
    )
    with torch.inference_mode():
        wanted = functional.linear(
            *(None if one is None else one.float() for one in (rows, weight, bias))
        )
        errors = {way.name: _error(way.call(0), wanted) for way in ways}
        del wanted
        tuner.stats(reset=True)
        tuner.linear(rows, weight, bias)
        served = tuner.stats(reset=True).hits
        times = time_calls(ways, lambda _: torch.add(source, 0.0, out=rows), 1)
    return {
        **{"m": m, "n": n, "k": k, "own": bool(served)},
        **{"us": times.us, "failed": times.failed, "errors": errors},
    }


def with_gradients(m: int, n: int, k: int, has_bias: bool) -> dict[str, Any]:
    """`measured` for the output and all gradients; the error is the largest of theirs."""
    import torch
    from torch.nn import functional

    import tuner

    source, *leaves, grad = _tensors(m, n, k, has_bias)
    rows = source.clone()
    given = [one.requires_grad_() for one in (rows, *leaves) if one is not None]

    def step(linear: Any, tensors: Sequence[Any], grad: Any) -> tuple[Any, ...]:
        out = linear(*tensors)
        return (out, *torch.autograd.grad(out, tensors, grad))

    ways = (
        Contender("tuner", lambda _: step(tuner.linear, given, grad)),
        Contender("pytorch", lambda _: step(functional.linear, given, grad)),
        Contender("pytorch again", lambda _: step(functional.linear, given, grad)),
    )
    exact = [one.detach().float().requires_grad_() for one in given]
    wanted = step(functional.linear, exact, grad.float())
    errors = {way.name: max(map(_error, way.call(0), wanted)) for way in ways}
    del wanted, exact
    times = time_calls(ways, lambda _: torch.add(source, 0.0, out=rows.data), 1)
    return {
        **{"m": m, "n": n, "k": k, "own": False},
        **{"us": times.us, "failed": times.failed, "errors": errors},
    }


def _tensors(m: int, n: int, k: int, has_bias: bool) -> tuple[Any, ...]:
    """Random rows (m, k), weights (n, k), a bias (n,) or None, and a gradient (m, n), in bf16."""
    import torch

    torch.manual_seed(0)
    sizes = (m, k), (n, k), (n,), (m, n)
    rows, weight, bias, grad = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes
    )
    return rows, weight / k**0.5, bias if has_bias else None, grad


def _error(found: Any, wanted: Any) -> float:
    """Relative Frobenius error."""
    found, wanted = found.detach(), wanted.detach()
    return float((found.float() - wanted).norm() / wanted.norm())


def is_right(row: dict[str, Any]) -> bool:
    """True if every output is near the fp32 product."""
    return all(error < MAX_ERROR for error in row["errors"].values())


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each product, and the geometric mean of PyTorch's time over the tuner's."""
    lines: list[tuple[str, ...]] = [
        ("product", "by", "tuner", "parts", "pytorch", "pytorch / tuner", "again")
    ]
    ratios = []
    for row in rows:
        us, name = row["us"], f"{row['model']} M={row['m']},N={row['n']},K={row['k']}"
        by = "own" if row["own"] else "PyTorch's"
        if row["failed"] or not is_right(row):
            lines.append((name, by, "failed", str(row["failed"] or row["errors"]), "", "", ""))
            continue
        ratio, again = us["pytorch"] / us["tuner"], us["pytorch again"] / us["pytorch"]
        ratios.append(ratio)
        times = (f"{us[way]:.1f}" if way in us else "" for way in ("tuner", "parts", "pytorch"))
        lines.append((name, by, *times, f"{ratio:.3f}", f"{again:.3f}"))
    said = table(lines, frozenset({2, 3, 4, 5, 6}))
    if not ratios:
        return said
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{said}\n\nmean {mean:.3f}, worst {min(ratios):.3f}"


if __name__ == "__main__":
    sys.exit(main())
