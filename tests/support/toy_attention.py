"""A toy family of attention, of which `revalidate` knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
from bare_family import BareFamily

from tuner.config import Config
from tuner.families import families
from tuner.families.base import Domain, KernelSpec
from tuner.hardware import Gpu
from tuner.problem import Problem
from tuner.tuning import revalidate


class Toy(BareFamily):
    """Legal everywhere, one kernel a config, as fast as there is work."""

    name = "toy_attention"
    op = "attention"
    domains: ClassVar[Mapping[str, Domain]] = {"tile": (0, 1, 2, 3, 4, 5)}

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {"attention": KernelSpec("toy.cu.j2", config.params)}

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return problem.flops / 1e9


@pytest.fixture(autouse=True)
def toy_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one of the families, for every test of a module that names this."""
    members = {**families(), Toy.name: Toy()}
    monkeypatch.setattr(revalidate, "families", lambda: members)


OWN = [Config(Toy.name, {"tile": tile}) for tile in range(6)]
