"""Draws of grouped products: counts of groups, and rows of each."""

from __future__ import annotations

import random
from typing import cast

from tuner.families.block_scaled_gemm.draws import ScaledDraw
from tuner.families.target import Target
from tuner.families.trials import Fact, Trial
from tuner.hardware import Gpu
from tuner.problem import SIZES, GroupedGemmProblem

#: Groups: one, few, a warp's lanes and one more, public models' experts.
_GROUPS = (1, 2, 5, 8, 32, 33, 128, 384)


class GroupedDraw(ScaledDraw):
    """Grouped products: counts of groups, and rows of each."""

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        schedules = self.axes.pop("schedule")
        self.axes = {"groups": _GROUPS, **self.axes, "sizes": SIZES, "schedule": schedules}

    def facts(self, trial: Trial) -> set[Fact]:
        problem = cast(GroupedGemmProblem, trial.problem)
        named = {("groups", problem.groups), ("sizes", problem.sizes)}
        return named | super().facts(trial)
