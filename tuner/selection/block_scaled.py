"""Products with factors of blocks that nobody tuned: a few kernels, and a rule that chooses among
them.

Sizes are arguments of a launch, so a proven kernel serves any. The rule takes the kernel of the
least time by the family's estimate, with each kernel's rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.block_scaled_gemm import (
    UNROLL,
    BlockScaledGemm,
    Rates,
    deepened,
    estimate_us,
    rates_of,
)
from tuner.hardware import HOPPER, Gpu
from tuner.measurement import Regime
from tuner.problem import E4M3, GemmProblem
from tuner.selection.by_rule import RuleSelection
from tuner.selection.kernels import Target


def _kernel(
    tile: tuple[int, int],
    *,
    swap_ab: bool = False,
    split_k: int = 1,
    cluster: tuple[int, int] = (1, 1),
    store_buffers: int = 0,
) -> Config:
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": 2},
        **{"cluster_m": cluster[0], "cluster_n": cluster[1], "split_k": split_k},
        **{"store_buffers": store_buffers, "raster_order": "AlongM"},
        **{"max_swizzle_size": 1 if swap_ab else 8, "pdl": False},
        **{"unroll": UNROLL, "tma_factors": True},
    }
    return deepened(Config(BlockScaledGemm.name, params))


def _swapped(rows: int, columns: int, split_k: int = 1) -> Config:
    return _kernel((rows, columns), swap_ab=True, split_k=split_k)


_CONFIGS = (
    _swapped(64, 8),
    _swapped(64, 8, 2),
    _swapped(64, 16),
    _swapped(64, 16, 2),
    _swapped(128, 16),
    _swapped(128, 32),
    _swapped(64, 64),
    _swapped(128, 64),
    _kernel((64, 64), split_k=2),
    _kernel((64, 128), store_buffers=2),
    _kernel((128, 64), store_buffers=1),
    _kernel((128, 64), split_k=2),
    _kernel((128, 96), store_buffers=2),
    _kernel((128, 128), store_buffers=2),
    _kernel((128, 192), store_buffers=3),
    _kernel((256, 128), store_buffers=4),
)
KERNELS: Mapping[Config, Rates] = {config: rates_of(config) for config in _CONFIGS}
"""Kernels, and their rates."""


def serves(problem: GemmProblem, gpu: Gpu) -> bool:
    """True for such problems on a GPU that runs the kernels."""
    return problem.scales == "block" and gpu.compute_capability == HOPPER


def select(problem: GemmProblem, gpu: Gpu) -> RuleSelection | None:
    """The rule's kernels for a problem; None when none takes it."""
    found = []
    for config, rates in KERNELS.items():
        if families()[config.family].accepts(problem, config, gpu):
            found.append((estimate_us(problem, config, gpu, rates), config))
    found.sort(key=lambda one: one[0])
    doubts = ("chosen by the rule of products with factors of blocks",)
    return RuleSelection(tuple(found), Regime(), doubts) if found else None


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    return tuple(_targets())


def _targets() -> Iterator[Target]:
    small = GemmProblem(512, 1024, 1024, dtype=E4M3, scales="block")
    for config in KERNELS:
        yield Target(config, small)
