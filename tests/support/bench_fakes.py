"""Parts of a machine that benches' smoke runs need beside `bench_device.fake_device`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import (
    harness,
    population_kernels,
    population_regret,
    products,
)
from tuner.config import Config
from tuner.hardware import GPUS, Gpu
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.selection.kernels import lists


class SweepRunner:
    """A runner that has built every second kernel, and times configs by their digests.

    Args:
        slow: config that is built, and slower than all others.
    """

    gpu: Gpu = GPUS["H200"]

    def __init__(self, slow: Config | None = None) -> None:
        self.slow, self.requests = slow, list[list[Config]]()
        self.retimed: list[Config] = []
        self.submitted = 0

    def compiled(self, problem: Problem, family: Any, space: Sequence[Config]) -> list[Config]:
        return [one for one in space if one == self.slow or int(one.digest[:2], 16) % 2]

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.problem, self.submitted = problem, self.submitted + len(group)
        self.requests.append(list(group))

    def collect(self) -> list[Measurement]:
        return [self._of(config, self._us(config)) for config in self.requests.pop(0)]

    def retime(self, problem: Problem, finalists: Sequence[Config], _: int) -> list[Measurement]:
        self.retimed = list(finalists)
        return [self._of(config, 2 * self._us(config)) for config in finalists]

    def _us(self, config: Config) -> float:
        return 30.0 if config == self.slow else 10.0 + int(config.digest[:4], 16) / 65536

    def _of(self, config: Config, us: float) -> Measurement:
        facts = Status.OK, Provenance.MEASURED
        return Measurement(self.problem, config, self.gpu, Regime(), *facts, latency_us=us)


@pytest.fixture
def built_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact product in place of one built kernel, and no library's algorithms."""

    def own(tensors: Any, *_: Any, **__: Any) -> list[Any]:
        return [("tuner exact", lambda: lambda i: tensors.wanted)]

    monkeypatch.setattr(products, "rule_ways", own)
    monkeypatch.setattr(products, "built_ways", own)
    monkeypatch.setattr(products, "algorithm_ways", lambda tensors: [])


@pytest.fixture
def built_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA in place of one compiled kernel, and no other load than the usual one."""
    torch = pytest.importorskip("torch")

    def own(
        problem: Any, tensors: Any, scale: float, configs: Any = None
    ) -> list[harness.Contender]:
        query, key, value, *factors = tensors.values()
        digest = configs[0].digest[:6] if configs else "abcdef"
        if factors:
            scale *= population_kernels.FACTOR**2
        options = {"is_causal": problem.is_causal, "scale": scale, "enable_gqa": True}

        def call(_: int) -> Any:
            out = torch.nn.functional.scaled_dot_product_attention(
                query.float(), key.float(), value.float(), **options
            )
            return out * population_kernels.FACTOR if factors else out

        return [harness.Contender(f"tuner {digest}", call)]

    def loaded(entered: Any, before: Any, quick: Any) -> dict[str, Any]:
        us = harness.time_calls(entered, before, 1).us
        clocks = {name: {"sm_mhz": 1400} for name in us}
        return {"us": us, "sustained_us": us, "spread": {}, "clocks": clocks}

    monkeypatch.setattr(population_kernels, "own_contenders", own)
    monkeypatch.setattr(population_kernels, "loaded", loaded)


@pytest.fixture
def sweep_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SweepRunner`, and a proof of every kernel."""

    class Runners:
        def of(self, *_: Any) -> SweepRunner:
            return SweepRunner()

    monkeypatch.setattr(population_regret, "_runners", Runners)
    monkeypatch.setattr(lists, "proven", lambda specs, capability: {})
