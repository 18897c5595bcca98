"""Estimated time of a config of `fused_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from tuner.config import Config
from tuner.families.fused_attention import packing
from tuner.hardware import EXP_PER_CLOCK_SM, TENSOR_FLOPS_PER_CLOCK_SM, WARP_GROUP, Gpu
from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem

#: Clock against the highest where all tensor cores are busy: 1.755 of 1.98 GHz on one H200. While
#: they wait for memory it stays at the highest.
SUSTAINED_CLOCK = 1.755 / 1.98
#: Bytes that the shared memory gives a clock.
SMEM_BYTES_PER_CLOCK = 128
#: Clusters of more than 8 blocks that run at once: of eight with 16, recorded on one H200, the last
#: waits for another's place, for not every GPC has 16 multiprocessors.
LARGE_CLUSTERS = 7
#: Largest cluster of each entry, and the blocks in such clusters that run at once
#: (`gemm.cost.CLUSTERED_BLOCKS`). Of 32 clusters of 4, recorded on one H200, the last ones wait.
CLUSTERED_BLOCKS = ((2, 132), (4, 116), (8, 112))
#: Start of the fit by `tuner develop fit cost`. Clocks and bytes a clock are of one multiprocessor.
CONSTANTS: Mapping[str, float] = {
    # Launch, first loads and last stores, microseconds; and what is left of it after another kernel
    # that it may overlap.
    "fixed_us": 1.0,
    "pdl": 0.5,
    # What combines splits: a kernel, beside its bytes; or the blocks of a cluster, that meet, and
    # four columns of every thread.
    "combine_us": 1.5,
    "cluster_us": 1.0,
    "share_us": 1.5,
    # Partial outputs, written and read again, GB/s.
    "partial_gbs": 3000.0,
    # A score's part beside product and exponential: scaling, maximum, sum, conversion; and more
    # where the exponential comes before the wait, apart from its conversion.
    "score_clocks": 0.02,
    "early_clocks": 0.01,
    # A step's part of the softmax that is none of its scores': what a row's lanes tell each other,
    # new maxima, the output rescaled.
    "row_clocks": 80.0,
    # A step's waits that nothing hides: barriers, the start of a product.
    "step_clocks": 160.0,
    # Share of the time of reading Q from shared memory that a step takes longer; by how much the
    # products take longer with Q in registers, of which each needs others; and a step for each
    # other group of the block that reads its own.
    "q_read": 0.5,
    "q_registers": 0.15,
    "q_clocks": 25.0,
    # Share of the other groups' products that a group waits for where no barrier orders them; of a
    # product by which each other block on the multiprocessor, which loads its own K and V, delays.
    "unordered": 0.06,
    "crowded": 0.05,
    # With two score buffers: share of the shorter of a group's softmax and its next product that
    # the other hides; and what a step takes longer for each group's column of the output. Full
    # attention at D = 64 and 128 shows that, causal attention does not; why is not known.
    "overlap": 0.2,
    "column_clocks": 0.4,
    # From a free stage to its next tile, and bytes a clock meanwhile.
    "load_clocks": 230.0,
    "l2_bytes_per_clock": 130.0,
    # Part of a block's first step that no other group's work fills; a block outside its steps; one
    # that waited for its place; a tile of a persistent one, which loads the next meanwhile.
    "fill_steps": 0.6,
    "block_clocks": 5000.0,
    "later_clocks": 9000.0,
    "persistent_clocks": 700.0,
    # What a tile saves whose output goes through shared memory; what it costs that key groups share
    # rows.
    "staged_clocks": 600.0,
    "merge_clocks": 600.0,
    # Share of the longest block by which the last multiprocessor ends after the average one.
    "imbalance": 0.3,
    # Memory bandwidth reached over the data sheet's.
    "memory_efficiency": 0.9,
}
#: The kernel that transposes V beside its bytes. No measurement: an empty one's 0.86, and a wave of
#: loads and stores.
TRANSPOSE_US = 1.5
#: Time of steps with ``rescale=lazy`` over those without: the mean over eight large problems of
#: D = 128 and 256 (H200, 29 November 2026).
LAZY = 0.956
#: The same with ``turn_ends=scores`` over those without: the mean over six with D = 128.
LONG_TURNS = 0.988
#: Exponent of the power mean that stands for the maximum of partly overlapping times.
SHARPNESS = 4


class _Rounds(NamedTuple):
    """Blocks of the busiest multiprocessor, which run in batches of `resident` ones."""

    blocks: float
    """Blocks a multiprocessor."""
    resident: int
    batches: int
    step: float
    """Clocks of a step of all resident blocks."""
    whole: float
    """Clocks of all batches but the last; 0 where tiles have unlike lengths."""
    last: float
    """Clocks of the last batch, or of all where tiles have unlike lengths."""


def predict_us(
    problem: AttentionProblem,
    config: Config,
    head_tile: int,
    gpu: Gpu,
    constants: Mapping[str, float],
) -> float:
    """Rounds of the busiest multiprocessor, each the steps of the blocks that share it; at least
    the time of the bytes through memory. Decoding reads all bytes: nothing is in the L2 then.

    Args:
        problem: problem to compute.
        config: a config of the family.
        head_tile: columns that the kernel computes for the head dimension.
        gpu: GPU that it runs on.
        constants: constants of the model, as `CONSTANTS`.
    """
    rounds = _rounds(problem, config, head_tile, gpu, constants)
    clock_mhz = gpu.clock_max_mhz * (1 if problem.is_decoding else SUSTAINED_CLOCK)
    busy_us = _busy_us(problem, rounds, gpu, clock_mhz, constants)
    own = constants["persistent_clocks" if config["persistent"] else "later_clocks"]
    outside = constants["fill_steps"] * rounds.step + constants["block_clocks"]
    outside += (rounds.batches - 1) * own
    if config.get("stages_output"):
        outside -= rounds.batches * constants["staged_clocks"]
    sharing = config.get("key_groups", 1)
    if sharing > 1:
        outside += constants["merge_clocks"] * (sharing - 1)
    fixed_us = constants["fixed_us"] * (constants["pdl"] if config["pdl"] else 1)
    if config["splits"] > 1:
        fixed_us += _combine_us(problem, config, constants)
    if problem.dtype == E4M3:  # V is read and written once more
        fixed_us += TRANSPOSE_US
        fixed_us += gpu.floor_us(0, 2 * problem.matrices[2].bytes) / constants["memory_efficiency"]
    lazy = LAZY if "rescale" in config.params else 1.0
    lazy *= LONG_TURNS if "turn_ends" in config.params else 1.0
    return float(fixed_us + lazy * busy_us + outside / clock_mhz)


def _rounds(
    problem: AttentionProblem,
    config: Config,
    head_tile: int,
    gpu: Gpu,
    constants: Mapping[str, float],
) -> _Rounds:
    """Blocks of the busiest multiprocessor, and the clocks of their steps."""
    sharing, packed = config.get("key_groups", 1), config.get("packed_heads", 1)
    tile_m = packing.tile_m(config.params)
    splits, sm_count = config["splits"], gpu.sm_count
    tiles = ceil(problem.seqlen_q * packed / tile_m)
    if splits > 1 and config["combine"] == "cluster":
        counts = (most // splits * splits for size, most in CLUSTERED_BLOCKS if splits <= size)
        sm_count = min(sm_count, next(counts, LARGE_CLUSTERS * splits))
    packs = problem.heads_kv if config.get("pads_heads") else problem.heads_q // packed
    blocks = tiles * packs * problem.batch * splits / sm_count
    count = ceil(blocks)
    resident = min(config["blocks_per_sm"], count)
    batches = ceil(count / resident)
    longest, mean = _visits(problem, tile_m // packed, tiles, config["tile_n"], splits)
    longest, mean = ceil(longest / sharing), mean / sharing
    if "skips_masked" in config.params:
        mean -= _skipped(config, tile_m // packed)
    if config["score_buffers"] > 1:  # the last keys' product is computed once more
        longest, mean = longest + 0.5, mean + 0.5
    step = _step_clocks(problem, config, head_tile, resident, constants)
    if problem.is_causal or problem.block_mask:  # tiles of unlike lengths
        average = mean * blocks / resident
        clocks = max(longest, average + constants["imbalance"] * longest) * step
        return _Rounds(blocks, resident, batches, step, 0.0, clocks)
    remaining = count - (batches - 1) * resident
    last = _step_clocks(problem, config, head_tile, remaining, constants)
    return _Rounds(blocks, resident, batches, step, (batches - 1) * mean * step, mean * last)


def _busy_us(
    problem: AttentionProblem,
    rounds: _Rounds,
    gpu: Gpu,
    clock_mhz: float,
    constants: Mapping[str, float],
) -> float:
    """Time of the steps, at least that of the bytes through memory."""
    whole, clocks = rounds.whole, rounds.last
    memory_us = gpu.floor_us(0, _bytes(problem))
    if problem.is_decoding:  # nothing is in the L2
        memory_us = _bytes(problem) / gpu.memory_gbs / 1e3
    memory_us /= constants["memory_efficiency"]
    # Blocks of the last round have all of the memory's bandwidth, but not enough loads to fill it.
    share = 0.0
    if problem.is_decoding and whole:
        share = (rounds.batches - 1) * rounds.resident / rounds.blocks
    if share == 0:
        whole, clocks = 0.0, whole + clocks
    busy_us = max(share * memory_us, whole / clock_mhz)
    return busy_us + max((1 - share) * memory_us, clocks / clock_mhz)


def _combine_us(problem: AttentionProblem, config: Config, constants: Mapping[str, float]) -> float:
    """Time to combine the splits of a tile."""
    splits = int(config["splits"])
    if config["combine"] == "cluster":
        rows = min(64, problem.seqlen_q * int(config.get("packed_heads", 1)))
        share = rows * problem.head_dim / (4 * splits * WARP_GROUP)
        return constants["cluster_us"] + constants["share_us"] * share
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    partial = 2 * 4 * splits * rows * problem.head_dim  # fp32, written and read
    return constants["combine_us"] + partial / constants["partial_gbs"] / 1e3


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
    columns = 4 * head_tile / config.get("column_groups", 1)
    product = scores * columns / (TENSOR_FLOPS_PER_CLOCK_SM * problem.tensor_rate)
    if config["q_in_registers"]:
        product *= 1 + constants["q_registers"]
    per_score = 1 / EXP_PER_CLOCK_SM + constants["score_clocks"]
    per_score += constants["early_clocks"] * config.get("early_exp", 0) / 100
    if problem.softcap:  # an exponential and a reciprocal more
        per_score += 2 / EXP_PER_CLOCK_SM
    softmax = scores * per_score + constants["row_clocks"]
    row = head_tile * DTYPE_BYTES[problem.dtype]
    sharing = config.get("key_groups", 1)
    transfer = 2 * tile_n * row * resident * sharing
    transfer /= constants["l2_bytes_per_clock"]
    refill = (constants["load_clocks"] + transfer) / max(0.5, config["kv_stages"] / sharing - 1)
    together = groups * resident
    in_turn = product + softmax + constants["step_clocks"]
    if config["score_buffers"] > 1:
        in_turn -= constants["overlap"] * min(product, softmax)
    parts = (in_turn, together * product, together * softmax, refill, transfer)
    step = sum(part**SHARPNESS for part in parts) ** (1 / SHARPNESS)
    if config["q_in_registers"]:
        step += constants["q_clocks"] * (groups - 1)
    else:
        step += constants["q_read"] * together * 64 * row / SMEM_BYTES_PER_CLOCK
    step += constants["crowded"] * (resident - 1) * product
    if config["score_buffers"] > 1 and not problem.is_causal:
        step += constants["column_clocks"] * head_tile * groups
    if not config.get("ping_pong", False):
        step += constants["unordered"] * (together - 1) * product
    return float(step)


def _skipped(config: Config, queries: int) -> float:
    """Blocks of keys that a warp group leaves out in the mean of a tile of `queries`."""
    tile_n, packed = config["tile_n"], config.get("packed_heads", 1)
    whole = (queries - 64 / packed) / (2 * tile_n) if tile_n % queries else 0.0
    return float(whole + (config["skips_masked"] == "halves") / 4)


@lru_cache(maxsize=1024)
def _bytes(problem: AttentionProblem) -> int:
    return problem.bytes


@lru_cache(maxsize=1024)
def _visits(
    problem: AttentionProblem, rows: int, tiles: int, tile_n: int, splits: int
) -> tuple[float, float]:
    """K/V tiles of one split of one block, which covers `rows` queries of each of its heads: the
    most and the mean, of at most 64 blocks, evenly spread, the last one among them.
    """
    visits_of_split = []
    for tile in range(tiles - 1, -1, -max(1, tiles // 64)):
        keys = problem.keys_of(tile * rows, (tile + 1) * rows - 1)
        # A window may have passed the last one.
        visits = ceil(keys.stop / tile_n) - keys.start // tile_n if keys else 0
        visits_of_split.append(ceil(visits / splits))
    return max(visits_of_split), sum(visits_of_split) / len(visits_of_split)
