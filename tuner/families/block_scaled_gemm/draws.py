"""Draws of products with factors of blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from tuner.families.gemm.draws import ALIGNED, DEEP
from tuner.families.target import Target
from tuner.families.trials import Draw, Fact, Trial, edges, is_small, schedule_of, schedules
from tuner.hardware import Gpu
from tuner.problem import SCALE_BLOCK

MAX_GROUPED_EXTENT = 2048
"""Maximum rows, N and K of drawn grouped products; planted ones may be larger."""


class ScaledDraw(Draw):
    """Products of e4m3 with factors of blocks."""

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        config, self._usual = target.config, cast(Any, target.problem)
        rows, columns = config["tile_m"], config["tile_n"]
        if config["swap_ab"]:
            rows, columns = columns, rows
        self._steps = {"m": 1, "n": ALIGNED, "k": 2 * ALIGNED}
        self.axes = {
            # All groups' rows: those of a few whole tiles, and of nearly whole ones.
            "m": sorted({*edges(rows), 8 * rows + 3, 40 * rows}),
            "n": [self._whole("n", extent) for extent in (1, *edges(columns)[1:])],
            "k": [self._whole("k", extent) for extent in (1, *edges(SCALE_BLOCK)[1:], DEEP)],
            "schedule": list(schedules(self._family)),
        }

    def _whole(self, name: str, extent: int) -> int:
        step = self._steps[name]
        return -(-extent // step) * step

    def _value(self, name: str) -> Any:
        """One of an axis's values half of the time; of extents anything the other half."""
        rng = self._rng
        if name not in self._steps or rng.random() < 0.5:
            return rng.choice(self.axes[name])
        return self._whole(name, round(2 ** rng.uniform(0, MAX_GROUPED_EXTENT.bit_length() - 1)))

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        sizes = {name: value for name, value in values.items() if name != "schedule"}
        problem = replace(self._usual, **sizes)
        if not is_small(problem, values["schedule"]):
            return None
        config = self._config(problem, values["schedule"])
        return None if config is None else Trial(problem, config)

    def facts(self, trial: Trial) -> set[Fact]:
        problem, family = cast(Any, trial.problem), self._family
        return {
            ("m", problem.m),
            ("n", problem.n),
            ("k", problem.k),
            ("schedule", schedule_of(family, trial.config)),
        }
