"""``tuner fit``: a portfolio or a rule for shapes that nobody tuned, from measurements."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tuner.cli.timing import add_launch, usual_inputs
from tuner.problem import PROBLEMS

DESCRIPTION = """Makes an answer for any shape of an operation from the problems that the store, the
shipped recordings and the shipped decisions hold. Attention: a portfolio of few kernels for each
domain (head dimension, mask, phase) with a time model for each, and the regret at models that were
left out. Other operations: a rule, by whichever of three kinds answers problems better that were
left out. Both are JSON. With --rule, asks such a file."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "fit", help="make a portfolio or a rule for shapes nobody tuned", description=DESCRIPTION
    )
    parser.add_argument("--op", choices=sorted(PROBLEMS), default="attention")
    parser.add_argument("--gpu", metavar="NAME", help="as H200 (default)")
    add_launch(parser)
    parser.add_argument("--l2", choices=("warm", "cold"), help="state of the inputs")
    parser.add_argument("--store", metavar="URL", help="SQLAlchemy URL or SQLite file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write what was made")
    parser.add_argument("--rule", type=Path, metavar="FILE", help="a rule to ask about --shape")
    parser.add_argument("--shape", metavar="KEY=VALUE,...", help="as S=1500,D=64")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make a rule, or ask one.

    Raises:
        ConfigError: when there is too little to make a rule from, or one cannot be read.
    """
    from tuner.errors import ConfigError

    if (args.rule is None) != (args.shape is None):
        raise ConfigError("--rule and --shape go together")
    return _make(args) if args.rule is None else _ask(args)


def _make(args: argparse.Namespace) -> int:
    from tuner.base.output import check_place
    from tuner.hardware import DEFAULT_GPU
    from tuner.search import fit
    from tuner.search.history import measured_in
    from tuner.selection.reader import find_gpu
    from tuner.selection.rule import LEAST_JUDGED
    from tuner.store import open_store

    check_place(args.output)
    if args.op == "attention":
        return _make_portfolio(args)
    with open_store(args.store) as store:
        gpu = find_gpu(args.gpu, [e.gpu for e in store.entries()]) if args.gpu else DEFAULT_GPU
        regimes = usual_inputs(args, args.op)
        regime, found = measured_in(args.op, gpu, regimes, store, with_finals=True)
    samples = [fit.Sample.of(p, rows) for p, rows in found.items() if p.is_plain]
    rule = fit.fit(samples, gpu, regime)
    if args.output is not None:
        rule.write(args.output)
    if args.json:
        print(json.dumps(rule.to_json()))
        return 0
    regret = rule.regret
    others = ", ".join(f"{kind} {100 * mean:.1f} %" for kind, mean in rule.others.items())
    print(
        f"{rule.op} on {gpu.name}, {regime}: {rule.kind} from {len(samples)} problems; "
        f"{regret.text()}; otherwise {others}"
    )
    if regret.answered < LEAST_JUDGED:
        print(f"  too few to rely on it: {LEAST_JUDGED} problems or more make a regret")
    for row in regret.each:
        text = "not measured" if row["regret"] is None else f"{100 * row['regret']:.1f} %"
        print(f"  {row['problem']}: {text}")
    return 0


def _make_portfolio(args: argparse.Namespace) -> int:
    from tuner.errors import ConfigError
    from tuner.hardware import DEFAULT_GPU
    from tuner.measurement import Regime
    from tuner.search import portfolio
    from tuner.selection.reader import find_gpu
    from tuner.store import open_store

    if args.regime or args.l2:
        raise ConfigError("--regime and --l2 are not for attention (allowed: neither)")
    with open_store(args.store) as store:
        gpu = find_gpu(args.gpu, [e.gpu for e in store.entries()]) if args.gpu else DEFAULT_GPU
        measured = {
            regime: portfolio.measurements(args.op, gpu, regime, store)
            for regime in Regime.choices(args.op)
        }
    made = portfolio.make(measured, gpu)
    if args.output is not None:
        made.write(args.output)
    if args.json:
        print(json.dumps(made.to_json()))
        return 0
    for models in made.domains.values():
        own = sum(not one.is_vendor for one in models.candidates)
        print(f"{models.domain.label()} ({models.regime}): {own} kernels; {models.regret.text()}")
    return 0


def _ask(args: argparse.Namespace) -> int:
    from tuner.selection.rule import Rule

    rule = Rule.read(args.rule)
    problem = PROBLEMS[rule.op].parse(args.shape)
    answer = rule.answer(problem)
    if answer is None:
        print(f"no config of the rule is legal for {problem.label()}")
        return 1
    facts = {
        "problem": problem.label(),
        "config": answer.config.to_json(),
        "kind": answer.kind,
        "mean_regret": answer.regret.mean,
        "worst_regret": answer.regret.worst,
        "doubts": list(answer.doubts),
        "source": answer.source,
    }
    if args.json:
        print(json.dumps(facts))
    else:
        params = " ".join(f"{k}={v}" for k, v in sorted(answer.config.params.items()))
        print(f"{problem.label()}: {answer.config.family} {params}")
        print(f"by the rule ({answer.kind}: {answer.source}); {answer.regret.text()}")
        for doubt in answer.doubts:
            print(doubt)
    return 0
