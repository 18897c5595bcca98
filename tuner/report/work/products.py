"""Work of products' kernels, and of a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from tuner.config import Config
from tuner.families import block_scaled_gemm, cluster_gemm, gemv, grouped_gemm
from tuner.families.gemm.shape import CONSUMERS, PINGPONG, PLAIN, oriented, smem_bytes
from tuner.families.gemm_swiglu import product_of
from tuner.hardware import (
    REGISTERS_PER_SM,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    WARP,
    WARP_GROUP,
    Gpu,
)
from tuner.problem import (
    DTYPE_BYTES,
    SCALE_BLOCK,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)
from tuner.report.work.base import WARPS_PER_SM, WGMMA_M, Work, total, wgmmas

#: Exponentials an element in each way to compute a softmax: with the row in registers, with an
#: online maximum, in three passes.
EXPONENTIALS = {1: 1, 2: 2, 3: 2}


def works(problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    """The kernel of a call; empty for a family that is not known here."""
    match problem, config.family:
        case GemmProblem(), "gemm":
            return (_gemm(problem, config, gpu),)
        case GemmProblem(), "block_scaled_gemm":
            return (_block_scaled_gemm(problem, config, gpu),)
        case GemmProblem(), "cluster_gemm":
            return (_cluster_gemm(problem, config, gpu),)
        case GemmProblem(), "gemv":
            return (_gemv(problem, config, gpu),)
        case SwigluProblem(), "gemm_swiglu":
            return (_gemm_swiglu(problem, config, gpu),)
        case GroupedGemmProblem(), "block_scaled_grouped_gemm":
            return (_block_scaled_groups(problem, config, gpu),)
        case GroupedGemmProblem(), "grouped_gemm":
            return (_grouped_gemm(problem, config, gpu),)
        case SoftmaxProblem(), "softmax":
            return (_softmax(problem, config, gpu),)
        case _:
            return ()


def _gemm(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
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


def _block_scaled_gemm(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["split_k"]
    cluster = config["cluster_m"] * config["cluster_n"]
    along = block_scaled_gemm.tiles(problem, config)
    blocks = along[0] * along[1] * cluster
    steps = blocks * ceil(problem.k / SCALE_BLOCK)
    loaded = tile_m / config["cluster_n"] + tile_n / config["cluster_m"]
    return Work(
        kernel="block_scaled_gemm",
        launches=1,
        tiles=blocks * splits,
        slots=gpu.sm_count // (cluster * splits) * cluster * splits,
        is_even=True,
        threads=WARP_GROUP * (1 + min(2, tile_m // WGMMA_M)),
        smem_bytes=block_scaled_gemm.smem_bytes(config),
        blocks_per_sm=1,
        tensor_flops=2.0 * tile_m * tile_n * SCALE_BLOCK * steps,
        wgmma=steps * wgmmas(tile_m, tile_n, SCALE_BLOCK) // problem.tensor_rate,
        exponentials=0.0,
        l2_bytes=SCALE_BLOCK * loaded * steps
        + sum(operand.bytes for operand in problem.operands[2:]),
    )


def _cluster_gemm(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["split_k"]
    along = cluster_gemm.tiles(problem, config)
    tiles, depth, resident = along[0] * along[1], cluster_gemm.BLOCK_K, config["blocks_per_sm"]
    steps = tiles * ceil(problem.k / depth)
    return Work(
        kernel="cluster_gemm",
        launches=1,
        tiles=tiles * splits,
        slots=gpu.sm_count // splits * splits * resident,
        is_even=True,
        threads=WARP_GROUP * (2 if tile_m <= WGMMA_M else 3),
        smem_bytes=cluster_gemm.smem_bytes(config),
        blocks_per_sm=resident,
        tensor_flops=2.0 * tile_m * tile_n * depth * steps,
        wgmma=steps * wgmmas(tile_m, tile_n, depth),
        exponentials=0.0,
        # The blocks of a cluster add their sums through shared memory.
        l2_bytes=DTYPE_BYTES[problem.dtype] * depth * (tile_m + tile_n) * steps
        + sum(operand.bytes for operand in problem.operands[2:]),
    )


def _block_scaled_groups(problem: GroupedGemmProblem, config: Config, gpu: Gpu) -> Work:
    one = Config("block_scaled_gemm", {**config.params, "split_k": 1})
    return _of_groups(
        [
            _block_scaled_gemm(
                GemmProblem(rows, problem.n, problem.k, dtype=problem.dtype, scales="block"),
                one,
                gpu,
            )
            for rows in problem.rows
            if rows
        ],
        config.family,
    )


def _gemm_swiglu(problem: SwigluProblem, config: Config, gpu: Gpu) -> Work:
    """The product of both projections; half of its columns are stored, an exponential each."""
    found = _gemm(product_of(problem), config, gpu)
    return replace(
        found,
        kernel="gemm_swiglu",
        exponentials=float(problem.output.elements),
        l2_bytes=found.l2_bytes - problem.output.bytes,
    )


def _gemv(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    rows, padded_k = gemv.block_rows(config), gemv.padded_k(problem, config)
    tiles = ceil(problem.n / rows) * problem.batch
    resident = config["blocks_per_sm"]
    slots = gpu.sm_count * resident
    a, *others = problem.operands
    # A block reads A once, and is one block of rows unless it is persistent.
    blocks = min(tiles, slots) if config["persistent"] else tiles
    return Work(
        kernel="gemv",
        launches=1,
        tiles=tiles,
        slots=slots,
        is_even=True,
        threads=gemv.block_threads(config),
        smem_bytes=gemv.smem_bytes(problem, config),
        blocks_per_sm=resident,
        tensor_flops=2.0 * gemv.MAX_ROWS * rows * padded_k * tiles,
        wgmma=0,
        exponentials=0.0,
        l2_bytes=a.bytes / problem.batch * blocks + sum(operand.bytes for operand in others),
    )


def _grouped_gemm(problem: GroupedGemmProblem, config: Config, gpu: Gpu) -> Work:
    each = [
        _gemm(
            GemmProblem(rows, problem.n, problem.k, dtype=problem.dtype),
            grouped_gemm.as_gemm(config),
            gpu,
        )
        for rows in problem.rows
        if rows
    ]
    _, smem = grouped_gemm.smem_bytes(problem, config)
    return replace(_of_groups(each, "grouped_gemm"), smem_bytes=smem)


def _of_groups(each: Sequence[Work], kernel: str) -> Work:
    """As many tiles as the groups have, each padded to whole ones."""
    return replace(
        each[0],
        kernel=kernel,
        tiles=sum(work.tiles for work in each),
        tensor_flops=total(each, "tensor_flops"),
        wgmma=total(each, "wgmma"),
        l2_bytes=total(each, "l2_bytes"),
    )


def _softmax(problem: SoftmaxProblem, config: Config, gpu: Gpu) -> Work:
    scores, probabilities = problem.operands
    part = 0.5 if problem.is_causal else 1.0
    threads = config["threads_per_row"] * config["rows_per_block"]
    # Registers are the least that hold a row; the compiler's own number is in the measurement.
    held = ceil(problem.cols / config["threads_per_row"]) if config["passes"] == 1 else 0
    by_registers = REGISTERS_PER_SM // (threads * max(32, held))
    resident = max(1, min(by_registers, WARPS_PER_SM * WARP // threads))
    return Work(
        kernel="softmax",
        launches=1,
        tiles=ceil(problem.batch * problem.rows / config["rows_per_block"]),
        slots=gpu.sm_count * resident,
        is_even=not problem.is_causal,
        threads=threads,
        smem_bytes=0,
        blocks_per_sm=resident,
        tensor_flops=0.0,
        wgmma=0.0,
        exponentials=part * EXPONENTIALS[config["passes"]] * scores.elements,
        l2_bytes=part * config["passes"] * scores.bytes + probabilities.bytes,
    )
