"""Fused attention, backward: `templates/fused_attention_backward.cu.j2`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import ClassVar

from tuner.config import Config, Value
from tuner.families.arguments import (
    EXTENTS,
    WINDOW,
    Arguments,
    extents_of,
    named_strides,
    stride_names,
)
from tuner.families.attention_instances import INSTANCES, instance
from tuner.families.base import (
    Domain,
    Family,
    KernelSpec,
    Launch,
    Ref,
    Strides,
    posed,
)
from tuner.families.tma import tma_conflict
from tuner.hardware import (
    DEFAULT_GPU,
    GRAPH_LAUNCH_US,
    HOPPER,
    SMEM_PER_BLOCK_BYTES,
    Gpu,
)
from tuner.problem import MAX_EXTENT, AttentionBackwardProblem, Operand, Problem
from tuner.problem.attention_backward import STARTS

KERNEL = "attention_backward"
"""Name of the only kernel; its library launches all three."""
TEMPLATE = "fused_attention_backward.cu.j2"
#: Text that the template takes, by variable.
WORDS = {
    "dtype": ("float16", "bfloat16"),
    "dq": ("bulk", "ordered", "direct"),
}
#: Columns above which two warp groups share 64 keys, whose dK fills the registers of one and whose
#: dV those of the other.
MAX_COLUMNS = 128
#: (producer, consumer) registers after setmaxnreg, by warp groups: multiples of 8 (PTX ISA,
#: setmaxnreg) whose sum over a block's threads stays within what the block gets at its launch.
REGISTERS: Mapping[int, tuple[int, int]] = {1: (56, 240), 2: (24, 240)}
#: Registers a consumer thread needs beside its accumulators and operands. Found by compiling with
#: nvcc 13.0: 208 of 240 spill some words, and more serialise the products.
OVERHEAD_REGISTERS = 32
#: Keys of a warp group.
GROUP_KEYS = 64
#: Multiprocessors that a GPU needs where the blocks of a chunk wait for each other: twice the most
#: blocks of one (`kChunk` of the template).
CHUNK_MULTIPROCESSORS = 64
#: Rows of packed tensors, arguments of a launch.
_TOTALS = ("total_q", "total_kv")
#: KV heads whose blocks run side by side, at most.
MAX_HEADS = 1024

#: What only measurements say of a time: where a fit starts.
CONSTANTS: Mapping[str, float] = {
    # Share of the tensor cores' peak that a long loop of steps reaches.
    "rate": 0.6,
    # The same at D = 64, whose exponentials take longer beside its products.
    "narrow_rate": 0.52,
    # Clocks of a block beside its steps: first loads, last stores.
    "block_clocks": 6000.0,
    # Microseconds of the kernels before and after, beside their bytes.
    "rows_us": 3.0,
    # Share by which each step grows where dQ is added in order.
    "ordered": 0.15,
}


def sharing_groups(head_dim: int) -> int:
    """Warp groups that share 64 keys."""
    return 2 if instance(head_dim) > MAX_COLUMNS else 1


class FusedAttentionBackward(Family):
    """Three kernels a call: row sums of dO * O, a block for each tile of keys, and the conversion
    of dQ's fp32 sums.
    """

    name: ClassVar[str] = "fused_attention_backward"
    op: ClassVar[str] = AttentionBackwardProblem.op
    fit = "backward", "fused_attention_backward.fit"
    proof_draws: ClassVar[str] = "fused_attention_backward.draws:BackwardDraw"
    capabilities = (HOPPER,)
    cost_constants = CONSTANTS
    runtime_parameters = frozenset({"section_heads", "pdl"})
    domains: ClassVar[Mapping[str, Domain]] = {
        "warp_groups": (1, 2),
        "tile_m": (64, 96, 128),
        "stages": (1, 2, 3),
        "ds_stages": (1, 2),
        "swap_dq": (False, True),
        "dq": WORDS["dq"],
        "late_dq": (False, True),
        "early_exp": (0, 50, 100),
        "v_registers": (0, 50, 100),
        "transpose_ds": (False, True),
        "rotate": (False, True),
        "persistent": (False, True),
        "section_heads": tuple(2**i for i in range(MAX_HEADS.bit_length())),
        "pdl": (False, True),
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, AttentionBackwardProblem):
            return reason
        if problem.head_dim > INSTANCES[-1]:
            return f"{self.name} has no head dimension above {INSTANCES[-1]}"
        return ""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem, reasons = _backward(problem), []
        head_dim, sharing = instance(problem.head_dim), sharing_groups(problem.head_dim)
        groups, tile_m, swaps = config["warp_groups"], config["tile_m"], config["swap_dq"]
        if groups % sharing:
            return [f"warp_groups={groups} do not share keys in {sharing}s"]
        is_plain = not (config["late_dq"] or config["early_exp"])
        if sharing > 1 and not (is_plain and config["v_registers"] == 0):
            reasons.append("late_dq, early_exp and v_registers are not for groups that share keys")
        elif head_dim == 96 and config["v_registers"] == 50:
            reasons.append("v_registers=50 of 96 columns is not a whole number of swizzle atoms")
        if problem.softcap and config["early_exp"]:
            reasons.append("early_exp is 0 under a soft cap, whose derivatives make P")
        if problem.is_varlen and config["rotate"]:
            reasons.append("rotate=true has no variable lengths")
        if config["stages"] == 1 and config["late_dq"]:
            reasons.append("stages=1 has no late_dq: the next queries come when these are free")
        if problem.is_deterministic and config["dq"] != "ordered":
            reasons.append(f"dq={config['dq']} adds in any order: deterministic=1 needs ordered")
        if config["rotate"] and config["dq"] == "ordered":
            if problem.is_causal or problem.is_windowed:
                reasons.append("rotate=true orders the sums of full masks only")
            if gpu.sm_count < CHUNK_MULTIPROCESSORS:
                reasons.append(
                    f"rotate=true in order needs {CHUNK_MULTIPROCESSORS} multiprocessors"
                )
        if config["persistent"] and config["rotate"]:
            reasons.append("persistent=true has no rotate: blocks of a chunk must run at once")
        rows, columns = (head_dim, tile_m) if swaps else (tile_m, head_dim)
        side = "head dimension" if swaps else "tile_m"
        slabs = rows // 64
        if rows % 64:
            reasons.append(f"{side}={rows} is not a multiple of 64, the rows of a product for dQ")
        elif groups % slabs:
            reasons.append(f"{slabs} slabs of dQ do not divide warp_groups={groups}")
        elif columns % (groups // slabs * 16):
            reasons.append(f"{groups // slabs} groups do not share {columns} columns of dQ in 16s")
        else:
            needed = self.registers(problem, config) + OVERHEAD_REGISTERS
            if needed > REGISTERS[groups][1]:
                reasons.append(f"{needed} registers a thread exceed {REGISTERS[groups][1]}")
        smem = self.smem_bytes(problem, config)
        if smem > SMEM_PER_BLOCK_BYTES:
            reasons.append(f"{smem} bytes of shared memory exceed {SMEM_PER_BLOCK_BYTES}")
        tiles = -(-problem.seqlen_q // tile_m) * problem.batch * problem.heads_q
        if tiles > MAX_EXTENT:
            reasons.append(f"{tiles} tiles of queries exceed {MAX_EXTENT}")
        return reasons

    @staticmethod
    def registers(problem: AttentionBackwardProblem, config: Config) -> int:
        """Most accumulators and operands of products that a thread holds at once.

        It holds dK and dV, and V's columns that stay in registers, with S^T and dP^T, or with
        P^T and dS^T as operands and dQ. Groups that share keys have one of dK and dV each, and dQ
        beside an operand.
        """
        head_dim, tile_m = instance(problem.head_dim), int(config["tile_m"])
        of_dq = tile_m * head_dim // int(config["warp_groups"]) // 128
        if sharing_groups(problem.head_dim) > 1:
            return head_dim // 2 + max(tile_m // 2 + tile_m // 4, of_dq + tile_m // 4)
        kept_v = int(config["v_registers"]) * head_dim // 400
        return head_dim + kept_v + max(tile_m, of_dq + tile_m // 2)

    @staticmethod
    def smem_bytes(problem: AttentionBackwardProblem, config: Config) -> int:
        """Dynamic shared memory, bytes: `Storage` of the template, whose text holds the number.

        It holds K and V, the pipeline buffers of Q and dO with their rows' statistics, dS, and dQ
        on its way to memory. Groups that share keys also need P. Parts are multiples of 1024
        bytes; behind them come statistics, in multiples of 128 bytes, and mbarriers.
        """
        head_dim, tile_m = instance(problem.head_dim), int(config["tile_m"])
        sharing = sharing_groups(problem.head_dim)
        groups, stages = int(config["warp_groups"]), int(config["stages"])
        keys, ds_stages = GROUP_KEYS * groups // sharing, int(config["ds_stages"])
        parts = 2 * 2 * keys * head_dim + stages * 2 * 2 * tile_m * head_dim
        parts += ds_stages * 2 * tile_m * keys
        is_direct, is_shared = config["dq"] == "direct", sharing > 1
        parts += 4 * tile_m * keys if is_shared else 0
        parts += (1024 if is_shared else 0) if is_direct else 4 * tile_m * head_dim
        bar = 128 * (int(is_direct) + 1) if not is_shared else 0
        bar += sum(_rounded_up(4 * stages * rows, 128) for rows in (tile_m + 4, tile_m))
        adders = 2 if config["dq"] == "ordered" else 1
        bar += 8 * (4 + 4 * stages + 2 * ds_stages + (adders + 1) * groups)
        return parts + _rounded_up(bar, 1024)

    def _groups(self, problem: AttentionBackwardProblem, gpu: Gpu) -> Iterator[list[Config]]:
        """Candidates that can win. One warp group only for few keys; the transposed product for dQ
        only where the other one has no slabs; dQ in order only for deterministic problems.
        """
        heads = min(MAX_HEADS, problem.batch * problem.heads_kv)
        sections = sorted({1, 8, 32, 1 << (heads - 1).bit_length()})
        most = 1 << (heads - 1).bit_length()
        ways = ("ordered",) if problem.is_deterministic else ("bulk", "direct")
        sharing = sharing_groups(problem.head_dim)
        rings = (2, 3) if sharing == 1 else (2, 1)
        in_v = (0, 50, 100) if sharing == 1 else (0,)
        orders: tuple[Sequence[Value], ...] = ((False, True), (0, 50, 100), in_v)
        if sharing > 1:
            orders = ((False,), (0,), in_v)
        every = product(*orders)
        levers = product((1, 2), (64, 96, 128), rings, (2, 1), (False, True), ways, every)
        for (groups, tile_m, stages, ds_stages, swaps, way, order), rotates, stays in product(
            levers, (False, True), (False, True)
        ):
            if GROUP_KEYS * (groups - sharing) >= problem.seqlen_kv or swaps != bool(tile_m % 64):
                continue
            for section, pdl in product([s for s in sections if s <= most], (True, False)):
                params: dict[str, Value] = {
                    **{"warp_groups": groups, "tile_m": tile_m},
                    **{"stages": stages, "ds_stages": ds_stages, "swap_dq": swaps, "dq": way},
                    **dict(zip(("late_dq", "early_exp", "v_registers"), order, strict=True)),
                    **{"transpose_ds": sharing == 1, "rotate": rotates, "persistent": stays},
                    **{"section_heads": section, "pdl": pdl},
                }
                yield [Config(self.name, params)]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problem = _backward(problem)
        producer, consumer = REGISTERS[config["warp_groups"]]
        apart = {*self.runtime_parameters, "persistent"}
        compiled = {k: v for k, v in config.params.items() if k not in apart}
        variables = {
            **compiled,
            "dtype": problem.dtype,
            "head_dim": instance(problem.head_dim),
            "is_causal": problem.is_causal,
            "is_windowed": problem.is_windowed,
            "smem_bytes": self.smem_bytes(problem, config),
            "producer_registers": producer,
            "consumer_registers": consumer,
            # Absent where they are off, so that other kernels keep their keys.
            **({"persistent": True} if config["persistent"] else {}),
            **({"has_softcap": True} if problem.softcap else {}),
            **({"is_varlen": True} if problem.is_varlen else {}),
        }
        return {KERNEL: KernelSpec(TEMPLATE, variables, WORDS, arguments_of(problem))}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        return self._launches(_backward(problem), config, scale, {})

    def strided_launches(
        self, problem: Problem, config: Config, scale: float, strides: Strides
    ) -> list[Launch] | str:
        backward = _backward(problem)
        for tensor in _matrices(backward):
            if reason := tma_conflict(tensor, strides.get(tensor.name, tensor.strides)):
                return reason
        if "logsumexp" in strides:
            return "logsumexp is not contiguous"
        return self._launches(backward, config, scale, strides)

    def _launches(
        self, problem: AttentionBackwardProblem, config: Config, scale: float, own: Strides
    ) -> list[Launch]:
        integers = {
            **extents_of(problem),
            **named_strides({m.name: own.get(m.name, m.strides) for m in _matrices(problem)}),
            **{"pdl": int(config["pdl"]), "section_heads": int(config["section_heads"])},
        }
        if problem.is_windowed:
            integers |= zip(WINDOW, problem.visible, strict=True)
        if problem.is_varlen:
            integers |= {name: getattr(problem.forward, name) for name in _TOTALS}
        tensors = {operand.name: Ref(operand.name) for operand in problem.operands}
        arguments = arguments_of(problem)
        scalars = {"scale": scale, **({"softcap": problem.softcap} if problem.softcap else {})}
        return [Launch.named(KERNEL, arguments, tensors, integers, scalars)]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        problem, constants = _backward(problem), self.constants
        problem = AttentionBackwardProblem.of(problem.forward.evened, problem.is_deterministic)
        head_dim, tile_m = instance(problem.head_dim), int(config["tile_m"])
        keys = GROUP_KEYS * int(config["warp_groups"]) // sharing_groups(problem.head_dim)
        rate = constants["narrow_rate" if head_dim <= 64 else "rate"]
        # A SM's share of the peak, and what the exponentials take where they exceed the products.
        clock_mhz = gpu.peak_tflops / DEFAULT_GPU.peak_tflops * 1755.0
        flops_per_us = gpu.peak_tflops * 1e6 / gpu.sm_count
        step_us = 10 * tile_m * keys * head_dim / flops_per_us / rate
        if config["dq"] == "ordered":
            step_us *= 1 + constants["ordered"]
        blocks = -(-problem.seqlen_kv // keys) * problem.batch * problem.heads_kv
        density = problem.forward.pairs / (problem.seqlen_q * problem.seqlen_kv)
        rows = -(-problem.seqlen_q // tile_m)
        steps = max(1.0, rows * density + 0.5) * problem.heads_q / problem.heads_kv
        waves = max(1.0, blocks / gpu.sm_count)
        block_us = constants["block_clocks"] / clock_mhz + steps * step_us
        moved = 12 * problem.batch * problem.heads_q * problem.seqlen_q * head_dim
        around_us = constants["rows_us"] + moved / gpu.memory_gbs / 1e3
        return float(GRAPH_LAUNCH_US + around_us + waves * block_us)


def arguments_of(problem: AttentionBackwardProblem) -> Arguments:
    """Declaration of a launch's arguments."""
    return Arguments(
        tensors=tuple(operand.name for operand in problem.operands),
        integers=(
            *EXTENTS,
            *stride_names(*(matrix.name for matrix in _matrices(problem))),
            *("pdl", "section_heads"),
            *(WINDOW if problem.is_windowed else ()),
            *(_TOTALS if problem.is_varlen else ()),
        ),
        scalars=("scale", "softcap") if problem.softcap else ("scale",),
    )


def _rounded_up(count: int, unit: int) -> int:
    """The least multiple of a unit that is not below a count."""
    return -(-count // unit) * unit


def _matrices(problem: AttentionBackwardProblem) -> list[Operand]:
    """Operands whose strides are launch arguments, in order."""
    return [o for o in problem.operands if o.name not in ("logsumexp", *STARTS)]


def _backward(problem: Problem) -> AttentionBackwardProblem:
    return posed(problem, AttentionBackwardProblem, FusedAttentionBackward.name)
