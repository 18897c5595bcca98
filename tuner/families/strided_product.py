"""Candidates of products, and launches over operands with strides of their own."""

from __future__ import annotations

from abc import abstractmethod
from math import ceil

from tuner.config import Config
from tuner.families.base import Family, Launch, Strides, posed
from tuner.families.tma import tma_conflict
from tuner.hardware import (
    SMEM_PER_BLOCK_BYTES,
    SMEM_PER_SM_BYTES,
    SMEM_RESERVED_PER_BLOCK_BYTES,
)
from tuner.problem import GemmProblem, Problem


class StridedProduct(Family):
    """A family of products that reads A and B with any strides that TMA takes.

    Subclasses define `_groups`, whose members differ in run-time choices, and `_launches`.
    """

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        return self._launches(as_gemm(problem, self.name), config, scale, {})

    def strided_launches(
        self, problem: Problem, config: Config, scale: float, strides: Strides
    ) -> list[Launch] | str:
        problem = as_gemm(problem, self.name)
        if reason := self.stride_conflict(problem, config, strides):
            return reason
        return self._launches(problem, config, scale, strides)

    def stride_conflict(self, problem: GemmProblem, config: Config, strides: Strides) -> str:
        """Reason why no kernel of `config` reads operands with such strides; empty when one can."""
        reason = operands_conflict(problem, strides)
        fixed = strides.keys() - {operand.name for operand in problem.operands[:2]}
        if reason or not fixed:
            return reason
        return f"{', '.join(sorted(fixed))}: of A and B only strides are free"

    @abstractmethod
    def _launches(
        self, problem: GemmProblem, config: Config, scale: float, strides: Strides
    ) -> list[Launch]:
        """The calls, with the strides of operands that differ from the problem's."""


def operands_conflict(problem: GemmProblem, strides: Strides) -> str:
    """Reason why TMA does not read A and B with such strides; empty when it does."""
    orders = problem.layout_a, problem.layout_b
    for operand, order in zip(problem.operands[:2], orders, strict=True):
        along = strides.get(operand.name, operand.strides)
        if reason := tma_conflict(operand, along, 2 if order == "row" else 1):
            return reason
    return ""


def as_gemm(problem: Problem, family: str) -> GemmProblem:
    """The problem as a product.

    Raises:
        ConfigError: for another operation; it names the family.
    """
    return posed(problem, GemmProblem, family)


def room(config: Config) -> int:
    """Bytes of shared memory that a block may use beside the others of its multiprocessor."""
    resident = int(config.get("blocks_per_sm", 1))
    if resident == 1:
        return SMEM_PER_BLOCK_BYTES
    return SMEM_PER_SM_BYTES // resident - SMEM_RESERVED_PER_BLOCK_BYTES


def tiles(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Tiles of a cluster along the instruction's rows and along its columns."""
    rows, columns = problem.m, problem.n
    if config["swap_ab"]:
        rows, columns = columns, rows
    return (
        ceil(rows / (config["tile_m"] * config.get("cluster_m", 1))),
        ceil(columns / (config["tile_n"] * config.get("cluster_n", 1))),
    )
