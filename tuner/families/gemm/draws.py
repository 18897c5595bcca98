"""Draws of products."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from tuner.families import product_work
from tuner.families.gemv import MAX_ROWS
from tuner.families.target import Target
from tuner.families.trials import (
    MAX_BYTES,
    Draw,
    Fact,
    Trial,
    edges,
    is_small,
    schedule_of,
    schedules,
)
from tuner.hardware import Gpu
from tuner.problem import SwigluProblem
from tuner.problem.swiglu import STEP as SWIGLU_STEP

#: Alignment of a GEMM's rows in 16-bit elements.
ALIGNED = 8
MAX_EXTENT = 8192
"""Maximum N and K of drawn GEMMs; planted ones may be larger."""
#: N of a public model's logits, and a K longer than every pipeline.
_VOCABULARY, DEEP = 128256, 16384 + 8
#: Padding elements between the rows of A, and between those of the weights.
_APART = ((0, 0), (8, 0), (0, 8), (72, 1024))


class ProductDraw(Draw):
    """Products of 16-bit elements, plain and gated."""

    def __init__(self, target: Target, gpu: Gpu, rng: random.Random) -> None:
        super().__init__(target, gpu, rng)
        family, self._usual = self._family, cast(Any, target.problem)
        is_gated = isinstance(target.problem, SwigluProblem)
        self._step = SWIGLU_STEP if is_gated else ALIGNED
        tile_m, tile_n, depth = tile_of(family.tiling(target.config))
        columns = tile_n // 2 if is_gated else tile_n
        dense = {"a": self._usual.operands[0].strides}
        launches = family.strided_launches(self._usual, target.config, 1.0, dense)
        self.axes = {
            "m": [m for m in edges(tile_m) if self._holds(m)],
            "n": [*self._edges(columns), _VOCABULARY],
            "k": [*self._edges(depth, ALIGNED), DEEP],
            "fills_chip": (False, True),
            "apart": _APART[:1] if isinstance(launches, str) else _APART,
            "schedule": [s for s in schedules(family) if self._config(self._usual, s)],
        }

    def _edges(self, tile: int, step: int = 0) -> list[int]:
        """One step, and the extents beside the edges of a tile, as multiples of the step."""
        step = step or self._step
        tile = -(-tile // step) * step
        near = (tile - step, tile, tile + step, 2 * tile - step, 2 * tile + step, 5 * tile)
        odd = step * (2 * self._rng.randrange(8, 128) + 1)
        return sorted({step, odd, *(extent for extent in near if extent > 0)})

    def _holds(self, m: int) -> bool:
        """True if this kernel serves and supports so many rows."""
        problem = replace(self._usual, m=m)
        if self._family.supports_config(problem, self._target.config, self._gpu):
            return False
        return self._family.kernels(problem, self._target.config) == self._target.kernels

    def _value(self, name: str) -> Any:
        """Draw one of an axis's planted values half of the time, and any extent the other half."""
        rng = self._rng
        if name not in ("m", "n", "k") or rng.random() < 0.5:
            return rng.choice(self.axes[name])
        if name == "m":
            return round(2 ** rng.uniform(0, max(self.axes["m"][-1], 1).bit_length() + 1))
        step = self._step if name == "n" else ALIGNED
        return step * round(2 ** rng.uniform(0, (MAX_EXTENT // step).bit_length() - 1))

    def _trial(self, values: Mapping[str, Any], planted: Mapping[str, Any]) -> Trial | None:
        m, n, k = values["m"], values["n"], values["k"]
        problem = replace(self._usual, m=m, n=n, k=k)
        if not self._holds(m) or not is_small(problem, values["schedule"]):
            return None
        apart_a, apart_b = values["apart"]
        apart = (0 if m == 1 else apart_a), (0 if n == 1 else apart_b)
        config = self._config(problem, values["schedule"])
        if config is None or 2 * (m * apart[0] + n * apart[1]) > MAX_BYTES:
            return None
        trial = Trial(problem, config, apart=apart)
        is_wanted = set(planted.items()) <= self.facts(trial)
        return trial if is_wanted else None

    def facts(self, trial: Trial) -> set[Fact]:
        problem, family, gpu = cast(Any, trial.problem), self._family, self._gpu
        sizes = product_work.ProductSizes.of(problem)
        tile_m, tile_n, _ = tile_of(family.tiling(trial.config))
        tiles = -(-sizes.m // tile_m) * -(-sizes.n // tile_n)
        return {
            ("m", problem.m),
            ("n", problem.n),
            ("k", problem.k),
            ("fills_chip", tiles > 2 * gpu.sm_count),
            ("apart", trial.apart),
            ("schedule", schedule_of(family, trial.config)),
        }


def tile_of(tiling: Any) -> tuple[int, int, int]:
    """Tile (M, N, K) of a GEMM kernel."""
    if isinstance(tiling, product_work.FewRowsTiling):
        return MAX_ROWS, tiling.rows, tiling.depth
    tile = tiling.rows, tiling.columns
    tile_m, tile_n = tile[::-1] if tiling.is_swapped else tile
    return tile_m, tile_n, tiling.depth
