"""Registers of the kernel's threads, and the configs whose consumers spill."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.config import Config
from tuner.families.attention_instances import REGISTERS, instance
from tuner.problem import DTYPE_BYTES, AttentionProblem

#: The same of paged caches, block-sparse masks and wide heads, whose producer has the places of its
#: copies.
PAGED_REGISTERS: Mapping[tuple[int, int], tuple[int, int]] = {
    **REGISTERS,
    (1, 2): (56, 200),
    (2, 1): (40, 232),
}
#: Registers a thread needs at its launch beside the accumulators of one WGMMA: with fewer ptxas
#: gives up (C7602, which names the sum).
WGMMA_OVERHEAD_REGISTERS = 26
#: Registers a consumer thread needs beside all its accumulators: addresses, row statistics, loop
#: state. Found by compiling: above it ptxas spills.
OVERHEAD_REGISTERS = 28
#: The same where a thread has 104 or fewer, of which ptxas makes more.
NARROW_OVERHEAD_REGISTERS = 24
#: Further ones beside two score buffers under a sliding window, whose mask has two edges; with
#: tile_n=128 at D=64, 192 accumulators, ptxas spills 28 bytes.
WINDOW_REGISTERS = 24
#: Further ones beside the elements of a mask operand: where its rows lie.
MASK_REGISTERS = 16
#: The same of a block-sparse mask: where its bits lie, and those of two rows.
BLOCK_MASK_REGISTERS = 12


def spills(problem: AttentionProblem, config: Config) -> bool:
    """True when ptxas runs out of a consumer's registers, as found by compiling.

    Such a kernel stores its accumulators and loads them again between its WGMMAs. It works, and is
    many times slower.
    """
    head_dim, width = instance(problem.head_dim), DTYPE_BYTES[problem.dtype]
    names = ("warp_groups", "tile_n", "score_buffers", "q_in_registers")
    groups, tile_n, buffers, keeps_q = (config[name] for name in names)
    if buffers > 1 and head_dim > 128:
        return True
    if keeps_q and problem.is_causal and head_dim > 96 and groups > 1:
        if not config.get("ping_pong", False) and tile_n != 128:
            return True
    consumer = registers(problem, config)[1]
    overhead = NARROW_OVERHEAD_REGISTERS if consumer <= 104 else OVERHEAD_REGISTERS
    overhead += WINDOW_REGISTERS if problem.is_windowed and buffers > 1 else 0
    if (operand := problem.mask_operand) is not None:
        overhead += tile_n * DTYPE_BYTES[operand.dtype] // 8 + MASK_REGISTERS
    overhead += BLOCK_MASK_REGISTERS if problem.block_mask else 0
    columns = instance(problem.value_width) // int(config.get("column_groups", 1))
    accumulators = buffers * tile_n // 2 + width * tile_n // 8 + columns // 2
    accumulators += width * head_dim // 8 if keeps_q else 0
    return bool(accumulators + overhead > consumer)


def registers(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread."""
    has_places = problem.is_paged or problem.block_mask or problem.is_wide
    table = PAGED_REGISTERS if has_places else REGISTERS
    return table[config["warp_groups"], config["blocks_per_sm"]]


def narrowed(problem: AttentionProblem, config: Config) -> Config:
    """The config with the widest tiles, at most its own, at which nothing spills."""
    step = 32 // DTYPE_BYTES[problem.dtype]
    widths = range(int(config["tile_n"]), 0, -step)
    tried = (Config(config.family, {**config.params, "tile_n": width}) for width in widths)
    return next((narrow for narrow in tried if not spills(problem, narrow)), config)
