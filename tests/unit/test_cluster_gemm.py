"""The family `cluster_gemm`: what it serves, its rules, its space and its launch."""

from __future__ import annotations

import pytest

from tuner.config import Config
from tuner.families.base import group_by_kernels
from tuner.families.cluster_gemm import (
    KERNELS,
    MAX_STAGES,
    ClusterGemm,
    deepened,
    room,
    smem_bytes,
    tiles,
)
from tuner.families.invariance import ReductionClass
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GemmProblem

FAMILY = ClusterGemm()
NARROW = GemmProblem(128, 4096, 14336, dtype="bfloat16")
BASE = Config(
    FAMILY.name,
    {
        **{"swap_ab": True, "tile_m": 64, "tile_n": 128, "stages": 4, "split_k": 2},
        **{"blocks_per_sm": 1, "raster_order": "AlongM", "max_swizzle_size": 1, "pdl": True},
    },
)


def changed(**params: object) -> Config:
    return Config(FAMILY.name, {**BASE.params, **params})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("M=64,N=64,K=64,dtype=e4m3", "takes fp16 and bf16"),
        ("M=64,N=64,K=64,dtype_d=fp32", "D of the same type"),
        ("M=64,N=64,K=64,layout_b=row", "wants K contiguous"),
        ("M=64,N=64,K=64,B=2", "neither a batch nor a residual"),
        ("M=64,N=64,K=64,epilogue=residual", "neither a batch nor a residual"),
        ("M=16385,N=64,K=64", "serves M up to 16384"),
        ("M=64,N=60,K=64", "multiples of 8"),
    ],
)
def test_what_is_not_served_says_why(text: str, reason: str) -> None:
    problem = GemmProblem.parse(text)
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert FAMILY.space(problem, DEFAULT_GPU) == []


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"swap_ab": False, "tile_n": 24, "split_k": 1}, "not a multiple of 16"),
        ({"tile_m": 256, "tile_n": 256, "split_k": 1, "stages": 2}, "256 registers a thread"),
        ({"tile_m": 128, "tile_n": 32, "blocks_per_sm": 2}, "no registers to a second block"),
        ({"tile_n": 160, "blocks_per_sm": 2}, "80 registers a thread"),
        ({"stages": 24}, "bytes of shared memory at 24 stages"),
        ({"stages": 6, "blocks_per_sm": 2}, "bytes of shared memory at 6 stages"),
        ({"tile_m": 128, "tile_n": 192, "stages": 2}, "no room for 128x192 fp32 sums"),
        ({"serial_parts": 8}, "serial_parts goes without split_k"),
        ({"serial_parts": 8, "split_k": 1, "tile_m": 128, "tile_n": 256}, "256 registers a thread"),
    ],
)
def test_a_config_that_the_template_refuses(params: dict[str, object], reason: str) -> None:
    assert not FAMILY.violations(NARROW, BASE, DEFAULT_GPU)
    reasons = FAMILY.violations(NARROW, changed(**params), DEFAULT_GPU)
    assert any(reason in one for one in reasons), reasons


@pytest.mark.parametrize("parts", [{"split_k": 2}, {"split_k": 1, "serial_parts": 8}])
def test_k_has_a_block_for_each_part(parts: dict[str, object]) -> None:
    short = GemmProblem(128, 4096, 64, dtype="bfloat16")
    reasons = FAMILY.violations(short, changed(**parts), DEFAULT_GPU)
    assert any("more parts" in one for one in reasons)


def test_kernels_of_eight_parts_serve_many_rows_and_no_search_considers_them() -> None:
    many = GemmProblem(20000, 1024, 8192, dtype="bfloat16")
    assert FAMILY.supports(many, DEFAULT_GPU) and not FAMILY.space(many, DEFAULT_GPU)
    serving = [one for one in KERNELS if not FAMILY.violations(many, one, DEFAULT_GPU)]
    assert serving == [one for one in KERNELS if not one["swap_ab"]]
    classes = {FAMILY.reduction_class(many, one) for one in KERNELS}
    assert classes == {ReductionClass(16, splits=8, step=64, merge="cluster")}
    assert FAMILY.violations(many, changed(split_k=4, swap_ab=False), DEFAULT_GPU)


@pytest.mark.parametrize("m", [17, 64, 96, 200, 256])
def test_the_space_is_legal_and_has_few_kernels(m: int) -> None:
    problem = GemmProblem(m, 5120, 13824, dtype="bfloat16", epilogue="bias")
    space = FAMILY.space(problem, DEFAULT_GPU)
    assert space and len(set(space)) == len(space)
    for config in space:
        assert not FAMILY.violations(problem, config, DEFAULT_GPU)
    assert len(group_by_kernels(FAMILY, space)) <= 120
    assert any(config["split_k"] > 1 for config in space)
    whole = [one for one in space if one["swap_ab"] and tiles(problem, one)[1] == 1]
    assert whole, "all rows in one tile read the weights once"


def test_many_rows_have_kernels_for_few_columns_and_tiles_only() -> None:
    router = GemmProblem(2624, 128, 2880, dtype="bfloat16")
    space = FAMILY.space(router, DEFAULT_GPU)
    assert any(config["split_k"] > 1 for config in space)
    for config in space:
        rows, columns = tiles(router, config)
        assert rows * columns * config["split_k"] <= 2 * DEFAULT_GPU.sm_count
    assert not FAMILY.space(GemmProblem(257, 257, 4096, dtype="bfloat16"), DEFAULT_GPU)


def test_stages_fill_the_shared_memory_of_a_block() -> None:
    for resident in (1, 2):
        config = deepened(changed(tile_n=64, blocks_per_sm=resident))
        more = Config(FAMILY.name, {**config.params, "stages": config["stages"] + 1})
        assert smem_bytes(config) <= room(config) < smem_bytes(more)
    assert deepened(changed(tile_n=8))["stages"] == MAX_STAGES


def test_a_launch_names_its_arguments() -> None:
    problem = GemmProblem(128, 4096, 14336, dtype="bfloat16", epilogue="bias_gelu")
    (launch,) = FAMILY.launches(problem, BASE, 0.5)
    assert launch.integers == (128, 4096, 14336, 14336, 14336, 4096, 1, 1, 1)
    assert [ref.operand for ref in launch.tensors] == ["a", "b", "d", "bias"]
    assert launch.scalars == (0.5,)
    wider = FAMILY.strided_launches(problem, BASE, 1.0, {"a": (128 * 16384, 16384, 1)})
    assert not isinstance(wider, str) and wider[0].integers[3] == 16384
    refused = FAMILY.strided_launches(problem, BASE, 1.0, {"a": (1, 1, 128)})
    assert isinstance(refused, str)


def test_the_estimate_prefers_that_the_chip_is_full() -> None:
    alone, divided = (
        FAMILY.predict_us(NARROW, deepened(changed(split_k=k)), DEFAULT_GPU) for k in (1, 2)
    )
    assert divided < alone
    assert FAMILY.tiling(changed(split_k=4)).splits == 4
    assert FAMILY.splitter(changed(split_k=4), DEFAULT_GPU)(NARROW) == (4,)


def test_calls_launch_it_plainly() -> None:
    assert FAMILY.served(NARROW, FAMILY.overlapped(BASE)) == changed(pdl=False)
