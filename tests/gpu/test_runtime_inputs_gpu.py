"""Inputs of calls on the GPU: causal masks of unequal lengths by every way in, tensors that lie as
no kernel reads them, a model's soft cap, and calls that are refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
from runtime_gpu import (
    TOLERANCE,
    call_path,
    compiled,
    first_kernels,
    fresh_store,
    inputs,
    part,
    served_gpu,
    store,
)

import tuner
from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_store")]

from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

from tuner.runtime.call.refusal import Kind  # noqa: E402

own_store, path, gpu = fresh_store, call_path, served_gpu

FAMILY = "fused_attention"
SDPA = torch.nn.functional.scaled_dot_product_attention
LONGER, SHORTER, SQUARE, FULL = (
    AttentionProblem.parse(f"H=16,D=64,{lengths}")
    for lengths in (
        "SQ=512,SKV=1024,causal=1",
        "SQ=1024,SKV=512,causal=1",
        "S=1024,causal=1",
        "S=1024",
    )
)
LOWER_RIGHT = AttentionProblem.parse("B=2,H=16,D=64,SQ=512,SKV=1024,right=512")
CAP = 5.0
CAPPED = AttentionProblem.parse("B=2,H=4,HKV=2,S=256,D=64,causal=1,layout=bshd,softcap=5")
ALONE = AttentionProblem.parse("H=1,S=1,D=64,dtype=bf16")
PRODUCT = GemmProblem.parse("M=512,N=768,K=256")


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    problems = LONGER, SHORTER, SQUARE, FULL, CAPPED, ALONE, LOWER_RIGHT
    specs = [spec for problem in problems for spec in first_kernels(problem, FAMILY)]
    return list(dict.fromkeys([*specs, *first_kernels(PRODUCT, "gemm")]))


def tune(problem: Any, compiler: Compiler, gpu: Gpu, name: str = FAMILY) -> None:
    config, artifacts = compiled(compiler, problem, gpu, name)
    store(problem, gpu, config, artifacts=artifacts)


def exact(q: Any, k: Any, v: Any, offset: int | None, cap: float = 0.0) -> Any:
    """In float64; query i sees keys 0..i + offset, of None all."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.shape[-1] ** -0.5 * q @ k.mT
    if cap:
        scores = cap * (scores / cap).tanh()
    if offset is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(offset)
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def error(out: Any, wanted: Any) -> float:
    return float((out.detach().double() - wanted).norm() / wanted.norm())


def hits() -> int:
    return int(part("call.counters").stats(reset=True).hits)


@pytest.mark.compile
def test_a_score_beyond_its_rounded_maximum_is_a_number(compiler: Compiler, gpu: Gpu) -> None:
    """One score of about 1e12, whose scaled maximum rounds."""
    tune(ALONE, compiler, gpu)
    q, k, v = (torch.full_like(t, 133120.0) for t in inputs(ALONE))
    assert torch.equal(tuner.attention(q, k, v), v)
    assert hits() == 1


# --- where a causal mask lies ---------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backends", [None, "FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("is_on", [False, True])
def test_lower_right_behind_pytorch_s_attention(
    compiler: Compiler, gpu: Gpu, backends: str | None, is_on: bool
) -> None:
    """Its operator is flash's, which aligns the mask as a tuned kernel without a window does
    not.
    """
    tune(LONGER, compiler, gpu)
    q, k, v = inputs(LONGER)
    chosen = getattr(SDPBackend, backends) if backends else None
    bias = causal_lower_right(512, 1024)
    if is_on:
        tuner.enable()
    try:
        if chosen is None:
            out = SDPA(q, k, v, bias)
        else:
            with sdpa_kernel(chosen):
                out = SDPA(q, k, v, bias)
    finally:
        tuner.disable()
    assert error(out, exact(q, k, v, 512)) < TOLERANCE["float16"]
    assert hits() == 0


@pytest.mark.compile
def test_lower_right_is_a_window(compiler: Compiler, gpu: Gpu) -> None:
    tune(LOWER_RIGHT, compiler, gpu)
    q, k, v = inputs(LOWER_RIGHT)
    bias, wanted = causal_lower_right(512, 1024), exact(q, k, v, 512)
    assert error(tuner.attention(q, k, v, bias), wanted) < TOLERANCE["float16"]
    with tuner.enabled():
        assert error(SDPA(q, k, v, bias), wanted) < TOLERANCE["float16"]
    assert hits() == 2


@pytest.mark.compile
def test_lower_right_of_equal_lengths_is_served(compiler: Compiler, gpu: Gpu) -> None:
    tune(SQUARE, compiler, gpu)
    q, k, v = inputs(SQUARE)
    with tuner.enabled():
        out = SDPA(q, k, v, causal_lower_right(1024, 1024))
        flash = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    for found in (out, flash):
        assert error(found, exact(q, k, v, 0)) < TOLERANCE["float16"]
    assert hits() == 2


@pytest.mark.compile
@pytest.mark.parametrize("problem", [LONGER, SHORTER], ids=str)
def test_top_left_by_every_way_in(compiler: Compiler, gpu: Gpu, problem: AttentionProblem) -> None:
    tune(problem, compiler, gpu)
    q, k, v = inputs(problem)
    wanted = exact(q, k, v, 0)
    upper = causal_upper_left(problem.seqlen_q, problem.seqlen_kv)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    ways: list[Callable[[], Any]] = [
        lambda: tuner.attention(q, k, v, is_causal=True),
        lambda: torch.ops.tuner.attention(q, k, v, True),
        lambda: torch.ops.tuner.attention_with_lse(q, k, v, True)[0],
    ]
    for way in ways:
        assert error(way(), wanted) < TOLERANCE["float16"]
    assert hits() == 3
    with tuner.enabled():
        for lse in (False, True):
            assert error(cudnn(q, k, v, None, lse, 0.0, True)[0], wanted) < TOLERANCE["float16"]
        assert hits() == 2
        assert error(SDPA(q, k, v, upper), wanted) < TOLERANCE["float16"]
        assert error(SDPA(q, k, v, is_causal=True), wanted) < TOLERANCE["float16"]
    for bias, offset in ((upper, 0), (causal_lower_right(512, 1024), 512)):
        if offset and problem == SHORTER:
            continue  # its first queries would see no key
        out = tuner.attention(q, k, v, bias)
        assert error(out, exact(q, k, v, offset)) < TOLERANCE["float16"]
        capped = tuner.attention(q, k, v, bias, softcap=CAP)
        assert error(capped, exact(q, k, v, offset, CAP)) < TOLERANCE["float16"]


@pytest.mark.compile
@pytest.mark.parametrize("problem", [LONGER, SHORTER, SQUARE], ids=str)
def test_gradients_of_unequal_lengths(
    compiler: Compiler, gpu: Gpu, problem: AttentionProblem
) -> None:
    tune(problem, compiler, gpu)
    tensors = [t.requires_grad_() for t in inputs(problem)]
    grad = torch.randn(problem.output.shape, device="cuda", dtype=torch.float16)
    wanted = torch.autograd.grad(exact(*tensors, 0), tensors, grad.double())
    for out in (
        tuner.attention(*tensors, is_causal=True),
        torch.ops.tuner.attention(*tensors, True),
    ):
        found = torch.autograd.grad(out, tensors, grad)
        assert all(error(a, b) < 5e-3 for a, b in zip(found, wanted, strict=True))


def test_nested_tensors_under_the_switch() -> None:
    rows = [torch.randn(n, 4, 64, device="cuda", dtype=torch.float16) for n in (100, 300)]
    q = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    wanted = SDPA(q, q, q, is_causal=True)
    with tuner.enabled():
        out = SDPA(q, q, q, is_causal=True)
    found = tuner.attention(q, q, q, is_causal=True)
    for one in (out, found):
        assert torch.equal(one.values(), wanted.values())
    assert hits() == 0


# --- tensors that lie otherwise -------------------------------------------------------------


def shifted(tensor: Any, elements: int) -> Any:
    room = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return room[elements:].view(tensor.shape).copy_(tensor)


Change = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
OTHERWISE: dict[str, Change] = {
    "keys expanded over heads": lambda q, k, v: (
        q,
        k[:, :1].expand(k.shape),
        v[:, :1].expand(v.shape),
    ),
    "one key for all": lambda q, k, v: (q, k[:, :, :1].expand(k.shape), v),
    "queries expanded": lambda q, k, v: (q[:, :, :1].expand(q.shape), k, v),
    "every other key": lambda q, k, v: (q, k, torch.cat([v, v], 2)[:, :, ::2]),
    "rows apart": lambda q, k, v: (torch.cat([q, q], -1)[..., :64], k, v),
    "a negative view": lambda q, k, v: (q, torch._neg_view(k), v),
}


STRIDED = ("every other key", "rows apart")
"""Served where they lie: strides are arguments of a launch."""


@pytest.mark.compile
@pytest.mark.parametrize("way", STRIDED)
def test_strided_tensors_are_served(way: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    tune(FULL, compiler, gpu)
    q, k, v = OTHERWISE[way](*inputs(FULL))
    wanted = exact(q, k, v, None)
    for _ in range(3):
        assert error(tuner.attention(q, k, v), wanted) < TOLERANCE["float16"]
    if path == "dispatcher":  # which overrides PyTorch's operators
        with tuner.enabled():
            assert error(SDPA(q, k, v), wanted) < TOLERANCE["float16"]
    assert hits() == (4 if path == "dispatcher" else 3)


@pytest.mark.compile
@pytest.mark.parametrize("way", [way for way in OTHERWISE if way not in STRIDED])
def test_tensors_that_lie_otherwise(way: str, path: str, compiler: Compiler, gpu: Gpu) -> None:
    tune(FULL, compiler, gpu)
    tensors = inputs(FULL)
    assert error(tuner.attention(*tensors), exact(*tensors, None)) < TOLERANCE["float16"]
    assert hits() == 1
    q, k, v = OTHERWISE[way](*tensors)
    wanted = SDPA(q, k, v)
    for _ in range(3):
        assert torch.equal(tuner.attention(q, k, v), wanted)
    assert hits() == 0
    with tuner.enabled():  # PyTorch materialises a negative view before it chooses a kernel
        tolerance = TOLERANCE["float16"]
        assert torch.equal(SDPA(q, k, v), wanted) or error(SDPA(q, k, v), wanted) < tolerance
    assert hits() == 0 or way == "a negative view"
    torch.cuda.synchronize()
    assert error(tuner.attention(*tensors), exact(*tensors, None)) < TOLERANCE["float16"]
    assert hits() == 1


@pytest.mark.compile
def test_products_that_lie_otherwise(path: str, compiler: Compiler, gpu: Gpu) -> None:
    tune(PRODUCT, compiler, gpu, "gemm")
    a, b = (matrix[0] for matrix in inputs(PRODUCT))
    w = b.t()
    tuner.matmul(a, b)
    assert hits() == 1
    for x, y in (
        (a[:1].expand(a.shape), w),
        (shifted(a, 1), w),
        (a, w[:1].expand(w.shape)),
        (a, shifted(w.contiguous(), 4)),
    ):
        for _ in range(2):
            out = tuner.linear(x, y)
            wanted = x.double() @ y.double().t()
            assert error(out, wanted) < TOLERANCE["float16"]
    assert hits() == 0
    wider = torch.cat([a, a], 1)[:, :256]  # rows of a wider tensor are served where they lie
    wanted = wider.double() @ w.double().t()
    assert error(tuner.linear(wider, w), wanted) < TOLERANCE["float16"]
    assert hits() == 1
    torch.cuda.synchronize()


# --- a model's soft cap ---------------------------------------------------------------------


def gemma2(implementation: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    importlib.import_module("tuner.runtime.engines.transformers")
    config = transformers.Gemma2Config(
        vocab_size=97,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=512,
        sliding_window=320,
        attn_logit_softcapping=CAP,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation=implementation)
    return model.eval().half().cuda()


@pytest.mark.compile
@torch.no_grad()
def test_gemma2_is_capped(compiler: Compiler, gpu: Gpu) -> None:
    tune(CAPPED, compiler, gpu)
    model, reference = gemma2("tuner"), gemma2("eager").float()
    ids = torch.randint(2, 97, (2, 256), device="cuda")
    padded = torch.ones_like(ids)
    padded[0, :40] = 0
    wanted = reference(ids, use_cache=False).logits.double()
    assert error(model(ids, use_cache=False).logits, wanted) < 1e-2
    assert hits() == 2, "both layers' capped kernels"
    wanted = reference(ids, attention_mask=padded, use_cache=False).logits.double()
    found = model(ids, attention_mask=padded, use_cache=False).logits
    assert error(found[padded > 0], wanted[padded > 0]) < 1e-2
    assert hits() == 0, "a mask beside a cap is composed"
    for cache in ("dynamic", "static"):
        call = {
            "attention_mask": padded,
            "cache_implementation": cache,
            "max_new_tokens": 8,
            "do_sample": False,
            "pad_token_id": 0,
            "disable_compile": True,
        }
        assert torch.equal(model.float().generate(ids, **call), reference.generate(ids, **call))
        model.half()


# --- refused calls --------------------------------------------------------------------------


def test_refused_calls_do_not_come_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`scripts/bench dispatch` prints what they cost."""
    dispatch, counters = part("call.dispatch"), part("call.counters")
    dispatch.prepare(then=part("call.table").table.renew).join(300)
    if dispatch._module is None:
        dispatch._thread = None
        pytest.skip("no dispatcher: a C++ compiler or Python's headers are missing")
    slow: list[str] = []
    count = counters.count_fallback
    monkeypatch.setattr(
        counters, "count_fallback", lambda reason: (slow.append(reason), count(reason))
    )
    monkeypatch.setattr(part("call.table"), "LOOK_EVERY_S", 1e6)
    q, k, v = (torch.randn(1, 3, 200, 64, device="cuda").half() for _ in range(3))
    mask = torch.ones(200, 200, device="cuda") > 0
    a, w = torch.randn(7, 24, device="cuda").half(), torch.randn(40, 24, device="cuda").half()
    calls: list[Callable[[], Any]] = [
        lambda: tuner.attention(q, k, v),
        lambda: tuner.attention(q, k, v, mask),
        lambda: tuner.linear(a, w),
        lambda: tuner.matmul(a, w.t()),
    ]
    for call in calls:
        for _ in range(10):
            call()
    assert len(slow) == len(calls)
    with tuner.enabled(), torch.no_grad():
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                for _ in range(10):
                    SDPA(q, k, v)
    assert len(slow) <= len(calls) + 2
    fallbacks = counters.stats().fallbacks
    assert sum(fallbacks.values()) == 60
    assert set(fallbacks) <= {Kind.UNSERVED, Kind.MISS, Kind.PORTFOLIO}


@pytest.mark.parametrize("columns", [50257, 51866])
@pytest.mark.parametrize("rows", [(7,), (2, 33)])
@torch.no_grad()
def test_a_vocabulary_whose_size_is_not_a_multiple_of_8(
    rows: tuple[int, ...], columns: int
) -> None:
    input = torch.randn(*rows, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, 256, device="cuda", dtype=torch.bfloat16)
    out, wanted = tuner.linear(input, weight), input.double() @ weight.double().t()
    assert out.is_contiguous() and out.shape == (*rows, columns)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 4e-3
    out, wanted = (one[..., columns // 8 * 8 :].double() for one in (out, wanted))
    assert float((out - wanted).norm() / wanted.norm()) < 4e-3
