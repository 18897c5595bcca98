"""Kernels of plain attention that together have every value of every lever, for tests on a GPU."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

from tuner.config import Config
from tuner.families import family
from tuner.families.attention_instances import INSTANCES
from tuner.families.base import group_by_kernels
from tuner.families.target import DTYPES, Target
from tuner.families.trials import Trial, schedules
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem

#: Problems whose spaces together hold every lever: small and large, heads in groups of each size,
#: decoding.
PROBES = (
    "B=1,H=16,S=1024",
    "B=16,H=16,S=2048",
    "B=1,H=8,S=8192",
    "B=1,H=16,SQ=1,SKV=8192",
    "B=2,H=32,HKV=16,S=1024",
    "B=2,H=32,HKV=8,S=4096",
    "B=1,H=32,HKV=8,SQ=1,SKV=8192",
    "B=1,H=32,HKV=4,SQ=16,SKV=8192",
    "B=2,H=32,HKV=2,SQ=16,SKV=8192",
)
COMBINATIONS = [*product(INSTANCES, (False, True), DTYPES)]
"""Head dimension, causal, type."""


def combination_of(target: Target) -> tuple[int, bool, str]:
    problem = target.problem
    assert isinstance(problem, AttentionProblem)
    return problem.head_dim, problem.is_causal, problem.dtype


@cache
def covering(gpu: Gpu) -> tuple[Target, ...]:
    """A kernel of each combination or more: under each mask every value of every lever is in one.

    The one with the most values that no earlier kernel has comes first; among equals the one that a
    shuffle puts first.
    """
    member, shuffled = family("fused_attention"), random.Random(0)
    seen: set[object] = set()
    chosen: list[Target] = []

    def news(target: Target) -> set[object]:
        is_causal = combination_of(target)[1]
        names = target.config.params.keys() - member.runtime_parameters
        return {(is_causal, name, target.config[name]) for name in names} - seen

    for head_dim, is_causal, dtype in COMBINATIONS:
        pool = []
        for probe in PROBES:
            text = f"{probe},D={head_dim},causal={is_causal},dtype={dtype}"
            problem = AttentionProblem.parse(text)
            groups = group_by_kernels(member, member.space(problem, gpu))
            pool += [Target(group[0], problem) for group in groups]
        shuffled.shuffle(pool)
        while target := max(pool, key=lambda one: len(news(one))):
            if not news(target) and combination_of(target) in map(combination_of, chosen):
                break
            seen |= news(target)
            chosen.append(target)
    return tuple(chosen)


def called(target: Target, problem: Problem, gpu: Gpu) -> list[Config]:
    """Every legal call of a kernel for a problem, by all settings of its run-time parameters."""
    member = target.family
    names = target.config.params.keys() - member.runtime_parameters
    compiled = {name: target.config[name] for name in names}
    calls = [Config(member.name, {**compiled, **dict(one)}) for one in schedules(member)]
    return [config for config in calls if not member.violations(problem, config, gpu)]


def hardest(trials: list[Trial]) -> Trial:
    """The trial of the most splits, and of these the largest."""
    return max(trials, key=lambda one: (one.config.get("splits", 1), one.problem.flops))
