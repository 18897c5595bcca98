"""Legality of the configs of fused attention, and the shared memory that they take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.config import Config, Value
from tuner.families.attention_instances import instance, launch_registers
from tuner.families.fused_attention.packing import is_held, max_packed, may_pad, tile_m
from tuner.families.fused_attention.registers import WGMMA_OVERHEAD_REGISTERS
from tuner.hardware import SMEM_PER_BLOCK_BYTES
from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem
from tuner.problem.attention import NARROW_HEAD_DIM
from tuner.problem.attention_masks import BLOCK_SIZE, PAGE_MULTIPLE

#: Rows of K and V that a tile under a block-sparse mask may have: its bits lie in one word.
SPARSE_TILES = (32, 64, 128)
#: Parameters of paged caches.
PAGED_ONLY = (
    *("box_rows", "whole_rows", "copy_warps", "stream_k", "longest_first"),
    *("leaves_cluster", "own_first"),
)
#: Head dimensions of which one copy brings whole rows: TMA would fill up others.
WHOLE_ROWS = (128, 192, 256)
#: What groups with columns of their own have, and parameters that they do not have.
BY_COLUMNS: Mapping[str, Value] = {
    **{"warp_groups": 2, "tile_n": 64, "score_buffers": 1, "early_exp": 0, "rescale": "lazy"},
    **{"ping_pong": False, "q_in_registers": False, "persistent": False},
}
NOT_BY_COLUMNS = ("key_groups", "stages_output", "split_keys", "whole_rows", "copy_warps")
#: Parameters that tiles of whole queries do not have, but for those over pages.
NOT_FILLING = ("stages_output", "skips_masked", "split_keys", "key_groups", "column_groups")
#: Bytes that rows of such tiles are a multiple of: a copy brings so many columns, or twice as many.
FILLED_BYTES = 64
#: Columns of a stage of their keys.
PART_COLUMNS = 128
#: Elements that strides of pages and heads are multiples of, where copies bring whole rows: a
#: coordinate counts such steps, and 2^31 of them are 256 GiB.
MIN_ROW_STEP = 64
#: Query heads in a tile whose output may go through shared memory: those of a warp's rows.
MAX_STAGED = 16
#: Blocks that share the keys of a tile at most; two for each multiprocessor of a chip are 264.
MAX_SPLITS = 512
#: Blocks of a cluster at most (CUDA's limit where non-portable sizes are allowed).
MAX_CLUSTERED = 16
#: Keys of a block that a WGMMA may take half of.
HALVED = (64, 128, 192, 256)
#: mbarriers and two tiles' coordinates at the end of the shared memory, rounded to the alignment
#: of the tiles.
BARRIER_BYTES = 1024


def conflicts(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of a config that lies in the family's domains, a line each."""
    reasons = []
    groups, tile_n, stages = config["warp_groups"], config["tile_n"], config["kv_stages"]
    blocks, buffers, splits = config["blocks_per_sm"], config["score_buffers"], config["splits"]
    extent = 32 // DTYPE_BYTES[problem.dtype]
    if tile_n % extent:
        reasons.append(f"tile_n={tile_n} is not a multiple of {extent}, the K extent of one WGMMA")
    if stages < buffers:
        reasons.append(f"kv_stages={stages} is less than score_buffers={buffers}")
    if ("ping_pong" in config.params) != (groups > 1 and buffers == 1):
        reasons.append("ping_pong is for two warp groups or more with one score buffer, only")
    if ("early_exp" in config.params) != (buffers == 1):
        reasons.append("early_exp is for one score buffer, only")
    reasons += _sharing(problem, config)
    reasons += _columns(problem, config)
    if "skips_masked" in config.params and not may_skip(problem, config.params):
        reasons.append(
            "skips_masked is for persistent blocks under a causal mask alone, with one score "
            "buffer: blocks where warp groups end at different blocks of keys, halves with a "
            f"tile_n of {', '.join(map(str, HALVED))}"
        )
    if "rescale" in config.params and buffers != 1:
        reasons.append("rescale is for one score buffer, only")
    if "turn_ends" in config.params and not config.get("ping_pong"):
        reasons.append("turn_ends is for ping_pong, only")
    reasons += _packing(problem, config)
    if problem.is_varlen and not problem.is_paged and splits > 1:
        reasons.append(f"splits={splits} is not for variable lengths (allowed: 1)")
    if "searches" in config.params and (
        not (problem.is_varlen and config["persistent"]) or problem.is_paged
    ):
        reasons.append("searches is for persistent blocks and packed sequences, only")
    reasons += _paging(problem, config)
    reasons += _blocks(problem, config)
    if splits > 1 and config["persistent"]:
        reasons.append(f"splits={splits} is for one block a tile, not for persistent blocks")
    if "split_keys" in config.params:
        reasons += _parts(problem, config)
    elif "carries_parts" in config.params:
        reasons.append("carries_parts goes with split_keys")
    elif ("combine" in config.params) != (splits > 1):
        reasons.append("combine is for splits > 1, only")
    elif config.get("combine", "kernel") == "cluster":
        if splits > MAX_CLUSTERED:
            reasons.append(f"splits={splits} exceed the {MAX_CLUSTERED} blocks of a cluster")
        if groups > 1:
            reasons.append("combine=cluster is for one warp group, only")
    smem = smem_bytes(problem, config)
    if smem > SMEM_PER_BLOCK_BYTES:
        reasons.append(f"{smem} bytes of shared memory exceed {SMEM_PER_BLOCK_BYTES}")
    columns = instance(problem.value_width) // config.get("column_groups", 1)
    widest = max(tile_n, columns) // 2
    launched = launch_registers(groups, blocks)
    if widest + WGMMA_OVERHEAD_REGISTERS > launched:
        reasons.append(
            f"{widest} accumulator registers of a WGMMA + {WGMMA_OVERHEAD_REGISTERS} exceed "
            f"the {launched} of a launch"
        )
    return reasons


def may_skip(problem: AttentionProblem, params: Mapping[str, Any]) -> bool:
    """True if `skips_masked` is legal. For blocks, the warp groups of a tile end at different
    blocks of keys. For halves, some of them end in the first half of a block.

    Args:
        problem: problem to compute.
        params: parameters of a config, whose `skips_masked` is read where it is there.
    """
    is_plain = problem.is_causal and not (
        problem.is_windowed or problem.is_packed or problem.block_mask
    )
    if not (is_plain and params["persistent"] and params["score_buffers"] == 1):
        return False
    if "key_groups" in params:
        return False
    tile_n, packed = int(params["tile_n"]), int(params.get("packed_heads", 1))
    if params.get("skips_masked") == "halves":
        return tile_n in HALVED and 64 // packed <= tile_n // 2
    queries = tile_m(params) // packed
    return queries > 0 and tile_n % queries != 0


def _sharing(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of `key_groups` and `stages_output`, present only when they are on."""
    reasons = []
    groups, sharing = config["warp_groups"], config.get("key_groups", 1)
    if "key_groups" in config.params:
        if groups % sharing:
            reasons.append(f"key_groups={sharing} does not divide warp_groups={groups}")
        if config["persistent"] or config["score_buffers"] > 1 or config.get("ping_pong"):
            reasons.append(
                "key_groups is for one tile a block, one score buffer and no ping_pong, only"
            )
        if config["kv_stages"] % sharing:  # else a stage's phase may be taken for the one before
            reasons.append(
                f"key_groups={sharing} does not divide kv_stages={config['kv_stages']}: each group "
                "reads stages of its own"
            )
    if "stages_output" in config.params:
        packed = config.get("packed_heads", 1)
        if problem.is_packed or packed > MAX_STAGED:
            reasons.append(
                "stages_output is not for variable lengths, paged caches or more than "
                f"{MAX_STAGED} packed heads"
            )
    return reasons


def _columns(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of `column_groups`, which wide heads need."""
    reasons, params = [], config.params
    if ("column_groups" in params) != problem.is_wide:
        reasons.append(f"column_groups is for D above {NARROW_HEAD_DIM}, only")
    if "column_groups" not in params:
        return reasons
    if any(config.get(name) != value for name, value in BY_COLUMNS.items()):
        needed = ", ".join(f"{name}={value}" for name, value in BY_COLUMNS.items())
        reasons.append(f"column_groups is for {needed}, only")
    if any(name in params for name in NOT_BY_COLUMNS):
        reasons.append(f"column_groups is not for {', '.join(NOT_BY_COLUMNS)}")
    return reasons


def _paging(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of a config for a paged cache; otherwise of `PAGED_ONLY`."""
    reasons, rows = [], config.get("box_rows", PAGE_MULTIPLE)
    if not problem.is_paged:
        return [f"{name} is for paged caches, only" for name in PAGED_ONLY if name in config.params]
    if "whole_rows" in config.params and problem.head_dim not in WHOLE_ROWS:
        allowed = ", ".join(map(str, WHOLE_ROWS))
        reasons.append(f"whole_rows is not for D={problem.head_dim} (allowed: {allowed})")
    if problem.dtype == E4M3 and ("whole_rows" in config.params or "copy_warps" in config.params):
        reasons.append("whole_rows and copy_warps are not for e4m3")
    if "key_groups" in config.params:
        reasons.append("key_groups is not for paged caches")
    if "stream_k" in config.params and (config["splits"] > 1 or config["warp_groups"] > 2):
        reasons.append("stream_k is for splits=1 and one or two warp groups, only")
    if "own_first" in config.params and ("stream_k" not in config.params or config["persistent"]):
        reasons.append("own_first is for stream_k of blocks that do not persist, only")
    is_alone = config["persistent"] or "stream_k" in config.params or problem.dtype == E4M3
    if "leaves_cluster" in config.params and is_alone:
        reasons.append("leaves_cluster is for clusters in fp16 and bf16, only")
    if "longest_first" in config.params and not (
        config["persistent"] and problem.is_causal and "stream_k" not in config.params
    ):
        reasons.append("longest_first is for persistent blocks of causal calls without stream_k")
    if problem.page_size % rows or config["tile_n"] % rows:
        reasons.append(
            f"box_rows={rows} does not divide both page_size={problem.page_size} and "
            f"tile_n={config['tile_n']}"
        )
    return reasons


def _blocks(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of a config for a block-sparse mask."""
    if not problem.block_mask:
        return []
    reasons = []
    packed, rows = config.get("packed_heads", 1), tile_m(config.params)
    if config["tile_n"] not in SPARSE_TILES:
        allowed = ", ".join(map(str, SPARSE_TILES))
        reasons.append(f"tile_n={config['tile_n']} is not for block_mask (allowed: {allowed})")
    if rows % packed or BLOCK_SIZE % (rows // packed):
        reasons.append(
            f"{rows} rows of {packed} packed heads do not divide the {BLOCK_SIZE} queries of "
            "a block of block_mask"
        )
    if "key_groups" in config.params or config["splits"] > 1:
        reasons.append("key_groups and splits > 1 are not for block_mask")
    if packed > 1 and "h" in problem.block_mask:
        reasons.append(f"packed_heads={packed} is not for a block_mask of each head (allowed: 1)")
    return reasons


def _parts(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of `split_keys`."""
    reasons, keys, params = [], config["split_keys"], config.params
    excluded = ["key_groups", "stages_output", "stream_k", "rescale", "skips_masked"]
    if "carries_parts" in params:
        excluded = ["key_groups", "stream_k"]
    if config["splits"] > 1 or any(name in params for name in excluded):
        reasons.append(f"split_keys is for splits=1 without {', '.join(excluded)}, only")
    if config["score_buffers"] > 1:
        reasons.append("split_keys is for one score buffer, only")
    if "combine" in params and (config["persistent"] or params["combine"] != "kernel"):
        reasons.append(
            "parts of split_keys are combined by a kernel, of blocks that do not persist"
        )
    is_other = problem.is_varlen and not problem.is_paged
    is_other |= problem.is_windowed or problem.has_sinks or bool(problem.block_mask)
    if is_other or problem.dtype == E4M3:
        reasons.append(
            "split_keys is for fp16 and bf16 without windows, sinks, block_mask or packed sequences"
        )
    if keys % config["tile_n"]:
        reasons.append(f"tile_n={config['tile_n']} does not divide split_keys={keys}")
    return reasons


def _packing(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of `packed_heads` and `pads_heads`."""
    group = problem.heads_q // problem.heads_kv
    if ("packed_heads" in config.params) != (group > 1):
        return ["packed_heads is for several query heads to a KV head, only"]
    packed, pads = config.get("packed_heads", 1), "pads_heads" in config.params
    reasons = []
    if pads and not may_pad(problem):
        reasons.append("pads_heads is not for dense e4m3 and block masks")
    if "fills_rows" in config.params and not may_fill(problem, config):
        reasons.append(
            "fills_rows is for pads_heads without sinks and clusters, and but for pages without "
            f"masks as operands and {', '.join(NOT_FILLING)}, only"
        )
    size = instance(problem.head_dim) * DTYPE_BYTES[problem.dtype]
    if "fills_rows" in config.params and size % FILLED_BYTES:
        reasons.append(
            f"fills_rows is not for rows of {size} bytes (allowed: multiples of {FILLED_BYTES})"
        )
    if not is_held(group, packed, pads):
        lack = "is less than" if pads else "does not divide"
        reasons.append(f"packed_heads={packed} {lack} the {group} heads to a KV head")
    if packed > (most := max_packed(problem)):
        reasons.append(f"packed_heads={packed} exceeds {most} of dense e4m3")
    return reasons


def may_fill(problem: AttentionProblem, config: Config) -> bool:
    """True if tiles of whole queries are legal (`fills_rows`)."""
    is_clustered = config.get("combine") == "cluster"
    if "pads_heads" not in config.params or problem.has_sinks or is_clustered:
        return False
    others = (name in config.params for name in NOT_FILLING)
    return problem.is_paged or not (any(others) or problem.mask_operand)


def smem_bytes(problem: AttentionProblem, config: Config) -> int:
    """Dynamic shared memory of a block, bytes.

    - one Q tile, and the stages of K and V, of V twice in e4m3 over pages
    - in their place the partials for its cluster: fp32 rows of O padded by 8, log-sum-exp
    - the output's tile with `stages_output`, and fp32 O with `carries_parts`
    - fp32 O, maxima and sums of all key groups but one
    - the barriers
    - with `column_groups` parts of a tile of keys as stages, one tile of V, the probabilities of
      two tiles, and statistics of their rows
    """
    wide, columns, rows_q = (
        *map(instance, (problem.head_dim, problem.value_width)),
        tile_m(config.params),
    )
    if "column_groups" in config.params:
        keys = config["tile_n"]
        elements = (rows_q + keys) * wide + config["kv_stages"] * keys * PART_COLUMNS
        elements += 2 * rows_q * keys
        return int(elements * DTYPE_BYTES[problem.dtype] + 2 * BARRIER_BYTES)
    rings = 2 if problem.is_paged and problem.dtype == E4M3 else 1
    of_values = rings * columns
    elements = rows_q * wide + config["kv_stages"] * config["tile_n"] * (wide + of_values)
    operands = elements * DTYPE_BYTES[problem.dtype]
    is_split = problem.is_paged or not (problem.is_varlen or problem.block_mask)
    is_split = is_split and not config["persistent"]
    share = 4 * rows_q * (columns + 8 + 1) if is_split and config["warp_groups"] == 1 else 0
    out = 2 * rows_q * columns if config.get("stages_output") else 0
    out = 4 * rows_q * columns if config.get("carries_parts") else out
    partners = (config.get("key_groups", 1) - 1) * 8 * rows_q * (columns // 2 + 4)
    return int(-(-max(operands, share) // 1024) * 1024 + out + partners + BARRIER_BYTES)
