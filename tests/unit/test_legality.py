"""The legality command: what it draws, how it evaluates, and the shares it reports."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import pytest
from bare_family import BareFamily

from tuner import families as families_room
from tuner.cli import legality, main
from tuner.cli.legality import (
    REJECTED_TIMEOUT_S,
    SHAPES,
    SampledConfig,
    draw,
    evaluate,
    summary,
    without_folders,
)
from tuner.compile import compiler as compiler_room
from tuner.config import Config, Value
from tuner.families import families
from tuner.families.base import Domain
from tuner.hardware import DEFAULT_GPU
from tuner.measure import device
from tuner.measurement import Measurement, Regime, Resources, Status
from tuner.problem import PROBLEMS, GemmProblem, Problem
from tuner.runners import local

PROBLEM = GemmProblem(m=64, n=64, k=64)
REGIME = Regime("stream", "cold")
CLEAN, SPILLING = Resources(168, 0, 0, 0), Resources(255, 64, 0, 64)


class Toy(BareFamily):
    """Legal where the tile is at most `limit`; serves square problems alone."""

    name, op = "toy", "gemm"
    domains: ClassVar[Mapping[str, Domain]] = {"tile": range(200)}
    draws: ClassVar[Mapping[str, tuple[Value, ...]]] = {"tile": ()}

    def __init__(self, tiles: int = 200, limit: int = 120) -> None:
        self.tiles, self.limit = tiles, limit

    def tried(self, name: str) -> Sequence[Value]:
        return range(self.tiles)

    def conflicts(self, problem: Any, config: Config, gpu: Any) -> list[str]:
        return ["too large"] if config["tile"] > self.limit else []

    def space(self, problem: Any, gpu: Any) -> list[Config]:
        return [config(0)] if problem.m == problem.n else []


def config(tile: int) -> Config:
    return Config("toy", {"tile": tile})


def seen(
    tile: int, status: Status = Status.OK, used: Resources = CLEAN, problem: Problem = PROBLEM
) -> Measurement:
    return Measurement(
        problem,
        config(tile),
        DEFAULT_GPU,
        REGIME,
        status,
        latency_us=10.0 if status is Status.OK else None,
        resources={"other": CLEAN, "main": used} if status is Status.OK else {},
    )


class FakeRunner:
    """Answers the newest group first, never with more in flight than its capacity."""

    def __init__(self, capacity: int = 3) -> None:
        self.capacity = capacity
        self.pending: list[tuple[Problem, Config]] = []
        self.most = self.submitted = 0
        self.closed = False

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self.pending += [(problem, member) for member in group]
        self.submitted += len(group)
        self.most = max(self.most, len(self.pending))

    def collect(self) -> list[Measurement]:
        problem, member = self.pending.pop()
        status = Status.COMPILE_ERROR if member["tile"] > 150 else Status.OK
        return [seen(member["tile"], status, problem=problem)]

    def close(self) -> None:
        self.closed = True


def test_shapes_are_problems_of_their_operation() -> None:
    assert set(SHAPES) == set(PROBLEMS)
    for op, texts in SHAPES.items():
        assert len({PROBLEMS[op].parse(text).key for text in texts}) == len(texts)


def test_a_draw_is_distinct_and_sorted_by_the_predicate() -> None:
    toy = Toy()
    legal, rejected = draw(toy, DEFAULT_GPU, 60, 40, random.Random(0))
    assert (len(legal), len(rejected)) == (60, 40)
    assert len({(d.problem.key, d.config.digest) for d in legal + rejected}) == 100
    for found in legal + rejected:
        assert list(found.violations) == toy.violations(found.problem, found.config, DEFAULT_GPU)
        assert toy.space(found.problem, DEFAULT_GPU), "a problem that the family does not serve"
    assert not any(d.violations for d in legal) and all(d.violations for d in rejected)
    assert len({d.problem.key for d in legal}) > 1


def test_a_seed_repeats_its_draws() -> None:
    first, again, other = (
        draw(Toy(), DEFAULT_GPU, 20, 20, random.Random(seed)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_small_space_gives_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legality, "_MAX_DRAWS", 2000)
    problems = [PROBLEMS["gemm"].parse(text) for text in SHAPES["gemm"]]
    served = sum(bool(Toy().space(problem, DEFAULT_GPU)) for problem in problems)
    legal, rejected = draw(Toy(tiles=5, limit=2), DEFAULT_GPU, 100, 100, random.Random(0))
    assert (len(legal), len(rejected)) == (3 * served, 2 * served)


def test_a_family_that_serves_nothing_is_not_drawn_from() -> None:
    class Idle(Toy):
        def space(self, problem: Any, gpu: Any) -> list[Config]:
            return []

    assert draw(Idle(), DEFAULT_GPU, 5, 5, random.Random(0)) == ([], [])


@pytest.mark.parametrize("name", [n for n, f in families().items() if not f.is_vendor])
def test_every_drawn_config_of_a_family_can_be_asked_for_its_kernels(name: str) -> None:
    """Both kinds are found, and the illegal ones too are text and arguments, not exceptions."""
    member = families()[name]
    legal, rejected = draw(member, DEFAULT_GPU, 10, 40, random.Random(3))
    assert (len(legal), len(rejected)) == (10, 40)
    for found in legal + rejected:
        kernels = member.kernels(found.problem, found.config)
        assert {call.kernel for call in member.launches(found.problem, found.config, 1.0)} <= set(
            kernels
        )


def test_every_draw_is_evaluated_once_within_the_capacity() -> None:
    legal, rejected = draw(Toy(), DEFAULT_GPU, 12, 9, random.Random(0))
    runner: Any = FakeRunner(capacity=4)
    outcomes = list(evaluate(runner, legal + rejected))
    assert runner.most == 4
    assert Counter(d for d, _ in outcomes) == Counter(legal + rejected)
    assert all((m.problem, m.config) == (d.problem, d.config) for d, m in outcomes)


def test_an_outcome_is_given_before_the_next_is_waited_for() -> None:
    legal, _ = draw(Toy(), DEFAULT_GPU, 10, 0, random.Random(0))
    runner: Any = FakeRunner(capacity=2)
    next(evaluate(runner, legal))
    assert runner.submitted == 2 and len(runner.pending) == 1


def test_nothing_drawn_is_nothing_evaluated() -> None:
    runner: Any = FakeRunner()
    assert list(evaluate(runner, [])) == []


def outcomes() -> Iterator[tuple[SampledConfig, Measurement]]:
    legal = [seen(0), seen(1), seen(2, used=SPILLING), seen(3, Status.WRONG_RESULT),
             seen(4, Status.COMPILE_ERROR)]  # fmt: skip
    rejected = [seen(200), seen(201, used=SPILLING), seen(202, Status.COMPILE_ERROR),
                seen(203, Status.LAUNCH_ERROR)]  # fmt: skip
    for m in legal:
        yield SampledConfig(PROBLEM, m.config, ()), m
    for m in rejected:
        yield SampledConfig(PROBLEM, m.config, ("too large",)), m


def test_a_summary_counts() -> None:
    assert summary(list(outcomes())) == {
        "legal": 5,
        "compiled": 4,
        "compiled_share": 4 / 5,
        "passed": 3,
        "passed_share": 3 / 4,
        "rejected": 4,
        "rejected_that_work": 2,
        "rejected_that_work_share": 2 / 4,
        "rejected_that_spill": 1,
        "legal_that_spill": 1,
        "legal_statuses": {"ok": 3, "wrong_result": 1, "compile_error": 1},
        "rejected_statuses": {"ok": 2, "compile_error": 1, "launch_error": 1},
    }


def test_a_share_of_nothing_is_unknown() -> None:
    empty = summary([])
    assert {empty[f"{name}_share"] for name in ("compiled", "passed", "rejected_that_work")} == {
        None
    }
    failed = seen(0, Status.COMPILE_ERROR)
    found = summary([(SampledConfig(PROBLEM, failed.config, ()), failed)])
    assert (found["compiled_share"], found["passed_share"]) == (0, None)


def test_loads_of_spilled_registers_count_too() -> None:
    m = seen(0, used=Resources(255, 0, 4, 0))
    assert summary([(SampledConfig(PROBLEM, m.config, ()), m)])["legal_that_spill"] == 1


class FakeCompiler:
    made: list[FakeCompiler]

    def __init__(
        self, tools: Any, cache: Any, jobs: int, batch: int, timeout_s: float, capability: str
    ) -> None:
        self.batch, self.timeout_s, self.ended = batch, timeout_s, False
        self.made.append(self)

    def __enter__(self) -> FakeCompiler:
        return self

    def __exit__(self, *_: type | BaseException | TracebackType | None) -> None:
        self.ended = True


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> list[FakeRunner]:
    """The command on a toy family, without compiler and GPU."""
    made: list[FakeRunner] = []

    def runner(index: int, regime: Regime, compiler: Any) -> FakeRunner:
        made.append(FakeRunner())
        return made[-1]

    FakeCompiler.made = []
    monkeypatch.setattr(device, "detect", lambda index: DEFAULT_GPU)
    monkeypatch.setattr(families_room, "family", lambda name: Toy())
    monkeypatch.setattr(compiler_room, "find_toolchain", lambda: None)
    monkeypatch.setattr(compiler_room, "Compiler", FakeCompiler)
    monkeypatch.setattr(local, "LocalRunner", runner)
    return made


COMMAND = ("legality", "--family", "toy", "--legal", "15", "--rejected", "10", "--output")


def test_the_command_reports(
    runners: list[FakeRunner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr()
    shown, written = json.loads(printed.out), json.loads((tmp_path / "out.json").read_text())
    assert (shown["legal"], shown["rejected"], shown["drawn"]) == (15, 10, 25)
    assert shown["rejected_statuses"].keys() <= {"ok", "compile_error"}
    assert len(written.pop("draws")) == 25 and written == shown
    assert [line.split(":")[0] for line in printed.err.splitlines()] == ["10 of 25", "20 of 25"]
    assert "10 ok" in printed.err.splitlines()[0]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["out.json"]
    assert [r.closed for r in runners] == [True, True]


def test_rejected_kernels_are_built_alone_and_not_for_long(
    runners: list[FakeRunner], tmp_path: Path
) -> None:
    assert main([*COMMAND, str(tmp_path / "out.json")]) == 0
    legal, rejected = FakeCompiler.made
    assert legal.batch > rejected.batch == 1
    assert legal.timeout_s > rejected.timeout_s == REJECTED_TIMEOUT_S == 60
    assert legal.ended and rejected.ended


def test_a_run_that_is_cut_off_keeps_what_it_saw(
    runners: list[FakeRunner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = FakeRunner.collect

    def interrupted(self: FakeRunner) -> list[Measurement]:
        if self.submitted - len(self.pending) == 7:
            raise KeyboardInterrupt
        return collect(self)

    monkeypatch.setattr(FakeRunner, "collect", interrupted)
    assert main([*COMMAND, str(tmp_path / "out.json")]) == 130
    kept = json.loads((tmp_path / "out.json").read_text())
    assert (len(kept["draws"]), kept["legal"], kept["drawn"]) == (7, 7, 25)
    assert runners[0].closed and FakeCompiler.made[0].ended


def test_an_output_that_cannot_be_written_fails_before_anything_is_compiled(
    runners: list[FakeRunner], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, str(tmp_path / "missing" / "out.json")]) == 1
    assert "missing" in capsys.readouterr().err
    assert not runners and not FakeCompiler.made


def test_a_vendor_s_kernels_are_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["legality", "--family", "vendor_blas"]) == 2
    assert "nothing is compiled" in capsys.readouterr().err


def test_a_log_names_files_without_their_folders() -> None:
    said = 'g++ -I/home/me/x-1/include /scratch/a.b/unit.cu: "1 error", 16 of 64 beyond 1/2 + 0.5'
    wanted = 'g++ -Iinclude unit.cu: "1 error", 16 of 64 beyond 1/2 + 0.5'
    assert without_folders(said) == wanted
