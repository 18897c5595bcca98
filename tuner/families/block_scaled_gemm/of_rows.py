"""Kernels for e4m3 products with factors of rows, where cuBLASLt is expected to be slower.

PyTorch's kernel of such products divides no K, and copies wide tiles: few rows take it as long as
many. Ours promote their sums, so they are more exact than what ``fast_accum`` asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from tuner.config import Config, Value
from tuner.families import families
from tuner.families.block_scaled_gemm.expected import MEMORY_EFFICIENCY, Rates, expected_us
from tuner.families.block_scaled_gemm.shape import INSTRUCTION_ROWS, LOADS, MAX_READS, deepened
from tuner.families.strided_product import tiles
from tuner.hardware import Gpu
from tuner.problem import SCALE_BLOCK, GemmProblem

MARGIN = 1.1
"""PyTorch's expected time over ours, from which on ours answer."""
PYTORCH_TILE = 128
PYTORCH_START_US, PYTORCH_TILE_US, PYTORCH_STEP_US, PYTORCH_MEMORY = 1.97, 1.73, 0.299, 1.29
"""Microseconds of a launch, of a tile and of its 128 of K, and time of the bytes over memory's.

They follow 147 products of an H200 (29 November 2026) within 7 %.
"""


def _kernel(
    tile: tuple[int, int],
    *,
    swap_ab: bool = False,
    split_k: int = 1,
    store_buffers: int = 0,
    band: int = 8,
    unroll: int = 2,
    ahead: bool = True,
) -> Config:
    params: dict[str, Value] = {
        **{"swap_ab": swap_ab, "tile_m": tile[0], "tile_n": tile[1], "stages": 2},
        **{"cluster_m": 1, "cluster_n": 1, "split_k": split_k, "store_buffers": store_buffers},
        **{"raster_order": "AlongM", "max_swizzle_size": 1 if swap_ab else band, "pdl": False},
        **{"unroll": unroll, **LOADS},
    }
    if ahead:
        params["ahead"] = True
    if ahead and split_k == 1:
        params["elected"] = True
    if tile[0] == INSTRUCTION_ROWS:
        params["uniform_branch"] = True
    if split_k > 1:
        params["vector_merge"] = True
    return deepened(Config("block_scaled_gemm", params))


KERNELS: Mapping[Config, Rates] = {
    _kernel((64, 16), swap_ab=True): Rates(199, 891),
    _kernel((64, 32), swap_ab=True): Rates(193, 1569),
    _kernel((128, 16), swap_ab=True): Rates(221, 1522),
    _kernel((64, 16), swap_ab=True, split_k=2): Rates(304, 1546),
    _kernel((64, 16), swap_ab=True, split_k=4): Rates(258, 2044),
    _kernel((64, 16)): Rates(182, 700),
    _kernel((64, 64), store_buffers=1): Rates(231, 1372),
    _kernel((64, 96), store_buffers=2, band=1): Rates(260, 2046),
    _kernel((64, 128), store_buffers=2, band=1): Rates(299, 3838),
    _kernel((64, 64), split_k=2): Rates(277, 2973),
    _kernel((128, 64), store_buffers=1): Rates(305, 1791),
    _kernel((128, 96), store_buffers=2, band=2): Rates(366, 3967),
    _kernel((128, 160), store_buffers=3, unroll=4, ahead=False, band=2): Rates(692, 4548),
    _kernel((128, 128), split_k=2): Rates(500, 7861),
    _kernel((128, 96), split_k=4): Rates(812, 481),
}
"""Kernels and their rates: the fit of `tuner develop fit rates` to
``tests/assets/fits/rates.jsonl.gz``.
"""


def expected(problem: GemmProblem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
    """Kernels that are expected to be faster than PyTorch's, by microseconds."""
    limit = pytorch_us(problem, gpu) / MARGIN
    yield from ((us, config) for us, config in _timed(problem, gpu) if us <= limit)


def slower(problem: GemmProblem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
    """The others: the batch-invariant mode has them too, so that it serves every number of rows."""
    limit = pytorch_us(problem, gpu) / MARGIN
    yield from ((us, config) for us, config in _timed(problem, gpu) if us > limit)


def _timed(problem: GemmProblem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
    """All kernels that take a product, by microseconds."""
    member = families()["block_scaled_gemm"]
    for config, rates in KERNELS.items():
        reads = tiles(problem, config)[1] if config["swap_ab"] else 1
        if reads <= MAX_READS and member.accepts(problem, config, gpu):
            yield expected_us(problem, config, gpu, rates), config


def pytorch_us(problem: GemmProblem, gpu: Gpu) -> float:
    """Expected microseconds of cuBLASLt's kernel, by its tiles of 128 x 128 and memory's time."""
    rounds = ceil(ceil(problem.m / PYTORCH_TILE) * ceil(problem.n / PYTORCH_TILE) / gpu.sm_count)
    steps = ceil(problem.k / SCALE_BLOCK)
    compute = rounds * (PYTORCH_TILE_US + steps * PYTORCH_STEP_US)
    memory = PYTORCH_MEMORY * problem.bytes / (gpu.memory_gbs * MEMORY_EFFICIENCY * 1e3)
    return float(PYTORCH_START_US + (compute**4 + memory**4) ** 0.25)
