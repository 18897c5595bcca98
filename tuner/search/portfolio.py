"""Fit of portfolios (`tuner.selection.portfolio`) to measurements.

1. Each kernel with enough measurements in a domain gets a time model: non-negative least squares of
   relative errors over `Family.work`.
2. Greedy set cover chooses the kernels: one more joins while the mean loss against each problem's
   best known time falls.
3. The regret is computed with *models left out*. Problems of one model (equal heads and head
   dimension, or a layer's widths) are answered by rates fitted to the other models.

The regret is optimistic. Kernels and margin are chosen with all problems, and a choice is judged
only among the kernels and schedules measured at a problem.

`timed.py` holds the measured times, `rates.py` step 1, `judge.py` steps 2 and 3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.by_operation import AnyDomain, domain_of
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.search.judge import Judge
from tuner.search.timed import MIN_POINTS, Point, is_vendor, kernel_of, points, timed_kernels
from tuner.selection.candidates import DomainModels
from tuner.selection.portfolio import Portfolio, shipped
from tuner.store import Store

ORIGIN_FACTS = frozenset({"driver", "cuda", "torch", "cudnn", "nvcc"})
"""Facts of the measuring machines that a portfolio records."""
MIN_TWINS = 6
"""Fewest pairs of measurements that differ in the epilogue only, for the time that it adds."""


def measurements(op: str, gpu: Gpu, regime: Regime, store: Store) -> list[Measurement]:
    """Measurements of an operation in the store and in the shipped recordings."""
    from tuner.search.history import measured

    quick = measured(op, gpu, regime, store, with_finals=True)
    return [m for rows in quick.values() for m in rows]


def of_shipped(measurements: Iterable[Measurement], gpu: Gpu | None = None) -> list[Measurement]:
    """Measurements of vendors' kernels, and of own ones that a shipped portfolio has in the same
    domain.

    Args:
        measurements: measurements.
        gpu: only portfolios that were made on this GPU; None: all.
    """

    def kernel(config: Config) -> str:
        return families()[config.family].compile_digest(kernel_of(config))

    kernels = {
        (domain, kernel(c.config))
        for portfolio in shipped()
        if gpu in (None, portfolio.gpu)
        for domain, models in portfolio.domains.items()
        for c in models.candidates
        if c.family is not None and not c.is_vendor
    }
    return [
        m
        for m in measurements
        if m.config.family in families()
        and (is_vendor(m.config) or (domain_of(m.problem), kernel(m.config)) in kernels)
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
            domain = domain_of(point.problem)
            if domain is not None and domain.is_fitted:
                by_domain[domain][regime].append(point)
    for domain, regimes in tuple(by_domain.items()):
        for alike in domain.filled:
            if alike not in by_domain:
                by_domain[alike] |= {regime: [] for regime in regimes}
    domains: dict[AnyDomain, DomainModels] = {}
    for domain, regimes in sorted(by_domain.items()):
        if not all(text in domain.label() for text in only):
            continue
        by_use = sorted(regimes, key=lambda r: (r.launch != "stream", -len(regimes[r]), str(r)))
        for regime in by_use:
            pool = pooled(domain, regime, by_domain)
            more = [p for d in domain.of_times for p in by_domain.get(d, {}).get(regime, ())]
            without = domain.without_activation
            plain = [] if without is None else pooled(without, regime, by_domain)
            models = _models(domain, regime, pool, more, plain, gpu, kernels)
            if models is not None:
                domains[domain] = models
                break
    if not domains:
        named = f" with {', '.join(only)} in its name" if only else ""
        raise ConfigError(
            f"no domain{named} has a kernel with {MIN_POINTS} measurements on {gpu.name}: "
            "tuner sweep measures them"
        )
    used = [[m for m in rows if domain_of(m.problem) in domains] for rows in measured.values()]
    return Portfolio(op, gpu, domains, _origin(used))


def pooled(
    domain: AnyDomain,
    regime: Regime,
    by_domain: Mapping[AnyDomain, Mapping[Regime, Sequence[Point]]],
) -> list[Point]:
    """The points of a domain, and those of its `Domain.alike` as if they were measured in it.

    A point of another domain gains what this one's epilogue adds: the median of a family's pairs.
    """
    here = by_domain.get(domain, {}).get(regime, ())
    times = {(p.problem.key, p.config): p.us for p in here}
    points = list(here)
    for other in domain.alike:
        if other == domain:
            continue
        moved = [(p, _moved(p, other, domain)) for p in by_domain.get(other, {}).get(regime, ())]
        gaps: dict[str, list[float]] = defaultdict(list)
        for old, new in moved:
            if (us := times.get((new.problem.key, new.config))) is not None:
                gaps[new.config.family].append(us - old.us)
        added = {name: median(g) for name, g in gaps.items() if len(g) >= MIN_TWINS}
        for old, new in moved:
            if (new.problem.key, new.config) not in times:
                us = max(old.us / 2, old.us + added.get(new.config.family, 0.0))
                points.append(Point(new.problem, new.config, us))
    return points


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
    facts_of = {name: sorted(values) for name, values in sorted(facts.items())}
    return {"days": [days[0], days[-1]] if days else [], **facts_of}


def _models(
    domain: AnyDomain,
    regime: Regime,
    timed: Sequence[Point],
    slower: Sequence[Point],
    plain: Sequence[Point],
    gpu: Gpu,
    most: int | None,
) -> DomainModels | None:
    """Candidates of a domain; None with too few measurements.

    Args:
        domain: the domain.
        regime: regime of the measurements.
        timed: measurements of the domain.
        slower: measurements of domains whose times follow the same rates. Kernels take them that
            have too few of their own.
        plain: measurements without the domain's activation.
        gpu: GPU of the measurements.
        most: most compiled kernels.
    """
    kernels = timed_kernels(domain, timed, slower)
    own = [kernel for kernel in kernels if not is_vendor(kernel.config)]
    if not own:
        return None
    without = domain.without_activation
    judge = Judge(domain, regime, kernels, gpu, timed_kernels(without, plain) if without else ())
    usable = [kernel for kernel in own if judge.is_known(kernel)]
    if not usable:
        return None
    count = domain.max_kernels if most is None else min(most, domain.max_kernels)
    picked = judge.cover(usable, count)
    rivals = frozenset() if domain.is_composed else domain.vendors
    vendors = [k for k in kernels if k.config.get("kernel") in rivals]
    margin, regret = judge.margin(picked, vendors)
    candidates = [judge.candidate(kernel) for kernel in (*picked, *vendors)]
    return DomainModels(domain, regime, candidates, margin, regret)
