"""Work of one launch, and what the instructions and the multiprocessors' sizes bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from tuner.hardware import WARP

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


def total(found: Iterable[Work], name: str) -> float:
    """A quantity of `Work` over all launches of a call."""
    return float(sum(work.launches * getattr(work, name) for work in found))


def wgmmas(tile_m: int, tile_n: int, depth: int) -> int:
    """Warp-group instructions of a product of these extents."""
    return ceil(tile_m / WGMMA_M) * ceil(tile_n / WGMMA_N) * ceil(depth / WGMMA_K)
