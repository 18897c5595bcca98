"""Candidates of fused attention that can win."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product

from tuner.config import Config, Value
from tuner.families.attention_instances import instance
from tuner.families.chip_work import WGMMA_M
from tuner.families.fused_attention.legality import (
    BY_COLUMNS,
    MAX_CLUSTERED,
    may_skip,
    smem_bytes,
)
from tuner.families.fused_attention.packing import packings, packs, tile_m
from tuner.families.fused_attention.registers import spills
from tuner.hardware import SMEM_PER_SM_BYTES, SMEM_RESERVED_PER_BLOCK_BYTES, Gpu
from tuner.problem import E4M3, AttentionProblem

#: (warp groups, key groups, blocks an SM) worth trying.
SHAPES = ((1, 1, 1), (1, 1, 2), (2, 1, 1), (3, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1))
#: Keys of one split: fewer do not pay for the combining kernel.
MIN_SPLIT_KEYS = 128
#: Queries from which on D = 64 may rescale lazily.
LONG = 2048
#: Splits of sequences of unlike lengths, where there are tiles enough without.
UNLIKE_SPLITS = 8


def candidates(name: str, problem: AttentionProblem, gpu: Gpu) -> Iterator[Config]:
    """Legal and illegal configs among which the fastest is expected.

    - one block a tile where all tiles fit at once, else persistent blocks
    - one warp group on an SM only if the tiles are at most as many as the SMs
    - wide tiles and several warp groups only where they have rows
    """
    if problem.is_wide:
        yield from _wide(name, problem, gpu)
        return
    choices = packings(problem)
    rows = problem.seqlen_q * max(packed for packed, _ in choices)
    levers = product(SHAPES, _key_tiles(problem), (1, 2), choices, (False, True))
    for shape, tile_n, buffers, (packed, pads), in_registers in levers:
        groups, sharing, blocks = shape
        tile_m = 64 * groups // sharing
        tiles = -(-problem.seqlen_q * packed // tile_m) * packs(problem, packed, pads)
        if not _suits(problem, gpu, shape, rows, tiles):
            continue
        if sharing > 1 and (in_registers or buffers > 1):
            continue
        ordered = (False, True) if sharing == 1 else (False,)
        for depth, ping_pong, early, (splits, combine), pdl, staged in product(
            (4, 8) if sharing > 1 else _depths(problem, rows),
            ordered if groups > 1 and buffers == 1 else (None,),
            _early(problem, groups) if buffers == 1 else (None,),
            _splits(problem, tiles, gpu),
            (False, True),
            (False, True),
        ):
            if staged and (splits > 1 or problem.is_paged):  # partial outputs are not staged
                continue
            if problem.is_paged and blocks > 1 and tiles * splits <= gpu.sm_count:
                continue
            optional: dict[str, Value | None] = {
                "key_groups": sharing if sharing > 1 else None,
                "stages_output": staged or None,
                "combine": combine,
                "ping_pong": ping_pong,
                "early_exp": early,
                "packed_heads": packed if problem.heads_q > problem.heads_kv else None,
                "pads_heads": pads or None,
            }
            params: dict[str, Value] = {
                "warp_groups": groups,
                "tile_n": tile_n,
                "kv_stages": depth,
                "score_buffers": buffers,
                "q_in_registers": in_registers,
                "persistent": tiles > gpu.sm_count * blocks and splits == 1,
                "blocks_per_sm": blocks,
                "splits": splits,
                "pdl": pdl,
                **{name: value for name, value in optional.items() if value is not None},
            }
            # Groups that take no turns get out of step by it: 10 % slower at D = 128.
            kind = _skipped(problem, params) if ping_pong else ""
            for skipped in (None, kind) if kind else (None,):
                config = Config(name, {**params, "skips_masked": skipped} if skipped else params)
                yield from (config, *lazily(problem, config))


def _wide(name: str, problem: AttentionProblem, gpu: Gpu) -> Iterator[Config]:
    """The same of wide heads, whose two groups have columns of their own."""
    for (packed, pads), stages, pdl in product(packings(problem), (4, 5), (False, True)):
        tiles = -(-problem.seqlen_q * packed // WGMMA_M) * packs(problem, packed, pads)
        optional = {
            "packed_heads": packed if problem.heads_q > problem.heads_kv else None,
            "pads_heads": pads or None,
        }
        for splits, combine in _splits(problem, tiles, gpu):
            if combine != "cluster":
                params = {**optional, "combine": combine, "splits": splits, "pdl": pdl}
                more = {key: value for key, value in params.items() if value is not None}
                usual = {"column_groups": 2, "kv_stages": stages, "blocks_per_sm": 1}
                yield Config(name, {**BY_COLUMNS, **usual, **more})


def lazily(problem: AttentionProblem, config: Config) -> Iterator[Config]:
    """The config with ``rescale=lazy`` where that may be faster, and with longer turns.

    At ten problems of 2,500 to 16,384 queries it took 3.1 to 5.5 % less with D = 128 and 256. With
    D = 64 it took 3.1 % less, and under a causal mask 1.6 % more. ``turn_ends=scores`` then took
    1.2 % less at six with D = 128, and no less with others (H200, 29 November 2026). Both won at
    six of eight e4m3 problems of 2,048 to 16,384 queries.
    """
    is_one = config["warp_groups"] == 1 or config["score_buffers"] > 1
    if is_one or (problem.dtype == E4M3 and problem.is_paged):
        return
    is_long = problem.seqlen_q >= LONG and not problem.is_causal
    if instance(problem.head_dim) < (64 if is_long else 96):
        return
    if problem.seqlen_q >= 64 and not problem.is_paged and "key_groups" not in config.params:
        params: dict[str, Value] = {**config.params, "rescale": "lazy"}
        yield Config(config.family, params)
        if config.get("ping_pong") and instance(problem.head_dim) == 128:
            yield Config(config.family, {**params, "turn_ends": "scores"})


def _key_tiles(problem: AttentionProblem) -> tuple[int, ...]:
    """Numbers of keys of a step that are worth trying."""
    if problem.block_mask:
        return (64, 128)
    if problem.dtype == E4M3:
        return (64, 96, 128, 160, 192, 224)
    return (64, 80, 96, 128, 160) if instance(problem.head_dim) == 128 else (64, 80, 96, 128)


def _suits(
    problem: AttentionProblem, gpu: Gpu, shape: tuple[int, int, int], rows: int, tiles: int
) -> bool:
    """True for a shape of `SHAPES` that may win.

    Args:
        problem: problem of the candidates.
        gpu: GPU that runs them.
        shape: warp groups, key groups, blocks an SM.
        rows: most rows of queries of a head.
        tiles: tiles of all heads.
    """
    groups, sharing, blocks = shape
    is_crowded = tiles > gpu.sm_count
    if rows <= 64 * groups // sharing - 64:
        return False
    if sharing > 1:
        return not (is_crowded or problem.is_paged)
    shares_sm = instance(problem.head_dim) <= 128  # two blocks of the smallest tiles fit
    if groups > 1 or not shares_sm or is_crowded == (blocks > 1):
        return True
    return problem.is_paged and not is_crowded


def _early(problem: AttentionProblem, groups: int) -> tuple[int, ...]:
    """Percents of the exponentials before the wait for P V. FlashAttention-3's machine code has a
    fifth there in its causal kernels of 128 columns.
    """
    tried = (problem.is_causal or problem.dtype == E4M3) and instance(problem.head_dim) == 128
    if groups != 2 or not tried or problem.is_paged or problem.block_mask:
        return (0, 50)
    return (0, 25, 50)


def _skipped(problem: AttentionProblem, params: Mapping[str, Value]) -> str:
    """The kind of `skips_masked` that leaves out most; empty where none is legal, or where a block
    has more keys than the tile has queries.
    """
    for kind in ("halves", "blocks"):
        if may_skip(problem, {**params, "skips_masked": kind}):
            queries = tile_m(params) // int(params.get("packed_heads", 1))
            return kind if kind == "halves" or int(params["tile_n"]) <= queries else ""
    return ""


def pays(problem: AttentionProblem, config: Config) -> bool:
    """True when nothing spills, each split has keys, and `blocks_per_sm` blocks fit. Other
    configs are legal, and slow.
    """
    blocks = config["blocks_per_sm"]
    room = SMEM_PER_SM_BYTES // blocks - SMEM_RESERVED_PER_BLOCK_BYTES
    steps = -(-problem.seqlen_kv // config["tile_n"])
    fits = config["splits"] <= steps and smem_bytes(problem, config) <= room
    return bool(fits and not spills(problem, config))


def _depths(problem: AttentionProblem, rows: int) -> tuple[int, ...]:
    """Stages of the rings, for `rows` rows of packed queries."""
    if problem.block_mask:  # a block's first keys wait for the table
        return (2, 3)
    if rows > 64:
        return (2,)
    return (2, 3, 4) if problem.is_paged else (2, 4)


def _splits(problem: AttentionProblem, tiles: int, gpu: Gpu) -> tuple[tuple[int, str | None], ...]:
    """One, the powers of two by which `tiles` fill an idle chip up to twice, and what fills it
    once and twice as nearly as can be; how combined.
    """
    if problem.block_mask or (not problem.is_paged and (problem.is_windowed or problem.is_varlen)):
        return ((1, None),)
    once, twice = gpu.sm_count // tiles, 2 * gpu.sm_count // tiles
    most = min(twice, problem.seqlen_kv // MIN_SPLIT_KEYS)
    if problem.is_paged and problem.is_varlen:  # the longest must not outlast the others
        most = max(most, min(UNLIKE_SPLITS, problem.seqlen_kv // MIN_SPLIT_KEYS))
    counts = {2**i for i in range(1, max(1, most).bit_length())} | {once, twice}
    several = sorted(count for count in counts if 1 < count <= most)
    clustered = [(splits, "cluster") for splits in several if splits <= MAX_CLUSTERED]
    return ((1, None), *clustered, *((splits, "kernel") for splits in several))


@cache
def split_counts(most: int) -> tuple[int, ...]:
    """Counts of splits that are tried, up to the most that are worth it."""
    counts = {2**i for i in range(1, max(1, most).bit_length())} | {most}
    return tuple(sorted(count for count in counts if count > 1))
