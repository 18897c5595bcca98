"""Gradients of PyTorch's attention under `tuner.enable`, of so much work that another kernel than
FlashAttention-2's or cuDNN's may compute them; against float64.

Tests that need another kernel are skipped where none is proven and built for such a call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest

import tuner

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    # Inductor's and Triton's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor"),
    # Leaves that were used on another stream before a capture.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    # FlashAttention-2 warns of itself where only warnings are asked for.
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
]

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention
BACKWARD = "_scaled_dot_product_flash_attention_backward"
MARGIN, SMALL = 1.2, 4e-4
"""Largest error over that of FlashAttention-2's gradients, and an error that is small in bf16."""


class Case(NamedTuple):
    """A call whose gradient takes 40 GFLOP or more."""

    heads: int
    heads_kv: int
    length: int
    head_dim: int
    is_causal: bool
    is_token_major: bool = False
    batch: int = 1
    dtype: str = "bfloat16"

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "enable_gqa": self.heads != self.heads_kv}


CAUSAL = Case(32, 32, 2048, 64, True)
CASES = {
    "causal": CAUSAL,
    "full": Case(32, 32, 1536, 64, False),
    "columns": Case(16, 16, 2048, 128, True),
    "grouped": Case(32, 8, 2048, 128, True, is_token_major=True),
    "batch": Case(16, 4, 1111, 128, False, batch=2),
    "half": Case(32, 32, 2048, 64, True, is_token_major=True, dtype="float16"),
    "wide": Case(16, 8, 1792, 256, True),
    "odd": Case(24, 24, 2050, 96, True, is_token_major=True),
}


@pytest.fixture(autouse=True)
def on_gpu(missing_gpu: str) -> Iterator[None]:
    """Skips without a GPU; the switch and the process's options are as they were afterwards."""
    if missing_gpu:
        pytest.skip(missing_gpu)
    torch._dynamo.reset()
    yield
    tuner.disable()
    torch.use_deterministic_algorithms(False)


def part(name: str) -> Any:
    return importlib.import_module(f"tuner.runtime.{name}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each gradient that the override was asked for: True where it computed it."""
    faster, found = part("enable")._faster_gradients, []

    def watched(*arguments: Any, **options: Any) -> Any:
        grads = faster(*arguments, **options)
        found.append(grads is not None)
        return grads

    monkeypatch.setattr(part("enable"), "_faster_gradients", watched)
    autograd = part("training.autograd")
    monkeypatch.setattr(autograd, "CUDNN_REPLACED_FLOPS", autograd.CUDNN_FLOPS)
    return found


@pytest.fixture
def replaced(asked: list[bool]) -> list[bool]:
    """As `asked`, where another kernel computes the gradients of `CAUSAL`."""
    if not has_kernel(CAUSAL):
        pytest.skip("no kernel is built and proven: tuner build --portfolio, tuner prove")
    return asked


def has_kernel(case: Case) -> bool:
    """True when a kernel of the rule computes the gradients of such a call here."""
    query, key, value, grad_out, _ = drawn(case)
    lse = torch.empty(query.shape[:3], device="cuda")
    options = case.is_causal, None, torch.are_deterministic_algorithms_enabled()
    call = part("training.gradients").GradientsCall(
        query, key, value, torch.empty_like(query), lse, grad_out, *options
    )
    return isinstance(part("call.serving").find(call), part("call.plan").Plan)


@cache
def drawn(case: Case) -> tuple[Any, ...]:
    """Query, key, value and the output's gradient, and the gradients of the first three in float64;
    none of them wants a gradient.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    made = []
    for heads in (case.heads, case.heads_kv, case.heads_kv, case.heads):
        shape = (case.batch, case.length, heads, case.head_dim)
        if not case.is_token_major:
            shape = (case.batch, heads, case.length, case.head_dim)
        tensor = torch.randn(shape, device="cuda", generator=generator)
        tensor = tensor.to(getattr(torch, case.dtype))
        made.append(tensor.transpose(1, 2) if case.is_token_major else tensor)
    exact = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in made[:3]]
    group = case.heads // case.heads_kv
    for batch in range(case.batch):
        for head in range(case.heads):  # all heads at once need too much memory
            places = (batch, head), (batch, head // group), (batch, head // group)
            wide = [t[at].double().requires_grad_() for t, at in zip(made, places, strict=False)]
            query, key, value = wide
            scores = query @ key.mT * case.head_dim**-0.5
            if case.is_causal:
                hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            out = scores.softmax(-1) @ value
            grads = torch.autograd.grad(out, wide, made[3][batch, head].double())
            for total, at, grad in zip(exact, places, grads, strict=True):
                total[at] += grad
    return (*made, exact)


def leaves(case: Case) -> list[Any]:
    return [tensor.detach().requires_grad_() for tensor in drawn(case)[:3]]


def errors(case: Case, grads: Any) -> list[float]:
    exact = drawn(case)[4]
    pairs = zip(grads, exact, strict=True)
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


def by_flash(*tensors: Any, **options: Any) -> Any:
    """PyTorch's attention by FlashAttention-2."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return SDPA(*tensors, **options)


def by_cudnn(*tensors: Any, **options: Any) -> Any:
    """PyTorch's attention by cuDNN's kernels."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return SDPA(*tensors, **options)


BOTH = pytest.mark.parametrize("attend", [by_flash, by_cudnn])


@cache
def flash_errors(case: Case) -> list[float]:
    """Errors of FlashAttention-2's gradients, without the switch."""
    inputs = leaves(case)
    grads = torch.autograd.grad(by_flash(*inputs, **case.options), inputs, drawn(case)[3])
    return errors(case, grads)


def check(case: Case, grads: Any) -> None:
    """As near to float64 as FlashAttention-2's gradients."""
    found, others = errors(case, grads), flash_errors(case)
    assert all(a <= MARGIN * b + SMALL for a, b in zip(found, others, strict=True)), (found, others)


def gradients(case: Case, attend: Callable[..., Any] = by_flash) -> tuple[Any, ...]:
    inputs = leaves(case)
    out = attend(*inputs, **case.options)
    grads: tuple[Any, ...] = torch.autograd.grad(out, inputs, drawn(case)[3].to(out.dtype))
    return grads


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_they_are_as_near_to_float64_as_flash_s(
    name: str, attend: Callable[..., Any], asked: list[bool]
) -> None:
    case = CASES[name]
    wanted = flash_errors(case)
    with tuner.enabled():
        grads = gradients(case, attend)
    print(f"{name}: {errors(case, grads)} beside {wanted}; replaced {asked}")
    assert len(asked) == 1 and (asked[0] or not has_kernel(case))
    check(case, grads)
    assert [g.stride() for g in grads] == [t.stride() for t in drawn(case)[:3]]


def test_as_pytorch_chooses_the_backend(replaced: list[bool]) -> None:
    with tuner.enabled():
        check(CAUSAL, gradients(CAUSAL, SDPA))
    assert replaced == [True]


@BOTH
def test_either_pass_may_run_without_the_switch(
    attend: Callable[..., Any], replaced: list[bool]
) -> None:
    inputs, grad_out = leaves(CAUSAL), drawn(CAUSAL)[3]
    out = attend(*inputs, **CAUSAL.options)
    with tuner.enabled():
        check(CAUSAL, torch.autograd.grad(out, inputs, grad_out))
        out = attend(*inputs, **CAUSAL.options)
    assert replaced == [True]
    check(CAUSAL, torch.autograd.grad(out, inputs, grad_out))
    assert replaced == [True]


def test_switched_off_everything_is_as_before(asked: list[bool]) -> None:
    def state() -> list[str]:
        names = ("scaled_dot_product_attention", BACKWARD, BACKWARD.replace("flash", "cudnn"))
        return [torch._C._dispatch_dump_table(f"aten::{name}") for name in names]

    gradients(CAUSAL, SDPA)  # PyTorch settles its order of backends at its first call
    before = state()
    for _ in range(2):
        with tuner.enabled():
            changed = state()
            assert changed[1] != before[1] and changed[2] != before[2]
            gradients(CAUSAL)
        assert state() == before
    check(CAUSAL, gradients(CAUSAL))
    assert len(asked) == 2


@BOTH
def test_second_derivatives_are_refused_as_pytorch_refuses_them(attend: Callable[..., Any]) -> None:
    def said() -> str:
        inputs = leaves(CAUSAL)
        out = attend(*inputs, **CAUSAL.options)
        (grad,) = torch.autograd.grad(out.float().sum(), inputs[:1], create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(grad.float().sum(), inputs)
        return str(caught.value).splitlines()[0]

    wanted = said()
    with tuner.enabled():
        assert said() == wanted


def test_second_derivatives_by_plain_operations() -> None:
    """Where the program asks for them, the switch leaves them alone."""
    inputs = [torch.randn(1, 2, 64, 32, device="cuda", requires_grad=True) for _ in range(3)]

    def second() -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            out = SDPA(*inputs, is_causal=True)
        (grad,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), inputs)

    wanted = second()
    with tuner.enabled():
        found = second()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputed_by_checkpoints(is_reentrant: bool, replaced: list[bool]) -> None:
    def attend(*tensors: Any, **options: Any) -> Any:
        return checkpoint(lambda *t: by_flash(*t, **options), *tensors, use_reentrant=is_reentrant)

    inputs = leaves(CAUSAL)
    with tuner.enabled():
        attend(*inputs, **CAUSAL.options).backward(drawn(CAUSAL)[3])
    assert replaced == [True]
    check(CAUSAL, [tensor.grad for tensor in inputs])


def test_under_autocast(replaced: list[bool]) -> None:
    inputs = [tensor.float().requires_grad_() for tensor in drawn(CAUSAL)[:3]]
    with tuner.enabled(), torch.autocast("cuda", dtype=torch.bfloat16):
        out = by_flash(*inputs, **CAUSAL.options)
        assert out.dtype == torch.bfloat16
    with tuner.enabled():
        grads = torch.autograd.grad(out, inputs, drawn(CAUSAL)[3])
    assert replaced == [True] and {grad.dtype for grad in grads} == {torch.float32}
    check(CAUSAL, grads)


def test_by_torch_func(replaced: list[bool]) -> None:
    query, key, value, grad_out, _ = drawn(CAUSAL)

    def loss(*tensors: Any) -> Any:
        return (by_flash(*tensors, **CAUSAL.options).float() * grad_out).sum()

    with tuner.enabled():
        grads = torch.func.grad(loss, argnums=(0, 1, 2))(query, key, value)
        _, pull = torch.func.vjp(lambda *t: by_flash(*t, **CAUSAL.options), query, key, value)
        pulled = pull(grad_out)
    assert len(replaced) == 2
    check(CAUSAL, grads)
    check(CAUSAL, pulled)


@pytest.mark.parametrize(
    ("first", "backend"), [(False, "FLASH_ATTENTION"), (True, "CUDNN_ATTENTION")]
)
def test_graphs_of_torch_compile_follow_the_switch(
    first: bool, backend: str, replaced: list[bool]
) -> None:
    """Compiled with it off or on."""

    def loss(query: Any, key: Any, value: Any, grad_out: Any) -> Any:
        return (SDPA(query, key, value, **CAUSAL.options).float() * grad_out).sum()

    compiled, grad_out = torch.compile(loss, fullgraph=True), drawn(CAUSAL)[3]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        for is_on in (first, not first, first):
            if is_on:
                tuner.enable()
            else:
                tuner.disable()
            inputs = leaves(CAUSAL)
            grads = torch.autograd.grad(compiled(*inputs, grad_out), inputs)
            check(CAUSAL, grads)
            assert replaced == [True] * len(replaced)
    assert len(replaced) == (2 if first else 1)


def test_deterministic_algorithms_give_equal_bits(asked: list[bool]) -> None:
    """By FlashAttention-2's operator: PyTorch takes no kernel of cuDNN's then."""
    drawn(CAUSAL)  # before: cuBLAS refuses its products without a workspace of a fixed size
    torch.use_deterministic_algorithms(True)
    if not has_kernel(CAUSAL):
        pytest.skip("no deterministic kernel is built and proven")
    with tuner.enabled():
        first, second, third = (gradients(CAUSAL) for _ in range(3))
        check(CAUSAL, first)
    for again in (second, third):
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert asked == [True] * 3


def test_dropout_stays_pytorch_s(asked: list[bool]) -> None:
    grads = []
    for is_on in (False, True):
        if is_on:
            tuner.enable()
        torch.manual_seed(3)
        inputs = leaves(CAUSAL)
        out = by_flash(*inputs, dropout_p=0.2, **CAUSAL.options)
        grads.append(torch.autograd.grad(out, inputs, drawn(CAUSAL)[3]))
    assert asked == []
    for ours, theirs in zip(*grads, strict=True):  # sums of queries are added in any order
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-3


@BOTH
def test_captured_in_a_graph(attend: Callable[..., Any], replaced: list[bool]) -> None:
    """Forward and backward on a stream of the capture's own."""
    inputs, grad_out = leaves(CAUSAL), drawn(CAUSAL)[3]
    side = torch.cuda.Stream()
    with tuner.enabled():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # a graph that is kept would keep nodes of this stream
                torch.autograd.grad(attend(*inputs, **CAUSAL.options), inputs, grad_out)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attend(*inputs, **CAUSAL.options)
            grads = torch.autograd.grad(out, inputs, grad_out)
    assert replaced == [True] * 3
    for _ in range(2):
        for grad in grads:
            grad.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(CAUSAL, grads)


def test_a_part_of_the_inputs_wants_a_gradient(replaced: list[bool]) -> None:
    query, key, value, grad_out, exact = drawn(CAUSAL)
    value = value.detach().requires_grad_()
    with tuner.enabled():
        out = by_flash(query, key, value, **CAUSAL.options)
        (grad,) = torch.autograd.grad(out, value, grad_out)
    assert replaced == [True]
    error = float((grad.double() - exact[2]).norm() / exact[2].norm())
    assert error <= MARGIN * flash_errors(CAUSAL)[2] + SMALL
