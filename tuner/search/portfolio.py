"""Fit of portfolios (`tuner.selection.portfolio`) to measurements.

1. Each kernel with enough measurements in a domain gets a time model: non-negative least squares of
   relative errors over `Family.work`.
2. Greedy set cover chooses the kernels: one more joins while the mean loss against each problem's
   best known time falls.
3. The regret is computed with *models left out*. Problems of one model (equal heads and head
   dimension, or a layer's widths) are answered by rates fitted to the other models.

The regret is optimistic. Kernels and margin are chosen with all problems, and a choice is judged
only among the kernels and schedules measured at a problem.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from statistics import fmean

from tuner.base.install import extra_command
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.fused_attention.packing import PACKING
from tuner.families.work import floor_us, sizes_of
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import Problem
from tuner.selection.candidates import Candidate, DomainModels, Regret, Spread
from tuner.selection.domains import AnyDomain, Domain
from tuner.selection.portfolio import Portfolio, preferred, shipped
from tuner.store import Store

MIN_POINTS = 6
"""Fewest measurements of a kernel that a time model is fitted to."""
PRIOR_WEIGHTS = {"attention": 0.3, "gemm": 3.0, "swiglu": 3.0}
"""Weight, in measurements, of the domain's common rates in the fit of one kernel, by operation. A
product's kernel has few measurements far from its best sizes. There rates of its own miss by far
(3 in place of 0.3: half the root mean square error at models left out, an equal median)."""
MIN_GROUPS = 3
"""Fewest models (`Domain.group`) with measurements of a kernel: rates from one model's shapes do
not hold for another's."""
MAX_MEDIAN_ERROR = 0.12
"""Largest median error, at models left out, of a kernel that may be chosen."""
MIN_GAIN = 0.001
"""Least decrease of a domain's mean loss that one more kernel must bring."""
ORIGIN_FACTS = frozenset({"driver", "cuda", "torch", "cudnn", "nvcc"})
"""Facts of the measuring machines that a portfolio records."""
ADDED_TERMS = frozenset({"launch", "waves", "rounds", "tiles", "output"})
"""Work that an activation may add to: a launch of its own, ends of tiles, bytes of the output."""
FOLDS = 8
UNPACKED_KERNELS = 3
"""Most compiled kernels that do not pack heads beside chosen ones that all do."""
MARGINS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Margins to try (`DomainModels.margin`)."""
SLOWER_COSTS = 3.0
"""Weight of a loss against the vendor's kernel, added to the loss against the fastest kernel."""
MAX_LOSS = 0.25
"""Largest loss that one problem counts with in the choice of a margin. A problem that the models
miss by far says little about the others."""
SCHEDULE = frozenset({"splits", "layout"})
"""Parameters left to `Family.scheduled`, or to the vendor, rather than to a kernel's model."""
ORDER = frozenset({"raster_order", "max_swizzle_size"})
"""Parameters of the order of tiles. Kernels that differ in no other share their measurements: the
work counts the order."""


@dataclass(frozen=True)
class Point:
    """One measured time."""

    problem: Problem
    config: Config
    us: float


@dataclass(frozen=True, eq=False)
class _Row:
    """A point, and its expected time by rates without its model."""

    kernel: _Kernel
    point: Point
    expected: float

    @property
    def us(self) -> float:
        return self.point.us


@dataclass(frozen=True, eq=False)
class _Kernel:
    """Measurements of one kernel in one domain, and those that it takes from its kin."""

    domain: AnyDomain
    config: Config
    points: Sequence[Point]

    @cached_property
    def is_known(self) -> bool:
        """True if the measurements suffice for a time model."""
        return len(self.points) >= MIN_POINTS and len(set(self.groups)) >= MIN_GROUPS

    def is_own(self, point: Point) -> bool:
        """True for measurements of this kernel in this domain."""
        return Domain.of(point.problem) == self.domain and kernel_of(point.config) == self.config

    @cached_property
    def spread(self) -> Spread:
        return Spread.of(self.domain.sizes(point.problem) for point in self.points)

    @cached_property
    def groups(self) -> Sequence[tuple[int, ...]]:
        """`Domain.group` of each point."""
        return [self.domain.group(point.problem) for point in self.points]


def kernel_of(config: Config) -> Config:
    """The compiled kernel and its launch, without the parameters that depend on the shape."""
    params = {name: value for name, value in config.params.items() if name not in SCHEDULE}
    if params.get("packed_heads") == 1:
        del params["packed_heads"]
    return Config(config.family, params)


def points(measurements: Iterable[Measurement], gpu: Gpu) -> list[Point]:
    """Points of a fit: the quick pass if a problem has both passes, without numbers of splits that
    a selection never considers.

    Launches are hidden (`Family.overlapped`). A time without that counts where there is none with.
    """
    found: dict[tuple[str, str], Point] = {}
    exposed: dict[tuple[str, str], Point] = {}
    for m in sorted(measurements, key=lambda m: not m.is_final):
        family, problem = families().get(m.config.family), m.problem
        if family is None or not family.work_terms or m.config.stages:
            continue
        if not (m.ok and m.latency_us) or Domain.of(problem) is None:
            continue
        counts = family.splits(problem, m.config, gpu)
        if counts and m.config.get("splits", 1) <= max(1, *counts):
            config = family.overlapped(m.config)
            into = found if config == m.config else exposed
            into[problem.key, config.digest] = Point(problem, config, m.latency_us)
    return list({**exposed, **found}.values())


def measurements(op: str, gpu: Gpu, regime: Regime, store: Store) -> list[Measurement]:
    """Measurements of an operation in the store and in the shipped recordings."""
    from tuner.search.history import measured

    known = measured(op, gpu, regime, store, with_finals=True)
    return [m for rows in known.values() for m in rows]


def of_shipped(found: Iterable[Measurement]) -> list[Measurement]:
    """Measurements of vendors' kernels, and of own ones that a shipped portfolio has in the same
    domain.
    """

    def kernel(config: Config) -> str:
        return families()[config.family].compile_digest(kernel_of(config))

    known = {
        (domain, kernel(one.config))
        for portfolio in shipped()
        for domain, models in portfolio.domains.items()
        for one in models.candidates
        if one.family is not None and not one.is_vendor
    }
    return [
        m
        for m in found
        if m.config.family in families()
        and (_is_vendor(m.config) or (Domain.of(m.problem), kernel(m.config)) in known)
    ]


def make(
    op: str,
    measured: Mapping[Regime, Sequence[Measurement]],
    gpu: Gpu,
    only: Collection[str] = (),
    kernels: int | None = None,
) -> Portfolio:
    """Fit the portfolio of an operation on a GPU.

    Args:
        op: operation.
        measured: measurements by regime. A domain uses those in a stream if they suffice for time
            models of its kernels, else the regime with most of its problems.
        gpu: GPU of the measurements.
        only: texts that a domain's name must hold, all of them.
        kernels: most compiled kernels of a domain; None: `Domain.max_kernels`.

    Raises:
        ConfigError: when no domain has enough measurements, or scipy is not installed.
    """
    by_domain: dict[AnyDomain, dict[Regime, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for regime, rows in measured.items():
        for point in points(rows, gpu):
            domain = Domain.of(point.problem)
            if domain is not None:
                by_domain[domain][regime].append(point)
    made: dict[AnyDomain, DomainModels] = {}
    for domain, regimes in sorted(by_domain.items()):
        if not _is_named(domain, only):
            continue
        by_use = sorted(
            regimes, key=lambda one: (one.launch != "stream", -len(regimes[one]), str(one))
        )
        for regime in by_use:
            found = pooled(domain, regime, by_domain)
            others = [p for kin in domain.of_times for p in by_domain.get(kin, {}).get(regime, ())]
            without = domain.without_activation
            plain = [] if without is None else pooled(without, regime, by_domain)
            models = _models(domain, regime, found, others, plain, gpu, kernels)
            if models is not None:
                made[domain] = models
                break
    if not made:
        named = f" with {', '.join(only)} in its name" if only else ""
        raise ConfigError(
            f"no domain{named} has a kernel with {MIN_POINTS} measurements on {gpu.name}: "
            "tuner sweep measures them"
        )
    used = [[m for m in rows if Domain.of(m.problem) in made] for rows in measured.values()]
    return Portfolio(op, gpu, made, _origin(used))


def _is_named(domain: AnyDomain, only: Collection[str]) -> bool:
    return all(text in domain.label() for text in only)


def pooled(
    domain: AnyDomain,
    regime: Regime,
    by_domain: Mapping[AnyDomain, Mapping[Regime, Sequence[Point]]],
) -> list[Point]:
    """The points of a domain, and those of the domains whose calls take the same time
    (`Domain.alike`), as if they were measured in it.
    """
    found: list[Point] = []
    for other in domain.alike:
        rows = by_domain.get(other, {}).get(regime, ())
        found += rows if other == domain else (_moved(one, other, domain) for one in rows)
    return found


def _moved(point: Point, old: AnyDomain, new: AnyDomain) -> Point:
    """A point as if it was measured in another domain, where PyTorch's kernel has another name."""
    config = point.config
    if config.get("kernel") in old.vendors:
        config = Config(config.family, {**config.params, "kernel": min(new.vendors)})
    return Point(new.moved(point.problem), config, point.us)


def _origin(measured: Iterable[Sequence[Measurement]]) -> dict[str, list[str]]:
    """First and last day of the measurements, and the values of each fact of their machines."""
    rows = [m for group in measured for m in group]
    days = sorted(m.created_at[:10] for m in rows if m.created_at)
    facts: dict[str, set[str]] = defaultdict(set)
    for environment in {m.environment.digest: m.environment for m in rows}.values():
        for name in ORIGIN_FACTS & environment.facts.keys():
            facts[name].add(str(environment.facts[name]))
    found = {name: sorted(values) for name, values in sorted(facts.items())}
    return {"days": [days[0], days[-1]] if days else [], **found}


def _kernels(
    domain: AnyDomain, found: Sequence[Point], others: Sequence[Point] = ()
) -> list[_Kernel]:
    """The kernels with enough measurements among a domain's, and among `others`."""
    by_kernel, elsewhere = _by_kernel(found), _by_kernel(others)
    ordered: dict[Config, list[Point]] = defaultdict(list)
    for config, rows in by_kernel.items():
        ordered[_without(config, ORDER)] += rows
    unpacked: dict[Config, list[Point]] = defaultdict(list)
    for config, rows in (*by_kernel.items(), *elsewhere.items()) if others else ():
        unpacked[_unpacked(config)] += rows
    kernels: list[_Kernel] = []
    for config in sorted(by_kernel, key=lambda config: config.digest):
        padding = Config(config.family, {**config.params, "pads_heads": True})
        if padding != config and padding in by_kernel:
            continue  # the kernel that pads heads takes the same calls in the same time
        rows = ordered[_without(config, ORDER)]
        pools = rows, [*rows, *elsewhere.get(config, ())], unpacked[_unpacked(config)]
        for enough in pools[-1:] if "pads_heads" in config.params else pools:
            if (kernel := _Kernel(domain, config, enough)).is_known:
                kernels.append(kernel)
                break
    return kernels


def _models(
    domain: AnyDomain,
    regime: Regime,
    found: Sequence[Point],
    others: Sequence[Point],
    plain: Sequence[Point],
    gpu: Gpu,
    most: int | None,
) -> DomainModels | None:
    """Candidates of a domain; None with too few measurements.

    Args:
        domain: the domain.
        regime: regime of the measurements.
        found: measurements of the domain.
        others: measurements of domains whose times follow the same rates. Kernels take them that
            have too few of their own.
        plain: measurements without the domain's activation.
        gpu: GPU of the measurements.
        most: most compiled kernels.
    """
    kernels = _kernels(domain, found, others)
    own = [kernel for kernel in kernels if not _is_vendor(kernel.config)]
    if not own:
        return None
    without = domain.without_activation
    judge = _Judge(domain, regime, kernels, gpu, _kernels(without, plain) if without else ())
    count = domain.max_kernels if most is None else min(most, domain.max_kernels)
    chosen = judge.cover([kernel for kernel in own if judge.is_known(kernel)], count)
    if not chosen:
        return None
    vendors = [k for k in kernels if k.config.get("kernel") in domain.vendors]
    margin, regret = judge.margin(chosen, vendors)
    candidates = [judge.candidate(kernel) for kernel in (*chosen, *vendors)]
    return DomainModels(domain, regime, candidates, margin, regret)


def _by_kernel(found: Iterable[Point]) -> dict[Config, list[Point]]:
    by_kernel: dict[Config, list[Point]] = defaultdict(list)
    for point in found:
        by_kernel[kernel_of(point.config)].append(point)
    return by_kernel


def _unpacked(config: Config) -> Config:
    """The config whatever heads it packs: work is counted with them."""
    return _without(config, PACKING)


def _without(config: Config, names: Collection[str]) -> Config:
    """The config without some parameters."""
    params = {name: value for name, value in config.params.items() if name not in names}
    return Config(config.family, params)


class _Fits:
    """Rates of a domain's kernels. With an activation they may be those of the plain product and
    what the activation adds, if these are nearer at models left out.

    Args:
        domain: domain of the kernels.
        kernels: kernels measured in it.
        gpu: GPU of the measurements.
        plain: kernels measured without the domain's activation.
    """

    def __init__(
        self, domain: AnyDomain, kernels: Sequence[_Kernel], gpu: Gpu, plain: Sequence[_Kernel]
    ) -> None:
        self._domain, self._gpu, self._without = domain, gpu, plain
        self._plain = _Fits(domain, plain, gpu, ()) if plain else None
        self._own: dict[str, list[Point]] = defaultdict(list)
        """Points of own kernels, by family."""
        for kernel in kernels:
            if not _is_vendor(kernel.config):
                self._own[kernel.config.family] += filter(kernel.is_own, kernel.points)
        self._priors: dict[tuple[str, frozenset[tuple[int, ...]]], list[float]] = {}
        self.bases: dict[Config, _Kernel | None] = {}
        """The kernel of the plain product that a kernel's rates are made from; None: from its own
        points alone."""

    def bases_of(self, kernel: _Kernel) -> list[_Kernel | None]:
        """Kernels whose rates a kernel's fit may start from; None: none."""
        return [None, *(one for one in self._without if _is_plain_of(one, kernel))]

    def chosen(self, kernel: _Kernel) -> list[float]:
        """Rates fitted to all points, from the chosen base."""
        return self.rates(kernel, self.bases[kernel.config])

    def rates(
        self, kernel: _Kernel, base: _Kernel | None, held: Collection[tuple[int, ...]] = ()
    ) -> list[float]:
        """Rates fitted to a kernel's points, without some models' problems.

        With a base they are its rates and what the activation adds. Otherwise the common rates of
        the family's own kernels in the domain are the prior.
        """
        out, group = frozenset(held), self._domain.group
        rest = [p for p in kernel.points if group(p.problem) not in out]
        if base is not None and self._plain is not None:
            return added(rest, self._gpu, self._plain.rates(base, None, held))
        key, prior = (kernel.config.family, out), None
        if not _is_vendor(kernel.config):
            if key not in self._priors:
                every = [p for p in self._own[key[0]] if group(p.problem) not in out]
                self._priors[key] = fitted(every, self._gpu)
            prior = self._priors[key]
        return fitted(rest, self._gpu, prior)


class _Judge:
    """Times of a domain's kernels: measured, and expected by rates fitted to other models."""

    def __init__(
        self,
        domain: AnyDomain,
        regime: Regime,
        kernels: Sequence[_Kernel],
        gpu: Gpu,
        plain: Sequence[_Kernel] = (),
    ) -> None:
        """Args: domain; regime: of the measurements; kernels: measured in it; gpu; plain: measured
        without its activation.
        """
        self._domain, self._is_cold, self._gpu = domain, regime.l2 == "cold", gpu
        self._fits = _Fits(domain, kernels, gpu, plain)
        self._rows: dict[str, list[_Row]] = defaultdict(list)
        self._errors: dict[Config, list[float]] = {}
        for kernel in kernels:
            found = [self._left_out(kernel, base) for base in self._fits.bases_of(kernel)]
            errors, rows, base = min(found, key=lambda one: one[0][len(one[0]) // 2])
            self._fits.bases[kernel.config] = base
            self._errors[kernel.config] = errors
            for row in rows:
                self._rows[row.point.problem.key].append(row)

    def is_known(self, kernel: _Kernel) -> bool:
        """True if a kernel's expected times are near the measured ones."""
        return self._error(kernel, 0.5) <= MAX_MEDIAN_ERROR

    def _error(self, kernel: _Kernel, quantile: float) -> float:
        errors = self._errors[kernel.config]
        return errors[int(quantile * len(errors))]

    def candidate(self, kernel: _Kernel) -> Candidate:
        """The kernel with rates that are fitted to all of its points."""
        terms = families()[kernel.config.family].work_terms
        rates = dict(zip(terms, self._fits.chosen(kernel), strict=True))
        errors = self._error(kernel, 0.5), self._error(kernel, 0.9)
        return Candidate(kernel.config, rates, len(kernel.points), *errors, kernel.spread)

    def cover(self, own: Sequence[_Kernel], most: int) -> list[_Kernel]:
        """Few kernels with a small loss against each problem's fastest own kernel; of products
        against the fastest of all, since PyTorch's answers where no chosen one is faster.

        If all kernels of attention pack heads, some that do not join: they take any ratio of heads.
        """
        table = self._table(own)
        reached = self._vendors_times(own)
        best = [min(column) for column in zip(reached, *table, strict=True)]
        chosen: list[int] = []
        loss = _mean_loss(reached, best)
        compiled = [families()[k.config.family].compile_digest(k.config) for k in own]
        while True:
            taken, tried = {compiled[at] for at in chosen}, []
            for at in set(range(len(own))) - set(chosen):
                if len(taken) == most and compiled[at] not in taken:
                    continue
                times = [min(pair) for pair in zip(reached, table[at], strict=True)]
                tried.append((_mean_loss(times, best), own[at].config.digest, at, times))
            if not tried:
                break
            least, _, at, times = min(tried)
            if chosen and loss - least < MIN_GAIN:
                break
            chosen.append(at)
            reached, loss = times, least
        unpacked = [kernel for kernel in own if not PACKING & kernel.config.params.keys()]
        found = [own[at] for at in chosen]
        if self._domain.reaches_far and unpacked and not set(unpacked) & set(found):
            found += self.cover(unpacked, min(most, UNPACKED_KERNELS))
        return found

    def margin(self, own: Sequence[_Kernel], vendors: Sequence[_Kernel]) -> tuple[float, Regret]:
        """The margin with the least cost of choices, and its regret."""
        tried = [(self._regret(own, vendors, margin), margin) for margin in MARGINS]
        (_, regret), margin = min(tried, key=lambda one: one[0][0])
        return margin, regret

    def _regret(
        self, own: Sequence[_Kernel], vendors: Sequence[_Kernel], margin: float
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
            chosen = first
            if named:
                vendor = named[preferred({name: row.expected for name, row in named.items()})]
                if vendor.expected < first.expected * doubts[first]:
                    chosen = vendor
                ratios.append(min(row.us for row in theirs) / chosen.us)
            owns += chosen is first
            losses.append(chosen.us / min(row.us for row in rows) - 1)
        count = len(losses)
        if not count:
            return 0.0, Regret(0, 0.0, 0.0, 1.0, 1.0, 1.0)
        ratios = ratios or [1.0]
        geometric = math.exp(fmean(map(math.log, ratios)))
        slower = [min(MAX_LOSS, max(0.0, 1 / ratio - 1)) for ratio in ratios]
        cost = fmean(min(MAX_LOSS, loss) for loss in losses) + SLOWER_COSTS * fmean(slower)
        found = Regret(count, fmean(losses), max(losses), geometric, min(ratios), owns / count)
        return cost, found

    def _is_offered(self, row: _Row) -> bool:
        """True if a selection would consider the measured schedule."""
        problem, config = row.point.problem, row.point.config
        offered = families()[config.family].scheduled(problem, row.kernel.config, self._gpu)
        return config in offered

    def _left_out(
        self, kernel: _Kernel, base: _Kernel | None
    ) -> tuple[list[float], list[_Row], _Kernel | None]:
        """Errors in ascending order, and each point of a kernel with the time expected by a fit to
        the other models' points.
        """
        groups = sorted(set(kernel.groups))
        fold = {group: number % FOLDS for number, group in enumerate(groups)}
        folds = [fold[group] for group in kernel.groups]
        found = []
        for number in sorted(set(folds)):
            held = {group for group in groups if fold[group] == number}
            rates = self._fits.rates(kernel, base, held)
            for of, point in zip(folds, kernel.points, strict=True):
                if of == number:
                    expected = self._expected(point.problem, point.config, rates)
                    found.append(_Row(kernel, point, expected))
        found = [row for row in found if kernel.is_own(row.point)]
        return sorted(abs(row.expected / row.us - 1) for row in found), found, base

    def _table(self, own: Sequence[_Kernel]) -> list[list[float]]:
        """Times in microseconds, a row for each kernel and a column for each problem.

        A time is measured, or expected and then longer by the 90th percentile of the kernel's
        error. It is infinite for a problem that the kernel cannot serve.
        """
        problems = self._problems(own)
        table = []
        for kernel in own:
            rates, doubt = self._fits.chosen(kernel), 1 + self._error(kernel, 0.9)
            known = {
                key: min((row.us for row in self._rows[key] if row.kernel is kernel), default=0.0)
                for key in problems
            }
            table.append(
                [
                    known[key] or self._expected_of(kernel, problem, rates) * doubt
                    for key, problem in problems.items()
                ]
            )
        return table

    def _problems(self, own: Sequence[_Kernel]) -> dict[str, Problem]:
        """Problems that one of some kernels was measured at."""
        return {
            key: rows[0].point.problem
            for key, rows in self._rows.items()
            if any(row.kernel in own for row in rows)
        }

    def _vendors_times(self, own: Sequence[_Kernel]) -> list[float]:
        """PyTorch's measured times at `_problems`; infinite where it has none, and where own
        kernels are chosen even far from measured sizes.
        """
        if self._domain.reaches_far:
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

    def _expected_of(self, kernel: _Kernel, problem: Problem, rates: Sequence[float]) -> float:
        if not kernel.spread.holds(self._domain.sizes(problem), self._domain):
            return math.inf
        family = families()[kernel.config.family]
        times = (
            self._expected(problem, config, rates)
            for config in family.scheduled(problem, kernel.config, self._gpu)
            if family.accepts(problem, config, self._gpu)
        )
        return min(times, default=math.inf)


def fitted(points: Sequence[Point], gpu: Gpu, prior: Sequence[float] | None = None) -> list[float]:
    """Non-negative microseconds of each work term, with the least squared relative error.

    Args:
        points: measured times.
        gpu: GPU of the measurements.
        prior: rates that the fit is regularised towards, each term by its share of the times.

    Raises:
        ConfigError: when scipy is not installed.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as exc:
        raise ConfigError(f"a portfolio needs scipy: {extra_command('fit')}") from exc
    import numpy as np

    family = families()[points[0].config.family]
    amounts = np.array([family.work(p.problem, p.config, gpu) for p in points])
    relative = amounts / np.array([[p.us] for p in points])
    wanted = np.ones(len(points))
    if prior is not None:
        weight = PRIOR_WEIGHTS[points[0].problem.op]
        weights = math.sqrt(weight) * relative.mean(axis=0)
        relative = np.vstack([relative, np.diag(weights)])
        wanted = np.concatenate([wanted, weights * np.array(prior)])
    rates, _ = nnls(relative, wanted, maxiter=100 * amounts.shape[1])
    return [float(rate) for rate in rates]


def added(points: Sequence[Point], gpu: Gpu, base: Sequence[float]) -> list[float]:
    """Rates of a plain product, and what an activation adds to some (`ADDED_TERMS`).

    Args:
        points: times measured with the activation.
        gpu: GPU of the measurements.
        base: rates without it.
    """
    import numpy as np
    from scipy.optimize import nnls

    family = families()[points[0].config.family]
    places = [place for place, term in enumerate(family.work_terms) if term in ADDED_TERMS]
    amounts = np.array([family.work(p.problem, p.config, gpu) for p in points])
    relative = amounts / np.array([[p.us] for p in points])
    more, _ = nnls(relative[:, places], 1 - relative @ np.array(base))
    rates = list(base)
    for place, rate in zip(places, more, strict=True):
        rates[place] += float(rate)
    return rates


def _is_plain_of(plain: _Kernel, kernel: _Kernel) -> bool:
    """True if a kernel of the plain product is the other one without its activation; PyTorch's
    have other names then.
    """
    if _is_vendor(kernel.config):
        return all(one.config.get("kernel") in one.domain.vendors for one in (plain, kernel))
    return plain.config == kernel.config


def _mean_loss(times: Sequence[float], best: Sequence[float]) -> float:
    """Mean loss against the best times; a loss is at most 1, which also stands for a missing
    kernel.
    """
    return fmean(min(1.0, us / least - 1) for us, least in zip(times, best, strict=True))


def _is_vendor(config: Config) -> bool:
    return families()[config.family].is_vendor
