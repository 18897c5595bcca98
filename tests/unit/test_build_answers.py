"""`tuner build --model`, `--problems` and untuned shapes, with a compiler that is not there."""

from __future__ import annotations

import json
import os
import time
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from model_configs import LLAMA
from named_artifacts import STATE, TOOLS, Compiler

from tuner.base import limits
from tuner.cli import aot, main
from tuner.cli import build as command
from tuner.compile import compiler, toolchain
from tuner.compile.artifacts import ArtifactCache
from tuner.families.base import KernelSpec
from tuner.hardware import GPUS
from tuner.problem import GemmProblem, Problem, written
from tuner.problem.steps import steps
from tuner.selection.answering import ModelAnswers, answering, needed
from tuner.selection.kernel_list import KernelList
from tuner.selection.kernels import path_of, shipped_kernels
from tuner.selection.reader import lookup

H200 = GPUS["H200"]
DECIDED = GemmProblem.parse("M=1,N=4096,K=4096,dtype=bf16")
SELECTED = GemmProblem.parse("M=1,N=1024,K=4096,dtype=bf16")
PYTORCHS = "op=gemm,M=64,N=4096,K=4096,dtype=bf16"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "Compiler", Compiler)
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: TOOLS)
    monkeypatch.setattr(command, "_beside", lambda library, artifacts: "there already")
    monkeypatch.setattr(aot, "PROGRESS_S", 0.0)
    for name, value in STATE.items():
        monkeypatch.setattr(Compiler, name, copy(value))


def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def listed(tmp_path: Path, *entries: str) -> str:
    path = tmp_path / "problems.json"
    path.write_text(json.dumps(entries))
    return str(path)


def text(problem: Problem) -> str:
    return f"op={problem.op},{problem.label()}"


def written_list() -> KernelList:
    return KernelList.read(path_of(TOOLS.nvcc_version, "9.0"))


def test_a_model_s_kernels_are_built_in_the_order_of_their_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", "--model", model(tmp_path), "--gpu", "H200"]) == 0
    rows = ModelAnswers.of(steps(written.architecture(LLAMA)), H200).rows()
    shares = dict(needed(rows))
    assert [spec.key for spec in Compiler.built] == [spec.key for spec in shares]
    said = capsys.readouterr().err
    own = 100 * sum(row.share for row in rows if row.answer.config is not None)
    assert (
        f"own kernels answer {sum(r.answer.config is not None for r in rows)}, {own:.0f} %" in said
    )
    assert f"{len(shares)} of {len(shares)} kernels for " in said
    assert "the runtime's dispatcher: there already" in said


def test_an_engine_s_kernels_are_those_of_its_cache(tmp_path: Path) -> None:
    sizes = ["--engine", "vllm", "--tensor-parallel", "2", "--batch", "1,64", "--seqlen", "2048"]
    assert main(["build", "--model", model(tmp_path), *sizes, "--gpu", "H200"]) == 0
    assert any(spec.variables.get("is_paged") for spec in Compiler.built)
    assert len(Compiler.built) < 20


def test_kernels_of_the_portfolio_enter_the_list_and_decided_ones_the_store(
    tmp_path: Path,
) -> None:
    entries = listed(tmp_path, text(DECIDED), text(SELECTED))
    assert main(["build", "--problems", entries, "--gpu", "H200"]) == 0
    (selected,) = answering(SELECTED, H200).kernels.values()
    known = written_list()
    assert [kernel.spec for kernel in known.kernels.values()] == [selected.key]
    decided = lookup(DECIDED, gpu=H200)
    artifacts = decided.entry.winner.artifacts
    kernels = answering(DECIDED, H200).kernels
    machine = Compiler(TOOLS, ArtifactCache(), jobs=None, capability="9.0")
    assert dict(artifacts) == {name: machine.key(spec) for name, spec in kernels.items()}


def test_an_untuned_shape_enters_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", "gemm", "--shape", SELECTED.label(), "--gpu", "H200"]
    assert main(["build", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    [(seconds, answered)] = result.pop("course")
    assert result == {"built": 1, "failed": []} and seconds >= 0 and answered == 1.0
    assert len(written_list().kernels) == 1


def test_an_entry_counts_as_often_as_it_is_listed(tmp_path: Path) -> None:
    other = GemmProblem.parse("M=16,N=128256,K=4096,dtype=bf16")
    times = {one: answering(one, H200).us or 0 for one in (SELECTED, other)}
    slower, faster = sorted(times, key=lambda one: -times[one])
    often = 2 + int(times[slower] / times[faster])
    for entries, first in (([faster, slower], slower), ([slower, *[faster] * often], faster)):
        Compiler.built.clear()
        names = listed(tmp_path, *map(text, entries))
        assert main(["build", "--problems", names, "--gpu", "H200"]) == 0
        assert Compiler.built[0] in answering(first, H200).kernels.values()


def test_the_same_command_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = listed(tmp_path, text(DECIDED), text(SELECTED))
    assert main(["build", "--problems", entries, "--gpu", "H200"]) == 0
    capsys.readouterr()
    assert main(["build", "--problems", entries, "--gpu", "H200", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert "2 of them compiled already" in captured.err
    assert captured.out.count("compiled  ") == 2
    assert captured.out.splitlines()[2:] == ["missing   the runtime's dispatcher"]


def test_a_kernel_that_does_not_compile_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiler, "refuses", "bfloat16")
    entries = listed(tmp_path, text(SELECTED))
    assert main(["build", "--problems", entries, "--gpu", "H200", "--json"]) == 1
    captured = capsys.readouterr()
    failed = [f"gemv for {SELECTED.label()}"]
    assert json.loads(captured.out) == {"built": 0, "failed": failed, "course": []}
    assert "1 kernel failed: nvcc refused" in captured.err


def test_kernels_without_a_proof_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = listed(tmp_path, text(SELECTED))
    assert main(["build", "--problems", entries, "--gpu", "H200"]) == 0
    (spec,) = answering(SELECTED, H200).kernels.values()
    proofs = [one for one in shipped_kernels() if one.spec == spec.key]
    assert proofs and proofs[0].artifact != written_list().kernels[spec.key].artifact
    assert "0 of 1 that need a proof have one (tuner prove checks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--problems", "nowhere.json"], 2, "nowhere.json"),
        (["--problems", "{pytorchs}"], 1, "nothing to build: cublas answers M=64"),
        (["--op", "gemm", "--shape", "M=64,N=6144,K=4096,dtype=bf16"], 1, "nothing to build"),
        (["--problems", "{pytorchs}", "--only", "x"], 2, "--only is not for stored winners"),
        (["--problems", "{pytorchs}", "--engine", "vllm"], 2, "--engine is for --model"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"pytorchs": listed(tmp_path, PYTORCHS)}
    arguments = [one.format(**names) for one in arguments]
    assert main(["build", *arguments, "--gpu", "H200"]) == code
    assert message in capsys.readouterr().err


def test_in_the_background_it_leaves_half_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs_of: list[int | None] = []
    niced: list[int] = []

    class Noted(Compiler):
        def __init__(self, *args: Any, jobs: int | None, **options: Any) -> None:
            jobs_of.append(jobs)
            super().__init__(*args, jobs=jobs, **options)

    monkeypatch.setattr(compiler, "Compiler", Noted)
    monkeypatch.setattr(limits, "cpu_count", lambda: 9)
    monkeypatch.setattr(os, "nice", niced.append)
    entries = listed(tmp_path, text(SELECTED))
    assert main(["build", "--problems", entries, "--gpu", "H200", "--background"]) == 0
    assert jobs_of == [4] and niced[0] > 0


def test_progress_tells_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = list(answering(SELECTED, H200).kernels.values())
    shares = {**dict.fromkeys(kernels, 0.2), KernelSpec("toy.cu.j2", {}): 0.2}
    progress = aot._Progress(4, 1, shares, 100.0)
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    progress.tell(kernels, 2, 0)
    said = capsys.readouterr().err
    assert said == "2 of 4 kernels for 50 % of own kernels' time, 10 s, about 20 s left\n"
