"""The family `gemm_swiglu`: what it adds to `gemm`'s rules, its launch and its text."""

from __future__ import annotations

from typing import Any

import pytest
from gemm_samples import ping
from goldens import Goldens

from tuner.compile.render import render
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import Ref
from tuner.families.gemm_swiglu import GemmSwiglu, product_of
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GemmProblem, SwigluProblem

SWIGLU = GemmSwiglu()
MLP = SwigluProblem(4096, 14336, 4096)


def pingpong(**changes: Any) -> Config:
    own = {"epilogue_schedule": "NoSmemWarpSpecialized", "max_swizzle_size": 1, **changes}
    return Config("gemm_swiglu", ping(**own).params)


def test_the_family_is_found_and_computes_one_product() -> None:
    assert isinstance(family("gemm_swiglu"), GemmSwiglu)
    assert product_of(MLP) == GemmProblem(4096, 28672, 4096)
    assert product_of(MLP).flops == MLP.flops
    with pytest.raises(ConfigError, match="serves swiglu, not gemm"):
        product_of(GemmProblem(8, 64, 8))


def test_the_space_is_wide_and_has_halves_of_groups() -> None:
    space = SWIGLU.space(MLP, DEFAULT_GPU)
    assert len({SWIGLU.compile_digest(c) for c in space}) >= 60
    assert {c["tile_n"] for c in space} == {32, 64, 96, 128, 192, 256}
    assert {c["kernel_schedule"] for c in space} == set(SWIGLU.domains["kernel_schedule"])
    uneven = SWIGLU.space(SwigluProblem(512, 11008, 4096), DEFAULT_GPU)
    assert 224 in {c["tile_n"] for c in uneven}  # 396 tiles of 128 rows, three for each of 132
    few = SWIGLU.space(SwigluProblem(16, 14336, 4096), DEFAULT_GPU)
    assert few and not any(c["swap_ab"] for c in few)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swap_ab": True}, "swap_ab=True is not known (allowed: False)"),
        ({"tile_n": 80}, "tile_n=80 is not known (allowed: 32, 64, 96"),
        ({"epilogue_schedule": "TmaWarpSpecialized"}, "(allowed: NoSmemWarpSpecialized)"),
        ({"tile_m": 96}, "tile_m=96 is not a multiple of 64"),
        ({"warps": 4}, "parameter 'warps' is not known"),
    ],
)
def test_what_is_illegal_says_why(changes: dict[str, Any], reason: str) -> None:
    assert SWIGLU.violations(MLP, pingpong(), DEFAULT_GPU) == []
    reasons = SWIGLU.violations(MLP, pingpong(**changes), DEFAULT_GPU)
    assert any(reason in given for given in reasons), reasons


def test_weights_that_lie_apart_are_refused() -> None:
    apart = SwigluProblem(4096, 14336, 4096, weights="concatenated")
    reasons = SWIGLU.violations(apart, pingpong(), DEFAULT_GPU)
    assert reasons == ["weights=concatenated are not interleaved"]
    assert SWIGLU.space(apart, DEFAULT_GPU) == []


def test_a_launch_has_the_product_s_extents_and_the_output_s_stride() -> None:
    problem = SwigluProblem(200, 96, 136)
    launch = SWIGLU.launches(problem, pingpong(), 1.0)[0]
    assert launch.tensors == (Ref("a"), Ref("weights"), Ref("d"))
    assert launch.integers[:7] == (200, 192, 136, 1, 136, 136, 96)


def test_golden_text(goldens: Goldens) -> None:
    text = render(SWIGLU.kernels(MLP, pingpong())["gemm"], "golden")
    goldens.check("gemm_swiglu", {"pingpong": text})
