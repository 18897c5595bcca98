"""Fit of the rates of kernels that rules choose among, to timed products.

The kernels are those of products with factors of blocks, and of grouped products in e4m3. Rates are
the clocks of a step and of a tile's end that make estimates nearest to times. A row has the problem
and the microseconds of each kernel by `kernel_name`, behind ``tuner`` beside other contenders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.block_scaled_gemm import of_rows, rates_of
from tuner.families.block_scaled_gemm import rule as products_rule
from tuner.families.block_scaled_gemm.expected import Rates, expected_us
from tuner.families.block_scaled_grouped_gemm import grouped_estimate_us
from tuner.families.fitting import Constants, FitGroup
from tuner.families.grouped_gemm import rule as grouped_rule
from tuner.hardware import Gpu
from tuner.problem import E4M3, GemmProblem, GroupedGemmProblem, problem_from_json

FACTORS = (1.6, 1.2, 1.05, 1.01)
"""Steps of the descent: rates are multiplied or divided by these while the error falls."""
NEAR = 1.6
"""Longest time that is fitted, over the fastest kernel's: a choice is made among the near ones."""
OF_ROWS = "factors of rows"
ELECTED = " elected"
"""End of the names of kernels with an elected lane."""
PRIOR = 0.3
"""Weight of the squared logarithms between a kernel's rates and its guess, over its times. With
few times it stays near.
"""
MIN_POINTS = 4
"""Fewest times of a kernel from which its rates are fitted."""


def kernel_name(config: Config) -> str:
    """Tile of a rule's kernel, and its unusual parameters.

    As in ``u4``, unrolled steps of its loop, and ``k2``, the parts that K is divided into.
    """
    params = config.params
    cluster = f"c{params['cluster_m']}x{params['cluster_n']}"
    parts = (
        "swapped" * bool(params["swap_ab"]),
        f"{params['tile_m']}x{params['tile_n']}",
        f"u{params['unroll']}" if "unroll" in params else "",
        f"k{params['split_k']}" if params.get("split_k", 1) != 1 else "",
        cluster if cluster != "c1x1" else "",
        "uniform" if "uniform_branch" in params else "",
        "ahead" if "ahead" in params else "",
        "turns" if "turns" in params else "",
        "fetched" if "fetch_factors" in params else "",
        "clipped" if "clips_rows" in params else "",
        "words" if "vector_merge" in params else "",
        f"b{params['blocks_per_sm']}" if "blocks_per_sm" in params else "",
        "staged" if "staged_columns" in params else "",
        ELECTED.strip() if "elected" in params else "",
    )
    return " ".join(filter(None, parts))


class TimedProduct(NamedTuple):
    """A measured product."""

    problem: Any
    us: Mapping[str, float]
    """Times of the rule's kernels."""
    above: Mapping[str, float] = {}
    """Times that further kernels exceeded, which were left out of the last pass."""

    @property
    def layer(self) -> tuple[int, ...]:
        """Sizes without the rows."""
        return getattr(self.problem, "groups", 1), self.problem.n, self.problem.k


@dataclass(frozen=True)
class RatedKernels:
    """A rule's kernels by name, and their estimate."""

    kernels: Mapping[str, Config]
    estimate: Callable[[Any, Config, Gpu, Rates], float]
    gpu: Gpu

    def expected_us(self, problem: Any, name: str, rates: Constants) -> float:
        """Expected time of a kernel."""
        of_kernel = Rates(rates[f"{name} step"], rates[f"{name} end"])
        return self.estimate(problem, self.kernels[name], self.gpu, of_kernel)

    def loss(self, product: TimedProduct, rates: Constants) -> float:
        """Time of the kernel of least expected time over the fastest one's, less one."""
        problem, us = product.problem, {**product.above, **product.us}
        legal = [
            (self.expected_us(problem, name, rates), time_us)
            for name, time_us in us.items()
            if name in self.kernels
            and families()[(one := self.kernels[name]).family].accepts(problem, one, self.gpu)
        ]
        return min(legal)[1] / min(us.values()) - 1 if legal else 0.0

    def fitted(self, products: Sequence[TimedProduct]) -> dict[str, float]:
        """Rates by kernel. One with too few times has its guess, moved as the others' steps are.

        A kernel with an elected lane follows the fit of the same one without, and the ratios of
        both times.
        """
        guesses: dict[str, Rates] = {}
        measured: dict[str, Rates] = {}
        factors: dict[bool, list[float]] = {False: [], True: []}
        for name, config in self.kernels.items():
            guess, former = rates_of(config), name.removesuffix(ELECTED)
            known = self._measured(name, former, guess, products) if former != name else None
            guesses[name] = guess = known or guess
            if rates := self._measured(name, name, guess, products, former if known else ""):
                measured[name] = rates
                factors[former != name].append(rates.step / guess.step)
        moved = {kind: median(of_kind or [1.0]) for kind, of_kind in factors.items()}
        return flat(
            {
                name: measured.get(name, Rates(*(moved[name.endswith(ELECTED)] * x for x in guess)))
                for name, guess in guesses.items()
            }
        )

    def _measured(
        self,
        name: str,
        timed_as: str,
        guess: Rates,
        products: Sequence[TimedProduct],
        former: str = "",
    ) -> Rates | None:
        """Rates of a kernel by the times of a name; None when these are too few.

        Args:
            name: the kernel.
            timed_as: name of the times.
            guess: first rates; those of `former`.
            products: timed products.
            former: kernel whose expected times are multiplied by the ratios of both times, where
                it is timed, too; empty: none.
        """
        timed = [p for p in products if timed_as in p.us]
        near = [p for p in timed if p.us[timed_as] <= NEAR * min(p.us.values())]
        slower = [p for p in products if timed_as in p.above]
        if not near or len(near) + len(slower) < (1 if former else MIN_POINTS):
            return None

        def time_us(product: TimedProduct) -> float:
            if former not in product.us:
                return product.us[timed_as]
            expected = self.estimate(product.problem, self.kernels[name], self.gpu, guess)
            return expected * product.us[timed_as] / product.us[former]

        times = [(p.problem, time_us(p)) for p in near]
        above = [(p.problem, p.above[timed_as]) for p in slower]
        return self._descended(name, guess, times, above, PRIOR / len(near) if former else 0.0)

    def _descended(
        self,
        name: str,
        guess: Rates,
        times: Sequence[tuple[Any, float]],
        above: Sequence[tuple[Any, float]],
        prior: float,
    ) -> Rates:
        def error(rates: Rates) -> float:
            def ratio(problem: Any, us: float) -> float:
                return math.log(us / self.estimate(problem, self.kernels[name], self.gpu, rates))

            timed = fmean(ratio(*one) ** 2 for one in times)
            far = sum(math.log(x / y) ** 2 for x, y in zip(rates, guess, strict=True))
            below = fmean([max(0.0, ratio(*one)) ** 2 for one in above] or [0.0])
            return timed + below + prior * far

        best, least = guess, error(guess)
        for factor in FACTORS:
            falls = True
            while falls:
                falls = False
                for by in (factor, 1 / factor):
                    for powers in ((1, 0), (0, 1), (1, -1), (1, -2), (1, -4)):
                        rates = Rates(*(x * by**p for x, p in zip(best, powers, strict=True)))
                        if (now := error(rates)) < least * 0.999:
                            best, least, falls = rates, now, True
        return best


def flat(rates: Mapping[str, Rates]) -> dict[str, float]:
    """Rates by kernel and part."""
    return {f"{k} {part}": v for k, r in rates.items() for part, v in r._asdict().items()}


def rules(gpu: Gpu) -> dict[str, tuple[RatedKernels, Constants]]:
    """The rules whose kernels have rates, and those that ship, by kind of product."""

    def rule(kernels: Mapping[Config, Any], estimate: Any) -> tuple[RatedKernels, Constants]:
        ships = {c: v if isinstance(v, Rates) else rates_of(c) for c, v in kernels.items()}
        named = {kernel_name(config): config for config in kernels}
        return RatedKernels(named, estimate, gpu), flat(
            {kernel_name(c): v for c, v in ships.items()}
        )

    return {
        GemmProblem.op: rule(products_rule.KERNELS, expected_us),
        OF_ROWS: rule(of_rows.KERNELS, expected_us),
        GroupedGemmProblem.op: rule(grouped_rule.KERNELS[E4M3], grouped_estimate_us),
    }


def products_of(
    kind: str, found: Sequence[Mapping[str, Any]], rule: RatedKernels
) -> list[TimedProduct]:
    """Products of a kind that a kernel of its rule is timed for."""
    timed = (
        (
            row["problem"],
            *(
                {
                    name: us
                    for name, us in row.get(times, {}).items()
                    if not rule.kernels.keys().isdisjoint((name, f"{name}{ELECTED}"))
                }
                for times in ("us", "above")
            ),
        )
        for row in found
        if kind == (OF_ROWS if row["problem"].get("scales") == "row" else row["problem"]["op"])
    )
    return [
        TimedProduct(problem_from_json(problem), us, above) for problem, us, above in timed if us
    ]


def groups(rows: Sequence[Mapping[str, Any]], gpu: Gpu) -> Iterator[FitGroup]:
    """The rates of the kernels that the rows time.

    Raises:
        ConfigError: when they time no kernel of a rule.
    """
    timed = {op: products_of(op, rows, rule) for op, (rule, _) in rules(gpu).items()}
    if not any(timed.values()):
        raise ConfigError("no kernel of a rule is timed in these files")
    for op, (rule, ships) in rules(gpu).items():
        if products := timed[op]:
            yield FitGroup(op, products, ships, rule.fitted, rule.loss, lambda one: one.layer)
