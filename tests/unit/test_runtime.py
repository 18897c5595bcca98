"""The runtime's decisions, with fake kernels over CPU tensors: what is launched and what never."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, StoreError
from tuner.families.base import SCRATCH, Family, Launch, Ref
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.lookup import Answer, Entry
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

dispatch = importlib.import_module("tuner.runtime.attention")
plan = importlib.import_module("tuner.runtime.plan")

SDPA = torch.nn.functional.scaled_dot_product_attention
PATTERN = 0x3C  # every byte of what the fake kernel writes: 1.0586 in fp16
WRITTEN = torch.full((1,), 0x3C3C, dtype=torch.int16).view(torch.float16).item()
PROBLEM = AttentionProblem.parse("S=16,D=8,H=2")


class Toy(Family):
    """Two kernels: the first writes scratch, the second the output."""

    name = "toy"
    op = "attention"

    def violations(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config("toy", {"n": 1})]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 1.0

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        return 100

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        first = (Ref("query"), Ref("key", 16), Ref(SCRATCH))
        return [
            Launch("first", first, (problem.output.bytes,), (scale,)),
            Launch("second", (Ref(SCRATCH), Ref("value"), Ref("out")), (problem.output.bytes,)),
        ]


class Kernel:
    """A loaded kernel that fills its last tensor, and remembers how it was called."""

    def __init__(self, key: str, machine: Machine) -> None:
        self.key, self.machine = key, machine

    def workspace_bytes(self, integers: Sequence[int]) -> int:
        return 300

    def launch(
        self,
        tensors: Sequence[int],
        integers: Sequence[int],
        scalars: Sequence[float],
        workspace: int,
        stream: int,
    ) -> None:
        self.machine.launched.append((self.key, tuple(tensors), tuple(scalars), workspace, stream))
        if self.machine.fails:
            raise self.machine.fails
        if self.key == "key-second":
            ctypes.memset(tensors[-1], PATTERN, integers[0])


class Machine:
    """A store, an artifact cache and a GPU that are not there."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.launched: list[tuple[Any, ...]] = []
        self.present = {"key-first", "key-second"}
        self.fails: Exception | None = None
        self.lookups = 0
        self.loads = 0
        self.vendor: Callable[..., Any] | str = "no such kernel"

    def find(self, key: str) -> Artifact | None:
        return Artifact(key, Path("kernel.so"), "", None, 0.0) if key in self.present else None

    def load(self, artifact: Artifact) -> Kernel:
        self.loads += 1
        return Kernel(artifact.key, self)

    def lookup(self, problem: Problem, *, gpu: Gpu) -> Answer | None:
        self.lookups += 1
        assert gpu == DEFAULT_GPU
        return self.answer if problem == PROBLEM else None

    def family(self, name: str) -> Any:
        if name == "toy":
            return Toy()
        return SimpleNamespace(
            name=name, is_vendor=True, vendor_call=lambda problem, config, scale: self.vendor
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(dispatch, "lookup", made.lookup)
    monkeypatch.setattr(dispatch, "gpu_of", lambda index: DEFAULT_GPU)
    monkeypatch.setattr(plan, "load", made.load)
    monkeypatch.setattr(plan, "ArtifactCache", lambda: made)
    monkeypatch.setattr(plan, "family", made.family)
    monkeypatch.setattr(dispatch, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda d: SimpleNamespace(cuda_stream=77))
    yield made


@pytest.fixture(autouse=True)
def fresh_process() -> Iterator[None]:
    """What one process remembers, forgotten."""
    state = (dispatch._known, dispatch._withdrawn, dispatch._said, dispatch._gpus)
    for part in state:
        part.clear()
    yield
    for part in state:
        part.clear()


def measured(family: str = "toy", **changes: Any) -> Measurement:
    artifacts = {"first": "key-first", "second": "key-second"} if family == "toy" else {}
    base = Measurement(
        problem=PROBLEM,
        config=Config(family, {"n": 1}),
        gpu=DEFAULT_GPU,
        regime=Regime(),
        status=Status.OK,
        latency_us=10.0,
        is_final=True,
        artifacts=artifacts,
    )
    return base.but(**changes)


def answer(*ranking: Measurement) -> Answer:
    return Answer(entry=Entry.of(ranking), exact=True, notes=())


def inputs(shape: tuple[int, ...] = (1, 2, 16, 8), dtype: Any = torch.float16) -> list[Any]:
    return [torch.randn(shape).to(dtype) for _ in range(3)]


def was_tuned(out: Any) -> bool:
    return bool((out == WRITTEN).all())


def same(out: Any, wanted: Any) -> bool:
    return bool(torch.equal(out, wanted))


def test_cpu_tensors_go_to_pytorch_said_once(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for causal, scale in ((False, None), (True, 0.3), (True, None)):
            out = dispatch.attention(q, k, v, is_causal=causal, scale=scale)
            assert same(out, SDPA(q, k, v, is_causal=causal, scale=scale))
    assert [r.getMessage() for r in caplog.records] == [
        "attention by PyTorch: the tensors are not on a CUDA device"
    ]


def test_grouped_heads_go_to_pytorch_too() -> None:
    q, k, v = torch.randn(2, 8, 16, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v, enable_gqa=True))


def test_what_pytorch_refuses_is_pytorch_s_error() -> None:
    q, k, v = inputs(dtype=torch.float32)
    with pytest.raises(RuntimeError):
        dispatch.attention(q, k[..., :4], v)


def test_a_measured_kernel_is_launched(machine: Machine) -> None:
    machine.answer = answer(measured())
    q, k, v = inputs()
    out = dispatch.attention(q, k, v, scale=0.5)
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


def test_the_default_scale(machine: Machine) -> None:
    machine.answer = answer(measured())
    dispatch.attention(*inputs())
    assert machine.launched[0][2] == (pytest.approx(8**-0.5),)


def test_the_plan_is_made_once_and_the_store_asked_always(machine: Machine) -> None:
    machine.answer = answer(measured())
    q, k, v = inputs()
    for _ in range(5):
        assert was_tuned(dispatch.attention(q, k, v))
    assert (machine.loads, machine.lookups) == (2, 5)


def test_a_new_decision_is_taken_up(machine: Machine) -> None:
    q, k, v = inputs()
    assert not was_tuned(dispatch.attention(q, k, v))
    machine.answer = answer(measured())
    assert was_tuned(dispatch.attention(q, k, v))
    machine.answer = None
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_only_measured_entries_are_launched(
    machine: Machine, provenance: Provenance, caplog: pytest.LogCaptureFixture
) -> None:
    machine.vendor = lambda q, k, v: torch.zeros_like(q)
    machine.answer = answer(
        measured(provenance=provenance), measured("vendor_sdpa", provenance=provenance)
    )
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(3):
            assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == [] and machine.loads == 0
    assert [r.getMessage() for r in caplog.records if f"is {provenance}" in r.getMessage()]
    assert len(caplog.records) == 1


def test_a_mixed_ranking_skips_what_was_not_measured(machine: Machine) -> None:
    replayed = measured(provenance=Provenance.REPLAYED, latency_us=1.0).but(
        config=Config("toy", {"n": 2})
    )
    machine.answer = answer(replayed, measured())
    assert was_tuned(dispatch.attention(*inputs()))


@pytest.mark.parametrize(
    "broken",
    [
        {"status": Status.WRONG_RESULT, "latency_us": None},
        {"problem": AttentionProblem.parse("S=16,D=8,H=2,causal=1")},
        {"artifacts": {"first": "key-first"}},
        {"artifacts": {"first": "key-first", "second": "key-missing"}},
        {"config": Config("nowhere", {})},
    ],
)
def test_what_cannot_run_here_is_passed_over(machine: Machine, broken: dict[str, Any]) -> None:
    q, k, v = inputs()
    machine.answer = answer(measured().but(**broken))
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == []
    machine.answer = answer(
        measured().but(**broken), measured(latency_us=20.0, config=Config("toy", {"n": 3}))
    )
    assert was_tuned(dispatch.attention(q, k, v))


def test_a_vendor_that_won_is_called(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    machine.answer = answer(measured("vendor_sdpa", latency_us=5.0), measured())
    q, k, v = inputs()
    assert (dispatch.attention(q, k, v) == 3.0).all()
    assert machine.launched == []
    machine.vendor = "not installed"
    dispatch._known.clear()
    assert was_tuned(dispatch.attention(q, k, v))


def test_a_pinned_winner_comes_first(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    vendor, own = measured("vendor_sdpa", latency_us=5.0), measured()
    machine.answer = Answer(entry=Entry.of([vendor, own], pin=own), exact=True, notes=())
    assert was_tuned(dispatch.attention(*inputs()))


@pytest.mark.parametrize("error", [BenchmarkError("cudaError 700"), RuntimeError("CUDA error")])
def test_a_failing_kernel_is_withdrawn(
    machine: Machine, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    machine.answer = answer(measured())
    machine.fails = error
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(3):
            assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert len(machine.launched) == 1, "it must not be launched again in this process"
    assert str(error) in caplog.records[0].getMessage()


def test_out_of_memory_is_for_one_call(machine: Machine) -> None:
    machine.answer = answer(measured())
    machine.fails = torch.OutOfMemoryError("CUDA out of memory")
    q, k, v = inputs()
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    machine.fails = None
    assert was_tuned(dispatch.attention(q, k, v))


def test_disabled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.answer = answer(measured())
    q, k, v = inputs()
    monkeypatch.setenv("TUNER_DISABLE", "1")
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert machine.lookups == 0
    monkeypatch.setenv("TUNER_DISABLE", "0")
    assert was_tuned(dispatch.attention(q, k, v))


def test_a_broken_store_is_no_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(problem: Problem, *, gpu: Gpu) -> None:
        raise StoreError("store.sqlite is not a database")

    monkeypatch.setattr(dispatch, "lookup", broken)
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(2):
            assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert len(caplog.records) == 1 and "is not a database" in caplog.text


def test_gradients_go_to_pytorch(machine: Machine) -> None:
    machine.answer = answer(measured())
    q, k, v = inputs()
    q.requires_grad_()
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == []
    with torch.no_grad():
        assert was_tuned(dispatch.attention(q, k, v))


def test_nothing_is_loaded_inside_a_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.answer = answer(measured())
    q, k, v = inputs()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert machine.loads == 0
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert was_tuned(dispatch.attention(q, k, v))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert was_tuned(dispatch.attention(q, k, v)), "a plan made before may be captured"


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (q.float(), k.float(), v.float()),
        lambda q, k, v: (q[..., :4], k[..., :4], v),
        lambda q, k, v: (q[:, :, ::2], k[:, :, ::2], v[:, :, ::2]),
        lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v),
        lambda q, k, v: tuple(misaligned(t) for t in (q, k, v)),
    ],
    ids=["3-D", "float32", "D of 4", "every second row", "mixed layouts", "misaligned"],
)
def test_other_tensors_go_to_pytorch(machine: Machine, change: Callable[..., Any]) -> None:
    machine.answer = answer(measured())
    q, k, v = change(*inputs())
    assert same(dispatch.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == []


def misaligned(tensor: Any) -> Any:
    """The same values, two bytes past an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return room.copy_(tensor)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", ["S=16,D=8,H=2", "B=2,H=4,HKV=2,SQ=1,SKV=32,D=64,causal=1"])
def test_a_problem_is_read_off_its_tensors(shape: str, layout: str) -> None:
    problem = AttentionProblem.parse(f"{shape},dtype=bf16,layout={layout}")
    made = [
        torch.empty_strided(o.shape, o.strides, dtype=torch.bfloat16) for o in problem.operands[:3]
    ]
    assert dispatch.problem_of(*made, problem.is_causal) == problem


def test_dimensions_of_one_have_any_stride() -> None:
    tensor = torch.empty_strided((1, 1, 16, 8), (5, 7, 8, 1), dtype=torch.float16)
    problem = dispatch.problem_of(tensor, tensor, tensor, False)
    assert problem == AttentionProblem.parse("S=16,D=8,H=1")


def test_the_gpu_s_identity_is_the_store_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    assert dispatch.gpu_of(0) == DEFAULT_GPU
    seen.name = "NVIDIA H20"
    assert dispatch.gpu_of(1).identity == "NVIDIA H20|9.0|132"
