"""Gradients where cuDNN's are NaN: lengths that end in half a step of 128, and scores whose
log-sum-exp is far below -88.7. By every way to a backward kernel, against float64; own kernels
through the gate.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from gating import Gated

import tuner
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.fused_attention_backward import rule as backward
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.measure.gate import REFERENCE
from tuner.measure.gate.inputs import Offsets, moments, offsets, scale_of
from tuner.problem import AttentionBackwardProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention
LENGTHS = (64, 192, 320, 448, 704, 1088)
HEAD_DIMS = (64, 128)
MASKS = ("none", "causal", "booleans", "terms")
LIMIT = 8e-3
"""Relative error of bf16 gradients; those of queries and keys times an offset (`limits_of`)."""
HEADS, HEADS_KV = 4, 2


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    tuner.disable()


@pytest.fixture
def on_gpu(missing_gpu: str) -> None:
    if missing_gpu:
        pytest.skip(missing_gpu)


class Drawn(NamedTuple):
    """A call of low scores."""

    tensors: tuple[Any, Any, Any]
    """Query, key and value; none wants a gradient."""
    grad_out: Any
    mask: Any
    is_causal: bool
    exact: list[Any]
    """Gradients in float64."""
    offsets: Offsets
    """Growth of the limits of the gradients of keys and queries."""


@cache
def drawn(queries: int, keys: int, head_dim: int, mask: str, batch: int = 1) -> Drawn:
    generator = torch.Generator("cuda").manual_seed(0)
    problem = AttentionBackwardProblem(queries, keys, head_dim, dtype="bfloat16")
    means, deviations = moments(problem, "low_scores")

    def normal(name: str, heads: int, rows: int) -> Any:
        made = torch.randn(batch, heads, rows, head_dim, device="cuda", generator=generator)
        made = means.get(name, 0.0) + deviations.get(name, 1.0) * made
        return made.bfloat16()

    query, grad_out = (normal(name, HEADS, queries) for name in ("query", "grad_out"))
    key, value = (normal(name, HEADS_KV, keys) for name in ("key", "value"))
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    scores = wide[0] @ wide[1].repeat_interleave(HEADS // HEADS_KV, 1).mT / math.sqrt(head_dim)
    given: Any = None
    if mask == "causal":
        hidden = torch.ones(queries, keys, dtype=torch.bool, device="cuda").triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    elif mask == "booleans":
        given = torch.rand(queries, keys, device="cuda", generator=generator) < 0.7
        given[:, 0] = True
        scores = scores.masked_fill(~given, -math.inf)
    elif mask == "terms":
        shape = (batch, 1, queries, keys)
        given = torch.randn(shape, device="cuda", generator=generator).bfloat16()
        scores = scores + given.double()
    assert float(scores.detach().logsumexp(-1).max()) < -100
    out = scores.softmax(-1) @ wide[2].repeat_interleave(HEADS // HEADS_KV, 1)
    exact = list(torch.autograd.grad(out, wide, grad_out.double()))
    is_causal, grown = mask == "causal", offsets(problem, "low_scores")
    return Drawn((query, key, value), grad_out, given, is_causal, exact, grown)


def check(case: Drawn, grads: Any) -> None:
    assert all(bool(grad.isfinite().all()) for grad in grads)
    pairs = zip(grads, case.exact, strict=True)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
    limits = [LIMIT * case.offsets.key, LIMIT * case.offsets.query, LIMIT]
    assert all(a < b for a, b in zip(errors, limits, strict=True)), (errors, limits)


def by_attention(case: Drawn, tensors: Any) -> Any:
    query, key, value = tensors
    return tuner.attention(query, key, value, case.mask, 0.0, case.is_causal, enable_gqa=True)


def by_sdpa(case: Drawn, tensors: Any) -> Any:
    options = {"is_causal": case.is_causal, "enable_gqa": True}
    return SDPA(*tensors, case.mask, **options)


def by_cudnn(case: Drawn, tensors: Any) -> Any:
    """Forward by the kernel whose backward kernel is not to run."""
    query, key, value = tensors
    asked = torch.backends.cuda.SDPAParams(query, key, value, case.mask, 0.0, case.is_causal, True)
    if not torch.backends.cuda.can_use_cudnn_attention(asked, False):
        pytest.skip("cuDNN takes no such call")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return by_sdpa(case, tensors)


def gradients(case: Drawn, attend: Any) -> Any:
    tensors = [t.detach().clone().requires_grad_() for t in case.tensors]
    return torch.autograd.grad(attend(case, tensors), tensors, case.grad_out)


WAYS = {
    "attention": (by_attention, False),
    "attention and enable": (by_attention, True),
    "enable": (by_sdpa, True),
    "enable by cuDNN": (by_cudnn, True),
}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", LENGTHS)
def test_gradients_of_low_scores_are_finite_and_right(
    length: int, head_dim: int, mask: str, way: str
) -> None:
    attend, is_on = WAYS[way]
    case = drawn(length, length, head_dim, mask)
    with tuner.enabled() if is_on else contextlib.nullcontext():
        check(case, gradients(case, attend))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("queries", "keys", "mask"),
    [
        *((1, 128, mask) for mask in MASKS if mask != "causal"),  # one key has no derivative
        *((n, m, mask) for n, m in ((128, 192), (320, 256), (1000, 1088)) for mask in MASKS),
    ],
)
def test_unequal_lengths(queries: int, keys: int, mask: str, way: str) -> None:
    attend, is_on = WAYS[way]
    case = drawn(queries, keys, 64, mask, batch=2)
    with tuner.enabled() if is_on else contextlib.nullcontext():
        check(case, gradients(case, attend))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("way", ["attention", "enable"])
def test_much_work_at_such_a_length(way: str) -> None:
    """40 GFLOP and more, where the runtime chooses a kernel by itself."""
    attend, is_on = WAYS[way]
    case = drawn(4160, 4160, 128, "none", batch=1)
    with tuner.enabled() if is_on else contextlib.nullcontext():
        check(case, gradients(case, attend))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("way", ["attention", "enable"])
@pytest.mark.parametrize("mask", ["none", "booleans"])
def test_in_graphs_of_torch_compile(mask: str, way: str) -> None:
    attend, is_on = WAYS[way]
    case = drawn(704, 704, 64, mask)
    compiled = torch.compile(lambda *t: attend(case, t), fullgraph=True, backend="aot_eager")
    with tuner.enabled() if is_on else contextlib.nullcontext():
        check(case, gradients(case, lambda _, tensors: compiled(*tensors)))


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("way", ["attention", "enable"])
@pytest.mark.parametrize("mask", ["none", "terms"])
def test_captured_in_a_cuda_graph(mask: str, way: str) -> None:
    attend, is_on = WAYS[way]
    case = drawn(704, 704, 128, mask)
    tensors = [t.detach().clone().requires_grad_() for t in case.tensors]

    def step() -> Any:
        return torch.autograd.grad(attend(case, tensors), tensors, case.grad_out)

    side = torch.cuda.Stream()
    with tuner.enabled() if is_on else contextlib.nullcontext():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            grads = step()
    for grad in grads:
        grad.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    check(case, grads)


# --- own kernels -------------------------------------------------------------------------------

OWN = [
    AttentionBackwardProblem(
        n, n, d, heads_q=4, heads_kv=2, is_causal=is_causal, dtype="bfloat16", is_deterministic=det
    )
    for n in (64, 192, 704, 1088)
    for d in HEAD_DIMS
    for is_causal in (False, True)
    for det in (False, True)
]


def config_of(problem: AttentionBackwardProblem) -> Config:
    kind = backward.kind_of(problem)
    assert kind is not None
    return backward.placed(backward.KERNELS[kind], problem, detect() or DEFAULT_GPU)


def spec_of(problem: AttentionBackwardProblem) -> KernelSpec:
    (spec,) = family("fused_attention_backward").kernels(problem, config_of(problem)).values()
    return spec


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    return [REFERENCE, *dict.fromkeys(map(spec_of, OWN))]


@pytest.mark.parametrize("problem", OWN, ids=lambda problem: problem.label())
def test_own_kernels_pass_the_gate_on_low_scores(
    gated: Gated, problem: AttentionBackwardProblem
) -> None:
    gated.passes(problem, config_of(problem))


@pytest.mark.parametrize("kernel", ["flash2", "flash3"])
def test_vendors_pass_the_gate_on_low_scores(gated: Gated, kernel: str) -> None:
    problem = AttentionBackwardProblem.parse("H=4,S=704,D=64,dtype=bf16")
    gated.passes(problem, Config("sdpa_backward", {"kernel": kernel}), ["low_scores"])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_cudnn_is_refused_there(on_gpu: None, head_dim: int) -> None:
    member = family("sdpa_backward")
    for length, is_refused in ((704, True), (640, False)):
        problem = AttentionBackwardProblem(length, length, head_dim, dtype="bfloat16")
        config = Config(member.name, {"kernel": "cudnn"})
        call = member.vendor_call(problem, config, scale_of(problem))
        assert (isinstance(call, str) and "may be NaN" in call) is is_refused, call
