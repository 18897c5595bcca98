"""The way of a call, the same for every call object; kinds and details of refusals."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config
from tuner.errors import ConfigError

torch = pytest.importorskip("torch", reason="torch is not installed")

import tuner  # noqa: E402
from tuner.runtime.call.counters import kind_of  # noqa: E402
from tuner.runtime.call.refusal import Kind, Refusal, once  # noqa: E402


def half(*shape: int) -> Any:
    return torch.randn(shape).half()


def e4m3(*shape: int) -> Any:
    return torch.randn(shape).to(torch.float8_e4m3fn)


Q, A, W, MASK = half(1, 2, 16, 16), half(8, 32), half(64, 32), half(16, 16)
PACKED, STARTS = half(32, 2, 16), torch.tensor([0, 16, 32], dtype=torch.int32)
FACTORS = dict.fromkeys(("descale_q", "descale_k", "descale_v"), torch.ones(1, 2))
ONE = torch.ones(1)
#: A call of each public function, and the tensors that a kernel gets.
CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    "attention": (lambda: tuner.attention(Q, Q, Q), 3),
    "attention with a bias": (lambda: tuner.attention(Q, Q, Q, MASK), 4),
    "attention with a window": (lambda: tuner.attention(Q, Q, Q, window=4), 3),
    "e4m3 attention": (lambda: tuner.attention(*[e4m3(1, 2, 16, 16)] * 3, **FACTORS), 6),
    "packed attention": (
        lambda: tuner.attention_varlen(PACKED, PACKED, PACKED, STARTS, STARTS, 16, 16),
        5,
    ),
    "linear": (lambda: tuner.linear(A, W), 2),
    "linear with a bias": (lambda: tuner.linear(A, W, half(64)), 3),
    "matmul": (lambda: tuner.matmul(A, W.t()), 2),
    "scaled_mm": (
        lambda: tuner.scaled_mm(e4m3(16, 32), e4m3(16, 32).t(), ONE, ONE, out_dtype=torch.bfloat16),
        4,
    ),
    "swiglu": (lambda: tuner.swiglu(A, W), 2),
    "grouped_mm": (
        lambda: tuner.grouped_mm(A, half(2, 64, 32), torch.tensor([0, 4, 8], dtype=torch.int32)),
        3,
    ),
}


@pytest.fixture
def planned(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A plan for every call, which notes its inputs and gives zeros of the problem's output."""

    @dataclasses.dataclass(frozen=True, eq=False)
    class Noted(on_cpu.plan.Plan):  # type: ignore[name-defined,misc]
        def _enqueue(self, inputs: Any, lse: Any) -> Any:
            made.inputs.append(inputs)
            return torch.zeros(self.problem.output.shape)

    def find_out(kind: Any, told: Any, pose: Any, device: int, pose_over: Any) -> Any:
        made.kinds.append(kind)
        try:
            return Noted(pose().problem, Config("noted", {}), -1)
        except ConfigError as exc:
            return Refusal(Kind.TENSORS, str(exc))

    made = SimpleNamespace(**vars(on_cpu), inputs=[], kinds=[])
    monkeypatch.setattr(on_cpu.table.table, "get", lambda kind: None)
    monkeypatch.setattr(on_cpu.table.table, "find_out", find_out)
    return made


@pytest.mark.parametrize("name", CALLS)
def test_every_call_goes_the_same_way(planned: SimpleNamespace, name: str) -> None:
    """A kernel gets the tensors of the call, and the same call has the same key."""
    call, count = CALLS[name]
    call()
    call()
    assert [len(inputs) for inputs in planned.inputs] == [count, count]
    assert hash(planned.kinds[0]) == hash(planned.kinds[1])
    assert planned.kinds[0] == planned.kinds[1]
    assert planned.counters.stats().hits == 2


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_looked_up_under_a_key_of_its_own(
    planned: SimpleNamespace, name: str
) -> None:
    for other, (call, _) in CALLS.items():
        if other != name:
            call()
    others = set(planned.kinds)
    CALLS[name][0]()
    assert planned.kinds[-1] not in others


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_counted_where_nothing_serves_it(
    on_cpu: SimpleNamespace, undecided: list[Any], name: str
) -> None:
    CALLS[name][0]()
    assert on_cpu.counters.stats().fallbacks == {Kind.MISS: 1}


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_watched_by_the_guards(planned: SimpleNamespace, name: str) -> None:
    """Under a dispatch mode of torch no kernel sees the tensors."""
    mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

    class Passes(mode):  # type: ignore[misc,valid-type]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Passes():
        CALLS[name][0]()
    assert planned.inputs == []
    assert planned.counters.stats().fallbacks == {Kind.TRANSFORM: 1}


def test_a_refusal_is_a_kind_and_a_detail() -> None:
    assert Refusal(Kind.MISS, "S=16").reason == "no measured winner: S=16"
    assert Refusal(Kind.DROPOUT).reason == "dropout_p is not 0"
    assert (once(Kind.MASK).until, Refusal(Kind.MASK).until) == (0.0, float("inf"))


def test_statistics_know_the_kinds() -> None:
    """Counts go by the text before a colon: a kind has none."""
    for kind in Kind:
        assert kind_of(Refusal(kind, "a: b").reason) == kind
    assert len({str(kind) for kind in Kind}) == len(Kind)
