"""Tiles of a config, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from tuner.config import Config
from tuner.families.strided_product import room
from tuner.problem import SCALE_BLOCK

#: Rows of an instruction of a warp group (PTX ISA, wgmma), and columns of the narrowest.
INSTRUCTION_ROWS, INSTRUCTION_COLUMNS, INSTRUCTION_WARPS = 64, 8, 4
#: Blocks of K in flight: one is copied while another is used, and shared memory holds 24 of the
#: smallest tile, 64 x 8.
MIN_STAGES, MAX_STAGES = 2, 24
#: Factors of B's columns that a stage has room for, and bytes of its two barriers.
COLUMN_PLACES, BARRIER_BYTES = 12, 16
#: Bytes that TMA's boxes without a swizzle begin at.
FACTOR_ALIGNMENT = 128
#: Rows whose factors fit one box over groups, and floats of the two boxes of more.
MAX_BOX_FACTORS, FACTORS_OF_TWO_BOXES = 252, 320
#: Rows and columns of a warp's box of results, and its bytes.
BOX_ROWS, BOX_COLUMNS = 16, 64
BOX_BYTES = 2 * BOX_ROWS * BOX_COLUMNS

#: What loops with factors by TMA have where tiles are not shared.
LOADS: Mapping[str, bool] = {"fetch_factors": True, "clips_rows": True}
#: Tiles along A's rows at most, for which swapped operands read the weights.
MAX_READS = 4


def stage_bytes(config: Config) -> int:
    """Shared memory of a stage: its tiles, its factors, its two barriers."""
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    factors = tile_n if config["swap_ab"] else tile_m
    factor_bytes = 4 * (factors + COLUMN_PLACES)
    if "tma_factors" in config.params:
        # Boxes over groups begin at whole 16 bytes; a box has at most 256 floats.
        if "split_k" not in config.params and factors > MAX_BOX_FACTORS:
            factor_bytes = 4 * FACTORS_OF_TWO_BOXES
        factor_bytes = ceil(factor_bytes / FACTOR_ALIGNMENT) * FACTOR_ALIGNMENT
    return (tile_m + tile_n) * SCALE_BLOCK + factor_bytes + BARRIER_BYTES


def smem_bytes(config: Config) -> int:
    """Shared memory of a block: its stages, and its warps' boxes of results.

    With `serial_parts` the boxes share their place with the fp32 sums of the parts of K so far.
    """
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    warps = INSTRUCTION_WARPS * min(2, tile_m // INSTRUCTION_ROWS)
    boxes = int(config.get("store_buffers", 0)) * warps * BOX_BYTES
    partial_bytes = 4 * tile_m * tile_n if "serial_parts" in config.params else 0
    return int(config["stages"]) * stage_bytes(config) + max(boxes, partial_bytes)


def deepened(config: Config) -> Config:
    """A config with the deepest pipeline that fits."""
    least = Config(config.family, {**config.params, "stages": MIN_STAGES})
    more = (room(config) - smem_bytes(least)) // stage_bytes(least)
    return Config(config.family, {**config.params, "stages": min(MIN_STAGES + more, MAX_STAGES)})
