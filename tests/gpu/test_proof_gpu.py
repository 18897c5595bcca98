"""`tuner prove` on the GPU: a sound kernel passes, and one with another's mask does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from proving import faults

from tuner.compile.compiler import Compiler
from tuner.families.base import KernelSpec
from tuner.families.target import Target
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.selection.kernels import targets
from tuner.selection.portfolio import shipped

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


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_is_proven(
    compiler: Compiler, worker: WorkerClient, tmp_path: Path, name: str
) -> None:
    assert faults(compiler, worker, tmp_path / "kernels.json", SOUND[name]) == []


def test_a_kernel_with_another_mask_is_caught(
    compiler: Compiler, worker: WorkerClient, tmp_path: Path
) -> None:
    path = tmp_path / "kernels.json"
    (fault,) = faults(compiler, worker, path, of_mask(False), of_mask(True))
    assert "wrong_result at" in fault
