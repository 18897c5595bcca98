"""The harness of the benches: presets of cases, each case measured in a child process.

A bench is a module with ``BENCH = Bench(...)``. Its cases are cheap facts, listed without a GPU;
each is measured to a row within a time limit. `benchmarks.rows` says how rows are kept and printed,
`benchmarks.call_times` how calls are timed. Benches call `time_calls` and `time_host` as attributes
of this module, where tests put a device that is not there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.call_times import (
    FAILURES,
    Contender,
    HostTimes,
    Times,
    distance,
    every_copy,
    first_line,
    first_outputs,
    time_calls,
    time_host,
)
from benchmarks.child import Worker, answer_indices
from benchmarks.gpu import no_gpu
from benchmarks.rows import Row, RowFile, heading, is_wrong, ratio_line, ratio_table, read
from tuner import settings
from tuner.base import resources
from tuner.base.output import check_place
from tuner.base.processes import python_command
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.measure import device

__all__ = [
    "FAILURES",
    "Bench",
    "Case",
    "Contender",
    "HostTimes",
    "Preset",
    "Row",
    "Times",
    "add_answers",
    "commit",
    "distance",
    "every_copy",
    "first_line",
    "first_outputs",
    "main",
    "ratio_line",
    "ratio_table",
    "read",
    "time_calls",
    "time_host",
]
HARNESS_OPTIONS = (
    *("preset", "list", "only", "without", "limit", "shard", "smoke", "json", "table"),
    *("time_limit", "gpus"),
    *("compile_only", "worker"),
)
"""Options that say nothing of a row; the others are a part of a file's heading."""
TABLE_FACTS = "preset", "gpu", "driver", "cuda", "torch"
"""Facts of a heading that a table repeats, the preset first."""


class Case(Protocol):
    """Facts of one call, measured to one row."""

    @property
    def label(self) -> str:
        """Its name, unlike any other of its preset."""

    @property
    def group(self) -> str:
        """Group of the table that its row belongs to."""


def labels(cases: Sequence[Any], _: Namespace) -> Iterable[str]:
    """The listing of a preset that has no other: a label a line."""
    return [case.label for case in cases]


@dataclass(frozen=True)
class Preset:
    """One measurement of a bench.

    Args:
        text: one line of ``--help``.
        cases: makes the cases, the same of the same options.
        measure: makes the row of a case, in a child process; ``case`` and ``group`` are added.
        line: text of a row.
        table: lines of a table of rows, in Markdown.
        limit_s: seconds that a case may take.
        smoke: a case that takes seconds only, for ``--smoke`` and for the tests; None: the first.
        listing: lines that ``--list`` prints of the cases.
        compile: builds the preset's own kernels for ``--compile-only``; None: there are none.
        needs_gpu: False of a preset that measures without one.
        is_fresh: a process of its own for every case.
    """

    text: str
    cases: Callable[[Namespace], Sequence[Any]]
    measure: Callable[[Any, Namespace], Row]
    line: Callable[[Row], str] = ratio_line
    table: Callable[[Sequence[Row]], list[str]] = ratio_table
    limit_s: float = 300.0
    smoke: Any = None
    listing: Callable[[Sequence[Any], Namespace], Iterable[str]] = labels
    compile: Callable[[Namespace], object] | None = None
    needs_gpu: bool = True
    is_fresh: bool = False


@dataclass(frozen=True)
class Bench:
    """A bench: its presets, the first of which is the default, and its own options."""

    name: str
    text: str
    presets: Mapping[str, Preset]
    options: Callable[[Parser], object] = lambda parser: None


def main(bench: Bench, argv: Sequence[str]) -> int:
    """List or measure; 1 when a case has no time of the tuner or a wrong output.

    Raises:
        BenchmarkError: without a GPU, where the preset needs one.
        ConfigError: on wrong options or a file of another run.
    """
    args = parser_of(bench).parse_args(argv)
    if args.table:
        print("\n".join(tables(bench, args.table)))
        return 0
    preset = bench.presets[args.preset]
    if args.compile_only:
        if preset.compile is None:
            raise ConfigError(f"{bench.name} --preset {args.preset} has no kernels of its own")
        preset.compile(args)
        return 0
    args.seed = commit() if args.seed == "commit" else args.seed
    cases = cases_of(preset, args)
    if args.worker:
        if (words := getattr(args, "answers", None)) is not None:
            os.environ["TUNER_ANSWERS"] = words
        needs_gpu = preset.needs_gpu
        return answer_indices(lambda index: preset.measure(cases[index], args), needs_gpu)
    if args.list:
        print("\n".join(preset.listing(cases, args)))
        return 0
    if preset.needs_gpu and device.detect() is None:
        raise no_gpu("--list")
    if args.json:
        check_place(args.json)
    options = {name: value for name, value in vars(args).items() if name not in HARNESS_OPTIONS}
    command = ["scripts/bench", bench.name, *argv]
    file = RowFile(args.json, heading(bench.name, args.preset, options, command))
    _measure(preset, cases, file, args, ["-m", "benchmarks", bench.name, *argv, "--worker"])
    rows = [file.by_case[case.label] for case in cases if case.label in file.by_case]
    print("\n".join([f"{len(rows)} of {len(cases)} cases", "", *preset.table(rows)]))
    return int(any(map(is_wrong, rows)))


def parser_of(bench: Bench) -> Parser:
    """Options of the harness and of the bench."""
    width = max(map(len, bench.presets))
    presets = "\n".join(f"  {name:{width}} {one.text}" for name, one in bench.presets.items())
    parser = Parser(
        prog=f"scripts/bench {bench.name}",
        description=f"{bench.text}\n\npresets:\n{presets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    first = next(iter(bench.presets))
    add("--preset", choices=tuple(bench.presets), default=first, help=f"default {first}")
    add("--list", action="store_true", help="print the cases; no GPU")
    add("--only", metavar="TEXT", help="only cases whose label contains this")
    add("--without", metavar="TEXT", help="only cases whose label does not contain this")
    add("--limit", type=int, metavar="N", help="only the first N cases")
    add("--shard", type=_shard, metavar="I/N", help="every N-th case, from case I on (from 0)")
    add("--smoke", action="store_true", help="one case of a few seconds")
    add("--seed", default="0", help="any text; commit: the hash of HEAD")
    add("--json", type=Path, metavar="FILE", help="append rows there; a later run goes on with it")
    add("--table", type=Path, nargs="+", metavar="FILE", help="print such files' tables; no GPU")
    add("--time-limit", type=float, metavar="SECONDS", help="begin no case after this")
    add("--gpus", metavar="N,N", help="indices of GPUs that measure side by side")
    if any(preset.compile for preset in bench.presets.values()):
        add("--compile-only", action="store_true", help="build the preset's kernels; no GPU")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(compile_only=False)
    bench.options(parser)
    return parser


def add_answers(parser: Parser) -> None:
    """The option that lets peers answer the tuner's calls. Without it they are rivals only: no
    figure is won by a kernel that it is compared with.
    """
    parser.add_argument(
        "--answers",
        default=",".join(settings.ALWAYS_ANSWER),
        metavar="WORD,...",
        help=f"TUNER_ANSWERS of the calls: own,pytorch (default), {','.join(settings.ANSWERS[2:])}",
    )


def cases_of(preset: Preset, args: Namespace) -> list[Any]:
    """Cases of a preset that the options name."""
    if args.smoke:
        return [preset.smoke or preset.cases(args)[0]]
    cases = [case for case in preset.cases(args) if (args.only or "") in case.label]
    if args.without:
        cases = [case for case in cases if args.without not in case.label]
    first, step = args.shard or (0, 1)
    return cases[: args.limit][first::step]


def _shard(text: str) -> tuple[int, int]:
    """Index and number of parts of ``--shard``."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with I below N (as 0/2)")
    return int(index), int(count)


def _measure(
    preset: Preset, cases: Sequence[Any], file: RowFile, args: Namespace, command: Sequence[str]
) -> None:
    """Append a row for every case that the file lacks, one lane a GPU."""
    todo = deque(i for i, case in enumerate(cases) if case.label not in file.by_case)
    lock, is_stopped = threading.Lock(), threading.Event()
    end = time.monotonic() + args.time_limit if args.time_limit is not None else float("inf")

    def lane(worker: Worker) -> None:
        while not is_stopped.is_set() and time.monotonic() < end:
            try:
                index = todo.popleft()
            except IndexError:
                return
            answer = worker.ask(index)
            if is_stopped.is_set():  # the worker was ended from outside
                return
            if preset.is_fresh:
                worker.end()
            row = {"case": cases[index].label, "group": cases[index].group, **answer}
            with lock:
                file.append(row)
                line = f"{row['case']}: {row['lost']}" if "lost" in row else preset.line(row)
                print(f"{index + 1}/{len(cases)} {line}", flush=True)

    gpus = args.gpus.split(",") if args.gpus else [None]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(python_command(*command), preset.limit_s, gpu))
            for gpu in gpus
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(workers)))
        for worker in workers:
            stack.callback(worker.end)
        stack.callback(is_stopped.set)
        list(pool.map(lane, workers))


def tables(bench: Bench, paths: Sequence[Path]) -> list[str]:
    """Tables of result files; rows of one preset on one GPU are put together.

    Raises:
        ConfigError: when a file is another bench's.
        StoreError: when it cannot be read.
    """
    parts: dict[tuple[str, ...], list[Row]] = {}
    for path in paths:
        head, rows = read(path)
        if head.get("bench") != bench.name or head.get("preset") not in bench.presets:
            raise ConfigError(f"{path} is not a file of scripts/bench {bench.name}")
        facts = [head[name] for name in TABLE_FACTS if name in head]
        parts.setdefault(tuple(map(str, facts)), []).extend(rows)
    lines: list[str] = []
    for names, rows in parts.items():
        lines += [", ".join(names), "", *bench.presets[names[0]].table(rows), ""]
    return lines[:-1]


def commit() -> str:
    """Hash of the checkout's HEAD.

    Raises:
        ConfigError: when the package does not run from a checkout of git.
    """
    root = resources.checkout()
    if root is not None:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    raise ConfigError("--seed commit needs a checkout of git (allowed elsewhere: any other text)")
