"""`tuner.attention` under a sliding window or a soft cap, off the GPU: what PyTorch's operations
compose, against float64 written out."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.errors import ConfigError
from tuner.families.fused_attention_backward.rule import KERNELS
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionBackwardProblem

torch = pytest.importorskip("torch", reason="torch is not installed")


def attention(*arguments: Any, **options: Any) -> Any:
    module = importlib.import_module("tuner.runtime.attention.dense")
    return module.attention(*arguments, **options)


@pytest.fixture
def counters() -> Any:
    module = importlib.import_module("tuner.runtime.call.counters")
    module.stats(reset=True)
    return module


def inputs(
    queries: int = 20, keys: int = 20, heads: int = 2, heads_kv: int = 2, dtype: Any = torch.float32
) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    shapes = (heads, queries), (heads_kv, keys), (heads_kv, keys)
    return [torch.randn(2, h, n, 16, generator=generator).to(dtype) for h, n in shapes]


def expected(
    tensors: list[Any],
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    hidden: Any = None,
) -> Any:
    query, key, value = (t.double() for t in tensors)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    left, right = window or (-1, -1)
    rows, columns = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if left >= 0:
        seen &= columns >= rows - left
    if right >= 0 or is_causal:
        seen &= columns <= rows + (0 if is_causal else right)
    if hidden is not None:
        seen = seen & ~hidden
    return scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0) @ value


def off(out: Any, wanted: Any) -> float:
    assert out.shape == wanted.shape
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("softcap", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, (0, 0), (3, -1), (-1, 4), (3, 5), (50, 50)])
@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (5, 30), (30, 5)])
def test_it_is_the_definition(
    queries: int, keys: int, window: Any, is_causal: bool, softcap: float, counters: Any
) -> None:
    if window is None and not softcap:
        return  # PyTorch's own
    tensors = inputs(queries, keys)
    options = {"is_causal": is_causal, "scale": 0.4}
    out = attention(*tensors, window=window, softcap=softcap, **options)
    assert off(out, expected(tensors, window, softcap, **options)) < 1e-6
    assert counters.stats().fallbacks == {"the tensors are not on a CUDA device": 1}


def test_queries_that_see_no_key_are_zero() -> None:
    tensors = inputs(30, 5)
    for softcap in (0.0, 2.0):
        out = attention(*tensors, window=(3, 0), softcap=softcap)
        assert (out[:, :, 8:] == 0).all()
        assert (out[:, :, :8].abs().amax(-1) > 0).all()


def test_grouped_heads_and_half_precision() -> None:
    tensors = inputs(heads=4, heads_kv=2, dtype=torch.bfloat16)
    for options in ({"window": (4, 0)}, {"softcap": 3.0}, {"window": (2, 3), "softcap": 3.0}):
        out = attention(*tensors, enable_gqa=True, **options)
        assert out.dtype == torch.bfloat16
        assert off(out, expected(tensors, **options)) < 8e-3


def test_masks_come_on_top_of_the_window(counters: Any) -> None:
    tensors = inputs()
    hidden = torch.zeros(20, 20, dtype=torch.bool)
    hidden[:, ::3] = True
    added = torch.zeros(20, 20).masked_fill(hidden, -math.inf)
    for softcap in (0.0, 2.0):
        wanted = expected(tensors, (6, 6), softcap, hidden=hidden)
        for mask in (~hidden, added):
            out = attention(*tensors, attn_mask=mask, window=(6, 6), softcap=softcap)
            assert off(out, wanted) < 1e-6
    assert counters.stats().fallbacks == {"the tensors are not on a CUDA device": 4}


def test_queries_that_a_mask_leaves_no_key_are_zero() -> None:
    """Padding's rows: a NaN in one would reach every row of the next layer."""
    hidden = torch.zeros(20, 20, dtype=torch.bool)
    hidden[:3] = True
    added = torch.zeros(20, 20).masked_fill(hidden, -math.inf)
    for options in ({"softcap": 2.0}, {"window": (6, 6)}, {"window": (6, 6), "softcap": 2.0}):
        wanted = expected(inputs(), hidden=hidden, **options)
        for mask in (~hidden, added):
            tensors = [t.requires_grad_() for t in inputs()]
            out = attention(*tensors, attn_mask=mask, **options)
            assert off(out.detach(), wanted) < 1e-6 and (out[:, :, :3] == 0).all()
            gradients = torch.autograd.grad(out.square().sum(), tensors)
            assert (
                all(g.isfinite().all() for g in gradients) and (gradients[0][:, :, :3] == 0).all()
            )


def test_long_rows_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = importlib.import_module("tuner.runtime.attention.composed")
    tensors = inputs(23, 17)
    whole = attention(*tensors, window=(9, 2), softcap=5.0)
    monkeypatch.setattr(composed, "_SCORES_BYTES", 4 * 2 * 2 * 17 * 4)  # four rows
    assert torch.allclose(attention(*tensors, window=(9, 2), softcap=5.0), whole, atol=1e-6)


def test_gradients_are_those_of_the_definition() -> None:
    for options in ({"window": (4, 1)}, {"softcap": 1.5}, {"window": (2, 0), "softcap": 1.5}):
        tensors = [t.requires_grad_() for t in inputs(24, 12)]
        attention(*tensors, **options).square().sum().backward()
        copies = [t.detach().clone().requires_grad_() for t in tensors]
        expected(copies, **options).square().sum().backward()
        for one, other in zip(tensors, copies, strict=True):
            assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_graph_holds_what_is_composed() -> None:
    """One graph, without a break."""
    attend = importlib.import_module("tuner.runtime.attention.dense").attention

    def model(*tensors: Any) -> Any:
        one = attend(*tensors, window=(4, 1), softcap=1.5)
        return one + attend(*tensors, window=(7, -1), is_causal=True)

    tensors = inputs()
    out = torch.compile(model, backend="eager", fullgraph=True)(*tensors)
    assert torch.allclose(out, model(*tensors), atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_number_is_both_sides_of_a_window(is_causal: bool) -> None:
    tensors = inputs()
    for number in (-1, 0, 4):
        out = attention(*tensors, window=number, is_causal=is_causal)
        assert torch.equal(out, attention(*tensors, window=(number, number), is_causal=is_causal))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": (1, 2, 3)}, "allowed: (left, right)"),
        ({"window": (-2, 0)}, "allowed: (left, right)"),
        ({"window": (1.5, 0)}, "allowed: (left, right)"),
        ({"window": -2}, "window=-2 is not known (allowed: (left, right), or one number"),
        ({"window": 1.5}, "window=1.5 is not known"),
        ({"window": "16"}, "window=16 is not known"),
        ({"window": True}, "window=True is not known"),
        ({"softcap": -1.0}, "softcap=-1.0 is out of range"),
        ({"softcap": math.nan}, "softcap=nan is out of range"),
        ({"softcap": "x"}, "softcap='x' is out of range"),
    ],
)
def test_what_is_out_of_range_is_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        attention(*inputs(), **options)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"window": 2}, {"window": (1, -1), "is_causal": True, "softcap": 2.0}]
)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_gradients_of_windows_and_soft_caps_have_kernels(
    tuned: SimpleNamespace, heads_kv: int, options: dict[str, Any]
) -> None:
    tuned.differentiates = True
    made = [torch.randn(2, heads, 6, 8).half() for heads in (4, heads_kv, heads_kv)]
    inputs, copies = ([t.clone().requires_grad_() for t in made] for _ in range(2))
    options = {**options, "scale": 0.3, "enable_gqa": True}
    out = tuned.attention.attention(*inputs, **options)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    forward, backward = tuned.problems
    assert backward == AttentionBackwardProblem.of(forward) and backward.is_windowed
    assert tuned.counters.stats().hits == 2
    tuned.differentiates = False
    by_pytorch = tuned.attention.attention(*copies, **options)
    wanted = torch.autograd.grad(by_pytorch, copies, grad)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2)
    # Second derivatives are PyTorch's.
    (again,) = torch.autograd.grad(out, inputs[:1], grad, create_graph=True)
    (second,) = torch.autograd.grad(again.float().square().sum(), inputs[1:2])
    assert len(tuned.problems) == 2 and second.isfinite().all() and float(second.norm()) > 0


def test_windows_without_a_backward_kernel_are_pytorch_s(tuned: SimpleNamespace) -> None:
    inputs = [torch.randn(1, 2, 6, 8).half().requires_grad_() for _ in range(3)]
    out = tuned.attention.attention(*inputs, window=2)
    assert all(t.isfinite().all() for t in torch.autograd.grad(out.sum(), inputs))
    assert not tuned.problems
    assert tuned.counters.stats().fallbacks == {"a gradient is wanted": 1}


OPTIONS = (
    {"window": (4, 0), "is_causal": True},
    {"window": (3, 2)},
    {"window": (5, 0), "is_causal": True, "softcap": 2.0},
    {"softcap": 2.0, "is_causal": True},
)


@pytest.fixture
def proven(tuned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Operations whose kernels are proven here."""
    found = {"attention", "attention_backward"}
    module = importlib.import_module("tuner.runtime.call.proven_kernels")
    monkeypatch.setattr(module, "has_proven", lambda problem, gpu: problem.op in found)
    monkeypatch.setattr(module, "is_proven", lambda target, gpu: target.problem.op in found)
    return found


def compiled_gradients(
    attend: Any, options: dict[str, Any], head_dim: int, dynamic: bool | None = None
) -> tuple[Any, ...]:
    """Output and gradients of a training graph, what they should be, and the graph's operators."""
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: Any, examples: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return importlib.import_module("torch._dynamo.backends.debugging").aot_eager(
            graph, examples
        )

    made = [torch.randn(2, heads, 12, head_dim).half() for heads in (4, 2, 2)]
    inputs, copies = ([t.clone().requires_grad_() for t in made] for _ in range(2))
    options = {**options, "scale": 0.3, "enable_gqa": True}
    compiled = torch.compile(attend, fullgraph=True, backend=backend, dynamic=dynamic)
    out = compiled(*inputs, **options)
    wanted = attend(*copies, **options)
    grad = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, inputs, grad))
    return found, (wanted, *torch.autograd.grad(wanted, copies, grad)), seen


@pytest.mark.parametrize("differentiates", [True, False])
@pytest.mark.parametrize(
    "options,dynamic", [*((options, None) for options in OPTIONS), (OPTIONS[0], True)]
)
def test_a_training_graph_holds_one_operator(
    tuned: SimpleNamespace,
    proven: set[str],
    options: dict[str, Any],
    differentiates: bool,
    dynamic: bool | None,
) -> None:
    """By kernels where these are, by PyTorch's operations where only the forward pass has one."""
    tuned.differentiates = differentiates
    head_dim = 128 if "is_causal" in options else 64
    attend = tuned.attention.attention
    found, wanted, operators = compiled_gradients(attend, options, head_dim, dynamic)
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-2)
    assert any("window_attention_with_lse" in name for name in operators)
    if differentiates:
        assert {type(p) for p in tuned.problems} >= {AttentionBackwardProblem}


@pytest.mark.parametrize("lacking", ["attention", "attention_backward"])
def test_a_training_graph_without_proven_kernels_holds_pytorch_s_operations(
    tuned: SimpleNamespace, proven: set[str], lacking: str
) -> None:
    proven.remove(lacking)
    _, _, operators = compiled_gradients(tuned.attention.attention, {"window": (3, 2)}, 64)
    assert not any("window_attention" in name for name in operators)


def test_a_training_graph_for_another_gpu_holds_pytorch_s_operations(
    tuned: SimpleNamespace, proven: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    older = dataclasses.replace(DEFAULT_GPU, compute_capability="8.0")
    monkeypatch.setattr(
        importlib.import_module("tuner.runtime.call.devices"), "gpu_of", lambda index: older
    )
    _, _, operators = compiled_gradients(tuned.attention.attention, {"window": (3, 2)}, 64)
    assert not any("window_attention" in name for name in operators)


def test_a_deterministic_training_graph_holds_pytorch_s_operations(
    tuned: SimpleNamespace, proven: set[str]
) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _, _, operators = compiled_gradients(tuned.attention.attention, {"window": (3, 2)}, 64)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any("window_attention" in name for name in operators)


def test_a_graph_without_gradients_needs_a_kernel_forward_alone(
    tuned: SimpleNamespace, proven: set[str]
) -> None:
    seen: list[str] = []

    def backend(graph: Any, examples: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    proven.remove("attention_backward")
    tensors = [torch.randn(2, 4, 12, 64).half() for _ in range(3)]
    for is_there in (True, False):
        torch._dynamo.reset()
        seen.clear()
        proven.intersection_update({"attention"} if is_there else ())
        attend = torch.compile(tuned.attention.attention, fullgraph=True, backend=backend)
        attend(*tensors, window=(3, 2))
        assert any("window_attention" in name for name in seen) is is_there


def test_a_graph_s_kernels_are_those_of_the_shipped_portfolio_and_rule(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind has them once all kernels are proven, and none without the kernel list."""
    portfolio = importlib.import_module("tuner.selection.portfolio")
    operators = importlib.import_module("tuner.runtime.attention.window_operators")
    monkeypatch.setattr(on_cpu.proven_kernels, "portfolios", portfolio.shipped)
    kinds = [kind for kind in KERNELS if kind.is_windowed or kind.has_softcap]
    assert kinds
    for answer in ({"": "key"}, "no kernel is built"):
        monkeypatch.setattr(on_cpu.proven_kernels.lists, "proven", lambda *_, found=answer: found)
        for kind, wants_gradient in itertools.product(kinds, (True, False)):
            extras = "window" * kind.is_windowed, "softcap" * kind.has_softcap
            features = kind.columns, kind.is_causal, *extras
            given = torch.device("cpu"), torch.bfloat16, *features, wants_gradient
            assert operators._is_proven(*given) is isinstance(answer, dict), kind


def test_a_graph_without_a_kernel_of_its_kind_holds_pytorch_s_operations(
    tuned: SimpleNamespace, proven: set[str]
) -> None:
    options = {"window": (3, 2), "softcap": 2.0}
    _, _, operators = compiled_gradients(tuned.attention.attention, options, 128)
    assert not any("window_attention" in name for name in operators)


def test_gradients_of_composed_attention_are_those_of_its_definition() -> None:
    composed = importlib.import_module("tuner.runtime.attention.composed")
    for queries, keys in ((20, 20), (30, 5)):
        for given in ((4, 1, 0.0), (-1, 0, 1.5), (2, -1, 1.5)):
            extras = composed.Extras(*given)
            tensors = [t.double().requires_grad_() for t in inputs(queries, keys, 4)]
            out = expected(tensors, given[:2], given[2])
            grad = torch.randn_like(out)
            wanted = torch.autograd.grad(out, tensors, grad)
            bare = [t.detach() for t in tensors]
            call = composed.Attended(*bare, False, None, extras)
            made, lse = composed.compose_with_lse(call)
            assert torch.allclose(made, out)
            found = composed.differentiate(call, composed.BackwardInputs(made, lse, grad))
            for one, other in zip(found, wanted, strict=True):
                assert torch.allclose(one, other)
