"""`tuner prove` on the GPU: a sound kernel passes, and one with another's mask does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.kernels import targets
from tuner.selection.portfolio import shipped
from tuner.tuning.proof import ProofProgress, Prover, plan

pytestmark = pytest.mark.gpu


def of_mask(is_causal: bool) -> Target:
    """The first kernel of D = 64 with one block a tile, which also splits."""
    return next(
        target
        for target in targets(shipped()[0])
        if (target.problem.head_dim, target.problem.is_causal) == (64, is_causal)
        and not target.config["persistent"]
    )


def of_pages(head_dim: int, has_sinks: bool) -> Target:
    """The first kernel of paged caches whose copies fit every page; with sinks under a window."""
    return next(
        target
        for target in targets(shipped()[0])
        if target.problem.is_paged
        and (target.problem.head_dim, target.problem.has_sinks) == (head_dim, has_sinks)
        and target.problem.is_windowed == has_sinks
        and target.config["box_rows"] == 16
    )


SOUND = {
    "full": of_mask(False),
    "causal": of_mask(True),
    "paged": of_pages(128, False),
    "paged, sinks and window": of_pages(64, True),
}


def kernels() -> list[KernelSpec]:
    return [REFERENCE, *(target.kernels["attention"] for target in SOUND.values())]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerClient]:
    made = WorkerClient(0)
    yield made
    made.close()


def proven(
    compiler: Compiler, worker: WorkerClient, path: Path, target: Target, artifact_of: Target
) -> ProofProgress:
    """Prove a target by the artifact of one, its own or not."""
    (reference, built) = (
        future.result()
        for _, future in compiler.submit([REFERENCE, artifact_of.kernels["attention"]])
    )
    version = compiler.toolchain.nvcc_version
    known = KernelList(version, "", compiler.capability)
    listed = ((REFERENCE, reference), (target.kernels["attention"], built))
    known.with_kernels(Kernel.of(spec, artifact) for spec, artifact in listed).write(path)
    todo = plan(path, [target])
    assert len(todo.waiting) == 1
    return Prover(detect() or DEFAULT_GPU, "", [worker]).run(todo)


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_is_proven(
    compiler: Compiler, worker: WorkerClient, tmp_path: Path, name: str
) -> None:
    target, path = SOUND[name], tmp_path / "kernels.json"
    progress = proven(compiler, worker, path, target, target)
    assert progress.faults == []
    kernel = KernelList.read(path).find(target.kernels["attention"])
    assert kernel is not None and kernel.proof is not None and kernel.proof.problems >= 64


def test_a_kernel_with_another_mask_is_caught(
    compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    target, path = of_mask(False), tmp_path / "kernels.json"
    (fault,) = proven(compiler, worker, path, target, of_mask(True)).faults
    assert "wrong_result at" in fault
    kernel = KernelList.read(path).find(target.kernels["attention"])
    assert kernel is not None and kernel.proof is None and kernel.fault
