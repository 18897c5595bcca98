"""Grouped products of shapes that nobody tuned: a few kernels, and a rule that chooses among them.

Sizes, offsets and numbers of groups are arguments of a launch, so a proven kernel serves any. The
rule takes the kernel of the least time by its family's estimate, of groups as
`GroupedGemmProblem.sizes` says. For bf16 that is `Family.predict_us` times a factor. For e4m3 each
kernel has rates of its own.

PyTorch's grouped kernel is not in the choice. It was slower at all shapes that were measured but
two, of 8 groups with 1024 rows each, where it was 1 % faster on an H100.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.block_scaled_gemm.expected import Rates
from tuner.families.block_scaled_gemm.legality import UNROLL
from tuner.families.block_scaled_gemm.shape import deepened
from tuner.families.block_scaled_grouped_gemm import BlockScaledGroupedGemm, grouped_estimate_us
from tuner.families.grouped_gemm import GroupedGemm
from tuner.families.rule import RuleSelection
from tuner.families.target import Target
from tuner.hardware import HOPPER, Gpu
from tuner.problem import E4M3, DType, GroupedGemmProblem

_PINGPONG, _COOPERATIVE = "TmaWarpSpecializedPingpong", "TmaWarpSpecializedCooperative"


def _cutlass(
    tile: tuple[int, int, int], schedule: str, *, cluster_n: int = 1, swap_ab: bool = False
) -> Config:
    params: dict[str, Value] = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        **{"cluster_m": 1, "cluster_n": cluster_n},
        **{"kernel_schedule": schedule, "swap_ab": swap_ab},
        "raster_order": "AlongN" if tile[0] == 256 else "AlongM",
    }
    return Config(GroupedGemm.name, params)


def _scaled(
    tile: tuple[int, int],
    stages: int,
    *,
    cluster_m: int = 1,
    swap_ab: bool = False,
    store_buffers: int = 0,
) -> Config:
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": stages},
        **{"cluster_m": cluster_m, "cluster_n": 1, "store_buffers": store_buffers},
        **{"raster_order": "AlongM", "max_swizzle_size": 1 if swap_ab else 8, "pdl": False},
    }
    return Config(BlockScaledGroupedGemm.name, params)


def _unrolled(tile: tuple[int, int], *, swap_ab: bool = False, store_buffers: int = 0) -> Config:
    plain = _scaled(tile, 2, swap_ab=swap_ab, store_buffers=store_buffers)
    loop: dict[str, Value] = {"unroll": UNROLL, "tma_factors": True}
    return deepened(Config(plain.family, {**plain.params, **loop}))


_SCALED: Mapping[Config, Rates] = {
    _scaled((64, 16), 20, swap_ab=True): Rates(312, 494),
    _scaled((128, 16), 12, swap_ab=True): Rates(477, 893),
    _scaled((128, 32), 9, swap_ab=True): Rates(511, 808),
    _scaled((128, 64), 8, swap_ab=True): Rates(592, 1152),
    _scaled((256, 64), 5, swap_ab=True): Rates(995, 2734),
    _scaled((128, 128), 6, store_buffers=1): Rates(832, 339),
    _unrolled((64, 8), swap_ab=True): Rates(244, 883),
    _unrolled((128, 16), swap_ab=True): Rates(459, 1181),
    _unrolled((128, 32), swap_ab=True): Rates(411, 1615),
    _unrolled((128, 64), swap_ab=True): Rates(546, 1579),
    _unrolled((256, 64), swap_ab=True): Rates(948, 3506),
    _unrolled((64, 128), store_buffers=2): Rates(541, 1575),
    _unrolled((128, 128), store_buffers=2): Rates(795, 1149),
    _unrolled((128, 192), store_buffers=3): Rates(1020, 1822),
    _unrolled((256, 128), store_buffers=4): Rates(1276, 2284),
}
KERNELS: Mapping[DType, Mapping[Config, float | Rates]] = {
    "bfloat16": {
        _cutlass((64, 32, 128), _PINGPONG, swap_ab=True): 1.04,
        _cutlass((64, 128, 64), _PINGPONG, cluster_n=2): 1.16,
        _cutlass((128, 128, 64), _PINGPONG, cluster_n=2): 1.04,
        _cutlass((256, 64, 64), _COOPERATIVE, cluster_n=2, swap_ab=True): 1.0,
        _cutlass((128, 256, 64), _COOPERATIVE, cluster_n=2): 1.08,
    },
    E4M3: _SCALED,
}
"""Kernels by type, and the factors of their estimates; or their rates. The factors lose least in 18
products of an H100 and an H200 (25 and 26 November 2026). The rates are near those of
`tuner develop fit rates` of ``tests/assets/fits/rates.jsonl.gz``, and also rest on measurements
that are not kept.
"""


def serves(problem: GroupedGemmProblem, gpu: Gpu) -> bool:
    """True for problems of a type that has kernels, on a GPU that runs them."""
    return problem.dtype in KERNELS and gpu.compute_capability == HOPPER


def select(problem: GroupedGemmProblem, gpu: Gpu) -> RuleSelection | None:
    """The rule's kernels for a problem; None when none takes it."""
    ranked = []
    for config, rates in KERNELS.get(problem.dtype, {}).items():
        member = families()[config.family]
        if not member.accepts(problem, config, gpu):
            continue
        if isinstance(rates, Rates):
            us = grouped_estimate_us(problem, config, gpu, rates)
        else:
            us = rates * member.predict_us(problem, config, gpu)
        ranked.append((us, config))
    return RuleSelection.of(ranked, "chosen by the rule of grouped products")


@cache
def targets() -> tuple[Target, ...]:
    """The kernels, to be built and proven."""
    return tuple(
        Target(config, GroupedGemmProblem(4, 512, 1024, 1024, dtype=dtype))
        for dtype, configs in KERNELS.items()
        for config in configs
    )
