"""Work of attention's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from tuner.config import Config
from tuner.families import family, triton_attention, two_kernel_attention
from tuner.families.fused_attention import legality
from tuner.families.fused_attention.registers import instance
from tuner.hardware import WARP, WARP_GROUP, Gpu
from tuner.problem import DTYPE_BYTES, AttentionProblem
from tuner.report.work import products
from tuner.report.work.base import WGMMA_M, Work, wgmmas


def works(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    """The kernels of a call in order; empty for a family that is not known here."""
    match config.family:
        case "fused_attention":
            return (_fused_attention(problem, config, gpu),)
        case "triton_attention":
            return (_triton_attention(problem, config, gpu),)
        case "three_kernel_attention":
            return _three_kernels(problem, config, gpu)
        case "two_kernel_attention":
            return tuple(_two_kernels(problem, config, gpu))
        case _:
            return ()


def _attention(
    problem: AttentionProblem,
    gpu: Gpu,
    *,
    tile_m: int,
    tile_n: int,
    columns: int,
    threads: int,
    smem: int,
    blocks_per_sm: int,
    packed: int = 1,
    pads: bool = False,
    splits: int = 1,
    launches: int = 1,
) -> Work:
    """A fused kernel: a tile of queries visits the tiles of keys and values it may see.

    Args:
        problem: problem to compute.
        gpu: GPU that it runs on.
        tile_m: queries of a block.
        tile_n: keys of a step.
        columns: columns of Q, K and V as instantiated.
        threads: threads of a block.
        smem: shared memory of a block, bytes.
        blocks_per_sm: resident blocks of a multiprocessor.
        packed: query heads of one key head that share the rows of a tile.
        pads: each key head has such a tile, however many query heads it has.
        splits: blocks that share the keys of a tile; their parts are combined in fp32.
        launches: calls that share the batch.
    """
    problem = problem.evened
    row_blocks = ceil(problem.seqlen_q * packed / tile_m)
    packs = problem.heads_kv if pads else problem.heads_q // packed
    heads = problem.batch * packs // launches
    seen = (
        problem.keys_of(b * tile_m // packed, ceil((b + 1) * tile_m / packed) - 1)
        for b in range(row_blocks)
    )
    steps = heads * sum(ceil(k.stop / tile_n) - k.start // tile_n for k in seen if k)
    width = DTYPE_BYTES[problem.dtype] * problem.head_dim
    rows = heads * packed * problem.seqlen_q
    parts = 2 * 4 * problem.head_dim * rows * splits if splits > 1 else 0
    return Work(
        kernel="attention",
        launches=launches,
        tiles=row_blocks * heads * splits,
        slots=gpu.sm_count * blocks_per_sm,
        is_even=not (problem.is_causal or problem.block_mask),
        threads=threads,
        smem_bytes=smem,
        blocks_per_sm=blocks_per_sm,
        tensor_flops=4.0 * tile_m * tile_n * columns * steps,
        # A WGMMA of 8-bit operands is twice as deep.
        wgmma=steps
        * (wgmmas(tile_m, tile_n, columns) + wgmmas(tile_m, columns, tile_n))
        // problem.tensor_rate,
        # A soft cap takes an exponential and a reciprocal more.
        exponentials=(3.0 if problem.softcap else 1.0) * tile_m * tile_n * steps,
        # Q in and the output out once a tile, a tile of K and one of V a step.
        l2_bytes=width * (2 * rows + 2.0 * tile_n * steps) + parts,
    )


def _fused_attention(problem: AttentionProblem, config: Config, gpu: Gpu) -> Work:
    groups = config["warp_groups"]
    return _attention(
        problem,
        gpu,
        tile_m=WGMMA_M * groups,
        tile_n=config["tile_n"],
        columns=instance(problem.head_dim),
        threads=WARP_GROUP * (groups + 1),
        smem=legality.smem_bytes(problem, config),
        blocks_per_sm=config.get("blocks_per_sm", 1),
        packed=config.get("packed_heads", 1),
        pads=config.get("pads_heads", False),
        splits=config.get("splits", 1),
    )


def _triton_attention(problem: AttentionProblem, config: Config, gpu: Gpu) -> Work:
    work = _attention(
        problem,
        gpu,
        tile_m=config["block_m"],
        tile_n=config["block_n"],
        columns=triton_attention.padded(problem.head_dim),
        threads=WARP * config["num_warps"],
        smem=triton_attention.smem_bytes(problem, config, gpu),
        blocks_per_sm=triton_attention.blocks_per_sm(problem, config, gpu),
        packed=config.get("packed_heads", 1),
    )
    return replace(work, wgmma=0)  # which instructions Triton chooses is not known here


def _three_kernels(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    heads = config["heads_per_launch"]
    chunks = problem.batch * problem.heads_q // heads
    # The heads of one launch, as a problem of their own.
    key_heads = max(1, heads * problem.heads_kv // problem.heads_q)
    chunk = replace(problem, batch=1, heads_q=heads, heads_kv=key_heads)
    found = []
    for name, part in family(config.family).stages(chunk).items():
        (work,) = products.works(part, config.stages[name], gpu)
        found.append(replace(work, kernel=name, launches=chunks))
    return tuple(found)


def _two_kernels(problem: AttentionProblem, config: Config, gpu: Gpu) -> Iterator[Work]:
    """Each kernel over all launches, as if they were equal: under a causal mask the later rows'
    have more to do.
    """
    heads = problem.batch * problem.heads_q
    rows = min(config["rows_per_launch"], problem.seqlen_q)
    launches = heads // config["heads_per_launch"] * ceil(problem.seqlen_q / rows)
    width, tile_n = DTYPE_BYTES[problem.dtype], config["tile_n"]
    for stage in two_kernel_attention.STAGES:
        groups, depth = config[f"{stage}_groups"], config[f"{stage}_stages"]
        columns, tile_m = two_kernel_attention.columns(problem, stage), WGMMA_M * groups
        row_blocks, resident = ceil(rows / tile_m), config[f"{stage}_blocks_per_sm"]
        starts = range(0, problem.seqlen_q, tile_m)
        seen = (problem.keys_of(start, start + tile_m - 1) for start in starts)
        steps = heads * sum(ceil(len(keys) / tile_n) for keys in seen) / launches
        is_scores, slices = stage == "scores", ceil(problem.head_dim / columns)
        operand = tile_n * columns * slices
        # The probabilities are written once; each slice of the columns reads them.
        moved = tile_m * tile_n * (1 if is_scores else slices) + operand
        if is_scores and problem.bias:
            moved += tile_m * tile_n
        ends = config["heads_per_launch"] * rows * problem.head_dim
        yield Work(
            kernel=stage,
            launches=launches,
            tiles=row_blocks
            * config["heads_per_launch"]
            * (config["splits"] if is_scores else slices),
            slots=gpu.sm_count * resident,
            is_even=not problem.is_causal,
            threads=WARP_GROUP * (groups + 1),
            smem_bytes=two_kernel_attention.smem_bytes(problem, stage, tile_n, groups, depth),
            blocks_per_sm=resident,
            tensor_flops=2.0 * tile_m * operand * steps,
            wgmma=steps
            * (
                wgmmas(tile_m, tile_n, columns)
                if is_scores
                else slices * wgmmas(tile_m, columns, tile_n)
            ),
            exponentials=(
                (3.0 if problem.softcap else 1.0) * tile_m * tile_n * steps if is_scores else 0.0
            ),
            l2_bytes=width * (moved * steps + ends),
        )
