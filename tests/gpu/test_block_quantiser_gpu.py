"""Rows quantised by the kernel have the bits of PyTorch's operations, captured ones too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.single import BLOCK_QUANTISER

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SIZES = ((1, 8), (1, 7168), (3, 136), (16, 7168), (333, 2064), (1000, 1152), (4096, 7168))


@pytest.fixture
def runtime(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`tuner.runtime.products.block_scaled` and `quantiser` with the kernel of the tests' cache."""
    pytest.importorskip("torch", reason="torch is missing")
    from tuner.runtime.products import block_scaled

    BLOCK_QUANTISER.build(compiler.artifacts)
    from tuner.runtime.call import sourced

    monkeypatch.setattr(sourced, "ArtifactCache", lambda: compiler.artifacts)
    block_scaled.quantiser.kernels.forget()
    yield block_scaled
    block_scaled.quantiser.kernels.forget()


def rows_of(m: int, k: int, seed: int) -> Any:
    """Rows of unlike sizes with zeros; of many rows some are infinite or NaN."""
    import torch

    torch.manual_seed(seed)
    rows = torch.randn(m, k + 8, device="cuda") * torch.logspace(-9, 9, m, device="cuda")[:, None]
    rows = rows.bfloat16()[:, :k]
    rows[m // 2, : k // 2] = -0.0
    if m > 100:
        rows[5, 3], rows[6, k - 1], rows[7, k // 2] = torch.inf, torch.nan, -torch.inf
    return rows


def assert_equal(found: Any, wanted: Any) -> None:
    import torch

    for own, theirs, kind in zip(found, wanted, (torch.uint8, torch.int32), strict=True):
        assert own.shape == theirs.shape
        assert len(own) == 1 or own.stride() == theirs.stride()  # one row has any stride
        assert torch.equal(own.contiguous().view(kind), theirs.contiguous().view(kind))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_has_the_bits_of_pytorch_s_operations(runtime: Any, size: tuple[int, int]) -> None:
    for seed in range(3):
        rows = rows_of(*size, seed)
        found = runtime.quantiser.run(rows, runtime.composed)
        assert found is not None
        assert_equal(found, runtime.composed(rows))


def test_a_captured_call_quantises_what_the_rows_hold_then(runtime: Any) -> None:
    import torch

    rows = rows_of(333, 2064, 1)
    runtime.quantised(rows)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = runtime.quantised(rows)
    for seed in (2, 3):
        rows.copy_(rows_of(333, 2064, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(found, runtime.composed(rows))


def test_a_first_call_within_a_capture_is_pytorch_s(runtime: Any) -> None:
    import torch

    rows = rows_of(16, 512, 1)
    runtime.composed(rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert runtime.quantiser.run(rows, runtime.composed) is None
        found = runtime.quantised(rows)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, runtime.composed(rows))
    assert runtime.quantiser.run(rows, runtime.composed) is not None
