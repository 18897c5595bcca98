"""Fused attention, forward, in Triton (`templates/triton_attention.py.j2`).

For GPUs other than Hopper. On Hopper the fused kernel is faster, and this family takes part only
when it is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import ClassVar

from tuner.base import triton_release
from tuner.config import Config, Value
from tuner.families.arguments import Arguments, extents_of, named_strides, stride_names
from tuner.families.base import LSE, Domain, Family, KernelSpec, Launch, Ref
from tuner.families.chip_work import Work, attention_launch
from tuner.hardware import (
    EXP_PER_CLOCK_SM,
    REGISTERS_PER_SM,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    WARP,
    Gpu,
    capability_numbers,
    smem_per_block_bytes,
)
from tuner.problem import DTYPE_BYTES, MAX_EXTENT, AttentionProblem, Problem, as_attention

KERNEL = "attention"
MATRICES = ("query", "key", "value", "out")
EXTENTS = ("heads_q", "heads_kv", "seqlen_q", "seqlen_kv")
ARGUMENTS = Arguments(
    tensors=(*MATRICES, LSE),
    integers=("programs", *EXTENTS, *stride_names(*MATRICES)),
    scalars=("scale",),
)
#: Text that the template takes, by variable.
WORDS = {"dtype": ("float16", "bfloat16")}
#: Query heads that share a program's rows at most.
MAX_PACKED = 16
#: Fewest columns of an operand of Triton's `dot`: the K extent of one 16-bit MMA.
MIN_COLUMNS = 16
#: Registers that a thread's parts of the scores, the outputs and a tile of keys take, above which
#: nothing is tried. Compiled for 8.0 by Triton 3.6: 144 spill nothing, 176 spill 72 bytes, 224
#: spill 304, 352 spill 2936.
MAX_REGISTERS = 176
#: Registers beside these: addresses, statistics, loop state.
OTHER_REGISTERS = 64
#: Fewest and most rows worth trying, by the number of warps that share them.
ROWS_OF_WARPS = {2: (16, 32), 4: (16, 128), 8: (64, 128)}
#: Compute capabilities, from and up to, whose tensor cores read operands from shared memory
#: (WGMMA, tcgen05): there Triton holds a tile of K and V a stage, elsewhere one fewer.
FROM_SHARED = ((9, 0), (12, 0))
#: Rows of one WGMMA; programs of fewer use the older instructions.
WGMMA_ROWS = 64
#: Clock under load against the highest, as on one H200 at full load.
SUSTAINED_CLOCK = 0.89
#: Estimates that order the space, until recordings of this family are there to fit them to.
CONSTANTS: Mapping[str, float] = {
    # Launch, first loads and last stores, microseconds.
    "fixed_us": 4.0,
    # Share of the tensor cores' peak and of the memory's bandwidth that is reached.
    "tensor_share": 0.7,
    "memory_share": 0.8,
    # Clocks of a score beside product and exponential, of a step, and of a program.
    "score_clocks": 0.04,
    "step_clocks": 150.0,
    "program_clocks": 1000.0,
    # Clocks of a load that other stages and programs of the multiprocessor hide.
    "load_clocks": 600.0,
    # Bytes of keys and values that the L2 gives a multiprocessor a clock.
    "l2_bytes_per_clock": 50.0,
    # Part of the shorter of product and softmax that other programs cannot fill.
    "exposed": 0.6,
}


class TritonAttention(Family):
    """One kernel a call; every parameter is compiled in."""

    name = "triton_attention"
    op = "attention"
    kind = "fused"
    peer = "triton"
    takes_extras = False
    writes_lse = True
    is_fallback = True
    cost_constants = CONSTANTS
    domains: ClassVar[Mapping[str, Domain]] = {
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (16, 32, 64, 128, 256),
        "packed_heads": (1, 2, 4, 8, MAX_PACKED),
        "num_warps": (1, 2, 4, 8, 16),
        "num_stages": (1, 2, 3, 4, 6),
    }
    optional = frozenset({"packed_heads"})

    def lacks(self) -> str:
        missing = triton_release.lacks()
        return missing and f"{missing}: {triton_release.install()}"

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem = as_attention(problem)
        if reasons := _packing(problem, config) or _extents(problem, config):
            return reasons
        needed, most = (
            smem_bytes(problem, config, gpu),
            smem_per_block_bytes(gpu.compute_capability),
        )
        return [f"{needed} bytes of shared memory exceed {most}"] if needed > most else []

    def _groups(self, problem: AttentionProblem, gpu: Gpu) -> Iterator[list[Config]]:
        """Candidates that can win: programs of all rows, up to 128; fewer than 64 only for
        short queries and chips that would idle; no more accumulators than registers.
        """
        columns = padded(problem.head_dim)
        # Query heads of one KV head that share a program: all that can, where queries are few.
        most = math.gcd(problem.heads_q // problem.heads_kv, MAX_PACKED)
        packings = (1, most) if most > 1 and problem.seqlen_q < 128 else (1,)
        for packed, block_m, block_n, warps, stages in product(
            packings, (16, 32, 64, 128), (32, 64, 128), ROWS_OF_WARPS, (2, 3, 4)
        ):
            rows = problem.seqlen_q * packed
            heads = problem.batch * problem.heads_q // packed
            idle = math.ceil(rows / 64) * heads < gpu.sm_count
            if block_m > max(16, 1 << (rows - 1).bit_length()):
                continue
            if block_m < (32 if idle else 64) and block_m < rows:
                continue
            if _registers(block_m, block_n, columns, warps) > MAX_REGISTERS:
                continue
            if not ROWS_OF_WARPS[warps][0] <= block_m <= ROWS_OF_WARPS[warps][1]:
                continue
            params: dict[str, Value] = {"block_m": block_m, "block_n": block_n}
            params |= {"num_warps": warps, "num_stages": stages}
            if problem.heads_q > problem.heads_kv:
                params["packed_heads"] = packed
            yield [Config(self.name, params)]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        attention = as_attention(problem)
        variables = {
            "packed_heads": 1,
            **config.params,
            "dtype": attention.dtype,
            "head_dim": attention.head_dim,
            "is_causal": attention.is_causal,
        }
        return {KERNEL: KernelSpec("triton_attention.py.j2", variables, WORDS, ARGUMENTS)}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        attention = as_attention(problem)
        extents = extents_of(attention)
        integers = {
            "programs": programs(attention, config),
            **{name: extents[name] for name in EXTENTS},
            **named_strides({o.name: o.strides for o in attention.operands}),
        }
        tensors = {name: Ref(name) for name in ARGUMENTS.tensors}
        return [Launch.named(KERNEL, ARGUMENTS, tensors, integers, {"scale": scale})]

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        attention = as_attention(problem)
        work = attention_launch(
            attention,
            gpu,
            tile_m=config["block_m"],
            tile_n=config["block_n"],
            columns=padded(attention.head_dim),
            threads=WARP * config["num_warps"],
            smem=smem_bytes(attention, config, gpu),
            blocks_per_sm=blocks_per_sm(attention, config, gpu),
            packed=config.get("packed_heads", 1),
        )
        return (replace(work, wgmma=0),)  # which instructions Triton chooses is not known here

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Waves of equal programs, or the bytes; product, softmax and waits of each step."""
        attention, c = as_attention(problem), self.constants
        block_m, block_n = config["block_m"], config["block_n"]
        columns, resident = padded(attention.head_dim), blocks_per_sm(attention, config, gpu)

        scores = block_m * block_n
        product_clocks = 4 * scores * columns / gpu.tensor_flops_per_clock_sm / c["tensor_share"]
        softmax_clocks = scores * (1 / EXP_PER_CLOCK_SM + c["score_clocks"])
        longer, shorter = sorted((product_clocks, softmax_clocks), reverse=True)
        busy = resident * longer + c["exposed"] * shorter + c["step_clocks"]
        wait = c["load_clocks"] / (resident * config["num_stages"])
        steps = _steps(attention, config)
        count = programs(attention, config)
        waves = max(1.0, count / (gpu.sm_count * resident))
        if not attention.is_causal:
            waves = math.ceil(waves)
        filled = min(1.0, count / (gpu.sm_count * resident))
        alone = longer + shorter + c["step_clocks"]
        loads = resident * 2 * block_n * columns * DTYPE_BYTES[attention.dtype]
        step = max(alone, filled * busy, filled * loads / c["l2_bytes_per_clock"]) + wait
        clocks = waves * (c["program_clocks"] + steps * step)
        compute_us = clocks / (SUSTAINED_CLOCK * gpu.clock_max_mhz)
        memory_us = attention.bytes / (c["memory_share"] * gpu.memory_gbs * 1e3)
        return float(c["fixed_us"] + max(compute_us, memory_us))


def padded(head_dim: int) -> int:
    """Columns of a tile: Triton's extents are powers of two."""
    return max(MIN_COLUMNS, 1 << (head_dim - 1).bit_length())


def programs(problem: AttentionProblem, config: Config) -> int:
    """Blocks of the grid."""
    packed = config.get("packed_heads", 1)
    tiles = math.ceil(problem.seqlen_q * packed / int(config["block_m"]))
    return int(problem.batch * problem.heads_q // packed * tiles)


def smem_bytes(problem: AttentionProblem, config: Config, gpu: Gpu) -> int:
    """Least shared memory of a block: a tile of Q, and the stages of K and V. Triton may need more,
    to change layouts; its compiler says so.
    """
    low, high = FROM_SHARED
    from_shared = low <= capability_numbers(gpu.compute_capability) < high
    wide = from_shared and config["block_m"] >= WGMMA_ROWS and config["num_warps"] >= 4
    stages = config["num_stages"]
    tiles = 2 * (stages if wide else stages - 1) if stages > 1 else 1
    rows = config["block_m"] + tiles * config["block_n"]
    return int(rows * padded(problem.head_dim) * DTYPE_BYTES[problem.dtype])


def _registers(block_m: int, block_n: int, columns: int, warps: int) -> int:
    """Registers of a thread: fp32 scores and outputs, 16-bit keys."""
    return (block_m * (block_n + columns) + block_n * columns // 2) // (warps * WARP)


def blocks_per_sm(problem: AttentionProblem, config: Config, gpu: Gpu) -> int:
    """Programs that find room on a multiprocessor at once, by estimate."""
    extents = config["block_m"], config["block_n"], padded(problem.head_dim), config["num_warps"]
    registers = min(255, OTHER_REGISTERS + _registers(*extents))
    smem = smem_bytes(problem, config, gpu) + SMEM_RESERVED_PER_BLOCK_BYTES
    room = smem_per_block_bytes(gpu.compute_capability) + SMEM_RESERVED_PER_BLOCK_BYTES
    threads = WARP * int(config["num_warps"])
    return max(1, min(room // smem, REGISTERS_PER_SM // (threads * registers)))


def _steps(problem: AttentionProblem, config: Config) -> float:
    """Steps of a program, the average of all."""
    block_n = int(config["block_n"])
    if not problem.is_causal:
        return math.ceil(problem.seqlen_kv / block_n)
    rows = max(1, int(config["block_m"]) // int(config.get("packed_heads", 1)))
    tiles = math.ceil(problem.seqlen_q / rows)
    seen = (min(problem.seqlen_kv, (tile + 1) * rows) for tile in range(tiles))
    return sum(math.ceil(keys / block_n) for keys in seen) / tiles


def _packing(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of `packed_heads`."""
    group = problem.heads_q // problem.heads_kv
    if ("packed_heads" in config.params) != (group > 1):
        return ["packed_heads is for several query heads to a KV head, only"]
    packed = config.get("packed_heads", 1)
    reasons = []
    if group % packed:
        reasons.append(f"packed_heads={packed} does not divide the {group} heads to a KV head")
    if packed > config["block_m"]:
        reasons.append(f"packed_heads={packed} exceeds block_m={config['block_m']}")
    return reasons


def _extents(problem: AttentionProblem, config: Config) -> list[str]:
    """Sizes that the kernel's 32-bit integers cannot hold: rows, programs, and offsets in a
    tile.
    """
    reasons = []
    rows = problem.seqlen_q * config.get("packed_heads", 1) + config["block_m"]
    if max(rows, problem.seqlen_kv + config["block_n"]) > MAX_EXTENT:
        reasons.append("more than 2^31 - 1 rows of queries or keys")
    if programs(problem, config) > MAX_EXTENT:
        reasons.append("more than 2^31 - 1 programs")
    if max(o.strides[2] for o in problem.matrices) * 256 > MAX_EXTENT:
        reasons.append("rows are more than 2^23 elements apart")
    return reasons
