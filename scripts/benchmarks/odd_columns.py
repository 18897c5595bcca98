"""``scripts/bench odd_columns``: products over vocabularies whose size is not a multiple of 8.

`tuner.linear` beside PyTorch's, at the vocabularies of `VOCABULARIES` and the numbers of `ROWS`, in
bf16, each behind an element-wise kernel that writes the rows. The weights are larger than the L2.
``parts`` is PyTorch's product of the aligned columns, that of the last few, and both side by side.
Outputs are compared with fp32 products of the same elements.
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
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every figure there")
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="SECONDS", help="end after so long"
    )
    args = parser.parse_args(argv)
    need_gpu()
    if args.json:
        check_place(args.json)
    started, rows = time.monotonic(), list[dict[str, Any]]()
    for m in ROWS:
        for model, (n, k) in VOCABULARIES.items():
            if time.monotonic() - started > args.time_limit:
                break
            rows.append({"model": model, **measured(m, n, k)})
            if args.json:
                write_json(args.json, file_head.complete({"rows": rows}))
    print(report(rows))
    return int(any(row["failed"] or not is_right(row) for row in rows))


def measured(m: int, n: int, k: int) -> dict[str, Any]:
    """Microseconds and errors of every way to multiply (m, k) by (n, k)."""
    import torch
    from torch.nn import functional

    import tuner

    torch.manual_seed(0)
    source = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    rows = source.clone()

    def parts(_: int) -> Any:
        aligned = n // 8 * 8
        both = functional.linear(rows, weight[:aligned]), functional.linear(rows, weight[aligned:])
        return torch.cat(both, -1)

    ways = (
        Contender("tuner", lambda _: tuner.linear(rows, weight)),
        Contender("parts", parts),
        Contender("pytorch", lambda _: functional.linear(rows, weight)),
        Contender("pytorch again", lambda _: functional.linear(rows, weight)),
    )
    with torch.inference_mode():
        wanted = rows.float() @ weight.float().t()
        errors = {
            way.name: float((way.call(0).float() - wanted).norm() / wanted.norm()) for way in ways
        }
        tuner.stats(reset=True)
        tuner.linear(rows, weight)
        served = tuner.stats(reset=True).hits
        times = time_calls(ways, lambda _: torch.add(source, 0.0, out=rows), 1)
    return {
        **{"m": m, "n": n, "k": k, "own": bool(served)},
        **{"us": times.us, "failed": times.failed, "errors": errors},
    }


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
        times = (f"{us[way]:.1f}" for way in ("tuner", "parts", "pytorch"))
        lines.append((name, by, *times, f"{ratio:.3f}", f"{again:.3f}"))
    said = table(lines, frozenset({2, 3, 4, 5, 6}))
    if not ratios:
        return said
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{said}\n\nmean {mean:.3f}, worst {min(ratios):.3f}"


if __name__ == "__main__":
    sys.exit(main())
