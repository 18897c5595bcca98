"""GEMM through CUTLASS's CollectiveBuilder for Sm90: TMA, WGMMA, warp-specialised schedules.

Rules read in CUTLASS 4.2's headers name the file under ``include/cutlass`` that holds them; [c]
was compiled with nvcc 13.0. A swapped config computes D^T = B^T A^T: M and N, the operands and
their layouts change places, and D is written column-major. A bias of the columns is then one of the
rows, and a factor of each row one of each column.

Epilogues are CUTLASS's stock fusion operations, factors a tree of its nodes. Tables and formulas
are in `shape`, the rules in `legality`, the candidates in `space`, the estimate of their time in
`cost`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tuner.config import Config, Value
from tuner.families import product_work
from tuner.families.arguments import Arguments
from tuner.families.base import (
    Domain,
    KernelSpec,
    Launch,
    Ref,
    Strides,
)
from tuner.families.chip_work import Work
from tuner.families.collective import (
    CONSUMERS,
    COOPERATIVE,
    NO_SMEM,
    PLAIN,
    PROMOTED_K,
    TMA_EPILOGUE,
)
from tuner.families.gemm import cost, legality, undivided
from tuner.families.gemm import space as gemm_space
from tuner.families.gemm.chip_work import gemm_work
from tuner.families.gemm.shape import DECOMPOSITIONS, RASTER_ORDERS, SWIZZLES, oriented
from tuner.families.invariance import ReductionClass
from tuner.families.strided_product import StridedProduct, as_gemm
from tuner.hardware import (
    HOPPER,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
    TMA_ALIGNMENT_BYTES,
    WGMMA_K_BYTES,
    Gpu,
)
from tuner.problem import (
    ACTIVATIONS,
    DTYPE_BYTES,
    E4M3,
    EPILOGUE_SCALES,
    DType,
    GemmProblem,
    Problem,
)

KERNEL = "gemm"
"""Name of the one kernel."""
TEMPLATE = "gemm.cu.j2"
TOGETHER = 2
"""Least kernels of a unit (`KernelSpec.together`). One takes 31.8 CPU-seconds of nvcc, three unlike
ones 49.5 and eight similar ones 56.8 together. Simulated searches end soonest with two."""
_MAJORS = ("row", "col")
_EPILOGUES = (PLAIN, COOPERATIVE, NO_SMEM)
_SCHEDULERS = ("Persistent", "StreamK")
INSTANCES = ("dtype", "dtype_d", "layout_a", "layout_b", "layout_d", "kernel_schedule", "tile_m",
             "tile_n", "tile_k")  # fmt: skip
"""Variables that decide the collective's layouts and products (`KernelSpec.instances`)."""
#: Text that it takes, by variable.
WORDS = {
    "dtype": ("float16", "bfloat16", E4M3),
    "dtype_d": ("float16", "bfloat16", "float32", E4M3),
    **dict.fromkeys(("layout_a", "layout_b", "layout_d"), _MAJORS),
    "kernel_schedule": tuple(CONSUMERS),
    "epilogue_schedule": _EPILOGUES,
    "tile_scheduler": _SCHEDULERS,
    "scales": ("", *EPILOGUE_SCALES),
    "bias": ("", "m", "n"),
    "activation": ("", *ACTIVATIONS),
}
#: Pipeline stages at most; shared memory holds 22 of the smallest tile of the space, 64 x 16 x 64.
MAX_STAGES = 32

VAST = 1 << 20
"""Extent below which no count of tiles exceeds a grid's."""
ALIGNED = TMA_ALIGNMENT_BYTES // 2
"""Elements of 16 bits of which TMA takes whole multiples."""

#: Parameters that are variables of the template under their own names.
_COMPILED = (
    *("tile_m", "tile_n", "tile_k", "cluster_m", "cluster_n"),
    *("kernel_schedule", "epilogue_schedule"),
)


class Gemm(StridedProduct):
    """CollectiveBuilder GEMMs: tiles, clusters, schedules, stages, schedulers, swapped operands."""

    name = "gemm"
    op = "gemm"
    proof_draws = "gemm.draws:ProductDraw"
    capabilities = (HOPPER,)
    cost_constants = cost.CONSTANTS
    work_terms = product_work.TERMS
    amounts = staticmethod(product_work.work)
    runtime_parameters: ClassVar[frozenset[str]] = frozenset(
        {"raster_order", "max_swizzle_size", "decomposition_mode", "splits", "pdl"}
    )
    domains: ClassVar[Mapping[str, Domain]] = {
        "tile_m": (32, 64, 96, 128, 160, 192, 256),
        # 8 columns an instruction, but the epilogue's stores need 16 [c].
        "tile_n": (8, 16, 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 512),
        "tile_k": (8, 32, 64, 128, 256),
        # The schedulers shift and mask by the cluster's extents (tile_scheduler_params.h).
        "cluster_m": (1, 2, 4, 8),
        "cluster_n": (1, 2, 4, 8),
        "kernel_schedule": tuple(CONSUMERS),
        "epilogue_schedule": _EPILOGUES,
        "swap_ab": (False, True),
        "stages": range(1, MAX_STAGES + 1),
        "tile_scheduler": _SCHEDULERS,
        "raster_order": tuple(RASTER_ORDERS),
        "max_swizzle_size": SWIZZLES,
        "decomposition_mode": tuple(DECOMPOSITIONS),
        "splits": (2, 3, 4, 6, 8),
        "pdl": (True,),  # without it the parameter is absent
    }
    optional = frozenset(
        {
            *("stages", "tile_scheduler", "raster_order", "max_swizzle_size"),
            *("decomposition_mode", "splits", "pdl"),
        }
    )
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {"stages": (1, 2, 3, 4, 6, 8, 12)}

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if not reason and isinstance(problem, GemmProblem) and problem.scales == "block":
            return f"{self.name} takes factors of operands and of rows, not of blocks"
        return reason

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        problem = as_gemm(problem, Gemm.name)
        return legality.conflicts(problem, config, self.optional)

    def _groups(self, problem: GemmProblem, gpu: Gpu) -> Iterator[list[Config]]:
        return gemm_space.candidates(problem, gpu)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        problem = as_gemm(problem, Gemm.name)
        shape = oriented(problem, config["swap_ab"])
        variables = {
            **{name: config[name] for name in _COMPILED},
            "dtype": problem.dtype,
            "dtype_d": problem.dtype_d,
            "layout_a": shape.layout_a,
            "layout_b": shape.layout_b,
            "layout_d": shape.layout_d,
            "stages": config.get("stages", 0),
            "tile_scheduler": config.get("tile_scheduler", "Persistent"),
            "fast_accum": problem.dtype == E4M3 and problem.fast_accum,
            "scales": problem.scales,
            "bias": ("m" if config["swap_ab"] else "n") if problem.has_bias else "",
            "activation": problem.activation,
            "residual": problem.has_residual,
            "gated": False,
        }
        arguments = arguments_of(problem)
        return {KERNEL: KernelSpec(TEMPLATE, variables, WORDS, arguments, TOGETHER, INSTANCES)}

    def _launches(
        self, problem: GemmProblem, config: Config, scale: float, strides: Strides
    ) -> list[Launch]:
        a, b, *_, d = problem.operands
        along_a, along_b = (strides.get(o.name, o.strides) for o in (a, b))
        return [
            gemm_launch(
                problem,
                config,
                (
                    Matrix(Ref(a.name), along_a[1 if problem.layout_a == "row" else 2], along_a[0]),
                    Matrix(Ref(b.name), along_b[1 if problem.layout_b == "row" else 2], along_b[0]),
                    Matrix(Ref(d.name), problem.n, d.strides[0]),
                ),
                scale,
                pdl=config.get("pdl", False),
                extra={operand.name: Ref(operand.name) for operand in problem.operands[2:-1]},
                beta=1.0,
            )
        ]

    def seeds(
        self, problem: Problem, gpu: Gpu, space: Sequence[Config], count: int
    ) -> list[Config]:
        """Up to half from NVIDIA's heuristics, where they are installed; the rest by cost."""
        half = (count + 1) // 2
        suggested = cost.heuristic_seeds(
            as_gemm(problem, Gemm.name), gpu, space, half, self.constants
        )
        ranked = super().seeds(problem, gpu, space, count)
        return list(dict.fromkeys([*suggested, *ranked]))[:count]

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """As `Family.draw`, with exactly the fields of the drawn schedule.

        An additional field would make the config illegal, which says nothing about the kernel.
        """
        params = dict(super().draw(problem, gpu, members, rng).params)
        if params["epilogue_schedule"] != NO_SMEM:
            # Where the tile has 64 rows the other TMA epilogue is this one under another name:
            # identical machine code (Pingpong 64x128x64, nvcc 13.0). At 128 rows it is wrong.
            params["epilogue_schedule"] = TMA_EPILOGUE[str(params["kernel_schedule"])]
        defaults: dict[str, Value] = {
            "tile_scheduler": "Persistent",
            "raster_order": "AlongN",
            "max_swizzle_size": 1,
            "decomposition_mode": "StreamK",
            "splits": 2,
        }
        for name, default in defaults.items():
            if not legality.applies(name, params):
                params.pop(name, None)
            else:
                params.setdefault(name, default)
        if not legality.applies("pdl", params):
            params.pop("pdl", None)
        return Config(self.name, params)

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        return (gemm_work(as_gemm(problem, self.name), config, gpu),)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return cost.predict_us(as_gemm(problem, Gemm.name), config, gpu, self.constants)

    def tiling(self, config: Config) -> product_work.ProductTiling:
        return tiling_of(config)

    def splitter(self, config: Config, gpu: Gpu) -> Callable[[Any], Sequence[int]]:
        return lambda problem: splits_of(
            product_work.ProductSizes.of(as_gemm(problem, Gemm.name)), config, gpu
        )

    def is_scheduled(self, config: Config) -> bool:
        return bool(config.get("decomposition_mode") == "SplitK")

    def called(self, problem: Problem, config: Config, splits: int) -> Config:
        return split(config, splits)

    def overlapped(self, config: Config) -> Config:
        return overlapped(config)

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        return reduction_of(as_gemm(problem, Gemm.name), config)

    def invariant_kernels(self, problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
        if undivided.is_served(problem):
            us = self.predict_us(problem, undivided.KERNEL, gpu) * undivided.FACTOR
            yield us, undivided.KERNEL

    def invariant_builds(self, dtype: DType) -> Iterator[tuple[Config, Problem]]:
        if dtype == undivided.SMALL.dtype:
            yield undivided.KERNEL, undivided.SMALL

    def legality_facts(self, problem: Problem) -> Hashable:
        product = as_gemm(problem, Gemm.name)
        return legality_facts(problem, product.m, product.n, product.k, product.dtype)


def tiling_of(config: Config) -> product_work.ProductTiling:
    """Tiling of a kernel of the family. Several blocks share a multiprocessor under the plain
    schedule only, as its stages allow.
    """
    params, resident = config.params, 1
    if params["kernel_schedule"] == PLAIN:
        used = int(config["stages"] * (config["tile_m"] + config["tile_n"]) * config["tile_k"])
        room = SMEM_PER_SM_BYTES // (2 * used + SMEM_RESERVED_PER_BLOCK_BYTES)
        resident = max(1, min(cost.MAX_RESIDENT, room))
    mode, cluster = params.get("decomposition_mode"), config["cluster_m"] * config["cluster_n"]
    return product_work.ProductTiling(
        rows=int(params["tile_m"]),
        columns=int(params["tile_n"]),
        depth=int(params["tile_k"]),
        cluster_rows=int(params["cluster_m"]),
        cluster_columns=int(params["cluster_n"]),
        is_swapped=bool(params["swap_ab"]),
        resident=resident,
        spared=cost.spared(cluster),
        swizzle=int(params.get("max_swizzle_size", 1)),
        along_columns=params.get("raster_order", "AlongN") == "AlongN",
        splits=product_work.STREAM_K if mode == "StreamK" else int(params.get("splits", 1)),
    )


def splits_of(sizes: product_work.ProductSizes, config: Config, gpu: Gpu) -> Sequence[int]:
    """Counts of splits of a kernel that are worth considering: those that fill the chip once."""
    mode = config.get("decomposition_mode")
    if mode != "SplitK":
        return (product_work.STREAM_K,) if mode else (1,)
    m, n = (sizes.n, sizes.m) if config["swap_ab"] else (sizes.m, sizes.n)
    tiles = -(-m // config["tile_m"]) * -(-n // config["tile_n"])
    steps = -(-sizes.k // config["tile_k"])
    return [
        count
        for count in gemm_space.SPLITS
        if 2 * count <= steps and tiles * (count - 1) < 2 * gpu.sm_count
    ]


def split(config: Config, splits: int) -> Config:
    """A config with this number of splits, two or more; unchanged where it does not split."""
    if config.get("decomposition_mode") != "SplitK":
        return config
    return Config(config.family, {**config.params, "splits": max(splits, gemm_space.SPLITS[0])})


def reduction_of(problem: GemmProblem, config: Config, epilogue: str = "") -> ReductionClass | None:
    """Order of additions of CUTLASS's kernels. Stream-K divides K by the number of tiles; split K
    divides it into whole tiles, whose sums are added in turns of the blocks.

    Args:
        problem: the product.
        config: its kernel, of this family or with the same parameters.
        epilogue: name of an epilogue that the product does not name; empty: the product's own.
    """
    mode = config.get("decomposition_mode")
    if mode == "StreamK":
        return None
    if not epilogue:
        # The factors of the instruction's columns come first: of B's columns, swapped of A's rows.
        side = "a" if config["swap_ab"] else "b"
        by_rows = f"{side}'s factors first" if problem.scales == "row" else ""
        has_own = problem.has_residual or problem.activation not in ("", "relu")
        epilogue = f"cutlass {problem.epilogue}" if has_own else by_rows
    splits = int(config["splits"]) if mode == "SplitK" else 1
    return ReductionClass(
        depth=WGMMA_K_BYTES // DTYPE_BYTES[problem.dtype],
        promoted=0 if problem.fast_accum else PROMOTED_K,
        splits=splits,
        step=int(config["tile_k"]) if splits > 1 else 0,
        merge="turns" if splits > 1 else "",
        epilogue=epilogue,
    )


def overlapped(config: Config) -> Config:
    """A config with programmatic dependent launch, where it is legal. In a stream it saved 0.2 us
    of any product (median of 661 pairs on an H100, 25 November 2026).
    """
    params = config.params
    is_legal = legality.applies("pdl", params)
    return Config(config.family, {**params, "pdl": True}) if is_legal else config


def legality_facts(problem: Problem, m: int, n: int, k: int, dtype: DType) -> Hashable:
    """Legality facts of a plain product without a batch; a vast one may have too many tiles.

    Args:
        problem: problem of the family.
        m: rows of its product.
        n: columns of its product.
        k: length of its sums.
        dtype: data type of its operands.
    """
    if m >= VAST or n >= VAST or k >= VAST:
        return problem
    return dtype, n % ALIGNED, k % ALIGNED


def arguments_of(problem: GemmProblem) -> Arguments:
    """Declaration of a launch's arguments. The epilogue's tensors are in its operands' order."""
    extra = {
        "scale_a": problem.scales,
        "scale_b": problem.scales,
        "scale_d": problem.has_output_scale,
        "bias": problem.has_bias,
        "residual": problem.has_residual,
    }
    return Arguments(
        tensors=("a", "b", "d", *(name for name, is_there in extra.items() if is_there)),
        integers=(
            *("m", "n", "k", "batch"),
            *("lda", "ldb", "ldd"),
            *("batch_a", "batch_b", "batch_d"),
            *("max_swizzle_size", "raster_order", "decomposition_mode", "splits"),
            *("sm_count", "pdl"),
        ),
        scalars=("alpha", "beta") if problem.has_residual else ("alpha",),
    )


@dataclass(frozen=True)
class Matrix:
    """A matrix of a launch: its first element, and its strides in elements."""

    ref: Ref
    leading: int
    """Between rows (layout row) or columns (layout col)."""
    batch: int
    """Between batches."""


def gemm_launch(
    problem: GemmProblem,
    config: Config,
    operands: tuple[Matrix, Matrix, Matrix],
    alpha: float,
    *,
    kernel: str = KERNEL,
    pdl: bool = False,
    extra: Mapping[str, Ref] | None = None,
    beta: float = 0.0,
) -> Launch:
    """One call of a compiled GEMM on operands of the caller's choice.

    Args:
        problem: extents, data types and layouts; its dense strides are not used.
        config: a legal config of the family `gemm` for `problem`.
        operands: the (M, K) operand, the (K, N) one and the (M, N) result, of the first batch.
        alpha: factor of the product.
        kernel: key of the kernel in the calling family's `kernels`.
        pdl: start before the kernel in front ends, and wait for it on the device.
        extra: operands of the epilogue, by the names of `arguments_of`. The residual has
            the strides of the result.
        beta: factor of the residual.

    Byte offsets, strides and batch strides are multiples of 16 bytes, else the launch fails.
    """
    shape = oriented(problem, config["swap_ab"])
    a, b, d = operands
    extra = dict(extra or {})
    if config["swap_ab"]:
        a, b = b, a
        if problem.scales:
            extra["scale_a"], extra["scale_b"] = extra["scale_b"], extra["scale_a"]
    integers = {
        **{"m": shape.m, "n": shape.n, "k": shape.k, "batch": problem.batch},
        **{"lda": a.leading, "ldb": b.leading, "ldd": d.leading},
        **{"batch_a": a.batch, "batch_b": b.batch, "batch_d": d.batch},
        "max_swizzle_size": config.get("max_swizzle_size", 1),
        "raster_order": RASTER_ORDERS.get(config.get("raster_order", ""), 0),
        "decomposition_mode": DECOMPOSITIONS.get(config.get("decomposition_mode", ""), 0),
        "splits": config.get("splits", 1),
        "sm_count": 0,
        "pdl": int(pdl),
    }
    tensors = {"a": a.ref, "b": b.ref, "d": d.ref, **extra}
    scalars = {"alpha": alpha, **({"beta": beta} if problem.has_residual else {})}
    return Launch.named(kernel, arguments_of(problem), tensors, integers, scalars)
