"""Columns that the templates of attention are instantiated for, and registers of their threads."""

from __future__ import annotations

from collections.abc import Mapping

#: Columns of Q, K and V that the template is instantiated for; a smaller D is padded by TMA.
INSTANCES = (64, 96, 128, 192, 256)
#: (producer, consumer) registers after setmaxnreg, by (warp groups, blocks an SM): multiples of 8
#: (PTX ISA, setmaxnreg). Their sum over a block's threads stays within what the block gets at its
#: launch (`launch_registers`); a thread that asked for more would wait for ever.
REGISTERS: Mapping[tuple[int, int], tuple[int, int]] = {
    (1, 1): (56, 240),
    (1, 2): (32, 224),
    (2, 1): (24, 240),
    (2, 2): (32, 104),
    (3, 1): (32, 160),
    (3, 2): (32, 72),
    (4, 1): (32, 112),
    (4, 2): (32, 48),
}


def launch_registers(warp_groups: int, blocks_per_sm: int) -> int:
    """Registers of a thread at its launch: what `__launch_bounds__` leaves it, in eights."""
    threads = 128 * (warp_groups + 1)
    return min(255, 65536 // (threads * blocks_per_sm)) // 8 * 8


#: The same of heads whose columns of the output two warp groups share.
WIDE_INSTANCES = (512,)
_ALL = (*INSTANCES, *WIDE_INSTANCES)
_INSTANCE = [next(d for d in _ALL if d >= size) for size in range(_ALL[-1] + 1)]


def instance(head_dim: int) -> int:
    """The smallest instance that holds `head_dim` columns."""
    return _INSTANCE[head_dim]
