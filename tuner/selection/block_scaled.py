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
    unroll: int = UNROLL,
    band: int = 8,
) -> Config:
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": 2},
        **{"cluster_m": cluster[0], "cluster_n": cluster[1], "split_k": split_k},
        **{"store_buffers": store_buffers, "raster_order": "AlongM"},
        **{"max_swizzle_size": 1 if swap_ab else band, "pdl": False},
        **{"unroll": unroll, "tma_factors": True},
    }
    return deepened(Config(BlockScaledGemm.name, params))


def _swapped(rows: int, columns: int, split_k: int = 1) -> Config:
    return _kernel((rows, columns), swap_ab=True, split_k=split_k)


KERNELS: Mapping[Config, Rates] = {
    _swapped(64, 8): Rates(244, 858),
    _swapped(64, 8, 2): Rates(271, 2776),
    _swapped(64, 16): Rates(202, 3080),
    _swapped(64, 16, 2): Rates(255, 3325),
    _swapped(128, 8): Rates(158, 3323),
    _swapped(128, 8, 4): Rates(412, 4513),
    _swapped(256, 8): Rates(316, 4423),
    _swapped(256, 8, 4): Rates(339, 5609),
    _swapped(128, 16): Rates(213, 2661),
    _swapped(128, 16, 4): Rates(344, 4721),
    _swapped(256, 16): Rates(606, 2878),
    _swapped(256, 16, 4): Rates(130, 7670),
    _swapped(128, 32): Rates(245, 3299),
    _swapped(64, 64): Rates(308, 3216),
    _swapped(128, 64): Rates(413, 2940),
    _kernel((64, 16)): Rates(212, 2786),
    _kernel((64, 32)): Rates(245, 2878),
    _kernel((64, 48)): Rates(278, 2970),
    _kernel((64, 64), store_buffers=1): Rates(235, 3908),
    _kernel((64, 64), split_k=2): Rates(305, 4093),
    _kernel((64, 64), split_k=4): Rates(311, 5491),
    _kernel((64, 80), store_buffers=2): Rates(271, 4572),
    _kernel((64, 80), split_k=2): Rates(539, 1144),
    _kernel((64, 112), store_buffers=2): Rates(442, 2584),
    _kernel((64, 128), store_buffers=2): Rates(417, 1872),
    _kernel((64, 192), store_buffers=3): Rates(602, 1660),
    _kernel((128, 64), store_buffers=1): Rates(409, 933),
    _kernel((128, 64), split_k=2): Rates(341, 6540),
    _kernel((128, 80), store_buffers=2): Rates(489, 1245),
    _kernel((128, 96), store_buffers=2): Rates(508, 1920),
    _kernel((128, 112), store_buffers=2): Rates(648, 1067),
    _kernel((128, 128), store_buffers=2): Rates(608, 1495),
    _kernel((128, 144), store_buffers=3): Rates(772, 1548),
    _kernel((128, 160), store_buffers=3): Rates(746, 1592),
    _kernel((128, 160), split_k=2): Rates(664, 9985),
    _kernel((128, 176), store_buffers=3): Rates(950, 889),
    _kernel((128, 192), store_buffers=3): Rates(818, 1954),
    _kernel((256, 128), store_buffers=4, unroll=8, band=16): Rates(1096, 2057),
    _kernel((256, 128), store_buffers=4, band=16): Rates(1096, 2057),
}
"""Kernels and their rates, by `scripts/bench rates` of evidence/scaled-h200.json.gz and
scaled-space-h200.json.gz in scripts/benchmarks. 16 have proofs that ship; `tuner prove --op gemm`
adds the others.
"""


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
