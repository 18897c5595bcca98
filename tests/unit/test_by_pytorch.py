"""Calls that no kernel serves: FlashAttention-2 and cuBLASLt epilogues, beside other operations."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tuner.errors import ConfigError  # noqa: E402
from tuner.runtime.attention import flash2, paged_composed, varlen  # noqa: E402
from tuner.runtime.attention.composed import Extras, compose  # noqa: E402
from tuner.runtime.attention.paged import paged_call  # noqa: E402
from tuner.runtime.call import devices  # noqa: E402
from tuner.runtime.products import matmul  # noqa: E402

SIZE, COLUMNS, PAGES, HEADS, HEADS_KV, WIDTH = 16, 4, 40, 4, 2, 16


def operator(
    query: Any, key: Any, value: Any, starts_q: Any, starts_kv: Any, *options: Any, **more: Any
) -> tuple[Any, Any]:
    """As the operator computes: packed, masks bottom-right, an infinite sum where nothing is seen;
    rows of no sequence are not written.
    """
    longest_q, longest_kv, _, is_causal, _ = options
    left, right, used = more["window_size_left"], more["window_size_right"], more.get("seqused_k")
    if starts_q is None:  # dense, (B, S, H, D)
        starts = torch.arange(len(query) + 1) * query.shape[1]
        packed = (t.flatten(0, 1) for t in (query, key, value))
        out, lse = operator(*packed, starts, starts, *options, **more)
        return out.view(query.shape), lse
    assert int(starts_q.diff().max()) <= longest_q and int(starts_kv.diff().max()) <= longest_kv
    if longest_q == 1:
        assert len(query) == len(starts_q) - 1, "a row of each sequence"
    out = torch.full_like(query, 77.0)
    lse = torch.full(query.shape[1::-1], 77.0)
    key, value = (
        t.repeat_interleave(query.shape[1] // t.shape[1], 1).float() for t in (key, value)
    )
    spans = zip(pairwise(starts_q.tolist()), pairwise(starts_kv.tolist()), strict=True)
    for index, ((first, last), (begin, end)) in enumerate(spans):
        count = end - begin if used is None else int(used[index])
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), key[begin : begin + count])
        away = torch.arange(count) - torch.arange(last - first)[:, None] - (count - last + first)
        hidden = (away > (0 if is_causal else right)) if is_causal or right >= 0 else away > count
        hidden |= (away < -left) if left >= 0 else False
        scores = (scores * more["scale"]).masked_fill(hidden, -math.inf)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.masked_fill(sums.isneginf(), 0.0)[..., None]).exp()
        part = torch.einsum("hqk,khd->qhd", weights, value[begin : begin + count])
        out[first:last] = part.to(out.dtype)
        lse[:, first:last] = sums.masked_fill(sums.isneginf(), math.inf)
    return out, lse


@pytest.fixture(autouse=True)
def _operator(monkeypatch: Any) -> None:
    monkeypatch.setattr(flash2, "_forward", operator)


KINDS: dict[str, tuple[list[int] | None, int, list[int], dict[str, Any]]] = {
    "one query each": (None, 1, [1, 20, 64, 33], {}),
    "one query, by starts": ([0, 1, 2, 3, 4], 1, [1, 20, 64, 33], {}),
    "a sequence without its query": ([0, 1, 1, 2, 3], 1, [5, 20, 64, 33], {}),
    "few": (None, 3, [3, 20, 64, 33], {"is_causal": True}),
    "more queries than keys": (None, 5, [3, 0, 64, 33], {"is_causal": True}),
    "chunks": ([0, 7, 8, 8, 21], 13, [9, 20, 64, 33], {"is_causal": True}),
    "window": (None, 1, [3, 20, 64, 33], {"left": 9}),
    "windows of chunks": ([0, 7, 8, 8, 21], 13, [9, 20, 64, 33], {"is_causal": True, "left": 4}),
    "sinks": ([0, 2, 4, 4, 7], 3, [9, 0, 64, 33], {"is_causal": True, "sinks": True}),
    "e4m3": (None, 2, [9, 20, 64, 33], {"is_causal": True, "e4m3": True}),
}


@pytest.mark.parametrize("dense_bytes", [1 << 30, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_answered_as_by_the_operations(
    kind: str, dense_bytes: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(paged_composed, "_DENSE_BYTES", dense_bytes)
    starts, longest, used, options = KINDS[kind]
    torch.manual_seed(0)
    is_e4m3 = options.get("e4m3", False)
    dtype = torch.float8_e4m3fn if is_e4m3 else torch.float16
    # Rows of no sequence may follow: then there are as many as sequences, not one of each.
    total = max(starts[-1], len(used)) if starts else longest * len(used)
    query = torch.randn(total, HEADS, WIDTH).to(dtype)
    cache = torch.randn(2, PAGES, SIZE, HEADS_KV, WIDTH)
    table = torch.randperm(PAGES)[: COLUMNS * len(used)].view(len(used), COLUMNS).int()
    for row, count in zip(table, used, strict=True):
        row[-(-count // SIZE) :] = PAGES + 10**6  # behind a sequence's last page: not read
    call = paged_call(
        *(query, *cache.to(dtype), table, torch.tensor(used, dtype=torch.int32)),
        None if starts is None else torch.tensor(starts, dtype=torch.int32),
        torch.randn(HEADS) if options.get("sinks") else None,
        *(longest, max(used), options.get("is_causal", False)),
        *(Extras(left=options.get("left", -1)), WIDTH**-0.5),
    )
    if is_e4m3:
        factors = (
            torch.tensor([0.5, 2.0, 1.0, 0.25]),
            torch.tensor([2.0, 0.5]),
            torch.tensor([1.0, 4]),
        )
        call = call._replace(descales=factors)
    out, lse = paged_composed._by_flash2(call)
    wanted, sums = paged_composed.composed(call)
    last = len(wanted) if starts is None else starts[-1]
    torch.testing.assert_close(out[:last], wanted[:last], atol=4e-2 if is_e4m3 else 2e-3, rtol=2e-2)
    torch.testing.assert_close(
        lse[:, :last], sums[:, :last], atol=2e-2 if is_e4m3 else 2e-3, rtol=0
    )


def test_factors_of_e4m3_are_not_rounded_before_they_multiply() -> None:
    query = torch.tensor([[[0.5, 3.5, 7.0, 448.0]]]).to(torch.float8_e4m3fn)
    call = paged_composed.Paged(*(query, *[None] * 13))._replace(descales=(torch.tensor([0.99]),))
    wanted = (query.float() * 0.99).bfloat16()
    assert torch.equal(paged_composed._widened(query, call, 0), wanted)


def test_tensors_of_several_devices_are_not_its(monkeypatch: Any) -> None:
    query, cache = torch.zeros(1, HEADS, WIDTH), torch.zeros(2, 1, SIZE, HEADS_KV, WIDTH)
    table, used = torch.zeros(1, 1).int(), torch.ones(1).int()
    call = paged_call(query, *cache, table, used, None, None, 1, 1, False, Extras(), 1.0)
    monkeypatch.setattr(flash2, "takes", lambda *tensors: True)
    monkeypatch.setattr(paged_composed, "_by_flash2", lambda call: "taken")
    assert paged_composed.composed(call) == "taken"
    call = call._replace(starts_q=torch.tensor([0, 1]).to("meta"))
    with pytest.raises(NotImplementedError, match="meta tensor"):  # the operations read the lengths
        paged_composed.composed(call)


@pytest.mark.parametrize(("major", "is_built"), [(8, True), (9, True), (7, True), (9, False)])
def test_gpus_without_it_are_told(major: int, is_built: bool, monkeypatch: Any) -> None:
    facts = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_built)
    assert flash2._runs_on.__wrapped__(0) is (is_built and major >= 8)


def test_single_queries_of_some_sequences_are_not_taken_as_one_of_each(monkeypatch: Any) -> None:
    monkeypatch.setattr(flash2, "takes", lambda *tensors: True)
    query, key = torch.randn(2, HEADS, WIDTH).half(), torch.randn(9, HEADS_KV, WIDTH).half()
    starts, ends = (torch.tensor(of, dtype=torch.int32) for of in ([0, 1, 1, 2], [0, 4, 6, 9]))
    call = varlen.VarlenCall(query, key, key, starts, ends, 1, 4, False, 0.25, True)
    by_operator = call.by_pytorch()
    apart = torch.stack((starts, starts), 1)[:, 0]
    assert not call._replace(starts_q=apart)._fits_flash2, "not contiguous"
    assert not call._replace(starts_q=starts.to("meta"))._fits_flash2
    by_lengths = call._replace(starts_q=apart).by_pytorch()
    torch.testing.assert_close(by_operator, by_lengths, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_go_to_it_where_its_mask_is_the_same(
    is_causal: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(flash2, "takes", lambda *tensors: True)
    query, key, value = torch.randn(3, 30, 2, WIDTH).half()
    starts, others = (torch.tensor([0, 7, 7, 30], dtype=torch.int32) for _ in range(2))
    call = varlen.VarlenCall(query, key, value, starts, starts, 23, 23, is_causal, 0.25, False)
    assert call._fits_flash2
    by_operator = call.by_pytorch()
    apart = call._replace(starts_kv=others)
    assert apart._fits_flash2 is not is_causal
    monkeypatch.setattr(flash2, "takes", lambda *tensors: False)
    torch.testing.assert_close(by_operator, apart.by_pytorch(), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize(
    ("is_causal", "window"), [(True, (5, -1)), (False, (5, 3)), (False, (-1, 2))]
)
def test_windows_over_as_many_keys_as_queries_go_to_it(
    is_causal: bool, window: tuple[int, int], monkeypatch: Any
) -> None:
    query, key, value = torch.randn(3, 2, 4, 21, WIDTH).half()
    options = None, 0.0, is_causal, 0.3, False, Extras(*window)
    by_operations = compose(query, key, value, *options)
    monkeypatch.setattr(flash2, "takes", lambda *tensors: True)
    by_operator = compose(query, key, value, *options)
    assert by_operator.stride() == query.transpose(1, 2).contiguous().transpose(1, 2).stride()
    torch.testing.assert_close(by_operator, by_operations, atol=2e-3, rtol=1e-2)
    shared = compose(query, key[:1], value[:1], *options)
    assert shared.shape == query.shape, "one batch of keys for all: by PyTorch's operations"
    fewer = query[:, :, :9]
    assert compose(fewer, key, value, *options).shape == fewer.shape, "by PyTorch's operations"


def test_a_capture_of_lengths_that_the_host_reads_is_one_clear_line(monkeypatch: Any) -> None:
    flash2.check_uncaptured("tuner.paged_attention")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "is_capturing", lambda: True)
    with pytest.raises(
        ConfigError, match=r"tuner.paged_attention cannot be captured here.*D a mul"
    ):
        flash2.check_uncaptured("tuner.paged_attention")
    rows, starts = torch.zeros(8, HEADS, WIDTH), torch.tensor([0, 8]).int()
    with pytest.raises(ConfigError, match=r"attention_varlen cannot .* one tensor as cu_seqlens_q"):
        varlen.attention_varlen(rows, rows, rows, starts, starts.clone(), 8, 8, is_causal=True)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_cublaslts_epilogue_answers_activations_behind_a_bias(
    activation: str, monkeypatch: Any
) -> None:
    rows, weight, bias = torch.randn(3, 5, 16), torch.randn(24, 16), torch.randn(24)
    by_two = matmul._linear(rows, weight, bias, activation)
    assert not matmul._may_fuse(rows, weight, bias), "on the CPU"
    monkeypatch.setattr(matmul, "_may_fuse", lambda *tensors: True)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    fused = matmul._linear(rows, weight, bias, activation)
    assert fused.shape == by_two.shape
    # GELU on the CPU is the exact one.
    torch.testing.assert_close(fused, by_two, atol=1e-3, rtol=1e-3)
