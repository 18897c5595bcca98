"""Fit of the rates of a time model: microseconds for each amount of work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

from tuner.base.install import extra_command
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families
from tuner.families.attention_work import MASK_TERMS
from tuner.families.by_operation import AnyDomain
from tuner.hardware import Gpu
from tuner.search.timed import KernelTimes, Point, is_vendor

PRIOR_WEIGHTS = {"attention": 0.3, "gemm": 3.0, "swiglu": 3.0}
"""Weight, in measurements, of the domain's common rates in the fit of one kernel, by operation. A
product's kernel has few measurements far from its best sizes. There rates of its own miss by far
(3 in place of 0.3: half the root mean square error at models left out, an equal median)."""
ADDED_TERMS = frozenset({"launch", "waves", "rounds", "tiles", "output", "shallow_output"})
"""Work that an activation may add to: a launch of its own, ends of tiles, bytes of the output."""


_Kind = tuple[str, frozenset[str]]
"""A family, and those of `Family.rated_apart` that a kernel has."""


class Fits:
    """Rates of a domain's kernels. With an activation they may be those of the plain product and
    what the activation adds, if these are nearer at models left out.

    Args:
        domain: domain of the kernels.
        kernels: kernels measured in it.
        gpu: GPU of the measurements.
        plain: kernels measured without the domain's activation.
    """

    def __init__(
        self,
        domain: AnyDomain,
        kernels: Sequence[KernelTimes],
        gpu: Gpu,
        plain: Sequence[KernelTimes],
    ) -> None:
        self._domain, self._gpu, self._without = domain, gpu, plain
        self._plain = Fits(domain, plain, gpu, ()) if plain else None
        self._own: dict[_Kind, list[Point]] = defaultdict(list)
        """Points of own kernels, by kind."""
        for kernel in kernels:
            if not is_vendor(kernel.config):
                self._own[_kind(kernel)] += filter(kernel.is_own, kernel.points)
        self._priors: dict[tuple[_Kind, frozenset[tuple[int, ...]]], list[float]] = {}
        self.bases: dict[Config, KernelTimes | None] = {}
        """The kernel of the plain product that a kernel's rates are made from; None: from its own
        points alone."""

    def bases_of(self, kernel: KernelTimes) -> list[KernelTimes | None]:
        """Kernels whose rates a kernel's fit may start from; None: none."""
        return [None, *(one for one in self._without if _is_plain_of(one, kernel))]

    def chosen(self, kernel: KernelTimes) -> list[float]:
        """Rates fitted to all points, from the chosen base."""
        return self.rates(kernel, self.bases[kernel.config])

    def rates(
        self, kernel: KernelTimes, base: KernelTimes | None, held: Collection[tuple[int, ...]] = ()
    ) -> list[float]:
        """Rates fitted to a kernel's points, without some models' problems.

        With a base they are its rates and what the activation adds. Otherwise the common rates of
        the kind's kernels in the domain are the prior.
        """
        out, group = frozenset(held), self._domain.group
        points = [p for p in kernel.points if group(p.problem) not in out]
        if base is not None and self._plain is not None:
            return added(points, self._gpu, self._plain.rates(base, None, held))
        key, prior = (_kind(kernel), out), None
        if not is_vendor(kernel.config):
            if key not in self._priors:
                every = [p for p in self._own[key[0]] if group(p.problem) not in out]
                self._priors[key] = fitted(every, self._gpu)
            prior = self._priors[key]
        return fitted(points, self._gpu, prior)


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
    amounts *= [term not in MASK_TERMS for term in family.work_terms]
    relative = amounts / np.array([[p.us] for p in points])
    targets = np.ones(len(points))
    if prior is not None:
        weight = PRIOR_WEIGHTS[points[0].problem.op]
        weights = math.sqrt(weight) * relative.mean(axis=0)
        relative = np.vstack([relative, np.diag(weights)])
        targets = np.concatenate([targets, weights * np.array(prior)])
    rates, _ = nnls(relative, targets, maxiter=100 * amounts.shape[1])
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


def _kind(kernel: KernelTimes) -> _Kind:
    name = kernel.config.family
    return name, families()[name].rated_apart.intersection(kernel.config.params)


def _is_plain_of(plain: KernelTimes, kernel: KernelTimes) -> bool:
    """True if a kernel of the plain product is the other one without its activation; PyTorch's
    have other names then.
    """
    if is_vendor(kernel.config):
        return all(one.config.get("kernel") in one.domain.vendors for one in (plain, kernel))
    return plain.config == kernel.config
