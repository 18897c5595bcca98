"""GEMM for products with few tiles: clusters divide K, or every block reads its weights once.

Its template has a main loop of its own. A swapped config computes D^T = B^T A^T: all rows of A are
the columns of one tile. The weights then come from memory once. `split_k` blocks of a cluster
divide K between them. They add their sums through each other's shared memory in a fixed order, so
there is neither a workspace nor a second kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, prod
from typing import Any, ClassVar

from tuner.config import Config, Value
from tuner.families import product_work
from tuner.families.arguments import Arguments
from tuner.families.base import Domain, KernelSpec, Launch, Ref, Strides
from tuner.families.block_scaled_gemm import (
    RASTER_ORDERS,
    BlockScaledGemm,
    launch_choices,
    launched,
    loop_work,
)
from tuner.families.block_scaled_gemm.legality import MAX_SUMS, split_violations, stored_violations
from tuner.families.block_scaled_gemm.shape import (
    BARRIER_BYTES,
    INSTRUCTION_ROWS,
    MAX_STAGES,
    MIN_STAGES,
)
from tuner.families.chip_work import Work
from tuner.families.gemm import legality_facts
from tuner.families.invariance import ReductionClass
from tuner.families.strided_product import StridedProduct, as_gemm, room, tiles
from tuner.hardware import (
    GRAPH_LAUNCH_US,
    HOPPER,
    TENSOR_FLOPS_PER_CLOCK_SM,
    WGMMA_K_BYTES,
    Gpu,
)
from tuner.problem import ACTIVATIONS, DTYPE_BYTES, E4M3, DType, GemmProblem, Problem

KERNEL = "cluster_gemm"
"""Name of the one kernel."""
TEMPLATE = "cluster_gemm.cu.j2"
WORDS = {"dtype": ("float16", "bfloat16"), "activation": ("", *ACTIVATIONS)}
"""Text that the template takes, by variable."""
MAX_ROWS = 16384
"""Most rows of A that are served."""
FEW = 256
"""Most rows or columns of D that are served. With more of both, tiles fill the chip and tensor
cores bound the product: CUTLASS's kernels are faster."""
BLOCK_K, BLOCK_BYTES = 64, 128
"""Elements of K of a stage, and their bytes: the widest swizzle."""
SPLITS = 1, 2, 4, 8
MAX_SPLITS = max(SPLITS)

#: Bandwidth over the data sheet's, bytes of the L2 that a multiprocessor gets a clock, clock under
#: such products over the highest (a guess).
MEMORY_EFFICIENCY, L2_BYTES_PER_CLOCK, CLOCK_SHARE = 0.75, 48.0, 0.85
#: Clocks of a kernel's start, of a tile's end, of a cluster's two meetings; bytes that its blocks
#: exchange a clock (a guess). All but the guesses are nearest to 60 times of five products on
#: an H200 (27 November 2026), with a standard deviation of 20 %.
START_CLOCKS, TILE_CLOCKS = 8500.0, 3600.0
MEETING_CLOCKS, EXCHANGED_BYTES_PER_CLOCK = 4500.0, 32.0


class ClusterGemm(StridedProduct):
    """One kernel; its raster and its launch are run-time choices."""

    name: ClassVar[str] = "cluster_gemm"
    op: ClassVar[str] = GemmProblem.op
    proof_draws: ClassVar[str] = "gemm.draws:ProductDraw"
    capabilities = (HOPPER,)
    work_terms: ClassVar[tuple[str, ...]] = product_work.TERMS
    amounts = staticmethod(product_work.work)
    runtime_parameters: ClassVar[frozenset[str]] = BlockScaledGemm.runtime_parameters
    tried_calls = ({"raster_order": "AlongM", "max_swizzle_size": 1, "pdl": True},)
    domains: ClassVar[Mapping[str, Domain]] = {
        "swap_ab": (False, True),
        "tile_m": (64, 128, 256),
        "tile_n": (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256),
        "stages": range(MIN_STAGES, MAX_STAGES + 1),
        "split_k": SPLITS,
        "serial_parts": (8,),
        "blocks_per_sm": (1, 2),
        "raster_order": tuple(RASTER_ORDERS),
        "max_swizzle_size": (1, 2, 4, 8, 16),
        "pdl": (False, True),
    }
    optional = frozenset({"serial_parts"})
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {"stages": (2, 3, 4, 5, 6, 8, 12, 16)}

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, GemmProblem):
            return reason
        if problem.dtype == E4M3 or problem.scales or problem.dtype_d != problem.dtype:
            return f"{self.name} takes fp16 and bf16 without factors, D of the same type"
        if problem.layout_a != "row" or problem.layout_b != "col":
            return f"{self.name} wants K contiguous in both operands"
        if problem.batch > 1 or problem.has_residual:
            return f"{self.name} has neither a batch nor a residual"
        if problem.m > MAX_ROWS:
            return f"{self.name} serves M up to {MAX_ROWS}, not {problem.m}"
        if min(problem.m, problem.n) > FEW:
            return f"{self.name} serves up to {FEW} rows or columns, not {problem.m} x {problem.n}"
        if problem.k % 8 or problem.n % 8:
            return f"N={problem.n} and K={problem.k} are not multiples of 8 (TMA)"
        return ""

    def supports_config(self, problem: Problem, config: Config, gpu: Gpu) -> str:
        """Kernels of eight parts of K take any number of rows, for the batch-invariant mode."""
        is_divided = MAX_SPLITS in (config.get("serial_parts"), config.get("split_k"))
        is_of_mode = is_divided and not config.get("swap_ab")
        if is_of_mode and isinstance(problem, GemmProblem):
            problem = replace(problem, m=min(problem.m, FEW))
        return self.supports(problem, gpu)

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        gemm, parts = as_gemm(problem, ClusterGemm.name), config.get("serial_parts", 1)
        reasons = _tile_violations(config) + split_violations(gemm, config, BLOCK_K)
        if parts > 1 and config["split_k"] > 1:
            reasons.append("serial_parts goes without split_k")
        if parts > ceil(gemm.k / BLOCK_K):
            reasons.append(f"serial_parts={parts} has more parts than K={gemm.k} has blocks")
        return reasons

    def _groups(self, problem: GemmProblem, gpu: Gpu) -> Iterator[list[Config]]:
        for config in _compiled(problem, gpu):
            yield launch_choices(problem, config)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problem = as_gemm(problem, ClusterGemm.name)
        variables = {
            **{k: v for k, v in config.params.items() if k not in self.runtime_parameters},
            "dtype": problem.dtype,
            "bias": problem.has_bias,
            "activation": problem.activation,
        }
        return {KERNEL: KernelSpec(TEMPLATE, variables, WORDS, arguments_of(problem))}

    def _launches(
        self, problem: GemmProblem, config: Config, scale: float, strides: Strides
    ) -> list[Launch]:
        a, b, *more, d = problem.operands
        along_a, along_b = (strides.get(o.name, o.strides) for o in (a, b))
        integers = {
            **{"m": problem.m, "n": problem.n, "k": problem.k},
            **{"lda": along_a[1], "ldb": along_b[2], "ldd": problem.n},
            **launched(config),
        }
        tensors = {operand.name: Ref(operand.name) for operand in (a, b, d, *more)}
        arguments = arguments_of(problem)
        return [Launch.named(KERNEL, arguments, tensors, integers, {"alpha": scale})]

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        gemm = as_gemm(problem, self.name)
        return (loop_work(self.name, gemm, config, gpu, BLOCK_K, smem_bytes(config)),)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """The busiest multiprocessor's clocks beside memory's time, nearly the longer of them."""
        problem = as_gemm(problem, ClusterGemm.name)
        tiles_x, tiles_y = tiles(problem, config)
        tile_m, tile_n, splits = (int(config[k]) for k in ("tile_m", "tile_n", "split_k"))
        resident = int(config["blocks_per_sm"])
        steps = ceil(ceil(problem.k / BLOCK_K) / splits)
        rounds = ceil(tiles_x * tiles_y * splits / gpu.sm_count)
        tensor = 2 * tile_m * tile_n * BLOCK_K / TENSOR_FLOPS_PER_CLOCK_SM
        step = max(tensor, (tile_m + tile_n) * BLOCK_BYTES / L2_BYTES_PER_CLOCK)
        end = (TILE_CLOCKS + tile_m * tile_n / 16) / resident
        if splits > 1:
            end += MEETING_CLOCKS + 4 * tile_m * tile_n / EXCHANGED_BYTES_PER_CLOCK
        clocks = START_CLOCKS + rounds * (steps * step + end)
        compute_us = clocks / (CLOCK_SHARE * gpu.clock_max_mhz)
        memory_us = problem.bytes / (gpu.memory_gbs * MEMORY_EFFICIENCY * 1e3)
        # Multiprocessors without a block leave a part of the bandwidth.
        busy = min(1.0, tiles_x * tiles_y * splits * resident / gpu.sm_count)
        longest = (compute_us**4 + (memory_us / busy**0.5) ** 4) ** 0.25
        return float(GRAPH_LAUNCH_US * (0.5 if config["pdl"] else 1.0) + longest)

    def tiling(self, config: Config) -> product_work.ProductTiling:
        return product_work.ProductTiling(
            rows=int(config["tile_m"]),
            columns=int(config["tile_n"]),
            depth=BLOCK_K,
            is_swapped=bool(config["swap_ab"]),
            resident=int(config["blocks_per_sm"]),
            swizzle=1,
            along_columns=config["raster_order"] == "AlongN",
            splits=int(config["split_k"]),
        )

    def splitter(self, config: Config, gpu: Gpu) -> Callable[[Any], Sequence[int]]:
        return lambda problem: (int(config["split_k"]),)

    def joins(self, config: Config) -> bool:
        return True

    def overlapped(self, config: Config) -> Config:
        return Config(config.family, {**config.params, "pdl": True})

    def served(self, problem: Problem, config: Config) -> Config:
        return Config(config.family, {**config.params, "pdl": False})

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        """Undivided sums are those of `gemm`."""
        gemm = as_gemm(problem, ClusterGemm.name)
        splits = _parts(config)
        has_own = gemm.activation not in ("", "relu")
        return ReductionClass(
            depth=WGMMA_K_BYTES // DTYPE_BYTES[gemm.dtype],
            splits=splits,
            step=BLOCK_K if splits > 1 else 0,
            merge="cluster" if splits > 1 else "",
            epilogue=f"{self.name} {gemm.epilogue}" if has_own else "",
        )

    def invariant_kernels(self, problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
        if not isinstance(problem, GemmProblem) or problem.n > NARROW or problem.k < LONG:
            return
        if replace(SMALL, m=problem.m, n=problem.n, k=problem.k) == problem:
            for config, (at_once, end_us, us) in KERNELS.items():
                rounds = ceil(prod(tiles(problem, config)) / at_once)
                yield rounds * (end_us + us * problem.k / 1024), config

    def invariant_builds(self, dtype: DType) -> Iterator[tuple[Config, Problem]]:
        if dtype == SMALL.dtype:
            yield from ((config, SMALL) for config in KERNELS)

    def legality_facts(self, problem: Problem) -> Hashable:
        one = as_gemm(problem, ClusterGemm.name)
        facts, steps = legality_facts(problem, one.m, one.n, one.k, one.dtype), -(-one.k // BLOCK_K)
        return facts, steps if steps < MAX_SPLITS else MAX_SPLITS, one.m <= MAX_ROWS


def arguments_of(problem: GemmProblem) -> Arguments:
    """Declaration of a launch's arguments."""
    return Arguments(
        tensors=("a", "b", "d", *(("bias",) if problem.has_bias else ())),
        integers=(
            *("m", "n", "k"),
            *("lda", "ldb", "ldd"),
            *("max_swizzle_size", "raster_order", "pdl"),
        ),
        scalars=("alpha",),
    )


def smem_bytes(config: Config) -> int:
    """Shared memory of a block."""
    stage = (int(config["tile_m"]) + int(config["tile_n"])) * BLOCK_BYTES + BARRIER_BYTES
    return int(config["stages"]) * stage


def deepened(config: Config) -> Config:
    """A config with the deepest pipeline that fits."""
    stage = smem_bytes(Config(config.family, {**config.params, "stages": 1}))
    stages = min(room(config) // stage, MAX_STAGES)
    return Config(config.family, {**config.params, "stages": stages})


def _parts(config: Config) -> int:
    """Parts of K, whether a cluster's blocks or one block adds them."""
    return int(config.get("serial_parts", config.get("split_k", 1)))


def _of_mode(tile_m: int, tile_n: int, resident: int = 1, *, is_serial: bool = False) -> Config:
    """A kernel whose cluster, or whose block, adds eight parts of K."""
    params: dict[str, Value] = {
        **{"swap_ab": False, "tile_m": tile_m, "tile_n": tile_n, "stages": MIN_STAGES},
        **{"split_k": 1 if is_serial else MAX_SPLITS, "blocks_per_sm": resident},
        **{"raster_order": "AlongM", "max_swizzle_size": 8 if is_serial else 1, "pdl": True},
        **({"serial_parts": MAX_SPLITS} if is_serial else {}),
    }
    return deepened(Config(ClusterGemm.name, params))


KERNELS: Mapping[Config, tuple[int, float, float]] = {
    _of_mode(64, 64, 2): (16, 4.0, 0.95),
    _of_mode(128, 128): (14, 3.3, 1.15),
    _of_mode(128, 256): (14, 4.3, 1.9),
    _of_mode(64, 64, 2, is_serial=True): (132, 1.0, 3.0),
    _of_mode(128, 128, is_serial=True): (132, 1.5, 5.5),
}
"""Kernels of the batch-invariant mode alone, for narrow layers of long sums. Few rows have clusters
that divide K. Many have blocks that add the same parts one after another.

With tiles at once, and microseconds of their ends and of 1024 of K: near to 26 times of an H200 (29
November 2026). Fewer clusters than its multiprocessors hold run at once.
"""
NARROW, LONG = 2048, 4096
"""Most columns and least K of such layers: others' whole sums are expected to be as fast."""
SMALL = GemmProblem(FEW, 1024, 1024, dtype="bfloat16")
"""A product of their calls."""


def _tile_violations(config: Config) -> list[str]:
    tile_m, resident = int(config["tile_m"]), int(config["blocks_per_sm"])
    sums = max(1, tile_m // (2 * INSTRUCTION_ROWS)) * int(config["tile_n"]) // 2
    sums *= 2 if "serial_parts" in config.params else 1
    most = MAX_SUMS if resident == 1 else MAX_SUMS // 3
    reasons = stored_violations(config, sums, most, smem_bytes(config))
    if resident > 1 and tile_m > INSTRUCTION_ROWS:
        reasons.append(f"tile_m={tile_m} leaves no registers to a second block")
    return reasons


#: Widths of tiles that hold rows of A, swapped, and columns of B.
_WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_COLUMNS = (32, 64, 96, 128, 192, 256)
#: Tiles along A's rows at most, for which swapped operands read the weights.
_MAX_READS = 3
#: Blocks a multiprocessor at most, and least steps of each, for which K is worth dividing.
_MAX_SPLIT_ROUNDS, _MIN_SPLIT_STEPS = 2, 4


def _compiled(problem: GemmProblem, gpu: Gpu) -> Iterator[Config]:
    """Compile-time parameters worth a kernel, in a fixed order."""
    steps = ceil(problem.k / BLOCK_K)
    shapes = [(True, *tile) for tile in product((64, 128), _WIDTHS)]
    shapes += [(False, *tile) for tile in product((64, 128), _COLUMNS)]
    for (swapped, tile_m, tile_n), splits, resident in product(shapes, (1, 2, 4, 8), (1, 2)):
        rows, columns = (problem.n, problem.m) if swapped else (problem.m, problem.n)
        # A tile that is wider or higher than needed multiplies in vain.
        if swapped and tile_n > min((n for n in _WIDTHS if n >= columns), default=tile_n):
            continue
        if tile_m > INSTRUCTION_ROWS and rows <= tile_m // 2:
            continue
        if swapped and ceil(columns / tile_n) > _MAX_READS:
            continue
        count = ceil(rows / tile_m) * ceil(columns / tile_n)
        is_full = count * splits > _MAX_SPLIT_ROUNDS * gpu.sm_count
        if is_full and (splits > 1 or problem.m > FEW):
            continue
        if splits > 1 and steps < _MIN_SPLIT_STEPS * splits:
            continue
        params: dict[str, Value] = {
            **{"swap_ab": swapped, "tile_m": tile_m, "tile_n": tile_n, "stages": MIN_STAGES},
            **{"split_k": splits, "blocks_per_sm": resident},
        }
        yield deepened(Config(ClusterGemm.name, params))
