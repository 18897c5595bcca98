"""Keys and values appended by the kernel have the bits of PyTorch's operations, in graphs too."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tuner.compile.compiler import Compiler
from tuner.compile.single import PAGED_APPEND

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: Queries and keys of sequences, heads of queries and of keys, D, rotated columns, page size.
CASES = (
    ((1,) * 5, (1, 16, 17, 300, 33), 32, 8, 128, 128, 16),
    ((1,) * 300, tuple(range(1, 301)), 32, 8, 64, 64, 16),
    ((700, 1, 0, 3), (700, 500, 9, 3), 8, 8, 80, 32, 48),
    ((64,), (2048,), 64, 8, 256, 0, 64),
    ((3, 2), (3, 400), 7, 1, 96, 96, 32),
)


@pytest.fixture
def append(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`tuner.runtime.attention.append` with the kernel of the tests' cache, which is served."""
    import torch

    module = pytest.importorskip("tuner.runtime.attention.append", reason="torch is missing")
    PAGED_APPEND.build(compiler.artifacts)
    from tuner.runtime.call import sourced

    monkeypatch.setattr(sourced, "ArtifactCache", lambda: compiler.artifacts)
    module.kernels.forget()
    device = torch.device("cuda", torch.cuda.current_device())
    assert module.kernels.of(device, partial(module._is_proven, device)) is not None
    yield module
    module.kernels.forget()


def drawn(case: tuple[Any, ...], dtype: Any, kind: Any, seed: int) -> dict[str, Any]:
    """A call over caches whose halves share rows, with tokens behind the last sequence."""
    import torch

    queries, used, heads, heads_kv, width, rotated, size = case
    torch.manual_seed(seed)
    tokens, columns = sum(queries) + 3, -(-max(used) // size)
    pages = len(used) * columns + 1
    both = torch.full((pages, heads_kv, size, 2 * width), 7.0, device="cuda").to(kind)
    angles = torch.rand(max(used), rotated // 2, device="cuda") * 6
    table = torch.randperm(pages - 1, device="cuda").int().view(len(used), columns)
    if len(used) > 1:
        table[0, -1] = pages  # of no page
    made = {
        name: torch.randn(tokens, count, width, device="cuda").to(dtype)
        for name, count in (("query", heads), ("key", heads_kv), ("value", heads_kv))
    }
    made |= {
        "key_cache": both.transpose(1, 2)[..., :width],
        "value_cache": both.transpose(1, 2)[..., width:],
        "page_table": table,
        "seqused_k": torch.tensor(used, device="cuda").int(),
        "cu_seqlens_q": torch.tensor([0, *queries], device="cuda").cumsum(0).int(),
        "out": torch.zeros(tokens, heads, width, device="cuda").to(kind),
    }
    if rotated:
        made |= {"cosine": angles.cos().contiguous(), "sine": angles.sin().contiguous()}
    if kind == torch.float8_e4m3fn:
        made |= {"q_scale": torch.rand(heads, device="cuda") + 0.01}
        made |= {n: torch.rand(heads_kv, device="cuda") + 0.01 for n in ("k_scale", "v_scale")}
    return made


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    import torch

    names = ("out", "key_cache", "value_cache")
    return all(
        torch.equal(found[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in names
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("types", ["bf16", "fp16", "bf16 e4m3", "fp16 e4m3"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"D={case[4]},R={case[5]}")
def test_it_has_the_bits_of_pytorch_s_operations(
    append: Any, case: tuple[Any, ...], types: str, interleaved: bool, monkeypatch: Any
) -> None:
    import torch

    dtype = torch.bfloat16 if "bf16" in types else torch.float16
    kind = torch.float8_e4m3fn if "e4m3" in types else dtype
    found, wanted = (drawn(case, dtype, kind, 3) for _ in range(2))
    launched: list[Any] = []
    launch = append._launch
    monkeypatch.setattr(append, "_launch", lambda *given: launched.append(launch(*given)))
    append.paged_append(**found, interleaved=interleaved)
    assert launched, "the kernel answered"
    monkeypatch.setattr(append, "_takes", lambda call: False)
    append.paged_append(**wanted, interleaved=interleaved)
    assert same(found, wanted) and found["out"].float().any()


def test_a_captured_call_follows_growing_lengths(append: Any) -> None:
    import torch

    case = ((1,) * 4, (40, 41, 42, 43), 8, 2, 64, 64, 16)
    found = drawn(case, torch.bfloat16, torch.bfloat16, 5)
    append.paged_append(**found)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append.paged_append(**found)
    wanted = drawn(case, torch.bfloat16, torch.bfloat16, 5)
    for call in (found, wanted):
        call["key_cache"].fill_(7), call["value_cache"].fill_(7), call["out"].zero_()
        call["seqused_k"].copy_(torch.tensor([7, 17, 33, 2]))
    graph.replay()
    append.paged_append(**wanted)
    torch.cuda.synchronize()
    assert same(found, wanted) and not (found["key_cache"] == 7).all()
