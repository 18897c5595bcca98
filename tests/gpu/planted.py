"""Families of faulty kernels; the worker imports this file too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.base import Domain, Family, KernelSpec, Launch, Ref
from tuner.hardware import Gpu
from tuner.problem import Problem

#: Fault -> the status it must end as, and words of its log.
FAULTS = {
    "illegal_address": ("illegal_access", "CUDA error 7"),
    "infinite_loop": ("timeout", "no sign of life"),
    "wrong_result": ("wrong_result", "first at (0, 5, 7)"),
    "nan": ("not_finite", "1 of 262144 elements are NaN or infinite, first at (0, 5, 7)"),
    "out_of_bounds": ("out_of_bounds", "4 bytes beside 'd' were written"),
    "changes_input": ("out_of_bounds", "input 'a' was changed"),
    "unwritten": ("wrong_result", "1 of 262144 elements were never written"),
    "out_of_memory": ("out_of_memory", "4398050"),
    "crash": ("worker_died", "SIGABRT"),
    "refused": ("launch_error", "cudaError 1"),
    "synchronizes": ("launch_error", "cudaError 90"),
    "skips": ("too_fast", "is below"),
}
MASK_FAULTS = {"leak": True, "miss": True, "padding": False, "scale": False, "fused": False}
"""Fault of the attention -> under a causal mask."""


#: Text that the templates take.
WORDS = {"fault": ("good", *FAULTS, *MASK_FAULTS)}


class Planted(Family):
    """`repeat` makes a good kernel slower."""

    name, op = "planted", "gemm"
    runtime_parameters = frozenset({"repeat"})
    domains: ClassVar[Mapping[str, Domain]] = {**WORDS, "repeat": (1, 2, 4)}
    optional = frozenset({"repeat"})

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [good(4), *(faulty(fault) for fault in FAULTS), good(1), good(2)]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 1.0

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {"main": KernelSpec("planted.cu.j2", {"fault": config["fault"]}, WORDS)}

    def launches(self, problem: Any, config: Config, scale: float) -> list[Launch]:
        extents = (problem.m, problem.n, problem.k, config.get("repeat", 1))
        return [Launch("main", (Ref("a"), Ref("b"), Ref("d")), extents, (scale, 0.0))]


class PlantedAttention(Planted):
    """Masks that are off by one key."""

    name, op = "planted_attention", "attention"

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [masked("good"), *(masked(fault) for fault in MASK_FAULTS)]

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {"main": KernelSpec("planted_attention.cu.j2", {"fault": config["fault"]}, WORDS)}

    def launches(self, problem: Any, config: Config, scale: float) -> list[Launch]:
        tensors = tuple(Ref(name) for name in ("query", "key", "value", "out"))
        heads = problem.batch * problem.heads_q
        integers = (heads, problem.seqlen_q, int(problem.is_causal))
        return [Launch("main", tensors, integers, (scale,))]


def good(repeat: int) -> Config:
    return Config("planted", {"fault": "good", "repeat": repeat})


def faulty(fault: str) -> Config:
    return Config("planted", {"fault": fault})


def masked(fault: str) -> Config:
    return Config("planted_attention", {"fault": fault})
