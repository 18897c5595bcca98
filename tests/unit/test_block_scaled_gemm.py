"""The family `block_scaled_gemm`: what it serves, its rules, its space, its launch and its text."""

from __future__ import annotations

from typing import Any

import pytest
from block_scaled_cases import CASES, PROMOTED, SIZES, config, grouped
from block_scaled_cases import problem as problem_of
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import families_of
from tuner.families.base import Ref, group_by_kernels
from tuner.families.block_scaled_gemm import KERNEL, BlockScaledGemm
from tuner.families.block_scaled_gemm.shape import smem_bytes, stage_bytes
from tuner.families.block_scaled_grouped_gemm import BlockScaledGroupedGemm
from tuner.families.strided_product import tiles
from tuner.hardware import DEFAULT_GPU, SMEM_PER_BLOCK_BYTES
from tuner.problem import GemmProblem, GroupedGemmProblem

FAMILY = BlockScaledGemm()
GROUPED = BlockScaledGroupedGemm()
EXPERTS = GroupedGemmProblem.parse("G=8,M=300,N=264,K=400,sizes=zipf,dtype=e4m3")
ONE = grouped(CASES["square"])
LARGE = problem_of(4096, 7168, 2048)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("M=64,N=64,K=64", "takes factors of blocks"),
        (
            "M=64,N=64,K=64,dtype=e4m3,scales=tensor,fast_accum=1",
            "or dtype=e4m3 with dtype_d=bf16 and fast_accum=0 or scales=row",
        ),
        ("M=64,N=64,K=64,dtype=e4m3,dtype_d=fp16,fast_accum=0", "takes factors of blocks"),
        ("M=64,N=60,K=64,dtype=e4m3,scales=block", "not multiples of 8 and 16"),
        ("M=64,N=64,K=72,dtype=e4m3,scales=block", "not multiples of 8 and 16"),
        ("M=2147483647,N=64,K=64,dtype=e4m3,scales=block", "exceeds 1073741824 in one extent"),
        ("M=1073741824,N=512,K=64,dtype=e4m3,scales=block", "results are over"),
    ],
)
def test_what_is_not_served_says_why(text: str, reason: str) -> None:
    problem = GemmProblem.parse(text)
    assert reason in FAMILY.supports(problem, DEFAULT_GPU)
    assert FAMILY.space(problem, DEFAULT_GPU) == []


def test_no_other_own_family_serves_factors_of_blocks() -> None:
    serving = [
        name
        for name, member in families_of("gemm").items()
        if not member.is_vendor and not member.supports(LARGE, DEFAULT_GPU)
    ]
    assert serving == [FAMILY.name]
    for name in ("gemm", "gemv"):
        assert "factors" in families_of("gemm")[name].supports(problem_of(1, 64, 64), DEFAULT_GPU)


def _ahead(tile: tuple[int, int], *, swap_ab: bool = False) -> Config:
    return config(tile, 2, swap_ab=swap_ab, unroll=4, tma_factors=True, ahead=True)


def _serial(tile: tuple[int, int], parts: int, split_k: int = 1) -> Config:
    loop = {"unroll": 4, "tma_factors": True, "serial_parts": parts}
    return config(tile, 4, split_k=split_k, **loop)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (config((128, 24), 4), "tile_n=24 is not a multiple of 16 (swap_ab=False)"),
        (config((256, 144), 3), "tile 256x144 needs 216 registers a thread for sums (at most 192)"),
        (config((128, 128), 8), "bytes of shared memory at 8 stages exceed 232448"),
        (config((128, 128), 4, cluster=(2, 2)), "cluster 2x2 shares both operands"),
        (config((128, 24), 4, swap_ab=True, cluster=(2, 1)), "does not halve tile_n=24 in eights"),
        (config((128, 64), 4, cluster=(2, 1), split_k=2), "split_k=2 goes with a cluster of its"),
        (config((256, 128), 2, split_k=2), "2 stages have no room for 256x128 fp32 sums"),
        (config((128, 64), 4, swap_ab=True, store_buffers=1), "is for neither swapped operands"),
        (config((128, 48), 4, store_buffers=1), "tile_n=48 has no box of 64 columns"),
        (config((128, 128), 6, store_buffers=2), "232832 bytes of shared memory at 6 stages"),
        (config((128, 64), 4, split_k=8), "split_k=8 has more parts than K=512 has blocks"),
        (config((128, 64), 4, unroll=3), "unroll=3 is not known (allowed: 2, 4, 8)"),
        (config((128, 64), 4, unroll=4, ahead=True), "ahead goes with tma_factors"),
        (_ahead((128, 144)), "ahead is for tiles up to 128x128"),
        (_ahead((256, 64)), "ahead is for tiles up to 128x128"),
        (_ahead((128, 80), swap_ab=True), "ahead is for at most 64 columns of swapped operands"),
        (config((128, 64), 4, unroll=4, uniform_branch=True), "uniform_branch is for tile_m=64"),
        (config((64, 64), 4, unroll=4, turns=True), "turns are of two warp groups' unrolled loops"),
        (config((128, 64), 4, turns=True), "turns are of two warp groups' unrolled loops"),
        (config((128, 64), 4, unroll=8, turns=True), "turns are for unroll up to 4"),
        (config((128, 64), 4, vector_merge=True), "vector_merge goes with split_k"),
        (config((128, 64), 4, fetch_factors=True), "fetch_factors goes with tma_factors"),
        (config((128, 64), 4, staged_columns=True), "staged_columns goes with tma_factors"),
        (
            config(
                (64, 64), 4, unroll=4, tma_factors=True, fetch_factors=True, staged_columns=True
            ),
            "staged_columns goes without fetch_factors",
        ),
        (config((128, 64), 4, serial_parts=2), "serial_parts goes with tma_factors, without"),
        (_serial((128, 64), 2, split_k=2), "serial_parts goes with tma_factors, without split_k"),
        (_serial((128, 80), 2), "serial_parts is for multiples of 32 columns, only"),
        (_serial((128, 64), 8), "serial_parts=8 has more parts than K=512 has blocks"),
        (_serial((256, 128), 2), "bytes of shared memory at 4 stages exceed"),
        (config((128, 64), 4, clips_rows=True), "clips_rows goes with tma_factors"),
        (
            config((128, 64), 4, cluster=(1, 2), unroll=4, tma_factors=True, clips_rows=True),
            "clips_rows goes without multicast",
        ),
        (config((128, 64), 3, blocks_per_sm=2), "blocks_per_sm=2 leaves 72 registers a thread"),
        (config((64, 80), 3, blocks_per_sm=2), "64 rows: 64x80 needs 80"),
        (config((64, 64), 7, blocks_per_sm=2), "bytes of shared memory at 7 stages exceed 115712"),
        (Config("block_scaled_gemm", {}), "parameter tile_m is missing"),
    ],
)
def test_what_is_illegal_says_why(changed: Config, reason: str) -> None:
    reasons = FAMILY.violations(problem_of(512, 512, 512), changed, DEFAULT_GPU)
    assert any(reason in said for said in reasons), reasons


def test_every_case_is_legal() -> None:
    for size in SIZES:
        for chosen in CASES.values():
            assert FAMILY.violations(problem_of(*size), chosen, DEFAULT_GPU) == []


@pytest.mark.parametrize("size", [*SIZES, (4096, 7168, 2048), (16, 4096, 7168)])
def test_the_space_fills_shared_memory_and_wastes_no_tile(size: tuple[int, int, int]) -> None:
    problem = problem_of(*size)
    space = FAMILY.space(problem, DEFAULT_GPU)
    for group in group_by_kernels(FAMILY, space):
        chosen, stages = group[0], group[0]["stages"]
        assert smem_bytes(chosen) <= SMEM_PER_BLOCK_BYTES
        assert stages == 24 or smem_bytes(chosen) + stage_bytes(chosen) > SMEM_PER_BLOCK_BYTES
        texts = {render(FAMILY.kernels(problem, c)[KERNEL], "x") for c in group}
        assert len(texts) == 1
    ahead = [c for c in space if "ahead" in c.params]
    assert ahead and all(c["tile_m"] <= 128 and c["tile_n"] <= 128 for c in ahead)
    split = {c["split_k"] for c in space}
    assert (split > {1}) == (size[0] < 4096), "K is divided where tiles do not fill the chip"
    assert any(c["swap_ab"] for c in space) == (size[0] <= 768)


def test_tiles_of_both_orientations() -> None:
    problem = problem_of(1000, 2112, 1152)
    assert tiles(problem, config((128, 192), 2)) == (8, 11)
    assert tiles(problem, config((128, 192), 2, cluster=(2, 1))) == (4, 11)
    assert tiles(problem, config((128, 192), 2, cluster=(1, 2))) == (8, 6)
    assert tiles(problem, config((128, 192), 2, swap_ab=True)) == (17, 6)


def test_a_launch_has_the_factors_strides() -> None:
    problem = problem_of(333, 1000, 2064)
    [launch] = FAMILY.launches(problem, CASES["tall"], 0.5)
    assert launch.tensors == tuple(map(Ref, ("a", "b", "d", "scale_a", "scale_b")))
    assert launch.scalars == (0.5,)
    assert launch.integers == (333, 1000, 2064, 2064, 2064, 1000, 1, 336, 17, 1, 2, 2, 1, 1, 0)
    strides = {"a": (0, 4096, 1), "scale_a": (1, 17), "scale_b": (1, 8)}
    [strided] = FAMILY.strided_launches(problem, CASES["tall"], 0.5, strides)
    assert strided.integers == (333, 1000, 2064, 4096, 2064, 1000, 17, 1, 1, 8, 2, 2, 1, 1, 0)
    for wrong, reason in (
        ({"a": (0, 2065, 1)}, "a's stride of 2065 elements in dimension 1 is not a multiple"),
        ({"b": (0, 2, 2064)}, "b's stride of 2 elements in dimension 1 is not 1"),
        ({"d": (0, 2000, 1)}, "d: only a, b, scale_a, scale_b have free strides"),
    ):
        assert reason in FAMILY.strided_launches(problem, CASES["tall"], 0.5, wrong)


def test_a_launch_has_one_factor_for_all_of_k() -> None:
    for scales, row in (("row", 1), ("tensor", 0)):
        problem = GemmProblem.parse(f"M=333,N=1000,K=2064,dtype=e4m3,scales={scales},fast_accum=0")
        chosen = PROMOTED["promoted, tall"]
        assert FAMILY.violations(problem, chosen, DEFAULT_GPU) == []
        [launch] = FAMILY.launches(problem, chosen, 0.5)
        assert launch.integers[:6] == (333, 1000, 2064, 2064, 2064, 1000)
        assert launch.integers[6:10] == (row, 0, row, 0)
        assert FAMILY.kernels(problem, chosen)[KERNEL].variables["scaled_after"] is True
        for name, reason in (("tall", "needs unroll"), ("factors by TMA", "are of blocks, not")):
            assert reason in "; ".join(FAMILY.violations(problem, CASES[name], DEFAULT_GPU))


def test_factors_by_tma_have_its_strides() -> None:
    problem, chosen = problem_of(333, 1000, 2064), CASES["factors by TMA"]
    strides = {"scale_a": (1, 17)}
    assert "scale_a's strides 1, 17 are not TMA's" in FAMILY.strided_launches(
        problem, chosen, 1.0, strides
    )
    [launch] = FAMILY.strided_launches(problem, chosen, 1.0, {"scale_a": (340, 1)})
    assert launch.integers[6:8] == (1, 340)
    alone = Config(FAMILY.name, {**CASES["square"].params, "tma_factors": True})
    assert "tma_factors goes with unroll" in FAMILY.violations(problem, alone, DEFAULT_GPU)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("M=8,N=8,K=16,scales=block", "scales=block has its own sums of e4m3"),
        ("M=8,N=8,K=16,dtype=e4m3,scales=block,dtype_d=fp16", "allowed: dtype=e4m3, dtype_d=bf16"),
        ("M=8,N=8,K=16,dtype=e4m3,scales=block,fast_accum=0", "fast_accum=1"),
        ("M=8,N=8,K=16,dtype=e4m3,scales=block,B=2", "no epilogue and no batch"),
        ("M=8,N=8,K=16,dtype=e4m3,scales=column", "allowed: tensor, row, block"),
    ],
)
def test_what_poses_no_problem(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        GemmProblem.parse(text)


def test_factors_of_a_problem_cover_what_is_cut_off() -> None:
    operands = {operand.name: operand for operand in problem_of(333, 1000, 2064).operands}
    shapes = {name: operands[name].shape for name in ("scale_a", "scale_b", "d")}
    assert shapes == {"scale_a": (17, 336), "scale_b": (8, 17), "d": (1, 333, 1000)}
    assert operands["scale_a"].strides == (336, 1) and operands["d"].dtype == "bfloat16"
    assert problem_of(8, 8, 16).label() == "M=8,N=8,K=16,dtype=e4m3,scales=block"


def test_estimates_prefer_what_reads_less() -> None:
    def us(**changes: Any) -> float:
        params = {**CASES["square"].params, **changes}
        return FAMILY.predict_us(LARGE, Config(FAMILY.name, params), DEFAULT_GPU)

    assert us(tile_m=256, stages=4, cluster_m=2) < us() < us(tile_n=64)


def test_golden_texts(goldens: Goldens) -> None:
    chosen = {
        "square": CASES["square"],
        "columns": CASES["columns of three blocks"],
        "swapped": CASES["swapped, split"],
        "unrolled": CASES["factors by TMA"],
    }
    texts = {
        name: render(FAMILY.kernels(LARGE, one)[KERNEL], "0123456789abcdef")
        for name, one in chosen.items()
    }
    [grouped] = GROUPED.kernels(EXPERTS, ONE).values()
    texts["grouped"] = render(grouped, "0123456789abcdef")
    goldens.check("block_scaled_gemm", texts)


def test_groups_have_their_own_kernels_and_the_same_rules() -> None:
    assert EXPERTS.output.dtype == "bfloat16" and EXPERTS.tensor_rate == 2
    shapes = {operand.name: operand.shape for operand in EXPERTS.operands}
    assert (shapes["scale_a"], shapes["scale_b"]) == ((4, 300), (8, 3, 4))
    [launch] = GROUPED.launches(EXPERTS, ONE, 0.5)
    names = ("a", "b", "d", "scale_a", "scale_b", "offsets")
    assert launch.tensors == tuple(map(Ref, names))
    assert launch.integers == (300, 264, 400, 400, 400, 264, 1, 300, 4, 1, 4, 1, 1, 8, 12)
    assert GROUPED.violations(EXPERTS, ONE, DEFAULT_GPU) == []
    too_wide = Config(GROUPED.name, {**ONE.params, "tile_m": 256, "tile_n": 144})
    [first, *_] = GROUPED.violations(EXPERTS, too_wide, DEFAULT_GPU)
    assert "needs 216 registers a thread for sums" in first
    for text, reason in (
        ("G=8,M=300,N=264,K=400,dtype=bf16", "takes factors of blocks: dtype=e4m3"),
        ("G=8,M=300,N=260,K=400,dtype=e4m3", "not multiples of 8 and 16"),
    ):
        assert reason in GROUPED.supports(GroupedGemmProblem.parse(text), DEFAULT_GPU)
    others = families_of("grouped_gemm")
    assert "only fp16 and bf16" in others["grouped_gemm"].supports(EXPERTS, DEFAULT_GPU)
    [loop] = others["vendor_grouped_gemm"].space(EXPERTS, DEFAULT_GPU)
    assert loop["kernel"] == "mm"


def test_groups_take_tiles_of_their_mean_and_of_their_largest() -> None:
    zipf = GroupedGemmProblem.parse("G=64,M=2048,N=4096,K=7168,sizes=zipf,dtype=e4m3")
    space = GROUPED.space(zipf, DEFAULT_GPU)
    assert not any("split_k" in c.params for c in space)
    assert {c["tile_n"] for c in space if c["swap_ab"]} >= {16, 32, 64, 128}
    assert any(c["tile_m"] == 128 and not c["swap_ab"] for c in space)
