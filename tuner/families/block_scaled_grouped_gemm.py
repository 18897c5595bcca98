"""Grouped GEMM of e4m3 operands with factors of blocks: `block_scaled_gemm`'s kernels over groups.

The rows of all groups lie one after the other and begin anywhere; the offsets are read on the
device. Tiles are taken group after group, and K is not divided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, sqrt
from typing import ClassVar

from tuner.config import Config
from tuner.families.base import Domain, Family, KernelSpec, Launch, Ref, posed
from tuner.families.block_scaled_gemm import (
    UNFITTED_START_CLOCKS,
    BlockScaledGemm,
    arguments_of,
    launched,
    rates_of,
    reduction_of,
    spec_of,
)
from tuner.families.block_scaled_gemm.expected import Rates, estimate_us
from tuner.families.block_scaled_gemm.legality import (
    cluster_violations,
    extent_conflict,
    loop_violations,
    tile_violations,
)
from tuner.families.block_scaled_gemm.shape import deepened
from tuner.families.chip_work import Work, work_of_groups
from tuner.families.invariance import ReductionClass
from tuner.hardware import HOPPER, Gpu
from tuner.problem import E4M3, GemmProblem, GroupedGemmProblem, Problem

KERNEL = "block_scaled_grouped_gemm"
_PRODUCT = BlockScaledGemm()


class BlockScaledGroupedGemm(Family):
    """Tiles, clusters and rasters of `block_scaled_gemm`, for groups as they are measured."""

    name: ClassVar[str] = "block_scaled_grouped_gemm"
    op: ClassVar[str] = GroupedGemmProblem.op
    proof_draws: ClassVar[str] = "grouped_gemm.draws:GroupedDraw"
    capabilities = (HOPPER,)
    runtime_parameters: ClassVar[frozenset[str]] = BlockScaledGemm.runtime_parameters
    domains: ClassVar[Mapping[str, Domain]] = {
        name: domain for name, domain in BlockScaledGemm.domains.items() if name != "split_k"
    }
    optional = BlockScaledGemm.optional
    draws = BlockScaledGemm.draws

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason:
            return reason
        problem = _grouped(problem)
        if problem.dtype != E4M3:
            return f"{self.name} takes factors of blocks: dtype=e4m3"
        return extent_conflict(problem.m, problem.n, problem.k, problem.groups)

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return [*tile_violations(config), *cluster_violations(config), *loop_violations(config)]

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        """Candidates of one product: groups of the mean size, of the largest, and between."""
        if not isinstance(problem, GroupedGemmProblem) or self.supports(problem, gpu):
            return []
        busy = [rows for rows in problem.rows if rows]
        space: dict[Config, None] = {}
        mean, largest = ceil(problem.m / len(busy)), max(busy)
        for rows in sorted({mean, round(sqrt(mean * largest)), largest}):
            for config in _PRODUCT.space(_product(problem, rows), gpu):
                if config["split_k"] == 1:
                    params = {k: v for k, v in config.params.items() if k in self.domains}
                    space.setdefault(deepened(Config(self.name, params)))
        return list(space)

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {KERNEL: spec_of(config, is_grouped=True)}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        problem = _grouped(problem)
        a, b, _, scale_a, scale_b, d = problem.operands
        (a_block, a_row), (b_group, b_column, b_block) = scale_a.strides, scale_b.strides
        integers = {
            **{"m": problem.m, "n": problem.n, "k": problem.k},
            **{"lda": a.strides[0], "ldb": b.strides[1], "ldd": d.strides[0]},
            **{"scale_a_row": a_row, "scale_a_block": a_block},
            **{"scale_b_column": b_column, "scale_b_block": b_block},
            **launched(config),
            **{"groups": problem.groups, "scale_b_group": b_group},
        }
        tensors = {operand.name: Ref(operand.name) for operand in problem.operands}
        arguments = arguments_of(is_grouped=True)
        return [Launch.named(KERNEL, arguments, tensors, integers, {"alpha": scale})]

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        return reduction_of(config)

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        single = Config(_PRODUCT.name, {**config.params, "split_k": 1})
        groups = _grouped(problem)
        products = (_product(groups, rows) for rows in groups.rows if rows)
        works = [_PRODUCT.chip_work(product, single, gpu) for product in products]
        return (work_of_groups([work for (work,) in works], self.name),)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """`grouped_estimate_us` by first guesses of the kernel's rates."""
        return grouped_estimate_us(_grouped(problem), config, gpu, rates_of(config))


def grouped_estimate_us(
    problem: GroupedGemmProblem, config: Config, gpu: Gpu, rates: Rates
) -> float:
    """`estimate_us` without memory, for one product with the rows of all groups, each padded to
    whole tiles. At least the time of the bytes.
    """
    along = "n" if config["swap_ab"] else "m"
    step = config[f"tile_{along}"] * config[f"cluster_{along}"]
    rows = sum(ceil(rows / step) * step for rows in problem.rows)
    single = Config(_PRODUCT.name, {**config.params, "split_k": 1})
    endless = replace(gpu, memory_gbs=float("inf"))
    compute = estimate_us(_product(problem, rows), single, endless, rates, UNFITTED_START_CLOCKS)
    return float((compute**4 + gpu.floor_us(0, problem.bytes) ** 4) ** 0.25)


def _product(problem: GroupedGemmProblem, rows: int) -> GemmProblem:
    return GemmProblem(rows, problem.n, problem.k, dtype=E4M3, scales="block")


def _grouped(problem: Problem) -> GroupedGemmProblem:
    return posed(problem, GroupedGemmProblem, BlockScaledGroupedGemm.name)
