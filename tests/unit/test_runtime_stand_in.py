"""Calls that were refused before, without the C++ dispatcher: counted, and PyTorch's at once. The
table is not asked, and nothing else changes: tensors off 16 bytes are copied, gradients flow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from runtime_machine import SDPA, Machine, fake_machine, misaligned

torch = pytest.importorskip("torch", reason="torch is not installed")

REASON = "no kernel takes such tensors"
LINEAR = torch.nn.functional.linear


machine = fake_machine


@pytest.fixture
def asked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kinds of calls that the table was asked for."""
    table, kinds = machine.runtime.table.table, []
    get = table.get

    def noted(kind: Any) -> Any:
        kinds.append(kind)
        return get(kind)

    monkeypatch.setattr(table, "get", noted)
    return kinds


def tensors(*, heads: int = 2, dtype: Any = torch.float32) -> list[Any]:
    return [torch.randn(1, heads, 16, 8, dtype=dtype) for _ in range(3)]


def is_held(asked: list[Any], call: Callable[[], Any], wanted: Any) -> bool:
    """True for a call that the table is not asked for; its output is compared."""
    asked.clear()
    torch.testing.assert_close(call(), wanted)
    return not asked


def test_refused_attention_is_not_looked_up_again(machine: Machine, asked: list[Any]) -> None:
    options: list[dict[str, Any]] = [{}, {"is_causal": True}, {"scale": 0.5}]
    for given in options:
        q, k, v = tensors()
        machine.attention(q, k, v, **given)
        other = tensors()
        call = partial(machine.attention, *other, **given)
        assert is_held(asked, call, SDPA(*other, **given))
    q, k, v = tensors(heads=4)[0], *tensors()[:2]
    machine.attention(q, k, v, enable_gqa=True)
    wanted = SDPA(q, k, v, enable_gqa=True)
    assert is_held(asked, lambda: machine.attention(q, k, v, enable_gqa=True), wanted)
    assert machine.stats().fallbacks == {REASON: 8}
    assert machine.runtime.counters.stats(reset=True).fallbacks == {REASON: 8}
    machine.attention(q, k, v, enable_gqa=True)
    assert machine.stats().fallbacks == {REASON: 1}


def test_refused_products_are_not_looked_up_again(machine: Machine, asked: list[Any]) -> None:
    import tuner

    x, w, bias = torch.randn(4, 16), torch.nn.Parameter(torch.randn(8, 16)), torch.randn(8)
    narrow = torch.randn(3, 16)
    relu = torch.nn.functional.relu
    with torch.no_grad():
        calls: list[tuple[Any, Any]] = [
            (lambda: tuner.linear(x, w), LINEAR(x, w)),
            (lambda: tuner.linear(x, w, bias), LINEAR(x, w, bias)),
            (lambda: tuner.linear(x, w, activation="relu"), relu(LINEAR(x, w))),
            (lambda: tuner.linear(x, narrow), LINEAR(x, narrow)),
            (lambda: tuner.matmul(x, w.t()), x @ w.t()),
        ]
        for call, wanted in calls:
            assert not is_held(asked, call, wanted)
            assert is_held(asked, call, wanted)
    assert machine.stats().fallbacks == {REASON: 10}
    out = torch.empty(4, 8)
    assert tuner.matmul(x, w.detach().t(), out=out) is out
    assert not is_held(asked, lambda: tuner.linear(x, w), LINEAR(x, w))  # wants a gradient
    assert tuner.linear(x, w).requires_grad


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one element further": misaligned,
    "another layout": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "another type": lambda t: t.double(),
    "a gradient": lambda t: t.clone().requires_grad_(),
    "another length": lambda t: torch.cat([t, t], 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_attention_is_looked_up(
    change: str, machine: Machine, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = tensors()
    machine.attention(q, k, v)
    module = machine.runtime.dispatch.stand_in.handed_over
    copied, copies = module.copied, []

    def noted(tensor: Any) -> Any:
        copies.append(tensor)
        return copied(tensor)

    monkeypatch.setattr(module, "copied", noted)
    changed = [CHANGES[change](t) for t in (q, k, v)]
    assert not is_held(asked, lambda: machine.attention(*changed), SDPA(*changed))
    if change == "one element further":
        machine.time_passes()
        for _ in range(3):
            machine.attention(*changed)
        assert len(copies) == 4 * 3, "a kind that is never aligned is copied at each call"


def test_other_states_are_looked_up(machine: Machine, asked: list[Any]) -> None:
    q, k, v = tensors()
    machine.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        machine.attention(q, k, v)
        assert asked[-1][6] is torch.bfloat16
        other = tensors(heads=3)
        machine.attention(*other)
    assert not is_held(asked, lambda: machine.attention(*other), SDPA(*other))
    mask = torch.ones(16, 16, dtype=torch.bool)
    assert not is_held(asked, lambda: machine.attention(q, k, v, mask), SDPA(q, k, v, mask))
    asked.clear()
    machine.attention(q, k, v, None, 0.5)
    assert machine.stats().fallbacks["dropout_p is not 0"] == 1


def test_a_decision_is_served_at_the_next_look(machine: Machine, asked: list[Any]) -> None:
    halves = tensors(dtype=torch.float16)
    for _ in range(2):
        machine.attention(*halves)
    assert is_held(asked, lambda: machine.attention(*halves), SDPA(*halves))
    machine.decide()
    assert not is_held(asked, lambda: machine.attention(*halves), SDPA(*halves))


def test_what_was_refused_before_a_look_is_not_held(machine: Machine) -> None:
    stand_in = machine.runtime.dispatch.stand_in
    reason = machine.runtime.refusal
    arguments = (*tensors(), None, 0.0, False, None, False)
    refusal = reason.Refusal(reason.Kind.MISS)
    before = stand_in.generation
    stand_in.hold_until(1e18)
    stand_in.refuse("attention", arguments, refusal, before)
    assert not stand_in._held
    stand_in.refuse("attention", arguments, refusal, stand_in.generation)
    assert len(stand_in._held) == 1
    for kind, until in ((reason.Kind.MISALIGNED, 1e19), (reason.Kind.CAPTURING, 0.0)):
        stand_in.forget()
        refusal = reason.Refusal(kind, until=until)
        stand_in.refuse("attention", arguments, refusal, stand_in.generation)
        assert not stand_in._held


def test_no_call_is_lost_between_threads(machine: Machine) -> None:
    q, k, v = tensors()
    machine.attention(q, k, v)

    def work() -> None:
        for _ in range(200):
            machine.attention(q, k, v)
            machine.stats()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.stats().fallbacks == {REASON: 801}


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR", "ignore:There is a perf"
)
def test_tensors_of_other_kinds_are_left_to_the_table(machine: Machine) -> None:
    """None of them ends the process or raises another error than PyTorch."""
    q, k, v = tensors()
    machine.attention(q, k, v)
    stand_in = machine.runtime.dispatch.stand_in
    options = (None, 0.0, False, None, False)
    others: list[Any] = [
        torch.nested.nested_tensor([q[0]]),
        q.to_sparse(),
        q[0, 0].to_sparse_csr(),
        [1.0],
        None,
    ]
    for other in others:
        assert stand_in.attention(other, k, v, *options) is None
        assert stand_in.attention(q, k, other, *options) is None
        assert stand_in.linear(q, other, None, None) is None
    assert stand_in.attention(q, k, v, None, 0.0, False, torch.ones(2), False) is None
    assert torch.func.vmap(lambda t: machine.attention(t, k, v))(torch.stack([q, q])).shape[0] == 2
