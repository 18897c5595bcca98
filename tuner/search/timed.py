"""Measured times of a domain's kernels, which a portfolio's time models are fitted to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tuner.config import Config
from tuner.families import families
from tuner.families.attention_work import PACKING
from tuner.families.by_operation import AnyDomain, domain_of
from tuner.hardware import Gpu
from tuner.measurement import Measurement
from tuner.problem import Problem
from tuner.selection.candidates import Spread

MIN_POINTS = 6
"""Fewest measurements of a kernel that a time model is fitted to."""
MIN_GROUPS = 3
"""Fewest models (`Domain.group`) with measurements of a kernel: rates from one model's shapes do
not hold for another's."""
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
class KernelTimes:
    """Measurements of one kernel in one domain, and in those of the same rates (`of_times`)."""

    domain: AnyDomain
    config: Config
    points: Sequence[Point]

    @cached_property
    def is_known(self) -> bool:
        """True if the measurements suffice for a time model."""
        return len(self.points) >= MIN_POINTS and len(set(self.groups)) >= MIN_GROUPS

    def is_own(self, point: Point) -> bool:
        """True for measurements of this kernel in this domain."""
        return domain_of(point.problem) == self.domain and kernel_of(point.config) == self.config

    @cached_property
    def spread(self) -> Spread:
        return Spread.of(self.domain.sizes(point.problem) for point in self.points)

    @cached_property
    def groups(self) -> Sequence[tuple[int, ...]]:
        """`Domain.group` of each point."""
        return [self.domain.group(point.problem) for point in self.points]


def is_vendor(config: Config) -> bool:
    """True for a kernel of PyTorch or another vendor."""
    return families()[config.family].is_vendor


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
    points: dict[tuple[str, str], Point] = {}
    exposed: dict[tuple[str, str], Point] = {}
    for m in sorted(measurements, key=lambda m: not m.is_final):
        family, problem = families().get(m.config.family), m.problem
        if family is None or not family.work_terms or m.config.stages:
            continue
        if not (m.ok and m.latency_us) or domain_of(problem) is None:
            continue
        counts = family.splits(problem, m.config, gpu)
        if counts and m.config.get("splits", 1) <= max(1, *counts):
            config = family.overlapped(m.config)
            into = points if config == m.config else exposed
            into[problem.key, config.digest] = Point(problem, config, m.latency_us)
    return list({**exposed, **points}.values())


def timed_kernels(
    domain: AnyDomain, measurements: Sequence[Point], others: Sequence[Point] = ()
) -> list[KernelTimes]:
    """Kernels with enough measurements among those of a domain, and among `others`."""
    by_kernel, elsewhere = _by_kernel(measurements), _by_kernel(others)
    ordered: dict[Config, list[Point]] = defaultdict(list)
    for config, rows in by_kernel.items():
        ordered[_without(config, ORDER)] += rows
    unpacked: dict[Config, list[Point]] = defaultdict(list)
    for config, rows in (*by_kernel.items(), *elsewhere.items()) if others else ():
        unpacked[_unpacked(config)] += rows
    kernels: list[KernelTimes] = []
    for config in sorted(by_kernel, key=lambda config: config.digest):
        padding = Config(config.family, {**config.params, "pads_heads": True})
        if padding != config and padding in by_kernel:
            continue  # the kernel that pads heads takes the same calls in the same time
        rows = ordered[_without(config, ORDER)]
        pools = rows, [*rows, *elsewhere.get(config, ())], unpacked[_unpacked(config)]
        for enough in pools[-1:] if "pads_heads" in config.params else pools:
            if (kernel := KernelTimes(domain, config, enough)).is_known:
                kernels.append(kernel)
                break
    return kernels


def _by_kernel(points: Iterable[Point]) -> dict[Config, list[Point]]:
    by_kernel: dict[Config, list[Point]] = defaultdict(list)
    for point in points:
        by_kernel[kernel_of(point.config)].append(point)
    return by_kernel


def _unpacked(config: Config) -> Config:
    """The config without packed heads, which the amounts of work already count."""
    return _without(config, PACKING)


def _without(config: Config, names: Collection[str]) -> Config:
    """The config without some parameters."""
    params = {name: value for name, value in config.params.items() if name not in names}
    return Config(config.family, params)
