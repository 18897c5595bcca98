"""One GPU's job against several's: what is counted and compared."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpus
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem
from tuner.search.family_search import FamilySearch
from tuner.search.study import Search, effort
from tuner.tuning.job import JobResult
from tuner.tuning.outcome import Outcome

PROBLEM = AttentionProblem.parse("S=512,D=64")
CUDNN = Config("vendor_sdpa", {"kernel": "cudnn"})
OWN = [Config("fused_attention", {"tile_n": n}) for n in (64, 128)]


def outcome(us: dict[Config, float]) -> Outcome:
    ranking = [
        Measurement(PROBLEM, config, DEFAULT_GPU, Regime(), Status.OK, latency_us=t, is_final=True)
        for config, t in us.items()
    ]
    return Outcome(
        PROBLEM,
        DEFAULT_GPU,
        Regime(),
        Environment({}),
        Provenance.MEASURED,
        "s",
        tuple(ranking),
        candidates=40,
        kernels=16,
        resumed=0,
        failures=Counter(),
        unavailable={"flash3": "not installed"},
        interrupted=False,
        elapsed_s=1.0,
    )


def test_a_pace_counts_groups_and_baselines() -> None:
    seen = gpus.pace(JobResult([outcome({OWN[0]: 5.0, CUDNN: 9.0})] * 2), wall_s=30.0)
    assert (seen["trials"], seen["trials_per_minute"]) == (36, 72.0)


def test_times_of_the_same_candidates_are_compared() -> None:
    one = gpus.pace(JobResult([outcome({OWN[0]: 5.0, OWN[1]: 6.0, CUDNN: 10.0})]), 40.0)
    two = gpus.pace(JobResult([outcome({OWN[0]: 5.05, CUDNN: 9.7})]), 20.0)
    found = gpus.document(DEFAULT_GPU, (0, 1), one, two)
    assert found["pace_over_one"] == 2.0
    (seen,) = found["problems"].values()
    assert seen == {"same_winner": True, "winner_over_lone": 1.01, "worst_over_lone": 0.97}
    first, second = gpus.text(found).splitlines()
    assert first.startswith("2 of NVIDIA H200: 54.0 trials a minute, one: 27.0, ratio 2.00")
    assert "the same winner" in second and "0.970" in second


def test_a_problem_that_failed_is_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = JobResult(failed=[(PROBLEM, BenchmarkError("nothing passed"))])
    monkeypatch.setattr(gpus, "Job", lambda *_: SimpleNamespace(run=lambda: failed))
    runners: Any = None
    with pytest.raises(BenchmarkError, match=r"S=512.*nothing passed"):
        gpus.swept([PROBLEM], runners, gpus.JobOptions())


def test_what_the_jobs_compile_is_known_ahead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels of the candidates that the search asks for, in whatever way it is told."""
    options = gpus.options_of(3)
    specs = gpus.kernels([PROBLEM], options.sweep)
    member = family("fused_attention")
    search = Search(
        [
            FamilySearch(
                member,
                PROBLEM,
                DEFAULT_GPU,
                member.space(PROBLEM, DEFAULT_GPU),
                seeds=effort(options.sweep.effort).seeds,
                sampler="cost",
                seed=0,
                raced=effort(options.sweep.effort).raced,
            )
        ],
        3,
        effort(options.sweep.effort).seeds,
    )
    asked = [search.ask() or [] for _ in range(3)]
    assert search.ask() is None
    assert specs == [s for group in asked for s in member.kernels(PROBLEM, group[0]).values()]

    compiled: list[KernelSpec] = []

    def compile_all(specs: list[KernelSpec], jobs: int | None) -> int:
        compiled.extend(specs)
        return len(specs)

    monkeypatch.setattr(gpus, "compile_all", compile_all)
    assert gpus.main(["--compile-only", "--trials", "1"]) == 0
    assert f"{len(compiled)} kernels are compiled" in capsys.readouterr().out
    assert len({spec.key for spec in compiled}) == len(compiled) > 3


def test_two_gpus_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "count", lambda: 0)
    monkeypatch.setattr(device, "detect", lambda index=0: None)
    with pytest.raises(BenchmarkError, match="two GPUs of a kind are needed, 0 found"):
        gpus.main([])
    with pytest.raises(ConfigError, match="device=x"):
        gpus.main(["--device", "x"])
