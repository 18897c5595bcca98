"""A layer of vLLM's by a tuned kernel beside its own FlashAttention, over a cache that vLLM wrote:
eager, and in a CUDA graph whose lengths grow.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fused_configs import maker

from tuner.compile.compiler import Compiler
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.measure.device import Device
from tuner.problem import AttentionProblem

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

FAMILY = family("fused_attention")
HEADS, HEADS_KV, WIDTH, SIZE, COLUMNS = 32, 8, 64, 16, 128
make = maker(early_exp=50, ping_pong=True)
DECODING = make(1, 64, kv_stages=3, packed_heads=4, blocks_per_sm=2, pdl=True)
CHUNK = make(2, 128, packed_heads=4, persistent=True, pdl=True)


def config_of(queries: int) -> Config:
    return DECODING if queries == 1 else CHUNK


def spec(queries: int) -> KernelSpec:
    causal = ",causal=1" if queries > 1 else ""
    text = f"B=2,H={HEADS},HKV={HEADS_KV},SQ={queries},SKV=2048,D={WIDTH},dtype=bf16{causal}"
    problem = AttentionProblem.parse(f"{text},page_size={SIZE},layout=bshd")
    return FAMILY.kernels(problem, config_of(queries))["attention"]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [spec(1), spec(64)]


@pytest.fixture
def layer(
    device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SimpleNamespace]:
    """`impl`, whose calls have the kernels of this module; `layer`, and the class of `metadata`."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            flash_attn = importlib.import_module("vllm.v1.attention.backends.flash_attn")
    except ImportError as exc:
        pytest.skip(f"vllm is not installed ({exc})")
    plans = importlib.import_module("tuner.runtime.call.plan")
    counters = importlib.import_module("tuner.runtime.call.counters")
    table = importlib.import_module("tuner.runtime.call.table").table
    loaded: dict[bool, LoadedKernel] = {}
    for (_, future), is_one in zip(compiler.submit(kernels()), (True, False), strict=True):
        loaded[is_one] = load(future.result())

    def find_out(kind: Any, told: Any, pose: Any, index: int, _: Any = None) -> Any:
        posed = pose()
        problem, kernel = posed.problem, loaded[posed.problem.seqlen_q == 1]
        config = config_of(problem.seqlen_q)
        (launch,) = FAMILY.launches(problem, config, posed.scale)
        return plans.KernelPlan(
            problem, config, index,
            shape=problem.output.shape,
            strides=problem.output.strides,
            steps=(plans._step(problem, kernel, launch, 0),),
            workspace_bytes=kernel.workspace_bytes(launch.integers),
            dtype=torch.bfloat16,
            writes_lse=True,
        )  # fmt: skip

    monkeypatch.setattr(table, "get", lambda kind: None)
    monkeypatch.setattr(table, "find_out", find_out)
    backend = importlib.import_module("tuner.runtime.engines.vllm.backend")
    impl = backend.TunerImpl(HEADS, WIDTH, WIDTH**-0.5, HEADS_KV, None, None, "auto")
    one = torch.ones((), device="cuda")
    counters.stats(reset=True)
    yield SimpleNamespace(
        impl=impl,
        layer=SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one),
        metadata=flash_attn.FlashAttentionMetadata,
        own=flash_attn.FlashAttentionImpl,
        counters=counters,
    )
    counters.stats(reset=True)


def filled(layer: SimpleNamespace, keys: tuple[int, ...]) -> tuple[Any, Any]:
    """A cache with the keys and values of sequences, as vLLM writes them, and the page table."""
    import torch

    pages = torch.randperm(len(keys) * COLUMNS, device="cuda").view(len(keys), COLUMNS).int()
    shape = pages.numel(), SIZE, HEADS_KV, 2 * WIDTH
    cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    for row, length in zip(pages, keys, strict=True):
        at = torch.arange(length, device="cuda")
        slots = row[at // SIZE].long() * SIZE + at % SIZE
        given = torch.randn(2, length, HEADS_KV, WIDTH, dtype=torch.bfloat16, device="cuda")
        layer.impl.do_kv_cache_update(layer.layer, given[0], given[1], cache, slots)
    return cache, pages


def step(layer: SimpleNamespace, pages: Any, queries: tuple[int, ...], keys: Any, most: int) -> Any:
    import torch

    starts = torch.tensor([0, *queries], device="cuda").cumsum(0).int()
    cascade = ("common_prefix_len", "cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")
    fields = {field.name for field in dataclasses.fields(layer.metadata)}
    return layer.metadata(
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        query_start_loc=starts,
        max_seq_len=most,
        seq_lens=keys,
        block_table=pages,
        slot_mapping=None,
        **({"use_cascade": False, **dict.fromkeys(cascade)} if "use_cascade" in fields else {}),
    )


def both(layer: SimpleNamespace, query: Any, cache: Any, metadata: Any) -> tuple[Any, Any]:
    """The outputs of the plug-in and of vLLM's own."""
    import torch

    outs = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
    given = layer.layer, query, query, query, cache, metadata
    layer.impl.forward(*given, outs[0])
    layer.own.forward(layer.impl, *given, outs[1])
    return outs


@pytest.mark.parametrize(
    ("queries", "keys"),
    [((1, 1, 1), (1, 17, 2000)), ((1, 300, 7), (900, 300, 64)), ((4, 4), (4, 1025))],
)
def test_a_layer_agrees_with_vllm_s_own(
    layer: SimpleNamespace, queries: tuple[int, ...], keys: tuple[int, ...]
) -> None:
    import torch

    torch.manual_seed(0)
    cache, pages = filled(layer, keys)
    shape = sum(queries), (HEADS + 2 * HEADS_KV) * WIDTH
    projected = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    query = projected[:, : HEADS * WIDTH].view(-1, HEADS, WIDTH)
    used = torch.tensor(keys, device="cuda").int()
    out, wanted = both(layer, query, cache, step(layer, pages, queries, used, max(keys)))
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
    assert layer.counters.stats().hits == 1


def test_a_graph_serves_lengths_that_grow_and_rows_that_are_padding(
    layer: SimpleNamespace,
) -> None:
    import torch

    torch.manual_seed(1)
    lengths = (5, 400, 2000, 1)
    cache, pages = filled(layer, lengths)
    query = torch.randn(4, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    used = torch.ones(4, dtype=torch.int32, device="cuda")
    metadata = step(layer, pages, (1, 1, 1, 1), used, COLUMNS * SIZE)
    out = torch.empty_like(query)
    given = layer.layer, query, query, query, cache, metadata, out
    layer.impl.forward(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.impl.forward(*given)
    assert layer.counters.stats().hits == 2
    for keys in ((5, 400, 2000, 1), (3, 16, 17, 0)):
        used.copy_(torch.tensor(keys).int())
        graph.replay()
        wanted = torch.empty_like(query)
        layer.own.forward(layer.impl, *given[:-1], wanted)
        rows = [at for at, length in enumerate(keys) if length]
        torch.testing.assert_close(out[rows], wanted[rows], atol=2e-2, rtol=2e-2)
    assert not out[3].any()  # one query that sees no key
