"""Calls that PyTorch answers: what the C++ dispatcher remembers of them, for how long, and what it
never does. Over CPU tensors (`runtime_server`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import Machine, answer, fake_machine
from runtime_machine import measured as tuned_measurement
from runtime_server import (
    PROBLEM,
    Server,
    built_dispatcher,
    by_kernel,
    dispatched_server,
    inputs,
)
from sdpa_backends import CUDNN, EFFICIENT, FLASH, sdpa_backends

import tuner
from tuner.problem import AttentionProblem, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")

built, server, machine = built_dispatcher, dispatched_server, fake_machine
backends = sdpa_backends

SDPA = torch.nn.functional.scaled_dot_product_attention
LINEAR = torch.nn.functional.linear


@pytest.fixture
def slow(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons that Python counted: of each call that the dispatcher did not refuse."""
    reasons: list[str] = []
    counters = server.runtime.counters
    count = counters.count_fallback

    def counted(reason: str) -> None:
        reasons.append(reason)
        count(reason)

    monkeypatch.setattr(counters, "count_fallback", counted)
    return reasons


Call = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
#: Calls of attention over the tensors of `PROBLEM`, which is tuned, and why they are refused.
REFUSED: dict[str, Call] = {
    "no measured winner": lambda q, k, v: ((q, k, v), {"is_causal": True}),
    "no kernel takes such tensors": lambda q, k, v: ((q.float(), k.float(), v.float()), {}),
    "attn_mask is given": lambda q, k, v: ((q, k, v, torch.ones(16, 16)), {}),
    "dropout_p is not 0": lambda q, k, v: ((q, k, torch.ones_like(v), None, 1e-30), {}),
    "scale is not positive": lambda q, k, v: ((q, k, v), {"scale": -0.5}),
    "a gradient is wanted": lambda q, k, v: ((q.clone().requires_grad_(), k, v), {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_call_is_refused_at_once(server: Server, slow: list[str], reason: str) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    assert by_kernel(server.attention(q, k, v), q, 16)
    arguments, options = REFUSED[reason](q, k, v)
    wanted = SDPA(*arguments, **options)
    for _ in range(4):
        out, by_python, launched = server.went(lambda: server.attention(*arguments, **options))
        assert not launched and torch.equal(out, wanted)
        assert out.requires_grad == wanted.requires_grad
    assert not by_python and len(slow) == 1 and slow[0].startswith(reason)
    stats = server.runtime.counters.stats(reset=True)
    assert (stats.hits, stats.fallbacks) == (1, {reason: 4})
    server.attention(*arguments, **options)
    assert server.runtime.counters.stats().fallbacks == {reason: 1}
    assert by_kernel(server.attention(q, k, v), q, 16), "the tuned call is served as before"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the kernel that is replaced
def test_a_refused_call_has_owners_of_its_own(server: Server) -> None:
    """Torch takes the GIL whenever a Python tensor's only owner gains or loses a second one."""
    owners: list[list[int]] = []

    def kernel(q: Any, k: Any, v: Any, *options: Any, **more: Any) -> Any:
        owners.append([tensor._use_count() for tensor in (q, k, v)])
        return torch.zeros_like(q), torch.zeros(q.shape[:3])

    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_flash_attention_for_cpu"
    try:
        library.impl(name, kernel, "CPU", allow_override=True)
        tensors = inputs()
        for _ in range(2):
            server.attention(*tensors)
        SDPA(*tensors)
    finally:
        library._destroy()
    _, refused, pytorchs = owners
    assert refused == pytorchs


def test_refused_products(server: Server, slow: list[str]) -> None:
    linear, matmul = server.runtime.products.linear, server.runtime.products.matmul
    server.decide(GemmProblem(m=8, n=16, k=32))
    a, w, bias = torch.randn(8, 32).half(), torch.randn(16, 32).half(), torch.randn(16).half()
    trained = w.clone().requires_grad_()
    with torch.no_grad():
        assert by_kernel(linear(a, trained), a, 8)
    calls = [
        (lambda: linear(a, w, bias, activation="relu"), LINEAR(a, w, bias).relu()),
        (lambda: matmul(a[:4], w.t()), a[:4] @ w.t()),
    ]
    for call, wanted in calls:
        for _ in range(3):
            out, by_python, launched = server.went(call)
            assert not launched and torch.equal(out, wanted)
        assert not by_python
    with torch.no_grad():
        out, by_python, launched = server.went(lambda: linear(a, trained))
    assert launched and not by_python, "it is known without the gradient"
    fallbacks = server.runtime.counters.stats().fallbacks
    assert fallbacks == {"no measured winner": 6} and len(slow) == 2
    for _ in range(2):
        out, _, launched = server.went(lambda: linear(a, trained))
        assert launched and by_kernel(out.detach(), a, 8) and out.requires_grad


def test_refused_products_with_gradients(server: Server, slow: list[str]) -> None:
    """Neither the product nor a gradient is tuned: the second call passes no Python."""
    linear = server.runtime.products.linear
    a, trained = torch.randn(8, 32).half(), torch.randn(16, 32).half().requires_grad_()
    for number in range(3):
        out, by_python, launched = server.went(lambda: linear(a, trained))
        assert torch.equal(out, LINEAR(a, trained)) and not launched
        assert by_python == (number == 0)
    assert server.runtime.counters.stats().fallbacks == {"no measured winner": 3}


def test_a_decision_is_taken_up_where_a_call_was_refused(server: Server, slow: list[str]) -> None:
    q, k, v = inputs()
    for _ in range(3):
        assert torch.equal(server.attention(q, k, v), SDPA(q, k, v))
    assert len(slow) == 1
    server.decide(PROBLEM)
    assert by_kernel(server.attention(q, k, v), q, 16)


def test_the_store_is_looked_at_while_calls_are_refused(server: Server, slow: list[str]) -> None:
    """Also where nothing is asked of it: the mask alone is reason enough."""
    q, k, v = inputs()
    mask = torch.ones(16, 16)
    for _ in range(2):
        server.attention(q, k, v, mask)
        server.time_passes()
        looked, _, _ = server.went(lambda: server.attention(q, k, v, mask))
        assert torch.equal(looked, SDPA(q, k, v, mask))
    assert len(slow) == 3, "one a look, and one before the first"
    server.attention(q, k, v, mask)
    assert len(slow) == 3


def test_what_is_worth_asking_again_is_asked_again(
    server: Server, slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is not here yet."""
    server.decide(PROBLEM)
    plan = server.runtime.plan
    monkeypatch.setattr(plan, "loaded", lambda key: None)
    monkeypatch.setattr(plan, "ArtifactCache", lambda: SimpleNamespace(find=lambda key: None))
    q, k, v = inputs()
    for _ in range(3):
        server.attention(q, k, v)
    assert len(slow) == 1
    monkeypatch.setattr(server.runtime.answers, "RETRY_EVERY_S", -1.0)
    server.runtime.table.table._clear()
    for _ in range(3):
        server.attention(q, k, v)
    assert len(slow) == 4, "its time is over when it is remembered"


def test_pytorch_s_own_kernel_stays_the_fastest(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the store says something else, however much time passes."""
    now = 1000.0
    monkeypatch.setattr(machine.runtime.table.time, "monotonic", lambda: now)
    plan, refusal = machine.runtime.plan, machine.runtime.refusal
    vendors = refusal.Refusal(refusal.Kind.VENDOR, "S=16")
    monkeypatch.setattr(plan, "resolve", lambda *_: vendors)
    monkeypatch.setattr(machine.runtime.answers, "resolve", plan.resolve)
    machine.decide(tuned_measurement())
    q = torch.randn(1, 2, 16, 8).half()
    machine.attention(q, q, q)
    now += 3600.0
    machine.attention(q, q, q)
    assert len(machine.problems) == 1
    machine.decide(tuned_measurement())
    machine.attention(q, q, q)
    assert len(machine.problems) == 2


def test_reasons_that_pass_are_not_remembered(
    server: Server, slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, table = server.runtime.devices, server.runtime.table.table
    refusal = server.runtime.refusal
    server.decide(PROBLEM)
    q, k, v = inputs()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda: True)
        for _ in range(2):
            server.attention(q, k, v)
    assert by_kernel(server.attention(q, k, v), q, 16)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    server.runtime.dispatch.clear()
    with monkeypatch.context() as patch:
        patch.setattr(server.runtime.plan.KernelPlan, "_enqueue", full)
        for _ in range(2):
            server.attention(q, k, v)
    assert by_kernel(server.attention(q, k, v), q, 16)
    table._fault = refusal.once(refusal.Kind.STORE, "it is locked")
    other = inputs(AttentionProblem.parse("S=32,D=8,H=2"))
    for _ in range(2):
        server.attention(*other)
    table._fault = None
    server.attention(*other)
    assert [reason.partition(":")[0] for reason in slow] == [
        *["a kernel cannot be loaded inside a graph capture"] * 2,
        *["out of memory"] * 2,
        *["the store cannot be read"] * 2,
        "no measured winner",
    ]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # make_dual calls it
def test_an_open_level_of_forward_mode_is_not_remembered(server: Server, slow: list[str]) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level():
        for _ in range(2):
            server.attention(q, k, v)
    assert slow == ["forward-mode differentiation is active: tuned kernels compute no tangents"] * 2
    assert by_kernel(server.attention(q, k, v), q, 16)


def test_what_another_thread_is_asking_is_not_remembered(machine: Machine) -> None:
    """What was known a moment ago is good enough for one call."""
    table = machine.runtime.table.table
    q = torch.randn(1, 2, 16, 8).half()
    machine.attention(q, q, q)
    (known,) = table._known.values()
    assert known.plan.until > 0 and known.passing.until == 0
    assert known.passing.reason == known.plan.reason


def test_what_was_found_before_the_tables_were_cleared_is_not_kept(
    server: Server, slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision comes between the look-up that missed it and the refusal."""
    module = importlib.import_module("tuner.runtime.call.serving")
    find, (q, k, v) = module._find, inputs()

    def late(*arguments: Any) -> Any:
        found = find(*arguments)
        monkeypatch.setattr(module, "_find", find)
        server.decide(PROBLEM)
        server.runtime.table.table._look()
        return found

    monkeypatch.setattr(module, "_find", late)
    server.attention(q, k, v)
    assert by_kernel(server.attention(q, k, v), q, 16) and len(slow) == 1


def test_switched_off_costs_nothing(
    server: Server, slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.decide(PROBLEM)
    q, k, v = inputs()
    server.attention(q, k, v)
    monkeypatch.setenv("TUNER_DISABLE", "1")
    server.time_passes()
    for _ in range(5):
        _, by_python, launched = server.went(lambda: server.attention(q, k, v))
        assert not launched
    assert not by_python and len(slow) == 1
    assert server.runtime.counters.stats().fallbacks == {"switched off": 5}
    monkeypatch.setenv("TUNER_DISABLE", "0")
    server.time_passes()
    assert by_kernel(server.attention(q, k, v), q, 16)


def test_ever_new_shapes_stay_few(server: Server) -> None:
    q, k, v = inputs()
    server.attention(q, k, v)
    module = server.runtime.dispatch._module
    arguments = q, k, v, None, 0.0, False
    for i in range(5000):
        module.refuse(0, (*arguments, 1.0 + i, False), 0, 1e12, 0, 0, module.generation())
    refused = [module.attention(*arguments, 1.0 + i, False) is not None for i in range(5000)]
    assert refused[-1] and not refused[0] and sum(refused) <= 4096


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_behind_pytorch_s_attention(
    server: Server, slow: list[str], backends: list[str], name: str, mask: bool
) -> None:
    q, k, v = inputs()
    options: list[Any] = [torch.ones(16, 16) if mask else None]
    wants_lse = [True] if name == CUDNN else [False]
    if name == FLASH:
        if mask:
            return  # it takes none
        options, wants_lse = [], []
    operator = getattr(torch.ops.aten, name)
    with tuner.enabled():
        for _ in range(3):
            operator(q, k, v, *options, *wants_lse)
    assert backends == [name] * 3 and len(slow) == 1
    reason = "attn_mask is given" if mask else "no measured winner"
    assert server.runtime.counters.stats().fallbacks == {reason: 3}


def test_a_generation_s_lengths_are_not_looked_up_one_by_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = torch.randn(1, 2, 1, 8).half()
    keys = torch.randn(1, 2, 400, 8).half()
    for length in range(1, 321):
        given = keys[:, :, :length].contiguous()
        machine.attention(query, given, given)
    answers = machine.runtime.answers
    assert len(machine.problems) <= 2 + 320 // answers.GROWS_BY
    assert machine.stats().fallbacks == {"no measured winner": 320}
    # What is decided for one of them is found ...
    machine.decide()
    decided = AttentionProblem(1, 40, 8, 1, 2)
    only = answer(tuned_measurement(problem=decided))
    machine.answers = lambda problem: only if problem == decided else None
    monkeypatch.setattr(answers, "is_decided", lambda problem, path: problem == decided)
    for length in (39, 40, 41):
        given = keys[:, :, :length].contiguous()
        machine.attention(query, given, given)
    assert machine.stats().hits == 1
    # ... and another kind of cache, mask or device is another question.
    near = answers.neighbourhood
    same = {near(AttentionProblem(1, n, 8, 1, 2), 0) for n in (64, 100, 127)}
    others = {
        near(AttentionProblem(1, 128, 8, 1, 2), 0),
        near(AttentionProblem(1, 100, 8, 1, 2), 1),
        near(AttentionProblem(2, 100, 8, 1, 2), 0),
        near(AttentionProblem(1, 100, 8, 1, 2, dtype="bfloat16"), 0),
    }
    assert len(same) == 1 and len(others) == 4 and not same & others
    assert near(AttentionProblem(64, 64, 8, 1, 2), 0) is None
    assert near(GemmProblem(8, 8, 8), 0) is None


def test_what_is_decided(server: Server) -> None:
    is_decided = importlib.import_module("tuner.selection.reader").is_decided
    ships, near = (AttentionProblem.parse(f"S={length},D=64") for length in (1024, 1025))
    assert is_decided(ships) and not is_decided(near)
    server.decide(near)
    assert is_decided(near) and not is_decided(PROBLEM)
