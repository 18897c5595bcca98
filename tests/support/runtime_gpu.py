"""Shared by the tests of the runtime on a GPU: a store of their own, compiled kernels, tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from stored import final

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.errors import CompileError
from tuner.families import families_of, family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.problem import AttentionProblem, Problem

torch = pytest.importorskip("torch", reason="torch is not installed")

SHAPES = [
    "S=1024,D=64",
    "B=2,H=4,S=512,D=128,causal=1,dtype=bf16,layout=bshd",
    "B=2,H=8,HKV=2,S=512,D=64",
]
OWN = [
    name
    for name, member in families_of("attention").items()
    if not (member.is_vendor or member.lacks())
]
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture
def fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of the test's own beside the shared artifacts, and a process that knows nothing.

    No portfolio or rule answers, whatever kernels of the shared cache are proven.
    """
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no GPU")
    monkeypatch.setenv("TUNER_STORE", f"sqlite:///{tmp_path / 'store.sqlite'}")
    monkeypatch.delenv("TUNER_DISABLE", raising=False)
    monkeypatch.setattr(part("call.proven_kernels"), "knows", lambda problem, gpu: False)
    forget()
    yield
    forget()


def part(name: str) -> Any:
    """A module of the runtime; the package gives some of these names to functions."""
    return importlib.import_module(f"tuner.runtime.{name}")


def forget() -> None:
    part("call.table").table.forget()
    part("call.counters").stats(reset=True)
    part("call.counters")._counts.said.clear()


@pytest.fixture(params=["python", "dispatcher"])
def call_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Through which of the two ways calls go."""
    dispatch = part("call.dispatch")
    if request.param == "python":
        monkeypatch.setattr(dispatch, "prepare", lambda then: None)
        monkeypatch.setattr(dispatch, "load_built", lambda then: False)
        dispatch.use(None)
    else:
        dispatch.prepare(then=part("call.table").table.renew).join(300)
        if dispatch._module is None:
            dispatch._thread = None
            pytest.skip("no dispatcher: a C++ compiler or Python's headers are missing")
    yield request.param
    if request.param == "python":
        dispatch._thread = None  # the next test loads it again


@pytest.fixture
def served_gpu() -> Gpu:
    return this_gpu()


def this_gpu() -> Gpu:
    return part("call.devices").gpu_of(torch.cuda.current_device())


def inputs(problem: Problem) -> list[Any]:
    made = []
    for operand in problem.operands[:-1]:
        tensor = torch.empty_strided(
            operand.shape, operand.strides, dtype=getattr(torch, operand.dtype), device="cuda"
        )
        made.append(tensor.copy_(torch.randn(operand.shape, device="cuda")))
    return made


def error(out: Any, problem: AttentionProblem, tensors: list[Any], scale: float) -> float:
    """Relative Frobenius error against attention written out in float64."""
    query, key, value = (t.double() for t in tensors)
    group = problem.heads_q // problem.heads_kv
    key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = scale * query @ key.mT
    if problem.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1) @ value
    return float((out.double() - wanted).norm() / wanted.norm())


def store(problem: Problem, gpu: Gpu, config: Config, **changes: Any) -> None:
    """Decide that `config` won; the runtime's next call sees it."""
    from tuner.store import open_store

    facts = {"gpu": gpu, "created_at": "2026-01-01T00:00:00+00:00", **changes}
    base = final(config, 1.0, problem, **facts)
    with open_store() as opened:
        opened.decide(problem, gpu, base.regime, [base], "test")
    part("call.table").table._look_at = 0.0
    part("call.dispatch").serve_until(0.0)


@cache
def promising(problem: Problem, gpu: Gpu, name: str) -> list[Config]:
    """The three most promising candidates of a family, its stages' own best in them."""
    member = family(name)
    if stages := member.stages(problem):
        best: dict[str, list[Config]] = {}
        for stage, part in stages.items():
            own = [f for f in families_of(part.op).values() if not f.is_vendor]
            best[stage] = own[0].seeds(part, gpu, own[0].space(part, gpu), 1)
        member = member.with_stages(best)
    space = member.space(problem, gpu)
    return member.seeds(problem, gpu, space, 3) if space else []


def first_kernels(problem: Problem, name: str) -> list[KernelSpec]:
    """Kernels of a family's most promising config; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    found = promising(problem, this_gpu(), name)[:1]
    return [spec for config in found for spec in family(name).kernels(problem, config).values()]


def compiled(
    compiler: Compiler, problem: Problem, gpu: Gpu, name: str
) -> tuple[Config, dict[str, str]]:
    """The most promising config of a family that compiles, and its artifacts."""
    candidates = promising(problem, gpu, name)
    if not candidates:
        pytest.skip(f"{name} has no candidate for {problem.label()}")
    for config in candidates:
        specs = family(name).kernels(problem, config)
        futures = compiler.submit(list(specs.values()))
        try:
            keys = [future.result().key for _, future in futures]
        except CompileError:
            continue
        return config, dict(zip(specs, keys, strict=True))
    pytest.fail(f"none of {name}'s three most promising candidates compiles")


def grouped(problem: AttentionProblem) -> dict[str, bool]:
    return {"is_causal": problem.is_causal, "enable_gqa": problem.heads_q != problem.heads_kv}
