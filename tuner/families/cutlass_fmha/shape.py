"""Fields, shared memory and registers of a config of `cutlass_fmha`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from tuner.config import Config
from tuner.hardware import (
    REGISTERS_PER_SM,
    REGISTERS_PER_THREAD,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    WARP_GROUP,
)
from tuner.problem import AttentionProblem

TMA = "KernelTma"
COOPERATIVE = "KernelTmaWarpSpecializedCooperative"
PINGPONG = "KernelTmaWarpSpecializedPingpong"
SCHEDULES = (TMA, COOPERATIVE, PINGPONG)
INDIVIDUAL = "IndividualTileScheduler"
PERSISTENT = "PersistentTileScheduler"
SCHEDULERS = (INDIVIDUAL, PERSISTENT)
ASCENDING = "ascending"
DESCENDING = "descending"
ORDERS = (ASCENDING, DESCENDING)
#: Head dimensions that the template is instantiated for; TMA pads a smaller D with zeros.
HEAD_TILES = (32, 64, 96, 128, 192, 256)
#: Widths that CuTe has no WGMMA for unless asked (mma_sm90.hpp): the extended template's.
EXTENDED_TILES_N = (48, 80, 112, 144, 160, 176, 208, 224, 240)
#: setmaxnreg of the warp group that loads (LoadRegisterRequirement of
#: fmha_kernel_tma_warpspecialized.hpp).
LOAD_REGISTERS = 24
#: The collectives' shared memory is aligned to the swizzle atom of the epilogue's tile, 64 x 32
#: elements (sm90_builder.inl); sizeof on every config compiled agrees.
ALIGNMENT = 512
EPILOGUE_TILE_BYTES = 64 * 32 * 2
WIDTH = 2
"""Bytes of an element: fp16 and bf16."""


def fields(schedule: Any, scheduler: Any, problem: AttentionProblem) -> set[str]:
    """Names of the parameters of a config with this schedule and scheduler."""
    names = {"kernel_schedule", "tile_m", "tile_n", "kv_stages"}
    if schedule == TMA:
        return names | {"blocks_per_sm"}
    names |= {"warp_groups", "is_mainloop_locked"}
    if problem.is_causal:
        names.add("tile_order")
    if schedule == PINGPONG:
        return names | {"q_stages"}
    # A block that visits one query tile never waits for a slot of Q, and a persistent Cooperative
    # kernel with a warp that loads Q is Pingpong.
    return names | {
        "tile_scheduler",
        "q_stages" if scheduler == PERSISTENT else "loads_q_separately",
    }


@dataclass(frozen=True)
class FmhaShape:
    """The numbers of a well-formed config."""

    schedule: str
    tile_m: int
    tile_n: int
    head_tile: int
    warp_groups: int
    kv_stages: int
    q_stages: int
    blocks_per_sm: int
    is_persistent: bool
    is_descending: bool
    is_mainloop_locked: bool

    @classmethod
    def of(cls, problem: AttentionProblem, config: Config) -> Self:
        schedule = config["kernel_schedule"]
        groups = 1 if schedule == TMA else config["warp_groups"]
        return cls(
            schedule=schedule,
            tile_m=config["tile_m"],
            tile_n=config["tile_n"],
            head_tile=next(d for d in HEAD_TILES if d >= problem.head_dim),
            warp_groups=groups,
            kv_stages=config["kv_stages"],
            q_stages=config.get("q_stages", groups),
            blocks_per_sm=config.get("blocks_per_sm", 1),
            is_persistent=schedule == PINGPONG or config.get("tile_scheduler") == PERSISTENT,
            is_descending=config.get("tile_order") == DESCENDING,
            is_mainloop_locked=config.get("is_mainloop_locked", False),
        )

    @property
    def group_rows(self) -> int:
        """Query rows of one consumer warp group."""
        return self.tile_m // self.warp_groups

    @property
    def is_grid_3d(self) -> bool:
        """Batch and head in the grid's y and z: the upstream scheduler of single tiles."""
        return not self.is_persistent and not self.is_descending

    def max_visits(self, problem: AttentionProblem) -> int:
        """K/V tiles that the block with most of them visits."""
        columns = problem.seqlen_kv
        if problem.is_causal:
            columns = min(columns, problem.seqlen_q)
        return -(-columns // self.tile_n)

    # Shared memory: SharedStorage of fmha_kernel_tma.hpp and fmha_kernel_tma_warpspecialized.hpp.

    @property
    def _epilogue_stages(self) -> tuple[int, int]:
        """(StagesC, StagesD) of sm90_get_tma_dispatch_policy (sm90_builder.inl)."""
        tiles = max(1, self.group_rows // 64) * (self.head_tile // 32)
        return min(tiles, 4), min(tiles, 2)

    @property
    def _epilogue_bytes(self) -> int:
        """One warp group's TensorStorage: its output tiles and an aligned, unused remainder."""
        return self._epilogue_stages[1] * EPILOGUE_TILE_BYTES + ALIGNMENT

    @property
    def is_epilogue_apart(self) -> bool:
        """True when the epilogue needs memory of its own instead of the mainloop's.

        A persistent block's does, as the next tile's loads arrive meanwhile. In other blocks the
        output of warp group i starts i TensorStorages into the slots of Q. Unless slots are larger,
        it reaches into the slot of group i + 1, which may still be multiplying. The last group's
        may spread anywhere: the groups' epilogues take turns.
        """
        slot = self.group_rows * self.head_tile * WIDTH
        written = self._epilogue_bytes - ALIGNMENT
        return self.is_persistent or any(
            i * self._epilogue_bytes + written > (i + 1) * slot for i in range(self.warp_groups - 1)
        )

    @property
    def smem_bytes(self) -> int:
        """sizeof(Kernel::SharedStorage), which a launch asks for."""
        rows = self.q_stages * self.group_rows + self.kv_stages * self.tile_n
        mainloop = _round_up(rows * self.head_tile * WIDTH, ALIGNMENT)
        epilogue = self.warp_groups * self._epilogue_bytes
        tensors = mainloop + epilogue if self.is_epilogue_apart else max(mainloop, epilogue)
        # A full and an empty barrier of 8 bytes a slot; the order and load barriers and the
        # reducer's two slots exist in the warp-specialised kernels only.
        barriers = 16 * (self.kv_stages + self.q_stages + self._epilogue_stages[0])
        if self.schedule != TMA:
            barriers += 16 * self.warp_groups + 16 + 32
        return _round_up(tensors + barriers, ALIGNMENT)

    # Registers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.warp_groups + (self.schedule != TMA)) * WARP_GROUP

    @property
    def launch_registers(self) -> int:
        """Registers a thread starts with: __launch_bounds__(threads, blocks), a multiple of 8."""
        share = REGISTERS_PER_SM // (self.threads * self.blocks_per_sm) // 8 * 8
        return min(share, REGISTERS_PER_THREAD)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread: MmaRegisterRequirement after setmaxnreg."""
        if self.schedule == TMA:
            return self.launch_registers
        supply = self.launch_registers * (self.warp_groups + 1)
        return (supply - LOAD_REGISTERS) // self.warp_groups // 8 * 8

    def spills(self, others: int) -> bool:
        """True when S, O, P and `others` exceed the registers: then ptxas spills or serialises."""
        s = self.group_rows * self.tile_n // WARP_GROUP
        o = self.group_rows * self.head_tile // WARP_GROUP
        return s + o + s // 2 + others > self.consumer_registers

    @property
    def resident_blocks(self) -> int:
        """Blocks that an SM holds at once, by shared memory and registers."""
        by_smem = SMEM_PER_SM_BYTES // (self.smem_bytes + SMEM_RESERVED_PER_BLOCK_BYTES)
        return max(1, min(self.blocks_per_sm, by_smem))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
