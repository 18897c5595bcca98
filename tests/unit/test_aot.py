"""What is compiled ahead for a list of problems, over toy families that share kernels."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from toys import REGIME, Toy

from tuner.cli import main
from tuner.cli.aot import COLUMNS, compile_aot, wanted_text
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families.base import Family, KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.problem import GemmProblem, Problem
from tuner.runners.choose import Runners
from tuner.store import Store
from tuner.tuning.aot import Wanted, wanted
from tuner.tuning.sweep import SweepOptions

SMALL, LARGE = GemmProblem(64, 64, 64), GemmProblem(4096, 4096, 4096)


class Tiles(Toy):
    """Large tiles for large problems; a small one has none."""

    name = "tiles"
    runtime_parameters = frozenset({"raster"})

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [
            Config(self.name, {"tile": tile, "raster": raster})
            for tile in (16, 32, 64, 128, 256)
            if not isinstance(problem, GemmProblem) or tile <= problem.m
            for raster in "mn"
        ]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        best = 32 if problem == SMALL else 128
        return 10.0 * max(best / config["tile"], config["tile"] / best) ** 0.5

    def kernels(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return {"main": KernelSpec("toy.cu.j2", {"tile": config["tile"]})}

    def scratch_bytes(self, problem: Problem, config: Config) -> int:
        return 0


def catalogue(op: str) -> Mapping[str, Family]:
    return {"tiles": Tiles()} if op == "gemm" else {}


def tiles(store: Store, problems: Sequence[Problem], **more: Any) -> list[int]:
    return [one.config["tile"] for one in found(store, problems, **more)]


def found(store: Store, problems: Sequence[Problem], *, each: int = 2, **more: Any) -> list[Wanted]:
    return wanted(
        problems,
        lambda problem: REGIME,
        DEFAULT_GPU,
        store,
        SweepOptions(),
        each=each,
        catalogue=catalogue,
        **more,
    )


def test_one_problem_wants_its_best_first(store: Store) -> None:
    assert tiles(store, [LARGE], each=1) == [128]
    assert tiles(store, [SMALL], each=1) == [32]
    assert tiles(store, [LARGE], each=3)[0] == 128


def test_what_serves_more_problems_comes_first(store: Store) -> None:
    near = GemmProblem(4096, 4096, 2048)
    first, second, *_ = found(store, [SMALL, LARGE, near])
    assert first.problems == (SMALL, LARGE, near) and first.config["tile"] in (32, 64)
    assert second.config["tile"] == 128 and second.problems == (LARGE, near)
    assert first.kernels == (KernelSpec("toy.cu.j2", {"tile": first.config["tile"]}),)
    assert all(one.worth >= two.worth for one, two in pairwise([first, second]))


def test_no_kernel_is_wanted_twice(store: Store) -> None:
    wants = tiles(store, [SMALL, LARGE], each=5)
    assert len(wants) == len(set(wants))


def test_it_says_how_far_it_is(store: Store) -> None:
    said: list[str] = []
    sets = found(store, [LARGE, SMALL], each=1, note=said.append)
    assert said[:2] == ["the spaces of 1 of 2 problems", "the spaces of 2 of 2 problems"]
    assert said[2] == "sets of kernels chosen for 2 problems: 0"
    assert said[-1] == f"sets of kernels chosen for 2 problems: {len(sets)}"


class FakeCompiler:
    """Has nothing, compiles nothing."""

    def __init__(self) -> None:
        self.asked: set[KernelSpec] = set()
        self.submitted: list[KernelSpec] = []

    def cached(self, spec: KernelSpec) -> None:
        assert spec not in self.asked
        self.asked.add(spec)

    def submit(self, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Any]]:
        self.submitted += specs
        return []

    def close(self, cancel: bool) -> None: ...


def test_each_reason_of_a_failed_compile_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = iter(["a.cu.j2: too large\nmore", "a.cu.j2: too large\nother", "b.cu.j2: wrong", ""])

    def submit(self: object, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Any]]:
        futures: list[tuple[KernelSpec, Any]] = []
        for spec in specs:
            future: Future[None] = Future()
            text = next(texts)
            future.set_exception(CompileError(text)) if text else future.set_result(None)
            futures.append((spec, future))
        return futures

    monkeypatch.setattr(FakeCompiler, "submit", submit)
    specs = [KernelSpec("toy.cu.j2", {"tile": tile}) for tile in range(3)]
    compiler: Any = FakeCompiler()
    assert compile_aot(specs, compiler, None) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "tuner: 2 kernels failed: a.cu.j2: too large",
        "tuner: 1 kernel failed: b.cu.j2: wrong",
    ]


def test_planning_counts_in_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submit(self: object, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Any]]:
        return [(spec, Future()) for spec in specs]  # which nothing ever completes

    monkeypatch.setattr(FakeCompiler, "submit", submit)
    compiler: Any = FakeCompiler()
    began = time.monotonic() - 60
    assert compile_aot([KernelSpec("toy.cu.j2", {})], compiler, 50.0, began) == 1
    assert "2 kernels are left" in capsys.readouterr().err


def test_a_line_about_a_set_of_kernels_has_a_unit_and_fits() -> None:
    config = Config("gemm", {f"parameter_{number}": number for number in range(40)})
    text = wanted_text(3, Wanted(config, (), (LARGE, SMALL), 0.0273))
    label = LARGE.label()
    assert text.startswith(
        f"3: gain 2.7 % over 2 problems, first {label}: {config.digest[:6]} gemm "
    )
    assert text.endswith(" ...") and len(text) <= COLUMNS


@pytest.mark.parametrize("option", ["--list", "--compile"])
@pytest.mark.parametrize("other", ["--compiled-only", "--replay"])
def test_what_contradicts_it_is_refused(
    option: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--shape", "S=512,D=64", option, other]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tuner: {other} contradicts {option}: ")


@pytest.mark.parametrize("option", ["--list", "--compile"])
def test_the_command(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler = FakeCompiler()
    monkeypatch.setattr(Runners, "compiler", lambda self: compiler)
    problems = tmp_path / "problems.yaml"
    problems.write_text("- op=softmax,M=64,N=512\n- op=softmax,M=4096,N=512\n")
    more = ["--trials", "2", "--store", f"{tmp_path}/store.sqlite"]
    for name in ("FIRST_PROGRESS_S", "PROGRESS_S"):
        monkeypatch.setattr(f"tuner.cli.aot.{name}", 0.0)
    assert main(["sweep", "--problems", str(problems), *more, option]) == 0
    said = capsys.readouterr().err
    first, second, *_ = said.splitlines()
    assert first == "planning 2 problems on NVIDIA H200; nothing is measured"
    assert second.startswith("the spaces of 1 of 2 problems, ")
    assert re.search(r"^1: gain [0-9.]+ % over 2 problems, first M=64,N=512", said, re.MULTILINE)
    assert "2 problems on NVIDIA H200: " in said
    assert max(map(len, said.splitlines())) <= 120
    if option == "--list":
        assert not compiler.submitted
    else:  # those and the gate's
        assert f"{len(compiler.submitted) - 1} kernels, 0 of them compiled already" in said
