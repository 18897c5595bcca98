"""``tuner bench``: own kernels beside vendors' and peers' kernels, interleaved in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base.output import check_place, write
from tuner.base.processes import exit_code
from tuner.cli.aot import say, say_failures
from tuner.cli.arguments import add_store, within
from tuner.errors import ConfigError
from tuner.measurement import BEHIND, LAUNCHES, Regime, launch_named
from tuner.problem import PROBLEMS
from tuner.selection.reader import with_shipped
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.bench.comparison import RowTask
    from tuner.bench.results import Results
    from tuner.bench.suites import Suite

BOTH = "both"
SHAPES = "shapes"
"""`bench.results.Row.suite` for problems named by ``--shape``."""

DESCRIPTION = """Times the best own kernels of the cache for each problem beside the vendors' and
peers' kernels. All are checked against the reference and interleaved in one run, each peer in its
fastest layout. Missing kernels are compiled first. A kernel that hangs or crashes loses only its
own time. The store does not change."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench", help="time own kernels beside the vendors' and peers'", description=DESCRIPTION
    )
    _subject(parser)
    _contenders(parser)
    _timing(parser)
    parser.add_argument(
        "--list-problems",
        action="store_true",
        help="only print the problems, as YAML for `tuner sweep --problems`",
    )
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile what is missing, without a GPU for an H200's, and time nothing",
    )
    _output(parser)
    parser.add_argument("--device", type=within(0), default=0, help="CUDA device (default 0)")
    about = "nvcc processes (default: the cores)"
    parser.add_argument("--jobs", type=within(1), metavar="N", help=about)
    add_store(parser)
    parser.set_defaults(run=run)


def _subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", choices=sorted(PROBLEMS), help="operation")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--suite",
        metavar="NAME",
        help="for attention: acceptance, decoding, long; gemm: plain, mlp, fp8, few; swiglu: "
        "gated; grouped_gemm: moe; or all (default: the first)",
    )
    what.add_argument(
        "--preset",
        metavar="NAME",
        help="design-documents: their workloads, tiles and launches; sequence-lengths: one problem "
        "from 128 to 32768, for `tuner report --bench`; unfused: attention in two kernels",
    )
    what.add_argument(
        "--shape",
        action="append",
        metavar="KEY=VALUE,...",
        help="a problem, as S=1024,D=64; may be repeated",
    )


def _contenders(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        metavar="NAME,...",
        help="peers, as cudnn,flash2,flash3,flash4,efficient,naive,triton or cublas,addmm,inductor "
        "(default: all but naive, triton and inductor; in a suite its own)",
    )
    parser.add_argument(
        "--own", type=within(1), default=3, metavar="N", help="own kernels a decision (default 3)"
    )
    parser.add_argument(
        "--untuned",
        action=argparse.BooleanOptionalAction,
        help="also time the default, the kernel that the cost model picks: what one has without "
        "tuning (on with --shape)",
    )


def _timing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--l2",
        choices=("warm", "cold", BOTH),
        help="state of the inputs (default: the suite's; for --shape cold for gemm, swiglu "
        "and grouped_gemm, else warm)",
    )
    parser.add_argument(
        "--regime",
        type=launch_named,
        choices=(*LAUNCHES, BOTH),
        help="stream: behind an ordinary kernel, as in a model (default); chained: behind copies "
        f"of itself; eager: without a CUDA graph; {BOTH}: stream and chained",
    )
    parser.add_argument(
        "--behind",
        choices=tuple(BEHIND.values()),
        default="elementwise",
        help="the ordinary kernel of a stream (default elementwise)",
    )
    parser.add_argument(
        "--kernel-times",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="at the end, how long the fastest kernels of a stream run by the profiler",
    )
    parser.add_argument("--rounds", type=within(2), metavar="N", help="interleaved rounds at least")


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="file for all results, written after every row"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one line a kernel")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables")
    parser.add_argument(
        "--resume", action="store_true", help="take over the rows that --json FILE holds already"
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns 0 if every problem has a time of an own kernel, else 1."""
    from tuner.bench.comparison import ComparisonRun
    from tuner.cli import DONE, FAILED, bench_tables
    from tuner.runners.choose import Machine, Runners

    tasks = list(_tasks(args))
    if args.list_problems:
        for problem in dict.fromkeys(task.problem for task in tasks):
            print(f"- op={problem.op},{problem.label()}")
        return DONE
    earlier = _earlier(args)
    for path in (args.json, args.csv, args.markdown):
        check_place(path)
    with open_store(args.store) as store:
        entries = with_shipped(store.entries())
    latest: list[Results] = []

    def save(results: Results) -> None:
        latest[:] = [results]
        if args.json is not None:
            results.write(args.json)

    interrupted: KeyboardInterrupt | None = None
    try:
        with Runners(Machine((args.device,), args.jobs), say) as runners:
            comparison = ComparisonRun(
                tasks,
                runners,
                entries,
                own=args.own,
                with_kernel_times=args.kernel_times,
                with_untuned=bool(args.shape) if args.untuned is None else args.untuned,
                note=say,
            )
            if args.compile_only:
                failed = comparison.compile()
                say_failures(failed)
                say(f"compiled, but for {len(failed)} kernels" if failed else "compiled")
                return FAILED if failed else DONE
            save(comparison.run(save, earlier))
    except KeyboardInterrupt as exc:
        interrupted = exc
        if not latest:
            raise
    (results,) = latest
    if args.csv is not None:
        write(args.csv, bench_tables.csv_text(results))
    if args.markdown is not None:
        write(args.markdown, bench_tables.markdown(results, {SHAPES, args.preset}))
    print(bench_tables.text(results, details={SHAPES, args.preset}))
    if interrupted is not None:
        done = " (--resume goes on from there)" if args.json is not None else ""
        print(f"tuner: interrupted after {len(results.rows)} rows{done}", file=sys.stderr)
        return exit_code(interrupted)
    return DONE if all(row.own is not None for row in results.rows) else FAILED


def _tasks(args: argparse.Namespace) -> Iterator[RowTask]:
    """Rows that the options select.

    Raises:
        ConfigError: when an option is wrong.
    """
    from tuner.bench.comparison import RowTask
    from tuner.bench.contenders import peers_named

    if args.resume and args.json is None:
        raise ConfigError("--resume needs --json FILE, the file to go on with")
    named = tuple(filter(None, (args.against or "").split(",")))
    for suite in _suites(args):
        against = tuple(peers_named(args.op, named or suite.against))
        rounds = args.rounds or suite.rounds
        for problem in dict.fromkeys(suite.problems):
            for regime in _regimes(args, suite):
                yield RowTask(suite.name, problem, regime, rounds, against, suite.named)


def _suites(args: argparse.Namespace) -> list[Suite]:
    from tuner.bench.presets import preset
    from tuner.bench.suites import Suite, suites_named

    if args.shape:
        shapes = tuple(PROBLEMS[args.op].parse(text) for text in args.shape)
        return [Suite(SHAPES, "", shapes, (Regime.default(args.op),), against=())]
    if args.preset:
        return [preset(args.preset, args.op)]
    return suites_named(args.suite or "", args.op)


def _regimes(args: argparse.Namespace, suite: Suite) -> list[Regime]:
    """The suite's regimes, changed by ``--regime``, ``--l2`` and ``--behind``."""
    stream = next(launch for launch, kernel in BEHIND.items() if kernel == args.behind)
    launches = {None: (), BOTH: ("stream", "chained")}.get(args.regime, (args.regime,))
    states = {None: (), BOTH: ("warm", "cold")}.get(args.l2, (args.l2,))
    return list(
        dict.fromkeys(
            Regime(stream if launch == "stream" else launch, l2)
            for regime in suite.regimes
            for launch in launches or (regime.launch,)
            for l2 in states or (regime.l2,)
        )
    )


def _earlier(args: argparse.Namespace) -> Results | None:
    from tuner.bench.results import Results

    if not args.resume or not args.json.exists():
        return None
    return Results.read(args.json)
