"""A store, an artifact cache and a GPU that are not there, for the runtime's calls in Python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bare_family import BareFamily

from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.families.base import LSE, SCRATCH, Family, Launch, Ref
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem, Problem
from tuner.selection.reader import Entry, LookupResult

torch = pytest.importorskip("torch", reason="torch is not installed")

SDPA = torch.nn.functional.scaled_dot_product_attention
PATTERN = 0x3C  # every byte of what the fake kernel writes: 1.0586 in fp16
WRITTEN = torch.full((1,), 0x3C3C, dtype=torch.int16).view(torch.float16).item()
PROBLEM = AttentionProblem.parse("S=16,D=8,H=2")
OTHER = AttentionProblem.parse("S=32,D=8,H=2")


def misaligned(tensor: Any) -> Any:
    """The same values, one element past an aligned address."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return room.copy_(tensor)


class Toy(BareFamily):
    """Two kernels: the first writes scratch, the second the output."""

    name = "toy"
    op = "attention"

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config("toy", {"n": 1})]

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


class ToyWithBias(Toy):
    """Its second kernel, which writes the output, reads the bias."""

    def launches(self, problem: Problem, config: Config, scale: float) -> list[Launch]:
        first, second = super().launches(problem, config, scale)
        return [first, replace(second, tensors=(Ref("bias"), *second.tensors))]


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
        self.gpu = DEFAULT_GPU
        self.answer: LookupResult | None = None
        self.answers: Callable[[Problem], LookupResult | None] | None = None
        """Answers every problem, in the place of `answer`."""
        self.problems: list[Problem] = []
        self.launched: list[tuple[Any, ...]] = []
        self.present = {"key-first", "key-second"}
        self.fails: Exception | None = None
        self.broken: Exception | None = None
        self.version = 0
        self.foreign: list[str] = []
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

    def is_decided(self, problem: Problem, path: Path | None) -> bool:
        return self.answer is not None and problem in (PROBLEM, OTHER)

    def decided(self, path: Path | None) -> dict[str, int]:
        return {key: self.version for key in (PROBLEM.key, OTHER.key, *self.foreign)}

    def lookup(
        self,
        problem: Problem,
        *,
        gpu: Gpu,
        path: Path | None,
        with_portfolio: bool,
    ) -> LookupResult | None:
        assert not with_portfolio, "the portfolio is asked with a look at the proofs"
        self.problems.append(problem)
        self.asked.append(path)
        assert gpu == self.gpu
        if self.broken:
            raise self.broken
        if self.answers:
            return self.answers(problem)
        return self.answer if problem in (PROBLEM, OTHER) else None

    def family(self, name: str) -> Any:
        if name == "toy":
            return self.toy
        return SimpleNamespace(
            name=name,
            is_vendor=True,
            is_listed=False,
            vendor_call=lambda problem, config, scale: self.vendor,
        )

    def decide(self, *ranking: Measurement) -> None:
        """As a sweep does, and the runtime's next call looks at the store."""
        self.answer = answer(*ranking) if ranking else None
        self.version += 1
        self.time_passes()

    def time_passes(self) -> None:
        self.runtime.table.table._look_at = 0.0
        self.runtime.dispatch.serve_until(0.0)

    def attention(self, *arguments: Any, **options: Any) -> Any:
        return self.runtime.attention.attention(*arguments, **options)

    def stats(self) -> Any:
        return self.runtime.counters.stats()


@pytest.fixture
def fake_machine(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(on_cpu)
    monkeypatch.setattr(on_cpu.devices, "gpu_of", lambda index: made.gpu)
    monkeypatch.setattr(on_cpu.answers, "lookup", made.lookup)
    monkeypatch.setattr(on_cpu.store_watch, "decided", made.decided)
    monkeypatch.setattr(on_cpu.store_watch, "decided_stamp", made.decided_stamp)
    monkeypatch.setattr(on_cpu.answers, "is_decided", made.is_decided)
    monkeypatch.setattr(on_cpu.answers, "decided_lengths", lambda problem, path: set())
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


def toy_won(problem: Problem) -> LookupResult:
    """The toy won at any problem."""
    return answer(measured(problem=problem))


def decide(on_cpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, *ranking: Measurement) -> None:
    """Have the store decide a ranking's problem, and no other."""

    def lookup(problem: Problem, **_: Any) -> LookupResult | None:
        return answer(*ranking) if problem == ranking[0].problem else None

    monkeypatch.setattr(on_cpu.answers, "lookup", lookup)


def answer(*ranking: Measurement) -> LookupResult:
    return LookupResult(entry=Entry.of(ranking), exact=True, notes=())


def inputs(shape: tuple[int, ...] = (1, 2, 16, 8), dtype: Any = torch.float16) -> list[Any]:
    return [torch.randn(shape).to(dtype) for _ in range(3)]


def was_tuned(out: Any) -> bool:
    return bool((out == WRITTEN).all())


def same(out: Any, wanted: Any) -> bool:
    return bool(torch.equal(out, wanted))
