"""Attention through the Hopper FMHA collectives of CUTLASS 4.2 (examples/88_hopper_fmha).

The template instantiates them. The rules here come from their sources (named by file below) or from
compiling. Every warp group computes whole rows: scores S = Q K^T in registers, their softmax P in
place, O += P V. K and V tiles alternate in one pipeline of `kv_stages` slots.

KernelTma is one warp group that also issues its loads; Cooperative and Pingpong have a warp group
that only loads and 2 to 4 that compute. Pingpong is Cooperative with a persistent scheduler and a
warp that loads Q, so Cooperative is never given both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import ClassVar

from tuner.config import Config, Value
from tuner.families.arguments import EXTENTS, Arguments, extents_of, named_strides, stride_names
from tuner.families.base import Domain, Family, KernelSpec, Launch, Ref
from tuner.families.cutlass_fmha import cost as cutlass_fmha_cost
from tuner.families.cutlass_fmha.shape import (
    COOPERATIVE,
    DESCENDING,
    EXTENDED_TILES_N,
    INDIVIDUAL,
    ORDERS,
    PERSISTENT,
    PINGPONG,
    SCHEDULERS,
    SCHEDULES,
    TMA,
    FmhaShape,
    fields,
)
from tuner.hardware import HOPPER, SMEM_PER_BLOCK_BYTES, Gpu
from tuner.problem import DTYPE_BYTES, MAX_EXTENT, AttentionProblem, Problem, as_attention

KERNEL = "attention"
MATRICES = ("query", "key", "value", "out")
ARGUMENTS = Arguments(MATRICES, (*EXTENTS, *stride_names(*MATRICES), "sm_count"), ("scale",))
#: Text that the template takes, by variable.
WORDS = {"dtype": ("float16", "bfloat16"), "kernel_schedule": SCHEDULES}
#: Extents of the grid's y and z dimensions, where the upstream scheduler puts batch and heads
#: [CUDA C++ Programming Guide 13.0, "Compute Capabilities"; fmha_tile_scheduler.hpp].
MAX_GRID_YZ = 65535
#: Consumer warp groups: one needs setmaxnreg 488 (MmaRegisterRequirement of
#: fmha_kernel_tma_warpspecialized.hpp; the limit is 256, PTX ISA), and WarpGroupRole names four.
WARP_GROUPS = (2, 3, 4)
#: Registers that one WGMMA needs beside the N / 2 of its fp32 accumulators, its A operand in
#: shared memory (Q K^T) or in registers (P V): ptxas 13.0 refuses to compile below (C7602; found
#: with inline assembly for N = 64 to 256).
WGMMA_REGISTERS_SS = 26
WGMMA_REGISTERS_RS = 30
#: Registers a thread needs beside S, O and P. Compiled with nvcc 13.0: with 240 registers S + O + P
#: = 196 is clean, 224 spills or has its WGMMAs serialised (C7511), 256 spills. Slow, not wrong: it
#: thins the space and makes nothing illegal.
OTHER_REGISTERS = 26
#: Keys computed for nothing at the end of a row, as a share: more is not worth measuring.
MAX_WASTE = 0.1
#: A tile that should take this many times the best one's time is not worth measuring...
MAX_SLOWDOWN = 1.4
#: ...unless fewer than this many tiles are left.
MIN_TILES = 40


class CutlassFmha(Family):
    """One kernel a call; GQA without dense batch and head modes takes one call a batch."""

    name: ClassVar[str] = "cutlass_fmha"
    op: ClassVar[str] = "attention"
    capabilities = (HOPPER,)
    takes_extras = False
    #: Its best kernels took 1.11 to 1.21 times the fused kernel's best in the three recordings that
    #: have both (chained, one H200), and 32 to 78 CPU-seconds of nvcc each.
    is_fallback = True
    cost_constants = cutlass_fmha_cost.CONSTANTS
    domains: ClassVar[Mapping[str, Domain]] = {
        "kernel_schedule": SCHEDULES,
        "tile_m": (64, 128, 192, 256),
        # K of one P V instruction, 16; N of one Q K^T instruction, up to 256. Two of the latter
        # would interleave P's columns (convert_c_layout_to_a_layout of fmha_common.hpp), hence the
        # extended template for widths that CuTe would otherwise build from several.
        "tile_n": (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256),
        "warp_groups": (1, 2, 3, 4),
        "kv_stages": (1, 2, 3, 4, 5, 6, 8),
        "q_stages": (1, 2, 3, 4, 6, 8),
        # 64 x 64 x 64 compiles with the 72 registers of 7 blocks and not with the 64 of 8 (C7600).
        "blocks_per_sm": (1, 2, 3, 4, 6),
        "tile_scheduler": SCHEDULERS,
        "loads_q_separately": (False, True),
        "is_mainloop_locked": (False, True),
        "tile_order": ORDERS,
    }
    optional = frozenset(domains) - {"kernel_schedule", "tile_m", "tile_n", "kv_stages"}

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, AttentionProblem):
            return reason
        # Strides are 32-bit in the collectives (cute::tuple<int, _1, tuple<int, int>>), and so is
        # the offset into the log-sum-exp.
        if any(stride > MAX_EXTENT for o in problem.operands for stride in o.strides):
            return "a stride exceeds 2^31 - 1 elements, which the collectives cannot hold"
        if problem.batch * problem.heads_q * problem.seqlen_q > MAX_EXTENT:
            return "more than 2^31 - 1 rows of output"
        return ""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem = as_attention(problem)
        if found := _presence_violations(problem, config):
            return found
        shape = FmhaShape.of(problem, config)
        found = _tile_violations(shape) + _ring_violations(problem, shape)
        found += _register_violations(shape)
        if not found and shape.smem_bytes > SMEM_PER_BLOCK_BYTES:
            found.append(f"{shape.smem_bytes} bytes of shared memory exceed {SMEM_PER_BLOCK_BYTES}")
        outer = _outer_modes(problem)
        if shape.is_grid_3d and max(outer) > MAX_GRID_YZ:
            found.append(f"{max(outer)} batches or heads exceed a grid's {MAX_GRID_YZ}")
        return found

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        if self.supports(problem, gpu) or not isinstance(problem, AttentionProblem):
            return []
        tiles = [c for c in _tiles(problem) if self._is_sensible(problem, c, gpu)]
        if not tiles:
            return []
        cost = {c: self.predict_us(problem, c, gpu) for c in tiles}
        ranked = sorted(tiles, key=lambda c: (cost[c], c.digest))
        limit = max(MAX_SLOWDOWN * cost[ranked[0]], cost[ranked[:MIN_TILES][-1]])
        chosen = {c: None for c in tiles if cost[c] <= limit}
        specialised: dict[tuple[Value, ...], Config] = {}
        for config in ranked:
            if config["kernel_schedule"] == COOPERATIVE:
                specialised.setdefault((config["tile_m"], config["tile_n"]), config)
        for config in list(specialised.values())[:LEVERED_TILES]:
            levers = [c for c in _levers(config) if self._is_sensible(problem, c, gpu)]
            chosen |= dict.fromkeys(levers)
        return list(chosen)

    def seeds(
        self, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int
    ) -> list[Config]:
        """As `Family.seeds`, with one config of each tile and schedule before a second one."""
        ranked = super().seeds(problem, gpu, space, len(space))
        tiles = ("kernel_schedule", "tile_m", "tile_n", "warp_groups")
        first: dict[tuple[Value, ...], Config] = {}
        for config in ranked:
            first.setdefault(tuple(config.get(name, 0) for name in tiles), config)
        chosen = dict.fromkeys(first.values()) | dict.fromkeys(ranked)
        return list(chosen)[:count]

    def _is_sensible(self, problem: AttentionProblem, config: Config, gpu: Gpu) -> bool:
        return not self.violations(problem, config, gpu) and not _is_poor(problem, config)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problem = as_attention(problem)
        shape = FmhaShape.of(problem, config)
        is_pingpong = shape.schedule == PINGPONG
        variables: dict[str, Value] = {
            "dtype": problem.dtype,
            "tile_m": shape.tile_m,
            "tile_n": shape.tile_n,
            "head_tile": shape.head_tile,
            "kernel_schedule": shape.schedule,
            "warp_groups": shape.warp_groups,
            "kv_stages": shape.kv_stages,
            "q_stages": shape.q_stages,
            "blocks_per_sm": shape.blocks_per_sm,
            "is_persistent": shape.is_persistent,
            "loads_q_separately": is_pingpong or config.get("loads_q_separately", False),
            "is_mainloop_locked": config.get("is_mainloop_locked", False),
            "is_epilogue_apart": shape.is_epilogue_apart,
            "is_descending": config.get("tile_order") == DESCENDING,
            "is_causal": problem.is_causal,
            # Right for every SKV; left out where no tile is cut, which saves its comparisons.
            "is_residual": problem.seqlen_kv % shape.tile_n != 0,
        }
        extended = "_extended" if shape.tile_n in EXTENDED_TILES_N else ""
        return {KERNEL: KernelSpec(f"cutlass_fmha{extended}.cu.j2", variables, WORDS, ARGUMENTS)}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        problem = as_attention(problem)
        operands = problem.operands
        calls = 1 if _nests(problem) else problem.batch
        integers = {
            **extents_of(problem),
            "batch": problem.batch // calls,
            **named_strides({o.name: o.strides for o in operands}),
            "sm_count": 0,
        }
        width = DTYPE_BYTES[problem.dtype]
        return [
            Launch.named(
                KERNEL,
                ARGUMENTS,
                {o.name: Ref(o.name, call * o.strides[0] * width) for o in operands},
                integers,
                {"scale": scale},
            )
            for call in range(calls)
        ]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        problem = as_attention(problem)
        calls = 1 if _nests(problem) else problem.batch
        return cutlass_fmha_cost.predict_us(
            problem, FmhaShape.of(problem, config), gpu, self.constants, calls
        )

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """As `Family.draw`, with exactly the fields of the drawn schedule."""
        drawn = super().draw(problem, gpu, members, rng)
        expected = fields(
            drawn.get("kernel_schedule"),
            drawn.get("tile_scheduler", INDIVIDUAL),
            as_attention(problem),
        )
        params = {n: v for n, v in drawn.params.items() if n in expected}
        for name in sorted(expected - set(params)):
            params[name] = (
                INDIVIDUAL if name == "tile_scheduler" else rng.choice(self.domains[name])
            )
        return Config(self.name, params)


def _nests(problem: AttentionProblem) -> bool:
    """True when one call serves every batch.

    The collectives iterate two outer modes with one coordinate for all tensors. Without groups
    they are batch and head. With groups they are (heads of a group, batch x key head): the group
    shares a key head by a stride of 0, and batch and head are one mode where the batch stride is
    heads times the head stride, as in (B, H, S, D).
    """
    is_grouped = problem.heads_q != problem.heads_kv
    return not is_grouped or 1 in (problem.batch, problem.heads_kv) or problem.layout == "bhsd"


def _outer_modes(problem: AttentionProblem) -> tuple[int, int]:
    if problem.heads_q == problem.heads_kv:
        return problem.batch, problem.heads_q
    batch = problem.batch if _nests(problem) else 1
    return problem.heads_q // problem.heads_kv, batch * problem.heads_kv


def _presence_violations(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations: parameters that are present and do not apply, or that apply and are absent."""
    expected = fields(config["kernel_schedule"], config.get("tile_scheduler"), problem)
    present = config.params.keys()
    if present == expected:
        return []
    return [
        *(f"parameter '{name}' does not apply" for name in sorted(present - expected)),
        *(f"parameter '{name}' is missing" for name in sorted(expected - present)),
    ]


def _tile_violations(shape: FmhaShape) -> list[str]:
    found = []
    if shape.schedule == TMA:
        if shape.tile_m != 64:
            # Its P V loop takes one 64-row WGMMA (static_assert of fmha_collective_tma.hpp).
            found.append(f"KernelTma computes 64 rows, not tile_m={shape.tile_m}")
    elif shape.warp_groups not in WARP_GROUPS:
        found.append(f"warp_groups={shape.warp_groups} (allowed: 2, 3, 4)")
    elif shape.tile_m % (64 * shape.warp_groups):
        found.append(
            f"tile_m={shape.tile_m} is not a multiple of 64 x {shape.warp_groups} warp groups"
        )
    elif shape.tile_m // shape.warp_groups > 256:
        found.append(f"tile_m={shape.tile_m}: a TMA box holds 256 rows")
    return found


def _ring_violations(problem: AttentionProblem, shape: FmhaShape) -> list[str]:
    """Conditions on `kv_stages` and `q_stages`; tiles loaded are K0 V0 K1 V1 ..., one a slot."""
    stages, visits = shape.kv_stages, shape.max_visits(problem)
    found = []
    if shape.schedule == TMA:
        # fmha_collective_tma.hpp: the prologue fills all slots, then step i waits for K_i before
        # it issues its first load, of slot K_(i-1): K_i and V_i must have been loaded by step
        # i - 1, which is so from 3 slots on. The steps load K first, so a prologue that stopped
        # behind a K (an odd count) is followed by that K again instead of its V. Neither matters
        # where the prologue loads everything.
        if 2 * visits > stages and stages < 4:
            found.append(f"kv_stages={stages} hangs KernelTma where a block visits {visits} tiles")
        elif 2 * visits > stages and stages % 2:
            found.append(f"odd kv_stages={stages} repeats a K tile in KernelTma's ring")
        return found
    # fmha_collective_tma_warpspecialized.hpp: a block waits for V_i before it releases V_(i-1),
    # so V_i needs a third slot besides K_i's and V_(i-1)'s as soon as there is an i = 1.
    least = 2 if visits == 1 else 3
    if stages < least:
        found.append(f"kv_stages={stages} deadlocks, {least} are needed for {visits} tiles a block")
    if shape.q_stages < shape.warp_groups:
        # static_assert(StagesQ::value >= NumMmaWarpGroups), same file.
        found.append(f"q_stages={shape.q_stages} is less than one a warp group")
    return found


def _register_violations(shape: FmhaShape) -> list[str]:
    """Violations by registers: only configs that ptxas refuses. Spills are slow and legal."""
    limit = shape.launch_registers
    needed = {
        "Q K^T": shape.tile_n // 2 + WGMMA_REGISTERS_SS,
        "P V": shape.head_tile // 2 + WGMMA_REGISTERS_RS,
    }
    found = [
        f"one {name} instruction needs {registers} registers, a thread has {limit}"
        for name, registers in needed.items()
        if registers > limit
    ]
    # C7600, "register allocation failed". Of 13 kernels compiled near the limit, where S and O need
    # 64 to 192 registers, exactly those failed whose two fragments are of one width and do not fit
    # together (192 in 160, 128 in 112, 128 in 96), and one with 64 in 64. Of two widths, 160 in 128
    # and 184 in 160 compile, with spills; so do two instructions a fragment (256 in 240).
    both = (shape.tile_n + shape.head_tile) // 2
    is_alike = shape.tile_n == shape.head_tile and shape.group_rows == 64
    if is_alike and both > shape.consumer_registers:
        found.append(f"S and O need {both} registers, a thread has {shape.consumer_registers}")
    return found


#: How many of the most promising Cooperative tiles get every further lever.
LEVERED_TILES = 3
_TILES_M = ((128, 2), (192, 3), (256, 4), (256, 2))
_TILES_N = (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 256)


def _tiles(problem: AttentionProblem) -> Iterator[Config]:
    """Every tile with the plain choices of each schedule."""
    order: dict[str, Value] = {"tile_order": ORDERS[-1]} if problem.is_causal else {}
    for tile_n, stages, blocks in product(_TILES_N, (2, 4, 6), (1, 2, 3, 4)):
        yield _config(TMA, tile_m=64, tile_n=tile_n, kv_stages=stages, blocks_per_sm=blocks)
    for (tile_m, groups), tile_n, stages in product(_TILES_M, _TILES_N, (2, 3, 4, 5, 6)):
        ring: dict[str, Value] = {
            "tile_m": tile_m,
            "tile_n": tile_n,
            "warp_groups": groups,
            "kv_stages": stages,
            "is_mainloop_locked": False,
            **order,
        }
        yield _config(COOPERATIVE, **ring, tile_scheduler=INDIVIDUAL, loads_q_separately=False)
        yield _config(PINGPONG, **ring, q_stages=groups)


def _levers(config: Config) -> Iterator[Config]:
    """Variants of a Cooperative tile: its other schedulers, lock, order and Q buffers."""
    groups = config["warp_groups"]
    common = {name: config[name] for name in ("tile_m", "tile_n", "warp_groups", "kv_stages")}
    orders = ORDERS if "tile_order" in config.params else (None,)
    for is_locked, order in product((False, True), orders):
        ring = {**common, "is_mainloop_locked": is_locked}
        if order is not None:
            ring["tile_order"] = order
        for separately in (False, True):
            yield _config(
                COOPERATIVE, **ring, tile_scheduler=INDIVIDUAL, loads_q_separately=separately
            )
        for q_stages in (groups, 2 * groups):
            yield _config(COOPERATIVE, **ring, tile_scheduler=PERSISTENT, q_stages=q_stages)
            yield _config(PINGPONG, **ring, q_stages=q_stages)


def _config(schedule: str, **params: Value) -> Config:
    return Config(CutlassFmha.name, {"kernel_schedule": schedule, **params})


def _is_poor(problem: AttentionProblem, config: Config) -> bool:
    """True for legal configs that cannot win: spills, much padding, unused slots or blocks."""
    shape = FmhaShape.of(problem, config)
    visits = shape.max_visits(problem)
    columns = -(-problem.seqlen_kv // shape.tile_n) * shape.tile_n
    is_padded = columns > (1 + MAX_WASTE) * problem.seqlen_kv and visits > 1
    # A single tile is all padding where the keys are few; the narrowest that holds them is best.
    is_oversized = visits == 1 and columns - problem.seqlen_kv >= 64
    is_idle = shape.tile_m > max(128, -(-problem.seqlen_q // 64) * 64)
    is_crowded = shape.schedule == TMA and shape.blocks_per_sm != shape.resident_blocks
    poor = (shape.spills(OTHER_REGISTERS), is_padded, is_oversized, is_idle, is_crowded)
    return any(poor) or shape.kv_stages not in _useful_stages(shape, visits)


def _useful_stages(shape: FmhaShape, visits: int) -> tuple[int, ...]:
    """4 slots hide the loads and 6 a slow one (measured: 3 take 16.4 us where 4 take 13.5); odd
    counts only where the next even one does not fit, and none beyond what a block loads.
    """
    if visits == 1:
        return (2,)
    fitting = [
        s for s in (3, 4, 5, 6) if replace(shape, kv_stages=s).smem_bytes <= SMEM_PER_BLOCK_BYTES
    ]
    useful = {4, 6} if 6 in fitting else {4, 5} & set(fitting) or {3}
    if shape.schedule == TMA:
        useful = {4, 6}
    return tuple(s for s in useful if s <= max(4, 2 * visits))
