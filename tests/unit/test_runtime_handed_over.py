"""Calls that PyTorch's fused kernels fail on, over CPU tensors: what is copied and served, what
PyTorch is given, and what raises. `tests/gpu/test_runtime_handed_over_gpu.py` has the numbers.
"""

from __future__ import annotations

import importlib
import itertools
import operator
import random
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import Machine, answer, fake_machine, measured
from runtime_server import (
    PROBLEM,
    Server,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    enabled_server,
    inputs,
)
from unaligned import WAYS, drawn_view, exact, shifted

import tuner
from tuner.config import Config
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

from tuner.runtime.call import handed_over, native  # noqa: E402

machine = fake_machine
built, server, enabled = built_dispatcher, dispatched_server, enabled_server
SDPA = torch.nn.functional.scaled_dot_product_attention


def tensors(length: int = 16, keys: int = 20, heads_kv: int = 2, width: int = 8) -> list[Any]:
    shapes = (2, 4, length, width), (2, heads_kv, keys, width), (2, heads_kv, keys, width)
    return [torch.randn(shape).half() for shape in shapes]


def close(out: Any, wanted: Any) -> bool:
    return out.shape == wanted.shape and bool(
        torch.allclose(out.detach().double(), wanted.detach(), atol=4e-3, rtol=4e-3)
    )


def is_aligned(tensor: Any) -> bool:
    """Start and every stride but the last, in bytes; written without the module's own rule."""
    steps = [
        step for size, step in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1
    ]
    starts = [tensor.data_ptr(), *(step * tensor.element_size() for step in steps)]
    return all(start % 16 == 0 for start in starts)


# --- copies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_copies_are_aligned_and_lie_alike(way: str, dtype: Any) -> None:
    tensor = WAYS[way](torch.randn(2, 3, 5, 16).to(dtype))
    (copy,) = handed_over.aligned(tensor)
    assert not is_aligned(tensor) and is_aligned(copy)
    assert torch.equal(copy.float(), tensor.float())
    assert copy.stride() == torch.empty_like(tensor).stride()
    assert handed_over.aligned(copy)[0] is copy


def test_what_pytorch_pads_or_composes_is_not_copied() -> None:
    odd, turned = torch.randn(2, 3, 5, 7).half(), torch.randn(2, 3, 8, 5).half().mT
    scalar, empty = torch.zeros(()).half(), torch.zeros(2, 0, 5, 0).half()
    given = odd, shifted(odd), turned, scalar, empty
    assert all(map(operator.is_, handed_over.aligned(*given), given))


def test_broadcast_dimensions_stay_so() -> None:
    one = shifted(torch.randn(2, 1, 5, 8).half())
    (copy,) = handed_over.aligned(one.expand(2, 4, 5, 8))
    assert copy.stride(1) == 0 and is_aligned(copy) and torch.equal(copy, one.expand(2, 4, 5, 8))


def test_rows_that_overlap() -> None:
    tensor = torch.randn(200).half().as_strided((2, 3, 4, 8), (1, 8, 3, 1), 1)
    (copy,) = handed_over.aligned(tensor)
    assert is_aligned(copy) and copy.stride(-1) == 1 and torch.equal(copy, tensor)


def test_a_mask_in_rows_of_any_size(long_mode: bool) -> None:
    for width in range(1, 300 if long_mode else 34):
        terms = shifted(torch.randn(2, 1, 3, width).half()).expand(2, 4, 3, width)
        copy = handed_over.aligned_mask(terms)
        assert is_aligned(copy) and torch.equal(copy, terms) and copy.stride(1) == 0
        seen = (terms > 0)[:, :1].expand(2, 4, 3, width)
        added = handed_over.terms_of(seen, torch.bfloat16)
        assert is_aligned(added) and added.dtype == torch.bfloat16 and added.stride(1) == 0
        assert torch.equal(added == 0, seen) and torch.equal(added == -torch.inf, ~seen)


# --- served from copies ---------------------------------------------------------------------


@pytest.fixture(params=["dispatcher", "python"])
def path(request: pytest.FixtureRequest, server: Server) -> str:
    if request.param == "python":
        server.runtime.dispatch.use(None)
    return str(request.param)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_copies_are_served(server: Server, path: str, way: str, which: int) -> None:
    """Every call, also once the dispatcher knows the plan of those that lie as tuned."""
    server.decide(PROBLEM, AttentionProblem.parse("S=16,D=8,H=2,layout=bshd"))
    given = inputs()
    server.attention(*given)
    if "tokens first" in way:  # of one tensor alone, a layout of its own
        given = [WAYS[way](t) for t in given]
    given[which] = WAYS[way](given[which])
    calls = server.runtime.counters
    calls.stats(reset=True)
    for _ in range(3):
        out, _, launched = server.went(lambda: server.attention(*given))
        assert launched and by_kernel(out, given[0], 16)
    assert (calls.stats().hits, calls.stats().fallbacks) == (3, {})


def test_a_mask_that_starts_elsewhere_is_served(server: Server, path: str) -> None:
    server.decide(AttentionProblem.parse("S=16,D=8,H=2,mask=1"))
    q, k, v = inputs()
    seen = (torch.randn(16 * 16 + 3) > 0)[3:].view(16, 16)
    for _ in range(2):
        assert server.went(lambda: server.attention(q, k, v, seen))[2]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_are_served_behind_pytorch_s_attention(
    server: Server, enabled: None, way: str, requires_grad: bool
) -> None:
    server.decide(AttentionProblem.parse("S=16,D=8,H=2,layout=bshd"))
    q, k, v = (WAYS[way](t) for t in inputs())
    if requires_grad:
        q, k = q.requires_grad_(), k.requires_grad_()
        wanted = exact(q, k, v)
        grads = torch.autograd.grad(wanted.sum(), (q, k))
        out = SDPA(q, k, v)
        assert close(out, wanted)
        found = torch.autograd.grad(out.sum(), (q, k))
        assert all(close(a, b.double()) for a, b in zip(found, grads, strict=True))
        return
    for _ in range(3):
        out, _, launched = server.went(lambda: SDPA(q, k, v))
        assert launched and by_kernel(out, q, 16)
    assert server.runtime.counters.stats().fallbacks == {}


ENTRIES: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: tuner.attention(q, k, v, enable_gqa=True),
    "under a mask": lambda q, k, v: tuner.attention(
        q, k, v, torch.ones(16, 20) > 0, enable_gqa=True
    ),
    "under a window": lambda q, k, v: tuner.attention(q, k, v, enable_gqa=True, window=(64, 64)),
    "with a soft cap": lambda q, k, v: tuner.attention(q, k, v, enable_gqa=True, softcap=1e4),
    "the operator": lambda q, k, v: torch.ops.tuner.attention(q, k, v),
    "the operator with its log-sum-exp": lambda q, k, v: torch.ops.tuner.attention_with_lse(
        q, k, v
    )[0],
    "the operator under a window": lambda q, k, v: torch.ops.tuner.window_attention(
        q, k, v, False, None, 64, 64, 0.0
    ),
    "under a block mask": lambda q, k, v: tuner.sparse_attention(
        q, k, v, create_block_mask(lambda b, h, i, j: i >= 0, None, None, 16, 20, device="cpu")
    ),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_answers(
    tuned: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    entry: str,
    way: str,
    requires_grad: bool,
) -> None:
    """By a kernel, and by PyTorch, which is given aligned tensors."""
    if requires_grad and entry in ("under a block mask", "the operator under a window"):
        pytest.skip("PyTorch's FlexAttention has none on a CPU; the operator has its own")
    # Compiled it takes 20 CPU-seconds here.
    sparse = importlib.import_module("tuner.runtime.attention.sparse")
    monkeypatch.setattr(sparse, "_compiled", lambda: flex_attention)
    q, k, v = tensors()
    given = [WAYS[way](t).requires_grad_(requires_grad) for t in (q, k, v)]
    seen = watched(monkeypatch)
    if entry != "under a block mask":  # whose operands the fixture's kernel does not know
        assert close(ENTRIES[entry](*given), exact(q, k, v))
    tuned.serves = False
    tuned.table.table.forget()
    assert close(ENTRIES[entry](*given), exact(q, k, v))
    assert all(map(is_aligned, seen))


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Query, key, value and terms of masks that PyTorch's attention is given from now on."""
    seen: list[Any] = []

    def attend(q: Any, k: Any, v: Any, mask: Any = None, *options: Any, **further: Any) -> Any:
        seen.extend([q, k, v] if mask is None or mask.dtype == torch.bool else [q, k, v, mask])
        return SDPA(q, k, v, mask, *options, **further)

    monkeypatch.setattr(native, "scaled_dot_product_attention", attend)
    return seen


def test_packed_sequences_are_copied(tuned: SimpleNamespace, monkeypatch: Any) -> None:
    q, k, v = (shifted(torch.randn(10, 2, 8).half()) for _ in range(3))
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    seen = watched(monkeypatch)
    tuned.serves = False
    out = tuner.attention_varlen(q, k, v, starts, starts, 6, 6)
    for first, last in ((0, 4), (4, 10)):
        part = [t[first:last].transpose(0, 1)[None] for t in (q, k, v)]
        assert close(out[first:last].transpose(0, 1)[None], exact(*part))
    assert seen and all(map(is_aligned, seen))


def test_drawn_views(tuned: SimpleNamespace, monkeypatch: Any, long_mode: bool) -> None:
    """Sizes, views and masks of a few hundred calls, of thousands in the long mode."""
    draw = random.Random(7)
    seen = watched(monkeypatch)
    for index in range(5000 if long_mode else 150):
        q, k, v = tensors(draw.randint(1, 20), draw.randint(1, 20), draw.choice([1, 2, 4]), 8)
        mask = torch.randn(draw.choice([1, 2]), draw.choice([1, 4]), q.shape[2], k.shape[2])
        mask = draw.choice([None, mask.half(), mask > 0, (mask > 9).expand(2, 4, -1, -1)])
        views: Any = [drawn_view(draw, t) for t in (q, k, v)]
        shown = None if mask is None or mask.dtype == torch.bool else drawn_view(draw, mask)
        tuned.serves = index % 2 == 0
        out = tuner.attention(*views, mask if shown is None else shown, enable_gqa=True)
        assert close(out, exact(q, k, v, mask)), (index, q.shape, k.shape)
        tuned.table.table.forget()
    assert all(map(is_aligned, seen))


# --- rows that see no key -------------------------------------------------------------------


def as_cudnn(q: Any, k: Any, v: Any, mask: Any = None, *options: Any, **further: Any) -> Any:
    """As PyTorch 2.11 hands a boolean mask to cuDNN: hidden keys have the lowest fp16 number."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=torch.float64), -65504.0)
        out = SDPA(q.double(), k.double(), v.double(), mask, *options, **further)
        return out.to(q.dtype)
    return SDPA(q, k, v, mask, *options, **further)


MASKS: dict[str, Any] = {
    "rows": torch.arange(16)[:, None].expand(16, 20) % 3 > 0,
    "a sequence": torch.arange(2)[:, None, None, None].expand(2, 1, 1, 20) > 0,
    "all": torch.zeros(2, 4, 16, 20) > 0,
    "a head": torch.arange(4)[:, None, None].expand(4, 16, 20) > 1,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_rows_without_a_key_are_zeros_whoever_answers(
    tuned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, requires_grad: bool
) -> None:
    q, k, v = (t.requires_grad_(requires_grad) for t in tensors(heads_kv=4))
    wanted = exact(q, k, v, MASKS[name])
    if not requires_grad:
        assert close(tuner.attention(q, k, v, MASKS[name]), wanted)
    tuned.serves = False
    monkeypatch.setattr(native, "scaled_dot_product_attention", as_cudnn)
    tuned.table.table.forget()
    out = tuner.attention(q, k, v, MASKS[name])
    assert close(out, wanted)
    windowed = tuner.attention(q, k, v, MASKS[name], window=(40, 40))
    assert close(windowed, wanted)
    if requires_grad:
        found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        grads = torch.autograd.grad(wanted.square().sum(), (q, k, v))
        assert all(close(a, b.double()) for a, b in zip(found, grads, strict=True))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments that PyTorch's fused CPU kernel was called with; it computes as `exact`."""
    calls: list[tuple[Any, ...]] = []

    def kernel(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, is_causal: bool = False,
        *, attn_mask: Any = None, scale: float | None = None,
    ) -> Any:  # fmt: skip
        calls.append((q, k, v, attn_mask))
        out = exact(q, k, v, attn_mask, is_causal, scale).to(q.dtype)
        return out, torch.zeros(q.shape[:3])

    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_flash_attention_for_cpu"
    library.impl(name, kernel, "CPU", allow_override=True)
    yield calls
    library._destroy()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the kernel that is replaced
@pytest.mark.parametrize("is_enabled", [False, True])
def test_the_dispatcher_hands_over_aligned_terms(
    server: Server, fused: list[tuple[Any, ...]], is_enabled: bool
) -> None:
    """Refused calls pass no Python from the second on, under both ways in."""
    q, k, v = tensors(heads_kv=4)
    mask = MASKS["rows"].contiguous()
    if is_enabled:
        tuner.enable()
    try:
        attend = SDPA if is_enabled else server.attention
        for attempt in range(3):
            for terms in (
                *(mask, torch.randn(16, 20).half(), shifted(torch.randn(16, 20).half())),
                *(torch.randn(16, 1).half(), torch.randn(16, 1).half() > 0),
            ):
                out, by_python, launched = server.went(partial(attend, q, k, v, terms))
                assert close(out, exact(q, k, v, terms)) and not launched
                assert terms.data_ptr() % 16 or by_python == (attempt == 0)
    finally:
        tuner.disable()
    assert len(fused) == 15
    assert all(is_aligned(tensor) for call in fused for tensor in call)
    assert all(mask.stride(-1) == 1 for *_, mask in fused)


# --- vendors' kernels that the selection launches ---------------------------------------------


def test_a_vendor_s_kernel_is_given_aligned_tensors(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies otherwise is copied, or left to PyTorch; T5's bias of two keys is not tried."""
    given: list[Any] = []
    asked: list[AttentionProblem] = []

    def vendor_call(problem: AttentionProblem, config: Any, scale: float) -> Any:
        asked.append(problem)

        def call(*inputs: Any) -> Any:
            given.extend(inputs)
            return torch.zeros_like(inputs[0])

        return call

    member = SimpleNamespace(
        name="vendor_sdpa", is_vendor=True, is_listed=False, vendor_call=vendor_call
    )
    monkeypatch.setattr(machine.runtime.plan, "family", lambda name: member)
    won = measured("vendor_sdpa", config=Config("vendor_sdpa", {"kernel": "cudnn"}))
    machine.answers = lambda problem: answer(won.but(problem=problem))
    for keys, length in ((2, 1), (24, 5)):
        q, k, v = tensors(length, keys, heads_kv=4)
        longer = torch.randn(1, 4, 40, 41).half()
        biases = [longer[:, :, 7 : 7 + length, 3 : 3 + keys], longer[:, :, :length, :keys]]
        biases.append(torch.randn(1, 4, length, keys).half())
        for bias, way in itertools.product(biases, WAYS.values()):
            out = machine.attention(way(q), k, way(v), bias)
            is_served = keys % 8 == 0 and bias is not biases[1]  # in place, rows off 16 bytes
            assert not out.any() if is_served else close(out, exact(q, k, v, bias))
    assert given and all(map(is_aligned, given))
    assert {problem.seqlen_kv for problem in asked} == {24}


# --- malformed calls ------------------------------------------------------------------------

MALFORMED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "keys of another D": lambda q, k, v: (q, k[..., :4], v),
    "fewer values": lambda q, k, v: (q, k, v[:, :, :7]),
    "another batch": lambda q, k, v: (q, torch.cat([k, k[:1]]), torch.cat([v, v[:1]])),
    "heads that do not divide": lambda q, k, v: (
        q,
        k[:, :3],
        v[:, :3],
        None,
        0.0,
        False,
        None,
        True,
    ),
    "heads of values": lambda q, k, v: (q, k, v[:, :3]),
    "a mask of other keys": lambda q, k, v: (q, k, v, torch.ones(16, 7) > 0),
    "a mask of other queries": lambda q, k, v: (q, k, v, torch.zeros(3, 20).half()),
    "a mask of other heads": lambda q, k, v: (q, k, v, torch.zeros(1, 3, 16, 20).half()),
    "a mask of five dimensions": lambda q, k, v: (q, k, v, torch.zeros(3, 1, 1, 16, 20).half()),
    "a mask on another device": lambda q, k, v: (
        q,
        k,
        v,
        torch.zeros(16, 20, device="meta").half(),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_do_not_fit(name: str) -> None:
    given = (*MALFORMED[name](*tensors(heads_kv=4)), None)[:4]
    assert not handed_over.fits(*given)


def test_what_fits() -> None:
    q, k, v = tensors(heads_kv=2)
    terms = torch.zeros(2, 4, 16, 20)
    for mask in (None, terms, terms[:1, :1], terms[..., :1], terms[0], terms[0, 0], terms[0, 0, 0]):
        assert handed_over.fits(q, k, v, mask)
    assert handed_over.fits(q, k[:, :1], v[:, :1], None)
    assert handed_over.fits(q, k, v[..., :4], None), "values of another D"
    assert handed_over.fits(q[0], k[0], v[0, :1], None), "no fused kernel takes three dimensions"


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_raise_each_time(
    tuned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As PyTorch's `math` does, and without a call of the choice that may hand them to cuDNN."""
    given = MALFORMED[name](*tensors(heads_kv=4))
    monkeypatch.setattr(native, "scaled_dot_product_attention", forbidden)
    for _ in range(3):
        with pytest.raises((RuntimeError, IndexError)):
            called(tuner.attention, given)


def called(attend: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """A call whose scale and grouped heads come by name, as PyTorch wants them."""
    return attend(*given[:6], **dict(zip(("scale", "enable_gqa"), given[6:], strict=False)))


def forbidden(*_: Any, **__: Any) -> Any:
    pytest.fail("a malformed call was handed over")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the kernel that is replaced
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("is_enabled", [False, True])
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_calls_raise_behind_the_dispatcher(
    server: Server,
    fused: list[tuple[Any, ...]],
    name: str,
    is_enabled: bool,
    requires_grad: bool,
) -> None:
    given = MALFORMED[name](*tensors(heads_kv=4))
    given[0].requires_grad_(requires_grad)
    if is_enabled:
        tuner.enable()
    try:
        for _ in range(3):
            with pytest.raises((RuntimeError, IndexError)):
                called(SDPA if is_enabled else server.attention, given)
    finally:
        tuner.disable()
    assert fused == []


# --- sizes of 0 -----------------------------------------------------------------------------


def test_empty_attention_of_another_device_is_not_its_choice_either(
    tuned: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's kernel of PyTorch 2.11 may end the process."""
    monkeypatch.setattr(tuned.devices, "TYPE", "cuda")
    monkeypatch.setattr(native, "scaled_dot_product_attention", forbidden)
    for shape in ((0, 2, 4, 8), (2, 0, 4, 8), (2, 2, 0, 8)):
        query = torch.randn(shape)
        for tensors in ((query,) * 3, (query.half().requires_grad_(),) * 3):
            assert tuner.attention(*tensors, enable_gqa=True).shape == shape


@pytest.mark.parametrize("is_enabled", [False, True])
def test_empty_attention_is_never_pytorch_s_choice(
    server: Server, monkeypatch: pytest.MonkeyPatch, is_enabled: bool
) -> None:
    """The choice makes no tensor of an empty batch where it falls on cuDNN."""
    for sizes in itertools.product((0, 2), (0, 3), (0, 4), (0, 5), (0, 8)):
        if all(sizes):
            continue
        batch, heads, length, keys, width = sizes
        q = torch.randn(batch, heads, length, width).half()
        k, v = (torch.randn(batch, heads, keys, width).half() for _ in range(2))
        monkeypatch.setattr(native, "scaled_dot_product_attention", forbidden)
        if is_enabled:
            tuner.enable()
        try:
            for is_grouped in (False, True):
                attend = SDPA if is_enabled else server.attention
                for _ in range(2):
                    out = attend(q, k, v, enable_gqa=is_grouped)
                    assert out.shape == q.shape and not out.any()
        finally:
            tuner.disable()
