"""Meanings of the families' parameters, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MEANINGS: Mapping[str, str] = {
    "block_m": "Rows of Q a block computes (Triton's BLOCK_M).",
    "block_n": "Rows of K and V of a step (Triton's BLOCK_N).",
    "blocks_per_sm": "Thread blocks that fit a multiprocessor at once.",
    "cluster_m": "Blocks of a thread block cluster along M; they share loads by multicast.",
    "cluster_n": "Blocks of a thread block cluster along N; they share loads by multicast.",
    "combine": "Place where splits are combined: a cluster's shared memory, or a second kernel.",
    "decomposition_mode": "Split-K (equal parts of K) or stream-K (parts as the chip fills).",
    "early_exp": "Percent of a step's exponentials computed while the product with V still runs.",
    "epilogue_schedule": "CUTLASS's epilogue: stores through shared memory and TMA, or directly.",
    "heads_per_launch": "Heads of the batch that one launch computes; few keep scores in the L2.",
    "in_place": "Probabilities are written over the scores.",
    "is_mainloop_locked": "Named barriers order the warp groups' main loops.",
    "k_warps": "Warps that share a row and divide K between them.",
    "kernel": "The vendor's kernel that is called.",
    "kernel_schedule": "CUTLASS's main loop: which warps load and which multiply.",
    "key_groups": "Warp groups that share rows of Q and take blocks of keys in turn.",
    "kv_stages": "Depth of the pipeline of K and V tiles in shared memory.",
    "layout": "Order of the tensors' axes that the vendor's kernel is given.",
    "lead": "Elements of K that are fetched into the L2 before the preceding kernel ends.",
    "loads_q_separately": "A warp of its own loads Q.",
    "max_swizzle_size": "Tiles of neighbouring rows or columns that run one after the other.",
    "num_stages": "Depth of Triton's software pipeline.",
    "num_warps": "Warps of a block (Triton).",
    "output_blocks_per_sm": "Blocks of the second kernel that fit a multiprocessor at once.",
    "output_buffers": "2: the second kernel's next product runs while this one is rescaled.",
    "output_groups": "Consumer warp groups of the second kernel, 64 rows each.",
    "output_stages": "Pipeline depth of the second kernel.",
    "packed_heads": "Query heads of one KV head that share a tile's rows.",
    "passes": "Times that a row of scores is read.",
    "pdl": "Programmatic dependent launch: the kernel starts before the preceding one has ended.",
    "persistent": "One block for each slot of the GPU, which takes tiles until none is left.",
    "pieces": "16-byte loads a lane issues in each step and row tile.",
    "ping_pong": "Named barriers let the warp groups multiply in turn.",
    "q_in_registers": "Q is read from shared memory once a tile and kept in registers.",
    "q_stages": "Depth of the pipeline of Q tiles.",
    "raster_order": "Order of the tiles: along M or along N.",
    "row_tiles": "Groups of 8 weight rows that a warp owns.",
    "rows_per_block": "Rows that a block computes.",
    "rows_per_launch": "Rows of queries that one launch computes of each head.",
    "score_buffers": "2: Q K^T runs two steps ahead of the product with V.",
    "scores_blocks_per_sm": "Blocks of the first kernel that fit a multiprocessor at once.",
    "scores_buffers": "2: the first kernel's next product runs under this one's exponentials.",
    "scores_groups": "Consumer warp groups of the first kernel, 64 rows each.",
    "scores_stages": "Pipeline depth of the first kernel.",
    "split_k": "Blocks of a cluster that divide K between them.",
    "splits": "Parts into which the keys (attention) or K (products) are split over blocks.",
    "stages": "Pipeline depth: tiles in flight between memory and the tensor cores.",
    "stages_output": "The output goes through shared memory and TMA.",
    "store_buffers": "Boxes of shared memory a warp stores its results through; 0: none.",
    "streams": "CUDA streams over which the launches are dealt.",
    "swap_ab": "Computes the transposed product, so that M and N change places.",
    "threads_per_row": "Threads that share a row.",
    "tile_k": "Elements of K of a step.",
    "tile_m": "Rows of the output a block computes.",
    "tile_n": "Columns of the output a block computes; in attention, rows of K and V of a step.",
    "tile_order": "Order in which causal tiles are taken.",
    "tile_scheduler": "Way tiles reach blocks: one each, persistent blocks, or stream-K.",
    "vector_width": "Elements of one load.",
    "warp_groups": "Groups of four warps that multiply, 64 rows each.",
    "warps": "Warps of a block that multiply.",
}
"""By the parameter's name."""


def meanings(names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, meaning) of some parameters, sorted; unknown ones (of other versions) are left out."""
    return [(name, MEANINGS[name]) for name in sorted(set(names)) if name in MEANINGS]
