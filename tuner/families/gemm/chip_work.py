"""Demands of a product's kernel on the chip."""

from __future__ import annotations

from math import ceil

from tuner.config import Config
from tuner.families.chip_work import WARPS_PER_SM, Work, wgmmas
from tuner.families.collective import CONSUMERS, PINGPONG, PLAIN
from tuner.families.gemm.shape import oriented, smem_bytes
from tuner.hardware import SMEM_PER_SM_BYTES, SMEM_RESERVED_PER_BLOCK_BYTES, WARP, WARP_GROUP, Gpu
from tuner.problem import DTYPE_BYTES, GemmProblem


def gemm_work(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    """The one launch of a config of `gemm`."""
    shape = oriented(problem, config["swap_ab"])
    tile_m, tile_n, tile_k = config["tile_m"], config["tile_n"], config["tile_k"]
    cluster_m, cluster_n = config["cluster_m"], config["cluster_n"]
    schedule = config["kernel_schedule"]
    blocks = ceil(shape.m / tile_m) * ceil(shape.n / tile_n) * shape.batch
    steps = blocks * ceil(shape.k / tile_k)
    _, smem = smem_bytes(problem, config)
    resident = 1
    threads = WARP_GROUP * (3 if schedule == PINGPONG else 1 + CONSUMERS[schedule])
    if schedule == PLAIN:
        by_smem = SMEM_PER_SM_BYTES // (smem + SMEM_RESERVED_PER_BLOCK_BYTES)
        resident = max(1, min(by_smem, WARPS_PER_SM * WARP // threads))
    cluster = cluster_m * cluster_n
    width = DTYPE_BYTES[problem.dtype]
    return Work(
        kernel="gemm",
        launches=1,
        tiles=blocks * config.get("splits", 1),
        slots=gpu.sm_count // cluster * cluster * resident,
        is_even=config.get("decomposition_mode") != "StreamK",
        threads=threads,
        smem_bytes=smem,
        blocks_per_sm=resident,
        tensor_flops=2.0 * tile_m * tile_n * tile_k * steps,
        wgmma=steps * wgmmas(tile_m, tile_n, tile_k) // problem.tensor_rate,
        exponentials=0.0,
        # Multicast: a block reads its share of a tile and has the rest from its cluster.
        l2_bytes=width * tile_k * (tile_m / cluster_n + tile_n / cluster_m) * steps
        + sum(operand.bytes for operand in problem.operands[2:]),
    )
