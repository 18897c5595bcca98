"""GEMM of e4m3 operands with factors of blocks, 1 x 128 of A and 128 x 128 of B.

Its template has a main loop of its own: TMA-fed, the tensor cores' sums added to fp32 sums with
their factors after every 128 of K. So it also serves promoted sums (`fast_accum=0`), whose factors
are of rows and columns or of whole matrices.

A swapped config computes D^T = B^T A^T, so that few rows of A are the narrow side of a tile.
`split_k` blocks of a cluster divide K between them and add their sums in a fixed order, as one
block does with `serial_parts`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import ceil, prod
from typing import ClassVar

from tuner.config import Config, Value
from tuner.families.arguments import Arguments
from tuner.families.base import Domain, KernelSpec, Launch, Ref, Strides
from tuner.families.block_scaled_gemm import of_rows, serial
from tuner.families.block_scaled_gemm.expected import Rates, estimate_us
from tuner.families.block_scaled_gemm.legality import (
    UNROLL,
    ahead_violations,
    extent_conflict,
    violations,
)
from tuner.families.block_scaled_gemm.shape import (
    BOX_COLUMNS,
    INSTRUCTION_ROWS,
    LOADS,
    MAX_READS,
    MAX_STAGES,
    MIN_STAGES,
    deepened,
    smem_bytes,
)
from tuner.families.chip_work import WGMMA_M, Work, wgmmas
from tuner.families.invariance import ReductionClass
from tuner.families.strided_product import (
    StridedProduct,
    as_gemm,
    operands_conflict,
    tiles,
)
from tuner.hardware import (
    E4M3_RATE,
    HOPPER,
    TENSOR_FLOPS_PER_CLOCK_SM,
    WARP_GROUP,
    WGMMA_K_BYTES,
    Gpu,
)
from tuner.problem import DTYPE_BYTES, E4M3, SCALE_BLOCK, DType, GemmProblem, Problem
from tuner.problem.gemm import SCALE_ROWS

KERNEL = "block_scaled_gemm"
"""Name of the one kernel."""
TEMPLATE = "block_scaled_gemm.cu.j2"
#: Promoted products: their types, and whether sums are promoted. With factors of rows all are.
PROMOTED = E4M3, "bfloat16", True
RASTER_ORDERS = {"AlongM": 1, "AlongN": 2}
MAX_BOXES = 4
#: A first guess, to be fitted: bytes of the L2 that a multiprocessor gets a clock, all of them
#: loading.
L2_BYTES_PER_CLOCK = 60.0
#: Clocks of a tile's start and end, and those of its sums' way to memory, a column of a warp group:
#: read off 14 kernels at (4096,7168,2048) on one H200, which stored from registers. Of those that
#: store boxes the second is a guess.
TILE_CLOCKS, BOXED_TILE_CLOCKS, COLUMN_CLOCKS = 2800.0, 900.0, 6.0
SMEM_BYTES_PER_CLOCK = 128
STEP_CLOCKS = 50.0
#: Clocks of a step for each row whose factor a warp copies: an H100, 25
#: November 2026, one kernel of 256 rows with such copies and without.
FACTOR_CLOCKS = 0.45
#: Clocks of a launch beside its tiles, where rates are not fitted.
UNFITTED_START_CLOCKS = 3000.0
#: Of a cluster that divides K: its two meetings, and bytes that its blocks exchange a clock.
MEETING_CLOCKS, EXCHANGED_BYTES_PER_CLOCK = 1500.0, 16.0


class BlockScaledGemm(StridedProduct):
    """One kernel; its raster and its launch are run-time choices."""

    name: ClassVar[str] = "block_scaled_gemm"
    op: ClassVar[str] = GemmProblem.op
    fit = "rates", "block_scaled_gemm.rates_fit"
    proof_draws: ClassVar[str] = "block_scaled_gemm.draws:ScaledDraw"
    capabilities = (HOPPER,)
    runtime_parameters: ClassVar[frozenset[str]] = frozenset(
        {"raster_order", "max_swizzle_size", "pdl"}
    )
    domains: ClassVar[Mapping[str, Domain]] = {
        "swap_ab": (False, True),
        "tile_m": (64, 128, 256),
        "tile_n": (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192),
        "stages": range(MIN_STAGES, MAX_STAGES + 1),
        "cluster_m": (1, 2),
        "cluster_n": (1, 2),
        "split_k": (1, 2, 4, 8),
        "store_buffers": (0, 1, 2, 3, MAX_BOXES),
        "raster_order": tuple(RASTER_ORDERS),
        "max_swizzle_size": (1, 2, 4, 8, 16),
        "pdl": (False, True),
        "unroll": (2, 4, 8),
        "tma_factors": (True,),
        "uniform_branch": (True,),
        "ahead": (True,),
        "turns": (True,),
        "fetch_factors": (True,),
        "clips_rows": (True,),
        "vector_merge": (True,),
        "blocks_per_sm": (2,),
        "serial_parts": (2, 4, 8),
        "staged_columns": (True,),
        "elected": (True,),
    }
    optional = frozenset(
        {
            *("unroll", "tma_factors", "uniform_branch", "ahead"),
            *("turns", "fetch_factors", "clips_rows", "vector_merge", "blocks_per_sm"),
            *("serial_parts", "staged_columns", "elected"),
        }
    )
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {"stages": (2, 3, 4, 5, 6, 8, 12, 16)}

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, GemmProblem):
            return reason
        is_slow = problem.scales == "row" or not problem.fast_accum
        if problem.scales != "block" and (problem.dtype, problem.dtype_d, is_slow) != PROMOTED:
            return (
                f"{self.name} takes factors of blocks: scales=block, or dtype=e4m3 with "
                "dtype_d=bf16 and fast_accum=0 or scales=row"
            )
        return extent_conflict(problem.m, problem.n, problem.k)

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return violations(as_gemm(problem, self.name), config)

    def _groups(self, problem: GemmProblem, gpu: Gpu) -> Iterator[list[Config]]:
        for config in _compiled(problem, gpu):
            yield launch_choices(problem, config, (1, 4, 8, 16))

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        is_promoted = as_gemm(problem, BlockScaledGemm.name).scales != "block"
        return {KERNEL: spec_of(config, is_grouped=False, is_promoted=is_promoted)}

    def stride_conflict(self, problem: GemmProblem, config: Config, strides: Strides) -> str:
        if reason := operands_conflict(problem, strides):
            return reason
        free = [operand.name for operand in problem.operands[:4]]
        if fixed := strides.keys() - set(free):
            return f"{', '.join(sorted(fixed))}: only {', '.join(free)} have free strides"
        a_block, a_row = strides.get(free[2], (0, 1))[-2:]
        if "tma_factors" in config.params and (a_row != 1 or a_block % SCALE_ROWS):
            return f"scale_a's strides {a_block}, {a_row} are not TMA's (tma_factors)"
        return ""

    def _launches(
        self, problem: GemmProblem, config: Config, scale: float, strides: Strides
    ) -> list[Launch]:
        a, b, scale_a, scale_b, d = problem.operands
        along = {o.name: strides.get(o.name, o.strides) for o in problem.operands}
        if problem.scales == "block":
            (a_block, a_row), (b_column, b_block) = along[scale_a.name], along[scale_b.name]
        else:  # one for all of K, of a row and of a column, or of all
            a_row = b_column = int(problem.scales == "row")
            a_block = b_block = 0
        integers = {
            **{"m": problem.m, "n": problem.n, "k": problem.k},
            **{"lda": along[a.name][1], "ldb": along[b.name][2], "ldd": along[d.name][1]},
            **{"scale_a_row": a_row, "scale_a_block": a_block},
            **{"scale_b_column": b_column, "scale_b_block": b_block},
            **launched(config),
            **{"groups": 1, "scale_b_group": 0},
        }
        tensors = {operand.name: Ref(operand.name) for operand in problem.operands}
        arguments = arguments_of(is_grouped=False)
        return [Launch.named(KERNEL, arguments, tensors, integers, {"alpha": scale})]

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        scales = as_gemm(problem, BlockScaledGemm.name).scales
        return reduction_of(config, scales)

    def invariant_kernels(self, problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
        """Kernels of `serial_parts`; of factors of rows those that cuBLASLt may be faster than."""
        if isinstance(problem, GemmProblem) and problem.scales == "block":
            for config, rates in serial.KERNELS.items():
                us = estimate_us(problem, config, gpu, Rates(*rates), UNFITTED_START_CLOCKS)
                yield us, config
        elif isinstance(problem, GemmProblem) and problem.scales == "row":
            yield from of_rows.slower(problem, gpu)

    def invariant_builds(self, dtype: DType) -> Iterator[tuple[Config, Problem]]:
        """The same; `rule.targets` has them to be built."""
        small = GemmProblem(512, 1024, 1024, dtype=E4M3, scales="block")
        yield from ((config, small) for config in serial.KERNELS)
        yield from ((config, replace(small, scales="row")) for config in of_rows.KERNELS)

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        gemm = as_gemm(problem, self.name)
        return (loop_work(self.name, gemm, config, gpu, SCALE_BLOCK, smem_bytes(config)),)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """`estimate_us` by first guesses of the kernel's rates."""
        gemm = as_gemm(problem, BlockScaledGemm.name)
        return estimate_us(gemm, config, gpu, rates_of(config), UNFITTED_START_CLOCKS)


def reduction_of(config: Config, scales: str = "block") -> ReductionClass:
    """Order of additions of the template's kernels: a block's sum is added with its factors.

    Factors for all of K follow the sum. The instruction's rows come first: A's, or B's if swapped.

    Args:
        config: kernel of a product or of a grouped one.
        scales: factors that the kernel multiplies by.
    """
    splits = int(config.get("serial_parts", config.get("split_k", 1)))
    return ReductionClass(
        depth=WGMMA_K_BYTES,
        promoted=SCALE_BLOCK,
        splits=splits,
        step=SCALE_BLOCK if splits > 1 else 0,
        merge="cluster" if splits > 1 else "",
        epilogue=f"{'b' if config['swap_ab'] else 'a'}'s factors first" if scales == "row" else "",
    )


def rates_of(config: Config) -> Rates:
    """Rates by the tile's products, bytes and stores."""
    splits, area = int(config.get("split_k", 1)), int(config["tile_m"] * config["tile_n"])
    end = BOXED_TILE_CLOCKS if config["store_buffers"] else TILE_CLOCKS
    end += COLUMN_CLOCKS * area / INSTRUCTION_ROWS / min(2, config["tile_m"] // 64)
    if splits > 1:
        end += MEETING_CLOCKS + 4 * area / EXCHANGED_BYTES_PER_CLOCK
    return Rates(step_clocks(config) * int(config.get("blocks_per_sm", 1)), end)


def spec_of(config: Config, *, is_grouped: bool, is_promoted: bool = False) -> KernelSpec:
    """The kernel of a config: of one product, of groups, or promoted with factors for all of K."""
    at_run_time = BlockScaledGemm.runtime_parameters
    compiled = {k: v for k, v in config.params.items() if k not in at_run_time}
    alone: dict[str, Value] = {"split_k": 1}
    variables = {**alone, **compiled, "grouped": is_grouped}
    if is_promoted:
        variables["scaled_after"] = True
    return KernelSpec(TEMPLATE, variables, arguments=arguments_of(is_grouped=is_grouped))


def arguments_of(*, is_grouped: bool) -> Arguments:
    """Declaration of a launch's arguments."""
    return Arguments(
        tensors=("a", "b", "d", "scale_a", "scale_b", *(("offsets",) if is_grouped else ())),
        integers=(
            *("m", "n", "k"),
            *("lda", "ldb", "ldd"),
            *("scale_a_row", "scale_a_block", "scale_b_column", "scale_b_block"),
            *("max_swizzle_size", "raster_order", "pdl"),
            *("groups", "scale_b_group"),
        ),
        scalars=("alpha",),
    )


def launched(config: Config) -> dict[str, int]:
    """Integer arguments that the run-time parameters set."""
    return {
        "max_swizzle_size": config["max_swizzle_size"],
        "raster_order": RASTER_ORDERS[config["raster_order"]],
        "pdl": int(config["pdl"]),
    }


def step_clocks(config: Config) -> float:
    """Clocks of 128 of K of a tile: the longest of products, shared memory, and the tile's way from
    the L2. A fixed part and the copies of factors come on top.
    """
    rows = int(config["tile_n" if config["swap_ab"] else "tile_m"])
    copied_rows = 0 if "tma_factors" in config.params else rows
    tile_m, tile_n = int(config["tile_m"]), int(config["tile_n"])
    instructions = tile_m // INSTRUCTION_ROWS
    rate = TENSOR_FLOPS_PER_CLOCK_SM * E4M3_RATE
    tensor = 2 * tile_m * tile_n * SCALE_BLOCK / rate
    read = instructions * (INSTRUCTION_ROWS + tile_n) * SCALE_BLOCK
    copied = (tile_m + tile_n) * SCALE_BLOCK
    loaded = (tile_m / config["cluster_n"] + tile_n / config["cluster_m"]) * SCALE_BLOCK
    shared = (read + copied / 2) / SMEM_BYTES_PER_CLOCK
    longest = max(tensor, shared, loaded / L2_BYTES_PER_CLOCK)
    return float(longest + STEP_CLOCKS + FACTOR_CLOCKS * copied_rows)


def loop_work(
    kernel: str, problem: GemmProblem, config: Config, gpu: Gpu, depth: int, smem: int
) -> Work:
    """Demands of a launch of such a main loop on the chip.

    Args:
        kernel: name of the kernel.
        problem: the product.
        config: the kernel's config.
        gpu: GPU that it runs on.
        depth: elements of K of a stage.
        smem: shared memory of a block, bytes.
    """
    tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["split_k"]
    along_m, along_n = config.get("cluster_m", 1), config.get("cluster_n", 1)
    cluster, resident = along_m * along_n, int(config.get("blocks_per_sm", 1))
    blocks = prod(tiles(problem, config)) * cluster
    steps = blocks * ceil(problem.k / depth)
    loaded = DTYPE_BYTES[problem.dtype] * depth * (tile_m / along_n + tile_n / along_m)
    return Work(
        kernel=kernel,
        launches=1,
        tiles=blocks * splits,
        slots=gpu.sm_count // (cluster * splits) * cluster * splits * resident,
        is_even=True,
        threads=WARP_GROUP * (1 + min(2, tile_m // WGMMA_M)),
        smem_bytes=smem,
        blocks_per_sm=resident,
        tensor_flops=2.0 * tile_m * tile_n * depth * steps,
        wgmma=steps * wgmmas(tile_m, tile_n, depth) // problem.tensor_rate,
        exponentials=0.0,
        # The blocks of a cluster add their sums through shared memory.
        l2_bytes=loaded * steps + sum(operand.bytes for operand in problem.operands[2:]),
    )


#: Tiles of A's rows by B's columns, and, swapped, of B's columns by A's rows.
_TILES = (
    *product((128,), (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)),
    *product((256,), (64, 96, 112, 128)),
    *product((64,), (16, 32, 48, 64, 80, 96, 112, 128, 160, 192)),
)
_SWAPPED = (*product((64, 128, 256), (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192)),)
#: Blocks of a cluster along both sides of its tiles and along K.
_CLUSTERS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 4), (1, 1, 8))
#: Blocks a multiprocessor at most, and least blocks of K of each, for which K is worth dividing.
_MAX_SPLIT_ROUNDS, _MIN_SPLIT_STEPS = 2, 2
#: Tiles from which on neighbours are worth having share a tile by multicast: half of the chip.
_MIN_CLUSTERED = 66


def _compiled(problem: GemmProblem, gpu: Gpu) -> Iterator[Config]:
    """Compile-time parameters worth a kernel, in a fixed order."""
    steps = ceil(problem.k / SCALE_BLOCK)
    loops: tuple[dict[str, Value], ...] = ({}, {"unroll": UNROLL, "tma_factors": True})
    if problem.scales != "block":
        loops = ({"unroll": UNROLL},)
    oriented = [(False, tile) for tile in _TILES] + [(True, tile) for tile in _SWAPPED]
    for swapped, (tile_m, tile_n) in oriented:
        rows, columns = (problem.n, problem.m) if swapped else (problem.m, problem.n)
        widths = {width for _, width in (_SWAPPED if swapped else _TILES)}
        # A tile that is wider or higher than needed multiplies in vain.
        is_wide = tile_n > min((n for n in widths if n >= columns), default=tile_n)
        if is_wide or (tile_m > INSTRUCTION_ROWS and rows <= tile_m // 2):
            continue
        if swapped and ceil(columns / tile_n) > MAX_READS:
            continue
        count = ceil(rows / tile_m) * ceil(columns / tile_n)
        for cluster_m, cluster_n, splits in _CLUSTERS:
            is_full = count * splits > _MAX_SPLIT_ROUNDS * gpu.sm_count
            if splits > 1 and (is_full or steps < _MIN_SPLIT_STEPS * splits):
                continue
            if cluster_m * cluster_n > 1 and count < _MIN_CLUSTERED:
                continue
            buffers = _buffers(tile_m, tile_n) if not swapped and splits == 1 else [0]
            kinds = loops
            loads = LOADS if cluster_m * cluster_n == 1 else {}
            merge: dict[str, Value] = {"vector_merge": True} if splits > 1 else {}
            if tile_m == INSTRUCTION_ROWS:
                kinds += tuple({**loop, "uniform_branch": True} for loop in loops if loop)
            if cluster_m * cluster_n == 1:
                kinds += _loops_ahead(problem.scales, swapped, tile_m, tile_n)
            for store_buffers, loop in product(buffers, kinds):
                params: dict[str, Value] = {
                    **{"swap_ab": swapped, "tile_m": tile_m, "tile_n": tile_n},
                    **{"stages": MIN_STAGES, "cluster_m": cluster_m, "cluster_n": cluster_n},
                    **{"split_k": splits, "store_buffers": store_buffers, "elected": True},
                    **loop,
                    **merge,
                    **(loads if loop.keys() & {"tma_factors", "ahead"} else {}),
                }
                yield deepened(Config(BlockScaledGemm.name, params))


def _loops_ahead(
    scales: str, swap_ab: bool, tile_m: int, tile_n: int
) -> tuple[dict[str, Value], ...]:
    """The loop with two blocks' products under way, where a tile has room for it."""
    loop: dict[str, Value] = {"unroll": UNROLL, "ahead": True}
    if scales == "block":
        loop["tma_factors"] = True
    if tile_m == INSTRUCTION_ROWS:
        loop["uniform_branch"] = True
    tile: dict[str, Value] = {"swap_ab": swap_ab, "tile_m": tile_m, "tile_n": tile_n}
    config = Config(BlockScaledGemm.name, {**tile, **loop})
    return () if ahead_violations(config, scales) else (loop,)


def _buffers(tile_m: int, tile_n: int) -> list[int]:
    """Numbers of a warp's boxes: all of its part of a tile, where they are few, and one."""
    boxes = max(1, tile_m // (2 * INSTRUCTION_ROWS)) * ceil(tile_n / BOX_COLUMNS)
    return sorted({min(boxes, MAX_BOXES), 1}, reverse=True)


def launch_choices(
    problem: GemmProblem, config: Config, bands: Collection[int] = (1,)
) -> list[Config]:
    """The run-time choices of one kernel that differ from one another for this shape."""
    least = min(tiles(problem, config))
    widths = [band for band in bands if band <= 2 * least] if least > 1 else [1]
    orders = RASTER_ORDERS if least > 1 else ("AlongM",)
    names = ("raster_order", "max_swizzle_size", "pdl")
    # Few rows lose up to 3 us as programmatic dependents, many rows nothing (one H100).
    return [
        Config(config.family, {**config.params, **dict(zip(names, choice, strict=True))})
        for choice in product(orders, widths, (True, False))
    ]
