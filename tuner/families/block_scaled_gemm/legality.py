"""Violations of a config: of its tile, cluster, main loop, split of K and stores."""

from __future__ import annotations

from math import ceil

from tuner.config import Config
from tuner.families.block_scaled_gemm.shape import (
    BOX_COLUMNS,
    INSTRUCTION_COLUMNS,
    INSTRUCTION_ROWS,
    smem_bytes,
)
from tuner.families.strided_product import room
from tuner.problem import SCALE_BLOCK, GemmProblem

#: Columns that the four lanes of a row store together: tiles of D's columns are multiples.
STORED_COLUMNS = 16
#: Registers of a thread for sums and for the tensor cores' accumulators: 192 of 232 compile
#: without a spill.
MAX_SUMS = 192
#: Blocks of K in a row that the space's unrolled loops have: 8 took 0.996 of the time of 4.
UNROLL = 4
#: Columns of a tile whose unrolled loop has a copy for the first blocks: multiples of these.
WHOLE_COLUMNS = 32
#: Columns of a tile with two blocks' products under way: their accumulators and the sums are 192
#: registers a thread. Of swapped operands the factors of both blocks lie in registers, too.
MAX_AHEAD, MAX_AHEAD_SWAPPED = 128, 64
#: The same registers of a block that shares its multiprocessor with another.
MAX_RESIDENT_SUMS = 72
#: Largest extents, as the template checks them: tiles beyond the last one fit 32 bits.
MAX_EXTENT = 1 << 30
MAX_TILES = 1 << 30


def extent_conflict(m: int, n: int, k: int, groups: int = 1) -> str:
    """Reason why the template does not take these extents; empty when it does."""
    # 16-byte rows, of e4m3 and of bf16.
    if k % 16 or n % 8:
        return f"N={n} and K={k} are not multiples of 8 and 16 (TMA)"
    if max(m, n, k) > MAX_EXTENT:
        return f"{m} x {n} x {k} exceeds {MAX_EXTENT} in one extent"
    if (ceil(m / 8) + groups - 1) * ceil(n / 8) > MAX_TILES:
        return f"{m} x {n} results are over {64 * MAX_TILES}"
    return ""


def violations(problem: GemmProblem, config: Config) -> list[str]:
    """All violations of a product's config."""
    return [
        *tile_violations(config),
        *cluster_violations(config),
        *loop_violations(config, problem.scales),
        *split_violations(problem, config, SCALE_BLOCK),
        *_serial_violations(problem, config),
        *_store_violations(config),
    ]


def tile_violations(config: Config) -> list[str]:
    """Violations of a tile: by its stores, its fp32 sums or its stages."""
    parts = max(1, config["tile_m"] // (2 * INSTRUCTION_ROWS))
    sums = (parts + 1) * config["tile_n"] // 2
    return stored_violations(config, sums, MAX_SUMS, smem_bytes(config))


def stored_violations(config: Config, sums: int, most: int, smem: int) -> list[str]:
    """Violations of a tile by what holds it.

    Args:
        config: the kernel's config.
        sums: registers of a thread that it has for sums.
        most: most of these.
        smem: shared memory of a block, bytes.
    """
    tile_m, tile_n = config["tile_m"], config["tile_n"]
    reasons = []
    if tile_n % STORED_COLUMNS and not config["swap_ab"]:
        reasons.append(f"tile_n={tile_n} is not a multiple of {STORED_COLUMNS} (swap_ab=False)")
    if sums > most:
        reasons.append(
            f"tile {tile_m}x{tile_n} needs {sums} registers a thread for sums (at most {most})"
        )
    if smem > room(config):
        limit = f"{config['stages']} stages exceed {room(config)}"
        reasons.append(f"{smem} bytes of shared memory at {limit}")
    return reasons


def cluster_violations(config: Config) -> list[str]:
    """Violations of a cluster whose blocks share tiles by multicast."""
    cluster_m, cluster_n, tile_n = config["cluster_m"], config["cluster_n"], config["tile_n"]
    reasons = []
    if cluster_m * cluster_n > 2:
        reasons.append(f"cluster {cluster_m}x{cluster_n} shares both operands (allowed: one)")
    # Each block of a cluster loads its half of the tile that they share: whole swizzle atoms.
    if tile_n % (INSTRUCTION_COLUMNS * cluster_m):
        reasons.append(f"cluster_m={cluster_m} does not halve tile_n={tile_n} in eights")
    return reasons


def loop_violations(config: Config, scales: str = "block") -> list[str]:
    """Why a main loop cannot read its factors; they are of what `GemmProblem.scales` says."""
    reasons = []
    if "unroll" not in config.params:
        if "tma_factors" in config.params:
            reasons.append("tma_factors goes with unroll")
        if scales != "block":
            reasons.append(f"scales={scales} needs unroll")
    if "uniform_branch" in config.params and config["tile_m"] != INSTRUCTION_ROWS:
        reasons.append(f"uniform_branch is for tile_m={INSTRUCTION_ROWS}")
    if "ahead" in config.params:
        reasons += ahead_violations(config, scales)
    if "turns" in config.params:
        if config["tile_m"] == INSTRUCTION_ROWS or "unroll" not in config.params:
            reasons.append("turns are of two warp groups' unrolled loops")
        elif config["unroll"] > UNROLL:
            reasons.append(f"turns are for unroll up to {UNROLL}: more spills")
    for lever in ("fetch_factors", "clips_rows", "staged_columns"):
        is_whole = scales != "block" and lever != "staged_columns"
        if lever in config.params and not is_whole and "tma_factors" not in config.params:
            reasons.append(f"{lever} goes with tma_factors")
    if "staged_columns" in config.params and config.params.keys() & {
        "fetch_factors",
        "serial_parts",
    }:
        reasons.append("staged_columns goes without fetch_factors and serial_parts")
    if "clips_rows" in config.params and config["cluster_m"] * config["cluster_n"] > 1:
        reasons.append("clips_rows goes without multicast")
    if "blocks_per_sm" in config.params:
        reasons += _resident_violations(config)
    if "tma_factors" in config.params and scales != "block":
        reasons.append(f"tma_factors are of blocks, not scales={scales}")
    return reasons


def _resident_violations(config: Config) -> list[str]:
    """Why a multiprocessor has no registers for several blocks."""
    sets = 3 if "ahead" in config.params else 2
    sums, count = sets * int(config["tile_n"]) // 2, config["blocks_per_sm"]
    if config["tile_m"] > INSTRUCTION_ROWS or sums > MAX_RESIDENT_SUMS:
        return [
            f"blocks_per_sm={count} leaves {MAX_RESIDENT_SUMS} registers a thread for sums of "
            f"{INSTRUCTION_ROWS} rows: {config['tile_m']}x{config['tile_n']} needs {sums}"
        ]
    return []


def ahead_violations(config: Config, scales: str = "block") -> list[str]:
    """Why a tile has no room for two blocks' products at a time."""
    tile_m, tile_n = config["tile_m"], config["tile_n"]
    reasons = []
    if "tma_factors" not in config.params and scales == "block":
        reasons.append("ahead goes with tma_factors")
    if tile_m > 2 * INSTRUCTION_ROWS or tile_n > MAX_AHEAD:
        reasons.append(f"ahead is for tiles up to {2 * INSTRUCTION_ROWS}x{MAX_AHEAD}")
    if config["swap_ab"] and tile_n > MAX_AHEAD_SWAPPED:
        reasons.append(f"ahead is for at most {MAX_AHEAD_SWAPPED} columns of swapped operands")
    return reasons


def split_violations(problem: GemmProblem, config: Config, depth: int) -> list[str]:
    """Why K cannot be divided; a stage has `depth` of it, 128 bytes."""
    tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["split_k"]
    if splits == 1:
        return ["vector_merge goes with split_k"] if "vector_merge" in config.params else []
    reasons = []
    if config.get("cluster_m", 1) * config.get("cluster_n", 1) > 1:
        reasons.append(f"split_k={splits} goes with a cluster of its own alone")
    if splits > ceil(problem.k / depth):
        reasons.append(f"split_k={splits} has more parts than K={problem.k} has blocks")
    if 4 * tile_m * tile_n > config["stages"] * (tile_m + tile_n) * SCALE_BLOCK:
        reasons.append(f"{config['stages']} stages have no room for {tile_m}x{tile_n} fp32 sums")
    return reasons


def _serial_violations(problem: GemmProblem, config: Config) -> list[str]:
    """Why a block cannot add the parts of K that a cluster's blocks would have."""
    parts = config.get("serial_parts")
    if parts is None:
        return []
    reasons = []
    is_other = config["split_k"] > 1 or "ahead" in config.params
    if is_other or "tma_factors" not in config.params or problem.scales != "block":
        reasons.append("serial_parts goes with tma_factors, without split_k and ahead")
    if not config["swap_ab"] and config["tile_n"] % WHOLE_COLUMNS:
        reasons.append(f"serial_parts is for multiples of {WHOLE_COLUMNS} columns, only")
    if parts > ceil(problem.k / SCALE_BLOCK):
        reasons.append(f"serial_parts={parts} has more parts than K={problem.k} has blocks")
    return reasons


def _store_violations(config: Config) -> list[str]:
    buffers = config["store_buffers"]
    if not buffers:
        return []
    reasons = []
    if config["swap_ab"] or config["split_k"] > 1:
        reasons.append(f"store_buffers={buffers} is for neither swapped operands nor divided K")
    if config["tile_n"] < BOX_COLUMNS:
        reasons.append(f"tile_n={config['tile_n']} has no box of {BOX_COLUMNS} columns")
    return reasons
