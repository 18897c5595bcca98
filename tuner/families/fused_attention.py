"""Our own fused attention forward: `templates/fused_attention.cu.j2`, every lever a parameter."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import ClassVar

from tuner.config import Config, Value
from tuner.families.base import Family, KernelSpec, Launch, Ref
from tuner.hardware import (
    EXP_PER_CLOCK_SM,
    SMEM_PER_BLOCK_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    TENSOR_FLOPS_PER_CLOCK_SM,
    Gpu,
)
from tuner.problem import AttentionProblem, Problem

#: Columns of Q, K and V that the template is instantiated for; a smaller D is padded by TMA.
INSTANCES = (64, 96, 128, 192, 256)
#: (producer, consumer) registers after setmaxnreg, by (warp groups, blocks an SM): multiples of 8
#: whose sum over the threads of the resident blocks fits 65536 (PTX ISA, setmaxnreg).
REGISTERS: Mapping[tuple[int, int], tuple[int, int]] = {
    (1, 1): (56, 240),
    (1, 2): (24, 224),
    (2, 1): (24, 240),
    (2, 2): (24, 112),
    (3, 1): (32, 160),
    (3, 2): (24, 72),
}
#: Registers a consumer thread needs beside its accumulators: addresses, row statistics, loop
#: state. Found by compiling: above it ptxas spills.
OVERHEAD_REGISTERS = 24
#: mbarriers at the end of the shared memory, rounded to the alignment of the tiles.
BARRIER_BYTES = 1024
#: Clocks that one step over a K/V tile costs beside its arithmetic; tile_n 64 against 128.
STEP_CLOCKS = 75
#: Clocks a score beside tensor cores and exponentials, by (warp groups, blocks an SM): what nothing
#: hides, less what overlaps. Fitted to 181 kernels on an H200 (cache/recordings, November 2026);
#: (2, 2) and (3, 2) were not among them.
EXPOSED_CLOCKS: Mapping[tuple[int, int], float] = {
    (1, 1): 0.075,
    (1, 2): -0.004,
    (2, 1): 0.012,
    (2, 2): 0.012,
    (3, 1): -0.008,
    (3, 2): -0.008,
}
#: Time without `overlap`, without `ping_pong` where there are groups to order, and with part of
#: the exponentials on the FMA units, as factors of the time with, with and without; same fit.
NO_OVERLAP, NO_PING_PONG, POLYNOMIAL = 1.05, 1.06, 1.03
#: Launch, prologue and epilogue, microseconds; fitted to the smallest problems.
FIXED_US = 3.5


def instance(head_dim: int) -> int:
    """The smallest instance that holds `head_dim` columns."""
    return next(d for d in INSTANCES if d >= head_dim)


class FusedAttention(Family):
    """One kernel a call: scores and probabilities never leave the registers."""

    name = "fused_attention"
    op = "attention"
    domains: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        "warp_groups": (1, 2, 3),
        "tile_n": (32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
        "kv_stages": (1, 2, 3, 4, 5),
        "ping_pong": (False, True),
        "overlap": (False, True),
        "poly_every": (0, 2, 4, 8),
        "lazy_rescale": (0, 8),
        "blocks_per_sm": (1, 2),
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        if not isinstance(problem, AttentionProblem):
            return f"{self.name} serves {self.op}, not {problem.op}"
        if problem.heads_q > 65535 or problem.batch > 65535:
            return "more than 65535 heads or batch elements do not fit the grid"
        return ""

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        found = [reason] if (reason := self.supports(problem, gpu)) else []
        if not isinstance(problem, AttentionProblem):
            return found
        head_dim = instance(problem.head_dim)
        groups, tile_n, stages = config["warp_groups"], config["tile_n"], config["kv_stages"]
        blocks = config["blocks_per_sm"]
        if tile_n % 16:
            found.append(f"tile_n={tile_n} is not a multiple of 16, the K extent of one WGMMA")
        if tile_n > 256:
            found.append(f"tile_n={tile_n} exceeds 256, the N extent of one WGMMA")
        if stages < 1:
            found.append(f"kv_stages={stages} is less than 1")
        if ("ping_pong" in config.params) != (groups > 1):
            found.append("ping_pong is for two warp groups or more, and theirs to choose")
        smem = self.smem_bytes(problem, config)
        limit = SMEM_PER_BLOCK_BYTES
        if blocks > 1:
            limit = SMEM_PER_SM_BYTES // blocks - SMEM_RESERVED_PER_BLOCK_BYTES
        if smem > limit:
            found.append(f"{smem} bytes of shared memory exceed {limit}")
        accumulators = tile_n // 2 + tile_n // 4 + head_dim // 2
        if (groups, blocks) not in REGISTERS:
            found.append(
                f"warp_groups={groups} at blocks_per_sm={blocks} has no register budget (allowed: "
                + ", ".join(f"{g} at {b}" for g, b in REGISTERS)
                + ")"
            )
            return found
        consumer = REGISTERS[groups, blocks][1]
        if accumulators + OVERHEAD_REGISTERS > consumer:
            found.append(
                f"{accumulators} accumulator registers + {OVERHEAD_REGISTERS} exceed {consumer}"
            )
        return found

    @staticmethod
    def smem_bytes(problem: AttentionProblem, config: Config) -> int:
        """Dynamic shared memory: one Q tile, the K and the V ring, the barriers."""
        rows = 64 * config["warp_groups"] + 2 * config["kv_stages"] * config["tile_n"]
        return int(rows * instance(problem.head_dim) * 2 + BARRIER_BYTES)

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        if self.supports(problem, gpu):
            return []
        return [c for c in self._grid() if not self.violations(problem, c, gpu)]

    def _grid(self) -> Iterator[Config]:
        for (groups, blocks), tile_n in product(
            ((1, 1), (1, 2), (2, 1), (2, 2), (3, 1)), (64, 80, 96, 128, 176)
        ):
            ordered = (False, True) if groups > 1 else (None,)
            for ping_pong, overlap, (poly, lazy) in product(
                ordered, (False, True), ((0, 0), (4, 0), (0, 8))
            ):
                params: dict[str, Value] = {
                    "warp_groups": groups,
                    "tile_n": tile_n,
                    "kv_stages": 2,
                    "overlap": overlap,
                    "poly_every": poly,
                    "lazy_rescale": lazy,
                    "blocks_per_sm": blocks,
                }
                if ping_pong is not None:
                    params["ping_pong"] = ping_pong
                yield Config(self.name, params)

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """As drawn, with `ping_pong` where there are groups to order and nowhere else."""
        params = dict(super().draw(problem, gpu, members, rng).params)
        ping_pong = params.pop("ping_pong", False)
        if params["warp_groups"] != 1:
            params["ping_pong"] = ping_pong
        return Config(self.name, params)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        attention = _attention(problem)
        producer, consumer = REGISTERS[config["warp_groups"], config["blocks_per_sm"]]
        return {
            "attention": KernelSpec(
                "fused_attention.cu.j2",
                {
                    "ping_pong": False,
                    **config.params,
                    "dtype": attention.dtype,
                    "head_dim": instance(attention.head_dim),
                    "is_causal": attention.is_causal,
                    "producer_registers": producer,
                    "consumer_registers": consumer,
                },
            )
        }

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        attention = _attention(problem)
        strides = [s for operand in problem.operands for s in operand.strides[:3]]
        extents = (
            attention.batch,
            attention.heads_q,
            attention.heads_kv,
            attention.seqlen_q,
            attention.seqlen_kv,
            attention.head_dim,
        )
        tensors = tuple(Ref(operand.name) for operand in problem.operands)
        return [Launch("attention", tensors, (*extents, *strides), (scale,))]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """Tensor-core, exponential and exposed clocks of the busiest multiprocessor.

        Its share is its rounds of blocks or, under a causal mask, half of them but no less than
        the longest block.
        """
        attention = _attention(problem)
        tile_m, tile_n = 64 * config["warp_groups"], config["tile_n"]
        blocks = -(-attention.seqlen_q // tile_m) * attention.heads_q * attention.batch
        resident = config["blocks_per_sm"]
        rounds = -(-blocks // (gpu.sm_count * resident)) * resident
        if attention.is_causal:
            rounds = max(resident, math.ceil(rounds / 2))
        columns = -(-attention.seqlen_kv // tile_n) * tile_n
        per_score = 4 * instance(attention.head_dim) / TENSOR_FLOPS_PER_CLOCK_SM
        per_score += 1 / EXP_PER_CLOCK_SM + STEP_CLOCKS / (tile_m * tile_n)
        per_score += EXPOSED_CLOCKS[config["warp_groups"], resident]
        per_score *= 1 if config["overlap"] else NO_OVERLAP
        per_score *= 1 if config.get("ping_pong", True) else NO_PING_PONG
        per_score *= POLYNOMIAL if config["poly_every"] else 1
        return float(FIXED_US + rounds * tile_m * columns * per_score / gpu.clock_max_mhz)


def _attention(problem: Problem) -> AttentionProblem:
    if not isinstance(problem, AttentionProblem):
        raise TypeError(f"expected an attention problem, got {problem.op}")
    return problem
