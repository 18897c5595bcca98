"""Fused attention, forward: `templates/fused_attention.cu.j2`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, ClassVar

from tuner.config import Config, Value
from tuner.families import attention_work
from tuner.families.arguments import (
    EXTENTS,
    WINDOW,
    Arguments,
    extents_of,
    named_strides,
    stride_names,
)
from tuner.families.base import (
    LSE,
    Domain,
    Family,
    KernelSpec,
    Launch,
    Ref,
    Strides,
    tma_conflict,
)
from tuner.families.fused_attention import cost
from tuner.hardware import (
    HOPPER,
    SMEM_PER_BLOCK_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    Gpu,
)
from tuner.problem import DTYPE_BYTES, E4M3, AttentionProblem, Operand, Problem
from tuner.problem.attention import BLOCK_SIZE, PAGE_MULTIPLE

KERNEL = "attention"
"""Name of the only kernel. Its library also launches the kernels before and after it."""
MASK_STRIDES = ("mask_batch", "mask_head", "mask_row", "mask_key")
"""Names of the strides of a mask or bias."""
#: Text that the template takes, by variable.
WORDS = {"dtype": ("float16", "bfloat16", E4M3), "mask_operand": ("bool", "additive")}
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
#: The same of paged caches and block-sparse masks, whose producer has the places of its copies.
PAGED_REGISTERS: Mapping[tuple[int, int], tuple[int, int]] = {
    **REGISTERS,
    (1, 2): (56, 200),
    (2, 1): (40, 232),
}
#: The same where the producing warps gather pages.
GATHERING_REGISTERS: Mapping[tuple[int, int], tuple[int, int]] = {
    **PAGED_REGISTERS,
    (2, 1): (56, 224),
    (3, 1): (56, 152),
}
#: Registers a thread needs at its launch beside the accumulators of one WGMMA: with fewer ptxas
#: gives up (C7602, which names the sum).
WGMMA_OVERHEAD_REGISTERS = 26
#: Registers a consumer thread needs beside all its accumulators: addresses, row statistics, loop
#: state. Found by compiling: above it ptxas spills.
OVERHEAD_REGISTERS = 28
#: The same where a thread has 104 or fewer, of which ptxas makes more.
NARROW_OVERHEAD_REGISTERS = 24
#: Further ones beside two score buffers under a sliding window, whose mask has two edges; with
#: tile_n=128 at D=64, 192 accumulators, ptxas spills 28 bytes.
WINDOW_REGISTERS = 24
#: Further ones beside the elements of a mask operand: where its rows lie.
MASK_REGISTERS = 16
#: The same of a block-sparse mask: where its bits lie, and those of two rows.
BLOCK_MASK_REGISTERS = 12
#: Rows of K and V that a tile under a block-sparse mask may have: its bits lie in one word.
SPARSE_TILES = (32, 64, 128)
PACKING = frozenset({"packed_heads", "pads_heads"})
"""Parameters that say which query heads share a tile's rows."""
#: Query heads that share a tile's rows at most.
MAX_PACKED = 32
#: The same with e4m3: a thread's two rows are 8 apart and have one factor, that of one head.
MAX_PACKED_E4M3 = 8
#: Blocks that share the keys of a tile at most; two for each multiprocessor of a chip are 264.
MAX_SPLITS = 512
#: (warp groups, key groups, blocks an SM) worth trying.
SHAPES = ((1, 1, 1), (1, 1, 2), (2, 1, 1), (3, 1, 1), (2, 2, 1), (4, 2, 1), (4, 4, 1))
#: Query heads in a tile whose output may go through shared memory: those of a warp's rows.
MAX_STAGED = 16
#: Blocks of a cluster at most (CUDA's limit where non-portable sizes are allowed).
MAX_CLUSTERED = 16
#: Share of the multiprocessors that clusters can be relied on to fill: a cluster's are those of one
#: GPC, of which some are left over. On an H200 42 clusters of three, 16 of eight or 8 of sixteen
#: took two rounds.
CLUSTERED_SHARE = 0.85
#: Instances whose rows are whole copies of a warp, 16 bytes a lane.
GATHERED = (64, 128, 256)
PAGING = frozenset({"box_rows", "gathers"})
"""Parameters of paged caches."""
#: Rows of a page that one copy may bring, widest first.
BOXES = (64, PAGE_MULTIPLE)
#: Keys of one split: fewer do not pay for the combining kernel.
MIN_SPLIT_KEYS = 128
#: Splits of sequences of unlike lengths, where there are tiles enough without.
UNLIKE_SPLITS = 8
#: mbarriers and two tiles' coordinates at the end of the shared memory, rounded to the alignment
#: of the tiles.
BARRIER_BYTES = 1024


def launch_registers(warp_groups: int, blocks_per_sm: int) -> int:
    """Registers of a thread at its launch: what `__launch_bounds__` leaves it, in eights."""
    threads = 128 * (warp_groups + 1)
    return min(255, 65536 // (threads * blocks_per_sm)) // 8 * 8


_INSTANCE = [next(d for d in INSTANCES if d >= size) for size in range(INSTANCES[-1] + 1)]


def instance(head_dim: int) -> int:
    """The smallest instance that holds `head_dim` columns."""
    return _INSTANCE[head_dim]


class FusedAttention(Family):
    """One kernel a call; scores and probabilities stay in registers."""

    name = "fused_attention"
    op = "attention"
    capabilities = (HOPPER,)
    writes_lse = True
    cost_constants = cost.CONSTANTS
    runtime_parameters = frozenset({"splits", "pdl", "combine"})
    work_terms = attention_work.TERMS
    amounts = staticmethod(attention_work.work)
    domains: ClassVar[Mapping[str, Domain]] = {
        "warp_groups": (1, 2, 3, 4),
        "key_groups": (2, 4),
        "tile_n": range(16, 257, 16),  # up to the N extent of one WGMMA
        "kv_stages": (1, 2, 3, 4, 5, 8),
        "score_buffers": (1, 2),
        "packed_heads": (1, 2, 4, 8, 16, MAX_PACKED),
        "pads_heads": (True,),
        "ping_pong": (False, True),
        "q_in_registers": (False, True),
        "early_exp": (0, 50, 100),
        "stages_output": (True,),
        "persistent": (False, True),
        "blocks_per_sm": (1, 2),
        "splits": range(1, MAX_SPLITS + 1),
        "pdl": (False, True),
        "combine": ("cluster", "kernel"),
        "box_rows": BOXES,
        "gathers": (True,),
    }
    optional = frozenset(
        {
            *("key_groups", "packed_heads", "ping_pong", "early_exp", "stages_output", "combine"),
            *("pads_heads", "box_rows", "gathers"),
        }
    )
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        "tile_n": (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
        "splits": (1, 2, 8, 32),
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, AttentionProblem) or not problem.is_alibi:
            return reason
        return f"{self.name} has no ALiBi"

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem, found = _attention(problem), []
        head_dim = instance(problem.head_dim)
        groups, tile_n, stages = config["warp_groups"], config["tile_n"], config["kv_stages"]
        blocks, buffers, splits = config["blocks_per_sm"], config["score_buffers"], config["splits"]
        extent = 32 // DTYPE_BYTES[problem.dtype]
        if tile_n % extent:
            found.append(
                f"tile_n={tile_n} is not a multiple of {extent}, the K extent of one WGMMA"
            )
        if stages < buffers:
            found.append(f"kv_stages={stages} is less than score_buffers={buffers}")
        if ("ping_pong" in config.params) != (groups > 1 and buffers == 1):
            found.append("ping_pong is for two warp groups or more with one score buffer, only")
        if ("early_exp" in config.params) != (buffers == 1):
            found.append("early_exp is for one score buffer, only")
        found += self._sharing(problem, config)
        found += self._packing(problem, config)
        if problem.is_varlen and not problem.is_paged and splits > 1:
            found.append(f"splits={splits} is not for variable lengths (allowed: 1)")
        found += self._paging(problem, config)
        found += self._blocks(problem, config)
        if splits > 1 and config["persistent"]:
            found.append(f"splits={splits} is for one block a tile, not for persistent blocks")
        if ("combine" in config.params) != (splits > 1):
            found.append("combine is for splits > 1, only")
        elif config.get("combine", "kernel") == "cluster":
            if splits > MAX_CLUSTERED:
                found.append(f"splits={splits} exceed the {MAX_CLUSTERED} blocks of a cluster")
            if groups > 1:
                found.append("combine=cluster is for one warp group, only")
        smem = self.smem_bytes(problem, config)
        if smem > SMEM_PER_BLOCK_BYTES:
            found.append(f"{smem} bytes of shared memory exceed {SMEM_PER_BLOCK_BYTES}")
        widest, launched = max(tile_n, head_dim) // 2, launch_registers(groups, blocks)
        if widest + WGMMA_OVERHEAD_REGISTERS > launched:
            found.append(
                f"{widest} accumulator registers of a WGMMA + {WGMMA_OVERHEAD_REGISTERS} exceed "
                f"the {launched} of a launch"
            )
        return found

    def accepts(self, problem: Problem, config: Config, gpu: Gpu) -> bool:
        """As `Family.accepts`, without spills: a config that was chosen at one mask and D may spill
        at another.
        """
        is_legal = super().accepts(problem, config, gpu)
        return is_legal and not _spills(_attention(problem), config)

    @staticmethod
    def _sharing(problem: AttentionProblem, config: Config) -> list[str]:
        """Violations of `key_groups` and `stages_output`, present only when they are on."""
        found = []
        groups, sharing = config["warp_groups"], config.get("key_groups", 1)
        if "key_groups" in config.params:
            if groups % sharing:
                found.append(f"key_groups={sharing} does not divide warp_groups={groups}")
            if config["persistent"] or config["score_buffers"] > 1 or config.get("ping_pong"):
                found.append(
                    "key_groups is for one tile a block, one score buffer and no ping_pong, only"
                )
            if sharing > config["kv_stages"]:
                found.append(
                    f"key_groups={sharing} exceeds kv_stages={config['kv_stages']}: each group "
                    "reads a stage of its own"
                )
        if "stages_output" in config.params:
            packed = config.get("packed_heads", 1)
            if problem.is_packed or packed > MAX_STAGED:
                found.append(
                    "stages_output is not for variable lengths, paged caches or more than "
                    f"{MAX_STAGED} packed heads"
                )
        return found

    @staticmethod
    def _paging(problem: AttentionProblem, config: Config) -> list[str]:
        """Violations of a config for a paged cache; otherwise of `PAGING`."""
        found, rows = [], config.get("box_rows", PAGE_MULTIPLE)
        if not problem.is_paged:
            names = sorted(PAGING & config.params.keys())
            return [f"{name} is for paged caches, only" for name in names]
        if "gathers" in config.params:
            if problem.dtype == E4M3 or instance(problem.head_dim) not in GATHERED:
                dims = ", ".join(map(str, GATHERED))
                found.append(f"gathers is not for e4m3, and for instances of D = {dims} only")
            if rows != PAGE_MULTIPLE:
                found.append(f"gathers is for box_rows={PAGE_MULTIPLE}, only")
        if "key_groups" in config.params:
            found.append("key_groups is not for paged caches")
        if problem.page_size % rows or config["tile_n"] % rows:
            found.append(
                f"box_rows={rows} does not divide both page_size={problem.page_size} and "
                f"tile_n={config['tile_n']}"
            )
        return found

    @staticmethod
    def _blocks(problem: AttentionProblem, config: Config) -> list[str]:
        """Violations of a config for a block-sparse mask."""
        if not problem.block_mask:
            return []
        found = []
        packed, tile_m = config.get("packed_heads", 1), _tile_m(config.params)
        if config["tile_n"] not in SPARSE_TILES:
            allowed = ", ".join(map(str, SPARSE_TILES))
            found.append(f"tile_n={config['tile_n']} is not for block_mask (allowed: {allowed})")
        if tile_m % packed or BLOCK_SIZE % (tile_m // packed):
            found.append(
                f"{tile_m} rows of {packed} packed heads do not divide the {BLOCK_SIZE} queries of "
                "a block of block_mask"
            )
        if "key_groups" in config.params or config["splits"] > 1:
            found.append("key_groups and splits > 1 are not for block_mask")
        if packed > 1 and "h" in problem.block_mask:
            found.append(f"packed_heads={packed} is not for a block_mask of each head (allowed: 1)")
        return found

    @staticmethod
    def _packing(problem: AttentionProblem, config: Config) -> list[str]:
        """Violations of `packed_heads` and `pads_heads`."""
        group = problem.heads_q // problem.heads_kv
        if ("packed_heads" in config.params) != (group > 1):
            return ["packed_heads is for several query heads to a KV head, only"]
        packed = config.get("packed_heads", 1)
        found = []
        if "pads_heads" in config.params:
            if not _may_pad(problem):
                found.append("pads_heads is not for e4m3, mask operands, block masks or sinks")
            if group > packed:
                found.append(f"packed_heads={packed} is less than the {group} heads to a KV head")
        elif group % packed:
            found.append(f"packed_heads={packed} does not divide the {group} heads to a KV head")
        if problem.dtype == E4M3 and packed > MAX_PACKED_E4M3:
            found.append(
                f"packed_heads={packed} exceeds {MAX_PACKED_E4M3}: a thread's rows would have "
                "different descale_q"
            )
        return found

    @staticmethod
    def smem_bytes(problem: AttentionProblem, config: Config) -> int:
        """Dynamic shared memory of a block, bytes.

        - one Q tile, and the stages of K and V, of V twice in e4m3 over pages
        - in their place the partials for its cluster: fp32 rows of O padded by 8, log-sum-exp
        - the output's tile with `stages_output`
        - fp32 O, maxima and sums of all key groups but one
        - the barriers
        """
        columns, tile_m = instance(problem.head_dim), _tile_m(config.params)
        rings = 3 if problem.is_paged and problem.dtype == E4M3 else 2
        rows = tile_m + rings * config["kv_stages"] * config["tile_n"]
        operands = rows * columns * DTYPE_BYTES[problem.dtype]
        is_split = problem.is_paged or not (problem.is_varlen or problem.block_mask)
        is_split = is_split and not config["persistent"]
        share = 4 * tile_m * (columns + 8 + 1) if is_split and config["warp_groups"] == 1 else 0
        out = 2 * tile_m * columns if config.get("stages_output") else 0
        partners = (config.get("key_groups", 1) - 1) * 8 * tile_m * (columns // 2 + 4)
        return int(-(-max(operands, share) // 1024) * 1024 + out + partners + BARRIER_BYTES)

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        if not isinstance(problem, AttentionProblem):
            return []
        return [
            config
            for config in self._grid(problem, gpu)
            if not self.violations(problem, config, gpu) and self._pays(problem, config)
        ]

    def _pays(self, problem: AttentionProblem, config: Config) -> bool:
        """True when nothing spills, each split has keys, and `blocks_per_sm` blocks fit. Other
        configs are legal, and slow.
        """
        blocks = config["blocks_per_sm"]
        room = SMEM_PER_SM_BYTES // blocks - SMEM_RESERVED_PER_BLOCK_BYTES
        steps = -(-problem.seqlen_kv // config["tile_n"])
        fits = config["splits"] <= steps and self.smem_bytes(problem, config) <= room
        return bool(fits and not _spills(problem, config))

    def _grid(self, problem: AttentionProblem, gpu: Gpu) -> Iterator[Config]:
        """Candidates that can win: one block a tile where all tiles fit at once, else persistent
        blocks; one group at an SM only where there are no more tiles than SMs; wide tiles and
        several groups only where they have rows.
        """
        packings = _packings(problem)
        rows = problem.seqlen_q * max(packed for packed, _ in packings)
        head_dim = instance(problem.head_dim)
        shares_sm = head_dim <= 128  # two blocks of the smallest tiles fit
        is_e4m3 = problem.dtype == E4M3
        tiles_n: tuple[int, ...] = (64, 80, 96, 128, 160) if head_dim == 128 else (64, 80, 96, 128)
        if is_e4m3:
            tiles_n = (64, 96, 128, 160, 192, 224)
        if problem.block_mask:
            tiles_n = (64, 128)
        levers = product(SHAPES, tiles_n, (1, 2), packings, (False, True))
        for (groups, sharing, blocks), tile_n, buffers, (packed, pads), in_registers in levers:
            tile_m = 64 * groups // sharing
            tiles = -(-problem.seqlen_q * packed // tile_m) * _packs(problem, packed, pads)
            is_crowded = tiles > gpu.sm_count
            if rows <= tile_m - 64 or (
                groups == 1
                and shares_sm
                and is_crowded != (blocks > 1)
                and (is_crowded or not problem.is_paged)
            ):
                continue
            if sharing > 1 and (tiles > gpu.sm_count or in_registers or buffers > 1):
                continue
            if sharing > 1 and problem.is_paged:
                continue
            ordered = (False, True) if sharing == 1 else (False,)
            for depth, ping_pong, early, (splits, combine), pdl, staged in product(
                (4, 8) if sharing > 1 else _depths(problem, rows),
                ordered if groups > 1 and buffers == 1 else (None,),
                (0, 50) if buffers == 1 else (None,),
                _splits(problem, tiles, gpu),
                (False, True),
                (False, True),
            ):
                if staged and (splits > 1 or problem.is_paged):  # partial outputs are not staged
                    continue
                if problem.is_paged and blocks > 1 and tiles * splits <= gpu.sm_count:
                    continue
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
                }
                if sharing > 1:
                    params["key_groups"] = sharing
                if staged:
                    params["stages_output"] = True
                if combine is not None:
                    params["combine"] = combine
                if ping_pong is not None:
                    params["ping_pong"] = ping_pong
                if early is not None:
                    params["early_exp"] = early
                if problem.heads_q > problem.heads_kv:
                    params["packed_heads"] = packed
                if pads:
                    params["pads_heads"] = True
                yield Config(self.name, params)

    def carried(self, problem: Problem, config: Config) -> Config:
        """Without grouped heads `packed_heads` is absent, which means 1 to kernels. With variable
        lengths or paged caches `stages_output` is absent. A mask operand leaves registers for
        narrower tiles. Nothing is carried to heads whose queries fill no tile.
        """
        attention = _attention(problem)
        if attention.mask_operand:
            config = _narrowed(attention, config)
        group = attention.heads_q // attention.heads_kv
        params = dict(config.params)
        if attention.is_packed:
            params.pop("stages_output", None)
        if not attention.is_paged:
            for name in PAGING:
                params.pop(name, None)
        packed, pads = int(params.pop("packed_heads", 1)), params.pop("pads_heads", False)
        if pads and 1 < group <= packed and _may_pad(attention):
            params["pads_heads"] = True
        else:
            packed = math.gcd(packed, group)
        if attention.seqlen_q < _tile_m(params) and not attention.is_paged:
            return config
        return Config(self.name, {**params, "packed_heads": packed} if group > 1 else params)

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """As `Family.draw`, with `ping_pong`, `early_exp` and `combine` only where they apply.
        `gathers`, `key_groups`, `pads_heads` and `stages_output` are each off half of the time.
        Boxes are as wide as possible.
        """
        params = dict(super().draw(problem, gpu, members, rng).params)
        params.pop("box_rows", None)
        if not _attention(problem).is_paged:
            params.pop("gathers", None)
        for name in ("gathers", "key_groups", "pads_heads", "stages_output"):
            if rng.random() < 0.5:
                params.pop(name, None)
        ping_pong, early = params.pop("ping_pong", False), params.pop("early_exp", 0)
        combine = params.pop("combine", "kernel")
        if params["splits"] != 1:
            params["combine"] = combine
        if params["score_buffers"] == 1:
            params["early_exp"] = early
            if params["warp_groups"] != 1:
                params["ping_pong"] = ping_pong
        return Config(self.name, params)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        attention = _attention(problem)
        producer, consumer = _registers(attention, config)
        paged: dict[str, Value] = {}
        if attention.is_paged:
            widest = _box_rows(attention.page_size, int(config["tile_n"]))
            rows = config.get("box_rows", PAGE_MULTIPLE if config.get("gathers") else widest)
            paged = {"is_paged": True, "box_rows": rows, "has_sinks": attention.has_sinks}
        return {
            KERNEL: KernelSpec(
                "fused_attention.cu.j2",
                {
                    "ping_pong": False,
                    "packed_heads": 1,
                    "early_exp": 0,
                    "key_groups": 1,
                    "stages_output": False,
                    **{k: v for k, v in config.params.items() if k not in self.runtime_parameters},
                    "dtype": attention.dtype,
                    "head_dim": instance(attention.head_dim),
                    "is_causal": attention.is_causal,
                    "is_windowed": attention.is_windowed,
                    "has_softcap": attention.softcap > 0,
                    "is_varlen": attention.is_varlen and not attention.is_paged,
                    **_mask_variables(attention),
                    **({"is_sparse": True} if attention.block_mask else {}),
                    "producer_registers": producer,
                    "consumer_registers": consumer,
                    **paged,
                },
                WORDS,
                arguments_of(attention),
            )
        }

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        return self._launches(_attention(problem), config, scale, {})

    def strided_launches(
        self, problem: Problem, config: Config, scale: float, strides: Strides
    ) -> list[Launch] | str:
        attention = _attention(problem)
        for matrix in attention.matrices:
            if reason := tma_conflict(matrix, strides.get(matrix.name, matrix.strides)):
                return reason
        return self._launches(attention, config, scale, strides)

    def _launches(
        self, attention: AttentionProblem, config: Config, scale: float, own: Strides
    ) -> list[Launch]:
        strides = {m.name: own.get(m.name, m.strides) for m in attention.matrices}
        integers = {
            **extents_of(attention),
            **named_strides(strides),
            "splits": config["splits"],
            "pdl": int(config["pdl"]),
            "clustered": int(config.get("combine", "kernel") == "cluster"),
        }
        if attention.is_windowed:
            integers |= zip(WINDOW, attention.visible, strict=True)
        if attention.is_paged:
            key, table = attention.matrices[1], own.get("page_table", (max(attention.pages), 1))
            integers |= {"total_q": attention.total_q, "page_size": attention.page_size}
            integers |= {"pages": key.shape[0], "table_stride": table[0]}
        elif attention.is_varlen:
            integers |= {"total_q": attention.total_q, "total_kv": attention.total_kv}
        if mask := attention.mask_operand:
            integers |= zip(MASK_STRIDES, _mask_strides(attention, mask, own), strict=True)
        if attention.block_mask:
            of_batch, of_heads, of_queries, columns = attention.block_shape
            integers |= {
                "blocks_batch": of_heads * of_queries * (of_batch > 1),
                "blocks_head": of_queries * (of_heads > 1),
                "block_columns": columns,
            }
        tensors = {_argument(one.name): Ref(one.name) for one in attention.operands}
        tensors[LSE] = Ref(LSE)
        scalars = {"scale": scale, **({"softcap": attention.softcap} if attention.softcap else {})}
        return [Launch.named(KERNEL, arguments_of(attention), tensors, integers, scalars)]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        attention = _attention(problem).evened
        head_tile = instance(attention.head_dim)
        return cost.predict_us(attention, config, head_tile, gpu, self.constants)

    def tiling(self, config: Config) -> attention_work.AttentionTiling:
        return attention_work.AttentionTiling(
            rows=_tile_m(config.params),
            keys=int(config["tile_n"]) * int(config.get("key_groups", 1)),
            resident=int(config["blocks_per_sm"]),
            packed=int(config.get("packed_heads", 1)),
            splits=int(config.get("splits", 1)),
            pads_heads=bool(config.get("pads_heads", False)),
        )

    def splitter(self, config: Config, gpu: Gpu) -> Callable[[Any], Sequence[int]]:
        params, rows = config.params, _tile_m(config.params)
        packed, pads = int(params.get("packed_heads", 1)), "pads_heads" in params
        is_split, is_clustered = "combine" in params, params.get("combine") == "cluster"
        room = gpu.sm_count * int(params["blocks_per_sm"])
        room = int(CLUSTERED_SHARE * room) if is_clustered else room

        def splits(problem: AttentionProblem) -> Sequence[int]:
            group = problem.heads_q // problem.heads_kv
            if packed != 1 and (not 1 < group <= packed if pads else group % packed):
                return ()
            if not is_split:
                return (1,)
            tiles = -(-problem.seqlen_q * packed // rows) * _packs(problem, packed, pads)
            most = min(room // tiles, problem.seqlen_kv // MIN_SPLIT_KEYS)
            return _counts(min(most, MAX_CLUSTERED) if is_clustered else most)

        return splits

    def is_scheduled(self, config: Config) -> bool:
        return "combine" in config.params or config.get("packed_heads", 1) != 1

    def is_split(self, config: Config) -> bool:
        return "combine" in config.params

    def called(self, problem: Problem, config: Config, splits: int) -> Config:
        """An absent `packed_heads` is 1 for the kernel."""
        attention, params = _attention(problem), {**config.params, "splits": splits}
        if attention.heads_q > attention.heads_kv:
            params.setdefault("packed_heads", 1)
        return Config(self.name, params)

    def legality_facts(self, problem: Problem) -> Hashable:
        attention = _attention(problem)
        facts = attention.dtype, attention.heads_q // attention.heads_kv
        if attention.block_mask:
            return (*facts, "h" in attention.block_mask)
        return (*facts, attention.page_size) if attention.is_paged else facts


@cache
def _counts(most: int) -> tuple[int, ...]:
    """Counts of splits that are tried, up to the most that are worth it."""
    counts = {2**i for i in range(1, max(1, most).bit_length())} | {most}
    return tuple(sorted(count for count in counts if count > 1))


def _spills(problem: AttentionProblem, config: Config) -> bool:
    """True when ptxas runs out of a consumer's registers, as found by compiling: a kernel whose
    accumulators are stored and loaded again between its WGMMAs works, and is many times slower.
    """
    head_dim, width = instance(problem.head_dim), DTYPE_BYTES[problem.dtype]
    names = ("warp_groups", "tile_n", "score_buffers", "q_in_registers")
    groups, tile_n, buffers, keeps_q = (config[name] for name in names)
    if buffers > 1 and head_dim > 128:
        return True
    if keeps_q and problem.is_causal and head_dim > 96 and groups > 1:
        if not config.get("ping_pong", False) and tile_n != 128:
            return True
    consumer = _registers(problem, config)[1]
    overhead = NARROW_OVERHEAD_REGISTERS if consumer <= 104 else OVERHEAD_REGISTERS
    overhead += WINDOW_REGISTERS if problem.is_windowed and buffers > 1 else 0
    if (operand := problem.mask_operand) is not None:
        overhead += tile_n * DTYPE_BYTES[operand.dtype] // 8 + MASK_REGISTERS
    overhead += BLOCK_MASK_REGISTERS if problem.block_mask else 0
    accumulators = buffers * tile_n // 2 + width * tile_n // 8 + head_dim // 2
    accumulators += width * head_dim // 8 if keeps_q else 0
    return bool(accumulators + overhead > consumer)


def _registers(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Registers of a producer's and of a consumer's thread."""
    table = PAGED_REGISTERS if problem.is_paged or problem.block_mask else REGISTERS
    if config.get("gathers"):
        table = GATHERING_REGISTERS
    return table[config["warp_groups"], config["blocks_per_sm"]]


def _box_rows(page_size: int, tile_n: int) -> int:
    """Rows of a page that one copy brings: few kernels serve pages of every size."""
    return next(rows for rows in BOXES if page_size % rows == tile_n % rows == 0)


def _narrowed(problem: AttentionProblem, config: Config) -> Config:
    """The config with the widest tiles, at most its own, at which nothing spills."""
    step = 32 // DTYPE_BYTES[problem.dtype]
    widths = range(int(config["tile_n"]), 0, -step)
    tried = (Config(config.family, {**config.params, "tile_n": width}) for width in widths)
    return next((one for one in tried if not _spills(problem, one)), config)


def _mask_variables(problem: AttentionProblem) -> Mapping[str, Value]:
    """Compiled-in part of a mask operand: its presence and kind."""
    kind = "additive" if problem.bias else "bool"
    return {"mask_operand": kind} if problem.mask_operand else {}


def arguments_of(problem: AttentionProblem) -> Arguments:
    """Declaration of a launch's arguments."""
    names = [matrix.name for matrix in problem.matrices]
    others = [one.name for one in problem.operands if one.name not in names]
    rows: tuple[str, ...] = ()
    if problem.is_paged:
        rows = ("total_q", "page_size", "pages", "table_stride")
    elif problem.is_varlen:
        rows = ("total_q", "total_kv")
    return Arguments(
        tensors=(*names, LSE, *map(_argument, others)),
        integers=(
            *EXTENTS,
            *stride_names(*names),
            *("splits", "pdl", "clustered"),
            *(WINDOW if problem.is_windowed else ()),
            *rows,
            *(MASK_STRIDES if problem.mask_operand else ()),
            *(("blocks_batch", "blocks_head", "block_columns") if problem.block_mask else ()),
        ),
        scalars=("scale", "softcap") if problem.softcap else ("scale",),
    )


def _argument(operand: str) -> str:
    """The kernel's name of an operand: a bias and a boolean mask are one argument."""
    return "mask" if operand == "bias" else operand


def _mask_strides(problem: AttentionProblem, operand: Operand, own: Strides) -> tuple[int, ...]:
    """Strides of a mask operand over batch, heads, queries and keys, 0 along axes that it has
    not.
    """
    strides = own.get(operand.name, (*problem.mask_strides, 1))
    return tuple(
        0 if size == 1 else stride for size, stride in zip(operand.shape, strides, strict=True)
    )


def _tile_m(params: Mapping[str, Value]) -> int:
    """Rows of Q a block works on at once."""
    return 64 * int(params["warp_groups"]) // int(params.get("key_groups", 1))


def _packings(problem: AttentionProblem) -> tuple[tuple[int, bool], ...]:
    """Choices of `packed_heads` and `pads_heads`: 1, the most that divide the heads, or with
    padding the next power of two.
    """
    group = problem.heads_q // problem.heads_kv
    most = math.gcd(group, MAX_PACKED_E4M3 if problem.dtype == E4M3 else MAX_PACKED)
    padded = 1 << (group - 1).bit_length()
    found = [(1, False)]
    if most > 1:
        found.append((most, False))
    if most < group <= MAX_PACKED and _may_pad(problem):
        found.append((padded, True))
    return tuple(found)


def _may_pad(problem: AttentionProblem) -> bool:
    """True if rows of heads that a KV head lacks may be computed."""
    has_heads_own = problem.dtype == E4M3 or problem.has_sinks or problem.mask_operand is not None
    return not (has_heads_own or problem.block_mask)


def _packs(problem: AttentionProblem, packed: int, pads: bool) -> int:
    """Packs of query heads of all sequences."""
    return problem.batch * (problem.heads_kv if pads else problem.heads_q // packed)


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


def _attention(problem: Problem) -> AttentionProblem:
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"expected an attention problem, got {problem.op}")
    return problem
