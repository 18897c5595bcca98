"""Legality of GEMM configs: the rules that CUTLASS's headers and the hardware set.

References are as in the package: a file under ``include/cutlass``, or [c] for what was compiled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tuner.config import Config, Value
from tuner.families.collective import (
    CONSUMERS,
    COOPERATIVE,
    NO_SMEM,
    PLAIN,
    PROMOTED_K,
    TMA_EPILOGUE,
)
from tuner.families.gemm.shape import oriented, smem_bytes, tile_blocks
from tuner.hardware import (
    MAX_PORTABLE_CLUSTER,
    MAX_TMA_STRIDE_BYTES,
    SMEM_PER_BLOCK_BYTES,
    TMA_ALIGNMENT_BYTES,
    WARP_GROUP,
    WGMMA_K_BYTES,
)
from tuner.problem import DTYPE_BYTES, GemmProblem

#: Accumulator registers a thread may hold: 192 of 232 compile without a spill, 256 spill 4.5 KB
#: and serialise WGMMA [c].
MAX_ACCUMULATORS = 192
#: Largest box of a TMA copy in any mode (CUDA driver API, cuTensorMapEncodeTiled).
MAX_TMA_BOX = 256
#: Blocks of a grid in y and z [CUDA C++ Programming Guide]; only the plain schedule has one block
#: a tile, the others are persistent.
MAX_GRID_YZ = 65535


def conflicts(problem: GemmProblem, config: Config, optional: Collection[str]) -> list[str]:
    """Reasons why a config is not legal for a problem; empty when it is.

    Args:
        problem: problem of the family.
        config: config with declared values.
        optional: parameters that a config may lack.
    """
    return _presence_violations(config, optional) or [
        *_tile_violations(problem, config),
        *_cluster_violations(config),
        *_smem_violations(problem, config),
        *_epilogue_violations(problem, config),
        *_problem_violations(problem, config),
    ]


def _presence_violations(config: Config, optional: Collection[str]) -> list[str]:
    """Violations: parameters that are present and do not apply, or that apply and are absent."""
    reasons, params = [], config.params
    for name in optional:
        if name in params:
            if not applies(name, params):
                reasons.append(f"parameter {name} does not apply")
        elif name not in ("stages", "pdl") and applies(name, params):
            reasons.append(f"parameter {name} is missing")
    return sorted(reasons)


def applies(name: str, params: Mapping[str, Value]) -> bool:
    """True when an optional parameter applies, given the others."""
    match name:
        case "tile_scheduler":  # stream-K exists for cooperative kernels only
            return params["kernel_schedule"] == COOPERATIVE
        case "raster_order" | "max_swizzle_size":  # the plain schedule has a block a tile
            return params["kernel_schedule"] != PLAIN
        case "decomposition_mode":
            return params.get("tile_scheduler") == "StreamK"
        case "splits":
            return params.get("decomposition_mode") == "SplitK"
        case "pdl":  # stream-K clears its barriers first, which breaks the edge
            return params.get("tile_scheduler") != "StreamK"
        case _:
            return True


def _tile_violations(problem: GemmProblem, config: Config) -> list[str]:
    tile_m, tile_n, tile_k = config["tile_m"], config["tile_n"], config["tile_k"]
    schedule, epilogue = config["kernel_schedule"], config["epilogue_schedule"]
    consumers = CONSUMERS[schedule]
    reasons = []
    # An instruction covers 64 rows a warp group (cute/arch/mma_sm90.hpp).
    if tile_m % (64 * consumers):
        reasons.append(f"tile_m={tile_m} is not a multiple of {64 * consumers} ({schedule})")
    # 32 bytes of K an instruction (cute/arch/mma_sm90.hpp).
    depth = WGMMA_K_BYTES // DTYPE_BYTES[problem.dtype]
    if tile_k % depth:
        reasons.append(f"tile_k={tile_k} is not a multiple of {depth}")
    if max(tile_m, tile_n) > MAX_TMA_BOX or tile_k > MAX_TMA_BOX:
        reasons.append(f"tile {tile_m}x{tile_n}x{tile_k} exceeds {MAX_TMA_BOX} in one extent")
    accumulators = tile_m * tile_n // (WARP_GROUP * consumers)
    if not problem.fast_accum:
        accumulators *= 2  # partial sums and their sums
        if PROMOTED_K % tile_k:
            reasons.append(f"tile_k={tile_k} does not divide {PROMOTED_K} (fast_accum=0)")
    if accumulators > MAX_ACCUMULATORS:
        reasons.append(
            f"tile {tile_m}x{tile_n} needs {accumulators} accumulator registers a thread "
            f"(at most {MAX_ACCUMULATORS})"
        )
    if epilogue not in (TMA_EPILOGUE[schedule], NO_SMEM):
        reasons.append(f"epilogue {epilogue} does not go with {schedule}")
    return reasons


def _cluster_violations(config: Config) -> list[str]:
    cluster_m, cluster_n = config["cluster_m"], config["cluster_n"]
    reasons = []
    if cluster_m * cluster_n > MAX_PORTABLE_CLUSTER:
        reasons.append(f"cluster {cluster_m}x{cluster_n} has over {MAX_PORTABLE_CLUSTER} blocks")
    # Each block of a cluster loads its share of a multicast tile; 8 rows are a swizzle atom.
    if config["tile_m"] % (8 * cluster_n) or config["tile_n"] % (8 * cluster_m):
        reasons.append(
            f"cluster {cluster_m}x{cluster_n} splits tile {config['tile_m']}x{config['tile_n']} "
            "into parts that are not multiples of 8"
        )
    return reasons


def _smem_violations(problem: GemmProblem, config: Config) -> list[str]:
    stages, used = smem_bytes(problem, config)
    # The pipeline needs a buffer to fill while another is read
    # (gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp).
    if stages < 2:
        return [f"stages={stages} are too few (at least 2 must fit)"]
    if used > SMEM_PER_BLOCK_BYTES:
        return [f"{used} bytes of shared memory at {stages} stages exceed {SMEM_PER_BLOCK_BYTES}"]
    return []


def _epilogue_violations(problem: GemmProblem, config: Config) -> list[str]:
    # CollectiveBuilder's epilogue without shared memory is a linear combination and nothing else
    # (epilogue/collective/builders/sm90_builder.inl).
    if config["epilogue_schedule"] != NO_SMEM:
        return []
    parts = {"epilogue": problem.epilogue, "scales": problem.scales}
    return [f"{NO_SMEM} has no {name}={value}" for name, value in parts.items() if value]


def _problem_violations(problem: GemmProblem, config: Config) -> list[str]:
    reasons = []
    majors = {"a": problem.layout_a, "b": problem.layout_b}
    for operand in problem.operands:
        if len(operand.shape) == 1:  # read by ordinary loads, an element each
            continue
        contiguous = operand.shape[1 if majors.get(operand.name) == "col" else 2]
        width = DTYPE_BYTES[operand.dtype]
        if contiguous * width % TMA_ALIGNMENT_BYTES:
            reasons.append(
                f"{operand.name}'s contiguous extent {contiguous} is not a multiple of "
                f"{TMA_ALIGNMENT_BYTES // width} (TMA alignment)"
            )
        if max(operand.strides) * width >= MAX_TMA_STRIDE_BYTES:
            reasons.append(f"{operand.name} has a stride of 2^40 bytes or more")
    shape = oriented(problem, config["swap_ab"])
    blocks_m, blocks_n = tile_blocks(shape, config)
    if blocks_m * blocks_n * shape.batch >= 2**31:
        reasons.append(f"{blocks_m}x{blocks_n}x{shape.batch} tiles exceed 2^31 - 1")
    if config["kernel_schedule"] == PLAIN and max(blocks_n, shape.batch) > MAX_GRID_YZ:
        reasons.append(f"{PLAIN} has at most {MAX_GRID_YZ} tiles along N and batches")
    return reasons
