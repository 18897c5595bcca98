"""Latent attention of shapes that nobody tuned: a kernel of either type, and of each form of a
quantised cache.

Sizes and lengths are arguments of a launch, so a proven kernel serves any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import get_args

from tuner.config import Config
from tuner.families.mla_decode import LATENT, MlaDecode
from tuner.families.rule import RuleSelection
from tuner.families.target import DTYPES, Target
from tuner.hardware import Gpu
from tuner.measurement import Regime
from tuner.problem import AttentionProblem
from tuner.problem.attention_masks import Cache

_FAMILY = MlaDecode()
KERNELS: Sequence[Config] = (Config(_FAMILY.name, {"whole_rows": False, "cluster": 1}),)
"""The kernels, for each type and cache. On an H200 the family's others were as fast within 2 %."""
CACHES: Sequence[Cache] = get_args(Cache)[1:]
"""Forms of quantised caches, of bf16 queries."""


def serves(problem: AttentionProblem, gpu: Gpu) -> bool:
    """True for latent attention that the family's kernels take."""
    return not _FAMILY.supports(problem, gpu)


def select(problem: AttentionProblem, gpu: Gpu) -> RuleSelection | None:
    """The kernels that take a problem, of the least expected time first; None without any."""
    called = [_FAMILY.called(problem, config, 1) for config in KERNELS]
    expected = sorted(
        (_FAMILY.predict_us(problem, config, gpu), index, config)
        for index, config in enumerate(called)
        if _FAMILY.accepts(problem, config, gpu)
    )
    doubts = ("chosen by the rule of latent attention",)
    timed = tuple((us, config) for us, _, config in expected)
    return RuleSelection(timed, Regime.default(problem.op), doubts) if timed else None


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    small = AttentionProblem.parse(f"SQ=1,SKV=512,H=128,{LATENT},page_size=64")
    typed = [(replace(small, dtype=dtype), "latent") for dtype in DTYPES]
    caches = [(replace(typed[-1][0], cache=form), f"latent {form}") for form in CACHES]
    return tuple(
        Target(_FAMILY.called(small, config, 1), problem, place)
        for problem, place in (*typed, *caches)
        for config in KERNELS
    )
