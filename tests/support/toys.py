"""Toy families, synthetic recordings of them, and a replay runner that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import ClassVar

import pytest
from bare_family import BareFamily

from tuner.config import Config
from tuner.families.base import Domain, Family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.search.samplers import Groups, GroupStudy, OrderSampler
from tuner.search.storage import StudyStorage, StudySubject
from tuner.store import Store
from tuner.tuning.progress import Interruption
from tuner.tuning.sweep import Sweep, SweepOptions

GEMM = GemmProblem(512, 512, 512)
ATTENTION = AttentionProblem.parse("S=512,D=64")
REGIME = Regime("stream", "warm")
ENVIRONMENT = Environment({"driver": "1"})


class Toy(BareFamily):
    """One file, one template: all that a family is."""

    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})
    domains: ClassVar[Mapping[str, Domain]] = {
        "m": (64, 128, 256),
        "n": (64, 128, 256),
        "k": (16, 32, 64),
        "raster": ("m", "n"),
    }

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"m": m, "n": n, "k": k, "raster": raster})
            for m, n, k, raster in product((64, 128, 256), (64, 128, 256), (16, 32, 64), "mn")
        ]

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        return config["m"] * 1000

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10.0 + config["m"] / 64


class ToyVendor(BareFamily):
    name = "vendor_toy"
    op = "gemm"
    is_vendor = True
    domains: ClassVar[Mapping[str, Domain]] = {"library": ("blas", "absent")}

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config(self.name, {"library": name}) for name in ("blas", "absent")]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10.0


class Composite(BareFamily):
    """Two stages, both GEMMs, with one parameter of its own."""

    name = "composite"
    op = "attention"
    domains: ClassVar[Mapping[str, Domain]] = {"pdl": (False, True)}
    stage_families: ClassVar[Mapping[str, Family]] = {"qk": Toy(), "pv": Toy()}

    def __init__(self, winners: Mapping[str, Sequence[Config]] | None = None) -> None:
        self.winners = winners or {}

    def stages(self, problem: Problem) -> Mapping[str, Problem]:
        return {"qk": GemmProblem(512, 512, 64), "pv": GemmProblem(512, 64, 512)}

    def with_stages(self, winners: Mapping[str, Sequence[Config]]) -> Family:
        return Composite(winners)

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"pdl": pdl}, {"qk": qk, "pv": pv})
            for qk in self.winners.get("qk", ())
            for pv in self.winners.get("pv", ())
            for pdl in (False, True)
        ]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 20.0


TOYS: dict[str, Family] = {f.name: f for f in (Toy(), ToyVendor(), Composite())}


def catalogue(op: str) -> Mapping[str, Family]:
    return {name: family for name, family in TOYS.items() if family.op == op}


def latency(config: Config) -> float:
    """Fastest at m=128, n=256, k=32, raster n: 10 us."""
    slow = {"m": 128, "n": 256, "k": 32}
    factor = sum(abs(config[name] / best - 1) for name, best in slow.items())
    return round(10 * (1 + 0.5 * factor + 0.05 * (config["raster"] == "m")), 4)


BEST = Config("toy", {"m": 128, "n": 256, "k": 32, "raster": "n"})


def ok(config: Config, us: float, problem: Problem = GEMM, **changes: object) -> Measurement:
    return Measurement(
        problem,
        config,
        DEFAULT_GPU,
        REGIME,
        Status.OK,
        environment=ENVIRONMENT,
        latency_us=us,
        std_us=us / 1000,
        rounds=7,
    ).but(**changes)


def failed(config: Config, status: Status, log: str = "", problem: Problem = GEMM) -> Measurement:
    return ok(config, 1.0, problem, status=status, latency_us=None, std_us=None, rounds=0, log=log)


def vendors(us: float = 11.0, problem: Problem = GEMM) -> list[Measurement]:
    present, absent = ToyVendor().space(problem, DEFAULT_GPU)
    return [
        ok(present, us, problem),
        failed(absent, Status.UNAVAILABLE, "not installed", problem),
    ]


def recording(
    problem: Problem = GEMM,
    change: Callable[[Measurement], Measurement] = lambda m: m,
    vendor_us: float = 11.0,
) -> Recording:
    own = [change(ok(c, latency(c), problem)) for c in Toy().space(problem, DEFAULT_GPU)]
    measured = (*own, *vendors(vendor_us, problem))
    return Recording(problem, DEFAULT_GPU, REGIME, ENVIRONMENT, measured)


class CountingRunner(ReplayRunner):
    """Counts what was submitted; calls `after` once a group is collected."""

    def __init__(
        self, recorded: Recording, after: Callable[[CountingRunner], None] = lambda runner: None
    ) -> None:
        super().__init__(recorded)
        self.submitted: Counter[str] = Counter()
        self.configs: list[Config] = []
        self.prefetched: list[Problem] = []
        self.retimed: list[int] = []
        self.collected = 0
        self.after = after

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.submitted.update(f"{problem.key} {config.digest}" for config in group)
        self.configs += group
        super().submit(problem, group)

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        self.prefetched.append(problem)

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        measured = super().collect(timeout_s)
        self.collected += 1
        self.after(self)
        return measured

    def retime(
        self,
        problem: Problem,
        finalists: Sequence[Config],
        rounds: int,
        timeout_s: float | None = None,
    ) -> list[Measurement]:
        self.retimed.append(rounds)
        return super().retime(problem, finalists, rounds, timeout_s)


class Clock:
    """A clock in place of `time.monotonic`: it stands still until it is told to move on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        stand_in = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("tuner.tuning.budget.time", stand_in)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def sweep(
    runner: ReplayRunner,
    store: Store,
    problem: Problem = GEMM,
    interruption: Interruption | None = None,
    studies: StudyStorage | None = None,
    **options: object,
) -> Sweep:
    chosen = SweepOptions(**{"sampler": "tpe", **options})  # type: ignore[arg-type]
    return Sweep(
        problem,
        REGIME,
        runner,
        store,
        chosen,
        interruption=interruption,
        catalogue=catalogue,
        studies=studies,
    )


SUBJECT = StudySubject(
    GEMM, DEFAULT_GPU, REGIME, Environment({}), Provenance.REPLAYED, "toy", "cost", 0
)


def finished(*keys: str) -> GroupStudy:
    """A search's study whose groups of these keys have a time."""
    groups = Groups({key: {"m": 64 << i} for i, key in enumerate("abc")}, dict.fromkeys("abc"))
    trials = GroupStudy(groups, OrderSampler(groups))
    for key in keys:
        trials.start(key)
        trials.finish(key, 1.0, {"latency_us": 2.5, "variants": 1})
    return trials
