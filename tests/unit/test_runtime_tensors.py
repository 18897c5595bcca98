"""Tensors that are empty, or lie as no kernel reads them: what PyTorch makes of them, in every way
in; and never a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import Machine, ToyWithBias, fake_machine, toy_won, was_tuned
from runtime_server import (
    PROBLEM,
    Server,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    inputs,
)

from tuner.problem import AttentionProblem, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

import tuner  # noqa: E402

built, server, machine = built_dispatcher, dispatched_server, fake_machine

SDPA = torch.nn.functional.scaled_dot_product_attention
LINEAR, SILU = torch.nn.functional.linear, torch.nn.functional.silu
#: Batch, heads, key heads, queries, keys, head dimension.
EMPTY = [
    (0, 2, 2, 4, 4, 8),
    (2, 2, 2, 0, 4, 8),
    (2, 2, 2, 4, 0, 8),
    (2, 2, 2, 0, 0, 8),
    (2, 0, 0, 4, 4, 8),
    (2, 2, 2, 4, 4, 0),
    (0, 4, 2, 4, 6, 8),
    (2, 4, 2, 4, 0, 8),
]


def same(out: Any, wanted: Any) -> bool:
    """Everything that a caller can see."""
    facts = [(t.shape, t.stride(), t.dtype, t.device) for t in (out, wanted)]
    return facts[0] == facts[1] and torch.equal(out, wanted)


def attention_inputs(sizes: tuple[int, ...], layout: str, dtype: Any) -> list[Any]:
    batch, heads, heads_kv, queries, keys, head_dim = sizes

    def made(count: int, length: int) -> Any:
        if layout == "bhsd":
            return torch.randn(batch, count, length, head_dim).to(dtype)
        return torch.randn(batch, length, count, head_dim).to(dtype).transpose(1, 2)

    return [made(heads, queries), made(heads_kv, keys), made(heads_kv, keys)]


@pytest.mark.parametrize("options", [{}, {"window": 64}, {"softcap": 1e4}], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_attention(
    on_cpu: SimpleNamespace,
    sizes: tuple[int, ...],
    layout: str,
    dtype: Any,
    is_causal: bool,
    options: dict[str, Any],
) -> None:
    q, k, v = attention_inputs(sizes, layout, dtype)
    call = {"is_causal": is_causal, "enable_gqa": sizes[1] != sizes[2]}
    wanted = SDPA(q, k, v, **call)
    for _ in range(2):
        assert same(tuner.attention(q, k, v, **call, **options), wanted)
    assert set(on_cpu.counters.stats().fallbacks) == {"no kernel takes such tensors"}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", EMPTY, ids=str)
def test_empty_operators_and_gradients(
    on_cpu: SimpleNamespace, sizes: tuple[int, ...], is_causal: bool
) -> None:
    """The operators' strides are those of an empty tensor like the query, as tracing is told."""
    tensors = [t.requires_grad_() for t in attention_inputs(sizes, "bhsd", torch.float32)]
    is_grouped = sizes[1] != sizes[2]
    wanted = SDPA(*tensors, is_causal=is_causal, enable_gqa=is_grouped)
    gradients = torch.autograd.grad(wanted.sum(), tensors)
    ops = torch.ops.tuner
    for out in (
        ops.attention(*tensors, is_causal),
        ops.attention_with_lse(*tensors, is_causal)[0],
        tuner.attention(*tensors, is_causal=is_causal, enable_gqa=is_grouped),
        tuner.attention(*tensors, is_causal=is_causal, enable_gqa=is_grouped, softcap=1e4),
        tuner.attention(*tensors, is_causal=is_causal, enable_gqa=is_grouped, window=64),
    ):
        assert same(out, wanted)
        found = torch.autograd.grad(out.sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(found, gradients, strict=True))
    lse = ops.attention_with_lse(*tensors, is_causal)[1]
    assert (lse.shape, lse.dtype) == (tensors[0].shape[:3], torch.float32)


def test_empty_e4m3(on_cpu: SimpleNamespace) -> None:
    for batch, queries, keys in ((0, 4, 4), (2, 0, 4), (2, 4, 0)):
        sizes = (batch, 2, 2, queries, keys, 16)
        q, k, v = attention_inputs(sizes, "bhsd", torch.float8_e4m3fn)
        ones = torch.ones(batch, 2)
        out = tuner.attention(q, k, v, descale_q=ones, descale_k=ones, descale_v=ones)
        assert same(out, SDPA(*(t.to(torch.bfloat16) for t in (q, k, v))))


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 4)], [(4, 0)], [(3, 2), (0, 5), (2, 0)]])
def test_empty_packed_sequences(on_cpu: SimpleNamespace, lengths: list[tuple[int, int]]) -> None:
    queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k, v = (torch.randn(n, 2, 8).half() for n in (queries, keys, keys))
    starts = [
        torch.tensor([0, *itertools.accumulate(pair[i] for pair in lengths)], dtype=torch.int32)
        for i in (0, 1)
    ]
    out = tuner.attention_varlen(q, k, v, *starts, 4, 5)
    wanted = torch.zeros_like(q)
    for i, (rows, seen) in enumerate(lengths):
        if rows and seen:
            parts = [
                t[s[i] : s[i + 1]].transpose(0, 1)[None]
                for t, s in ((q, starts[0]), (k, starts[1]), (v, starts[1]))
            ]
            wanted[starts[0][i] : starts[0][i + 1]] = SDPA(*parts)[0].transpose(0, 1)
    assert same(out, wanted)


@pytest.mark.parametrize("sizes", list(itertools.product((0, 3), (0, 32), (0, 8)))[:-1], ids=str)
def test_empty_products(on_cpu: SimpleNamespace, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    a, w, bias = torch.randn(m, k).half(), torch.randn(n, k).half(), torch.randn(n).half()
    for given in (a, a[None], a.new_empty(0, 2, k)):
        assert same(tuner.linear(given, w), LINEAR(given, w))
        assert same(tuner.linear(given, w, bias, activation="silu"), SILU(LINEAR(given, w, bias)))
        gated = SILU(LINEAR(given, w)) * LINEAR(given, w)
        assert same(tuner.swiglu(given, tuner.interleave(w, w)), gated)
    assert same(tuner.matmul(a, w.t()), a @ w.t())
    none = a.new_empty(0, m, k), w.t().new_empty(0, k, n)
    assert same(tuner.matmul(*none), none[0] @ none[1])
    offsets = torch.tensor([0, m, m], dtype=torch.int32)
    out = tuner.grouped_mm(a, torch.stack([w, w]), offsets)
    assert same(out, a @ w.t())
    assert on_cpu.counters.stats().hits == 0


Change = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
#: Other tensors of the sizes of `PROBLEM`: none lies as it does.
OTHERWISE: dict[str, Change] = {
    "keys expanded over heads": lambda q, k, v: (
        q,
        k[:, :1].expand(k.shape),
        v[:, :1].expand(v.shape),
    ),
    "one key for all": lambda q, k, v: (q, k[:, :, :1].expand(k.shape), v),
    "one element": lambda q, k, v: (q, k, v[:1, :1, :1, :1].expand(v.shape)),
    "queries expanded": lambda q, k, v: (q[:, :, :1].expand(q.shape), k, v),
    "rows apart": lambda q, k, v: (torch.cat([q, q], -1)[..., :8], k, v),
    "every other key": lambda q, k, v: (q, k, torch.cat([v, v], 2)[:, :, ::2]),
    "turned": lambda q, k, v: (q, k.mT.contiguous().mT, v),
    "overlapping": lambda q, k, v: (q, k.as_strided(k.shape, (256, 64, 8, 1)), v),
    "a negative view": lambda q, k, v: (q, torch._neg_view(k), v),
}


def shifted(tensor: Any, elements: int) -> Any:
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype)[elements:]
    return room.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("path", ["dispatcher", "python"])
@pytest.mark.parametrize("way", OTHERWISE)
def test_tensors_that_lie_otherwise(server: Server, way: str, path: str) -> None:
    """Also once the dispatcher knows the plan of those that lie as tuned, and after a refusal."""
    if path == "python":
        server.runtime.dispatch.use(None)
    server.decide(PROBLEM)
    q, k, v = inputs()
    assert by_kernel(server.attention(q, k, v), q, 16)
    others = OTHERWISE[way](q, k, v)
    wanted = SDPA(*others)
    for _ in range(3):
        out, _, launched = server.went(lambda: server.attention(*others))
        assert not launched and torch.equal(out, wanted)
    assert by_kernel(server.attention(q, k, v), q, 16)


@pytest.mark.parametrize("path", ["dispatcher", "python"])
def test_zeros_without_memory(server: Server, path: str) -> None:
    """PyTorch's attention of such CPU tensors is not the same twice: its numbers say nothing."""
    if path == "python":
        server.runtime.dispatch.use(None)
    server.decide(PROBLEM)
    q, k, v = inputs()
    none = torch._efficientzerotensor(k.shape, dtype=k.dtype)
    for given in ((q, k, v), (q, none, v), (none, none, none), (q, k, none)):
        out, _, launched = server.went(lambda given=given: server.attention(*given))
        assert launched == (given[1] is k and given[2] is v) and out.shape == q.shape


def test_an_offset_that_a_kernel_can_read_is_served(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    for _ in range(2):
        out, by_python, launched = server.went(lambda: server.attention(shifted(q, 8), k, v))
        assert launched and by_kernel(out, q, 16)
    assert not by_python


def test_dimensions_of_one_have_any_stride(server: Server) -> None:
    problem = AttentionProblem.parse("S=16,D=8,H=1")
    server.decide(problem)
    q, k, v = inputs(problem)
    flat = [t.as_strided(t.shape, (0, 0, 8, 1)) for t in (q, k, v)]
    for _ in range(2):
        out, _, launched = server.went(lambda: server.attention(*flat))
        assert launched and by_kernel(out, q, 16) and out.shape == q.shape


@pytest.mark.parametrize("path", ["dispatcher", "python"])
def test_products_that_lie_otherwise(server: Server, path: str) -> None:
    if path == "python":
        server.runtime.dispatch.use(None)
    linear, matmul = server.runtime.products.linear, server.runtime.products.matmul
    server.decide(
        GemmProblem(m=8, n=16, k=32),
        GemmProblem(m=8, n=16, k=32, epilogue="bias"),
        GemmProblem(m=8, n=16, k=32, batch=3, layout_b="row"),
    )
    a, w, bias = torch.randn(8, 32).half(), torch.randn(16, 32).half(), torch.randn(16).half()
    stack = torch.randn(3, 32, 16).half()
    assert by_kernel(linear(a, w), a, 8) and by_kernel(linear(a, w, bias), a, 8)
    assert by_kernel(matmul(torch.stack([a] * 3), stack), a, 8)
    calls: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = [
        (linear, LINEAR, (a[:1].expand(8, 32), w)),
        (linear, LINEAR, (shifted(a, 1), w)),
        (linear, LINEAR, (a, w[:1].expand(16, 32))),
        (linear, LINEAR, (a, w, bias[:1].expand(16))),
        (linear, LINEAR, (a, w, shifted(bias, 1))),
        (linear, LINEAR, (torch._efficientzerotensor(a.shape, dtype=a.dtype), w)),
        (matmul, torch.matmul, (a.expand(3, 8, 32), stack)),
        (matmul, torch.matmul, (torch.stack([a] * 3), stack[:1].expand(3, 32, 16))),
    ]
    for ours, theirs, given in calls:
        wanted = theirs(*given)
        for _ in range(2):
            out, _, launched = server.went(lambda ours=ours, given=given: ours(*given))
            assert not launched and torch.equal(out, wanted)


def test_a_bias_that_no_kernel_can_read(machine: Machine) -> None:
    machine.toy = ToyWithBias()
    machine.answers = toy_won
    q, k, v = (torch.randn(1, 2, 16, 8).half() for _ in range(3))
    mask = torch.randn(16, 16).half()
    assert was_tuned(machine.attention(q, k, v, mask))
    launched = len(machine.launched)
    bad = torch._neg_view(mask)
    assert torch.equal(machine.attention(q, k, v, bad), SDPA(q, k, v, bad))
    assert len(machine.launched) == launched
    assert machine.stats().fallbacks == {"a tensor is a negative view": 1}
