"""The family `grouped_gemm`: its rules, its candidates, its launch and its text."""

from __future__ import annotations

from typing import Any

import pytest
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config, Value
from tuner.families import family
from tuner.families.base import Ref
from tuner.families.collective import COOPERATIVE, PINGPONG
from tuner.families.grouped_gemm import GroupedGemm, smem_bytes
from tuner.hardware import DEFAULT_GPU
from tuner.problem import SIZES, GroupedGemmProblem, rows_of
from tuner.report.bounds import works

GROUPED = GroupedGemm()
MIXTRAL = GroupedGemmProblem(8, 2048, 14336, 4096, dtype="bfloat16")


def config(
    tile: tuple[int, int, int] = (128, 128, 64),
    schedule: str = PINGPONG,
    swap_ab: bool = False,
    **changes: Value,
) -> Config:
    params: dict[str, Value] = {
        **dict(zip(("tile_m", "tile_n", "tile_k"), tile, strict=True)),
        "cluster_m": 2,
        "cluster_n": 1,
        "kernel_schedule": schedule,
        "swap_ab": swap_ab,
        "raster_order": "AlongM",
        **changes,
    }
    return Config("grouped_gemm", params)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("m", "groups"), [(4096, 8), (5, 8), (1, 1), (1, 64), (8191, 60)])
def test_rows_add_up_and_stay_the_same(sizes: Any, m: int, groups: int) -> None:
    rows = rows_of(sizes, m, groups)
    assert len(rows) == groups and sum(rows) == m and min(rows) >= 0
    assert rows == rows_of.__wrapped__(sizes, m, groups)
    if m < groups:
        assert 0 in rows


def test_distributions_differ() -> None:
    uniform, zipf, sparse = (rows_of(sizes, 4096, 8) for sizes in SIZES)
    assert set(uniform) == {512}
    shares = [4096 / rank / sum(1 / r for r in range(1, 9)) for rank in range(1, 9)]
    assert sorted(zipf, reverse=True) == pytest.approx(shares, abs=1) and len(set(zipf)) == 8
    assert sparse == (1024, 0) * 4


def test_weights_of_empty_groups_are_not_counted_as_read() -> None:
    sparse = GroupedGemmProblem(8, 2048, 14336, 4096, sizes="sparse")
    whole = GroupedGemmProblem(8, 2048, 14336, 4096)
    assert whole.bytes - sparse.bytes == 4 * 14336 * 4096 * 2


def test_the_family_is_found_and_its_space_is_wide() -> None:
    assert isinstance(family("grouped_gemm"), GroupedGemm)
    space = GROUPED.space(MIXTRAL, DEFAULT_GPU)
    assert len({GROUPED.compile_digest(c) for c in space}) >= 60
    assert {c["kernel_schedule"] for c in space} == {PINGPONG, COOPERATIVE}
    many = GROUPED.space(GroupedGemmProblem(8, 16384, 14336, 4096), DEFAULT_GPU)
    assert many and not any(c["swap_ab"] for c in many)
    few = GROUPED.space(GroupedGemmProblem(8, 256, 14336, 4096), DEFAULT_GPU)
    assert {c["swap_ab"] for c in few} == {False, True}
    # Unlike groups get the tiles of the mean one and of the largest.
    unlike = GROUPED.space(GroupedGemmProblem(8, 512, 14336, 4096, "zipf"), DEFAULT_GPU)
    assert {c["swap_ab"] for c in unlike} == {False, True}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernel_schedule": "TmaWarpSpecialized"}, "(allowed: TmaWarpSpecializedPingpong, "),
        ({"tile_m": 96}, "tile_m=96 is not a multiple of 64"),
        ({"tile_n": 512}, "exceeds 256"),
        ({"cluster_m": 3}, "cluster_m=3 is not known (allowed: 1, 2, 4, 8)"),
        ({"tile_m": 256, "tile_n": 256}, "accumulator registers"),
        ({"max_swizzle_size": 2}, "parameter 'max_swizzle_size' is not known"),
        ({"tile_k": 256}, "stages=1 are too few"),
    ],
)
def test_what_is_illegal_says_why(changes: dict[str, Any], reason: str) -> None:
    assert GROUPED.violations(MIXTRAL, config(), DEFAULT_GPU) == []
    reasons = GROUPED.violations(MIXTRAL, config(**changes), DEFAULT_GPU)
    assert any(reason in given for given in reasons), reasons


def test_stages_that_exceed_shared_memory_are_refused() -> None:
    """By the rule itself: no tile of the domains is such that a stage too many is counted."""
    odd = config(tile_m=64, tile_n=48, tile_k=144, swap_ab=True)
    (reason,) = GROUPED.conflicts(MIXTRAL, odd, DEFAULT_GPU)
    assert reason.endswith("bytes of shared memory at 7 stages exceed 232448")


@pytest.mark.parametrize(("n", "k", "name"), [(20, 64, "d"), (64, 20, "a")])
def test_rows_that_tma_cannot_step_over(n: int, k: int, name: str) -> None:
    reasons = GROUPED.violations(GroupedGemmProblem(2, 8, n, k), config(), DEFAULT_GPU)
    assert any(f"{name}'s contiguous extent 20" in given for given in reasons), reasons


@pytest.mark.parametrize(
    ("tile", "schedule", "swap_ab", "stages", "used"),
    [
        ((128, 256, 64), COOPERATIVE, False, 4, 215040),
        ((128, 16, 64), COOPERATIVE, True, 12, 228352),
        ((128, 32, 128), COOPERATIVE, True, 5, 215040),
        ((256, 192, 64), COOPERATIVE, False, 3, 189952),
        ((64, 16, 64), PINGPONG, False, 22, 229120),
        ((64, 16, 32), PINGPONG, True, 44, 230400),
        ((64, 64, 128), PINGPONG, False, 6, 206848),
        ((128, 192, 64), PINGPONG, True, 5, 216064),
    ],
)
def test_shared_memory_is_what_the_compiler_says(
    tile: tuple[int, int, int], schedule: str, swap_ab: bool, stages: int, used: int
) -> None:
    """sizeof(SharedStorage) and DispatchPolicy::Stages, printed by a program."""
    assert smem_bytes(MIXTRAL, config(tile, schedule, swap_ab)) == (stages, used)


def test_a_launch_has_the_groups_and_reads_the_offsets() -> None:
    problem = GroupedGemmProblem(5, 300, 136, 72)
    [launch] = GROUPED.launches(problem, config(raster_order="AlongN"), 0.5)
    assert launch.tensors == (Ref("a"), Ref("b"), Ref("offsets"), Ref("d"))
    assert launch.integers == (300, 136, 72, 5, 2, 0) and launch.scalars == (0.5,)


def test_golden_texts(goldens: Goldens) -> None:
    texts = {
        name: render(GROUPED.kernels(MIXTRAL, config(swap_ab=swap_ab))["grouped_gemm"], "golden")
        for name, swap_ab in (("plain", False), ("swapped", True))
    }
    goldens.check("grouped_gemm", texts)


def test_texts_follow_the_tensor_maps_of_cutlass_4_6() -> None:
    """From it on the epilogue's descriptor is part of a tuple. Older texts, and keys, stay."""
    spec = GROUPED.kernels(MIXTRAL, config())["grouped_gemm"]
    text = render(spec, "one")
    assert render(spec, "one", (4, 5)) == text
    newer = render(spec, "one", (4, 6))
    lines = zip(text.splitlines(), newer.splitlines(), strict=True)
    changed = [(old.strip(), new.strip()) for old, new in lines if old != new]
    assert changed == [
        (
            "template <bool kIsLoad, class Storage, class Problem>",
            "template <bool kIsLoad, class Storage, class Maps, class Problem>",
        ),
        (
            "cute::TmaDescriptor const*, Problem problem, int group,",
            "Maps const&, Problem problem, int group,",
        ),
    ]
    assert render(spec, "one", (5, 0)) == newer


def test_a_group_is_padded_to_whole_tiles() -> None:
    problem = GroupedGemmProblem(4, 10, 256, 64, sizes="sparse")
    [work] = works(problem, config((64, 128, 64), cluster_m=1), DEFAULT_GPU)
    assert work.tiles == 2 * 2
    assert work.tensor_flops == 2 * 2 * 64 * 256 * 64
    assert work.smem_bytes == smem_bytes(problem, config((64, 128, 64)))[1]
