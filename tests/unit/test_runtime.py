"""The runtime's decisions, with fake kernels over CPU tensors: what is launched and what never."""

from __future__ import annotations

import ctypes
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.artifacts import Artifact
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError, StoreError
from tuner.families.base import LSE, SCRATCH, Family, Launch, Ref
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.lookup import Answer, Entry
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, Problem
from tuner.rule import Choice, Regret

torch = pytest.importorskip("torch", reason="torch is not installed")
TorchDispatchMode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode

SDPA = torch.nn.functional.scaled_dot_product_attention
PATTERN = 0x3C  # every byte of what the fake kernel writes: 1.0586 in fp16
WRITTEN = torch.full((1,), 0x3C3C, dtype=torch.int16).view(torch.float16).item()
PROBLEM = AttentionProblem.parse("S=16,D=8,H=2")
OTHER = AttentionProblem.parse("S=32,D=8,H=2")


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
        second = (Ref(SCRATCH), Ref("value"), Ref("out"))
        return [
            Launch("first", first, (problem.output.bytes,), (scale,)),
            Launch("second", second, (problem.output.bytes,)),
        ]


class ToyWithLse(Toy):
    """One kernel, which writes the log-sum-exp where it is wanted."""

    writes_lse = True

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        tensors = tuple(Ref(name) for name in ("query", "key", "value", LSE, "out"))
        return [Launch("second", tensors, (problem.output.bytes,), (scale,))]


class Kernel:
    """A loaded kernel that fills its last tensor, and remembers how it was called."""

    def __init__(self, key: str, machine: Machine) -> None:
        self.key, self.machine = key, machine

    def workspace_bytes(self, integers: Sequence[int]) -> int:
        return 300

    def bind(self, integers: Sequence[int], scalars: Sequence[float]) -> Callable[..., None]:
        def launch(tensors: Sequence[int], workspace: int, stream: int) -> None:
            call = (self.key, tuple(tensors), tuple(scalars), workspace, stream)
            self.machine.launched.append(call)
            if self.machine.fails:
                raise self.machine.fails
            if self.key == "key-second":
                ctypes.memset(tensors[-1], PATTERN, integers[0])

        return launch


class Machine:
    """A store, an artifact cache and a GPU that are not there; calls go through Python."""

    def __init__(self, runtime: SimpleNamespace) -> None:
        self.runtime = runtime
        self.answer: Answer | None = None
        self.launched: list[tuple[Any, ...]] = []
        self.present = {"key-first", "key-second"}
        self.fails: Exception | None = None
        self.broken: Exception | None = None
        self.version = 0
        self.foreign: list[str] = []
        self.lookups = 0
        self.asked: list[Path | None] = []
        self.loads = 0
        self.vendor: Callable[..., Any] | str = "no such kernel"
        self.toy: Family = Toy()

    def find(self, key: str) -> Artifact | None:
        return Artifact(key, Path("kernel.so"), "", None, 0.0) if key in self.present else None

    def load(self, artifact: Artifact) -> Kernel:
        self.loads += 1
        return Kernel(artifact.key, self)

    def decided_stamp(self, path: Path | None) -> int:
        if self.broken:
            raise self.broken
        return self.version

    def decided(self, path: Path | None) -> dict[str, int]:
        return {key: self.version for key in (PROBLEM.key, OTHER.key, *self.foreign)}

    def lookup(self, problem: Problem, *, gpu: Gpu, path: Path | None) -> Answer | None:
        self.lookups += 1
        self.asked.append(path)
        assert gpu == DEFAULT_GPU
        if self.broken:
            raise self.broken
        return self.answer if problem in (PROBLEM, OTHER) else None

    def family(self, name: str) -> Any:
        if name == "toy":
            return self.toy
        return SimpleNamespace(
            name=name, is_vendor=True, vendor_call=lambda problem, config, scale: self.vendor
        )

    def decide(self, *ranking: Measurement) -> None:
        """As a sweep does, and the runtime's next call looks at the store."""
        self.answer = answer(*ranking) if ranking else None
        self.version += 1
        self.time_passes()

    def time_passes(self) -> None:
        self.runtime.table.table._look_at = 0.0

    def attention(self, *arguments: Any, **options: Any) -> Any:
        return self.runtime.attention.attention(*arguments, **options)

    def stats(self) -> Any:
        return self.runtime.counters.stats()


@pytest.fixture
def machine(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(on_cpu)
    monkeypatch.setattr(on_cpu.table, "lookup", made.lookup)
    monkeypatch.setattr(on_cpu.table, "decided", made.decided)
    monkeypatch.setattr(on_cpu.table, "decided_stamp", made.decided_stamp)
    monkeypatch.setattr(on_cpu.plan, "load", made.load)
    monkeypatch.setattr(on_cpu.plan, "ArtifactCache", lambda: made)
    monkeypatch.setattr(on_cpu.plan, "family", made.family)
    return made


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


def test_a_pinned_table_asks_its_file_and_launches_nothing_that_is_absent(
    machine: Machine, on_cpu: SimpleNamespace, tmp_path: Path
) -> None:
    machine.decide(measured())
    assert was_tuned(machine.attention(*inputs()))
    absent, *_ = measured().artifacts.values()
    on_cpu.table.table.pin(tmp_path / "agreed.sqlite", [absent])
    assert not was_tuned(machine.attention(*inputs()))
    assert machine.asked[-1] == tmp_path / "agreed.sqlite"
    assert list(machine.stats().fallbacks) == ["nothing of the entry can run here"]
    on_cpu.table.table.pin(None, refusal="the ranks did not agree")
    assert not was_tuned(machine.attention(*inputs()))
    assert machine.stats().fallbacks["the ranks did not agree"] == 1
    on_cpu.table.table.pin(None)
    assert was_tuned(machine.attention(*inputs())) and machine.asked[-1] is None


def test_what_a_rule_names_is_a_miss(machine: Machine) -> None:
    """Even if it were measured: nobody has checked it at this shape."""
    regret = Regret(0.03, 0.07, 11, 0)
    ruled = Choice(Config("toy", {"n": 1}), "tree", regret, "always")
    machine.decide(measured())
    assert machine.answer is not None
    machine.answer = replace(machine.answer, ruled=ruled)
    q, k, v = inputs()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.stats().fallbacks == {"no measured winner": 1}


def test_arguments_of_pytorch_s_are_passed_on(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
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
    assert (machine.stats().hits, machine.stats().nearest_hits) == (1, 0)


def test_a_window_has_a_plan_of_its_own(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the plain one, and the dispatcher, which knows no windows, is not told of it."""
    known: list[Problem] = []
    told: list[Any] = []
    windowed = AttentionProblem(16, 16, 8, 1, 2, window_left=4, window_right=2, softcap=30.0)

    def lookup(problem: Problem, *, gpu: Gpu, path: Path | None) -> Answer:
        known.append(problem)
        return answer(measured(problem=problem))

    monkeypatch.setattr(machine.runtime.table, "lookup", lookup)
    monkeypatch.setattr(machine.runtime.table.dispatch, "put", lambda *call: told.append(call))
    tensors = inputs()
    for _ in range(2):
        assert was_tuned(machine.attention(*tensors, window=(4, 2), softcap=30.0))
        assert was_tuned(machine.attention(*tensors))
    assert known == [windowed, PROBLEM]
    assert len(told) == 1
    assert machine.stats().hits == 4
    # One that hides nothing is plain attention.
    assert was_tuned(machine.attention(*tensors, window=(15, 15)))
    assert known[2] == PROBLEM


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
    plan = machine.runtime.attention.find_plan(q, k, v, False, None)
    assert plan.has_lse
    out, lse = plan.run_with_lse(q, k, v)
    assert was_tuned(out) and (lse.shape, lse.dtype) == ((1, 2, 16), torch.float32)
    assert machine.launched[0][1][3:] == (lse.data_ptr(), out.data_ptr())
    plan.run(q, k, v)
    assert machine.launched[1][1][3] == 0, "a null pointer says that nobody wants it"
    assert machine.stats().hits == 2


def test_a_call_costs_no_look_at_the_store(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    for _ in range(5):
        assert was_tuned(machine.attention(q, k, v))
    assert (machine.loads, machine.lookups) == (2, 1)


def test_a_new_decision_is_taken_up(machine: Machine) -> None:
    q, k, v = inputs()
    assert not was_tuned(machine.attention(q, k, v))
    machine.decide(measured())
    assert was_tuned(machine.attention(q, k, v))
    machine.decide()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))


def test_the_store_is_looked_at_within_a_second(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(machine.runtime.table.time, "monotonic", lambda: now)
    machine.attention(*inputs())
    machine.answer, machine.version = answer(measured()), 1
    now += 0.4
    assert not was_tuned(machine.attention(*inputs()))
    now += 0.6
    assert was_tuned(machine.attention(*inputs()))


def test_an_artifact_that_is_built_later_is_taken_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(machine.runtime.table.time, "monotonic", lambda: now)
    machine.present.discard("key-second")
    machine.decide(measured())
    assert not was_tuned(machine.attention(*inputs()))
    machine.present.add("key-second")
    now += machine.runtime.table.RETRY_EVERY_S
    assert was_tuned(machine.attention(*inputs()))


def test_a_nearest_entry_is_launched_and_counted(machine: Machine) -> None:
    theirs = measured().but(problem=OTHER)
    machine.decide(theirs)
    machine.answer = replace(answer(theirs), exact=False, lent=(theirs,))
    assert was_tuned(machine.attention(*inputs()))
    assert (machine.stats().hits, machine.stats().nearest_hits) == (1, 1)


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_only_measured_entries_are_launched(
    machine: Machine, provenance: Provenance, caplog: pytest.LogCaptureFixture
) -> None:
    machine.vendor = lambda q, k, v: torch.zeros_like(q)
    machine.decide(measured(provenance=provenance), measured("vendor_sdpa", provenance=provenance))
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(3):
            assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == [] and machine.loads == 0
    assert len(caplog.records) == 1 and f"is {provenance}" in caplog.text
    assert machine.stats().fallbacks == {"nothing of the entry can run here": 3}


def test_a_mixed_ranking_skips_what_was_not_measured(machine: Machine) -> None:
    replayed = measured(provenance=Provenance.REPLAYED, latency_us=1.0).but(
        config=Config("toy", {"n": 2})
    )
    machine.decide(replayed, measured())
    assert was_tuned(machine.attention(*inputs()))


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
    machine.decide(measured().but(**broken))
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == []
    machine.decide(
        measured().but(**broken), measured(latency_us=20.0, config=Config("toy", {"n": 3}))
    )
    assert was_tuned(machine.attention(q, k, v))


def test_a_vendor_that_won_is_called(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    ranking = measured("vendor_sdpa", latency_us=5.0), measured()
    machine.decide(*ranking)
    q, k, v = inputs()
    assert (machine.attention(q, k, v) == 3.0).all()
    assert machine.launched == [] and machine.stats().hits == 1
    machine.vendor = "not installed"
    machine.runtime.table.table.forget()
    assert was_tuned(machine.attention(q, k, v))


def test_a_pinned_winner_comes_first(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    vendor, own = measured("vendor_sdpa", latency_us=5.0), measured()
    machine.answer = Answer(entry=Entry.of([vendor, own], pin=own), exact=True, notes=())
    assert was_tuned(machine.attention(*inputs()))


def test_a_refused_launch_withdraws_the_kernel(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.decide(measured())
    machine.fails = BenchmarkError("launch of key-first: cudaError 701")
    q, k, v = inputs()
    with caplog.at_level(logging.INFO, "tuner"):
        for _ in range(3):
            assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert len(machine.launched) == 1, "it must not be launched again in this process"
    assert "cudaError 701" in caplog.text
    assert machine.stats().errors == {"a launch was refused": 1}
    assert sum(machine.stats().fallbacks.values()) == 3 and machine.stats().hits == 0


def test_a_withdrawn_kernel_makes_way_for_the_next(machine: Machine) -> None:
    machine.vendor = lambda q, k, v: torch.full_like(q, 3.0)
    machine.decide(measured(), measured("vendor_sdpa", latency_us=20.0))
    machine.fails = BenchmarkError("cudaError 701")
    machine.attention(*inputs())
    assert (machine.attention(*inputs()) == 3.0).all()


def test_a_vendor_s_kernel_is_tried_as_pytorch_s_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `tuner.enable` would answer the trial by looking for the plan that is being made."""
    native = importlib.import_module("tuner.runtime.native")
    seen: list[bool] = []

    def vendor_call(*arguments: Any) -> Any:
        seen.append(native.thread.is_native)
        return lambda q, k, v: torch.full_like(q, 3.0)

    vendor = SimpleNamespace(name="vendor_sdpa", is_vendor=True, vendor_call=vendor_call)
    monkeypatch.setattr(machine.runtime.plan, "family", lambda name: vendor)
    machine.decide(measured("vendor_sdpa"))
    assert bool((machine.attention(*inputs()) == 3.0).all())
    assert seen == [True] and not native.thread.is_native


def test_a_vendor_s_refusal_withdraws_it(machine: Machine) -> None:
    def refuses(*inputs: Any) -> None:
        raise RuntimeError("No available kernel")

    machine.vendor = refuses
    machine.decide(measured("vendor_sdpa", latency_us=5.0), measured())
    q, k, v = inputs()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert was_tuned(machine.attention(q, k, v))


def test_an_asynchronous_error_is_not_hidden(machine: Machine) -> None:
    machine.decide(measured())
    machine.fails = BenchmarkError("cudaError 700", status=Status.ILLEGAL_ACCESS)
    with pytest.raises(RuntimeError, match="or of an earlier kernel: cudaError 700"):
        machine.attention(*inputs())

    def meets_it(*tensors: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    machine.vendor = meets_it
    machine.decide(measured("vendor_sdpa"))
    with pytest.raises(torch.AcceleratorError):
        machine.attention(*inputs())


def test_out_of_memory_is_for_one_call(machine: Machine) -> None:
    machine.decide(measured())
    machine.fails = torch.OutOfMemoryError("CUDA out of memory")
    q, k, v = inputs()
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    machine.fails = None
    assert was_tuned(machine.attention(q, k, v))


def test_disabled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    monkeypatch.setenv("TUNER_DISABLE", "1")
    machine.decide(measured())
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.lookups == 0
    assert machine.stats().fallbacks == {"switched off": 1}
    monkeypatch.setenv("TUNER_DISABLE", "0")
    machine.time_passes()
    assert was_tuned(machine.attention(q, k, v))


def test_a_store_that_breaks_stops_nothing_that_is_known(machine: Machine) -> None:
    machine.decide(measured())
    q, k, v = inputs()
    known = machine.attention(q, k, v)
    machine.broken = StoreError("store.sqlite is not a database")
    machine.time_passes()
    assert same(machine.attention(q, k, v), known)
    longer = inputs((1, 2, 32, 8))
    looked = machine.lookups
    for _ in range(3):
        assert same(machine.attention(*longer), SDPA(*longer))
    assert machine.lookups == looked, "a store that cannot be read is not asked for each call"
    stats = machine.stats()
    assert stats.errors == stats.fallbacks | {"the store cannot be read": 1}
    assert (stats.hits, stats.fallbacks) == (2, {"the store cannot be read": 3})
    machine.broken = None
    machine.decide(measured().but(problem=OTHER))
    assert was_tuned(machine.attention(*longer))


def test_a_store_that_breaks_right_after_a_change(machine: Machine) -> None:
    machine.decide(measured())
    known = machine.attention(*inputs())
    machine.decide(measured(latency_us=9.0))
    machine.runtime.table.table._look()
    machine.broken = StoreError("store.sqlite is not a database")
    assert same(machine.attention(*inputs()), known)


def test_decisions_of_another_version_stop_nothing(machine: Machine) -> None:
    machine.decide(measured())
    machine.attention(*inputs())
    for machine.foreign in ([], ["no JSON", "[1]", '{"op": "fft", "n": 8}']):
        machine.decide(measured(config=Config("toy", {"n": 2})))
        assert was_tuned(machine.attention(*inputs()))
    assert machine.stats().errors == {}


def test_a_store_that_cannot_be_read_from_the_start(machine: Machine) -> None:
    machine.broken = StoreError("store.sqlite is not a database")
    q, k, v = inputs()
    for _ in range(2):
        assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.stats().fallbacks == {"the store cannot be read": 2}


def test_many_shapes_stay_few(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.runtime.table, "_MAX_KNOWN", 8)
    machine.decide(measured())
    for rows in range(1, 40):
        machine.attention(*inputs((1, 2, rows, 8)))
        assert len(machine.runtime.table.table._known) <= 8
    assert was_tuned(machine.attention(*inputs()))


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
        lambda q, k, v: tuple(misaligned(t) for t in (q, k, v)),
    ],
    ids=["3-D", "float32", "D of 4", "every second row", "mixed layouts", "misaligned"],
)
def test_other_tensors_go_to_pytorch(machine: Machine, change: Callable[..., Any]) -> None:
    machine.decide(measured())
    q, k, v = change(*inputs())
    assert same(machine.attention(q, k, v), SDPA(q, k, v))
    assert machine.launched == [] and machine.stats().calls == 1


def misaligned(tensor: Any) -> Any:
    """The same values, two bytes past an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return room.copy_(tensor)


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


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "bshd_bhsd"])
@pytest.mark.parametrize("shape", ["S=16,D=8,H=2", "B=2,H=4,HKV=2,SQ=3,SKV=32,D=64,causal=1"])
def test_a_problem_is_read_off_its_tensors(
    runtime: SimpleNamespace, shape: str, layout: str
) -> None:
    problem = AttentionProblem.parse(f"{shape},dtype=bf16,layout={layout}")
    made = [
        torch.empty_strided(o.shape, o.strides, dtype=torch.bfloat16) for o in problem.operands[:3]
    ]
    assert runtime.attention.problem_of(*made, problem.is_causal) == problem
    if problem.heads_q != problem.heads_kv:
        with pytest.raises(ConfigError, match="enable_gqa"):
            runtime.attention.problem_of(*made, problem.is_causal, enable_gqa=False)


def test_dimensions_of_one_have_any_stride(runtime: SimpleNamespace) -> None:
    tensor = torch.empty_strided((1, 1, 16, 8), (5, 7, 8, 1), dtype=torch.float16)
    problem = runtime.attention.problem_of(tensor, tensor, tensor, False)
    assert problem == AttentionProblem.parse("S=16,D=8,H=1")


def test_the_gpu_s_identity_is_the_store_s(
    runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    assert runtime.devices.gpu_of(0) == DEFAULT_GPU
    seen.name = "NVIDIA H20"
    assert runtime.devices.gpu_of(1).identity == "NVIDIA H20|9.0|132"
