"""Parts of a machine that benches' smoke runs need beside `bench_device.fake_device`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import (
    harness,
    population_kernels,
    products,
)


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
