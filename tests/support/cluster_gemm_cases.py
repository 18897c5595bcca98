"""Configs of `cluster_gemm` that tests compile, emulate and run."""

from __future__ import annotations

from tuner.config import Config, Value
from tuner.families.base import KernelSpec
from tuner.families.cluster_gemm import KERNEL, ClusterGemm, deepened
from tuner.hardware import DEFAULT_GPU
from tuner.problem import GemmProblem

FAMILY = ClusterGemm()


def config(
    tile: tuple[int, int],
    stages: int = 0,
    *,
    swap_ab: bool = False,
    split_k: int = 1,
    blocks_per_sm: int = 1,
    **further: Value,
) -> Config:
    """A config; with as many stages as fit where their number is 0."""
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": max(stages, 2)},
        **{"split_k": split_k, "blocks_per_sm": blocks_per_sm},
        **{"raster_order": "AlongM", "max_swizzle_size": 1, "pdl": True},
        **further,
    }
    made = Config(FAMILY.name, params)
    return made if stages else deepened(made)


def spec_of(chosen: Config, epilogue: str = "", dtype: str = "bfloat16") -> KernelSpec:
    """The kernel of a config."""
    problem = GemmProblem.parse("M=128,N=4096,K=4096" + _rest(epilogue, dtype))
    assert not FAMILY.violations(problem, chosen, DEFAULT_GPU)
    return FAMILY.kernels(problem, chosen)[KERNEL]


def _rest(epilogue: str, dtype: str) -> str:
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    return f",dtype={short}" + (f",epilogue={epilogue}" if epilogue else "")


def problem(size: tuple[int, int, int], epilogue: str = "", dtype: str = "bfloat16") -> GemmProblem:
    """A product of a size."""
    m, n, k = size
    return GemmProblem.parse(f"M={m},N={n},K={k}" + _rest(epilogue, dtype))


COMPILED = {
    "widest": (config((128, 256), swap_ab=True, split_k=2), "bias_gelu", "float16"),
    "two blocks": (config((64, 128), blocks_per_sm=2, split_k=2), "bias_gelu_tanh", "bfloat16"),
    "two parts": (config((256, 128)), "", "bfloat16"),
    "narrowest": (config((64, 16), swap_ab=True, split_k=8), "", "bfloat16"),
    "columns": (config((64, 96), split_k=4), "bias_silu", "float16"),
    "parts in turn": (config((128, 192), serial_parts=8), "bias", "bfloat16"),
    "few rows, long K": (config((128, 64), swap_ab=True, split_k=4), "bias", "bfloat16"),
}
SIZES = ((1, 8, 520), (70, 264, 1032), (128, 2112, 4096), (256, 520, 8192), (1300, 72, 2880))
"""M, N and K; the last tiles and blocks of K of most are cut off."""
