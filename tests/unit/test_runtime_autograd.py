"""Gradients of tuned calls, against PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention import SDPBackend  # noqa: E402

from tuner.problem import AttentionBackwardProblem  # noqa: E402
from tuner.runtime.attention import composed  # noqa: E402  (and the operators)
from tuner.runtime.training import autograd  # noqa: E402  (and the operators)
from tuner.runtime.training import gradients as differentiation  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention
OPERATORS = {
    "attention": lambda *arguments: torch.ops.tuner.attention(*arguments),
    "attention_with_lse": lambda *arguments: torch.ops.tuner.attention_with_lse(*arguments)[0],
}


def tensors(
    heads_kv: int = 4,
    lengths: tuple[int, int] = (6, 6),
    layout: str = "bhsd",
    dtype: Any = torch.float16,
) -> list[Any]:
    """Leaves: query, key and value of two batches, four query heads, D=8."""
    made = []
    for heads, length in ((4, lengths[0]), (heads_kv, lengths[1]), (heads_kv, lengths[1])):
        if layout == "bhsd":
            tensor = torch.randn(2, heads, length, 8)
        else:
            tensor = torch.randn(2, length, heads, 8).transpose(1, 2)
        made.append(tensor.to(dtype).requires_grad_())
    return made


def gradients(out: Any, inputs: list[Any], grad_out: Any) -> list[Any]:
    return list(torch.autograd.grad(out, inputs, grad_out))


def close(found: list[Any], wanted: list[Any]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2) for a, b in pairs)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads_kv,lengths", [(4, (3, 5)), (2, (4, 4)), (1, (5, 3))])
def test_derivatives_are_those_of_the_numbers(
    operator: Any, heads_kv: int, lengths: tuple[int, int], is_causal: bool
) -> None:
    inputs = tensors(heads_kv, lengths, dtype=torch.float64)

    def attend(*inputs: Any) -> Any:
        return operator(*inputs, is_causal, 0.3)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads_kv,is_causal", [(4, False), (4, True), (2, True)])
def test_a_tuned_kernel_answers_and_its_gradient_is_right(
    tuned: SimpleNamespace, heads_kv: int, is_causal: bool, layout: str
) -> None:
    inputs = tensors(heads_kv, layout=layout)
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": heads_kv != 4}
    out, wanted = tuned.attention.attention(*inputs, **options), SDPA(*inputs, **options)
    grad = torch.randn_like(out)
    assert close([out], [wanted])
    assert close(gradients(out, inputs, grad), gradients(wanted, inputs, grad))
    assert (len(tuned.problems), tuned.counters.stats().hits) == (1, 1)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads_kv,is_causal", [(4, False), (2, True)])
def test_what_was_measured_for_gradients_computes_them(
    tuned: SimpleNamespace, heads_kv: int, is_causal: bool, layout: str
) -> None:
    tuned.differentiates = True
    inputs = tensors(heads_kv, layout=layout)
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": heads_kv != 4}
    out, wanted = tuned.attention.attention(*inputs, **options), SDPA(*inputs, **options)
    grad = torch.randn_like(out)
    found = gradients(out, inputs, grad)
    assert close(found, gradients(wanted, inputs, grad))
    assert [t.stride() for t in found] == [t.stride() for t in inputs]
    forward, backward = tuned.problems
    assert backward == AttentionBackwardProblem.of(forward)
    assert tuned.counters.stats().hits == 2


def test_deterministic_programs_have_deterministic_gradients(tuned: SimpleNamespace) -> None:
    tuned.differentiates = True
    inputs = tensors()
    out = tuned.attention.attention(*inputs)
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert tuned.problems[1] == AttentionBackwardProblem.of(tuned.problems[0], True)


def test_gradients_of_expanded_keys_are_pytorch_s(tuned: SimpleNamespace) -> None:
    """Keys of one head that all heads share have a gradient a head."""
    tuned.differentiates = True
    query, key, value = tensors()
    key, value = (t.detach()[:, :1].expand(2, 4, 6, 8).requires_grad_() for t in (key, value))
    out, wanted = (attend(query, key, value) for attend in (tuned.attention.attention, SDPA))
    grad = torch.randn_like(out)
    inputs = [query, key, value]
    assert close(gradients(out, inputs, grad), gradients(wanted, inputs, grad))
    assert [problem.op for problem in tuned.problems] == ["attention"]


def test_only_some_inputs_want_a_gradient(tuned: SimpleNamespace) -> None:
    q, k, v = tensors()
    k.requires_grad_(False)
    out = tuned.attention.attention(q, k, v)
    out.sum().backward()
    found, q.grad = q.grad, None
    SDPA(q, k, v).sum().backward()
    assert close([found], [q.grad]) and k.grad is None
    assert len(tuned.problems) == 1


@pytest.mark.parametrize(
    "writes_lse,lengths,is_causal,reason",
    [
        (False, (6, 6), False, "exact does not write the log-sum-exp"),
        (True, (6, 9), True, "no fused backward kernel"),
    ],
)
def test_where_no_kernel_differentiates_pytorch_does_all(
    tuned: SimpleNamespace,
    writes_lse: bool,
    lengths: tuple[int, int],
    is_causal: bool,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tuned.writes_lse = writes_lse
    inputs = tensors(lengths=lengths)
    out, wanted = (
        tuned.attention.attention(*inputs, None, 0.0, is_causal),
        SDPA(*inputs, is_causal=is_causal),
    )
    assert torch.equal(out, wanted) and type(out.grad_fn) is type(wanted.grad_fn)
    assert tuned.counters.stats().fallbacks == {"a gradient is wanted": 1}
    assert reason in caplog.text
    with torch.no_grad():
        tuned.attention.attention(*inputs, None, 0.0, is_causal)
    assert len(tuned.problems) == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_training(tuned: SimpleNamespace, dynamic: bool) -> None:
    torch._dynamo.reset()
    attention = tuned.attention.attention
    compiled = torch.compile(attention, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (8, 12):
        inputs = tensors(2, (length, length))
        out = compiled(*inputs, is_causal=True, enable_gqa=True)
        wanted = SDPA(*inputs, is_causal=True, enable_gqa=True)
        grad = torch.randn_like(out)
        assert close(gradients(out, inputs, grad), gradients(wanted, inputs, grad))
    assert tuned.counters.stats().hits == 2


def test_scores_are_recomputed_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(2, (50, 50), dtype=torch.float64)
    out, lse = torch.ops.tuner.attention_with_lse(*inputs, True)
    grad = torch.randn_like(out)
    wanted = gradients(out, inputs, grad)
    monkeypatch.setattr(composed, "_SCORES_BYTES", 7 * 8 * 2 * 4 * 50)  # seven rows
    assert len(list(composed.scores_of(composed.Attended(*inputs, True, None)))) == 8
    again, lse_again = torch.ops.tuner.attention_with_lse(*inputs, True)
    assert torch.allclose(lse, lse_again)
    found = gradients(again, inputs, grad)
    assert all(torch.allclose(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_pytorch_s_kernels_accept_what_they_are_given(
    monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    """By their schemas and shape functions: the kernels themselves need a GPU."""
    monkeypatch.setattr(autograd, "_backend", lambda *arguments: int(backend.value))
    inputs = [t.detach().to("meta") for t in tensors(2, (6, 6), "bshd")]
    call = composed.Attended(*inputs, True, 0.3)
    out, lse = autograd.forward_with_lse(call)
    assert (out.shape, lse.shape, lse.dtype) == (inputs[0].shape, (2, 4, 6), torch.float32)
    grads = autograd.backward(call, composed.BackwardInputs(out, lse, torch.empty_like(out)))
    assert [g.shape for g in grads] == [t.shape for t in inputs]


@pytest.mark.parametrize(
    "length,chosen,allowed,gains",
    [
        (1024, autograd._FLASH, True, True),
        (1024, autograd._CUDNN, True, False),  # as PyTorch does by itself
        (1024, autograd._FLASH, False, False),
        (512, autograd._FLASH, True, False),  # too little work for the operators' way
    ],
)
def test_large_training_calls_that_nobody_tuned_take_cudnn_s_kernels(
    monkeypatch: pytest.MonkeyPatch, length: int, chosen: int, allowed: bool, gains: bool
) -> None:
    """(1,32,S,128): 43 GFLOP of gradients at 1024 tokens, 11 at 512."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: chosen)
    monkeypatch.setattr(autograd, "_takes_cudnn", lambda *_: allowed)
    query = SimpleNamespace(shape=(1, 32, length, 128), is_cuda=True)
    call = composed.Attended(query, query, query, False, None)
    assert autograd.gains_by_cudnn(call) is gains
    assert not autograd.gains_by_cudnn(call._replace(is_causal=True)) or length > 1024


@pytest.mark.parametrize(
    ("batch", "length", "wanted"),
    [
        (1, 128, autograd._FLASH),  # 84 MFLOP, where cuDNN's took longer
        (32, 128, autograd._CUDNN),
    ],
)
def test_tiny_gradients_stay_pytorch_s_choice(
    monkeypatch: pytest.MonkeyPatch, batch: int, length: int, wanted: int
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: autograd._FLASH)
    monkeypatch.setattr(autograd, "_takes_cudnn", lambda *_: True)
    shape = (batch, 16, length, 32)
    query = SimpleNamespace(shape=shape, is_cuda=True, numel=lambda: 1)
    call = composed.Attended(query, query, query, False, None)
    assert autograd._backend(call) == wanted


def test_what_cudnn_gains_goes_through_the_operators(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untuned call then keeps its log-sum-exp for the kernel of `autograd.backward`."""
    inputs = tensors()
    for gains in (True, False):
        monkeypatch.setattr(differentiation, "gains_by_cudnn", lambda *_, gains=gains: gains)
        out, wanted = on_cpu.attention.attention(*inputs), SDPA(*inputs)
        assert ("tuner" in out.grad_fn.name()) is gains
        grad = torch.randn_like(out)
        assert close([out], [wanted])
        assert close(gradients(out, inputs, grad), gradients(wanted, inputs, grad))


@pytest.mark.parametrize(
    "lengths,head_dim,is_causal,has_one",
    [
        ((64, 64), 64, True, True),
        ((64, 96), 64, False, True),
        ((64, 96), 64, True, False),
        ((64, 64), 256, False, True),
        ((64, 64), 264, False, False),
        ((64, 64), 36, False, False),
    ],
)
def test_which_shapes_have_a_backward_kernel(
    lengths: tuple[int, int], head_dim: int, is_causal: bool, has_one: bool
) -> None:
    query, key = (torch.empty(1, 1, n, head_dim, device="meta") for n in lengths)
    assert autograd.has_backward(query, key, is_causal) is has_one
