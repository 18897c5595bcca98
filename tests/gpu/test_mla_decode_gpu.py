"""Latent attention's decoding by its kernels, against PyTorch's operations, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.single import MLA_DECODE
from tuner.families.mla_decode import KERNELS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: Lengths, queries, heads, slots of a page.
CASES = (
    ((70,), 1, 1, 64),
    ((5000,), 1, 64, 64),
    ((1, 0, 63, 64, 65, 1000, 300, 4097), 1, 128, 64),
    ((3, 0, 700, 129), 4, 16, 16),
    ((100, 1, 777, 2000), 3, 20, 48),
    (tuple(37 * i % 900 for i in range(150)), 2, 128, 128),
    ((300, 40), 2, 200, 16),
)


@pytest.fixture
def mla(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`tuner.runtime.attention.mla` with proven kernels of the tests' cache."""
    import torch

    module = pytest.importorskip("tuner.runtime.attention.mla", reason="torch is missing")
    from tuner.runtime.call import sourced

    monkeypatch.setattr(sourced, "ArtifactCache", lambda: compiler.artifacts)
    device = torch.device("cuda", torch.cuda.current_device())
    for chosen, source in MLA_DECODE.items():
        source.build(compiler.artifacts)
        module.kernels[chosen].forget()
        proof = partial(module._is_proven, chosen, device)
        assert module.kernels[chosen].of(device, proof) is not None, chosen
    yield module
    for kernel in module.kernels.values():
        kernel.forget()


def drawn(module: Any, case: tuple[Any, ...], dtype: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A call of these sizes; what no sequence has is NaN."""
    import torch

    lengths, queries, heads, size = case
    monkeypatch.setattr(module, "_DRAWS", ((size, queries, heads),))
    return module.drawn(KERNELS[dtype], torch.device("cuda"), 0, lengths)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"H={case[2]},SQ={case[1]},page={case[3]}")
def test_it_computes_what_pytorch_s_operations_do(
    mla: Any, case: tuple[Any, ...], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from tuner.runtime.call import counters

    own, theirs = (drawn(mla, case, dtype, monkeypatch) for _ in range(2))
    mla.composed(theirs)
    counters.stats(reset=True)
    out, lse = mla.mla_decode(*own[:4], scale=own.scale, return_lse=True)
    assert counters.stats().hits == 1
    assert mla.is_close(own._replace(out=out, lse=lse), theirs)
    again, _ = mla.mla_decode(*own[:4], scale=own.scale, return_lse=True)
    assert torch.equal(out, again)


def test_a_captured_call_follows_the_lengths(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    call = drawn(mla, ((40, 900, 3), 1, 64, 64), "bfloat16", monkeypatch)
    mla.mla_decode(*call[:4], scale=call.scale, out=call.out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla.mla_decode(*call[:4], scale=call.scale, out=call.out)
    call.lengths.copy_(torch.tensor([7, 511, 0]))
    wanted = call._replace(out=torch.empty_like(call.out), lse=None)
    mla.composed(wanted)
    graph.replay()
    torch.cuda.synchronize()
    assert mla.is_close(call._replace(lse=None), wanted)


def test_views_of_larger_tensors(mla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    call = drawn(mla, ((333, 64), 2, 32, 64), "bfloat16", monkeypatch)
    spread = torch.randn(2, 32, 2, 640, device="cuda").bfloat16().transpose(1, 2)[..., :576]
    out = torch.full((2, 2, 40, 512), torch.nan, device="cuda").bfloat16()[:, :, 4:36]
    theirs = call._replace(query=spread, out=torch.empty_like(call.out), lse=None)
    mla.composed(theirs)
    mla.mla_decode(spread, *call[1:4], scale=call.scale, out=out)
    assert mla.is_close(theirs._replace(out=out), theirs)
