"""Gradients where cuDNN's may be NaN: which lengths, and that every way leaves them to another
kernel. `tests/gpu/test_finite_gradients_gpu.py` has the numbers of the kernels themselves.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config
from tuner.families import family
from tuner.families.fused_attention_backward import rule as backward
from tuner.families.peers.sdpa_backward import may_be_nan
from tuner.hardware import GPUS
from tuner.problem import AttentionBackwardProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_upper_left  # noqa: E402

from tuner.runtime.attention import composed  # noqa: E402
from tuner.runtime.attention.attention_call import AttentionCall  # noqa: E402
from tuner.runtime.call import finite_gradients, native  # noqa: E402
from tuner.runtime.training import autograd  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention
EFFICIENT = "_scaled_dot_product_efficient_attention"
FLASH = "_scaled_dot_product_flash_attention"
UNSAFE = (64, 192, 320, 448, 704, 1088, 1, 63, 129)
SAFE = (128, 256, 1024, 65, 127, 200, 1000)


@pytest.mark.parametrize("length", UNSAFE)
def test_lengths_that_end_in_half_a_step_are_named(length: int) -> None:
    assert may_be_nan(length, 128) and may_be_nan(128, length)


@pytest.mark.parametrize("length", SAFE)
def test_other_lengths_are_safe(length: int) -> None:
    assert not may_be_nan(length, length)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_list_of_candidates_has_cudnn_s_there(head_dim: int) -> None:
    vendor, gpu = family("sdpa_backward"), GPUS["H200"]
    for length, is_offered in ((704, False), (640, True)):
        problem = AttentionBackwardProblem.parse(f"S={length},D={head_dim},dtype=bf16")
        kernels = [config["kernel"] for config in vendor.space(problem, gpu)]
        assert ("cudnn" in kernels) is is_offered
    # A stored decision is refused before it runs.
    problem = AttentionBackwardProblem.parse("S=704,D=64")
    reason = vendor.vendor_call(problem, Config(vendor.name, {"kernel": "cudnn"}), 1.0)
    assert isinstance(reason, str) and "may be NaN" in reason


def test_the_rule_is_not_bound_by_cudnn_s_time_there() -> None:
    """Own kernels are expected to be slower than cuDNN's here, not than FlashAttention-2's."""
    found = {}
    for length in (1088, 1152):
        problem = AttentionBackwardProblem.parse(f"B=1,H=16,S={length},D=128,causal=1,dtype=bf16")
        selection = backward.select(problem, GPUS["H200"])
        found[length] = {config.family for _, config in selection.own()}
    assert found[1088] - found[1152] == {"fused_attention_backward"}


def tensors(*shape: int, heads_kv: int = 2, keys: int = 0, dtype: Any = torch.float64) -> list[Any]:
    batch, heads, length, head_dim = shape
    sizes = (heads, length), (heads_kv, keys or length), (heads_kv, keys or length)
    return [torch.randn(batch, h, n, head_dim, dtype=dtype).requires_grad_() for h, n in sizes]


@pytest.fixture
def kernels() -> Iterator[list[str]]:
    """Stand-ins of the two backends on the CPU, with what the real ones demand of their operands;
    the names of those that ran.
    """
    ran: list[str] = []

    def weights(query: Any, key: Any, bias: Any, lse: Any, is_causal: bool, scale: Any) -> Any:
        scores = query @ key.mT * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
        scores = scores if bias is None else scores + bias
        if is_causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1) if lse is None else (scores - lse[..., None]).exp()

    def check(query: Any, key: Any, bias: Any) -> None:
        assert query.shape[1] == key.shape[1], "one key head for each of the query"
        if bias is not None:
            assert bias.shape == (*query.shape[:3], key.shape[2]) and bias.dtype == query.dtype
            assert bias.stride(3) == 1 and all(n % 16 == 0 for n in bias.stride()[:3])

    def attend(q: Any, k: Any, v: Any, bias: Any, wants_lse: bool, *options: Any, **o: Any) -> Any:
        ran.append(EFFICIENT)
        check(q, k, bias)
        is_causal = len(options) > 1 and options[1]
        made = weights(q, k, bias, None, is_causal, o.get("scale"))
        assert wants_lse
        none = torch.empty((), dtype=torch.long)
        return made @ v, torch.zeros(*q.shape[:2], 32), none, none.clone()

    def differentiate(
        grad: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, lse: Any, *options: Any, **o: Any
    ) -> Any:
        ran.append(EFFICIENT + "_backward")
        check(q, k, bias)
        rows = q.shape[2]
        assert out.transpose(1, 2).is_contiguous(), "the kernel does not ask for the rows' stride"
        assert lse.is_contiguous() and lse.shape[2] % 32 == 0 and lse.shape[2] - rows < 32
        assert (lse[..., rows:] == math.inf).all()
        _, _, _, (q_too, k_too, v_too, bias_too), *causal = options  # defaults are left out
        assert q_too and k_too and v_too and not bias_too
        scale = o.get("scale") or 1 / math.sqrt(q.shape[3])
        made = weights(q, k, bias, lse[..., :rows], any(causal), scale)
        scores = made * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return scores @ k, scores.mT @ q, made.mT @ grad, None

    def flash(q: Any, k: Any, v: Any, *options: Any, **o: Any) -> Any:
        ran.append(FLASH)
        is_causal = len(options) > 1 and options[1]
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = weights(q, k, None, None, is_causal, o.get("scale")) @ v
        others = None, None, q.shape[2], k.shape[2], *(torch.empty(0) for _ in range(3))
        return out, torch.zeros(q.shape[:3]), *others

    library = torch.library.Library("aten", "IMPL")
    library.impl(EFFICIENT, attend, "CPU")
    library.impl(EFFICIENT + "_backward", differentiate, "CPU")
    library.impl(FLASH, flash, "CPU")
    yield ran
    library._destroy()


def masks(queries: int, keys: int) -> dict[str, Any]:
    seen = torch.rand(queries, keys) < 0.6
    seen[:, 0] = True
    terms = torch.randn(2, 1, queries, keys, dtype=torch.float64)
    return {
        "booleans": seen,
        "one row": seen[:1],
        "terms": terms,
        "a slice": torch.randn(2, 4, queries, keys + 5, dtype=torch.float64)[..., 3:-2],
        "no key": terms.masked_fill(torch.arange(queries)[:, None] == 3, -math.inf),
    }


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (40, 64), (64, 33)])
@pytest.mark.parametrize("name", masks(6, 6))
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_under_a_mask_are_exact(
    kernels: list[str], name: str, queries: int, keys: int, is_causal: bool
) -> None:
    """From output and log-sum-exp of another kernel, of grouped heads."""
    torch.manual_seed(0)
    query, key, value = tensors(2, 4, queries, 8, keys=keys)
    mask = masks(queries, keys)[name]
    terms = (
        torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
        if (mask.dtype == torch.bool)
        else mask
    )
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3 + terms
    if is_causal:
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    out = composed._softmax(scores, is_masked=True) @ value.repeat_interleave(2, 1)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)
    with torch.no_grad():
        found = finite_gradients.masked_backward(
            grad, query, key, value, mask, out, scores.logsumexp(-1), is_causal, 0.3
        )
    assert kernels == [EFFICIENT + "_backward"]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "is_causal", "name", "kernel"),
    [
        (6, False, "", FLASH),
        (6, True, "", FLASH),
        (9, True, "", EFFICIENT),  # FlashAttention would align the mask otherwise
        (9, False, "booleans", EFFICIENT),
        (6, False, "a slice", EFFICIENT),
    ],
)
def test_what_pytorch_would_give_to_cudnn_goes_to_another_kernel(
    monkeypatch: pytest.MonkeyPatch,
    kernels: list[str],
    keys: int,
    is_causal: bool,
    name: str,
    kernel: str,
) -> None:
    torch.manual_seed(0)
    query, key, value = tensors(2, 4, 6, 8, keys=keys)
    mask = masks(6, keys)[name] if name else None
    grouped: dict[str, Any] = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    wanted = SDPA(query, key, value, mask, **grouped)
    assert kernels == []
    monkeypatch.setattr(finite_gradients, "is_needed", lambda *_: True)
    found = native.attend(query, key, value, mask, **grouped)
    assert kernels == [kernel]
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("length", "kernel", "dynamic"), [(6, EFFICIENT, False), (6, EFFICIENT, True), (70, "", False)]
)
def test_traced_graphs_have_another_kernel_too(
    monkeypatch: pytest.MonkeyPatch, kernels: list[str], length: int, kernel: str, dynamic: bool
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(finite_gradients, "_is_on_gpu", lambda _: True)
    inputs = tensors(2, 4, length, 8, dtype=torch.bfloat16)
    mask = torch.rand(length, length) < 2  # all
    compiled = torch.compile(native.attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    options = {"scale": 0.3, "enable_gqa": True}
    found = compiled(*inputs, mask, **options)
    assert kernels == [kernel] * bool(kernel)
    if kernel and not dynamic:
        torch._dynamo.reset()
        del kernels[:]
        with sdpa_kernel(SDPBackend.MATH):  # a program that excludes cuDNN keeps its choice
            compiled(*inputs, mask, **options)
        assert kernels == []
    wanted = SDPA(*inputs, mask, **options)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_a_window_composed_of_operations_too(
    monkeypatch: pytest.MonkeyPatch, kernels: list[str]
) -> None:
    query, key, value = tensors(2, 4, 6, 8)
    monkeypatch.setattr(finite_gradients, "is_needed", lambda *_: True)
    options = None, 0.0, False, 0.3, True, composed.Extras(left=2)
    composed.compose(query, key, value, *options)
    assert kernels == [EFFICIENT]


def test_a_layer_of_transformers_too(monkeypatch: pytest.MonkeyPatch, kernels: list[str]) -> None:
    """Which otherwise takes Transformers' own function where no tuned kernel answers."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    attend = importlib.import_module("tuner.runtime.engines.transformers").attention_forward
    query, key, value = tensors(2, 4, 6, 8)
    mask = masks(6, 6)["terms"]
    wanted = SDPA(query, key, value, mask, scale=0.3, enable_gqa=True)
    monkeypatch.setattr(finite_gradients, "is_needed", lambda *_: True)
    layer = SimpleNamespace(is_causal=True)
    found, _ = attend(layer, query, key, value, mask, dropout=0.0, scaling=0.3)
    assert kernels == [EFFICIENT]
    torch.testing.assert_close(found.transpose(1, 2), wanted)


def fake(length: int, head_dim: int = 64, **changed: Any) -> Any:
    facts = {
        **{"shape": (2, 4, length, head_dim), "is_cuda": True, "is_nested": False},
        **{"dtype": torch.bfloat16, "requires_grad": True, "dim": lambda: 4},
    }
    return SimpleNamespace(**{**facts, **changed})


@pytest.mark.parametrize("head_dim", [64, 128])
def test_which_calls_need_another_kernel(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    choices = [autograd._CUDNN]
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: choices[0])
    query, safe = fake(704, head_dim), fake(640, head_dim)
    needs = finite_gradients.is_needed
    assert needs(query, query, query) and needs(safe, query, query) and needs(query, safe, safe)
    mask = torch.zeros(1)
    assert needs(query, query, query, mask)
    assert needs(query, query, query, mask, 0.1), "dropout"
    assert not needs(safe, safe, safe, mask)
    for changed in ({"dtype": torch.float32}, {"is_cuda": False}, {"dim": lambda: 3}):
        other = fake(704, head_dim, **changed)
        assert not needs(other, other, other)
    unwanted = fake(704, head_dim, requires_grad=False)
    assert not needs(unwanted, unwanted, unwanted) and needs(query, unwanted, unwanted)
    with torch.no_grad():
        assert not needs(query, query, query)
    empty = fake(704, head_dim, shape=(2, 0, 704, head_dim))
    assert not needs(empty, empty, empty), "PyTorch's choice divides by the heads"
    assert not needs(query, query, query, causal_upper_left(704, 704))
    choices[0] = autograd._FLASH
    assert not needs(query, query, query)


@pytest.mark.parametrize("chosen", [autograd._CUDNN, autograd._FLASH])
def test_the_operators_way_takes_flash_s_there(
    monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: chosen)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *_: None)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", lambda *_: True)

    def backend(length: int, keys: int, is_causal: bool = False) -> int:
        query, key = (
            fake(n, shape=(1, 64, n, 128), numel=lambda: 1, stride=lambda: (), device="cuda")
            for n in (length, keys)
        )
        gains = autograd.gains_by_cudnn(composed.Attended(query, key, key, is_causal, None))
        assert not gains or not may_be_nan(length, keys)
        return autograd._backend(composed.Attended(query, key, key, is_causal, None))

    assert backend(4096, 4096) == autograd._CUDNN
    for lengths in ((4160, 4160), (4096, 4160), (4160, 4096)):
        assert backend(*lengths) == autograd._FLASH
    assert backend(4096, 4160, is_causal=True) not in (autograd._FLASH, autograd._CUDNN)


class Operator:
    """cuDNN's backward operator, which counts what reaches it."""

    calls = 0

    def redispatch(self, *_: Any, **__: Any) -> tuple[str]:
        self.calls += 1
        return ("cudnn",)


@pytest.mark.parametrize("length", [6, 70])
@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_cudnn_s_operator_is_left_at_such_lengths(
    monkeypatch: pytest.MonkeyPatch,
    kernels: list[str],
    length: int,
    with_mask: bool,
    dropout_p: float,
) -> None:
    """With a mask and without, of any size; but not through dropout."""
    torch.manual_seed(0)
    query, key, value = tensors(2, 4, length, 8)
    enable = importlib.import_module(
        "tuner.runtime.enable"
    )  # the package has a function of the name
    monkeypatch.setattr(enable, "gradients", lambda *_: None)
    mask = torch.randn(length, length, dtype=torch.float64) if with_mask else None
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8) + (mask if with_mask else 0)
    out = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    grad, lse = torch.randn_like(out), scores.logsumexp(-1, keepdim=True)
    wanted = torch.autograd.grad(out, (query, key, value), grad)
    operator, state = Operator(), (torch.empty(()), torch.empty(()))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    with torch.no_grad():
        found = enable._before_cudnn_backward(operator)(
            *(keys, grad, query, key, value, out, lse, *state, mask, None, None),
            *(length, length, dropout_p, False),
        )
    is_replaced = length == 6 and not dropout_p
    assert operator.calls == (not is_replaced)
    if is_replaced:
        assert kernels == ([EFFICIENT + "_backward"] if with_mask else [])
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("length", "is_kept"), [(704, False), (640, True)])
@pytest.mark.parametrize("mask", [None, torch.zeros(1, 1, 1, 1)])
def test_the_dispatcher_keeps_no_refusal_of_such_gradients(
    monkeypatch: pytest.MonkeyPatch, length: int, is_kept: bool, mask: Any
) -> None:
    """It would hand the next equal call to PyTorch's choice, past `native.attend`."""
    monkeypatch.setattr(finite_gradients, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: finite_gradients._CUDNN)
    given = tensors(1, 2, length, 8, dtype=torch.bfloat16)
    options = mask, 0.0, False, None, False
    assert (AttentionCall(*given, *options).dispatched is not None) is is_kept
    with torch.no_grad():
        assert AttentionCall(*given, *options).dispatched is not None


def test_pytorch_s_operators_accept_what_they_are_given() -> None:
    """By their schemas and shape functions: the kernels themselves need a GPU."""
    query, key, value = (
        t.detach().to("meta", torch.bfloat16) for t in tensors(2, 4, 70, 16, keys=33)
    )
    mask = torch.empty(70, 33, dtype=torch.bool, device="meta")
    for is_causal, given in ((False, None), (True, None), (False, mask)):
        out = finite_gradients.attend(query, key, value, given, 0.0, is_causal, 0.3)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
    lse = torch.empty(2, 4, 70, device="meta")
    found = finite_gradients.masked_backward(out, query, key, value, mask, out, lse, False, None)
    assert [g.shape for g in found] == [query.shape, key.shape, value.shape]
