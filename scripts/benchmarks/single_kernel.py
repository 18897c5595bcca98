"""A bench of one kernel that is not a family's: its options, its rows, and the file of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import file_head
from benchmarks.gpu import need_gpu
from tuner.base.output import check_place
from tuner.bench.results import write_json
from tuner.cli import Parser
from tuner.compile.artifacts import ArtifactCache
from tuner.compile.single import Source
from tuner.measure.device import environment

Row = dict[str, Any]


def run(
    argv: Sequence[str],
    name: str,
    text: str | None,
    kernel: Source,
    timed: Iterable[Row],
    line: Callable[[Row], str],
) -> list[Row]:
    """Time every row and print it; empty with ``--compile-only``.

    Args:
        argv: options of the bench.
        name: name of the bench.
        text: description for ``--help``.
        kernel: kernel that ``--compile-only`` builds.
        timed: rows, each measured when it is asked for.
        line: printed line of a row.

    Raises:
        BenchmarkError: when torch sees no GPU, or the kernel is not built.
        CompileError: when ``--compile-only`` finds no compiler.
    """
    parser = Parser(
        prog=f"scripts/bench {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compile-only", action="store_true", help="compile, time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.compile_only:
        kernel.build(ArtifactCache())
        return []
    check_place(args.json)
    need_gpu("--compile-only")
    import torch

    rows = []
    for row in timed:
        rows.append(row)
        print(line(row), flush=True)
    if args.json is not None:
        facts = {"gpu": torch.cuda.get_device_name(), **environment(0).facts}
        about = file_head.complete({**facts, "torch": torch.__version__})
        write_json(args.json, {**about, "rows": rows})
    return rows
