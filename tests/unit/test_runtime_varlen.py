"""Packed sequences: what a kernel is given, what PyTorch answers, what is refused."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from noted_kernels import find_kernels

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import Family
from tuner.families.fused_attention import FusedAttention
from tuner.families.fused_attention_backward import FusedAttentionBackward
from tuner.families.peers import sdpa
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionBackwardProblem, AttentionProblem, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")
SDPA = torch.nn.functional.scaled_dot_product_attention
QUERIES, KEYS = (5, 0, 1, 7, 3), (9, 4, 0, 7, 1)
LONGEST = max(QUERIES), max(KEYS)


@pytest.fixture
def varlen(runtime: SimpleNamespace) -> Any:
    return importlib.import_module("tuner.runtime.attention.varlen").attention_varlen


def starts(lengths: Sequence[int]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(heads_kv: int = 4, dtype: Any = torch.float32, spare: int = 0) -> list[Any]:
    """Query, key, value and where their sequences start; `spare` queries belong to none."""
    tensors = [
        torch.randn(rows, heads, 16).to(dtype)
        for rows, heads in (
            (sum(QUERIES) + spare, 4), (sum(KEYS), heads_kv), (sum(KEYS), heads_kv)
        )
    ]  # fmt: skip
    return [*tensors, starts(QUERIES), starts(KEYS)]


def expected(inputs: list[Any], **options: Any) -> Any:
    """Row by row of each sequence, by products and a softmax alone."""
    query, key, value = inputs[:3]
    key, value = (t.repeat_interleave(4 // t.shape[1], 1) for t in (key, value))
    is_causal, scale = options.get("is_causal", False), options.get("scale", 0.25)
    out, row, first = torch.zeros_like(query), 0, 0
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        for i in range(queries if keys else 0):
            seen = slice(first, first + (min(i + 1, keys) if is_causal else keys))
            weights = (torch.einsum("hd,khd->hk", query[row + i], key[seen]) * scale).softmax(-1)
            out[row + i] = torch.einsum("hk,khd->hd", weights, value[seen])
        row, first = row + queries, first + keys
    return out


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7, "is_causal": True}])
def test_pytorch_answers_one_sequence_after_the_other(
    runtime: SimpleNamespace, varlen: Any, options: dict[str, Any]
) -> None:
    inputs = packed(2, spare=2)
    out = varlen(*inputs, *LONGEST, **options, enable_gqa=True)
    torch.testing.assert_close(out, expected(inputs, **options))
    assert runtime.counters.stats().fallbacks == {"the tensors are not on a CUDA device": 1}


def test_gradients_flow_through_pytorch_s_answer(varlen: Any) -> None:
    inputs = packed()
    for tensor in inputs[:3]:
        tensor.requires_grad_()
    wanted = torch.autograd.grad(expected(inputs).square().sum(), inputs[:3])
    found = torch.autograd.grad(varlen(*inputs, *LONGEST).square().sum(), inputs[:3])
    torch.testing.assert_close(found, wanted)


def test_no_tokens_at_all(varlen: Any) -> None:
    empty = torch.zeros(0, 4, 16)
    assert varlen(empty, empty, empty, starts([0]), starts([0]), 0, 0).shape == (0, 4, 16)


def serve(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, differentiates: bool = False
) -> SimpleNamespace:
    """Fused attention kernels, of gradients only if it `differentiates`."""
    backward = FusedAttentionBackward() if differentiates else None

    def family_of(problem: Problem) -> Family | None:
        return FusedAttention() if problem.op == "attention" else backward

    return find_kernels(on_cpu, monkeypatch, family_of)


def test_a_kernel_is_given_the_sizes_of_the_call(
    on_cpu: SimpleNamespace, varlen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(on_cpu, monkeypatch)
    inputs = packed(2, torch.float16, spare=1)
    out = varlen(*inputs, *LONGEST, is_causal=True, scale=0.5, enable_gqa=True)
    assert (out.shape, out.is_contiguous(), out.dtype) == (inputs[0].shape, True, torch.float16)
    # Looked up by powers of two ...
    [(_, problem)] = served.posed
    assert problem == AttentionProblem.parse("B=8,H=4,HKV=2,SQ=8,SKV=16,D=16,varlen=1,causal=1")
    # ... and launched with what there is.
    [(tensors, integers, scalars)] = served.launched
    query, key, value, starts_q, starts_kv = (t.data_ptr() for t in inputs)
    assert tensors == [query, key, value, out.data_ptr(), 0, starts_q, starts_kv]
    assert integers[:6] == (5, 4, 2, 7, 9, 16)
    assert integers[7:9] == integers[16:18] == (16, 64) and integers[10:12] == (16, 32)
    assert integers[-2:] == (17, 21) and scalars == (0.5,)
    assert on_cpu.counters.stats().hits == 1


def test_gradients_are_launched_with_the_sizes_of_the_call(
    on_cpu: SimpleNamespace, varlen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(on_cpu, monkeypatch, differentiates=True)
    inputs = packed(2, torch.float16, spare=1)
    for tensor in inputs[:3]:
        tensor.requires_grad_()
    out = varlen(*inputs, *LONGEST, is_causal=True, scale=0.5, enable_gqa=True)
    grad_out = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs[:3], grad_out)
    assert [grad.shape for grad in found] == [t.shape for t in inputs[:3]]
    forward, backward = served.posed[0][1], served.posed[-1][1]
    assert backward == AttentionBackwardProblem.of(forward)
    [(given, *_), (tensors, integers, scalars)] = served.launched
    names = [operand.name for operand in backward.operands]
    at = dict(zip(names, tensors, strict=True))
    assert [at[name] for name in ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_kv")] == [
        t.data_ptr() for t in inputs
    ]
    assert (at["grad_out"], at["logsumexp"]) == (grad_out.data_ptr(), given[4])
    assert [at[f"grad_{name}"] for name in ("query", "key", "value")] == [
        grad.data_ptr() for grad in found
    ]
    assert integers[:6] == (5, 4, 2, 7, 9, 16)
    assert integers[-2:] == (17, 21) and scalars == (0.5,)
    assert on_cpu.counters.stats().hits == 2


def test_a_peer_is_given_the_lengths_of_the_call(
    on_cpu: SimpleNamespace, varlen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("tuner.runtime.attention.varlen")
    monkeypatch.setattr(on_cpu.plan.devices, "current", lambda: 0)
    given: list[Any] = []

    def fwd(query: Any, key: Any, value: Any, **options: Any) -> Any:
        given.append(options)
        assert query.is_contiguous() and key.shape == value.shape == (21, 2, 16)
        return query

    def by_peer(call: Any) -> Any:
        posed = call.pose()
        accepts = family("vendor_sdpa").accepts(posed.estimated, peer, DEFAULT_GPU)
        assert accepts == (call.starts_q is call.starts_kv or not call.is_causal)
        if not accepts:
            ok = Measurement(posed.problem, peer, DEFAULT_GPU, Regime(), Status.OK)
            return on_cpu.plan.plan_of(posed, ok, 0)
        connect = sdpa.serving_call(SimpleNamespace(fwd=fwd), posed.problem, 0.5, False)
        return call.run(on_cpu.plan.VendorPlan(posed.problem, peer, 0, call=connect))

    peer = Config("vendor_sdpa", {"kernel": sdpa.UNPREPARED})
    monkeypatch.setattr(module, "serve", by_peer)
    inputs = packed(2, torch.float16, spare=5)
    assert torch.equal(varlen(*inputs, *LONGEST, scale=0.5, enable_gqa=True), inputs[0])
    assert given == [
        {
            **{"cu_seqlens_q": inputs[3], "max_seqlen_q": 7, "cu_seqlens_k": inputs[4]},
            **{"max_seqlen_k": 9, "causal": False, "scale": 0.5},
        }
    ]
    refused = varlen(*inputs, 9, 9, is_causal=True, scale=0.5, enable_gqa=True)
    assert "bottom-right" in refused.reason and len(given) == 1
    varlen(*inputs[:4], inputs[3], 9, 9, is_causal=True, scale=0.5, enable_gqa=True)
    assert given[1]["causal"] and len(given) == 2
    varlen(*inputs, 1, 9, scale=0.5, enable_gqa=True)
    assert given[2]["max_seqlen_q"] == 2, "one would be a query of each sequence"


def test_calls_of_like_sizes_are_of_one_kind(
    on_cpu: SimpleNamespace, varlen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(on_cpu, monkeypatch)
    inputs = packed(4, torch.float16)
    for longest, options in (
        ((9, 17), {}),
        ((10, 20), {}),
        ((10, 21), {}),
        ((9, 17), {"scale": 2.0}),
    ):
        varlen(*inputs, *longest, **options)
    kinds = [kind for kind, _ in served.posed]
    assert kinds[0] == kinds[1] and len(set(kinds)) == 3
    assert [integers[3:5] for _, integers, _ in served.launched] == [
        (9, 17),
        (10, 20),
        (10, 21),
        (9, 17),
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda i: i[0].requires_grad_(), "a gradient is wanted"),
        (lambda i: i.__setitem__(0, i[0].mT.contiguous().mT), "the tensors are not contiguous"),
        (lambda i: i.__setitem__(slice(0, 3), [t.float() for t in i[:3]]), "takes such tensors"),
        (
            lambda i: i.__setitem__(slice(0, 3), [t[..., :12].contiguous() for t in i[:3]]),
            "takes such tensors",
        ),
    ],
)
def test_what_a_kernel_cannot_take_is_pytorch_s(
    on_cpu: SimpleNamespace,
    varlen: Any,
    monkeypatch: pytest.MonkeyPatch,
    change: Any,
    reason: str,
) -> None:
    served = serve(on_cpu, monkeypatch)
    inputs = packed(4, torch.float16)
    change(inputs)
    assert varlen(*inputs, *LONGEST).shape == inputs[0].shape
    [(said, count)] = on_cpu.counters.stats().fallbacks.items()
    assert reason in said and count == 1 and not served.launched


def test_a_scale_that_is_not_positive_and_grouped_heads_are_pytorch_s(
    on_cpu: SimpleNamespace, varlen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(on_cpu, monkeypatch)
    varlen(*packed(4, torch.float16), *LONGEST, scale=-1.0)
    with pytest.raises(RuntimeError):
        varlen(*packed(2, torch.float16), *LONGEST)
    assert list(on_cpu.counters.stats().fallbacks) == [
        "scale is not positive",
        "heads are grouped without enable_gqa",
    ]
    assert not served.launched


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, torch.zeros(16, 4, 1, 16), r"query \(16, 4, 1, 16\).*allowed: \(total_q, H, D\)"),
        (1, torch.zeros(20, 4, 16), r"key \(20, 4, 16\), value \(21, 4, 16\)"),
        (0, torch.zeros(16, 4, 8), "differ in D"),
        (3, starts(QUERIES).long(), r"cu_seqlens_q is torch.int64 \(6,\) \(allowed: torch.int32"),
        (4, starts([])[:0], r"cu_seqlens_kv is torch.int32 \(0,\)"),
        (4, starts([]), "cu_seqlens_q has 6 entries, cu_seqlens_kv 1"),
        (4, starts([21]), "cu_seqlens_q has 6 entries, cu_seqlens_kv 2"),
        (3, starts([5, 0, 1, 7, 4]), "cu_seqlens_q runs from 0 to 17 .allowed: from 0"),
        (3, starts([5, -1, 1, 7, 3]), "not in order"),
        (3, starts(QUERIES) + 1, "runs from 1 to 17"),
        (5, 6, "cu_seqlens_q has a sequence of 7 .allowed: up to max_seqlen, 6"),
        (6, -1, "max_seqlen_kv=-1 is out of range"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    varlen: Any, place: int, value: Any, words: str
) -> None:
    arguments = [*packed(), *LONGEST]
    arguments[place] = value
    with pytest.raises(ConfigError, match=words) as caught:
        varlen(*arguments)
    assert "\n" not in str(caught.value)
