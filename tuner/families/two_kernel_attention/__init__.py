"""Attention as two kernels: scores and their exponentials, then the product with V.

The first computes tiles of S = Q K^T and stores exp(S - m) in 16 bits, with m the row's maximum in
that tile. The value lies in (0, 1] for any scores. The second kernel computes the row's maximum and
sum from those of the tiles. It adds the tiles' products with V, each times exp(m - the row's
maximum) over that sum.

So the probabilities are written once and read once, in the image that shared memory is to hold.
Under a causal mask neither kernel touches the tiles above the diagonal.

Between product and mask the first kernel applies the score modifiers that are compiled into it:
soft cap, additive bias.

A launch takes `heads_per_launch` heads and of each `rows_per_launch` rows of queries, whose
probabilities are the scratch. With `pdl` each kernel starts before its predecessor ends and waits
for it on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import ceil, log
from typing import ClassVar, NamedTuple

from tuner.config import Config, Value
from tuner.families.arguments import EXTENTS, Arguments, extents_of, named_strides, stride_names
from tuner.families.attention_instances import REGISTERS
from tuner.families.base import LSE, SCRATCH, Domain, Family, KernelSpec, Launch, Ref
from tuner.families.chip_work import Work
from tuner.families.two_kernel_attention import chip_work
from tuner.families.two_kernel_attention.shape import (
    ROWS,
    STAGES,
    STATISTIC_BYTES,
    bias_bytes,
    columns,
    smem_bytes,
    smem_limit,
)
from tuner.hardware import (
    EXP_PER_CLOCK_SM,
    GRAPH_LAUNCH_US,
    HOPPER,
    TENSOR_FLOPS_PER_CLOCK_SM,
    Gpu,
)
from tuner.problem import DTYPE_BYTES, E4M3, MAX_EXTENT, AttentionProblem, Problem, as_attention

TEMPLATE = "two_kernel_attention.cu.j2"
#: Text that it takes, by variable.
WORDS = {"stage": STAGES, "dtype": ("float16", "bfloat16")}
#: Registers a consumer thread needs beside its accumulators. Found by compiling.
OVERHEAD_REGISTERS = 40
#: Blocks of a grid along y and z at most [CUDA C++ Programming Guide 13.0, "Compute Capabilities"].
MAX_BLOCKS = 65535
#: Launches worth trying: what follows is bound by launching; and probabilities that are too few to
#: fill the chip.
MAX_CHUNKS = 256
MIN_CHUNK_BYTES = 16 << 20
#: What only measurements say: by hand, after 32 kernels at (1,16,1024,64) on one H200
#: (22 November 2026). Nothing of other shapes is known.
CONSTANTS: Mapping[str, float] = {
    # First loads and last stores of a kernel, microseconds; what is left of it with `pdl`.
    "fixed_us": 1.8,
    "pdl": 0.85,
    # Share of the clock that is held under load.
    "clock": 0.89,
    # Clocks of a score beside product and exponential, of an output beside the product of a tile.
    "score_clocks": 0.04,
    "output_clocks": 0.02,
    # Clocks of a step that nothing hides, where blocks share a multiprocessor each its part.
    "scores_step_clocks": 500.0,
    "output_step_clocks": 20.0,
    # Share of the step's shorter part that a second buffer leaves exposed.
    "exposed": 0.4,
    # Probabilities of a multiprocessor to and from the L2, bytes a clock; keys and values come
    # beside them. Share of memory's bandwidth reached.
    "store_bytes_per_clock": 18.0,
    "load_bytes_per_clock": 19.0,
    "memory_share": 0.8,
}


class Chunk(NamedTuple):
    """Part of the problem that one launch covers: heads counted over the batch, rows of each."""

    first_head: int
    head_count: int
    first_row: int
    row_count: int


class TwoKernelAttention(Family):
    """Two kernels with their own warp groups, stages and buffers, and common tiles of keys."""

    name = "two_kernel_attention"
    op = "attention"
    kind = "two kernels"
    capabilities = (HOPPER,)
    writes_lse = True
    # The fused kernel is faster.
    is_fallback = True
    cost_constants = CONSTANTS
    runtime_parameters = frozenset({"heads_per_launch", "rows_per_launch", "splits", "pdl"})
    domains: ClassVar[Mapping[str, Domain]] = {
        "tile_n": (64, 128, 192, 256),
        **{
            f"{stage}_{name}": values
            for stage in STAGES
            for name, values in (
                ("groups", (1, 2, 3)),
                ("stages", (2, 3, 4, 5, 6)),
                ("buffers", (1, 2)),
                ("blocks_per_sm", (1, 2)),
            )
        },
        "heads_per_launch": range(1, MAX_EXTENT + 1),
        "rows_per_launch": range(ROWS, MAX_BLOCKS * ROWS + 1, ROWS),
        "splits": range(1, MAX_BLOCKS + 1),
        "pdl": (False, True),
    }
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {
        "heads_per_launch": (1, 2, 3, 4, 8, 16),
        "rows_per_launch": (64, 128, 1024, 4096),
        "splits": (1, 2, 8, 64),
    }

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, AttentionProblem):
            return reason
        if problem.dtype == E4M3:
            return f"{self.name} takes no descale factors: only fp16 and bf16, not {E4M3}"
        lacking = (
            ("sliding window", problem.is_windowed),
            ("variable lengths", problem.is_varlen),
            ("boolean mask", bool(problem.mask)),
            ("paged cache", problem.is_paged),
            ("block-sparse mask", bool(problem.block_mask)),
        )
        missing = " or ".join(name for name, is_on in lacking if is_on)
        return f"{self.name} has no {missing}" if missing else ""

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem, reasons = as_attention(problem), []
        for stage in STAGES:
            reasons += [f"{stage}: {reason}" for reason in _stage(problem, config, stage)]
        return reasons + _chunking(problem, config)

    def _groups(self, problem: AttentionProblem, gpu: Gpu) -> Iterator[list[Config]]:
        """Candidates that can win: groups that have rows; two blocks at an SM where there are so
        many, and then of one group each; deep rings where the room is one block's.
        """
        shapes = []
        for groups, resident in ((1, 1), (1, 2), (2, 1)):
            blocks = ceil(problem.seqlen_q / (ROWS * groups)) * problem.batch * problem.heads_q
            is_crowded = groups == 1 and (blocks > gpu.sm_count) != (resident == 2)
            if problem.seqlen_q > ROWS * (groups - 1) and not is_crowded:
                shapes.append((groups, resident, blocks))
        for tile_n, scores, output, buffers in product((64, 128), shapes, shapes, (1, 2)):
            for (heads, rows), splits, pdl in product(
                chunk_sizes(problem), _splits(problem, scores[2], tile_n, gpu), (False, True)
            ):
                params: dict[str, Value] = {"tile_n": tile_n}
                for stage, (groups, resident, _) in (("scores", scores), ("output", output)):
                    params |= {
                        f"{stage}_groups": groups,
                        f"{stage}_stages": self._depth(problem, tile_n, stage, groups, resident),
                        f"{stage}_buffers": buffers if stage == "scores" else 2,
                        f"{stage}_blocks_per_sm": resident,
                    }
                params |= {"heads_per_launch": heads, "rows_per_launch": rows}
                yield [Config(self.name, {**params, "splits": splits, "pdl": pdl})]

    @staticmethod
    def _depth(
        problem: AttentionProblem, tile_n: int, stage: str, groups: int, resident: int
    ) -> int:
        """Stages of a ring worth having: 3 of keys, of probabilities up to 6 as there is room."""
        if stage == "scores":
            return 3
        fitting = [
            depth
            for depth in range(2, 7)
            if smem_bytes(problem, stage, tile_n, groups, depth) <= smem_limit(resident)
        ]
        return max(fitting, default=2)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        attention = as_attention(problem)
        return {stage: _spec(attention, config, stage) for stage in STAGES}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        attention = as_attention(problem)
        return [
            launch
            for chunk in _chunks(attention, config)
            for launch in _chunk_launches(attention, config, scale, chunk)
        ]

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        """The probabilities of one launch's rows and the statistics of their tiles."""
        return sum(_scratch_parts(as_attention(problem), config))

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        return tuple(chip_work.chip_work(as_attention(problem), config, gpu))

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        attention, constants = as_attention(problem), self.constants
        clock = gpu.clock_max_mhz * constants["clock"]
        chunks = -(-attention.batch * attention.heads_q // config["heads_per_launch"])
        chunks *= ceil(attention.seqlen_q / config["rows_per_launch"])
        clocks = sum(_stage_clocks(attention, config, gpu, stage, constants) for stage in STAGES)
        # What does not stay in the L2 goes through memory twice.
        density = attention.pairs / (attention.seqlen_q * attention.seqlen_kv)
        spilled = max(0.0, self.scratch_bytes(problem, config) * density - gpu.l2_bytes)
        spilled = 2 * spilled * chunks
        spilled += max(0.0, bias_bytes(attention) * density - gpu.l2_bytes)
        memory_us = spilled / (constants["memory_share"] * gpu.memory_gbs * 1e3)
        fixed_us = constants["fixed_us"] * (constants["pdl"] if config["pdl"] else 1.0)
        fixed_us += 0.0 if config["pdl"] else GRAPH_LAUNCH_US
        return float(len(STAGES) * chunks * fixed_us + max(clocks / clock, memory_us))


def chunk_sizes(problem: AttentionProblem) -> list[tuple[int, int]]:
    """(heads, rows) of a launch worth trying: everything at once, then about half each time, heads
    first, within the limits of launches and probabilities.
    """
    total, blocks = problem.batch * problem.heads_q, ceil(problem.seqlen_q / ROWS)
    sizes = [(total, blocks)]
    while sizes[-1] != (1, 1):
        heads, rows = sizes[-1]
        if heads > 1:
            sizes.append((max(h for h in range(1, heads // 2 + 1) if total % h == 0), rows))
        else:
            sizes.append((1, ceil(rows / 2)))
    row_bytes = ROWS * problem.seqlen_kv * DTYPE_BYTES[problem.dtype]
    return [
        (heads, ROWS * rows)
        for heads, rows in sizes
        if (heads, rows) == sizes[0]
        or (
            heads * rows * row_bytes >= MIN_CHUNK_BYTES
            and total // heads * ceil(blocks / rows) <= MAX_CHUNKS
        )
    ]


def _splits(problem: AttentionProblem, blocks: int, tile_n: int, gpu: Gpu) -> list[int]:
    """One, and the least that gives every multiprocessor a block of the first kernel."""
    most = ceil(problem.seqlen_kv / tile_n)
    return sorted({1, min(most, ceil(gpu.sm_count / blocks))})


def _stage(problem: AttentionProblem, config: Config, stage: str) -> list[str]:
    """Violations of the parameters of one kernel."""
    names = ("groups", "stages", "buffers", "blocks_per_sm")
    groups, depth, buffers, resident = (config[f"{stage}_{name}"] for name in names)
    tile_n = config["tile_n"]
    reasons = []
    needed, limit = smem_bytes(problem, stage, tile_n, groups, depth), smem_limit(resident)
    if needed > limit:
        reasons.append(f"{needed} bytes of shared memory exceed {limit}")
    if stage == "scores":  # and of a bias a tile's, two to a register
        accumulators = buffers * tile_n // 2 + (tile_n // 4 if problem.bias else 0)
    else:
        accumulators = (buffers + 1) * columns(problem, stage) // 2
    consumer = REGISTERS[groups, resident][1]
    if accumulators + OVERHEAD_REGISTERS > consumer:
        reasons.append(
            f"{accumulators} accumulator registers + {OVERHEAD_REGISTERS} exceed {consumer}"
        )
    return reasons


def _chunking(problem: AttentionProblem, config: Config) -> list[str]:
    """Violations of the launches' heads, rows and splits."""
    heads, rows, splits = (
        config[name] for name in ("heads_per_launch", "rows_per_launch", "splits")
    )
    total, most_rows = problem.batch * problem.heads_q, ceil(problem.seqlen_q / ROWS) * ROWS
    reasons = []
    if total % heads:
        reasons.append(f"heads_per_launch={heads} does not divide B x H = {total}")
    if rows > most_rows:
        reasons.append(f"rows_per_launch={rows} exceed the {most_rows} of the queries")
    if splits > (tiles := ceil(problem.seqlen_kv / config["tile_n"])):
        reasons.append(f"splits={splits} exceed the {tiles} tiles of keys")
    return reasons


def _spec(problem: AttentionProblem, config: Config, stage: str) -> KernelSpec:
    groups, resident = config[f"{stage}_groups"], config[f"{stage}_blocks_per_sm"]
    producer, consumer = REGISTERS[groups, resident]
    tile_n, depth = config["tile_n"], config[f"{stage}_stages"]
    return KernelSpec(
        TEMPLATE,
        {
            "stage": stage,
            "dtype": problem.dtype,
            "columns": columns(problem, stage),
            "warp_groups": groups,
            "tile_n": tile_n,
            "stages": depth,
            "buffers": config[f"{stage}_buffers"],
            "is_causal": problem.is_causal,
            "has_softcap": stage == "scores" and problem.softcap > 0,
            "has_bias": stage == "scores" and bool(problem.bias),
            "blocks_per_sm": resident,
            "smem_bytes": smem_bytes(problem, stage, tile_n, groups, depth),
            "producer_registers": producer,
            "consumer_registers": consumer,
        },
        WORDS,
        arguments_of(problem, stage),
    )


def arguments_of(problem: AttentionProblem, stage: str) -> Arguments:
    """Declaration of the arguments of a launch of one kernel."""
    common = (*EXTENTS, *Chunk._fields, "pdl")
    if stage == "output":
        return Arguments(
            tensors=("probabilities", "statistics", "value", "out", LSE),
            integers=(*common, *stride_names("value", "out")),
            scalars=("maximum_scale",),
        )
    modifiers = [operand.name for operand in problem.operands[3:-1]]
    return Arguments(
        tensors=("query", "key", "probabilities", "statistics", *modifiers),
        integers=(
            *(*common, *stride_names("query", "key"), "splits"),
            *(stride_names("bias") if problem.bias else ()),
        ),
        scalars=("scale", "softcap") if problem.softcap else ("scale",),
    )


def _chunks(problem: AttentionProblem, config: Config) -> Iterator[Chunk]:
    heads, rows = config["heads_per_launch"], config["rows_per_launch"]
    for first_head in range(0, problem.batch * problem.heads_q, heads):
        for first_row in range(0, problem.seqlen_q, rows):
            yield Chunk(first_head, heads, first_row, min(rows, problem.seqlen_q - first_row))


def _scratch_parts(problem: AttentionProblem, config: Config) -> tuple[int, int]:
    """Bytes of a launch's probabilities and of its statistics."""
    rows = config["heads_per_launch"] * config["rows_per_launch"]
    tiles = ceil(problem.seqlen_kv / config["tile_n"])
    return (
        rows * tiles * config["tile_n"] * DTYPE_BYTES[problem.dtype],
        rows * tiles * STATISTIC_BYTES,
    )


def _chunk_launches(
    problem: AttentionProblem, config: Config, scale: float, chunk: Chunk
) -> Iterator[Launch]:
    query, key, value, out = problem.matrices
    probabilities = Ref(SCRATCH)
    statistics = Ref(SCRATCH, _scratch_parts(problem, config)[0])
    between = {"probabilities": probabilities, "statistics": statistics}
    common = {
        **extents_of(problem),
        **dict(zip(Chunk._fields, chunk, strict=True)),
        "pdl": int(config["pdl"]),
    }
    integers = {
        **common,
        **named_strides({"query": query.strides, "key": key.strides}),
        "splits": config["splits"],
    }
    if problem.bias:
        integers |= zip(stride_names("bias"), problem.mask_strides, strict=True)
    yield Launch.named(
        "scores",
        arguments_of(problem, "scores"),
        {**{o.name: Ref(o.name) for o in problem.operands[:2]}, **between}
        | {o.name: Ref(o.name) for o in problem.operands[3:-1]},
        integers,
        {"scale": scale, **({"softcap": problem.softcap} if problem.softcap else {})},
    )
    yield Launch.named(
        "output",
        arguments_of(problem, "output"),
        {**between, "value": Ref(value.name), "out": Ref(out.name), LSE: Ref(LSE)},
        {**common, **named_strides({"value": value.strides, "out": out.strides})},
        {"maximum_scale": _maximum_scale(problem, scale)},
    )


def _maximum_scale(problem: AttentionProblem, scale: float) -> float:
    """Factor that brings the first kernel's row maxima to base 2.

    A bias is added to scores that the first kernel has scaled itself.
    """
    if problem.bias:
        return 1.0
    return (problem.softcap or scale) / log(2)


def _stage_clocks(
    problem: AttentionProblem,
    config: Config,
    gpu: Gpu,
    stage: str,
    constants: Mapping[str, float],
) -> float:
    """Clocks of one kernel over all launches: rounds of blocks, each its steps."""
    groups, resident = config[f"{stage}_groups"], config[f"{stage}_blocks_per_sm"]
    tile_n, width = config["tile_n"], DTYPE_BYTES[problem.dtype]
    rows = min(config["rows_per_launch"], problem.seqlen_q)
    of_launch = ceil(rows / (ROWS * groups)) * config["heads_per_launch"]
    splits = config["splits"] if stage == "scores" else 1
    slices = ceil(problem.head_dim / columns(problem, stage))
    launches = problem.batch * problem.heads_q // config["heads_per_launch"]
    launches *= ceil(problem.seqlen_q / config["rows_per_launch"])
    rounds = ceil(of_launch * splits * slices / gpu.sm_count)
    density = problem.pairs / (problem.seqlen_q * problem.seqlen_kv)
    steps = ceil(ceil(problem.seqlen_kv / tile_n) * density / splits)
    scores, depth = groups * ROWS * tile_n, columns(problem, stage)
    multiplied = scores * depth * 2 / TENSOR_FLOPS_PER_CLOCK_SM
    if stage == "scores":
        beside = scores * (1 / EXP_PER_CLOCK_SM + constants["score_clocks"])
        moved = scores * width / constants["store_bytes_per_clock"]
        if problem.bias:  # each score has one
            moved += scores * width / constants["load_bytes_per_clock"]
    else:
        beside = groups * ROWS * depth * constants["output_clocks"]
        moved = scores * width / constants["load_bytes_per_clock"]
    shorter, longer = sorted((multiplied, beside))
    exposed = constants["exposed"] if config[f"{stage}_buffers"] == 2 else 1.0
    waits = constants[f"{stage}_step_clocks"] / min(resident, rounds)
    return float(launches * rounds * steps * (max(moved, longer + exposed * shorter) + waits))
