"""Replaying recorded sweeps: nothing of a problem's own results is known, and regret is right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from shipped_recordings import FILES

from benchmarks import search
from tuner.errors import ConfigError
from tuner.families.base import group_by_kernels
from tuner.problem import GemmProblem
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.search.fits import cost_fit as cost

pytest.importorskip("scipy", reason="fits need scipy")

FILE = next(f for f in FILES if f.name.startswith("gemm-M8192_N8192_K8192_dtypefp16-"))


def short(part: Recording, every: int) -> Recording:
    """Every n-th quick measurement, without deviation."""
    quick = [m for m in part.measurements if not m.is_final and m.config.family == "gemm"]
    return replace(part, measurements=tuple(m.but(std_us=0.0) for m in quick[::every]), stages=())


def at(part: Recording, size: int, factor: float) -> Recording:
    """The same sweep as if of another problem, all times `factor` as long."""
    problem = GemmProblem(size, size, size)
    return replace(
        part,
        problem=problem,
        measurements=tuple(
            m.but(
                problem=problem, latency_us=None if m.latency_us is None else factor * m.latency_us
            )
            for m in part.measurements
        ),
    )


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    part = short(recording.read(FILE), 12)
    return [part, at(part, 4096, 0.13)]


@pytest.fixture
def cases(recordings: list[Recording], monkeypatch: pytest.MonkeyPatch) -> list[search.Case]:
    monkeypatch.setattr(cost, "STEPS", 2)
    return search.cases(recordings)


def test_a_problem_knows_the_others_alone(
    cases: list[search.Case], recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [case.problem for case in cases] == [one.problem for one in recordings]
    for case in cases:
        assert case.history
        assert all(m.problem != case.problem for m in case.history)
    changed = [at(recordings[0], 8192, 7.0), recordings[1]]
    again = search.cases(changed)[0]
    assert again.families[0].constants == cases[0].families[0].constants
    assert again.history == cases[0].history


def test_narrow_recordings_are_learnt_from_alone(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "STEPS", 2)
    wide, other = recordings
    narrow = replace(other, measurements=other.measurements[:2])
    (case,) = search.cases([wide, narrow], least_groups=3)
    assert case.problem == wide.problem
    assert {m.problem for m in case.history} == {narrow.problem}


@pytest.mark.parametrize("method", ["model", "cost", "random", "tpe"])
def test_regret_falls_to_nothing(cases: list[search.Case], method: str) -> None:
    case = cases[0]
    regrets = search.replay(case, method, seed=1).regrets
    assert len(regrets) == case.groups == len(group_by_kernels(case.families[0], case.recorded))
    assert regrets == sorted(regrets, reverse=True), "without noise the leader only improves"
    assert regrets[-1] == 0


def test_seeds_decide_and_nothing_else(cases: list[search.Case]) -> None:
    one, same, other = (search.replay(cases[0], "random", seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_several_in_flight_know_less_but_end_equally(cases: list[search.Case]) -> None:
    regrets = search.replay(cases[0], "model", 0, search.Pace(in_flight=8)).regrets
    assert len(regrets) == cases[0].groups
    assert regrets[-1] == 0


def test_noise_misleads_the_leader_but_not_the_judge(cases: list[search.Case]) -> None:
    noisy = {
        c: m.but(std_us=None if m.latency_us is None else 0.09 * m.latency_us)
        for c, m in cases[0].recorded.items()
    }
    finals = {
        search.replay(replace(cases[0], recorded=noisy), "random", seed).regrets[-1]
        for seed in range(5)
    }
    times = [m.latency_us / cases[0].best_us - 1 for m in noisy.values() if m.latency_us]
    assert max(finals) > 0
    assert all(any(final == pytest.approx(time) for time in times) for final in finals)


def test_an_interrupted_round_is_no_noise_of_the_median(cases: list[search.Case]) -> None:
    timed = next(m for m in cases[0].recorded.values() if m.latency_us)
    interrupted = timed.but(std_us=7 * (timed.latency_us or 0.0))
    assert all(search.timed_again(interrupted, random.Random(n)) == interrupted for n in range(9))


def test_summary_of_runs() -> None:
    runs = [search.Run(r, 9) for r in ([0.5, 0.1], [0.4, 0.2], [0.3, 0.3])]
    found = search.summarise(runs)
    one, forty = found["regret"]["1"], found["regret"]["40"]
    assert one == {"runs": [0.5, 0.4, 0.3], "median": 0.4, "p90": 0.5, "worst": 0.5}
    assert forty == {"runs": [0.1, 0.2, 0.3], "median": 0.2, "p90": 0.3, "worst": 0.3}
    assert (found["compiled"], found["timed"]) == (2, 9)


def test_the_summary_is_over_every_run_of_the_wide_recordings() -> None:
    def case(groups: int, *regrets: float) -> dict[str, object]:
        found = search.summarise([search.Run([regret], 1) for regret in regrets])
        return {"groups": groups, "samplers": {"cost": found}}

    cases = {
        "gemm a": case(100, 0.1, 0.3),
        "attention b": case(100, 0.2, 0.6),
        "gemm c": case(9, 9),
    }
    found = search.summary({"cases": cases}, ["cost", "random"])
    assert set(found) == {search.TOGETHER, "gemm", "attention"}
    assert set(found["gemm"]) == {"cost"}, "random was not run"
    every = found[search.TOGETHER]["cost"]["8"]
    assert every["recordings"] == 2
    assert (every["median"], every["p90"]) == (pytest.approx(0.25), 0.6)
    assert every["worst_median"] == pytest.approx(0.4)


def test_a_sampler_whose_package_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuner.search.study.importlib.util.find_spec", lambda name: None)
    assert search._methods(None) == [m for m in search.METHODS if m not in ("gp", "cmaes")]
    said = capsys.readouterr().err.splitlines()
    assert [line.startswith("left out: sampler=") and "pip install" in line for line in said] == [
        True,
        True,
    ]
    with pytest.raises(ConfigError, match=r"sampler=cmaes needs cmaes: .*pip install cmaes"):
        search._methods("model,cmaes")


def test_the_final_pass_sees_through_the_noise(cases: list[search.Case]) -> None:
    noisy = {
        c: m.but(std_us=None if m.latency_us is None else 0.09 * m.latency_us)
        for c, m in cases[0].recorded.items()
    }
    case = replace(cases[0], recorded=noisy, prepared={})
    runs = [search.replay(case, "model", seed) for seed in range(10)]
    assert all(run.winner <= run.regrets[-1] for run in runs)
    assert sum(run.winner for run in runs) < sum(run.regrets[-1] for run in runs)


def test_a_replay_leaves_nothing_for_the_next(cases: list[search.Case]) -> None:
    first = search.replay(cases[0], "model", 3)
    search.replay(cases[0], "model", 4)
    assert search.replay(cases[0], "model", 3) == first


def test_the_command_writes_resumes_and_refuses(
    tmp_path: Path,
    recordings: list[Recording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cost, "STEPS", 2)
    folder, out = tmp_path / "recordings", tmp_path / "out.json"
    folder.mkdir()
    for number, one in enumerate(recordings):
        recording.write(folder / f"{number}{recording.SUFFIX}", one)
    arguments = ["--recordings", str(folder), "--seeds", "2", "--jobs", "1", "--json", str(out)]
    assert search.main([*arguments, "--samplers", "cost"]) == 0
    first = json.loads(out.read_text())
    assert {tuple(case["samplers"]) for case in first["cases"].values()} == {("cost",)}
    capsys.readouterr()
    assert search.main([*arguments, "--samplers", "cost,random", "--resume"]) == 0
    said = capsys.readouterr()
    assert "cost: gemm" not in said.err and "random: gemm" in said.err
    assert "random" in said.out
    second = json.loads(out.read_text())
    for label, case in second["cases"].items():
        assert set(case["samplers"]) == {"cost", "random"}
        assert case["samplers"]["cost"] == first["cases"][label]["samplers"]["cost"]
    with pytest.raises(ConfigError, match="of other recordings or settings"):
        search.main([*arguments[:2], "--seeds", "3", *arguments[4:], "--resume"])
    with pytest.raises(ConfigError, match=r"sampler=cma is not known \(allowed: model, "):
        search.main([*arguments, "--samplers", "cma"])
    with pytest.raises(ConfigError, match="holds no recording"):
        search.main(["--recordings", str(tmp_path)])
