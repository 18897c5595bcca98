"""Kernels of one config, as they are built and proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from tuner.config import Config
from tuner.families import families
from tuner.families.base import Family, KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, DType, Problem

DTYPES: tuple[DType, ...] = ("float16", "bfloat16")
"""Types that share a portfolio's domain; each has kernels of its own."""


@dataclass(frozen=True)
class Target:
    """The kernels of one config of a portfolio or a rule, built and proven together."""

    config: Config
    """Config with one choice of its run-time parameters."""
    problem: Problem
    """Small problem of the kernels' domain; the config may be illegal for its sizes."""
    place: str = field(default="", compare=False)
    """Text of the domain, for people."""

    @cached_property
    def family(self) -> Family:
        return families()[self.config.family]

    @cached_property
    def kernels(self) -> Mapping[str, KernelSpec]:
        """Kernel specs by their name within the family."""
        return self.family.kernels(self.problem, self.config)

    def has_use(self, gpu: Gpu) -> bool:
        """True when the kernel can serve at least one problem.

        For products with few rows that is the small problem, which needs the least shared memory.
        Attention's small problem may lack the heads that a config packs, so it is not checked.
        """
        if isinstance(self.problem, AttentionProblem):
            return True
        config = self.family.called(self.problem, self.config, 1)
        return self.family.accepts(self.problem, config, gpu)

    def label(self) -> str:
        """Short text for people."""
        names = {name: value for name, value in self.config.params.items()
                 if name not in self.family.runtime_parameters}  # fmt: skip
        shown = ",".join(
            f"{name}={value if isinstance(value, str) else int(value)}"
            for name, value in sorted(names.items())
        )
        place = f" {self.place}," if self.place else ""
        return f"{self.family.name}{place} {getattr(self.problem, 'dtype', '')}: {shown}"
