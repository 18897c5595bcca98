"""Choice of a portfolio's kernels and margin, judged at models left out of the fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from statistics import fmean

from tuner.config import Config
from tuner.families import families
from tuner.families.attention_work import PACKING
from tuner.families.by_operation import AnyDomain
from tuner.families.work import floor_us, sizes_of
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.search.corrections import corrected, margins
from tuner.search.rates import Fits
from tuner.search.timed import KernelTimes, Point
from tuner.selection.candidates import Candidate, Regret
from tuner.selection.choice import preferred

MAX_MEDIAN_ERROR = 0.12
"""Largest median error, at models left out, of a kernel that may be chosen."""
MIN_GAIN = 0.001
"""Least decrease of a domain's mean loss that one more kernel must bring."""
UNPACKED_KERNELS = 3
"""Most compiled kernels that do not pack heads beside chosen ones that all do."""
MARGINS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Margins to try (`DomainModels.margin`)."""
SLOWER_COSTS = 1.0
"""Weight of a loss against the vendor's kernel, added to the loss against the fastest kernel. With
3, products on an H200 had half as many calls by own kernels. Their speed over the vendor's at
models left out was 1.068 and 1.005 up to 16 and above 256 rows, in place of 1.080 and 1.009."""
MAX_LOSS = 0.25
"""Largest loss that one problem counts with in the choice of a margin. A problem that the models
miss by far says little about the others."""
FOLDS = 8
"""Parts of the models; each is left out of one fit."""


@dataclass(frozen=True, eq=False)
class _Expected:
    """A point, and its expected time by rates without its model."""

    kernel: KernelTimes
    point: Point
    expected: float

    @property
    def us(self) -> float:
        return self.point.us


class Judge:
    """Times of a domain's kernels: measured, and expected by rates fitted to other models."""

    def __init__(
        self,
        domain: AnyDomain,
        regime: Regime,
        kernels: Sequence[KernelTimes],
        gpu: Gpu,
        plain: Sequence[KernelTimes] = (),
    ) -> None:
        """Args: domain; regime: of the measurements; kernels: measured in it; gpu; plain: measured
        without its activation.
        """
        self._domain, self._is_cold, self._gpu = domain, regime.l2 == "cold", gpu
        self._fits = Fits(domain, kernels, gpu, plain)
        self._rows: dict[str, list[_Expected]] = defaultdict(list)
        self._errors: dict[Config, list[float]] = {}
        for kernel in kernels:
            fits = [self._left_out(kernel, base) for base in self._fits.bases_of(kernel)]
            errors, rows, base = min(fits, key=lambda f: f[0][len(f[0]) // 2])
            self._fits.bases[kernel.config] = base
            self._errors[kernel.config] = errors
            for row in rows:
                self._rows[row.point.problem.key].append(row)

    def is_known(self, kernel: KernelTimes) -> bool:
        """True if a kernel's expected times are near the measured ones."""
        return self._error(kernel, 0.5) <= MAX_MEDIAN_ERROR

    def _error(self, kernel: KernelTimes, quantile: float) -> float:
        errors = self._errors[kernel.config]
        return errors[int(quantile * len(errors))]

    def candidate(self, kernel: KernelTimes) -> Candidate:
        """The kernel with rates that are fitted to all of its points, and corrected."""
        family = families()[kernel.config.family]
        fitted = dict(zip(family.work_terms, self._fits.chosen(kernel), strict=True))
        point = kernel.points[0]
        is_plain = family.served(point.problem, point.config).get("pdl") is False
        rates = corrected(fitted, self._domain, family, self._gpu, is_plain)
        errors = self._error(kernel, 0.5), self._error(kernel, 0.9)
        return Candidate(kernel.config, rates, len(kernel.points), *errors, kernel.spread)

    def cover(self, own: Sequence[KernelTimes], most: int) -> list[KernelTimes]:
        """Few kernels with a small loss against each problem's fastest own kernel.

        Products are compared with the fastest of all, since PyTorch's kernel answers where no
        chosen one is faster.

        If all kernels of attention pack heads, some that do not join: they take any ratio of heads.
        So does one that splits the keys, if all that split them pack heads.
        """
        table = self._table(own)
        reached = self._vendors_times(own)
        best = [min(column) for column in zip(reached, *table, strict=True)]
        picked: list[int] = []
        loss = _mean_loss(reached, best)
        compiled = [families()[k.config.family].compile_digest(k.config) for k in own]
        while True:
            sets, tried = {compiled[at] for at in picked}, []
            for at in set(range(len(own))) - set(picked):
                if len(sets) == most and compiled[at] not in sets:
                    continue
                times = [min(pair) for pair in zip(reached, table[at], strict=True)]
                tried.append((_mean_loss(times, best), own[at].config.digest, at, times))
            if not tried:
                break
            least, _, at, times = min(tried)
            if picked and loss - least < MIN_GAIN:
                break
            picked.append(at)
            reached, loss = times, least
        unpacked = [kernel for kernel in own if not PACKING & kernel.config.params.keys()]
        cover = [own[at] for at in picked]
        if self._domain.extrapolates and unpacked and not set(unpacked) & set(cover):
            cover += self.cover(unpacked, min(most, UNPACKED_KERNELS))
        splitting = [kernel for kernel in unpacked if "combine" in kernel.config.params]
        if self._domain.extrapolates and splitting and not set(splitting) & set(cover):
            cover += [k for k in self.cover(splitting, 1) if k not in cover]
        return cover

    def margin(
        self, own: Sequence[KernelTimes], vendors: Sequence[KernelTimes]
    ) -> tuple[float, Regret]:
        """The margin with the least cost of choices, or that of models' calls; and its regret."""
        allowed = margins(self._domain, self._gpu) or MARGINS
        tried = [(self._regret(own, vendors, margin), margin) for margin in allowed]
        (_, regret), margin = min(tried, key=lambda t: t[0][0])
        return margin, regret

    def _regret(
        self, own: Sequence[KernelTimes], vendors: Sequence[KernelTimes], margin: float
    ) -> tuple[float, Regret]:
        """Mean cost and regret of the choices at problems where both an own kernel and a vendor's
        were measured; at all with an own kernel where no vendor's takes such calls.
        """
        losses, ratios, owns = [], [], 0
        for rows in self._rows.values():
            mine = [row for row in rows if row.kernel in own and self._is_offered(row)]
            theirs = [row for row in rows if row.kernel in vendors]
            if not mine or (vendors and not theirs):
                continue
            doubts = {row: 1 + margin * self._error(row.kernel, 0.9) for row in mine}
            first = min(mine, key=lambda row: row.expected * doubts[row])
            named = {str(row.kernel.config["kernel"]): row for row in theirs}
            at = first
            if named:
                vendor = named[preferred({name: row.expected for name, row in named.items()})]
                if vendor.expected < first.expected * doubts[first]:
                    at = vendor
                ratios.append(min(row.us for row in theirs) / at.us)
            owns += at is first
            losses.append(at.us / min(row.us for row in rows) - 1)
        count = len(losses)
        if not count:
            return 0.0, Regret(0, 0.0, 0.0, 1.0, 1.0, 1.0)
        ratios = ratios or [1.0]
        geometric = math.exp(fmean(map(math.log, ratios)))
        slower = [min(MAX_LOSS, max(0.0, 1 / ratio - 1)) for ratio in ratios]
        cost = fmean(min(MAX_LOSS, loss) for loss in losses) + SLOWER_COSTS * fmean(slower)
        regret = Regret(count, fmean(losses), max(losses), geometric, min(ratios), owns / count)
        return cost, regret

    def _is_offered(self, row: _Expected) -> bool:
        """True if a selection would consider the measured schedule."""
        problem, config = row.point.problem, row.point.config
        offered = families()[config.family].scheduled(problem, row.kernel.config, self._gpu)
        return config in offered

    def _left_out(
        self, kernel: KernelTimes, base: KernelTimes | None
    ) -> tuple[list[float], list[_Expected], KernelTimes | None]:
        """Errors in ascending order at all points of a kernel, and its own points with the times
        expected by fits to the other models' points.
        """
        groups = sorted(set(kernel.groups))
        fold = {group: number % FOLDS for number, group in enumerate(groups)}
        folds = [fold[group] for group in kernel.groups]
        expectations = []
        for number in sorted(set(folds)):
            out = {group for group in groups if fold[group] == number}
            rates = self._fits.rates(kernel, base, out)
            for of, point in zip(folds, kernel.points, strict=True):
                if of == number:
                    expected = self._expected(point.problem, point.config, rates)
                    expectations.append(_Expected(kernel, point, expected))
        errors = sorted(abs(row.expected / row.us - 1) for row in expectations)
        return errors, [row for row in expectations if kernel.is_own(row.point)], base

    def _table(self, own: Sequence[KernelTimes]) -> list[list[float]]:
        """Times in microseconds, a row for each kernel and a column for each problem.

        A time is measured, or expected and then longer by the 90th percentile of the kernel's
        error. It is infinite for a problem that the kernel cannot serve.
        """
        problems = self._problems(own)
        table = []
        for kernel in own:
            rates, doubt = self._fits.chosen(kernel), 1 + self._error(kernel, 0.9)
            rows = {
                key: min((row.us for row in self._rows[key] if row.kernel is kernel), default=0.0)
                for key in problems
            }
            table.append(
                [
                    rows[key] or self._expected_of(kernel, problem, rates) * doubt
                    for key, problem in problems.items()
                ]
            )
        return table

    def _problems(self, own: Sequence[KernelTimes]) -> dict[str, Problem]:
        """Problems that one of some kernels was measured at."""
        return {
            key: rows[0].point.problem
            for key, rows in self._rows.items()
            if any(row.kernel in own for row in rows)
        }

    def _vendors_times(self, own: Sequence[KernelTimes]) -> list[float]:
        """PyTorch's measured times at `_problems`; infinite where it has none, and where own
        kernels are chosen even far from measured sizes.
        """
        if self._domain.extrapolates:
            return [math.inf] * len(self._problems(own))
        vendors = self._domain.vendors
        return [
            min(
                (r.us for r in self._rows[key] if r.kernel.config.get("kernel") in vendors),
                default=math.inf,
            )
            for key in self._problems(own)
        ]

    def _expected(self, problem: Problem, config: Config, rates: Sequence[float]) -> float:
        work = families()[config.family].work(problem, config, self._gpu)
        floor = floor_us(sizes_of(problem), self._gpu, self._is_cold)
        return max(sum(map(mul, rates, work), 0.0), floor or 0.0)

    def _expected_of(self, kernel: KernelTimes, problem: Problem, rates: Sequence[float]) -> float:
        if not kernel.spread.holds(self._domain.sizes(problem), self._domain):
            return math.inf
        family = families()[kernel.config.family]
        times = (
            self._expected(problem, config, rates)
            for config in family.scheduled(problem, kernel.config, self._gpu)
            if family.accepts(problem, config, self._gpu)
        )
        return min(times, default=math.inf)


def _mean_loss(times: Sequence[float], best: Sequence[float]) -> float:
    """Mean loss against the best times; a loss is at most 1, which also stands for a missing
    kernel.
    """
    return fmean(min(1.0, us / least - 1) for us, least in zip(times, best, strict=True))
