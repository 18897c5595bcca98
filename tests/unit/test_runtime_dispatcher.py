"""The C++ dispatcher over CPU tensors (`runtime_server`): what it answers, and what is Python's."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_server import (
    PROBLEM,
    Server,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    inputs,
    measured,
)

import tuner
from benchmarks import dispatch_calls as calls
from tuner.compile import dispatcher
from tuner.hardware import DEFAULT_GPU
from tuner.problem import AttentionProblem, GemmProblem
from tuner.store import open_store

torch = pytest.importorskip("torch", reason="torch is not installed")

built, server = built_dispatcher, dispatched_server

SDPA = torch.nn.functional.scaled_dot_product_attention
MATH = torch.nn.attention.SDPBackend.MATH


def test_what_is_known_is_answered_without_python(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    out, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert by_python and launched and by_kernel(out, q, 16), "the first call makes the plan"
    for options in ({}, {"is_causal": False, "scale": None}):
        q.normal_()
        out, by_python, launched = server.went(
            lambda options=options: server.attention(q, k, v, **options)
        )
        assert launched and not by_python
        assert by_kernel(out, q, 16)
        assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
        assert not out.requires_grad
    stats = server.runtime.counters.stats(reset=True)
    assert (stats.hits, stats.portfolio_hits, stats.fallbacks) == (3, 0, {})
    assert server.runtime.counters.stats().hits == 0


def test_what_a_portfolio_selected_is_counted_apart(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = server.runtime.plan.own_plan
    selected = partial(replace, by_portfolio=True)
    monkeypatch.setattr(server.runtime.plan, "own_plan", lambda *given: selected(own(*given)))
    server.decide(PROBLEM)
    q, k, v = inputs()
    by_python = [server.went(lambda: server.attention(q, k, v))[1] for _ in range(3)]
    assert by_python == [True, False, False]
    stats = server.runtime.counters.stats(reset=True)
    assert (stats.hits, stats.portfolio_hits) == (3, 3)
    assert server.runtime.counters.stats().portfolio_hits == 0


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_are_told_apart(server: Server, layout: str) -> None:
    problem = AttentionProblem.parse(f"S=16,D=8,H=2,layout={layout}")
    server.decide(problem)
    q, k, v = inputs(problem)
    for _ in range(2):
        out, by_python, launched = server.went(lambda: server.attention(q, k, v))
        assert launched and out.stride() == problem.output.strides
    assert not by_python
    others = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    if layout == "bshd":
        others = [t.contiguous() for t in (q, k, v)]
    out, _, launched = server.went(lambda: server.attention(*others))
    assert not launched and torch.equal(out, SDPA(*others))


CHANGES: dict[str, Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "a mask": lambda q, k, v: ((q, k, v, torch.ones(16, 16).half()), {}),
    "causal": lambda q, k, v: ((q, k, v), {"is_causal": True}),
    "a gradient": lambda q, k, v: ((q.clone().requires_grad_(), k, v), {}),
    "a longer key": lambda q, k, v: ((q, torch.cat([k, k], 2), torch.cat([v, v], 2)), {}),
    "another type": lambda q, k, v: ((q.float(), k.float(), v.float()), {}),
    "rows apart": lambda q, k, v: ((torch.cat([q, q], 3)[..., :8], k, v), {}),
    "3-D": lambda q, k, v: ((q[0], k[0], v[0]), {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_plan_is_not_for_is_python_s(server: Server, change: str) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    arguments, options = CHANGES[change](q, k, v)
    for _ in range(2):
        out, _, launched = server.went(lambda: server.attention(*arguments, **options))
        assert not launched
        assert torch.equal(out, SDPA(*arguments, **options))


def test_dropout_and_other_scales_are_python_s(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    _, _, launched = server.went(lambda: server.attention(q, k, v, dropout_p=0.5))
    assert not launched
    for scale, served_by_python in ((0.5, True), (0.5, False), (1, True), (1, True)):
        _, by_python, launched = server.went(
            lambda scale=scale: server.attention(q, k, v, scale=scale)
        )
        assert launched and by_python is served_by_python


def test_autocast_to_the_tensors_type_is_served(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    with torch.autocast("cpu", torch.float16):
        out, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert launched and not by_python and out.dtype == torch.float16
    with torch.autocast("cpu", torch.bfloat16):
        out, _, launched = server.went(lambda: server.attention(q, k, v))
    assert not launched and out.dtype == torch.bfloat16


def test_modes_of_autograd_are_served(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = (torch.nn.Parameter(t) for t in inputs())
    with torch.no_grad():
        server.attention(q, k, v)
        out, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert launched and not by_python and not out.requires_grad
    with torch.inference_mode():
        out, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert launched and not by_python and out.is_inference()


class Subclass(torch.Tensor):
    """A tensor with a mind of its own."""


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_subclasses_and_transforms_are_python_s(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    _, _, launched = server.went(lambda: server.attention(q.as_subclass(Subclass), k, v))
    assert not launched
    stacked = torch.stack([q, q])
    mapped = torch.vmap(server.attention, in_dims=(0, None, None))
    out, _, launched = server.went(lambda: mapped(stacked, k, v))
    assert not launched and out.shape == (2, *q.shape)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # make_dual calls it
@pytest.mark.parametrize("is_view", [False, True])
def test_tangents_are_pytorch_s(server: Server, is_view: bool) -> None:
    forward_ad = torch.autograd.forward_ad
    layers = importlib.import_module("tuner.runtime.layers")
    server.decide(PROBLEM, GemmProblem(m=8, n=16, k=32))
    layer = layers.TunedLinear(32, 16, bias=False, dtype=torch.float16)
    q, k, v = inputs()
    a = torch.randn(8, 32).half()
    with torch.no_grad():
        for _ in range(2):
            _, by_python, launched = server.went(lambda: (server.attention(q, k, v), layer(a)))
        assert launched and not by_python, "the dispatcher knows both"
    layer.requires_grad_(False)
    with forward_ad.dual_level(), torch.nn.attention.sdpa_kernel(MATH):
        for call, pytorchs, first in (
            (lambda q: server.attention(q, k, v), lambda q: SDPA(q, k, v), q),
            (layer, lambda a: torch.nn.functional.linear(a, layer.weight), a),
        ):
            dual = forward_ad.make_dual(first, torch.randn_like(first))
            given = dual.view(first.shape) if is_view else dual
            out, _, launched = server.went(lambda call=call, given=given: call(given))
            found, wanted = map(forward_ad.unpack_dual, (out, pytorchs(given)))
            assert not launched
            assert torch.equal(found.primal, wanted.primal)
            assert torch.equal(found.tangent, wanted.tangent) and found.tangent.any()
    _, by_python, launched = server.went(lambda: (server.attention(q, k, v), layer(a)))
    assert launched and not by_python, "the level is closed"


def test_a_library_is_hashed_once_for_many_shapes(
    server: Server, built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation poses a new length with every token."""
    server.decide(PROBLEM, OTHER := AttentionProblem.parse("S=32,D=8,H=2"))
    server.attention(*inputs())
    monkeypatch.setattr(built.cache, "find", lambda key: pytest.fail("hashed again"))
    out, _, launched = server.went(lambda: server.attention(*inputs(OTHER)))
    assert launched and out.shape == OTHER.output.shape


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # for the threads of other tests
def test_a_forked_child_waits_for_no_thread_of_its_parent(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = runtime.dispatch
    monkeypatch.setattr(dispatch, "_thread", threading.current_thread())
    with dispatch._lock:
        child = os.fork()
        if child == 0:
            free = dispatch._lock.acquire(timeout=5)
            os._exit(0 if free and dispatch._thread is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_products(server: Server) -> None:
    linear, matmul = server.runtime.products.linear, server.runtime.products.matmul
    layouts = [("row", "col"), ("row", "row"), ("col", "col")]
    problems = [GemmProblem(m=8, n=16, k=32, layout_a=a, layout_b=b) for a, b in layouts]
    batched = GemmProblem(m=8, n=16, k=32, batch=3, layout_b="row")
    server.decide(*problems, batched)
    a, b = (t[0] for t in inputs(problems[0]))
    for call in (
        lambda: linear(a, b.t()),
        lambda: linear(a.view(2, 4, 32), b.t()),
        lambda: matmul(a, b),
        lambda: matmul(a, b.contiguous()),
        lambda: matmul(a.t().contiguous().t(), b),
        lambda: matmul(a.view(2, 4, 32), b),
    ):
        for by_python_wanted in (True, False):
            out, by_python, launched = server.went(call)
            assert launched and by_python is by_python_wanted
            assert by_kernel(out, a, 8) and out.is_contiguous()
            assert out.shape[-1] == 16 and out.numel() == 8 * 16
    biased = GemmProblem(m=8, n=16, k=32, epilogue="bias")
    server.decide(biased, replace(biased, epilogue="gelu"), replace(biased, epilogue="bias_silu"))
    bias = torch.zeros(16).half()
    for given, activation in ((bias, None), (None, "gelu"), (bias, "silu")):
        for by_python_wanted in (True, False):
            out, by_python, launched = server.went(
                lambda given=given, activation=activation: linear(
                    a, b.t(), given, activation=activation
                )
            )
            assert launched and by_python is by_python_wanted and by_kernel(out, a, 8)
    for given, activation in ((bias, "gelu"), (bias[::1].expand(1, 16), None), (None, "relu")):
        fallback = server.runtime.products._PYTORCHS[activation]
        out, _, launched = server.went(
            lambda given=given, activation=activation: linear(
                a, b.t(), given, activation=activation
            )
        )
        wanted = fallback(torch.nn.functional.linear(a, b.t(), given))
        assert not launched and torch.equal(out, wanted)
    left, right = inputs(batched)
    out, _, launched = server.went(lambda: matmul(left, right))
    assert launched and out.shape == (3, 8, 16)
    out, _, launched = server.went(lambda: matmul(left, right[:1]))
    assert not launched and torch.equal(out, torch.matmul(left, right[:1]))


def test_what_a_call_costs_is_measured_through_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scripts/bench dispatch`, the preset `calls`, but for the GPU."""
    monkeypatch.setattr(calls, "PROBLEM", PROBLEM)
    monkeypatch.setattr(calls, "inputs", inputs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    replay = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: replay)
    server.decide(PROBLEM)
    module, rounds, burst = server.runtime.dispatch._module, 3, 40
    rows, fallbacks = {}, {}
    for case in calls.CASES:
        server.runtime.counters.stats(reset=True)
        fewer = replace(case, rounds=rounds, calls=burst)
        rows[case.label] = calls.measure(fewer, Namespace())
        fallbacks[case.label] = server.runtime.counters.stats().fallbacks
        assert min(rows[case.label]["us"].values()) > 0
    figures = {label: row["figures"] for label, row in rows.items()}
    assert {"tuner", "pytorch", "bare"} <= set(rows["served"]["us"])
    assert 0.5 < rows["served"]["dispatched"] <= 1
    assert abs(figures["refused"]["us beyond pytorch"]) < rows["refused"]["us"]["tuner"]
    assert 0 < figures["enabled, served"]["over pytorch"] < 1 < rows["growing cache"]["us"]["tuner"]
    assert rows["growing cache"]["dispatched"] > 0.98, "Python is asked once a block of lengths"
    by_python = [row for label, row in rows.items() if "by Python" in label]
    assert [row["dispatched"] for row in by_python] == [0, 0, 0]
    assert {"over pytorch", "over graph"} <= set(figures["eager loop"])
    asked = 2 * rounds * (burst + 1)
    unfit = "no kernel takes such tensors"
    assert fallbacks["a product, by Python"] == {unfit: asked}
    assert fallbacks["refused"] == {unfit: asked + 1}  # one sees that it is refused
    assert fallbacks["enabled, refused"] == {unfit: asked}
    assert fallbacks["growing cache"] == {"no measured winner": asked}
    assert server.runtime.dispatch._module is module
    q, k, v = inputs()
    server.decide(PROBLEM)
    assert by_kernel(server.attention(q, k, v), q, 16)


def test_a_new_decision_is_taken_up(server: Server) -> None:
    q, k, v = inputs()
    assert torch.equal(server.attention(q, k, v), SDPA(q, k, v))
    server.decide(PROBLEM)
    for _ in range(2):
        _, by_python, launched = server.went(lambda: server.attention(q, k, v))
        assert launched
    assert not by_python
    server.decide(AttentionProblem.parse("S=32,D=8,H=2"))
    _, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert launched and by_python, "everything is asked for anew"
    _, by_python, _ = server.went(lambda: server.attention(q, k, v))
    assert not by_python


def test_a_deleted_and_a_corrupt_store(server: Server, tmp_path: Path) -> None:
    from tuner import settings

    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    for file in settings.store_path().parent.glob("store.sqlite*"):
        file.unlink()
    server.time_passes()
    out, _, launched = server.went(lambda: server.attention(q, k, v))
    assert not launched and torch.equal(out, SDPA(q, k, v)), "the decision went with the store"
    settings.store_path().write_bytes(b"no database" * 1000)
    server.time_passes()
    assert torch.equal(server.attention(q, k, v), SDPA(q, k, v))
    assert server.runtime.counters.stats().errors == {"the store cannot be read": 1}


def test_a_refused_launch_withdraws_the_kernel(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    server.code.value = 701
    out, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert launched and by_python and torch.equal(out, SDPA(q, k, v))
    server.code.value = 0
    for _ in range(3):
        out, _, launched = server.went(lambda: server.attention(q, k, v))
        assert not launched and torch.equal(out, SDPA(q, k, v))
    assert server.runtime.counters.stats().errors == {"a launch was refused": 1}


def test_an_asynchronous_error_is_not_hidden(server: Server) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    server.code.value = 700
    with pytest.raises(RuntimeError, match="or of an earlier kernel"):
        server.attention(q, k, v)


def test_switched_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    monkeypatch.setenv("TUNER_DISABLE", "1")
    server.time_passes()
    for _ in range(2):
        _, _, launched = server.went(lambda: server.attention(q, k, v))
        assert not launched
    monkeypatch.setenv("TUNER_DISABLE", "0")
    server.time_passes()
    for _ in range(2):
        _, by_python, launched = server.went(lambda: server.attention(q, k, v))
        assert launched
    assert not by_python


@pytest.mark.parametrize("why", ["TUNER_DISABLE", "a refusal"])
def test_switched_off_by_another_thread_while_a_plan_is_made(
    server: Server, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Between `get`, which still saw it on, and `find_out`."""
    server.decide(PROBLEM)
    table, dispatch = server.runtime.table.table, server.runtime.dispatch
    refusal, (q, k, v) = server.runtime.refusal, inputs()

    def switch_off() -> None:
        if why == "a refusal":
            table.pin(None, refusal=refusal.Refusal(refusal.Kind.RANKS))
        else:
            monkeypatch.setenv("TUNER_DISABLE", "1")
            server.time_passes()
        table._look()

    def get(kind: Any) -> Any:
        found = server.get(kind)
        monkeypatch.setattr(table, "get", server.get)
        thread = threading.Thread(target=switch_off)
        thread.start()
        thread.join()
        return found

    monkeypatch.setattr(table, "get", get)
    for _ in range(3):
        for _ in range(2):
            out, _, launched = server.went(lambda: server.attention(q, k, v))
            assert not launched and torch.equal(out, SDPA(q, k, v))
        server.time_passes()
    monkeypatch.setenv("TUNER_DISABLE", "0")
    table.pin(None)
    plan = server.runtime.attention_call.find_plan(q, k, v, False, None, False)
    switch_off()
    dispatch.put("attention", (q, k, v, None, 0.0, False, None, False), plan)
    _, by_python, launched = server.went(lambda: server.attention(q, k, v))
    assert by_python and not launched, "whatever the dispatcher was given, it answers nothing"


MASKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "booleans": ("mask=1", lambda: torch.ones(16, 16).tril() > 0),
    "an additive mask": ("bias=1", lambda: torch.ones(16, 16).tril().log().half()),
    "key padding": ("mask=bk", lambda: torch.rand(1, 1, 1, 16) > 0.5),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_masked_call_is_answered_without_python(server: Server, kind: str) -> None:
    text, make = MASKS[kind]
    problem = AttentionProblem.parse(f"S=16,D=8,H=2,{text}")
    server.decide(problem)
    q, k, v = inputs(PROBLEM)
    went = [server.went(lambda: server.attention(q, k, v, make())) for _ in range(3)]
    assert [(by_python, launched) for _, by_python, launched in went] == [
        (True, True),
        (False, True),
        (False, True),
    ]
    assert all(by_kernel(out, q, 16) for out, *_ in went)
    for other in (None, torch.zeros(16, 16)):
        out, _, launched = server.went(lambda other=other: server.attention(q, k, v, other))
        assert not launched, "another kind of call"
        assert torch.equal(out, SDPA(q, k, v, other))


def test_a_plan_under_a_mask_serves_no_other_kind_of_mask(server: Server) -> None:
    """Masks of other strides, type or size, and masks that need a gradient."""
    server.decide(AttentionProblem.parse("S=16,D=8,H=2,bias=1"))
    q, k, v = inputs(PROBLEM)
    usual = torch.randn(16, 16).half()
    for _ in range(2):
        server.attention(q, k, v, usual)
    assert server.went(lambda: server.attention(q, k, v, usual))[1:] == (False, True)
    for name, other in {
        "transposed": usual.t(),
        "of a row": usual[:1],
        "of keys": usual[:, :1],
        "booleans": usual > 0,
        "with a gradient": usual.clone().requires_grad_(),
    }.items():
        for _ in range(2):
            out, _, launched = server.went(lambda other=other: server.attention(q, k, v, other))
            assert not launched, name
            assert torch.equal(out, SDPA(q, k, v, other)), name
    assert server.went(lambda: server.attention(q, k, v, usual))[1:] == (False, True)


def test_a_static_cache_under_its_mask_stays_in_the_dispatcher(server: Server) -> None:
    """A token a step: the mask has another tensor and other elements each time."""
    problem = AttentionProblem.parse("B=2,H=2,SQ=1,SKV=64,D=8,mask=bk")
    server.decide(problem)
    q, k, v, _ = inputs(problem)
    asked = []
    for step in range(8):
        mask = torch.arange(64) <= 8 + step
        q.normal_()
        out, by_python, launched = server.went(
            lambda mask=mask: server.attention(q, k, v, mask.expand(2, 1, 1, 64).clone())
        )
        assert launched and by_kernel(out, q, 1 + 63)
        asked.append(by_python)
    assert asked == [True] + 7 * [False]


@pytest.mark.parametrize("shape", ["SQ=16,SKV=40", "S=16"])
def test_values_may_be_narrower_than_keys(server: Server, shape: str) -> None:
    """Their keys grow too, and the output has their width."""
    problem = AttentionProblem.parse(f"B=2,H=2,{shape},D=16,DV=8")
    server.decide(problem)
    q, k, v = inputs(problem)
    asked = []
    with tuner.enabled():
        for attend in (server.attention, server.attention, SDPA, SDPA):
            q.normal_()
            out, by_python, launched = server.went(lambda attend=attend: attend(q, k, v))
            assert launched and by_kernel(out, q, problem.seqlen_kv)
            assert out.shape == (2, 2, 16, 8)
            asked.append(by_python)
    assert asked == [True, False, False, False]


@pytest.mark.parametrize("path", ["python", "dispatcher"])
def test_a_thread_has_a_context_before_its_first_launch(server: Server, path: str) -> None:
    """Its output may come from the allocator's cache: nothing else has touched CUDA by then."""
    server.decide(PROBLEM)
    tensors = inputs()
    if path == "python":
        server.runtime.dispatch.use(None)
    server.attention(*tensors)  # threads then find the plan known
    server.unbound.value = 0
    went: list[tuple[Any, bool, bool]] = []
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: went.extend(
                server.went(lambda: server.attention(*tensors)) for _ in range(2)
            )
        )
        thread.start()
        thread.join()
    assert [(by_python, ran) for _, by_python, ran in went] == [(path == "python", True)] * 6
    assert all(by_kernel(out, tensors[0], 16) for out, _, _ in went)
    assert server.unbound.value == 0, "launches of threads that had no context"


@pytest.fixture
def one_thread_an_operator() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread_an_operator")
def test_threads_over_many_shapes_with_a_writer_beside_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, long_mode: bool
) -> None:
    """8 threads, 2,000 calls each (20,000 under ``--long``), over 200 shapes; the store changes
    all the time.
    """
    calls = 20_000 if long_mode else 2_000
    monkeypatch.setattr(server.runtime.table, "LOOK_EVERY_S", 0.1)
    shapes = [
        AttentionProblem.parse(f"S={rows},D=8,H={heads}")
        for rows in range(1, 26)
        for heads in range(1, 9)
    ]
    untuned = set(range(0, 200, 10))
    tuned = [which for which in range(200) if which not in untuned]
    server.decide(*(shapes[which] for which in tuned))
    wrong: list[str] = []
    done = threading.Event()

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randint(0, 200, (calls,), generator=generator).tolist()
        queries = [
            torch.full(shape.output.shape, float(seed), dtype=torch.float16) for shape in shapes
        ]
        for which in order:
            q = queries[which]
            out = server.attention(q, q, q)
            # Attention over equal values is the value; the kernel adds the count of rows.
            wanted = seed + (0 if which in untuned else q.shape[2])
            if out[0, 0, 0, 0].item() != wanted or out[0, -1, -1, -1].item() != wanted:
                wrong.append(f"{tuple(q.shape)}: {out}, not {wanted}")

    def write() -> None:
        step = 0
        while not done.wait(0.02):
            step += 1
            made = measured(shapes[tuned[step % len(tuned)]], 10.0 + step)
            with open_store() as store:
                store.decide(made.problem, DEFAULT_GPU, made.regime, [made], "test")

    writer = threading.Thread(target=write)
    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(8)]
    for thread in (writer, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    writer.join()
    assert not wrong, wrong[:3]
    stats = server.runtime.counters.stats()
    assert stats.calls == 8 * calls and stats.errors == {}
    assert set(stats.fallbacks) == {"no measured winner"}
    tenth = 8 * calls / 10
    assert 0.8 * tenth < sum(stats.fallbacks.values()) < 1.2 * tenth, "of the shapes is not tuned"


def test_it_is_built_once_for_a_torch_and_a_python(
    built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dispatcher.find(built.dispatchers) == built.dispatcher
    assert dispatcher.build(built.dispatchers) == built.dispatcher
    monkeypatch.setattr(dispatcher, "version_of", lambda name: "0.0")
    assert dispatcher.find(built.dispatchers) is None


def test_what_cannot_be_built_leaves_python_s_path(
    on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    caplog.set_level("INFO", "tuner.runtime")
    monkeypatch.setattr(on_cpu.dispatch, "_waiting", [lambda: pytest.fail("nothing was loaded")])
    on_cpu.dispatch._prepare()
    assert "calls go through Python" in caplog.text and "no-such-compiler" in caplog.text
    assert on_cpu.dispatch.attention(*inputs(), None, 0.0, False, None, False) is None
