"""`tuner build` with a compiler that is not there: what it compiles and what it records."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from stored import final

from tuner import settings
from tuner.cli import build
from tuner.compile import compiler, dispatcher, toolchain
from tuner.compile.artifacts import Artifact
from tuner.config import Config
from tuner.errors import CompileError, ConfigError, NoValidConfigError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import AttentionProblem, GemmProblem
from tuner.selection.reader import lookup
from tuner.store import open_store

PROBLEM = GemmProblem.parse("M=512,N=512,K=512")
REGIME = Regime.default("gemm")
VENDOR = Config("vendor_blas", {"kernel": "cublas"})


class FakeCompiler:
    """Names artifacts after their specs; refuses when told to."""

    refuses = False
    capabilities: ClassVar[list[str]] = []

    def __init__(self, *_: Any, capability: str, **__: Any) -> None:
        self.capabilities.append(capability)
        self.closed = False

    def __enter__(self) -> FakeCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def submit(self, specs: Sequence[KernelSpec]) -> list[tuple[KernelSpec, Future[Artifact]]]:
        made = []
        for number, spec in enumerate(specs):
            future: Future[Artifact] = Future()
            if self.refuses:
                future.set_exception(CompileError("nvcc refused", command="nvcc", log="log"))
            else:
                future.set_result(Artifact(f"built-{number}", Path("kernel.so"), "", None, 1.0))
            made.append((spec, future))
        return made


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.cache_dir().mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(compiler, "Compiler", FakeCompiler)
    monkeypatch.setattr(toolchain, "find_toolchain", lambda: None)
    monkeypatch.setattr(FakeCompiler, "refuses", False)
    monkeypatch.setattr(FakeCompiler, "capabilities", [])
    monkeypatch.setattr(dispatcher, "build", lambda artifacts: None)


#: The problem of these tests, beside the shipped ones.
ONLY = ("--op", "gemm", "--shape", "M=512,N=512,K=512")


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    build.register(parser.add_subparsers())
    args = parser.parse_args(["build", *arguments])
    return int(args.run(args))


def own(**changes: Any) -> Measurement:
    config = family("gemm").space(PROBLEM, DEFAULT_GPU)[0]
    facts = {"regime": REGIME, "error": 1e-4, "artifacts": {"gemm": "made-elsewhere"}}
    facts["created_at"] = "2026-01-01T00:00:00+00:00"
    return final(config, 10.0, PROBLEM, **{**facts, **changes})


def decide(*ranking: Measurement) -> None:
    with open_store() as store:
        store.decide(PROBLEM, DEFAULT_GPU, REGIME, ranking, "sweep")


def test_the_best_own_kernel_is_built_behind_a_vendor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    decide(own(config=VENDOR, artifacts={}, latency_us=9.0), own())
    assert run(*ONLY, "--gpu", "H200") == 0
    assert "gemm" in capsys.readouterr().out
    answer = lookup(PROBLEM, gpu=DEFAULT_GPU)
    assert answer is not None and answer.entry.best_own is not None
    kernels = family("gemm").kernels(PROBLEM, answer.entry.best_own.config)
    assert dict(answer.entry.best_own.artifacts) == {n: f"built-{i}" for i, n in enumerate(kernels)}


def test_the_stores_entries_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NoValidConfigError):
        run("--stored")
    decide(own())
    assert run("--stored", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"built": 1, "failed": []}
    for other in (("--portfolio",), ("--problems", "list.yaml")):
        with pytest.raises(ConfigError, match="--stored is for entries"):
            run("--stored", *other)


def test_each_gpu_has_the_compiler_of_its_capability(capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs, whose kernels of one config are not alike: the store holds one build of it."""
    problem = AttentionProblem.parse("S=320,D=64")
    regime, member = Regime.default("attention"), family("triton_attention")
    for name, capability in (("NVIDIA A100", "8.0"), ("NVIDIA L40S", "8.9")):
        gpu = replace(DEFAULT_GPU, name=name, compute_capability=capability)
        config = member.space(problem, gpu)[0]
        found = own(problem=problem, config=config, gpu=gpu, regime=regime, artifacts={})
        with open_store() as store:
            store.decide(problem, gpu, regime, [found], "sweep")
    shape = ("--op", "attention", "--shape", "S=320,D=64")
    assert run(*shape, "--gpu", "NVIDIA L40S") == 0
    assert FakeCompiler.capabilities == ["8.9"]
    FakeCompiler.capabilities.clear()
    capsys.readouterr()
    assert run(*shape, "--json") == 1
    assert FakeCompiler.capabilities == ["8.0", "8.9"]
    said = json.loads(capsys.readouterr().out)
    assert said["built"] == 1
    assert "choose the GPU with --gpu" in said["failed"][0]["reason"]


def test_a_refusal_is_told_and_ends_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(own())
    monkeypatch.setattr(FakeCompiler, "refuses", True)
    assert run(*ONLY, "--json") == 1
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert "nvcc refused" in failed["reason"]
    answer = lookup(PROBLEM, gpu=DEFAULT_GPU)
    assert dict(answer.entry.winner.artifacts) == {"gemm": "made-elsewhere"}


def test_an_illegal_config_is_not_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    config = own().config
    decide(own(config=Config("gemm", {**config.params, "tile_m": 7})))
    assert run(*ONLY, "--json") == 1
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    assert "not legal here" in failed["reason"]


@pytest.mark.parametrize("provenance", [Provenance.PREDICTED, Provenance.REPLAYED])
def test_nothing_unmeasured_is_built(
    provenance: Provenance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.selection.portfolio.shipped", lambda: ())
    decide(own(provenance=provenance))
    with pytest.raises(NoValidConfigError, match="nothing to build"):
        run(*ONLY)


def test_only_the_operation_that_is_named_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    decide(own())
    for op in ("gemm", "swiglu"):  # swiglu ships
        assert run("--op", op) == 0
        told = capsys.readouterr().out.splitlines()
        assert told and all(line.startswith(f"{op} ") for line in told)


@pytest.mark.parametrize(
    "arguments",
    [["--shape", "S=0,D=64"], ["--gpu", "TPU"]],
)
def test_wrong_input_is_named(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"allowed"):
        run(*arguments)


def test_the_runtime_s_dispatcher_is_built_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(artifacts: object) -> None:
        raise CompileError("no C++ compiler")

    with open_store() as store:
        store.decide(PROBLEM, DEFAULT_GPU, REGIME, [own()], "test")
    monkeypatch.setattr(dispatcher, "find", lambda artifacts: None)
    assert run(*ONLY) == 0
    err = capsys.readouterr().err
    assert "dispatcher: compiled" in err
    assert re.search(r"^\d+ configurations? for NVIDIA H\d00[^;]*; compiling \d+ kernel", err)
    monkeypatch.setattr(dispatcher, "build", refuses)
    assert run(*ONLY) == 0, "calls go through Python then"
    assert "dispatcher: not built, no C++ compiler" in capsys.readouterr().err
