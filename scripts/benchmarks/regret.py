"""``scripts/bench regret``: the selection's choices beside all built kernels of their problems.

Problems are those of drawn calls (`tuner.problem.population`), in the order of the draw, attention
and products by turns. A problem is swept over PyTorch's kernels, and over every kernel of the
portfolio that takes it and is built here. Own kernels are swept with their run-time variants, and
whatever domain they were chosen for. Nothing is compiled.

The fastest `FINALISTS`, the choice and PyTorch's own choice are then timed again, interleaved. The
regret is the choice's time over the shortest of these, less 1.

``--json OUT`` appends a line for each problem and goes on where it stopped. ``--time-limit`` ends
the run between two problems; the table says how many of the draw were swept.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks import file_head, quick_pass
from benchmarks.gpu import no_gpu
from benchmarks.population import commit
from tuner.base import document
from tuner.base.output import check_place
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families
from tuner.hardware import Gpu
from tuner.problem import Problem
from tuner.problem.population import draw, subset
from tuner.runners.base import Runner
from tuner.runners.choose import Machine, Runners
from tuner.runners.gpus import parse_devices
from tuner.search import pool, sampled_problems
from tuner.selection.choice import Selection
from tuner.selection.describe import table
from tuner.selection.domains import DOMAINS
from tuner.selection.kernels import lists
from tuner.selection.portfolio import Portfolio, serving, shipped
from tuner.selection.reader import find_gpu
from tuner.store.entry import is_vendor

FORMAT = "cutlass-tuner regret 1"
CALLS = 400
"""Calls of the draw that the problems are the first of."""
FINALISTS, ROUNDS = 4, 10
WORST = 8

Row = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, then list or sweep; 1 where a problem has no time."""
    args = _parser().parse_args(argv)
    if args.report:
        print(report(_read(args.report), args.count))
        return 0
    seed = commit() if args.seed == "commit" else args.seed
    if args.list:
        gpu = find_gpu(args.gpu)
        for problem, selection in drawn(seed, args.count, args.models, gpu, args.op):
            groups = _groups(problem, selection, gpu)
            count = sum(map(len, groups))
            print(f"{problem.op} {problem.label()}: {len(groups)} kernels, {count} candidates")
        return 0
    if args.json:
        check_place(args.json)
    rows = _swept(args, seed)
    print(report(rows, args.count))
    return int(any(not row["us"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="scripts/bench regret",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", default="0", help="any text; commit: the hash of HEAD")
    parser.add_argument("--count", type=int, default=40, help="problems to sweep (default 40)")
    parser.add_argument("--models", default="held-out", help="as of scripts/bench population")
    parser.add_argument("--op", help="only problems of these operations, as gemm,swiglu")
    parser.add_argument("--list", action="store_true", help="print the problems; no GPU")
    parser.add_argument("--gpu", default="H100", help="with --list: GPU that is asked about")
    parser.add_argument("--json", type=Path, metavar="OUT", help="JSON lines, gone on with")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print such a file's tables")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="begin no problem after this",
    )
    return parser


def drawn(
    seed: str, count: int, models: str, gpu: Gpu, only: str | None = None
) -> list[tuple[Problem, Selection]]:
    """The first distinct problems of a draw that a portfolio answers, attention and products by
    turns.

    Raises:
        ConfigError: when `count` is out of range, or an operation has no portfolio.
    """
    from benchmarks.population_tensors import posed

    if count < 1:
        raise ConfigError(f"count={count} is out of range (allowed: 1 or more)")
    wanted = set(only.split(",")) if only else set(DOMAINS)
    if unknown := wanted - set(DOMAINS):
        raise ConfigError(f"--op {unknown.pop()} has no portfolio (allowed: {', '.join(DOMAINS)})")
    portfolios = {one.op: one for one in serving(shipped(), gpu)}
    kinds: dict[bool, dict[Problem, Selection]] = {True: {}, False: {}}
    for call in draw(seed, CALLS, subset(models)):
        try:
            problem = posed(call)
        except ConfigError:
            continue
        selection = _selected(problem, portfolios.get(problem.op))
        if problem.op in wanted and selection is not None:
            kinds[bool(call.views)][problem] = selection
    turns = zip_longest(*(found.items() for found in kinds.values()))
    return [one for turn in turns for one in turn if one is not None][:count]


def _selected(problem: Problem, portfolio: Portfolio | None) -> Selection | None:
    return None if portfolio is None else portfolio.select(problem)


def choice_of(selection: Selection, gpu: Gpu) -> Config:
    """The config that the runtime launches: the first own one that is proven here, else PyTorch's.

    Raises:
        BenchmarkError: when no own kernel is proven, and PyTorch has none.
    """
    for _, config in selection.own():
        specs = families()[config.family].kernels(selection.problem, config)
        if not isinstance(lists.proven(specs, gpu.compute_capability), str):
            return config
    legal, _ = selection.times.legal_vendors(selection.problem, selection.facts)
    if selection.vendor not in legal:
        raise BenchmarkError(f"no kernel of {selection.domain.label()} is proven here")
    return legal[selection.vendor][1]


def _groups(problem: Problem, selection: Selection, gpu: Gpu) -> list[list[Config]]:
    """Every kernel that may take a problem, with its variants, and what the selection ranks."""
    (portfolio,) = (one for one in serving(shipped(), gpu) if one.op == problem.op)
    groups = pool.of_portfolio(problem, gpu, portfolio, is_whole=True)
    known = {config for group in groups for config in group}
    return [*groups, *([one] for _, one in selection.ranked() if one not in known)]


def _swept(args: argparse.Namespace, seed: str) -> list[Row]:
    """A row for each problem, those of the file as they are.

    Raises:
        BenchmarkError: without a GPU.
    """
    started = time.monotonic()
    machine = Machine(parse_devices("0"), None, replay=False)
    with Runners(machine, lambda text: print(text, file=sys.stderr)) as runners:
        if (gpu := runners.gpu) is None:
            raise no_gpu("--list")
        heading = {
            "format": FORMAT,
            "seed": seed,
            "models": args.models,
            **file_head.complete({"gpu": gpu.name}),
        }
        known = {row["problem"]: row for row in _kept(args.json, heading)}
        rows: list[Row] = []
        for problem, selection in drawn(seed, args.count, args.models, gpu, args.op):
            name = f"{problem.op} {problem.label()}"
            if name not in known:
                if time.monotonic() - started > args.time_limit:
                    break
                runner = runners.of(problem, sampled_problems.regime(problem))
                known[name] = {"problem": name, **_measured(problem, selection, runner)}
                if args.json:
                    with args.json.open("a") as file:
                        file.write(json.dumps(known[name]) + "\n")
            rows.append(known[name])
            print(f"{len(rows)}/{args.count} {_line(known[name])}", file=sys.stderr, flush=True)
    return rows


def _kept(path: Path | None, heading: Mapping[str, Any]) -> list[Row]:
    """Rows of a file; a new one gets the heading.

    Raises:
        ConfigError: when it is of another draw or GPU.
    """
    if path is None:
        return []
    if not path.exists():
        path.write_text(json.dumps(heading) + "\n")
    lines = path.read_text().splitlines()
    if not file_head.is_same(document.parse(lines[0]), heading):
        raise ConfigError(f"{path} holds another draw (wanted: {dict(heading)})")
    return _read(path)


def _read(path: Path) -> list[Row]:
    return [document.parse(line) for line in path.read_text().splitlines()[1:]]


def _measured(problem: Problem, selection: Selection, runner: Runner) -> dict[str, Any]:
    """Times of the choice, of the fastest candidates and of PyTorch's own choice, microseconds."""
    gpu = runner.gpu
    choice = choice_of(selection, gpu)
    groups = list(_built(problem, _groups(problem, selection, gpu), runner))
    candidates = [config for group in groups for config in group]
    fit = quick_pass.passed(problem, candidates, runner)
    finalists = dict.fromkeys([choice, *(m.config for m in fit[:FINALISTS])])
    vendors = [m.config for m in fit if is_vendor(m.config)]
    finalists |= dict.fromkeys(vendors[:1])
    finals = runner.retime(problem, list(finalists), ROUNDS)
    us = {m.config: m.latency_us for m in finals if m.ok and m.latency_us}
    return {
        "domain": selection.domain.label(),
        "candidates": len(candidates),
        "kernels": len(groups),
        "choice": _named(choice),
        "is_own": not is_vendor(choice),
        "chosen_us": us.get(choice),
        "vendor_us": min((t for one, t in us.items() if is_vendor(one)), default=None),
        "us": {_named(config): time for config, time in us.items()},
    }


def _built(
    problem: Problem, groups: Sequence[Sequence[Config]], runner: Runner
) -> Iterator[Sequence[Config]]:
    """Groups without what would have to be compiled."""
    for group in groups:
        family = families()[group[0].family]
        kept = group if family.is_vendor else runner.compiled(problem, family, group)
        if kept:
            yield list(kept)


def _named(config: Config) -> str:
    if is_vendor(config):
        return str(config.get("kernel"))
    return f"{config.family} {config.digest[:6]}"


def regret(row: Row) -> float | None:
    """The choice's time over the shortest, less 1; None without a time."""
    if not row["us"] or not row["chosen_us"]:
        return None
    return float(row["chosen_us"] / min(row["us"].values()) - 1)


def report(rows: Sequence[Row], count: int) -> str:
    """Summary by operation, and the worst."""
    lines = [("operation", "swept", "own", "mean regret", "worst", "over PyTorch's", "worst")]
    for operation in ("attention", "products", "all"):
        mine = [r for r in rows if operation == "all" or _operation(r) == operation]
        found = [(value, row) for row in mine if (value := regret(row)) is not None]
        if not found:
            continue
        ratios = [r["vendor_us"] / r["chosen_us"] for _, r in found if r["vendor_us"]]
        values = [value for value, _ in found]
        lines.append(
            (
                operation,
                f"{len(found)} of {count}" if operation == "all" else str(len(found)),
                f"{statistics.fmean(r['is_own'] for _, r in found):.0%}",
                f"{statistics.fmean(values):.1%}",
                f"{max(values):.1%}",
                f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}" if ratios else "",
                f"{min(ratios):.3f}" if ratios else "",
            )
        )
    ranked = sorted(rows, key=lambda row: -(regret(row) or 0.0))[:WORST]
    lost = [f"without a time: {row['problem']}" for row in rows if regret(row) is None]
    return "\n".join([table(lines, frozenset(range(1, 7))), "", *map(_line, ranked), *lost])


def _operation(row: Row) -> str:
    return "attention" if row["problem"].startswith("attention") else "products"


def _line(row: Row) -> str:
    value = regret(row)
    shown = "no time" if value is None else f"{value:.1%}"
    times = ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items())
    return f"{shown} {row['problem']}: {row['choice']} of {row['candidates']}; {times}"


if __name__ == "__main__":
    sys.exit(main())
