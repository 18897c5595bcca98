"""The selection's choices beside all built kernels of their problems.

Problems are those of drawn calls, attention and products by turns. A problem is swept over
PyTorch's kernels, and over every kernel of the portfolio that takes it and is built here. Own
kernels are swept with their run-time variants, and whatever domain they were chosen for. Nothing is
compiled. The fastest `FINALISTS`, the choice and PyTorch's own choice are then timed again,
interleaved. The regret is the choice's time over the shortest of these, less 1.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

from benchmarks import quick_pass, rows
from benchmarks.harness import Row
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
from tuner.selection.domains import DOMAINS
from tuner.selection.portfolio import serving, shipped
from tuner.selection.reader import find_gpu
from tuner.store.entry import is_vendor

CALLS, PROBLEMS = 400, 40
"""Calls of the draw, and problems that are taken from them."""
FINALISTS, ROUNDS = 4, 10
WORST = 8


@dataclass(frozen=True)
class Choice:
    """A problem and what the selection answers to it."""

    problem: Problem
    selection: Selection

    @property
    def group(self) -> str:
        return "attention" if self.problem.op == "attention" else "products"

    @property
    def label(self) -> str:
        return f"{self.problem.op} {self.problem.label()}"


def regret_cases(args: Namespace) -> list[Choice]:
    """The first distinct problems of a draw that a portfolio answers, attention and products by
    turns.

    Raises:
        ConfigError: when an operation has no portfolio.
    """
    from benchmarks.population_tensors import posed

    wanted = set(args.op.split(",")) if args.op else set(DOMAINS)
    if unknown := wanted - set(DOMAINS):
        raise ConfigError(f"--op {unknown.pop()} has no portfolio (allowed: {', '.join(DOMAINS)})")
    portfolios = {one.op: one for one in serving(shipped(), find_gpu(args.gpu))}
    kinds: dict[bool, dict[str, Choice]] = {True: {}, False: {}}
    for call in draw(args.seed, CALLS, subset(args.models)):
        try:
            problem = posed(call)
        except ConfigError:
            continue
        portfolio = portfolios.get(problem.op)
        selection = None if portfolio is None else portfolio.select(problem)
        if problem.op in wanted and selection is not None:
            choice = Choice(problem, selection)
            kinds[bool(call.views)].setdefault(choice.label, choice)
    turns = zip_longest(*(choices.values() for choices in kinds.values()))
    return [choice for turn in turns for choice in turn if choice is not None][:PROBLEMS]


def regret_listing(cases: Sequence[Choice], args: Namespace) -> Iterable[str]:
    """Problems with the candidates that a sweep would have."""
    gpu = find_gpu(args.gpu)
    for case in cases:
        groups = candidates_of(case, gpu)
        yield f"{case.label}: {len(groups)} kernels, {sum(map(len, groups))} candidates"


def launched(selection: Selection, gpu: Gpu) -> Config:
    """The config that the runtime launches: the first own one that is proven here, else PyTorch's.

    Raises:
        BenchmarkError: when no own kernel is proven, and PyTorch has none.
    """
    from tuner.selection.kernels import lists

    for _, config in selection.own():
        specs = families()[config.family].kernels(selection.problem, config)
        if not isinstance(lists.proven(specs, gpu.compute_capability), str):
            return config
    legal, _ = selection.times.legal_vendors(selection.problem, selection.facts)
    if selection.vendor not in legal:
        raise BenchmarkError(f"no kernel of {selection.domain.label()} is proven here")
    return legal[selection.vendor][1]


def candidates_of(case: Choice, gpu: Gpu) -> list[list[Config]]:
    """Every kernel that may take a problem, with its variants, and what the selection ranks."""
    (portfolio,) = (one for one in serving(shipped(), gpu) if one.op == case.problem.op)
    groups = pool.of_portfolio(case.problem, gpu, portfolio, is_whole=True)
    configs = {config for group in groups for config in group}
    return [*groups, *([one] for _, one in case.selection.ranked() if one not in configs)]


@cache
def _runners() -> Runners:
    """Runners of this process's life, whose workers end with it."""
    machine = Machine(parse_devices("0"), None, replay=False)
    return Runners(machine, lambda text: print(text, file=sys.stderr)).__enter__()


def regret_measured(case: Choice, _: Namespace) -> Row:
    """Times of the choice, of the fastest candidates and of PyTorch's own choice."""
    return swept(case, _runners().of(case.problem, sampled_problems.regime(case.problem)))


def swept(case: Choice, runner: Runner) -> Row:
    """A row by a runner; ``tuner`` is the choice."""
    problem, choice = case.problem, launched(case.selection, runner.gpu)
    groups = list(_built(problem, candidates_of(case, runner.gpu), runner))
    candidates = [config for group in groups for config in group]
    fit = [m.config for m in quick_pass.passed(problem, candidates, runner)]
    vendors = [config for config in fit if is_vendor(config)]
    finalists = dict.fromkeys([choice, *fit[:FINALISTS], *vendors[:1]])
    finals = runner.retime(problem, list(finalists), ROUNDS)
    us = {m.config: m.latency_us for m in finals if m.ok and m.latency_us}
    failed = {} if choice in us else {"tuner": f"{_named(choice)} has no time"}
    pytorch = [time for config, time in us.items() if is_vendor(config)]
    return {
        "us": {
            **({"pytorch": min(pytorch)} if pytorch else {}),
            **{"tuner" if config == choice else _named(config): us[config] for config in us},
        },
        **{"failed": failed, "domain": case.selection.domain.label(), "choice": _named(choice)},
        **{"is_own": not is_vendor(choice), "candidates": len(candidates), "kernels": len(groups)},
    }


def _built(
    problem: Problem, groups: Sequence[Sequence[Config]], runner: Runner
) -> Iterator[Sequence[Config]]:
    """Groups without what would have to be compiled."""
    for group in groups:
        family = families()[group[0].family]
        built = group if family.is_vendor else runner.compiled(problem, family, group)
        if built:
            yield list(built)


def _named(config: Config) -> str:
    return str(config.get("kernel")) if is_vendor(config) else f"own {config.digest[:6]}"


def regret(row: Row) -> float | None:
    """The choice's time over the shortest, less 1; None without a time."""
    us = row.get("us", {})
    return us["tuner"] / min(us.values()) - 1 if "tuner" in us else None


def regret_line(row: Row) -> str:
    """A problem's regret, choice and times."""
    value = regret(row)
    shown = "no time" if value is None else f"{value:.1%}"
    return f"{shown} of {row['candidates']} by {row['choice']}; {rows.ratio_line(row)}"


def regret_table(measured: Sequence[Row]) -> list[str]:
    """Mean and worst regret by operation, and the worst problems."""
    lines: list[tuple[Any, ...]] = [("group", "problems", "swept", "own", "mean regret", "worst")]
    groups = [*dict.fromkeys(row["group"] for row in measured), "all"]
    for name in groups:
        mine = [row for row in measured if name in (row["group"], "all")]
        found = [(value, row) for row in mine if (value := regret(row)) is not None]
        if not found:
            continue
        values = [value for value, _ in found]
        own = statistics.fmean(row["is_own"] for _, row in found)
        shares = f"{own:.0%}", f"{statistics.fmean(values):.1%}", f"{max(values):.1%}"
        lines.append((name, str(len(mine)), str(len(found)), *shares))
    ranked = sorted(measured, key=lambda row: -(regret(row) or 0.0))[:WORST]
    over = rows.ratio_table(
        [{**row, "us": {n: row["us"][n] for n in ("pytorch", "tuner") if n in row["us"]}}
         for row in measured if row.get("us")]
    )  # fmt: skip
    worst = [f"- {regret(row) or 0:.1%} {row['case']}" for row in ranked]
    return [*rows.markdown(lines), "", *over, "", *worst]
