"""SwiGLU as one GEMM of twice as many columns, whose epilogue multiplies them in pairs.

The kernel is that of `gemm` with another epilogue. Columns of the gate and of the up projection are
interleaved, so each thread holds both factors of a result. It stores eight neighbouring results
without shared memory, or four when a tile ends within a group. Everything else of a config is
`gemm`'s.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families import product_work
from tuner.families.base import Domain, Family, KernelSpec, Launch, Ref, posed
from tuner.families.chip_work import Work
from tuner.families.collective import NO_SMEM
from tuner.families.gemm import (
    KERNEL,
    Gemm,
    Matrix,
    cost,
    gemm_launch,
    legality_facts,
    overlapped,
    reduction_of,
    split,
    splits_of,
    tiling_of,
)
from tuner.families.gemm import space as gemm_space
from tuner.families.gemm.chip_work import gemm_work
from tuner.families.invariance import ReductionClass
from tuner.hardware import HOPPER, Gpu
from tuner.problem import GemmProblem, Problem, SwigluProblem

#: Half of the columns that are interleaved as a group: what of one a tile may have.
HALF_GROUP = 32
_GEMM = Gemm()


class GemmSwiglu(Family):
    """`gemm`'s tiles, clusters, schedules, stages and schedulers, over pairs of columns."""

    name = "gemm_swiglu"
    op = SwigluProblem.op
    proof_draws = "gemm.draws:ProductDraw"
    capabilities = (HOPPER,)
    work_terms = product_work.TERMS
    amounts = staticmethod(product_work.work)
    runtime_parameters: ClassVar[frozenset[str]] = Gemm.runtime_parameters
    domains: ClassVar[Mapping[str, Domain]] = {
        **Gemm.domains,
        "tile_n": tuple(n for n in Gemm.domains["tile_n"] if int(n) % HALF_GROUP == 0),
        "epilogue_schedule": (NO_SMEM,),  # it stores by itself
        "swap_ab": (False,),  # else the two of a pair were in different threads
    }
    optional = Gemm.optional
    draws = Gemm.draws

    def supports(self, problem: Problem, gpu: Gpu) -> str:
        reason = super().supports(problem, gpu)
        if reason or not isinstance(problem, SwigluProblem) or problem.weights == "interleaved":
            return reason
        return f"weights={problem.weights} are not interleaved"

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return _GEMM.conflicts(product_of(problem), config, gpu)

    def _groups(self, problem: SwigluProblem, gpu: Gpu) -> Iterator[list[Config]]:
        for group in gemm_space.candidates(product_of(problem), gpu):
            yield [Config(self.name, {**c.params, "epilogue_schedule": NO_SMEM}) for c in group]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        spec = _GEMM.kernels(product_of(problem), config)[KERNEL]
        return {KERNEL: replace(spec, variables={**spec.variables, "gated": True})}

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        product = product_of(problem)
        a, weights, d = problem.operands
        return [
            gemm_launch(
                product,
                config,
                (
                    Matrix(Ref(a.name), product.k, a.elements),
                    Matrix(Ref(weights.name), product.k, weights.elements),
                    Matrix(Ref(d.name), product.n // 2, d.elements),
                ),
                scale,
                pdl=config.get("pdl", False),
            )
        ]

    def draw(
        self, problem: Problem, gpu: Gpu, members: Sequence[Config], rng: random.Random
    ) -> Config:
        """As `Gemm.draw`, with the only epilogue and operand order of the family."""
        params = _GEMM.draw(product_of(problem), gpu, members, rng).params
        return Config(self.name, {**params, "epilogue_schedule": NO_SMEM, "swap_ab": False})

    def chip_work(self, problem: Problem, config: Config, gpu: Gpu) -> tuple[Work, ...]:
        """The product of both projections; half of its columns are stored, an exponential each."""
        product = gemm_work(product_of(problem), config, gpu)
        work = replace(
            product,
            kernel="gemm_swiglu",
            exponentials=float(problem.output.elements),
            l2_bytes=product.l2_bytes - problem.output.bytes,
        )
        return (work,)

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        """The estimate of the product, by the constants fitted for it. That product stores twice as
        much and computes no activation. The two are taken to cancel out.
        """
        return cost.predict_us(product_of(problem), config, gpu, _GEMM.constants)

    def tiling(self, config: Config) -> product_work.ProductTiling:
        return tiling_of(config)

    def splitter(self, config: Config, gpu: Gpu) -> Callable[[Any], Sequence[int]]:
        return lambda problem: splits_of(
            product_work.ProductSizes.of(product_of(problem)), config, gpu
        )

    def is_scheduled(self, config: Config) -> bool:
        return bool(config.get("decomposition_mode") == "SplitK")

    def called(self, problem: Problem, config: Config, splits: int) -> Config:
        return split(config, splits)

    def overlapped(self, config: Config) -> Config:
        return overlapped(config)

    def reduction_class(self, problem: Problem, config: Config) -> ReductionClass | None:
        return reduction_of(product_of(problem), config, epilogue=self.name)

    def legality_facts(self, problem: Problem) -> Hashable:
        if not isinstance(problem, SwigluProblem):
            return problem
        return legality_facts(problem, problem.m, 2 * problem.n, problem.k, problem.dtype)


def product_of(problem: Problem) -> GemmProblem:
    """The product that the kernel computes: of both projections, before their columns are paired.

    Raises:
        ConfigError: when the problem is another operation's.
    """
    problem = posed(problem, SwigluProblem, GemmSwiglu.name)
    return GemmProblem(problem.m, 2 * problem.n, problem.k, dtype=problem.dtype)
