"""A family of which only the interesting part is left to say."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.config import Config
from tuner.families.base import Family
from tuner.hardware import Gpu
from tuner.problem import Problem


class BareFamily(Family):
    """Everything is legal, nothing is proposed, and each kernel takes 1 us by estimate."""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return []

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 1.0
