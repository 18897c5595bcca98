"""Surveys: what is drawn, that it is measured once and kept at once, and how one ends early."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from shipped_recordings import FILES

from tuner import cli
from tuner.base import resources
from tuner.cli import main
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, ConfigError
from tuner.families import families
from tuner.families.base import group_by_kernels
from tuner.families.by_operation import domain_of
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measure.gate import REFERENCE
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import Problem
from tuner.runners import recording, recording_archive
from tuner.runners.choose import Runners
from tuner.runners.replay import ReplayRunner
from tuner.search.timed import kernel_of
from tuner.selection.portfolio import serving, shipped
from tuner.store import open_store
from tuner.tuning import survey
from tuner.tuning.job import parse_problem, read_problems
from tuner.tuning.progress import Interruption
from tuner.tuning.survey import (
    Sample,
    Survey,
    SurveyProgress,
    SurveySize,
    draw,
)
from tuner.tuning.sweep import Sweep

SMALL = parse_problem("op=gemm,M=2048,N=4096,K=4096")
LARGE = parse_problem("op=gemm,M=4096,N=4096,K=4096")
FEW_ROWS = parse_problem("op=gemm,M=8,N=4096,K=4096")
SHORT = parse_problem("S=1024,D=64")
FEW = SurveySize(kernels=10, variants=3)


def drawn(problem: Problem, how: SurveySize = FEW) -> Sample:
    return draw(problem, DEFAULT_GPU, how)


def kernels(sample: Sample) -> set[str]:
    known = families()
    return {
        spec.key
        for group in sample.groups
        for config in group
        for spec in known[config.family].kernels(sample.problem, config).values()
    }


class FakeRunner:
    """Measures what the families estimate; answers the newest request first."""

    def __init__(self, provenance: Provenance = Provenance.MEASURED, driver: str = "1") -> None:
        self.gpu, self.provenance = DEFAULT_GPU, provenance
        self.environment = Environment({"driver": driver})
        self.capacity, self.building = 2, 0
        self.prefetched: list[Config] = []
        self.submitted: list[list[Config]] = []
        self.queue: deque[tuple[Problem, Sequence[Config]]] = deque()
        self.cancelled = threading.Event()

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        self.prefetched += [config for group in groups for config in group]

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.submitted.append(list(group))
        self.queue.append((problem, group))

    def collect(self, timeout_s: float | None = None) -> list[Measurement]:
        problem, group = self.queue.pop()
        return [self.measured(problem, config) for config in group]

    def measured(self, problem: Problem, config: Config) -> Measurement:
        known = families()[config.family]
        time = known.predict_us(problem, config, self.gpu)
        return Measurement(
            problem, config, self.gpu, Regime.default(problem.op), Status.OK,
            environment=self.environment, latency_us=time, std_us=0.0, rounds=7,
        )  # fmt: skip

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.queue.clear()


def surveyed(
    samples: Sequence[Sample], runner: Any, folder: Path, **options: Any
) -> list[SurveyProgress]:
    return Survey(
        samples, lambda p: Regime.default(p.op), lambda p, r: runner, folder, **options
    ).run()


# What is drawn


def test_a_draw_is_repeated_and_a_seed_changes_it() -> None:
    assert drawn(SHORT) == drawn(SHORT)
    assert kernels(drawn(SHORT)) != kernels(drawn(SHORT, replace(FEW, seed=1)))


def test_a_draw_is_distinct_legal_kernels_with_few_variants_each() -> None:
    sample = drawn(LARGE)
    assert len(sample.groups) == len(kernels(sample)) == 10
    assert max(map(len, sample.groups)) == 3
    gemm = families()["gemm"]
    for group in sample.groups:
        assert len(group_by_kernels(gemm, group)) == 1 and len(set(group)) == len(group)
        assert not any(gemm.violations(LARGE, config, DEFAULT_GPU) for config in group)


def test_more_kernels_hold_those_of_fewer() -> None:
    assert kernels(drawn(LARGE)) < kernels(drawn(LARGE, replace(FEW, kernels=20)))


def test_problems_with_one_space_draw_the_same_kernels() -> None:
    spaces = [drawn(p, SurveySize(kernels=10_000)) for p in (SMALL, LARGE)]
    assert kernels(spaces[0]) < kernels(spaces[1]), "these two no longer share their kernels"
    both = kernels(drawn(SMALL, SurveySize(kernels=60))) & kernels(
        drawn(LARGE, SurveySize(kernels=60))
    )
    assert len(both) >= 58


def test_families_share_a_draw_by_their_size() -> None:
    sample = drawn(FEW_ROWS, SurveySize(kernels=30))
    whole = {name: of_family for name, (of_family, _) in sample.spaces.items()}
    assert set(whole) == {"cluster_gemm", "gemm", "gemv"}
    for name, size in whole.items():
        assert sample.drawn(name) == pytest.approx(30 * size / sum(whole.values()), abs=1)
    assert {*drawn(SHORT).spaces} == {"fused_attention"}, "no composite family, no spare one"
    only = drawn(SHORT, SurveySize(kernels=30, families=("fused_attention",)))
    assert only.drawn("fused_attention") == 30


def test_a_small_space_is_drawn_whole() -> None:
    problem = parse_problem("op=softmax,M=64,N=64")
    sample = drawn(problem, SurveySize(families=("softmax",)))
    space = families()["softmax"].space(problem, DEFAULT_GPU)
    assert {config for group in sample.groups for config in group} == set(space)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ConfigError, match="'softmax' does not serve gemm"):
        drawn(LARGE, SurveySize(families=("softmax",)))
    with pytest.raises(ConfigError, match="no family has a kernel to draw for attention"):
        drawn(SHORT, SurveySize(families=("three_kernel_attention",)))
    with pytest.raises(ConfigError, match=r"variants=0 is out of range \(allowed: 1 or more\)"):
        SurveySize(variants=0)


def test_values_count_kernels_of_what_is_compiled_in() -> None:
    values = drawn(LARGE, SurveySize(kernels=40)).values("gemm")
    assert sum(values["tile_n"].values()) == 40 and "raster_order" not in values
    assert all(int(a) < int(b) for a, b in pairwise(values["tile_n"]))


def test_the_shipped_list_is_ten_unlike_problems_and_others_of_their_kernels() -> None:
    problems = read_problems(resources.cache() / "survey.yaml")
    ten = [drawn(problem, SurveySize()) for problem in problems[:10]]
    assert {problem.op for problem in problems[:10]} == {"attention", "gemm", "softmax"}
    assert all(len(s.groups) == min(120, sum(n for n, _ in s.spaces.values())) for s in ten)
    known = set().union(*map(kernels, ten))
    others = set().union(*(kernels(drawn(problem, SurveySize())) for problem in problems[10:]))
    assert len(others - known) < 0.1 * len(others)


# How it is measured


def test_a_survey_measures_each_draw_once_and_writes_recordings(tmp_path: Path) -> None:
    samples, runner = [drawn(LARGE), drawn(SHORT)], FakeRunner()
    steps: list[int] = []
    found = surveyed(samples, runner, tmp_path, changed=lambda p: steps.append(len(p.seen)))
    wanted = [config for sample in samples for group in sample.groups for config in group]
    assert sorted(c.digest for r in runner.submitted for c in r) == sorted(c.digest for c in wanted)
    assert runner.prefetched == wanted, "all compile from the start, in the order of their turns"
    assert [p.is_complete for p in found] == [True, True] and len(steps) == len(runner.submitted)
    for sample, progress in zip(samples, found, strict=True):
        whole = recording.read(progress.path)
        assert progress.path.name == recording_archive.file_name(
            sample.problem, DEFAULT_GPU, whole.regime
        )
        assert whole.environment == runner.environment and whole.kernels() == 10
        assert {m.config for m in whole.measurements} == {c for g in sample.groups for c in g}


def test_a_request_holds_few_kernels_of_one_family(tmp_path: Path) -> None:
    runner = FakeRunner()
    surveyed([drawn(SHORT, SurveySize(kernels=30))], runner, tmp_path)
    assert runner.submitted
    for request in runner.submitted:
        member = families()[request[0].family]
        assert {config.family for config in request} == {member.name}
        assert len(group_by_kernels(member, request)) <= survey.REQUEST_KERNELS


def test_a_survey_goes_on_where_it_stopped(tmp_path: Path) -> None:
    interruption = Interruption()

    def stop(progress: SurveyProgress) -> None:
        interruption.number = signal.SIGINT

    first = FakeRunner()
    [cut] = surveyed([drawn(LARGE)], first, tmp_path, changed=stop, interruption=interruption)
    assert not cut.is_complete and first.cancelled.is_set()
    kept = {m.config for m in recording.read(cut.path).measurements}
    assert kept == set(first.submitted[-1]), "the one request that was answered"
    again = FakeRunner()
    [whole] = surveyed([drawn(LARGE)], again, tmp_path)
    assert whole.is_complete and whole.resumed == len(kept)
    assert kept.isdisjoint(config for request in again.submitted for config in request)


def test_more_variants_extend_a_recording(tmp_path: Path) -> None:
    surveyed([drawn(LARGE, SurveySize(kernels=5, variants=1))], FakeRunner(), tmp_path)
    runner = FakeRunner()
    [progress] = surveyed([drawn(LARGE, SurveySize(kernels=5, variants=2))], runner, tmp_path)
    assert progress.is_complete and progress.resumed == 5
    assert len(recording.read(progress.path).measurements) == progress.sample.candidates


def test_what_a_recording_holds_besides_is_kept(tmp_path: Path) -> None:
    path = next(f for f in FILES if f.name.startswith("attention-B1_H16_S1024_D64_dtypefp16-"))
    old = recording.read(path)
    recording.write(tmp_path / path.name, old)
    runner = FakeRunner()
    runner.environment = old.environment
    [progress] = surveyed([drawn(SHORT)], runner, tmp_path)
    new = recording.read(tmp_path / path.name)
    assert new.stages == old.stages
    assert new.measurements[: len(old.measurements)] == old.measurements
    assert progress.is_complete


def test_another_environment_is_not_mixed_in(tmp_path: Path) -> None:
    surveyed([drawn(LARGE)], FakeRunner(), tmp_path)
    with pytest.raises(ConfigError, match="was measured in another environment"):
        surveyed([drawn(LARGE)], FakeRunner(driver="2"), tmp_path)


def test_a_replay_is_not_recorded_as_measured(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="a survey is measured on a GPU"):
        surveyed([drawn(LARGE)], FakeRunner(Provenance.REPLAYED), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_time_limit_ends_a_wait(tmp_path: Path) -> None:
    class Slow(FakeRunner):
        def collect(self, timeout_s: float | None = None) -> list[Measurement]:
            if len(self.queue) < len(self.submitted):
                assert self.cancelled.wait(60), "nobody woke who waited"
                return []
            return super().collect(timeout_s)

    [progress] = surveyed([drawn(LARGE)], Slow(), tmp_path, time_limit_s=0.2)
    assert 0 < len(progress.seen) < progress.sample.candidates
    assert len(recording.read(progress.path).measurements) == len(progress.seen)
    with pytest.raises(ConfigError, match="time-limit=0 is out of range"):
        surveyed([drawn(LARGE)], FakeRunner(), tmp_path, time_limit_s=0)


def test_a_survey_is_replayed_like_a_sweep(tmp_path: Path) -> None:
    [progress] = surveyed([drawn(LARGE)], FakeRunner(), tmp_path)
    runner = ReplayRunner(recording.read(progress.path))
    with open_store(str(tmp_path / "store.db")) as store:
        outcome = Sweep(LARGE, Regime.default("gemm"), runner, store, _options()).run()
    assert outcome.provenance is Provenance.REPLAYED
    best = min(m.latency_us for m in progress.seen if m.latency_us)
    assert outcome.ranking[0].latency_us == pytest.approx(best, rel=1e-4)


def _options() -> Any:
    from tuner.tuning.sweep import SweepOptions

    return SweepOptions(effort="full", sampler="cost")


# The command


def test_a_survey_is_listed_for_a_gpu_that_is_not_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ["--op", "gemm", "--shape", "M=512,N=512,K=512", "--kernels", "2", "--gpu", "H100"]
    assert main(["survey", "nowhere", *shape, "--list"]) == cli.DONE
    assert "1 problem on NVIDIA H100 80GB HBM3" in capsys.readouterr().out
    assert main(["survey", "nowhere", *shape]) == cli.WRONG_INPUT
    assert "--gpu is for --list and --compile" in capsys.readouterr().err


def test_an_operation_has_its_problems_of_the_shipped_list(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["survey", "nowhere", "--op", "softmax", "--list"]) == cli.DONE
    assert "1 problem on NVIDIA H200" in capsys.readouterr().out
    assert main(["survey", "nowhere", "--op", "swiglu", "--list"]) == cli.WRONG_INPUT
    assert "no problem of swiglu (it has gemm, softmax, attention)" in capsys.readouterr().err


def test_listed_problems_have_the_kernels_that_serve_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = "B=12,H=16,SQ=1,SKV=456,D=128,dtype=bf16"
    gpu = GPUS["H100"]
    portfolio = next(one for one in serving(shipped(), gpu) if one.op == "attention")
    (sample,) = survey.listed([parse_problem(shape)], gpu, portfolio)
    models = portfolio.models_of(domain_of(sample.problem))
    known = {kernel_of(one.config) for one in models.candidates}
    drawn = {kernel_of(config) for group in sample.groups for config in group}
    assert drawn <= known and {c["kernel"] for c in sample.groups[0]} == {
        "cudnn",
        "efficient",
        "flash2",
    }
    chosen = portfolio.select(sample.problem)
    first = kernel_of(next(chosen.ranked())[1])  # served plainly, surveyed as a dependent
    assert Config(first.family, {**first.params, "pdl": True}) in drawn
    options = ["--portfolio", "--shape", shape, "--gpu", "H100", "--list"]
    assert main(["survey", "unused", *options]) == 0
    assert f"{sample.candidates} of {sample.candidates} candidates" in capsys.readouterr().out
    assert main(["survey", "unused", *options, "--only", "D=128"]) == 2
    with pytest.raises(ConfigError, match="no portfolio has kernels"):
        survey.listed([parse_problem("S=1024,D=64,dtype=e4m3")], gpu, portfolio)


def test_the_command_says_what_it_would_draw(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["survey", "nowhere", "--op", "gemm", "--shape", "M=512,N=512,K=512", "--list",
                 "--kernels", "12"]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "gemm M=512,N=512,K=512,dtype=fp16: 12 of " in text and "12 distinct kernels" in text


def test_the_command_measures_and_its_exit_code_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = FakeRunner()
    monkeypatch.setattr(Runners, "of", lambda self, problem, regime: runner)
    monkeypatch.setattr(Runners, "gpu", DEFAULT_GPU)
    shape = ["--op", "gemm", "--shape", "M=512,N=512,K=512"]
    assert main(["survey", str(tmp_path), *shape, "--kernels", "6"]) == cli.DONE
    out = capsys.readouterr().out
    assert "best " in out and str(next(tmp_path.iterdir())) in out
    assert main(["survey", str(tmp_path), *shape, "--kernels", "9", "--time-limit", "1e-9"]) == (
        cli.FAILED
    )
    assert "1 of 1 problems are not complete" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Runners, "devices", ())
    shape = ["--op", "gemm", "--shape", "M=4096,N=4096,K=4096"]
    assert main(["survey", str(tmp_path), *shape]) == cli.FAILED
    said = capsys.readouterr().err
    assert said.endswith("compiles its kernels without one\n")
    assert "distinct kernels" not in said


class FakeCompiler:
    """Builds all but what it is told to leave or to refuse."""

    def __init__(self, refuses: int = 0, leaves: int = 0) -> None:
        self.refuses, self.leaves = refuses, leaves
        self.specs: list[Any] = []

    def submit(self, specs: Sequence[Any], owner: Any = None) -> list[tuple[Any, Future[Any]]]:
        self.specs += specs
        futures: list[tuple[Any, Future[Any]]] = []
        for number, spec in enumerate(specs):
            future: Future[Any] = Future()
            if number < self.refuses:
                future.set_exception(CompileError("refused"))
            elif number < len(specs) - self.leaves:
                future.set_result(None)
            futures.append((spec, future))
        return futures


@pytest.mark.parametrize(
    ("compiler", "code", "said"),
    [
        (FakeCompiler(), cli.DONE, "13 of 13 kernels"),
        (FakeCompiler(refuses=2), cli.FAILED, "2 failed"),
        (FakeCompiler(leaves=3), cli.FAILED, "3 kernels are left; the same command goes on"),
    ],
)
def test_the_command_compiles_without_a_gpu(
    compiler: FakeCompiler,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Runners, "compiler", lambda self: compiler)
    shape = ["--op", "gemm", "--shape", "M=512,N=512,K=512", "--kernels", "12"]
    more = ["--compile", "--time-limit", "0.3"]
    assert main(["survey", str(tmp_path), *shape, *more]) == code
    assert said in capsys.readouterr().err
    assert REFERENCE in compiler.specs and len(set(compiler.specs)) == 13
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_compiling(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Signalled(FakeCompiler):
        def submit(self, specs: Sequence[Any], owner: Any = None) -> list[tuple[Any, Future[Any]]]:
            os.kill(os.getpid(), number)
            return super().submit(specs)

    monkeypatch.setattr(Runners, "compiler", lambda self: Signalled())
    shape = ["--op", "gemm", "--shape", "M=512,N=512,K=512", "--kernels", "12"]
    assert main(["survey", str(tmp_path), *shape, "--compile"]) == code
