"""Several GPUs of a kind: the same bits on each, one sweep over all, heads split over NCCL."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from stored import final

import tuner as package
from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measure import device
from tuner.measurement import Provenance
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.runners.choose import Machine, Runners
from tuner.store import open_store
from tuner.tuning.job import Job, JobOptions
from tuner.tuning.sweep import SweepOptions

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(900)]

WHOLE = "H=16,S=1024,D=64,causal=1"
PRODUCT = GemmProblem.parse("M=512,N=768,K=256")
WORLDS = (2, 4)
#: The same kernels serve all three, and `test_jobs_gpu`.
SWEPT = [AttentionProblem.parse(f"S={s},D=64,H=4") for s in (384, 512, 640)]


def heads(problem: AttentionProblem, world: int) -> AttentionProblem:
    """What one rank of `world` computes."""
    return AttentionProblem.parse(problem.label().replace("H=16", f"H={16 // world}"))


def config_of(problem: Problem, *others: Problem) -> Config:
    """The most promising config that is legal for all of them; one block an output tile, so that
    each tile is summed in one order whatever the number of heads.
    """
    member = family("gemm" if problem.op == "gemm" else "fused_attention")
    space = [
        config
        for config in member.space(problem, DEFAULT_GPU)
        if config.get("splits", 1) == 1
        and config.get("split_k", 1) == 1
        and all(member.accepts(other, config, DEFAULT_GPU) for other in others)
    ]
    return min(space, key=lambda config: member.predict_us(problem, config, DEFAULT_GPU))


def attentions() -> list[AttentionProblem]:
    whole = AttentionProblem.parse(WHOLE)
    return [whole, *(heads(whole, world) for world in WORLDS)]


def kernels() -> list[KernelSpec]:
    """Compiled from the start; see `conftest.compiler`."""
    config = config_of(*attentions())
    needed = [
        spec for p in attentions() for spec in family(config.family).kernels(p, config).values()
    ]
    needed += family("gemm").kernels(PRODUCT, config_of(PRODUCT)).values()
    return list(dict.fromkeys(needed))


@pytest.fixture(autouse=True)
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing_gpu: str) -> None:
    """Needs two GPUs; the runtime reads a store of the test's own."""
    count = device.count()
    if missing_gpu or count < 2:
        pytest.skip(missing_gpu or f"{count} GPU, two are needed")
    monkeypatch.setenv("TUNER_STORE", f"sqlite:///{tmp_path / 'store.sqlite'}")
    importlib.import_module("tuner.runtime.call.table").table.forget()
    package.stats(reset=True)


def decide(compiler: Compiler, config: Config, problems: Sequence[Problem]) -> None:
    """Store that `config` won each problem, and have its kernels compiled."""
    gpu = detected()
    with open_store() as store:
        for problem in problems:
            specs = family(config.family).kernels(problem, config)
            built = compiler.submit(list(specs.values()))
            keys = [future.result().key for _, future in built]
            facts = {"gpu": gpu, "created_at": "2026-01-01T00:00:00+00:00"}
            artifacts = dict(zip(specs, keys, strict=True))
            won = final(config, 1.0, problem, **facts, artifacts=artifacts)
            store.decide(problem, gpu, won.regime, [won], "test")


def detected() -> Gpu:
    found = device.detect()
    assert found is not None
    return found


@pytest.mark.parametrize("problem", [*attentions()[:1], PRODUCT], ids=lambda p: p.op)
def test_the_same_kernel_gives_the_same_bits_on_every_gpu(
    problem: Problem, compiler: Compiler
) -> None:
    kind = detected().identity
    alike = [i for i in range(device.count()) if (g := device.detect(i)) and g.identity == kind]
    if len(alike) < 2:
        pytest.skip("no second GPU of the first one's kind")
    decide(compiler, config_of(problem), [problem])
    operands = [torch.randn(o.shape).half() for o in problem.operands[:-1]]
    outs: list[Any] = []
    for index in alike * 2:
        tensors = [
            torch.empty_strided(o.shape, o.strides, dtype=torch.float16, device=index).copy_(t)
            for o, t in zip(problem.operands[:-1], operands, strict=True)
        ]
        if problem.op == "gemm":
            out = package.matmul(*(t.squeeze(0) for t in tensors))
        else:
            out = package.attention(*tensors, is_causal=True)
        assert out.device.index == index
        outs.append(out.cpu())
    assert package.stats(reset=True).hits == len(outs), package.stats()
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert outs[0].isfinite().all() and outs[0].count_nonzero() > 0


def test_a_job_goes_over_all_gpus_and_stores_each_trial_once(tmp_path: Path) -> None:
    notes: list[str] = []
    options = JobOptions(SweepOptions(families=("fused_attention",), trials=4, sampler="tpe"))
    with (
        open_store(str(tmp_path / "swept.sqlite")) as store,
        Runners(Machine(tuple(range(device.count()))), notes.append) as runners,
    ):
        result = Job(SWEPT, runners, store, options).run()
        assert runners._pool is not None
        at_work = [worker.pid for worker in runners._pool._workers]
        assert [o.problem for o in result.outcomes] == SWEPT, (result.failed, notes)
        trials = Counter((m.problem, m.config) for m in store.measurements(final=False))
        assert set(trials.values()) == {1}
        for problem in SWEPT:
            (entry,) = store.entries(problem=problem)
            assert entry.provenance is Provenance.MEASURED
            assert {m.config.family for m in entry.ranking} > {"fused_attention"}
    assert sum(pid is not None for pid in at_work) >= 2, "a second GPU took its part"
    assert len({m.environment.digest for m in entry.ranking}) == 1


@pytest.mark.parametrize("world", WORLDS)
def test_heads_split_over_nccl_equal_one_gpu_s(world: int, compiler: Compiler) -> None:
    if device.count() < world:
        pytest.skip(f"{device.count()} GPUs, {world} are needed")
    if not torch.distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    whole = AttentionProblem.parse(WHOLE)
    parts = heads(whole, world)
    decide(compiler, config_of(*attentions()), [whole, parts])
    for seen in ranks(world, WHOLE):
        assert seen["agreed"] and seen["equal"] and seen["repeats"] and seen["reduced"], seen
        assert seen["hits"] == 3 * 5, "two calls of the part and one of the whole, five rounds"
        assert seen["error"] < 1e-3


def ranks(world: int, shape: str) -> list[dict[str, Any]]:
    """What each rank says; a hung one is killed with all the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("heads_over_ranks.py")
    root = str(Path(package.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), shape],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank), "PYTHONPATH": path},
        )
        for rank in range(world)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, out + err
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]
