"""Estimated time of a config of `cutlass_fmha`."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from tuner.families.cutlass_fmha.shape import TMA, WIDTH, FmhaShape
from tuner.hardware import (
    EXP_PER_CLOCK_SM,
    REGISTERS_PER_SM,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    TENSOR_FLOPS_PER_CLOCK_SM,
    Gpu,
)
from tuner.problem import AttentionProblem

#: Clock under load against the highest: 1.755 of 1.98 GHz on one H200.
SUSTAINED_CLOCK = 1.755 / 1.98
#: Start of the fit by `scripts/bench cost`. Clocks and bytes a clock are of one multiprocessor.
CONSTANTS: Mapping[str, float] = {
    # Launch, first loads and last stores, microseconds; and between two calls.
    "fixed_us": 3.5,
    "call_us": 2.0,
    # A score's part beside product and exponential: scaling, maximum, sum, conversion.
    "score_clocks": 0.03,
    # Comparing a score's column with the end of the row, where the last tile is cut.
    "residual_clocks": 0.01,
    # A step's waits that nothing hides: barriers, the start of a product; and of a lone group,
    # which issues its own loads.
    "step_clocks": 400.0,
    "lone_step_clocks": 600.0,
    # From a free slot of the ring to its next tile, and the L2's bytes a clock meanwhile.
    "load_clocks": 250.0,
    "l2_bytes_per_clock": 50.0,
    # Part of a block's first step that no other group's work fills; a block outside its steps; of
    # a persistent one, which loads its next tile meanwhile.
    "fill_steps": 0.4,
    "block_clocks": 700.0,
    "persistent_clocks": 400.0,
    # Share of a step that an ordered group waits for each other one.
    "locked": 0.1,
    # Share of the longest block by which the last multiprocessor ends after the average one.
    "imbalance_ascending": 0.45,
    "imbalance_descending": 0.15,
    # Memory bandwidth reached over the data sheet's.
    "memory_efficiency": 0.85,
}
#: Exponent of the power mean that stands for the maximum of partly overlapping times.
SHARPNESS = 4


def predict_us(
    problem: AttentionProblem,
    shape: FmhaShape,
    gpu: Gpu,
    constants: Mapping[str, float],
    calls: int = 1,
) -> float:
    """Rounds of the busiest multiprocessor, each the steps of the blocks that share it.

    The collectives wait for S before the softmax and queue no other product behind it. So product
    and softmax take turns within a warp group, and only other groups fill the gaps.

    Args:
        problem: problem to compute.
        shape: the config's numbers.
        gpu: GPU that it runs on.
        constants: as `CONSTANTS`.
        calls: launches that share the work.
    """
    row_blocks = -(-problem.seqlen_q // shape.tile_m)
    visits = [_visits(problem, shape, block) for block in _blocks(row_blocks)]
    longest, mean = max(visits), sum(visits) / len(visits)
    blocks = row_blocks * problem.batch * problem.heads_q / (calls * gpu.sm_count)
    rounds = ceil(blocks)
    resident = min(_resident_blocks(shape), rounds)
    batches = ceil(rounds / resident)
    step = _step_clocks(problem, shape, resident, constants)
    if problem.is_causal:
        order = "descending" if shape.is_descending else "ascending"
        tail = constants[f"imbalance_{order}"] * longest
        clocks = max(longest, mean * blocks / resident + tail) * step
    else:
        left = rounds - (batches - 1) * resident
        last = _step_clocks(problem, shape, left, constants)
        clocks = (batches - 1) * mean * step + mean * last
    own = constants["persistent_clocks" if shape.is_persistent else "block_clocks"]
    clocks += constants["fill_steps"] * step + constants["block_clocks"] + (batches - 1) * own
    between = (calls - 1) * constants["call_us"]
    clock_mhz = gpu.clock_max_mhz * SUSTAINED_CLOCK
    memory_us = gpu.floor_us(0, problem.bytes) / constants["memory_efficiency"]
    return constants["fixed_us"] + between + max(memory_us, calls * clocks / clock_mhz)


def _step_clocks(
    problem: AttentionProblem, shape: FmhaShape, resident: int, constants: Mapping[str, float]
) -> float:
    """Clocks of one K/V tile in each of the blocks that share a multiprocessor."""
    scores = shape.group_rows * shape.tile_n
    product = scores * 4 * shape.head_tile / TENSOR_FLOPS_PER_CLOCK_SM
    each = 1 / EXP_PER_CLOCK_SM + constants["score_clocks"]
    if problem.seqlen_kv % shape.tile_n:
        each += constants["residual_clocks"]
    softmax = scores * each
    groups = shape.warp_groups * resident
    waits = constants["lone_step_clocks" if shape.schedule == TMA else "step_clocks"]
    in_turn = product + softmax + waits
    if shape.is_mainloop_locked:
        in_turn *= 1 + constants["locked"] * (shape.warp_groups - 1)
    slot = shape.tile_n * shape.head_tile * WIDTH * resident / constants["l2_bytes_per_clock"]
    # Two slots are read and a third waits for the slower group; a lone group loads by itself.
    ahead = max(0.5, shape.kv_stages - 3)
    refill = 0.0 if shape.schedule == TMA else 2 * (constants["load_clocks"] + slot) / ahead
    parts = (in_turn, groups * product, groups * softmax, refill)
    return float(sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS))


def _resident_blocks(shape: FmhaShape) -> int:
    """Blocks that fit a multiprocessor, whatever the launch bounds ask for."""
    by_smem = SMEM_PER_SM_BYTES // (shape.smem_bytes + SMEM_RESERVED_PER_BLOCK_BYTES)
    by_registers = REGISTERS_PER_SM // (shape.launch_registers * shape.threads)
    return max(1, min(by_smem, by_registers))


def _blocks(row_blocks: int) -> range:
    """At most 64 blocks of query rows, evenly spread, the last one among them."""
    stride = max(1, row_blocks // 64)
    return range(row_blocks - 1, -1, -stride)


def _visits(problem: AttentionProblem, shape: FmhaShape, block: int) -> int:
    """K/V tiles of one block, as the template's mask counts them."""
    columns = problem.seqlen_kv
    if problem.is_causal:
        columns = min(columns, (block + 1) * shape.tile_m, problem.seqlen_q)
    return -(-columns // shape.tile_n)
