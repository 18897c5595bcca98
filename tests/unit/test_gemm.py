"""The family `gemm`: its legality, its launches and its text."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from gemm_samples import GEMM, PROBLEMS, SQUARE, coop, ping, plain, stream_k
from goldens import Goldens
from hypothesis import given
from hypothesis import strategies as st

from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import Ref
from tuner.families.collective import NO_SMEM
from tuner.families.gemm import Gemm, Matrix, gemm_launch
from tuner.families.gemm.shape import smem_bytes
from tuner.hardware import DEFAULT_GPU, SMEM_PER_BLOCK_BYTES
from tuner.problem import E4M3, EPILOGUE_SCALES, EPILOGUES, AttentionProblem, GemmProblem


def test_the_family_is_found() -> None:
    assert isinstance(family("gemm"), Gemm)
    assert GEMM.op == "gemm"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ping(tile_m=96), "tile_m=96 is not a multiple of 64"),
        (coop(tile_m=192), "tile_m=192 is not a multiple of 128"),
        (ping(tile_n=24), "tile_n=24 is not known (allowed: 8, 16, 32, 64, 80"),
        (ping(tile_k=8), "tile_k=8 is not a multiple of 16"),
        (ping(tile_m=64, tile_n=512), "exceeds 256"),
        (ping(tile_n=256), "256 accumulator registers"),
        (coop(tile_m=256), "256 accumulator registers"),
        (ping(cluster_m=3), "cluster_m=3 is not known (allowed: 1, 2, 4, 8)"),
        (ping(cluster_m=4, cluster_n=4), "over 8 blocks"),
        (ping(tile_n=16, cluster_m=4), "not multiples of 8"),
        (ping(epilogue_schedule="TmaWarpSpecializedCooperative"), "does not go with"),
        (coop(epilogue_schedule="TmaWarpSpecialized"), "does not go with"),
        (coop(stages=6), "bytes of shared memory at 6 stages"),
        (ping(stages=1), "stages=1 are too few"),
        (ping(tile_scheduler="StreamK"), "tile_scheduler does not apply"),
        (coop(tile_scheduler=None), "tile_scheduler is missing"),
        (plain(raster_order="AlongM"), "raster_order does not apply"),
        (stream_k(decomposition_mode=None, splits=None), "decomposition_mode is missing"),
        (stream_k(decomposition_mode="StreamK"), "splits does not apply"),
        (stream_k(splits=None), "splits is missing"),
        (ping(max_swizzle_size=3), "max_swizzle_size=3 is not known (allowed: 1, 2, 4, 8)"),
        (ping(swap_ab="yes"), "swap_ab='yes' is not known (allowed: False, True)"),
        (ping(swap_ab=1), "swap_ab=1 is not known"),
        (ping(cluster_m=True), "cluster_m=True is not known"),
        (ping(tile_m=128.0), "tile_m=128.0 is not known"),
        (ping(stages=0), "stages=0 is not known (allowed: 1 to 32)"),
        (ping(warps=4), "parameter 'warps' is not known"),
        (ping(tile_k=None), "parameter tile_k is missing"),
    ],
)
def test_what_is_illegal_says_why(config: Config, reason: str) -> None:
    reasons = GEMM.violations(SQUARE, config, DEFAULT_GPU)
    assert any(reason in given for given in reasons), reasons


@pytest.mark.parametrize("config", [ping(), coop(), plain(), stream_k(), coop(stages=4)])
def test_what_is_legal_has_no_reasons(config: Config) -> None:
    assert GEMM.violations(SQUARE, config, DEFAULT_GPU) == []


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (GemmProblem(128, 128, 100), "a's contiguous extent 100 is not a multiple of 8"),
        (GemmProblem(100, 128, 128, layout_a="col"), "a's contiguous extent 100"),
        (GemmProblem(128, 132, 128, layout_b="row"), "b's contiguous extent 132"),
        (GemmProblem(128, 132, 128), "d's contiguous extent 132 is not a multiple of 8"),
        (GemmProblem(128, 130, 128, dtype_d="float32"), "d's contiguous extent 130 is not a"),
        (
            GemmProblem(128, 128, 136, dtype=E4M3),
            "a's contiguous extent 136 is not a multiple of 16",
        ),
        (
            GemmProblem(128, 132, 128, dtype=E4M3),
            "d's contiguous extent 132 is not a multiple of 8",
        ),
        (GemmProblem(2**20, 2**20, 2**20), "stride of 2^40 bytes"),
        (GemmProblem(2**31 - 1, 2**20, 8), "tiles exceed 2^31 - 1"),
    ],
)
def test_what_a_problem_forbids(problem: GemmProblem, reason: str) -> None:
    reasons = GEMM.violations(problem, ping(), DEFAULT_GPU)
    assert any(reason in given for given in reasons), reasons
    assert not GEMM.space(problem, DEFAULT_GPU)


def test_wide_outputs_need_half_the_alignment() -> None:
    problem = GemmProblem(128, 132, 128, dtype_d="float32")
    assert GEMM.violations(problem, ping(), DEFAULT_GPU) == []


def test_only_a_persistent_kernel_takes_many_batches() -> None:
    problem = GemmProblem(64, 64, 64, batch=70_000)
    assert GEMM.violations(problem, ping(), DEFAULT_GPU) == []
    assert "65535" in GEMM.violations(problem, plain(), DEFAULT_GPU)[0]


def test_other_problems_are_refused() -> None:
    attention = AttentionProblem(1024, 1024, 64)
    assert GEMM.violations(attention, ping(), DEFAULT_GPU) == ["gemm serves gemm, not attention"]
    assert GEMM.supports(attention, DEFAULT_GPU)
    with pytest.raises(ConfigError, match="not attention"):
        GEMM.kernels(attention, ping())


@given(
    st.dictionaries(
        st.sampled_from([*ping().params, "stages", "splits", "tile_scheduler", "x"]),
        st.one_of(st.integers(-4, 600), st.booleans(), st.sampled_from(["StreamK", "AlongM", ""])),
    ),
    st.sampled_from([ping(), coop(), plain(), stream_k()]),
)
def test_the_predicate_is_total(changes: dict[str, Any], base: Config) -> None:
    reasons = GEMM.violations(SQUARE, Config("gemm", {**base.params, **changes}), DEFAULT_GPU)
    assert all(isinstance(reason, str) and reason for reason in reasons)


def test_draws_are_repeatable_and_on_both_sides_of_the_predicate() -> None:
    space = GEMM.space(SQUARE, DEFAULT_GPU)

    def draw(seed: int) -> Config:
        return GEMM.draw(SQUARE, DEFAULT_GPU, space, random.Random(seed))

    draws = [draw(seed) for seed in range(60)]
    assert draws == [draw(seed) for seed in range(60)]
    reasons = [GEMM.violations(SQUARE, config, DEFAULT_GPU) for config in draws]
    assert 10 < sum(map(bool, reasons)) < 50
    # A field too many is no test of the predicate: the kernel would work.
    assert not [r for given in reasons for r in given if "apply" in r or "missing" in r]


#: sizeof(SharedStorage) and stages of kernels compiled with nvcc 13.0 and CUTLASS 4.2:
#: dtype_d, stages asked for (0: automatic), config, stages, bytes.
COMPILED = [
    ("float16", ping(), 6, 205824),
    ("float16", ping(tile_m=64, tile_n=256), 5, 214016),
    ("float16", coop(), 4, 214016),
    ("float16", stream_k(tile_n=128), 6, 214016),
    ("float16", plain(tile_m=64, tile_n=64, stages=4), 4, 66048),
    ("float16", ping(tile_m=64, tile_n=16, tile_k=128, swap_ab=True), 11, 229376),
    ("float16", coop(tile_m=256, tile_n=192, swap_ab=True), 3, 190464),
    ("float16", stream_k(tile_n=16, swap_ab=True), 12, 227328),
    ("float16", ping(tile_m=64, tile_n=16), 22, 228096),
    ("float32", ping(), 6, 215040),
    ("float32", plain(stages=7), 7, 230400),
    ("float32", plain(tile_m=64, tile_n=256, tile_k=32, stages=2), 2, 41984),
    ("float32", stream_k(), 4, 231424),
    ("float32", ping(tile_m=64, tile_n=256, epilogue_schedule="NoSmemWarpSpecialized"), 5, 205184),
    (
        "float16",
        coop(tile_n=64, tile_k=128, epilogue_schedule="NoSmemWarpSpecialized"),
        4,
        196864,
    ),
]


#: The same of epilogues: type of D, epilogue, config, stages, bytes.
NARROW: dict[str, Any] = {"tile_m": 64, "tile_n": 16, "tile_k": 128}
COMPILED_EPILOGUES = [
    ("float16", "bias_gelu", coop(), 4, 214016),
    ("float16", "bias", plain(tile_m=64, tile_n=256, stages=2), 2, 82432),
    ("float16", "bias_gelu", ping(**NARROW, cluster_m=1), 11, 227840),
    ("float16", "bias_gelu", ping(**NARROW, cluster_m=1, swap_ab=True), 11, 229376),
    ("float16", "residual", ping(**NARROW, cluster_m=1), 11, 230144),
    ("float16", "bias_residual", coop(), 4, 230400),
    ("float32", "bias_residual", coop(), 3, 215040),
    ("float32", "bias_residual", coop(tile_m=256, tile_n=96, swap_ab=True), 3, 202752),
]


QUANTISED = GemmProblem(1024, 1024, 1024, dtype=E4M3, scales="row")
SUMMED = replace(QUANTISED, fast_accum=False)
#: The same of factors: problem, config, stages, bytes.
COMPILED_SCALES = [
    (QUANTISED, coop(tile_k=128), 4, 214528),
    (QUANTISED, stream_k(tile_n=128, tile_k=128), 6, 214016),
    (replace(SUMMED, scales="tensor"), ping(tile_m=64, tile_n=192, tile_k=128), 6, 205824),
    (SUMMED, coop(tile_n=192, tile_k=128), 5, 222720),
    (
        replace(SUMMED, dtype_d="float16"),
        coop(tile_n=128, tile_k=128, swap_ab=True),
        *(6, 215040),
    ),
]


SIZED = partial(GemmProblem, 1024, 1024, 1024)


@pytest.mark.parametrize(
    ("problem", "config", "stages", "size"),
    [
        *((SIZED(dtype_d=dtype_d), *rest) for dtype_d, *rest in COMPILED),
        *((SIZED(dtype_d=d, epilogue=name), *rest) for d, name, *rest in COMPILED_EPILOGUES),
        *COMPILED_SCALES,
    ],
)
def test_shared_memory_is_what_the_compiler_says(
    problem: GemmProblem, config: Config, stages: int, size: int
) -> None:
    assert GEMM.violations(problem, config, DEFAULT_GPU) == []
    assert smem_bytes(problem, config) == (stages, size)
    assert size <= SMEM_PER_BLOCK_BYTES


def test_factors_follow_the_output_and_the_operands_that_are_swapped() -> None:
    launch = GEMM.launches(QUANTISED, ping(tile_k=128), 1.0)[0]
    assert launch.tensors == tuple(map(Ref, ("a", "b", "d", "scale_a", "scale_b")))
    assert launch.scalars == (1.0,)
    swapped = GEMM.launches(QUANTISED, ping(tile_k=128, swap_ab=True), 1.0)[0]
    assert swapped.tensors == tuple(map(Ref, ("b", "a", "d", "scale_b", "scale_a")))


@pytest.mark.parametrize("scales", EPILOGUE_SCALES)
def test_factors_go_through_shared_memory(scales: Any) -> None:
    problem = replace(QUANTISED, scales=scales)
    reasons = GEMM.violations(problem, ping(tile_k=128, epilogue_schedule=NO_SMEM), DEFAULT_GPU)
    assert reasons == [f"{NO_SMEM} has no scales={scales}"]
    assert NO_SMEM not in {c["epilogue_schedule"] for c in GEMM.space(problem, DEFAULT_GPU)}


def test_each_accumulation_has_kernels_of_its_own() -> None:
    def text(problem: GemmProblem) -> str:
        return render(GEMM.kernels(problem, ping(tile_k=128, tile_n=96))["gemm"], "x")

    assert "KernelTmaWarpSpecializedPingpongFP8FastAccum>" in text(QUANTISED)
    assert "FP8FastAccum" not in text(SUMMED)
    assert "FP8FastAccum" not in text(replace(QUANTISED, dtype="bfloat16"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (ping(tile_k=8), "tile_k=8 is not a multiple of 32"),
        (ping(tile_k=256, tile_n=64), "tile_k=256 does not divide 128"),
        (coop(tile_k=128), "tile 128x256 needs 256 accumulator registers"),
    ],
)
def test_what_partial_sums_forbid(config: Config, reason: str) -> None:
    found = GEMM.violations(SUMMED, config, DEFAULT_GPU)
    assert any(reason in text for text in found), found
    allowed = GEMM.violations(QUANTISED, config, DEFAULT_GPU)
    assert not any(reason in text for text in allowed) or config["tile_k"] == 8


def test_e4m3_is_expected_at_twice_the_rate() -> None:
    def best(problem: GemmProblem) -> float:
        space = GEMM.space(problem, DEFAULT_GPU)
        return min(GEMM.predict_us(problem, config, DEFAULT_GPU) for config in space)

    large = GemmProblem(8192, 8192, 8192, dtype="bfloat16")
    fast = replace(large, dtype=E4M3, dtype_d="bfloat16")
    assert 0.45 < best(fast) / best(large) < 0.6
    assert best(fast) < best(replace(fast, fast_accum=False))


def test_an_epilogue_s_operands_follow_the_output() -> None:
    problem = GemmProblem(256, 512, 128, epilogue="bias_residual")
    launch = GEMM.launches(problem, ping(), 0.5)[0]
    assert launch.tensors == tuple(map(Ref, ("a", "b", "d", "bias", "residual")))
    assert launch.scalars == (0.5, 1.0)
    swapped = GEMM.launches(problem, ping(swap_ab=True), 0.5)[0]
    assert swapped.tensors == tuple(map(Ref, ("b", "a", "d", "bias", "residual")))
    only = GEMM.launches(GemmProblem(256, 512, 128, epilogue="bias_relu"), ping(), 0.5)[0]
    assert (only.tensors[3:], only.scalars) == ((Ref("bias"),), (0.5,))


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_an_epilogue_goes_through_shared_memory(epilogue: str) -> None:
    problem = GemmProblem(4096, 4096, 4096, epilogue=epilogue)
    reasons = GEMM.violations(problem, ping(epilogue_schedule=NO_SMEM), DEFAULT_GPU)
    assert reasons == [f"{NO_SMEM} has no epilogue={epilogue}"]
    assert GEMM.violations(SQUARE, ping(epilogue_schedule=NO_SMEM), DEFAULT_GPU) == []
    schedules = {c["epilogue_schedule"] for c in GEMM.space(problem, DEFAULT_GPU)}
    assert NO_SMEM not in schedules and len(schedules) == 2


def test_a_bias_follows_the_operands_that_are_swapped() -> None:
    def along(problem: GemmProblem, swap_ab: bool) -> str:
        text = render(GEMM.kernels(problem, ping(swap_ab=swap_ab))["gemm"], "x")
        return "Row" if "LinCombPerRowBias" in text else "Col" if "PerColBias" in text else ""

    biased = GemmProblem(4096, 4096, 4096, epilogue="bias_silu")
    assert (along(biased, False), along(biased, True), along(SQUARE, False)) == ("Col", "Row", "")


def test_an_activation_costs_time_that_ping_pong_hides() -> None:
    def cost_of(epilogue: str, config: Config) -> float:
        return GEMM.predict_us(replace(SQUARE, epilogue=epilogue), config, DEFAULT_GPU)

    assert cost_of("", coop()) < cost_of("relu", coop()) < cost_of("gelu", coop())
    assert cost_of("residual", coop()) > cost_of("", coop())
    hidden = cost_of("gelu", ping()) / cost_of("", ping())
    assert hidden < cost_of("gelu", coop()) / cost_of("", coop())


def test_a_launch_says_extents_strides_and_order() -> None:
    problem = GemmProblem(256, 512, 128, batch=3, layout_b="row")
    launch = GEMM.launches(problem, stream_k(raster_order="AlongN"), 0.5)[0]
    assert launch.kernel == "gemm"
    assert launch.tensors == (Ref("a"), Ref("b"), Ref("d"))
    assert launch.integers == (
        *(256, 512, 128, 3),
        *(128, 512, 512),
        *(256 * 128, 128 * 512, 256 * 512),
        *(1, 2, 2, 3),
        *(0, 0),
    )
    assert launch.scalars == (0.5,)


def test_a_swapped_launch_exchanges_operands() -> None:
    problem = GemmProblem(256, 512, 128, layout_a="col")
    launch = GEMM.launches(problem, ping(swap_ab=True), 1.0)[0]
    assert launch.tensors == (Ref("b"), Ref("a"), Ref("d"))
    assert launch.integers[:10] == (
        *(512, 256, 128, 1),
        *(128, 256, 512),
        *(512 * 128, 256 * 128, 256 * 512),
    )


@pytest.mark.parametrize(
    ("layouts", "swapped"),
    [
        (("row", "col"), ("row", "col", "col")),
        (("row", "row"), ("col", "col", "col")),
        (("col", "col"), ("row", "row", "col")),
        (("col", "row"), ("col", "row", "col")),
    ],
)
def test_swapped_layouts(layouts: tuple[Any, Any], swapped: tuple[str, ...]) -> None:
    problem = GemmProblem(256, 256, 256, layout_a=layouts[0], layout_b=layouts[1])

    def seen(config: Config) -> tuple[Any, ...]:
        variables = GEMM.kernels(problem, config)["gemm"].variables
        return tuple(variables[f"layout_{x}"] for x in "abd")

    assert seen(ping()) == (*layouts, "row")
    assert seen(ping(swap_ab=True)) == swapped


def test_another_family_gives_its_own_operands() -> None:
    problem = GemmProblem(1024, 1024, 64, batch=4, dtype_d="float32")
    launch = gemm_launch(
        problem,
        plain(tile_m=64),
        (
            Matrix(Ref("query", 256), 1024, 64),
            Matrix(Ref("key"), 512, 32),
            Matrix(Ref("scratch", 1024), 2048, 4096),
        ),
        0.125,
        kernel="qk.gemm",
        pdl=True,
    )
    assert launch.kernel == "qk.gemm"
    assert launch.tensors == (Ref("query", 256), Ref("key"), Ref("scratch", 1024))
    assert launch.integers[3:10] == (4, 1024, 512, 2048, 64, 32, 4096)
    assert launch.integers[10:] == (1, 0, 0, 1, 0, 1)


RENDERED = {
    "plain": (PROBLEMS["scores"], plain(tile_m=64, tile_n=128, stages=2)),
    "pingpong": (SQUARE, ping()),
    "stream_k": (GemmProblem(512, 512, 512, dtype="bfloat16", layout_a="col"), stream_k()),
    "swapped": (PROBLEMS["one row"], ping(tile_m=64, tile_n=16, swap_ab=True)),
    "bias_gelu": (PROBLEMS["mlp"], ping()),
    "bias_residual": (
        replace(PROBLEMS["residual"], dtype="bfloat16"),
        stream_k(tile_n=64, swap_ab=True),
    ),
    "scaled": (PROBLEMS["e4m3, few rows"], ping(tile_m=64, tile_n=16, tile_k=128)),
    "e4m3": (PROBLEMS["e4m3, small output"], ping(tile_k=128)),
}


def test_golden_texts(goldens: Goldens) -> None:
    texts = {}
    for name, (problem, config) in RENDERED.items():
        assert GEMM.violations(problem, config, DEFAULT_GPU) == []
        texts[name] = render(GEMM.kernels(problem, config)["gemm"], "golden")
    goldens.check("gemm", texts)
