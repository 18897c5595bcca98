"""A config's demands on the chip: tiles, waves, occupancy, bytes, instructions.

Computed from the config and the problem, never measured, for the families named in `works`. Reports
show other families' measurements only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from tuner.config import Config
from tuner.families import (
    block_scaled_gemm,
    cluster_gemm,
    family,
    gemv,
    grouped_gemm,
    triton_attention,
    two_kernel_attention,
)
from tuner.families.cutlass_fmha.shape import FmhaShape
from tuner.families.fused_attention import legality
from tuner.families.fused_attention.registers import instance
from tuner.families.gemm.shape import (
    CONSUMERS,
    PINGPONG,
    PLAIN,
    oriented,
    smem_bytes,
)
from tuner.families.gemm.swiglu import product_of
from tuner.hardware import (
    EXP_PER_CLOCK_SM,
    GRAPH_LAUNCH_US,
    REGISTERS_PER_SM,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    WARP,
    WARP_GROUP,
    Gpu,
)
from tuner.measurement import Measurement, Regime
from tuner.problem import (
    DTYPE_BYTES,
    SCALE_BLOCK,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

#: Bytes that one multiprocessor takes from the L2 a clock [Jia et al., "Dissecting the NVIDIA Volta
#: GPU Architecture via Microbenchmarking", L2 to L1; taken for Hopper]. What the L2 itself reads,
#: 5120 a clock of the whole A100 [its whitepaper], is no bound: one read answers neighbours that
#: ask for the same line, and recorded products took up to 11.2 TB/s. At the highest clock: the L2
#: has its own, which does not fall with the multiprocessors' under a power limit.
L2_BYTES_PER_CLOCK_SM = 64
#: Rows, columns and depth of the largest WGMMA of 16-bit operands (PTX ISA, wgmma).
WGMMA_M, WGMMA_N, WGMMA_K = 64, 256, 16
#: Warps that one multiprocessor holds [CUDA C++ Programming Guide 13.0, "Compute Capabilities"].
WARPS_PER_SM = 64
#: Exponentials an element in each way to compute a softmax: with the row in registers, with an
#: online maximum, in three passes.
EXPONENTIALS = {1: 1, 2: 2, 3: 2}

TENSOR, EXPONENTIAL, L2, MEMORY, LAUNCH = (
    "tensor cores",
    "special-function units",
    "L2 cache",
    "memory",
    "launching",
)


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


def works(problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    """The kernels of a call in order. Empty for a family that is not known here, and for a config
    of another version that lacks a parameter.
    """
    try:
        return _works(problem, config, gpu)
    except KeyError:
        return ()


def _works(problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    match problem, config.family:
        case AttentionProblem(), "fused_attention":
            return (_fused_attention(problem, config, gpu),)
        case AttentionProblem(), "triton_attention":
            return (_triton_attention(problem, config, gpu),)
        case AttentionProblem(), "cutlass_fmha":
            return (_cutlass_fmha(problem, config, gpu),)
        case AttentionProblem(), "three_kernel_attention":
            return _three_kernels(problem, config, gpu)
        case AttentionProblem(), "two_kernel_attention":
            return tuple(_two_kernels(problem, config, gpu))
        case GemmProblem(), "gemm":
            return (_gemm(problem, config, gpu),)
        case GemmProblem(), "block_scaled_gemm":
            return (_block_scaled_gemm(problem, config, gpu),)
        case GemmProblem(), "cluster_gemm":
            return (_cluster_gemm(problem, config, gpu),)
        case GemmProblem(), "gemv":
            return (_gemv(problem, config, gpu),)
        case SwigluProblem(), "gemm_swiglu":
            return (_gemm_swiglu(problem, config, gpu),)
        case GroupedGemmProblem(), "block_scaled_grouped_gemm":
            return (_block_scaled_groups(problem, config, gpu),)
        case GroupedGemmProblem(), "grouped_gemm":
            return (_grouped_gemm(problem, config, gpu),)
        case SoftmaxProblem(), "softmax":
            return (_softmax(problem, config, gpu),)
        case _:
            return ()


def total(found: Iterable[Work], name: str) -> float:
    """A quantity of `Work` over all launches of a call."""
    return float(sum(work.launches * getattr(work, name) for work in found))


def floors(
    measurement: Measurement, gpu: Gpu, found: Sequence[Work], clock_mhz: int
) -> dict[str, float]:
    """Lower bound of each unit's busy time in microseconds, by name.

    The units can work at the same time, so the largest bound limits the call, and their sum has no
    meaning. Without `found` (a vendor's kernel) the problem's own work is used.

    Args:
        measurement: measurement of the call.
        gpu: GPU that it runs on.
        found: result of `works` for its config.
        clock_mhz: clock of the multiprocessors.
    """
    problem = measurement.problem
    clocks = gpu.sm_count * clock_mhz
    flops = total(found, "tensor_flops") if found else _least_flops(problem)
    exponentials = total(found, "exponentials") if found else _least_exponentials(problem)
    moved = total(found, "l2_bytes") if found else problem.bytes
    launches = sum(work.launches for work in found) or 1
    return {
        TENSOR: flops / (gpu.tensor_flops_per_clock_sm * problem.tensor_rate * clocks),
        EXPONENTIAL: exponentials / (EXP_PER_CLOCK_SM * clocks),
        L2: moved / l2_bytes_per_us(gpu),
        MEMORY: memory_bytes(problem, gpu, measurement.regime) / (gpu.memory_gbs * 1e3),
        LAUNCH: launches * GRAPH_LAUNCH_US,
    }


def l2_bytes_per_us(gpu: Gpu) -> float:
    """Maximum bytes a microsecond from the L2 to the multiprocessors."""
    return L2_BYTES_PER_CLOCK_SM * gpu.sm_count * float(gpu.clock_max_mhz)


def memory_bytes(problem: Problem, gpu: Gpu, regime: Regime) -> int:
    """Bytes that must cross the memory bus: all operands, or the part that the L2 cannot hold."""
    return problem.bytes if regime.l2 == "cold" else max(0, problem.bytes - gpu.l2_bytes)


def _least_flops(problem: Problem) -> float:
    return 0.0 if isinstance(problem, SoftmaxProblem) else float(problem.flops)


def _least_exponentials(problem: Problem) -> float:
    if isinstance(problem, AttentionProblem):
        return problem.flops / (4 * problem.head_dim)
    return problem.flops / 5 if isinstance(problem, SoftmaxProblem) else 0.0


def _wgmmas(tile_m: int, tile_n: int, depth: int) -> int:
    return ceil(tile_m / WGMMA_M) * ceil(tile_n / WGMMA_N) * ceil(depth / WGMMA_K)


def _attention(
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
    seen = (
        problem.keys_of(b * tile_m // packed, ceil((b + 1) * tile_m / packed) - 1)
        for b in range(row_blocks)
    )
    steps = heads * sum(ceil(k.stop / tile_n) - k.start // tile_n for k in seen if k)
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
        * (_wgmmas(tile_m, tile_n, columns) + _wgmmas(tile_m, columns, tile_n))
        // problem.tensor_rate,
        # A soft cap takes an exponential and a reciprocal more.
        exponentials=(3.0 if problem.softcap else 1.0) * tile_m * tile_n * steps,
        # Q in and the output out once a tile, a tile of K and one of V a step.
        l2_bytes=width * (2 * rows + 2.0 * tile_n * steps) + parts,
    )


def _fused_attention(problem: AttentionProblem, config: Config, gpu: Gpu) -> Work:
    groups = config["warp_groups"]
    return _attention(
        problem,
        gpu,
        tile_m=WGMMA_M * groups,
        tile_n=config["tile_n"],
        columns=instance(problem.head_dim),
        threads=WARP_GROUP * (groups + 1),
        smem=legality.smem_bytes(problem, config),
        blocks_per_sm=config.get("blocks_per_sm", 1),
        packed=config.get("packed_heads", 1),
        pads=config.get("pads_heads", False),
        splits=config.get("splits", 1),
    )


def _triton_attention(problem: AttentionProblem, config: Config, gpu: Gpu) -> Work:
    work = _attention(
        problem,
        gpu,
        tile_m=config["block_m"],
        tile_n=config["block_n"],
        columns=triton_attention.padded(problem.head_dim),
        threads=WARP * config["num_warps"],
        smem=triton_attention.smem_bytes(problem, config, gpu),
        blocks_per_sm=triton_attention.blocks_per_sm(problem, config, gpu),
        packed=config.get("packed_heads", 1),
    )
    return replace(work, wgmma=0)  # which instructions Triton chooses is not known here


def _cutlass_fmha(problem: AttentionProblem, config: Config, gpu: Gpu) -> Work:
    shape = FmhaShape.of(problem, config)
    return _attention(
        problem,
        gpu,
        tile_m=shape.tile_m,
        tile_n=shape.tile_n,
        columns=shape.head_tile,
        threads=shape.threads,
        smem=shape.smem_bytes,
        blocks_per_sm=shape.resident_blocks,
        launches=len(family(config.family).launches(problem, config, 1.0)),
    )


def _gemm(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    shape = oriented(problem, config["swap_ab"])
    tile_m, tile_n, tile_k = config["tile_m"], config["tile_n"], config["tile_k"]
    cluster_m, cluster_n = config["cluster_m"], config["cluster_n"]
    schedule = config["kernel_schedule"]
    blocks = ceil(shape.m / tile_m) * ceil(shape.n / tile_n) * shape.batch
    steps = blocks * ceil(shape.k / tile_k)
    _, smem = smem_bytes(problem, config)
    resident = 1
    threads = WARP_GROUP * (3 if schedule == PINGPONG else 1 + CONSUMERS[schedule])
    if schedule == PLAIN:
        by_smem = SMEM_PER_SM_BYTES // (smem + SMEM_RESERVED_PER_BLOCK_BYTES)
        resident = max(1, min(by_smem, WARPS_PER_SM * WARP // threads))
    cluster = cluster_m * cluster_n
    width = DTYPE_BYTES[problem.dtype]
    return Work(
        kernel="gemm",
        launches=1,
        tiles=blocks * config.get("splits", 1),
        slots=gpu.sm_count // cluster * cluster * resident,
        is_even=config.get("decomposition_mode") != "StreamK",
        threads=threads,
        smem_bytes=smem,
        blocks_per_sm=resident,
        tensor_flops=2.0 * tile_m * tile_n * tile_k * steps,
        wgmma=steps * _wgmmas(tile_m, tile_n, tile_k) // problem.tensor_rate,
        exponentials=0.0,
        # Multicast: a block reads its share of a tile and has the rest from its cluster.
        l2_bytes=width * tile_k * (tile_m / cluster_n + tile_n / cluster_m) * steps
        + sum(operand.bytes for operand in problem.operands[2:]),
    )


def _block_scaled_gemm(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["split_k"]
    cluster = config["cluster_m"] * config["cluster_n"]
    along = block_scaled_gemm.tiles(problem, config)
    blocks = along[0] * along[1] * cluster
    steps = blocks * ceil(problem.k / SCALE_BLOCK)
    loaded = tile_m / config["cluster_n"] + tile_n / config["cluster_m"]
    return Work(
        kernel="block_scaled_gemm",
        launches=1,
        tiles=blocks * splits,
        slots=gpu.sm_count // (cluster * splits) * cluster * splits,
        is_even=True,
        threads=WARP_GROUP * (1 + min(2, tile_m // WGMMA_M)),
        smem_bytes=block_scaled_gemm.smem_bytes(config),
        blocks_per_sm=1,
        tensor_flops=2.0 * tile_m * tile_n * SCALE_BLOCK * steps,
        wgmma=steps * _wgmmas(tile_m, tile_n, SCALE_BLOCK) // problem.tensor_rate,
        exponentials=0.0,
        l2_bytes=SCALE_BLOCK * loaded * steps
        + sum(operand.bytes for operand in problem.operands[2:]),
    )


def _cluster_gemm(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["split_k"]
    along = cluster_gemm.tiles(problem, config)
    tiles, depth, resident = along[0] * along[1], cluster_gemm.BLOCK_K, config["blocks_per_sm"]
    steps = tiles * ceil(problem.k / depth)
    return Work(
        kernel="cluster_gemm",
        launches=1,
        tiles=tiles * splits,
        slots=gpu.sm_count // splits * splits * resident,
        is_even=True,
        threads=WARP_GROUP * (2 if tile_m <= WGMMA_M else 3),
        smem_bytes=cluster_gemm.smem_bytes(config),
        blocks_per_sm=resident,
        tensor_flops=2.0 * tile_m * tile_n * depth * steps,
        wgmma=steps * _wgmmas(tile_m, tile_n, depth),
        exponentials=0.0,
        # The blocks of a cluster add their sums through shared memory.
        l2_bytes=DTYPE_BYTES[problem.dtype] * depth * (tile_m + tile_n) * steps
        + sum(operand.bytes for operand in problem.operands[2:]),
    )


def _block_scaled_groups(problem: GroupedGemmProblem, config: Config, gpu: Gpu) -> Work:
    one = Config("block_scaled_gemm", {**config.params, "split_k": 1})
    return _of_groups(
        [
            _block_scaled_gemm(
                GemmProblem(rows, problem.n, problem.k, dtype=problem.dtype, scales="block"),
                one,
                gpu,
            )
            for rows in problem.rows
            if rows
        ],
        config.family,
    )


def _gemm_swiglu(problem: SwigluProblem, config: Config, gpu: Gpu) -> Work:
    """The product of both projections; half of its columns are stored, an exponential each."""
    found = _gemm(product_of(problem), config, gpu)
    return replace(
        found,
        kernel="gemm_swiglu",
        exponentials=float(problem.output.elements),
        l2_bytes=found.l2_bytes - problem.output.bytes,
    )


def _gemv(problem: GemmProblem, config: Config, gpu: Gpu) -> Work:
    rows, padded_k = gemv.block_rows(config), gemv.padded_k(problem, config)
    tiles = ceil(problem.n / rows) * problem.batch
    resident = config["blocks_per_sm"]
    slots = gpu.sm_count * resident
    a, *others = problem.operands
    # A block reads A once, and is one block of rows unless it is persistent.
    blocks = min(tiles, slots) if config["persistent"] else tiles
    return Work(
        kernel="gemv",
        launches=1,
        tiles=tiles,
        slots=slots,
        is_even=True,
        threads=gemv.block_threads(config),
        smem_bytes=gemv.smem_bytes(problem, config),
        blocks_per_sm=resident,
        tensor_flops=2.0 * gemv.MAX_ROWS * rows * padded_k * tiles,
        wgmma=0,
        exponentials=0.0,
        l2_bytes=a.bytes / problem.batch * blocks + sum(operand.bytes for operand in others),
    )


def _grouped_gemm(problem: GroupedGemmProblem, config: Config, gpu: Gpu) -> Work:
    each = [
        _gemm(
            GemmProblem(rows, problem.n, problem.k, dtype=problem.dtype),
            grouped_gemm.as_gemm(config),
            gpu,
        )
        for rows in problem.rows
        if rows
    ]
    _, smem = grouped_gemm.smem_bytes(problem, config)
    return replace(_of_groups(each, "grouped_gemm"), smem_bytes=smem)


def _of_groups(each: Sequence[Work], kernel: str) -> Work:
    """As many tiles as the groups have, each padded to whole ones."""
    return replace(
        each[0],
        kernel=kernel,
        tiles=sum(work.tiles for work in each),
        tensor_flops=total(each, "tensor_flops"),
        wgmma=total(each, "wgmma"),
        l2_bytes=total(each, "l2_bytes"),
    )


def _softmax(problem: SoftmaxProblem, config: Config, gpu: Gpu) -> Work:
    scores, probabilities = problem.operands
    part = 0.5 if problem.is_causal else 1.0
    threads = config["threads_per_row"] * config["rows_per_block"]
    # Registers are the least that hold a row; the compiler's own number is in the measurement.
    held = ceil(problem.cols / config["threads_per_row"]) if config["passes"] == 1 else 0
    by_registers = REGISTERS_PER_SM // (threads * max(32, held))
    resident = max(1, min(by_registers, WARPS_PER_SM * WARP // threads))
    return Work(
        kernel="softmax",
        launches=1,
        tiles=ceil(problem.batch * problem.rows / config["rows_per_block"]),
        slots=gpu.sm_count * resident,
        is_even=not problem.is_causal,
        threads=threads,
        smem_bytes=0,
        blocks_per_sm=resident,
        tensor_flops=0.0,
        wgmma=0.0,
        exponentials=part * EXPONENTIALS[config["passes"]] * scores.elements,
        l2_bytes=part * config["passes"] * scores.bytes + probabilities.bytes,
    )


def _three_kernels(problem: AttentionProblem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
    heads = config["heads_per_launch"]
    chunks = problem.batch * problem.heads_q // heads
    # The heads of one launch, as a problem of their own.
    key_heads = max(1, heads * problem.heads_kv // problem.heads_q)
    chunk = replace(problem, batch=1, heads_q=heads, heads_kv=key_heads)
    found = []
    for name, part in family(config.family).stages(chunk).items():
        (work,) = works(part, config.stages[name], gpu)
        found.append(replace(work, kernel=name, launches=chunks))
    return tuple(found)


def _two_kernels(problem: AttentionProblem, config: Config, gpu: Gpu) -> Iterator[Work]:
    """Each kernel over all launches, as if they were equal: under a causal mask the later rows'
    have more to do.
    """
    heads = problem.batch * problem.heads_q
    rows = min(config["rows_per_launch"], problem.seqlen_q)
    launches = heads // config["heads_per_launch"] * ceil(problem.seqlen_q / rows)
    width, tile_n = DTYPE_BYTES[problem.dtype], config["tile_n"]
    for stage in two_kernel_attention.STAGES:
        groups, depth = config[f"{stage}_groups"], config[f"{stage}_stages"]
        columns, tile_m = two_kernel_attention.columns(problem, stage), WGMMA_M * groups
        row_blocks, resident = ceil(rows / tile_m), config[f"{stage}_blocks_per_sm"]
        starts = range(0, problem.seqlen_q, tile_m)
        seen = (problem.keys_of(start, start + tile_m - 1) for start in starts)
        steps = heads * sum(ceil(len(keys) / tile_n) for keys in seen) / launches
        is_scores, slices = stage == "scores", ceil(problem.head_dim / columns)
        operand = tile_n * columns * slices
        # The probabilities are written once; each slice of the columns reads them.
        moved = tile_m * tile_n * (1 if is_scores else slices) + operand
        if is_scores and problem.bias:
            moved += tile_m * tile_n
        ends = config["heads_per_launch"] * rows * problem.head_dim
        yield Work(
            kernel=stage,
            launches=launches,
            tiles=row_blocks
            * config["heads_per_launch"]
            * (config["splits"] if is_scores else slices),
            slots=gpu.sm_count * resident,
            is_even=not problem.is_causal,
            threads=WARP_GROUP * (groups + 1),
            smem_bytes=two_kernel_attention.smem_bytes(problem, stage, tile_n, groups, depth),
            blocks_per_sm=resident,
            tensor_flops=2.0 * tile_m * operand * steps,
            wgmma=steps
            * (
                _wgmmas(tile_m, tile_n, columns)
                if is_scores
                else slices * _wgmmas(tile_m, columns, tile_n)
            ),
            exponentials=(
                (3.0 if problem.softcap else 1.0) * tile_m * tile_n * steps if is_scores else 0.0
            ),
            l2_bytes=width * (moved * steps + ends),
        )
