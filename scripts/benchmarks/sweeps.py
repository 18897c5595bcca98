"""``scripts/bench sweeps``: seconds of default sweeps of a list of problems, and their excess.

Each problem of a list is swept by a process of its own, ``tuner sweep``, into an empty store. The
cache is this machine's. So portfolio kernels that are built answer first, and kernels that an
earlier sweep compiled are not compiled again.

With ``--beside`` the winner is then timed beside every built kernel of the problem's own families.
These are the portfolio's, those that sweeps compiled, and any that ``tuner sweep --compile`` made
before. All are timed once, then the fastest `FINALISTS` and the winner again, interleaved. The
excess is the winner's time over the shortest of these, less 1.

``--json OUT`` appends a line for each problem and goes on where it stopped. A problem that has no
pass beside other kernels gets only that. ``--time-limit`` ends the run between two problems.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import file_head, json_file, quick_pass, repeats
from benchmarks.gpu import no_gpu
from tuner.base import document
from tuner.base.output import check_place
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families_of
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.search import pool
from tuner.selection.describe import table
from tuner.selection.portfolio import serving, shipped
from tuner.tuning.job import JobOptions, read_problems

FORMAT = "cutlass-tuner sweeps 1"
FINALISTS, ROUNDS = 6, 20
VARIANTS = 4
"""Run-time variants of a compiled kernel that are timed, those of the shortest estimates."""

Row = Mapping[str, Any]
Opened = Callable[[], AbstractContextManager[Runner]]


def main(argv: Sequence[str]) -> int:
    """Sweep each problem, or report.

    Returns:
        1 where a sweep failed, else 0.

    Raises:
        ConfigError: when an argument or the file is wrong.
        BenchmarkError: without a GPU.
    """
    args = _parser().parse_args(argv)
    if args.report:
        print(report(_read(args.report)))
        return 0
    if args.problems is None:
        raise ConfigError("--problems FILE or --report FILE is needed")
    if args.json:
        check_place(args.json)
    rows = _rows(args)
    print(report(rows))
    return int(any("error" in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench sweeps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--problems", type=Path, metavar="FILE", help="as of tuner sweep")
    parser.add_argument("--beside", action="store_true", help="time built kernels beside")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--device", default="0", metavar="N", help="CUDA device (default 0)")
    parser.add_argument("--jobs", type=int, default=None, help="nvcc processes at a time")
    parser.add_argument(
        "--passes", type=int, default=1, help="passes beside, each anew (default 1)"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="JSON lines, gone on with")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print such a file's table")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no sweep after this",
    )
    return parser


def _rows(args: argparse.Namespace) -> list[Row]:
    """A row for each problem that was swept, those of the file among them."""
    began = time.monotonic()
    problems = read_problems(args.problems)
    given = [f"--device={args.device}", *([f"--jobs={args.jobs}"] if args.jobs else [])]
    machine = Machine(parse_devices(args.device), args.jobs, replay=False)
    with Runners(machine, _note) as runners:  # closed: its worker would wait beside the sweeps
        gpu = runners.gpu
    if gpu is None:
        raise no_gpu("--report")
    heading = {"format": FORMAT, "seed": args.seed, "jobs": args.jobs}
    known = _kept(args.json, heading | file_head.complete({"gpu": gpu.name}))

    @contextmanager
    def opened(problem: Problem) -> Iterator[Runner]:
        with Runners(machine, _note) as runners:
            yield runners.of(problem, JobOptions().regime(problem))

    for problem in problems:
        name = f"{problem.op} {problem.label()}"
        row = known.get(name)
        if row is None:
            if time.monotonic() - began > args.time_limit:
                break
            row = {"problem": name, **swept(problem, args.seed, given)}
            known[name] = _written(args.json, row)
            _note(f"{name}: {row.get('elapsed_s')} s, first {row.get('first_answer_s')} s")
        if args.beside and "error" not in row and "beside" not in row:
            if time.monotonic() - began > args.time_limit:
                break
            winner = Config.from_json(row["winner"])
            try:
                found = beside(problem, winner, partial(opened, problem), args.passes)
            except BenchmarkError as exc:  # the next run tries again
                _note(f"{name}: {exc}")
                continue
            known[name] = _written(args.json, {**row, "beside": found})
            _note(f"{name}: {found['excess']:.1%} over {found['kernels']} kernels")
    return list(known.values())


def swept(problem: Problem, seed: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Facts of one default sweep, and the host's load before and after; `error` where it failed."""
    load = os.getloadavg()[0]
    try:
        one = repeats.swept_anew(problem, seed, arguments, keeps_kernels=True)
    except BenchmarkError as exc:
        return {"error": str(exc)}
    return {
        "winner": one.winner.to_json(),
        "own_us": one.own_us,
        "kernels": one.kernels,
        "elapsed_s": round(one.elapsed_s, 1),
        **one.facts,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def beside(problem: Problem, winner: Config, opened: Opened, passes: int = 1) -> dict[str, Any]:
    """Times of a sweep's winner and of the fastest built kernels, microseconds.

    Args:
        problem: problem of the sweep.
        winner: its best own kernel.
        opened: context of a runner with a worker process of its own.
        passes: passes over the fastest, each by a new process.

    Raises:
        BenchmarkError: when the winner has no time.
    """
    times: dict[Config, list[float]] = {}
    with opened() as runner:
        groups = built(problem, runner)
        candidates = dict.fromkeys([winner, *(one for group in groups for one in group)])
        fit = quick_pass.passed(problem, candidates, runner)
        finalists = list(dict.fromkeys([winner, *(m.config for m in fit[:FINALISTS])]))
        _time(problem, finalists, runner, times)
    for _ in range(passes - 1):
        with opened() as runner:
            _time(problem, finalists, runner, times)
    us = {c: statistics.median(found) for c, found in times.items() if len(found) == passes}
    if winner not in us:
        raise BenchmarkError(f"{problem.label()}: the winner {winner.digest[:6]} has no time")
    best = min(us, key=us.__getitem__)
    return {
        "kernels": len(groups),
        "candidates": len(candidates),
        "passed": len(fit),
        "winner_us": us[winner],
        "best": best.to_json(),
        "us": {f"{one.family} {one.digest[:6]}": time_us for one, time_us in us.items()},
        "passes_us": {f"{one.family} {one.digest[:6]}": times[one] for one in us},
        "excess": round(us[winner] / us[best] - 1, 4),
    }


def _time(
    problem: Problem, configs: Sequence[Config], runner: Runner, times: dict[Config, list[float]]
) -> None:
    for m in runner.retime(problem, configs, ROUNDS):
        if m.ok and m.latency_us:
            times.setdefault(m.config, []).append(m.latency_us)


def built(problem: Problem, runner: Runner) -> list[list[Config]]:
    """Built kernels of the own families that take a problem, each with its run-time variants."""
    gpu = runner.gpu
    portfolios = [one for one in serving(shipped(), gpu) if one.op == problem.op]
    known = [
        config
        for portfolio in portfolios
        for group in pool.of_portfolio(problem, gpu, portfolio, is_whole=True)
        for config in group
    ]
    groups: dict[str, dict[Config, None]] = {}
    for family in families_of(problem.op).values():
        if family.is_vendor or family.is_fallback or family.supports(problem, gpu):
            continue
        mine = [one for one in known if one.family == family.name]
        space = dict.fromkeys([*mine, *family.space(problem, gpu)])
        for config in runner.compiled(problem, family, list(space)):
            groups.setdefault(family.compile_digest(config), {})[config] = None
    return [_variants(problem, list(group), gpu) for group in groups.values()]


def _variants(problem: Problem, group: Sequence[Config], gpu: Gpu) -> list[Config]:
    family: Family = families_of(problem.op)[group[0].family]
    return sorted(group, key=lambda one: family.predict_us(problem, one, gpu))[:VARIANTS]


def _kept(path: Path | None, heading: Mapping[str, Any]) -> dict[str, Row]:
    """Rows of a file by problem; a new file gets the heading. A last line that was cut off is
    removed.

    Raises:
        ConfigError: when it is of another seed, number of compilers or GPU.
    """
    if path is None:
        return {}
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1] or json.dumps(heading) + "\n"
    if whole != text:
        path.write_text(whole)
    if not file_head.is_same(document.parse(whole.splitlines()[0]), heading):
        raise ConfigError(f"{path} is of other sweeps (wanted: {dict(heading)})")
    return {row["problem"]: row for row in _read(path)}


def _read(path: Path) -> list[Row]:
    """Rows of a file, the last one of each problem; a last line that is cut off is left out.

    Raises:
        ConfigError: when it cannot be read, or is not such a file.
    """
    whole, _, _ = json_file.text(path).rpartition("\n")
    try:
        rows = [document.parse(line) for line in whole.splitlines()[1:]]
        return list({row["problem"]: row for row in rows}.values())
    except (ValueError, TypeError, KeyError) as exc:
        raise ConfigError(f"{path} is not a file of scripts/bench sweeps: {exc}") from exc


def _written(path: Path | None, row: Row) -> Row:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return row


def report(rows: Sequence[Row]) -> str:
    """Means by operation, then a line for each problem."""
    timed = "sweeps", "mean s", "longest", "first own s", "CPU-s a kernel"
    lines = [("operation", *timed, "mean excess", "worst", "within 2 %")]
    for kind in ("attention", "products", "all"):
        found = [r for r in rows if "error" not in r and kind in (_kind(r), "all")]
        if not found:
            continue
        seconds = [row["elapsed_s"] for row in found]
        firsts = [row["first_own_s"] for row in found if row["first_own_s"] is not None]
        excess = [row["beside"]["excess"] for row in found if "beside" in row]
        compiled = sum(row.get("compiled", 0) for row in found)
        cpu_s = sum(row.get("compile_cpu_s", 0.0) for row in found)
        lines.append(
            (
                kind,
                str(len(found)),
                f"{statistics.fmean(seconds):.1f}",
                f"{max(seconds):.1f}",
                f"{statistics.fmean(firsts):.1f}" if firsts else "",
                f"{cpu_s / compiled:.1f}" if compiled else "",
                f"{statistics.fmean(excess):.1%}" if excess else "",
                f"{max(excess):.1%}" if excess else "",
                f"{sum(one <= 0.02 for one in excess)} of {len(excess)}" if excess else "",
            )
        )
    return "\n".join([table(lines, frozenset(range(1, 9))), "", *map(_line, rows)])


def _kind(row: Row) -> str:
    return "attention" if row["problem"].startswith("attention") else "products"


def _line(row: Row) -> str:
    if "error" in row:
        return f"{row['problem']}: {row['error']}"
    passed = row.get("beside")
    excess = f"; {passed['excess']:.1%} over {passed['kernels']} kernels" if passed else ""
    compiled = ""
    if "compiled" in row:  # not in rows of a job, whose problems share a process
        compiled = f", {row['compiled']} compiled in {row['compile_cpu_s']} CPU-s"
    return (
        f"{row['problem']}: {row['elapsed_s']} s, first own {row['first_own_s']} s, "
        f"{row['kernels']} sets{compiled}, {row['own_us']:.2f} us{excess}"
    )


def _note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
