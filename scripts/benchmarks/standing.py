"""Shipped decisions of a suite or list as tables: GPUs and regimes side by side, means by size.

``scripts/bench standing`` prints what ``cache/tuned/`` holds, without a GPU. Ratios are the fastest
vendor's time over the best own kernel's, both of one final pass. A ``tie`` is equal within the
noise of both, at most 1 %. ``noisy``: one of the two times deviates by 2 % or more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.bench.results import Size, size_of
from tuner.bench.suites import SUITES
from tuner.cli import Parser
from tuner.errors import ConfigError
from tuner.hardware import GPUS
from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem
from tuner.selection.describe import microseconds
from tuner.selection.shipped import shipped
from tuner.store.entry import Entry
from tuner.tuning.job import read_problems

SHOWN = ("H100", "H200")
LAUNCHES = ("stream", "chained")
NONE = ""


@dataclass(frozen=True)
class Column:
    """Decisions on one GPU in one regime."""

    gpu: str
    regime: Regime
    entries: Mapping[Problem, Entry]

    @property
    def name(self) -> str:
        return f"{self.gpu}, {self.regime.launch}"

    def ratio(self, problem: Problem) -> float | None:
        """The fastest vendor's time over the best own kernel's."""
        entry = self.entries.get(problem)
        return next(iter(entry.speedups.values()), None) if entry else None

    def cell(self, problem: Problem) -> str:
        """Own time in microseconds, ratio, the vendor's name, and marks."""
        entry = self.entries.get(problem)
        vendor = entry.fastest_vendor if entry else None
        ratio = self.ratio(problem)
        if entry is None or entry.best_own is None or vendor is None or ratio is None:
            return NONE
        name, other = vendor
        marks = ["tie"] if entry.is_tied else []
        marks += ["noisy"] if "noisy" in (*entry.best_own.flags, *other.flags) else []
        shown = f"{microseconds(entry.best_own.latency_us)}, {ratio:.3f} {name.split('/')[0]}"
        return shown + (f" ({', '.join(marks)})" if marks else "")


def columns(problems: Sequence[Problem], l2: str) -> list[Column]:
    """Columns (a GPU and a regime) with a decision of at least one of the problems."""
    found = []
    for gpu in SHOWN:
        for launch in LAUNCHES:
            regime = Regime(launch, l2)
            entries = {
                e.problem: e
                for e in shipped()
                if e.gpu == GPUS[gpu] and e.regime == regime and e.problem in problems
            }
            if entries:
                found.append(Column(gpu, regime, entries))
    return found


def lines(problems: Sequence[Problem], shown: Sequence[Column]) -> list[str]:
    """Markdown of the problems, a line each."""
    rows = [("own time in us, ratio", *(column.name for column in shown))]
    rows += [("---",) * len(rows[0])]
    rows += [(name_of(p), *(column.cell(p) for column in shown)) for p in problems]
    return [f"| {' | '.join(row)} |" for row in rows]


def means(problems: Sequence[Problem], shown: Sequence[Column]) -> list[str]:
    """Markdown of geometric mean, worst and count by size, of all, and where every column has a
    decision.
    """
    common = [p for p in problems if all(column.ratio(p) is not None for column in shown)]
    groups = {f"{size} keys or rows": [p for p in problems if size_of(p) is size] for size in Size}
    groups |= {"all": list(problems)}
    if len(common) < len(problems):
        groups |= {"those of every column": common}
    rows = [("problems", *(column.name for column in shown)), ("---",) * (len(shown) + 1)]
    for name, group in groups.items():
        cells = []
        for column in shown:
            ratios = [ratio for p in group if (ratio := column.ratio(p)) is not None]
            mean = f"{statistics.geometric_mean(ratios):.3f}, {min(ratios):.3f}" if ratios else NONE
            cells.append(f"{mean} ({len(ratios)})" if ratios else NONE)
        if any(cells):
            rows.append((name, *cells))
    return [f"| {' | '.join(row)} |" for row in rows]


def name_of(problem: Problem) -> str:
    """A problem's label without the type that the suites have."""
    return problem.label().removesuffix(",dtype=fp16")


def main(argv: Sequence[str]) -> int:
    """Print both tables.

    Raises:
        ConfigError: when the suite is not known, the list cannot be read, or nothing ships of them.
    """
    parser = Parser(prog="scripts/bench standing", description=__doc__)
    parser.add_argument("--suite", default="acceptance", help="as of `tuner bench`")
    parser.add_argument(
        "--problems", type=Path, metavar="FILE", help="list of problems in place of a suite"
    )
    parser.add_argument(
        "--op", choices=tuple(PROBLEMS), default="attention", help="the list's operation"
    )
    parser.add_argument("--l2", choices=("warm", "cold"), help="state of the inputs")
    args = parser.parse_args(argv)
    problems: Sequence[Problem]
    if args.problems is not None:
        name, problems = f"list {args.problems}", read_problems(args.problems, args.op)
        l2 = args.l2 or Regime.default(args.op).l2
    elif args.suite not in SUITES:
        raise ConfigError(f"suite '{args.suite}' is not known (allowed: {', '.join(SUITES)})")
    else:
        suite = SUITES[args.suite]
        name, problems, l2 = f"suite '{args.suite}'", suite.problems, args.l2 or suite.regimes[0].l2
    shown = columns(problems, l2)
    if not shown:
        raise ConfigError(f"{name} has no shipped decision on {', '.join(SHOWN)}")
    print("\n".join([*lines(problems, shown), "", *means(problems, shown)]))
    return 0
