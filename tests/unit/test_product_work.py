"""Work terms of products, and the domains that their portfolio has."""

from __future__ import annotations

import pytest
from gemm_configs import tile

from tuner.config import Config
from tuner.families import families
from tuner.families.by_operation import GatedDomain, ProductDomain, domain_of
from tuner.families.product_work import (
    ROW_TERMS,
    STREAM_K,
    TERMS,
    FewRowsTiling,
    ProductSizes,
    ProductTiling,
    row_work,
    work,
)
from tuner.hardware import DEFAULT_GPU
from tuner.problem import PROBLEMS, GemmProblem, Problem, SwigluProblem

CUBLAS = Config("vendor_blas", {"kernel": "cublas"})
TORCH = Config("vendor_swiglu", {"kernel": "torch"})
GEMV = Config(
    "gemv",
    {
        **{"warps": 8, "k_warps": 8, "row_tiles": 2, "pieces": 4, "stages": 4},
        **{"blocks_per_sm": 1, "persistent": True, "pdl": True, "lead": 1024},
    },
)
SPLIT = Config(
    "gemm",
    {
        **tile(128, 128).params,
        "kernel_schedule": "TmaWarpSpecializedCooperative",
        "epilogue_schedule": "TmaWarpSpecializedCooperative",
        "tile_scheduler": "StreamK",
        "decomposition_mode": "SplitK",
        "splits": 2,
    },
)


def product(text: str) -> GemmProblem:
    return GemmProblem.parse(text)


def amounts(text: str, tiling: ProductTiling) -> dict[str, float]:
    return dict(zip(TERMS, work(ProductSizes.of(product(text)), tiling, DEFAULT_GPU), strict=True))


class TestWork:
    def test_the_output_weighs_more_behind_a_short_main_loop(self) -> None:
        deep, shallow = (
            amounts(f"M=2048,N=4096,K={k}", ProductTiling(128, 128)) for k in (4096, 512)
        )
        assert shallow["output"] == deep["output"]
        assert shallow["shallow_output"] == 8 * deep["shallow_output"] == 2 * shallow["output"]

    def test_tiles_come_in_waves(self) -> None:
        """16 by 32 tiles of 128 by 128 on 132 multiprocessors; 4096 of K are 64 steps."""
        found = amounts("M=2048,N=4096,K=4096", ProductTiling(128, 128))
        assert (found["waves"], found["wave_steps"]) == (4, 256)
        assert found["tiles"] == pytest.approx(512 / 132)
        assert found["mean_steps"] == pytest.approx(64 * 512 / 132)
        assert found["memory"] == pytest.approx(2 * (2 * 2048 * 4096 + 4096 * 4096) / 1e6)

    def test_tiles_outside_of_the_output_are_padding(self) -> None:
        """Three rows of tiles in clusters of two have a fourth."""
        whole = amounts("M=512,N=4096,K=4096", ProductTiling(128, 128, cluster_rows=2))
        cut = amounts("M=384,N=4096,K=4096", ProductTiling(128, 128, cluster_rows=2))
        assert (whole["padding"], whole["tiles"]) == (0, cut["tiles"])
        assert cut["padding"] == pytest.approx(32 * 64 / 132)

    def test_a_swizzle_pads_as_the_scheduler_does(self) -> None:
        """It is halved until the shorter side has tiles enough, then both sides are rounded up."""
        few, many = (
            amounts(f"M={m},N=8192,K=64", ProductTiling(128, 128, swizzle=8)) for m in (256, 1152)
        )
        assert few["padding"] == 0, "two rows of tiles: a swizzle of two"
        assert many["tiles"] == pytest.approx(16 * 64 / 132), "nine rows of tiles are sixteen"

    def test_swapped_operands_change_places(self) -> None:
        swapped = amounts("M=16,N=4096,K=4096", ProductTiling(64, 16, is_swapped=True))
        assert swapped["tiles"] == pytest.approx(64 / 132)

    def test_splits_share_steps_and_are_combined(self) -> None:
        one, four = (
            amounts("M=128,N=4096,K=4096", ProductTiling(128, 128, splits=n)) for n in (1, 4)
        )
        assert (one["wave_steps"], four["wave_steps"]) == (64, 16)
        assert (one["partials"], one["splits"]) == (0, 0)
        assert four["splits"] == 4
        assert four["partials"] == pytest.approx(4 * 4 * 128 * 4096 / 1e6)

    def test_stream_k_has_no_idle_part_of_a_wave(self) -> None:
        tiles, stream = (
            amounts("M=2048,N=4608,K=4096", ProductTiling(128, 128, splits=n))
            for n in (1, STREAM_K)
        )
        assert tiles["waves"] == 5 and stream["waves"] == pytest.approx(16 * 36 / 132)

    def test_memory_binds_few_rows_and_tensor_cores_many(self) -> None:
        few = amounts("M=16,N=8192,K=8192", ProductTiling(64, 16, is_swapped=True))
        many = amounts("M=8192,N=8192,K=8192", ProductTiling(128, 256))
        assert few["bound"] == pytest.approx(few["memory"] / 4.3)
        assert many["bound"] > 2 * many["memory"] / 4.3

    def test_rows_of_weights_come_in_rounds(self) -> None:
        sizes = ProductSizes.of(product("M=4,N=8192,K=4096"))
        found = dict(
            zip(
                ROW_TERMS,
                row_work(sizes, FewRowsTiling(16, 1024, 1, True, 4), DEFAULT_GPU),
                strict=True,
            )
        )
        assert (found["rounds"], found["round_steps"], found["row_steps"]) == (4, 16, 64)
        assert found["uneven"] == pytest.approx(found["memory"] * 4 * 132 / 512)
        assert found["inputs"] == pytest.approx(132 * 2 * 4 * 4096 / 1e6), "a block reads A once"
        assert (found["refills"], found["idle_refills"]) == (4, 0), "each multiprocessor has tiles"
        assert (found["rows"], found["many_rows"]) == (2 * 4 * 4096 / 1e3, 0)

    def test_few_columns_leave_multiprocessors_idle(self) -> None:
        tiling = FewRowsTiling(8, 1024, 1, True, 6)
        idle, refills = ROW_TERMS.index("idle_refills"), 12 / 6
        for columns, share in ((128, 1 - 16 / 132), (1056, 0.0)):
            sizes = ProductSizes.of(product(f"M=1,N={columns},K=12288"))
            assert row_work(sizes, tiling, DEFAULT_GPU)[idle] == pytest.approx(share * refills)

    def test_more_rows_than_a_tile_s_half_have_a_kernel_of_their_own(self) -> None:
        tiling, many = FewRowsTiling(8, 1024, 1, True, 6), ROW_TERMS.index("many_rows")
        found = [
            row_work(ProductSizes.of(product(f"M={m},N=4096,K=4096")), tiling, DEFAULT_GPU)[many]
            for m in (8, 9)
        ]
        assert found == [0, 1]

    @pytest.mark.parametrize(
        ("problem", "config"),
        [
            (product("M=4,N=4096,K=4096"), GEMV),
            (product("M=512,N=4096,K=4096"), tile(128, 128)),
            (product("M=512,N=4096,K=4096"), CUBLAS),
            (SwigluProblem(512, 4096, 4096), Config("gemm_swiglu", tile(128, 128).params)),
            (SwigluProblem(512, 4096, 4096), TORCH),
        ],
        ids=lambda value: getattr(value, "family", ""),
    )
    def test_amounts_have_names(self, problem: Problem, config: Config) -> None:
        member = families()[config.family]
        found = member.work(problem, config, DEFAULT_GPU)
        assert len(found) == len(member.work_terms) and all(amount >= 0 for amount in found)

    def test_a_gated_product_has_the_columns_of_both_projections(self) -> None:
        plain, gated = (
            ProductSizes.of(product("M=8,N=8192,K=64")),
            ProductSizes.of(SwigluProblem(8, 4096, 64)),
        )
        assert (gated.n, gated.inputs) == (plain.n, plain.inputs)
        assert gated.output == plain.output / 2


class TestSchedules:
    def test_split_k_fills_the_chip_twice_at_most(self) -> None:
        gemm, problem = families()["gemm"], product("M=128,N=4096,K=4096")
        counts = [c["splits"] for c in gemm.scheduled(problem, SPLIT, DEFAULT_GPU)]
        assert counts == [2, 3, 4, 6, 8]
        assert all(gemm.accepts(problem, c, DEFAULT_GPU) for c in
                   gemm.scheduled(problem, SPLIT, DEFAULT_GPU))  # fmt: skip
        assert gemm.scheduled(product("M=4096,N=8192,K=4096"), SPLIT, DEFAULT_GPU) == []

    def test_others_have_one(self) -> None:
        gemm, problem = families()["gemm"], product("M=128,N=4096,K=4096")
        assert gemm.scheduled(problem, tile(128, 128), DEFAULT_GPU) == [tile(128, 128)]
        assert not gemm.is_scheduled(tile(128, 128)) and gemm.is_scheduled(SPLIT)


@pytest.mark.parametrize(
    ("op", "text", "domain"),
    [
        ("gemm", "M=1,N=4096,K=4096", ProductDomain("few")),
        ("gemm", "M=16,N=4096,K=4096,dtype=bf16,epilogue=bias", ProductDomain("few", "bias")),
        ("gemm", "M=17,N=4096,K=4096", ProductDomain("narrow")),
        ("gemm", "M=256,N=128256,K=4096", ProductDomain("narrow")),
        ("gemm", "M=257,N=4096,K=4096,epilogue=bias_gelu", ProductDomain("wide", "bias_gelu")),
        ("gemm", "M=257,N=129,K=4096,epilogue=bias", ProductDomain("wide", "bias")),
        ("gemm", "M=257,N=128,K=4096,epilogue=bias", ProductDomain("tall", "bias")),
        ("gemm", "M=256,N=128,K=4096", ProductDomain("narrow")),
        ("gemm", "M=8,N=4096,K=4096,epilogue=relu", ProductDomain("few", "relu")),
        ("gemm", "M=512,N=4096,K=4096,epilogue=bias_residual", None),
        ("gemm", "M=512,N=4096,K=4096,B=2", None),
        ("gemm", "M=512,N=4096,K=4096,layout_b=row", ProductDomain("wide", "", "input")),
        (
            "gemm",
            "M=512,N=4096,K=64,layout_a=col,layout_b=row",
            ProductDomain("wide", "", "weight"),
        ),
        ("gemm", "M=512,N=4096,K=4096,layout_a=col", None),
        ("gemm", "M=512,N=4096,K=4096,layout_b=row,epilogue=bias", None),
        ("gemm", "M=256,N=4096,K=4096,layout_b=row", None),
        ("gemm", "M=512,N=128,K=4096,layout_a=col,layout_b=row", None),
        ("gemm", "M=512,N=4096,K=4096,dtype=e4m3", None),
        ("gemm", "M=512,N=4096,K=4096,dtype_d=fp32", None),
        ("swiglu", "M=512,N=4096,K=4096", GatedDomain("wide")),
        ("swiglu", "M=512,N=4096,K=4096,weights=concatenated", None),
        ("softmax", "M=512,N=512", None),
    ],
)
def test_the_domain_is_the_rows_and_the_epilogue(op: str, text: str, domain: object) -> None:
    assert domain_of(PROBLEMS[op].parse(text)) == domain


@pytest.mark.parametrize(
    "domain",
    [
        ProductDomain("few"),
        ProductDomain("wide", "bias_gelu"),
        ProductDomain("wide", gradient="input"),
        ProductDomain("wide", gradient="weight"),
        GatedDomain("narrow"),
    ],
    ids=lambda domain: domain.label(),
)
def test_a_domain_s_problems_are_its_own(domain: ProductDomain | GatedDomain) -> None:
    assert all(domain_of(problem) == domain for problem in domain.problems("bfloat16"))


def test_a_plain_product_is_the_donor_of_one_with_a_bias() -> None:
    for rows in ("few", "narrow", "wide"):
        assert [d.epilogue for d in ProductDomain(rows).recipients] == ["bias"]
    assert not list(ProductDomain("wide", gradient="input").recipients)
    for domain in ProductDomain("few").recipients:
        assert list(domain.donors) == [ProductDomain("few")]
        assert domain.vendors == {"addmm"}
