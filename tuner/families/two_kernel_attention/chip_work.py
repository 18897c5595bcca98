"""Demands of the two kernels on the chip."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from tuner.config import Config
from tuner.families.chip_work import WGMMA_M, Work, wgmmas
from tuner.families.two_kernel_attention.shape import STAGES, columns, smem_bytes
from tuner.hardware import WARP_GROUP, Gpu
from tuner.problem import DTYPE_BYTES, AttentionProblem


def chip_work(problem: AttentionProblem, config: Config, gpu: Gpu) -> Iterator[Work]:
    """Each kernel over all launches, as if they were equal: under a causal mask the later rows'
    have more to do.
    """
    heads = problem.batch * problem.heads_q
    rows = min(config["rows_per_launch"], problem.seqlen_q)
    launches = heads // config["heads_per_launch"] * ceil(problem.seqlen_q / rows)
    width, tile_n = DTYPE_BYTES[problem.dtype], config["tile_n"]
    for stage in STAGES:
        groups, depth = config[f"{stage}_groups"], config[f"{stage}_stages"]
        stage_columns, tile_m = columns(problem, stage), WGMMA_M * groups
        row_blocks, resident = ceil(rows / tile_m), config[f"{stage}_blocks_per_sm"]
        starts = range(0, problem.seqlen_q, tile_m)
        spans = (problem.keys_of(start, start + tile_m - 1) for start in starts)
        steps = heads * sum(ceil(len(keys) / tile_n) for keys in spans) / launches
        is_scores, slices = stage == "scores", ceil(problem.head_dim / stage_columns)
        operand = tile_n * stage_columns * slices
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
            smem_bytes=smem_bytes(problem, stage, tile_n, groups, depth),
            blocks_per_sm=resident,
            tensor_flops=2.0 * tile_m * operand * steps,
            wgmma=steps
            * (
                wgmmas(tile_m, tile_n, stage_columns)
                if is_scores
                else slices * wgmmas(tile_m, stage_columns, tile_n)
            ),
            exponentials=(
                (3.0 if problem.softcap else 1.0) * tile_m * tile_n * steps if is_scores else 0.0
            ),
            l2_bytes=width * (moved * steps + ends),
        )
