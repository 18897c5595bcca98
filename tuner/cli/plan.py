"""``tuner plan``: choose few configs that serve a range of shapes within a given loss."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cli.aot import ProgressNotes, say_planning
from tuner.cli.arguments import add_op, add_place, add_result, gpu_of, tell, usual_inputs, within
from tuner.errors import ConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Regime
from tuner.problem import PROBLEMS, Problem
from tuner.problem.shapes import expand
from tuner.selection.describe import microseconds, table, wrapped
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.search.coverage import CoveragePlan, CoveredProblem, PlannedConfig

DESCRIPTION = """Chooses few configurations for a list of shapes, each within a given loss of the
best known one. The method is greedy set cover over measured times. Configurations without a
measurement enter with the search's expected time, marked predicted. Ranges double: S=128:131072;
lists are S=512,1024."""

_TUNE = (
    "an estimate can be off by more than the loss that it promises; `tuner sweep` measures, and "
    "`tuner plan --measured` counts on nothing else"
)


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan", help="choose few configurations for many shapes", description=DESCRIPTION
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", metavar="KEY=VALUES,...", help="as S=128:131072,D=64,causal=0,1")
    what.add_argument("--problems", type=Path, metavar="FILE", help="YAML or JSON list of shapes")
    add_op(parser)
    parser.add_argument(
        "--within",
        type=within(0, 1000, float),
        default=3.0,
        metavar="PERCENT",
        help="loss allowed (default 3)",
    )
    parser.add_argument(
        "--measured", action="store_true", help="use measured times only, predict none"
    )
    add_place(parser, "as H200 (default)")
    add_result(parser, run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 if a shape without any data is left.

    Raises:
        ConfigError: when a shape, the loss or a name is wrong.
    """
    from tuner.search.coverage import plan, times
    from tuner.search.history import measured_in

    problems = _problems(args)
    ops = sorted({problem.op for problem in problems})
    if len(ops) > 1:
        raise ConfigError(f"a plan is for one operation; the list has {' and '.join(ops)}")
    with open_store(args.store) as store:
        gpu = gpu_of(args, store) or DEFAULT_GPU
        say_planning(problems, gpu)
        regime, found = measured_in(ops[0], gpu, usual_inputs(args, ops[0]), store)
    timed = times(problems, gpu, found, predict=not args.measured, note=ProgressNotes())
    steps = plan(timed, args.within / 100)
    elsewhere = {p: rows[0].regime for p, rows in found.items() if rows[0].regime != regime}
    facts = {"op": ops[0], "gpu": gpu.name, "regime": str(regime)}
    text = plan_text(f"{ops[0]} on {gpu.name}, {regime}", steps, elsewhere)
    tell(args, {**facts, **steps.to_json()}, text)
    return 1 if steps.unserved else 0


def _problems(args: argparse.Namespace) -> list[Problem]:
    if args.problems is not None:
        from tuner.tuning.job import read_problems

        return read_problems(args.problems, args.op)

    return expand(PROBLEMS[args.op], args.shape)


def plan_text(head: str, planned: CoveragePlan, regimes: Mapping[Problem, Regime]) -> str:
    """Chosen configs, and a table of the shapes with the source of each number.

    Args:
        head: operation, GPU and regime.
        planned: the plan.
        regimes: regimes of problems that were timed in another one.
    """
    choices = planned.choices
    shapes = sum(len(choice.served) for choice in choices)
    lines = [
        f"{head}: {_count(len(choices), 'configuration')} for {_count(shapes, 'shape')}, each "
        f"within {100 * planned.within:g} % of the best known"
    ]
    for number, choice in enumerate(choices, 1):
        lines += ["", *wrapped(f"{number}  {choice.config}"), f"   {_sum(choice)}"]
    rows = [("shape", "by", "us", "loss", "from")]
    rows += [
        (
            served.problem.label(),
            str(number),
            microseconds(served.time.us),
            f"{100 * served.loss:.1f} %",
            str(served.time.provenance)
            + (f", {regimes[served.problem]}" if served.problem in regimes else "")
            + _elsewhere(served),
        )
        for number, choice in enumerate(choices, 1)
        for served in choice.served
    ]
    if shapes:
        lines += ["", table(rows, right=frozenset({2, 3}))]
    if predicted := shapes - sum(choice.measured for choice in choices):
        lines += ["", *wrapped(f"{_count(predicted, 'loss')} predicted, not measured: {_TUNE}")]
    lines += [f"nothing is known of {problem.label()}" for problem in planned.unserved]
    return "\n".join(lines)


def _sum(choice: PlannedConfig) -> str:
    where = f"{_count(len(choice.served), 'shape')}, {choice.measured} of them measured"
    kernels = _count(choice.kernels, "kernel") + " to compile, " if choice.kernels else ""
    return f"{where}; {kernels}worst loss {100 * choice.worst_loss:.1f} %"


def _elsewhere(served: CoveredProblem) -> str:
    if served.elsewhere is None:
        return ""
    kernel, us = served.elsewhere
    return f"; {kernel} took {100 * (1 - us / served.time.us):.1f} % less"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if number == 1 else "es" if name.endswith("s") else "s")
