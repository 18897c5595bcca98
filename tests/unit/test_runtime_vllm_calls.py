"""Calls of vLLM's plug-in: layouts of caches, rounded lengths, and kernels that are slow."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tuner.config import Config

torch = pytest.importorskip("torch", reason="torch is not installed")

PAGES, SIZE, HEADS_KV, WIDTH = 40, 16, 2, 64


@pytest.mark.parametrize(
    ("groups", "width", "wanted"), [(2, 128, True), (2, 64, False), (1, 128, False)]
)
def test_kernels_of_chunks_above_a_width_are_slow(groups: int, width: int, wanted: bool) -> None:
    calls = importlib.import_module("tuner.runtime.vllm.calls")
    config = Config("fused_attention", {"warp_groups": groups})
    assert calls.is_slow_kernel(config, width) == wanted


def test_caches_of_three_layouts_are_views() -> None:
    calls = importlib.import_module("tuner.runtime.vllm.calls")
    numbers = torch.arange(2 * PAGES * SIZE * HEADS_KV * WIDTH).view(PAGES, SIZE, HEADS_KV, -1)
    wanted = [numbers[..., :WIDTH], numbers[..., WIDTH:]]
    first = torch.stack(wanted)
    made: list[tuple[Any, Any]] = [
        (lambda p, s, h, d: (p, h, s, 2 * d), numbers.transpose(1, 2)),
        (lambda p, s, h, d: (2, p, s, h, d), first),
        (lambda p, s, h, d: (p, 2, s, h, d), first.transpose(0, 1)),
    ]
    for shape, cache in made:
        layout = calls.layout_of(shape)
        assert tuple(cache.shape) == shape(PAGES, SIZE, HEADS_KV, WIDTH)
        found = layout.split(cache, WIDTH)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert [half.untyped_storage().data_ptr() for half in found] == [
            cache.untyped_storage().data_ptr()
        ] * 2
        assert found[0].data_ptr() == cache.data_ptr()
        assert found[1].data_ptr() == layout.values(cache, WIDTH).data_ptr()
    for shape in (lambda p, s, h, d: (p, s, d), lambda p, s, h, d: (p, 2 * d, s, h)):
        assert calls.layout_of(shape) is None


def test_longest_lengths_are_rounded_to_few() -> None:
    rounded = importlib.import_module("tuner.runtime.vllm.calls").rounded
    found = [rounded(keys, 5000) for keys in range(1, 5001)]
    for keys, up in enumerate(found, 1):
        assert keys <= up <= max(keys * 9 / 8, keys + 1)
        # Of one kind of call (`PagedCall.kind`).
        assert (keys - 1).bit_length() == (up - 1).bit_length()
    assert len(set(found)) < 150 and rounded(0, 5000) == 0
