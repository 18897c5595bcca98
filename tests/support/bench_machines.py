"""A machine with a GPU that is not there, for `tuner bench`: scripted compiler and worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_compiler import FakeCompiler, FakeWorker

from tuner.bench.comparison import ComparisonRun, RowTask
from tuner.bench.results import Results
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Clocks, Environment, Measurement, Regime, Status
from tuner.problem import AttentionProblem, Problem
from tuner.runners.local import LocalRunner
from tuner.runners.pool import WorkerPool
from tuner.selection.reader import Entry

PROBLEM = AttentionProblem.parse("H=8,S=384,D=64")
CAUSAL = replace(PROBLEM, is_causal=True)
WARM, COLD = Regime("stream", "warm"), Regime("stream", "cold")
PEERS = ("cudnn", "flash3", "flash3_splits")
OWN = family("fused_attention").space(PROBLEM, DEFAULT_GPU)
OWN_CAUSAL = family("fused_attention").space(CAUSAL, DEFAULT_GPU)[0]
Us = Callable[[Config], float]


class RefusingCompiler(FakeCompiler):
    """Has everything at once, but for templates that it refuses."""

    refused = ""

    def error(self, spec: KernelSpec) -> Exception | None:
        if self.refused and spec.template.startswith(self.refused):
            return CompileError("nvcc refused", command="nvcc", log="")
        return None


class TimingWorker(FakeWorker):
    """Times by rule: peers 20 us, own kernels 10 us and up by their place in `OWN`."""

    def __init__(self) -> None:
        super().__init__()
        self.us: Us = lambda config: (
            20.0 if "kernel" in config.params else 10.0 + [*OWN, config].index(config) % len(OWN)
        )
        self.failing: dict[str, Status] = {}
        self.before: Callable[[Ask], None] = lambda ask: None

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        self.before(ask)
        return super().measure(ask)

    def outcome(self, config: Config, ask: Ask) -> CandidateOutcome:
        status = self.failing.get(config.get("kernel", config.digest))
        if status is not None:
            return CandidateOutcome(status, log="said why\nand more")
        us = self.us(config)
        return CandidateOutcome(
            Status.OK, us, us / 100, ask.rounds, (), 3e-4, 4096, Clocks(1900, power_w=600.0)
        )


class Machines:
    """Stands for `Runners` on a machine with a GPU."""

    gpu = DEFAULT_GPU

    def __init__(self, *_: Any) -> None:
        self.made, self.worker = RefusingCompiler(), TimingWorker()
        self.runners: dict[str, LocalRunner] = {}

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compiler(self) -> Any:
        return self.made

    def of(self, problem: Problem, regime: Regime) -> LocalRunner:
        parts: Any = (self.made, self.worker)
        if str(regime) not in self.runners:
            self.runners[str(regime)] = LocalRunner(
                0, regime, parts[0], gpu=DEFAULT_GPU, pool=WorkerPool([parts[1]])
            )
        return self.runners[str(regime)]


@pytest.fixture
def fake_machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.setattr(device, "environment", lambda index: Environment({"driver": "580"}))
    return Machines()


def measured(config: Config, us: float, problem: Problem = PROBLEM, **but: Any) -> Measurement:
    base = Measurement(
        problem, config, DEFAULT_GPU, WARM, Status.OK, latency_us=us, std_us=0.01, is_final=True
    )
    return base.but(**but)


def entry(*configs: Config, problem: Problem = PROBLEM, **but: Any) -> Entry:
    return Entry.of([measured(c, 10.0 + i, problem, **but) for i, c in enumerate(configs)])


def task(problem: Problem = PROBLEM, regime: Regime = WARM, rounds: int = 20) -> RowTask:
    return RowTask("toy", problem, regime, rounds, PEERS)


def compare(machines: Machines, *tasks: RowTask, entries: Sequence[Entry] = (), **more: Any) -> Any:
    saved: list[Results] = []
    notes: list[str] = []
    made = ComparisonRun(tasks, machines, entries, own=more.pop("own", 3), note=notes.append)
    return made.run(saved.append, **more), saved, notes
