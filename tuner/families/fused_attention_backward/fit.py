"""Fit of the rule's `COSTS` to timed gradients of attention.

A row has the problem and the microseconds of each kernel by name, as in ``tuner own``, ``flash3``
or, of its deterministic mode, ``flash3, deterministic``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple, cast

from tuner.families.attention_instances import instance
from tuner.families.fitting import Constants, FitGroup
from tuner.families.fused_attention_backward.rule import COSTS, BackwardCost, work
from tuner.hardware import Gpu
from tuner.problem import AttentionBackwardProblem, problem_from_json

FIXED_US = {name: COSTS[name, False].start_us for name in ("cudnn", "flash2")}
"""Fixed times of PyTorch's kernels, which the fit keeps. They were fitted to smaller problems on
an H100: (1,16,128,32) took 12.8 and 10.3 us.
"""
STARTS_US = tuple(n / 2 for n in range(41))
"""Fixed times that a fit chooses from."""
RATES_GBS = range(1000, 4001, 250)


class TimedGradients(NamedTuple):
    """A kernel's time for one problem."""

    instance: str
    """Columns and mask."""
    flops: float
    moved: float
    """FLOPs and bytes, in millions."""
    us: float

    def away(self, constants: Constants) -> float:
        """Expected time over the measured one, less one."""
        fixed_us = constants["us"] + 1e3 * self.moved / constants["GB/s"]
        return (fixed_us + self.flops / constants[self.instance]) / self.us - 1


def fitted(times: Sequence[TimedGradients], starts: Sequence[float] = STARTS_US) -> Constants:
    """Least squares of relative errors, over a grid of fixed times and rates of bytes."""
    grid = itertools.product(starts, RATES_GBS)
    fits = (_at(times, start_us, float(gbs)) for start_us, gbs in grid)
    return min(fits, key=lambda fit: sum(t.away(fit) ** 2 for t in times))


def _at(times: Sequence[TimedGradients], start_us: float, gbs: float) -> Constants:
    """The rates of products that are best with a fixed time and a rate of bytes."""
    constants = {"us": start_us, "GB/s": gbs}
    for name in sorted({t.instance for t in times}):
        mine = [t for t in times if t.instance == name]
        share = [t.flops / t.us for t in mine]
        gap = [(start_us + 1e3 * t.moved / gbs) / t.us - 1 for t in mine]
        slowness = -fmean(map(float.__mul__, share, gap)) / fmean(s * s for s in share)
        constants[name] = 1 / max(slowness, 1e-6)
    return constants


def _name(columns: int, is_causal: bool) -> str:
    return f"TFLOP/s D={columns} {'causal' if is_causal else 'full'}"


def _shipped(cost: BackwardCost) -> Constants:
    rates = {_name(*key): rate for key, rate in cost.tflops.items()}
    return {"us": cost.start_us, "GB/s": cost.gbs, **rates}


def groups(rows: Sequence[Mapping[str, Any]], gpu: Gpu) -> Iterator[FitGroup]:
    """The costs of all kernels that the rows time."""
    times: dict[tuple[str, bool], list[TimedGradients]] = {}
    for row in rows:
        problem = cast(AttentionBackwardProblem, problem_from_json(row["problem"]))
        name = _name(instance(problem.head_dim), problem.is_causal)
        for contender, us in row["us"].items():
            kernel = contender.split(",")[0], "," in contender
            if kernel in COSTS:
                flops, moved = (amount / 1e6 for amount in work(kernel[0], problem, gpu))
                timed = TimedGradients(name, flops, moved, us)
                times.setdefault(kernel, []).append(timed)
    for (name, is_deterministic), mine in sorted(times.items()):
        starts = (FIXED_US[name],) if name in FIXED_US else STARTS_US
        yield FitGroup(
            name + " deterministic" * is_deterministic,
            mine,
            _shipped(COSTS[name, is_deterministic]),
            partial(fitted, starts=starts),
            lambda one, constants: abs(one.away(constants)),
        )
