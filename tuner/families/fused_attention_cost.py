"""What a config of `fused_attention` should cost."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from tuner.config import Config
from tuner.hardware import EXP_PER_CLOCK_SM, TENSOR_FLOPS_PER_CLOCK_SM, Gpu
from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem

#: Clock under load against the highest: 1.755 of 1.98 GHz on one H200.
SUSTAINED_CLOCK = 1.755 / 1.98
#: What only measurements say: where their fit by `scripts/bench cost` starts. Clocks and bytes a
#: clock are of one multiprocessor.
CONSTANTS: Mapping[str, float] = {
    # Launch, first loads and last stores, microseconds; what is left of it after another kernel
    # that it may overlap; and what combines splits: a kernel, or the blocks of a cluster.
    "fixed_us": 3.0,
    "pdl": 0.95,
    "combine_us": 2.0,
    "cluster_us": 1.0,
    # A score's part beside product and exponential: scaling, maximum, sum, conversion; and a
    # comparison more where the row's last tile is cut or the mask's edge passes.
    "score_clocks": 0.03,
    "edge_clocks": 0.01,
    # An element of the output that a new maximum rescales.
    "rescale_clocks": 0.008,
    # A step's waits that nothing hides: barriers, the start of a product.
    "step_clocks": 200.0,
    # Share of a group's shorter part, of product and softmax, that a second score buffer leaves
    # exposed.
    "exposed": 0.5,
    # Time without an order of the groups against the time with one.
    "no_ping_pong": 1.04,
    # From a free stage to its next tile, and the L2's bytes a clock meanwhile.
    "load_clocks": 600.0,
    "l2_bytes_per_clock": 50.0,
    # Part of a block's first step that no other group's work fills; a block outside its steps; of
    # a persistent one, which loads its next tile meanwhile.
    "fill_steps": 0.5,
    "block_clocks": 700.0,
    "persistent_clocks": 400.0,
    # Share of the longest block by which the last multiprocessor ends after the average one.
    "imbalance": 0.3,
    # Memory bandwidth reached over the data sheet's.
    "memory_efficiency": 0.85,
}
#: The kernel that transposes V beside its bytes. No measurement: an empty one's 0.86, and a wave of
#: loads and stores.
TRANSPOSE_US = 1.5
#: Exponent of the mean that stands for the longest of times that overlap but not quite.
SHARPNESS = 4


def predict_us(
    problem: AttentionProblem,
    config: Config,
    head_tile: int,
    gpu: Gpu,
    constants: Mapping[str, float],
) -> float:
    """Rounds of the busiest multiprocessor, each the steps of the blocks that share it; or the
    bytes through memory, if they take longer.

    Args:
        problem: what is computed.
        config: a config of the family.
        head_tile: columns that the kernel computes for the head dimension.
        gpu: where.
        constants: as `CONSTANTS`.
    """
    tile_m, packed = 64 * config["warp_groups"], config.get("packed_heads", 1)
    splits, resident = config["splits"], config["blocks_per_sm"]
    tiles = ceil(problem.seqlen_q * packed / tile_m)
    blocks = tiles * problem.heads_q // packed * problem.batch * splits / gpu.sm_count
    rounds = ceil(blocks)
    resident = min(resident, rounds)
    batches = ceil(rounds / resident)
    visits = [_visits(problem, config, tile_m // packed, tile) for tile in _sample(tiles)]
    longest, mean = max(visits), sum(visits) / len(visits)
    step = _step_clocks(problem, config, head_tile, resident, constants)
    if problem.is_causal:
        average = mean * blocks / resident
        clocks = max(longest, average + constants["imbalance"] * longest) * step
    else:
        left = rounds - (batches - 1) * resident
        last = _step_clocks(problem, config, head_tile, left, constants)
        clocks = (batches - 1) * mean * step + mean * last
    own = constants["persistent_clocks" if config["persistent"] else "block_clocks"]
    clocks += constants["fill_steps"] * step + constants["block_clocks"] + (batches - 1) * own
    fixed_us = constants["fixed_us"] * (constants["pdl"] if config["pdl"] else 1)
    if splits > 1:
        fixed_us += constants["combine_us" if config["combine"] == "kernel" else "cluster_us"]
    if problem.dtype == E4M3:  # V is read and written once more
        fixed_us += TRANSPOSE_US
        fixed_us += gpu.floor_us(0, 2 * problem.matrices[2].bytes) / constants["memory_efficiency"]
    memory_us = gpu.floor_us(0, problem.bytes) / constants["memory_efficiency"]
    return float(fixed_us + max(memory_us, clocks / (gpu.clock_max_mhz * SUSTAINED_CLOCK)))


def _step_clocks(
    problem: AttentionProblem,
    config: Config,
    head_tile: int,
    resident: int,
    constants: Mapping[str, float],
) -> float:
    """Clocks of one K/V tile in each of the blocks that share a multiprocessor."""
    tile_n, groups = config["tile_n"], config["warp_groups"]
    scores = 64 * tile_n
    product = scores * 4 * head_tile / (TENSOR_FLOPS_PER_CLOCK_SM * problem.tensor_rate)
    each = 1 / EXP_PER_CLOCK_SM + constants["score_clocks"]
    if problem.is_causal or problem.is_windowed or problem.seqlen_kv % tile_n:
        each += constants["edge_clocks"]
    if problem.softcap:  # an exponential and a reciprocal more
        each += 2 / EXP_PER_CLOCK_SM
    softmax = scores * each + 64 * head_tile * constants["rescale_clocks"]
    shorter, longer = sorted((product, softmax))
    overlaps = config["score_buffers"] > 1
    in_turn = longer + shorter * (constants["exposed"] if overlaps else 1)
    in_turn += constants["step_clocks"]
    width = DTYPE_BYTES[problem.dtype]
    loaded = 2 * tile_n * head_tile * width * resident
    tile = loaded / constants["l2_bytes_per_clock"]
    refill = (constants["load_clocks"] + tile) / max(0.5, config["kv_stages"] - 1)
    together = groups * resident
    parts = (in_turn, together * product, together * softmax, refill)
    step = sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS)
    return float(step * (1 if config.get("ping_pong", True) else constants["no_ping_pong"]))


def _sample(tiles: int) -> range:
    """At most 64 tiles of query rows, evenly spread, the last one among them."""
    return range(tiles - 1, -1, -max(1, tiles // 64))


def _visits(problem: AttentionProblem, config: Config, rows: int, tile: int) -> int:
    """K/V tiles of one split of one block, which covers `rows` queries of each of its heads."""
    keys, tile_n = problem.keys_of(tile * rows, (tile + 1) * rows - 1), int(config["tile_n"])
    if not keys:  # a window that has passed the last one
        return 0
    return ceil((ceil(keys.stop / tile_n) - keys.start // tile_n) / int(config["splits"]))
