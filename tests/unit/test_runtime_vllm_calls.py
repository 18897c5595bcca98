"""Calls of vLLM's plug-in: layouts of caches and rounded lengths."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from vllm_fakes import engine

torch = pytest.importorskip("torch", reason="torch is not installed")

__all__ = ["engine"]
PAGES, SIZE, HEADS_KV, WIDTH = 40, 16, 2, 64


def test_a_cache_of_keys_beside_values_is_read_as_views(engine: SimpleNamespace) -> None:
    backend = engine.backend
    numbers = torch.arange(2 * PAGES * SIZE * HEADS_KV * WIDTH).view(PAGES, SIZE, HEADS_KV, -1)
    halves = backend.halves_of(HEADS_KV, WIDTH, numbers.transpose(1, 2))
    assert torch.equal(halves[0], numbers[..., :WIDTH])
    assert torch.equal(halves[1], numbers[..., WIDTH:])
    assert halves[0].data_ptr() == numbers.data_ptr()


def test_longest_lengths_are_rounded_to_few() -> None:
    rounded = importlib.import_module("tuner.runtime.engines.calls").rounded
    found = [rounded(keys, 5000) for keys in range(1, 5001)]
    for keys, up in enumerate(found, 1):
        assert keys <= up <= max(keys * 9 / 8, keys + 1)
        # Of one kind of call (`PagedCall.kind`).
        assert (keys - 1).bit_length() == (up - 1).bit_length()
    assert len(set(found)) < 150 and rounded(0, 5000) == 0
