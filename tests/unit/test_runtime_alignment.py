"""The causal mask of every way in, where there are more keys than queries or fewer: the table of
`tuner.runtime.attention.dense`, against attention written out in float64. A tuned kernel that is
exact, and top-left, stands for all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import tuner  # noqa: E402
from tuner.runtime.attention import bias as mask_operands  # noqa: E402
from tuner.runtime.attention.composed import Attended  # noqa: E402
from tuner.runtime.training import autograd  # noqa: E402

LENGTHS = [(5, 12), (12, 5), (8, 8), (1, 9)]
SDPA = torch.nn.functional.scaled_dot_product_attention


def tensors(queries: int, keys: int, heads_kv: int = 2, requires_grad: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    shapes = (2, 4, queries, 8), (2, heads_kv, keys, 8), (2, heads_kv, keys, 8)
    made = [torch.randn(shape, generator=generator).half() for shape in shapes]
    return [tensor.requires_grad_(requires_grad) for tensor in made]


def exact(q: Any, k: Any, v: Any, offset: int = 0) -> Any:
    """Query i sees keys 0..i + offset; zeros where it sees none."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(offset)
    scores = (q.shape[-1] ** -0.5 * q @ k.mT).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def close(out: Any, wanted: Any) -> bool:
    return bool(torch.allclose(out.double(), wanted, atol=4e-3, rtol=4e-3))


TOP_LEFT: dict[str, Callable[..., Any]] = {
    "tuner.attention": lambda q, k, v: tuner.attention(q, k, v, is_causal=True, enable_gqa=True),
    "the operator": lambda q, k, v: torch.ops.tuner.attention(q, k, v, True),
    "the operator with its log-sum-exp": lambda q, k, v: torch.ops.tuner.attention_with_lse(
        q, k, v, True
    )[0],
    "a window": lambda q, k, v: tuner.attention(
        q, k, v, is_causal=True, enable_gqa=True, window=(64, 64)
    ),
    "a window to the right": lambda q, k, v: tuner.attention(
        q, k, v, enable_gqa=True, window=(-1, 0)
    ),
    "a soft cap": lambda q, k, v: tuner.attention(
        q, k, v, is_causal=True, enable_gqa=True, softcap=1e4
    ),
}


@pytest.mark.parametrize("is_tuned", [True, False])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("way", TOP_LEFT)
def test_top_left(
    tuned: SimpleNamespace,
    way: str,
    lengths: tuple[int, int],
    heads_kv: int,
    is_tuned: bool,
) -> None:
    tuned.serves = is_tuned
    q, k, v = tensors(*lengths, heads_kv)
    assert close(TOP_LEFT[way](q, k, v), exact(q, k, v))


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("options", [{}, {"window": 64}, {"softcap": 1e4}], ids=str)
@pytest.mark.parametrize("lengths", [(5, 12), (8, 8)], ids=str)
def test_a_bias_that_says_where_it_lies(
    tuned: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    bias: Any,
    options: dict[str, Any],
    lengths: tuple[int, int],
) -> None:
    """A causal flag, or a window to the right; never an operand."""
    monkeypatch.setattr(mask_operands, "MIN_LOWER_RIGHT_TILES", 8)
    q, k, v = tensors(*lengths, heads_kv=4)
    offset = lengths[1] - lengths[0] if bias is causal_lower_right else 0
    out = tuner.attention(q, k, v, bias(*lengths), **options)
    assert close(out, exact(q, k, v, offset))
    (problem,) = tuned.problems
    assert (problem.is_causal, problem.mask, problem.bias) == (not offset, "", "")
    assert problem.window_right == (offset or -1)
    assert tuned.counters.stats().fallbacks == {}


@pytest.mark.parametrize("options", [{}, {"window": 64}, {"softcap": 1e4}], ids=str)
@pytest.mark.filterwarnings("ignore:Lower right causal bias:UserWarning")
@pytest.mark.parametrize("lengths", [(5, 12), (12, 5)], ids=str)
def test_a_bias_that_tuned_kernels_leave(
    tuned: SimpleNamespace, options: dict[str, Any], lengths: tuple[int, int]
) -> None:
    """Too few tiles for kernels that do not split the keys, or queries without a key."""
    q, k, v = tensors(*lengths, heads_kv=4)
    out = tuner.attention(q, k, v, causal_lower_right(*lengths), **options)
    wanted = exact(q, k, v, lengths[1] - lengths[0])
    seen = max(0, lengths[0] - lengths[1])  # PyTorch has no output of the others
    assert close(out[:, :, seen:], wanted[:, :, seen:])
    is_served = lengths[0] < lengths[1] and bool(options)
    assert bool(tuned.problems) == is_served
    kind = "the causal mask is bottom-right" if lengths[0] < lengths[1] else "attn_mask is given"
    assert tuned.counters.stats().fallbacks == ({} if is_served else {kind: 1})


def test_gradients_under_a_lower_right_bias_are_pytorch_s(tuned: SimpleNamespace) -> None:
    given = tensors(5, 12, heads_kv=4, requires_grad=True)
    grad = torch.randn(2, 4, 5, 8).half()
    found = torch.autograd.grad(tuner.attention(*given, causal_lower_right(5, 12)), given, grad)
    doubles = [t.detach().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(exact(*doubles, 7), doubles, grad.double())
    assert all(close(one, other) for one, other in zip(found, wanted, strict=True))
    assert tuned.problems == []


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_flash_is_bottom_right(
    tuned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]
) -> None:
    """Its operator alone: a window, where the first query sees a key."""
    monkeypatch.setattr(mask_operands, "MIN_LOWER_RIGHT_TILES", 8)
    enable = importlib.import_module("tuner.runtime.enable")
    q, k, v = tensors(*lengths)
    found = enable._answer("flash", q, k, v, None, 0.0, True, None, True)
    offset = lengths[1] - lengths[0]
    if offset >= 0:
        assert close(found[0], exact(q, k, v, offset))
        # One query sees all keys.
        assert tuned.problems[0].window_right == (offset if lengths[0] > 1 and offset else -1)
    else:
        assert found is None and tuned.problems == []
        assert tuned.counters.stats().fallbacks == {"the causal mask is bottom-right": 1}
    full, _ = enable._answer("flash", q, k, v, None, 0.0, False, None, True)
    assert close(full, exact(q, k, v, lengths[1]))


@pytest.mark.parametrize("name", ["attention", "cudnn_with_lse"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_cudnn_is_top_left(tuned: SimpleNamespace, lengths: tuple[int, int], name: str) -> None:
    enable = importlib.import_module("tuner.runtime.enable")
    q, k, v = tensors(*lengths)
    out, lse = enable._answer(name, q, k, v, None, 0.0, True, None, True)
    assert close(out, exact(q, k, v)) and (lse is None) == (name == "attention")


@pytest.mark.parametrize("lengths", [(5, 12), (12, 5), (8, 8)], ids=str)
@pytest.mark.parametrize("way", ["tuner.attention", "the operator"])
def test_gradients_are_of_the_mask_that_was_computed(
    tuned: SimpleNamespace, way: str, lengths: tuple[int, int]
) -> None:
    given = tensors(*lengths, requires_grad=True)
    grad = torch.randn(2, 4, lengths[0], 8).half()
    found = torch.autograd.grad(TOP_LEFT[way](*given), given, grad)
    wanted = torch.autograd.grad(exact(*given), given, grad.double())
    assert all(close(a, b.double()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("lengths", "is_causal", "chosen"),
    [((8, 8), True, 1), ((5, 12), False, 1), ((5, 12), True, -1)],
)
def test_flash_s_backward_kernel_is_not_called_where_it_is_bottom_right(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], is_causal: bool, chosen: int
) -> None:
    """PyTorch chooses it for no such call now; whatever it comes to choose."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: autograd._FLASH)
    monkeypatch.setattr(autograd, "_takes_cudnn", lambda *_: False)
    query, key = (
        SimpleNamespace(shape=(1, 2, n, 8), is_cuda=True, numel=lambda: 1) for n in lengths
    )
    assert autograd._backend(Attended(query, key, key, is_causal, None)) == chosen


def test_packed_sequences_are_top_left() -> None:
    """By PyTorch's kernels; by tuned ones in tests/gpu/test_attention_varlen_gpu.py."""
    lengths = [(3, 7), (6, 2), (4, 4)]
    pairs = [tensors(q, k) for q, k in lengths]
    q, k, v = (
        torch.cat([pair[i][0].transpose(0, 1) for pair in pairs]).contiguous() for i in range(3)
    )
    starts = [
        torch.tensor([0, *torch.tensor([pair[i] for pair in lengths]).cumsum(0)], dtype=torch.int32)
        for i in (0, 1)
    ]
    out = tuner.attention_varlen(q, k, v, *starts, 6, 7, is_causal=True, enable_gqa=True)
    wanted = torch.cat([exact(*(t[:1] for t in pair))[0].transpose(0, 1) for pair in pairs])
    assert close(out, wanted)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_pytorch_s(tuned: SimpleNamespace) -> None:
    rows = [torch.randn(n, 4, 8) for n in (3, 6)]
    q, k, v = (
        torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2) for _ in range(3)
    )
    out = tuner.attention(q, k, v)  # without a mask: of CPU tensors PyTorch has none here
    for one, row in zip(out.transpose(1, 2).unbind(), rows, strict=True):
        alone = row.transpose(0, 1)[None]
        assert torch.allclose(one, SDPA(alone, alone, alone)[0].transpose(0, 1), atol=1e-6)
    assert tuned.problems == []
    assert tuned.counters.stats().fallbacks == {"an input is not a plain tensor": 1}


def test_e4m3_is_top_left(tuned: SimpleNamespace) -> None:
    tuned.serves = False
    q, k, v = (t.to(torch.float8_e4m3fn) for t in tensors(5, 12, heads_kv=4))
    ones = torch.ones(2, 4)
    out = tuner.attention(q, k, v, is_causal=True, descale_q=ones, descale_k=ones, descale_v=ones)
    assert torch.allclose(out.double(), exact(q.float(), k.float(), v.float()), atol=2e-2)
