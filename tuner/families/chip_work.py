"""A launch's demands on the chip: tiles, waves, occupancy, bytes, instructions.

Counted from the config and the problem, never measured. Reports print them (`Family.chip_work`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tuner.hardware import WARP, Gpu
from tuner.problem import DTYPE_BYTES, AttentionProblem

#: Rows, columns and depth of the largest WGMMA of 16-bit operands (PTX ISA, wgmma).
WGMMA_M, WGMMA_N, WGMMA_K = 64, 256, 16
#: Warps that one multiprocessor holds [CUDA C++ Programming Guide 13.0, "Compute Capabilities"].
WARPS_PER_SM = 64


@dataclass(frozen=True)
class Work:
    """One launch of one kernel."""

    kernel: str
    launches: int
    """Such launches in a call."""
    tiles: int
    """Pieces of work that the multiprocessors take one after the other."""
    slots: int
    """Pieces that the chip holds at once."""
    is_even: bool
    """True if the pieces are equal, which they are not under a causal mask."""
    threads: int
    """Threads of a block."""
    smem_bytes: int
    """Shared memory of a block, bytes."""
    blocks_per_sm: int
    tensor_flops: float
    """FLOPs executed by tensor cores, including padding and masked elements of visited tiles."""
    wgmma: float
    """Number of warp-group instructions, at most 64 x 256 x 16 each."""
    exponentials: float
    """Evaluated by the special-function units."""
    l2_bytes: float
    """Bytes between the L2 and the multiprocessors."""

    @property
    def waves(self) -> float:
        return self.tiles / self.slots

    @property
    def fill(self) -> float:
        """Share of the multiprocessors' time that has work, if equal pieces take equal time."""
        return self.waves / ceil(self.waves)

    @property
    def warps_per_sm(self) -> int:
        return self.blocks_per_sm * self.threads // WARP

    @property
    def occupancy(self) -> float:
        """Resident warps over the maximum of a multiprocessor."""
        return self.warps_per_sm / WARPS_PER_SM


def total(amounts: Iterable[Work], name: str) -> float:
    """A quantity of `Work` over all launches of a call."""
    return float(sum(work.launches * getattr(work, name) for work in amounts))


def wgmmas(tile_m: int, tile_n: int, depth: int) -> int:
    """Warp-group instructions of a product of these extents."""
    return ceil(tile_m / WGMMA_M) * ceil(tile_n / WGMMA_N) * ceil(depth / WGMMA_K)


def attention_launch(
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
    blocks = (
        problem.keys_of(b * tile_m // packed, ceil((b + 1) * tile_m / packed) - 1)
        for b in range(row_blocks)
    )
    steps = heads * sum(ceil(k.stop / tile_n) - k.start // tile_n for k in blocks if k)
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


def work_of_groups(groups: Sequence[Work], kernel: str) -> Work:
    """Work of a grouped product: the tiles of all groups, each padded to whole ones."""
    return replace(
        groups[0],
        kernel=kernel,
        tiles=sum(work.tiles for work in groups),
        tensor_flops=total(groups, "tensor_flops"),
        wgmma=total(groups, "wgmma"),
        l2_bytes=total(groups, "l2_bytes"),
    )
