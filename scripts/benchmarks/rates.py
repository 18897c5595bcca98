"""Rates of the kernels that rules choose among, fitted to measured times; no GPU.

``scripts/bench rates FILE...`` reads results of `scaled --kernels` and `moe --products`. The
kernels are those of the rules of `block_scaled_gemm`, and of e4m3 in `grouped_gemm`. For each it
prints the clocks of a step and of a tile's end that make estimates nearest to times.

It also prints how much slower the rule's kernel is than the best one. The rates are the present
ones, the fitted ones, and those fitted without the product's layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks import json_file
from benchmarks.moe_products import kernel_name
from benchmarks.scaled import scaled_name
from tuner.cli import Parser
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.block_scaled_gemm import Rates, estimate_us, rates_of
from tuner.families.block_scaled_gemm import rule as block_scaled
from tuner.families.block_scaled_grouped_gemm import grouped_estimate_us
from tuner.families.grouped_gemm import rule as grouped
from tuner.hardware import GPUS, Gpu
from tuner.problem import E4M3, GemmProblem, GroupedGemmProblem
from tuner.selection.describe import table

Estimate = Callable[[Any, Config, Gpu, Rates], float]
FACTORS = (1.6, 1.2, 1.05, 1.01)
"""Steps of the descent: rates are multiplied or divided by these while the error falls."""
NEAR = 1.6
"""Longest time that is fitted, over the fastest kernel's: a choice is made among the near ones."""
MIN_POINTS = 4
"""Fewest times of a kernel from which its rates are fitted."""


@dataclass(frozen=True)
class Row:
    """A measured product."""

    problem: Any
    layer: tuple[int, ...]
    us: Mapping[str, float]


@dataclass(frozen=True)
class Rule:
    """A rule's kernels by name, their present rates, and their estimate."""

    kernels: Mapping[str, Config]
    rates: Mapping[str, Rates]
    estimate: Estimate
    gpu: Gpu

    def expected(self, problem: Any, rates: Mapping[str, Rates]) -> list[tuple[float, str]]:
        """Expected times of the kernels that take a problem, best first."""
        return sorted(
            (self.estimate(problem, config, self.gpu, rates[name]), name)
            for name, config in self.kernels.items()
            if families()[config.family].accepts(problem, config, self.gpu)
        )


def rules(gpu: Gpu) -> dict[str, Rule]:
    """The rules whose kernels have rates, by operation."""
    dense = {scaled_name(config): config for config in block_scaled.KERNELS}
    groups = {kernel_name(config): config for config in grouped.KERNELS[E4M3]}
    of_groups = {
        kernel_name(config): known if isinstance(known, Rates) else rates_of(config)
        for config, known in grouped.KERNELS[E4M3].items()
    }
    return {
        GemmProblem.op: Rule(
            dense,
            {scaled_name(config): rates for config, rates in block_scaled.KERNELS.items()},
            estimate_us,
            gpu,
        ),
        GroupedGemmProblem.op: Rule(groups, of_groups, grouped_estimate_us, gpu),
    }


def rows_of(document: Mapping[str, Any]) -> Iterator[Row]:
    """The products of a file that have times of own kernels.

    Raises:
        ConfigError: when it is neither of `scaled` nor of `moe`.
    """
    if "products" not in document:
        raise ConfigError("a file has no products (allowed: of `scaled` and `moe --products`)")
    for row in document["products"]:
        if "problem" not in row:
            problem: Any = GemmProblem(row["m"], row["n"], row["k"], dtype=E4M3, scales="block")
            yield Row(problem, (problem.n, problem.k), row["us"])
            continue
        problem = GroupedGemmProblem.parse(row["problem"])
        if problem.dtype == E4M3:
            problem = replace(problem, sizes=row["route"])
            yield Row(problem, (problem.groups, problem.n, problem.k), row["us"])


def fitted(rule: Rule, rows: Sequence[Row]) -> dict[str, Rates]:
    """Rates by kernel. One with too few times has its first guesses, moved as the others' are."""
    found: dict[str, Rates] = {}
    for name, config in rule.kernels.items():
        points = [
            (row.problem, row.us[name])
            for row in rows
            if name in row.us and row.us[name] <= NEAR * min(row.us[one] for one in _own(rule, row))
        ]
        if len(points) >= MIN_POINTS:
            found[name] = _descended(rule, config, points)
    moved = [found[name].step / rates_of(rule.kernels[name]).step for name in found]
    for name, config in rule.kernels.items():
        if name not in found:
            guess, factor = rates_of(config), median(moved) if moved else 1.0
            found[name] = Rates(guess.step * factor, guess.end * factor)
    return found


def _descended(rule: Rule, config: Config, points: Sequence[tuple[Any, float]]) -> Rates:
    def error(rates: Rates) -> float:
        return fmean(
            math.log(rule.estimate(problem, config, rule.gpu, rates) / us) ** 2
            for problem, us in points
        )

    best = rates_of(config)
    least = error(best)
    for factor in FACTORS:
        falls = True
        while falls:
            falls = False
            for by in (factor, 1 / factor):
                for powers in ((1, 0), (0, 1), (1, -1), (1, -2), (1, -4)):
                    one = Rates(best.step * by ** powers[0], best.end * by ** powers[1])
                    if (now := error(one)) < least * 0.999:
                        best, least, falls = one, now, True
    return best


def losses(rule: Rule, rows: Iterable[Row], rates: Mapping[str, Rates]) -> list[float]:
    """Time of the rule's first kernel that was timed over the fastest one's, for each product."""
    found = []
    for row in rows:
        timed = [name for name in row.us if name in rule.kernels]
        if timed:
            first = next(name for _, name in rule.expected(row.problem, rates) if name in timed)
            found.append(row.us[first] / min(row.us[name] for name in timed))
    return found


def left_out(rule: Rule, rows: Sequence[Row]) -> list[float]:
    """As `losses`, by rates that were fitted without the products of the same layer."""
    found: list[float] = []
    for layer in dict.fromkeys(row.layer for row in rows):
        others = [row for row in rows if row.layer != layer]
        of_layer = [row for row in rows if row.layer == layer]
        found += losses(rule, of_layer, fitted(rule, others))
    return found


def report(rule: Rule, rows: Sequence[Row]) -> str:
    """Rates of each kernel, and what the rule loses."""
    rates = fitted(rule, rows)
    lines: list[Sequence[str]] = [("kernel", "times", "first", "step", "end")]
    for name in rule.kernels:
        timed = [row for row in rows if name in row.us]
        first = sum(name == min(_own(rule, row), key=row.us.__getitem__) for row in timed)
        step, end = rates[name]
        lines.append((name, str(len(timed)), str(first), f"{step:.0f}", f"{end:.0f}"))
    text = [table(lines, frozenset((1, 2, 3, 4)))]
    for what, found in (
        ("present rates", losses(rule, rows, rule.rates)),
        ("fitted", losses(rule, rows, rates)),
        ("fitted without the layer", left_out(rule, rows)),
    ):
        if found:
            text.append(
                f"{what}: the rule's kernel takes {fmean(found):.3f} of the best one's time, "
                f"{max(found):.3f} at most, of {len(found)} products"
            )
    return "\n".join(text)


def _own(rule: Rule, row: Row) -> list[str]:
    return [name for name in row.us if name in rule.kernels]


def main(argv: Sequence[str]) -> int:
    """Print the rates.

    Raises:
        ConfigError: when a file cannot be read, or is another benchmark's.
    """
    parser = Parser(prog="scripts/bench rates", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON, or gzipped")
    parser.add_argument("--gpu", default="H100", help="GPU of the times (default H100)")
    args = parser.parse_args(argv)
    if args.gpu not in GPUS:
        raise ConfigError(f"--gpu {args.gpu} is not known (allowed: {', '.join(GPUS)})")
    rows: list[Row] = []
    for path in args.files:
        found = json_file.read(path)
        try:
            rows += rows_of(found)
        except ValueError as exc:
            raise ConfigError(f"{path}: {exc}") from exc
    for op, rule in rules(GPUS[args.gpu]).items():
        of_op = [row for row in rows if row.problem.op == op and _own(rule, row)]
        if of_op:
            print(f"{op}\n{report(rule, of_op)}\n")
    return 0
