"""The runtime's decisions, with fake kernels over CPU tensors: what is launched and what never."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_machine import (
    PROBLEM,
    SDPA,
    Machine,
    ToyWithBias,
    ToyWithLse,
    fake_machine,
    inputs,
    measured,
    misaligned,
    same,
    toy_won,
    was_tuned,
)

from tuner.errors import ConfigError
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
TorchDispatchMode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
forward_ad = importlib.import_module("torch.autograd.forward_ad")
sdpa_kernel, SDPBackend = torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend

machine = fake_machine


def test_cpu_tensors_go_to_pytorch_counted_and_said_once(
    runtime: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    q, k, v = inputs()
    attention, stats = runtime.attention.attention, runtime.counters.stats
    with caplog.at_level(logging.INFO, "tuner"):
        for causal, scale in ((False, None), (True, 0.3), (True, None)):
            out = attention(q, k, v, is_causal=causal, scale=scale)
            assert same(out, SDPA(q, k, v, is_causal=causal, scale=scale))
    reason = "the tensors are not on a CUDA device"
    assert [r.getMessage() for r in caplog.records] == [f"answered by PyTorch: {reason}"]
    assert (stats().fallbacks, stats().hits, stats().calls) == ({reason: 3}, 0, 3)
    assert stats(reset=True).calls == 3
    assert stats().calls == 0


def test_the_first_reason_of_a_kind_is_a_warning(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tuner"):
        for rows in (5, 6, 7, 5):
            machine.attention(*inputs((1, 2, rows, 8)))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    assert "S=6" in caplog.records[1].getMessage()
    assert machine.stats().fallbacks == {"no measured winner": 4}


def test_arguments_of_pytorch_s_are_passed_on(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    mask = torch.randn(16, 16)
    assert same(machine.attention(q, k, v, mask), SDPA(q, k, v, mask))
    torch.manual_seed(1)
    out = machine.attention(q, k, v, None, 0.5, True)
    torch.manual_seed(1)
    assert same(out, SDPA(q, k, v, None, 0.5, True))
    assert machine.stats().fallbacks == {"attn_mask is given": 1, "dropout_p is not 0": 1}
    assert machine.launched == []


def test_grouped_heads_are_refused_as_pytorch_does_without_enable_gqa(machine: Machine) -> None:
    q = torch.randn(2, 8, 16, 8).half()
    k, v = torch.randn(2, 2, 2, 16, 8).half()
    with pytest.raises(RuntimeError, match=r"size of tensor|must match"):
        machine.attention(q, k, v)
    assert same(machine.attention(q, k, v, enable_gqa=True), SDPA(q, k, v, enable_gqa=True))


def test_what_pytorch_refuses_is_pytorch_s_error(runtime: SimpleNamespace) -> None:
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(RuntimeError):
        runtime.attention.attention(q, k[..., :4], v)


def test_a_known_kind_takes_the_short_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a dispatcher. Gradients, tensors that are not aligned and a mask take the other."""
    machine.decide(measured())
    known, unknown = inputs(), inputs((1, 2, 20, 8))
    taken = []
    serving = importlib.import_module("tuner.runtime.call.serving")
    long_way = serving.answer

    def noted(call: Any) -> Any:
        taken.append(call)
        return long_way(call)

    monkeypatch.setattr(serving, "answer", noted)
    for _ in range(3):
        assert was_tuned(machine.attention(*known))
        assert same(machine.attention(*unknown), SDPA(*unknown))
    assert len(taken) == 2, "the first call of each kind"
    stats = machine.stats()
    assert (stats.hits, stats.fallbacks) == (3, {"no measured winner": 3})
    off = [misaligned(tensor) for tensor in unknown]
    assert same(machine.attention(*off), SDPA(*unknown)) and len(taken) == 3
    seen = torch.ones(20, 20, dtype=torch.bool)
    assert same(machine.attention(*unknown, seen), SDPA(*unknown, seen)) and len(taken) == 4
    graded = [tensor.clone().requires_grad_() for tensor in unknown]
    assert machine.attention(*graded).requires_grad


def test_a_measured_kernel_is_launched(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    out = machine.attention(q, k, v, scale=0.5)
    assert was_tuned(out)
    assert (out.shape, out.stride(), out.dtype) == (q.shape, q.stride(), q.dtype)
    (first, one, scalars, work_one, stream), (second, two, _, work_two, _) = machine.launched
    assert (first, second, stream, scalars) == ("key-first", "key-second", 77, (0.5,))
    assert one[:2] == (q.data_ptr(), k.data_ptr() + 16)
    assert two[1:] == (v.data_ptr(), out.data_ptr())
    scratch = one[2]
    assert two[0] == scratch
    # 100 bytes of scratch, then a workspace of 300 for each launch, apart from each other.
    assert work_one - scratch >= 100 and work_two - work_one >= 300
    assert (work_one - scratch) % 256 == (work_two - scratch) % 256 == 0
    assert (machine.stats().hits, machine.stats().portfolio_hits) == (1, 0)


def test_a_window_has_a_plan_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the plain one, and the dispatcher, which knows no windows, is not told of it."""
    told: list[Any] = []
    windowed = AttentionProblem(16, 16, 8, 1, 2, window_left=4, window_right=2, softcap=30.0)
    machine.answers = toy_won
    monkeypatch.setattr(machine.runtime.table.dispatch, "put", lambda *call: told.append(call))
    tensors = inputs()
    for _ in range(2):
        assert was_tuned(machine.attention(*tensors, window=(4, 2), softcap=30.0))
        assert was_tuned(machine.attention(*tensors))
    assert machine.problems == [windowed, PROBLEM]
    assert len(told) == 1
    assert machine.stats().hits == 4
    # One that hides nothing is plain attention.
    assert was_tuned(machine.attention(*tensors, window=(15, 15)))
    assert machine.problems[2] == PROBLEM


@pytest.mark.parametrize(
    ("size", "bias"),
    [
        ((16, 16), "1"),
        ((2, 16, 16), "h"),
        ((3, 1, 16, 16), "b"),
        ((1, 2, 16, 16), "h"),
        ((3, 2, 16, 16), "bh"),
    ],
)
def test_a_mask_that_is_added_is_a_bias(
    size: tuple[int, ...], bias: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is given the mask itself, and the dispatcher in C++ is told of it."""
    told: list[Any] = []
    machine.toy = ToyWithBias()
    machine.answers = toy_won
    monkeypatch.setattr(machine.runtime.table.dispatch, "put", lambda *call: told.append(call))
    tensors = [torch.randn(3, 2, 16, 8).half() for _ in range(3)]
    mask = torch.randn(size).half()
    # Expanded, it is the same mask.
    for given in (mask, mask.expand(3, 2, 16, 16)):
        assert was_tuned(machine.attention(*tensors, given))
    assert machine.problems == [AttentionProblem.parse(f"B=3,H=2,S=16,D=8,bias={bias}")]
    assert {arguments[3] is None for _, arguments, *_ in told} == {False}
    assert [call[1][0] for call in machine.launched[1::2]] == [mask.data_ptr()] * 2
    assert machine.stats().hits == 2


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        ((16, 16), "1"),
        ((1, 16), "k"),
        ((3, 1, 1, 16), "bk"),
        ((3, 1, 16, 16), "b"),
        ((2, 16, 16), "h"),
        ((3, 2, 1, 16), "bhk"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_masks_are_posed_by_kind_and_axes(
    size: tuple[int, ...], axes: str, dtype: torch.dtype
) -> None:
    tensors = [torch.randn(3, 2, 16, 8).half() for _ in range(3)]
    mask = torch.ones(size).to(dtype)
    name = "mask" if dtype == torch.bool else "bias"
    wanted = AttentionProblem.parse(f"B=3,H=2,S=16,D=8,{name}={axes}")
    kinds = set()
    for given in (mask, mask.expand(3, 2, 16, 16), mask.clone()):
        call = called(tensors, given)
        posed = call.pose()
        assert (posed.problem, posed.strides) == (wanted, {})
        kinds.add(call.kind())
    assert len(kinds) == 1
    other = torch.float16 if dtype == torch.bool else torch.bool
    assert called(tensors, mask.to(other)).kind() not in kinds
    assert called(tensors, None).kind() not in kinds


def test_a_mask_s_own_strides_are_those_of_the_launch() -> None:
    tensors = [torch.randn(3, 2, 16, 8).half() for _ in range(3)]
    wide = torch.ones(3, 1, 16, 40, dtype=torch.bool)
    posed = called(tensors, wide[..., :16]).pose()
    assert posed.problem == AttentionProblem.parse("B=3,H=2,S=16,D=8,mask=b")
    assert posed.strides == {"mask": (640, 256, 40, 1)}
    column = torch.ones(3, 1, 16, 1, dtype=torch.bool)
    assert called(tensors, column).pose().strides == {"mask": (16, 256, 1, 0)}
    turned = torch.ones(16, 16).half().mT.clone(memory_format=torch.preserve_format)
    assert called(tensors, turned).pose().strides == {"bias": (256, 256, 1, 16)}


@pytest.mark.parametrize(
    ("mask", "strides"),
    [
        (torch.ones(3, 1, 4, 16, dtype=torch.bool), {}),
        (torch.ones(3, 1, 4, 64, dtype=torch.bool)[..., :16], {"mask": (256, 80, 64, 1)}),
        (torch.ones(4, 1, dtype=torch.bool), {"mask": (80, 80, 1, 0)}),
        (torch.ones(16, dtype=torch.bool).expand(4, 16), {}),
    ],
)
def test_a_mask_grows_with_its_cache_as_the_dispatcher_has_it(
    mask: torch.Tensor, strides: dict[str, tuple[int, ...]]
) -> None:
    """Whole masks are whole at every length; cut-out ones keep their strides."""
    query = torch.randn(3, 2, 4, 8).half()
    key, value = (torch.randn(3, 2, 16, 8).half() for _ in range(2))
    posed = called([query, key, value], mask).pose_over(20)
    assert isinstance(posed.problem, AttentionProblem)
    assert (posed.problem.seqlen_kv, posed.strides) == (20, strides)


def test_a_mask_beside_a_soft_cap_or_a_window_is_an_operand(
    machine: Machine,
) -> None:
    machine.toy = ToyWithBias()
    machine.answers = toy_won
    tensors = [torch.randn(3, 2, 16, 8).half() for _ in range(3)]
    mask = torch.zeros(3, 1, 1, 16).half()
    for options in ({"softcap": 2.0}, {"window": (3, 5)}, {"window": (3, 0), "softcap": 2.0}):
        assert was_tuned(machine.attention(*tensors, mask, **options))
    shape = "B=3,H=2,S=16,D=8,bias=bk"
    texts = ("softcap=2", "left=3,right=5", "left=3,causal=1,softcap=2")
    assert machine.problems == [AttentionProblem.parse(f"{shape},{text}") for text in texts]
    assert [call[1][0] for call in machine.launched[1::2]] == [mask.data_ptr()] * 3
    out = machine.attention(*tensors, mask, is_causal=True, softcap=2.0)
    assert not was_tuned(out) and machine.stats().fallbacks == {"attn_mask is given": 1}


def called(tensors: list[torch.Tensor], mask: torch.Tensor | None) -> Any:
    """A call of `tuner.attention` with such a mask."""
    from tuner.runtime.attention.attention_call import AttentionCall
    from tuner.runtime.attention.bias import as_operand
    from tuner.runtime.attention.composed import NONE

    operand = None if mask is None else as_operand(mask, *tensors[:2], False)
    return AttentionCall(*tensors, mask, 0.0, False, None, False, NONE, operand)


def test_masks_that_no_kernel_takes_are_pytorch_s(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    masks = (torch.randn(16, 16), torch.randn(16, 16).half().requires_grad_())
    for mask in masks:
        assert same(machine.attention(q, k, v, mask), SDPA(q, k, v, mask))
    assert machine.stats().fallbacks == {"attn_mask is given": 1, "a gradient is wanted": 1}
    mask = torch.randn(16, 16).half()
    try:
        wanted = SDPA(q, k, v, mask, is_causal=True)
    except RuntimeError:  # PyTorch 2.14 takes one of both
        with pytest.raises(RuntimeError, match="is_causal"):
            machine.attention(q, k, v, mask, is_causal=True)
    else:
        assert same(machine.attention(q, k, v, mask, is_causal=True), wanted)
    assert machine.launched == []


def test_a_gradient_under_a_window_is_composed(machine: Machine) -> None:
    machine.toy = ToyWithLse()
    machine.decide(measured())
    tensors = [t.requires_grad_() for t in inputs()]
    out = machine.attention(*tensors, window=(15, 15))
    assert torch.allclose(out, SDPA(*tensors), atol=2e-3)
    assert machine.stats().fallbacks == {"a gradient is wanted": 1}
    assert machine.launched == []


def test_the_default_scale(machine: Machine) -> None:
    machine.decide(measured())
    machine.attention(*inputs())
    assert machine.launched[0][2] == (pytest.approx(8**-0.5),)


@pytest.mark.parametrize("scale", [0.0, -0.125, -1, math.nan])
def test_a_scale_that_is_not_positive_is_pytorch_s(machine: Machine, scale: float) -> None:
    """Own kernels shift by the scaled maximum of the raw scores: with such a scale no maximum."""
    machine.decide(measured())
    q, k, v = inputs()
    wanted = SDPA(q, k, v, scale=scale)
    out = machine.attention(q, k, v, scale=scale)
    assert torch.equal(out.nan_to_num(), wanted.nan_to_num())
    assert machine.stats().fallbacks == {"scale is not positive": 1}
    assert machine.launched == []
    assert was_tuned(machine.attention(q, k, v, scale=1e-6))


def test_the_log_sum_exp_is_written_where_it_is_wanted(machine: Machine) -> None:
    machine.toy = ToyWithLse()
    machine.decide(measured())
    q, k, v = inputs()
    plan = machine.runtime.attention_call.find_plan(q, k, v, False, None)
    assert plan.has_lse
    out, lse = plan.run_with_lse(q, k, v)
    assert was_tuned(out) and (lse.shape, lse.dtype) == ((1, 2, 16), torch.float32)
    assert machine.launched[0][1][3:] == (lse.data_ptr(), out.data_ptr())
    plan.run(q, k, v)
    assert machine.launched[1][1][3] == 0, "a null pointer says that nobody wants it"
    assert machine.stats().hits == 2


def test_disabled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    monkeypatch.setenv("TUNER_DISABLE", "1")
    machine.decide(measured())
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert len(machine.problems) == 0
    assert machine.stats().fallbacks == {"switched off": 1}
    monkeypatch.setenv("TUNER_DISABLE", "0")
    machine.time_passes()
    assert was_tuned(machine.attention(q, k, v))


def test_a_look_up_without_a_call_follows_the_variable(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tuner.runtime.call.refusal import Kind, Refusal
    from tuner.runtime.call.serving import find

    machine.decide(measured())
    call = machine.runtime.attention.AttentionCall(*inputs(), None, 0.0, False, None, False)
    for value in ("1", "0", "1"):
        monkeypatch.setenv("TUNER_DISABLE", value)
        machine.time_passes()
        found = find(call)
        assert (isinstance(found, Refusal) and found.kind is Kind.OFF) == (value == "1")


def test_nothing_is_loaded_inside_a_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs()
    machine.decide(measured())
    devices = machine.runtime.devices
    monkeypatch.setattr(devices, "is_capturing", lambda: True)
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.loads == 0
    monkeypatch.setattr(devices, "is_capturing", lambda: False)
    assert was_tuned(machine.attention(q, k, v))
    monkeypatch.setattr(devices, "is_capturing", lambda: True)
    assert was_tuned(machine.attention(q, k, v)), "a plan made before may be captured"
    machine.decide()
    assert was_tuned(machine.attention(q, k, v)), "also when the store has changed meanwhile"


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (q.float(), k.float(), v.float()),
        lambda q, k, v: (q[..., :4], k[..., :4], v),
        lambda q, k, v: (q[:, :, ::2], k[:, :, ::2], v[:, :, ::2]),
        lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
    ],
    ids=["3-D", "float32", "D of 4", "every second row", "mixed layouts"],
)
def test_other_tensors_go_to_pytorch(machine: Machine, change: Callable[..., Any]) -> None:
    machine.decide(measured())
    q, k, v = change(*inputs())
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == [] and machine.stats().calls == 1


class Subclass(torch.Tensor):
    """A tensor with a mind of its own."""


class Recorder(TorchDispatchMode):
    """A dispatch mode that writes down the operators it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("how", ["a subclass", "vmap", "a dispatch mode"])
def test_what_stands_between_the_caller_and_the_kernel_sees_the_call(
    machine: Machine, how: str
) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    if how == "a subclass":
        assert same(machine.attention(q.as_subclass(Subclass), k, v), SDPA(q, k, v))
    elif how == "vmap":
        out = torch.vmap(machine.attention, in_dims=(0, None, None))(torch.stack([q, q]), k, v)
        assert torch.allclose(out[1], SDPA(q, k, v), atol=1e-3)
    else:
        with Recorder() as recorder:
            machine.attention(q, k, v)
        assert any("scaled_dot_product" in name for name in recorder.seen)
    assert machine.launched == []
    assert was_tuned(machine.attention(q, k, v))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # make_dual calls it
@pytest.mark.parametrize("which", range(3))
def test_tangents_are_pytorch_s(machine: Machine, which: int) -> None:
    machine.decide(measured())
    tensors, tangent = inputs(), torch.randn(1, 2, 16, 8).half()
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        tensors[which] = forward_ad.make_dual(tensors[which], tangent)
        found, wanted = (
            forward_ad.unpack_dual(call(*tensors)) for call in (machine.attention, SDPA)
        )
        assert same(found.primal, wanted.primal) and same(found.tangent, wanted.tangent)
        assert found.tangent.any()
    assert machine.stats().fallbacks == {"forward-mode differentiation is active": 1}
    assert machine.launched == []
    assert was_tuned(machine.attention(*inputs())), "the level is closed"


def test_a_negative_view_is_pytorch_s(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    assert same(machine.attention(torch._neg_view(q), k, v), SDPA(-q, k, v))
    assert machine.stats().fallbacks == {"a tensor is a negative view": 1}
    assert machine.launched == []


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bshd_bhsd"])
@pytest.mark.parametrize("shape", ["S=16,D=8,H=2", "B=2,H=4,HKV=2,SQ=3,SKV=32,D=64,causal=1"])
def test_a_problem_is_read_off_its_tensors(
    runtime: SimpleNamespace, shape: str, layout: str
) -> None:
    problem = AttentionProblem.parse(f"{shape},dtype=bf16,layout={layout}")
    made = [
        torch.empty_strided(o.shape, o.strides, dtype=torch.bfloat16) for o in problem.operands[:3]
    ]
    assert runtime.attention_call.pose(*made, problem.is_causal, 1.0).problem == problem
    if problem.heads_q != problem.heads_kv:
        with pytest.raises(ConfigError, match="enable_gqa"):
            runtime.attention_call.pose(*made, problem.is_causal, 1.0, enable_gqa=False)


def test_dimensions_of_one_have_any_stride(runtime: SimpleNamespace) -> None:
    tensor = torch.empty_strided((1, 1, 16, 8), (5, 7, 8, 1), dtype=torch.float16)
    problem = runtime.attention_call.pose(tensor, tensor, tensor, False, 1.0).problem
    assert problem == AttentionProblem.parse("S=16,D=8,H=1")
