"""`scripts/bench sweeps`: which kernels a winner is timed beside, and what its file keeps."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import repeats, sweeps
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import families
from tuner.families.base import Family
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem

PROBLEM = AttentionProblem.parse("S=512,D=64")
PRODUCT = GemmProblem.parse("M=64,N=4096,K=4096")


class Timed:
    """A runner that has built every fourth kernel; a config's time follows from its digest."""

    gpu = DEFAULT_GPU

    def __init__(self, failed: Config | None = None) -> None:
        self.failed = failed
        self.requests: list[list[Config]] = []
        self.answered = 0
        self.retimed: list[Config] = []

    def compiled(self, problem: Problem, family: Family, space: Sequence[Config]) -> list[Config]:
        return [one for one in space if int(family.compile_digest(one)[:2], 16) % 4 == 0]

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.requests.append(list(group))

    def collect(self) -> list[Measurement]:
        self.answered += 1
        return list(map(self.measured, self.requests[self.answered - 1]))

    def retime(self, problem: Any, finalists: list[Config], rounds: int) -> list[Measurement]:
        self.retimed = list(finalists)
        return [self.measured(one) for one in finalists]

    def measured(self, config: Config) -> Measurement:
        is_ok = config != self.failed
        return Measurement(
            PROBLEM, config, DEFAULT_GPU, Regime(), Status.OK if is_ok else Status.LAUNCH_ERROR,
            latency_us=self.us(config) if is_ok else None,
        )  # fmt: skip

    def us(self, config: Config) -> float:
        return 10.0 + int(config.digest[:4], 16) / 65536


def slow_winner(runner: Timed) -> Config:
    """The slowest built kernel's first variant."""
    groups: Any = sweeps.built(PROBLEM, runner)
    return max((group[0] for group in groups), key=runner.us)


def test_built_kernels_are_grouped_and_their_variants_bounded() -> None:
    runner: Any = Timed()
    groups = sweeps.built(PROBLEM, runner)
    known = families()
    digests = [{known[one.family].compile_digest(one) for one in group} for group in groups]
    assert all(len(found) == 1 for found in digests) and len(groups) > 3
    assert len(set().union(*digests)) == len(groups)
    assert max(map(len, groups)) <= sweeps.VARIANTS
    assert {one.family for group in groups for one in group} == {"fused_attention"}


def test_a_winner_is_judged_by_the_fastest_built_kernel() -> None:
    runner: Any = Timed()
    winner = slow_winner(runner)
    found = sweeps.beside(PROBLEM, winner, lambda: nullcontext(runner))
    fastest = min(map(runner.us, runner.retimed))
    assert winner in runner.retimed and len(runner.retimed) == sweeps.FINALISTS + 1
    assert fastest == min(runner.us(one) for request in runner.requests for one in request)
    assert found["excess"] == round(runner.us(winner) / fastest - 1, 4) > 0
    assert max(map(len, runner.requests)) <= sweeps.quick_pass.REQUEST
    runner = Timed(failed=winner)
    with pytest.raises(BenchmarkError, match="has no time"):
        sweeps.beside(PROBLEM, winner, lambda: nullcontext(runner))


def test_further_passes_are_by_new_processes_and_medians_count() -> None:
    first: Any = Timed()
    winner = slow_winner(first)
    opened: list[Any] = []

    class Other(Timed):
        def us(self, config: Config) -> float:
            return 1.0 if config == winner else 2.0

    def anew() -> Any:
        opened.append(first if not opened else Other())
        return nullcontext(opened[-1])

    found = sweeps.beside(PROBLEM, winner, anew, passes=3)
    assert len(opened) == 3 and [bool(one.requests) for one in opened] == [True, False, False]
    assert found["winner_us"] == 1.0 and found["excess"] == 0.0
    assert all(len(times) == 3 for times in found["passes_us"].values())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls the command with scripted sweeps; its `asked` are the swept problems."""
    asked: list[str] = []
    timed = Timed()
    winner = slow_winner(timed)

    class Given:
        gpu = DEFAULT_GPU

        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Given:
            return self

        def __exit__(self, *_: object) -> None: ...
        def of(self, problem: Problem, regime: Regime) -> Timed:
            return Timed()

    def swept(problem: Problem, seed: int, arguments: Any, **_: Any) -> repeats.Swept:
        asked.append(problem.label())
        if problem == PRODUCT:
            raise BenchmarkError("no own kernel passed")
        facts = {"first_own_s": 2.0, "first_answer_s": 1.0, "compiled": 4, "compile_cpu_s": 60.0}
        return repeats.Swept(winner, 11.0, 9, 40.0, facts)

    monkeypatch.setattr(sweeps, "Runners", Given)
    monkeypatch.setattr(repeats, "swept_anew", swept)
    problems = tmp_path / "problems.json"
    problems.write_text(json.dumps(["S=512,D=64", "op=gemm,M=64,N=4096,K=4096"]))

    def call(*arguments: str) -> int:
        given = ["--problems", str(problems), "--json", str(tmp_path / "rows"), *arguments]
        return sweeps.main(given)

    return SimpleNamespace(call=call, asked=asked, rows=tmp_path / "rows")


def test_a_run_goes_on_where_the_file_stops(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.call() == 1 and len(run.asked) == 2
    assert run.call("--beside") == 1 and len(run.asked) == 2
    lines = [json.loads(line) for line in run.rows.read_text().splitlines()]
    assert [line.get("problem", "").split(" ")[0] for line in lines] == [
        "", "attention", "gemm", "attention",
    ]  # fmt: skip
    assert "beside" not in lines[1] and lines[3]["beside"]["excess"] > 0
    whole = run.rows.read_text()
    run.rows.write_text(whole + '{"problem": "gemm M=6')
    assert run.call("--beside") == 1 and run.rows.read_text() == whole, "a line was cut off"
    capsys.readouterr()
    assert sweeps.main(["--report", str(run.rows)]) == 0
    text = capsys.readouterr().out
    assert "attention       1    40.0     40.0          2.0            15.0" in text
    assert "no own kernel passed" in text and "4 compiled in 60.0 CPU-s" in text
    packed = run.rows.with_suffix(".gz")
    packed.write_bytes(gzip.compress(run.rows.read_bytes()))
    assert sweeps.main(["--report", str(packed)]) == 0 and capsys.readouterr().out == text
    with pytest.raises(ConfigError, match="other sweeps"):
        run.call("--seed", "1")
    run.rows.write_text('{"format": "another"}\n{"key": 1}\n')
    with pytest.raises(ConfigError, match="is not a file of scripts/bench sweeps"):
        sweeps.main(["--report", str(run.rows)])


def test_no_sweep_begins_behind_the_limit(run: Any) -> None:
    run.rows.touch()
    run.call("--time-limit", "-1")
    assert run.asked == [] and len(run.rows.read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match="is needed"):
        sweeps.main([])
