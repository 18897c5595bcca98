"""Shared by the tests of controllers: a family of toys, and replays of it in place of GPUs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

from tuner.config import Config
from tuner.families.base import Domain, Family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import Problem
from tuner.runners.choose import Machine
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.store import Store
from tuner.tuning.job import JobOptions
from tuner.tuning.sweep import SweepOptions

REGIME = Regime("stream", "cold")
ENVIRONMENT = Environment({"driver": "1"})
OPTIONS = JobOptions(SweepOptions(trials=8, sampler="tpe")).to_json()


class Toy(Family):
    """Twelve kernels of two candidates each; the larger, the faster."""

    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})
    domains: ClassVar[Mapping[str, Domain]] = {
        "m": (16, 32, 64, 128),
        "n": (64, 128, 256),
        "raster": ("m", "n"),
    }

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"m": m, "n": n, "raster": raster})
            for m, n, raster in product((16, 32, 64, 128), (64, 128, 256), "mn")
        ]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10.0


def catalogue(op: str) -> Mapping[str, Family]:
    return {"toy": Toy()} if op == "gemm" else {}


def recording(problem: Problem) -> Recording:
    measured = tuple(
        Measurement(
            problem,
            config,
            DEFAULT_GPU,
            REGIME,
            Status.OK,
            environment=ENVIRONMENT,
            latency_us=1e5 / config["m"] / config["n"] + (config["raster"] == "m"),
            std_us=0.001,
            rounds=7,
        )
        for config in Toy().space(problem, DEFAULT_GPU)
    )
    return Recording(problem, DEFAULT_GPU, REGIME, ENVIRONMENT, measured)


class SlowRunner(ReplayRunner):
    """Takes a while for each group, and tells when it has one."""

    def __init__(self, problem: Problem, after: Callable[[Problem], None], pause_s: float) -> None:
        super().__init__(recording(problem))
        self._problem, self._after, self._pause_s = problem, after, pause_s

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        time.sleep(self._pause_s)
        self._after(self._problem)
        return super().collect(timeout_s)


class Replays:
    """Stands in for `Runners`: a recording of every problem."""

    gpu = DEFAULT_GPU

    def __init__(
        self, after: Callable[[Problem], None] = lambda problem: None, pause_s: float = 0.0
    ) -> None:
        self.after, self.pause_s = after, pause_s
        self.closed = 0

    def __call__(self, machine: Machine, note: Callable[[str], None]) -> Any:
        return self

    def of(self, problem: Problem, regime: Regime) -> ReplayRunner:
        return SlowRunner(problem, self.after, self.pause_s)

    def __exit__(self, *exc: object) -> None:
        self.closed += 1


def states(store: Store, job: str) -> list[str]:
    return [task.state for task in store.jobs.tasks(job)]


def repeated(store: Store, final: bool = False) -> list[str]:
    """Trials that were stored more than once."""
    trials = Counter(f"{m.problem.key} {m.config.digest}" for m in store.measurements(final=final))
    return [trial for trial, count in trials.items() if count > 1]
