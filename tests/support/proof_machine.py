"""A list of built kernels, and workers that judge them as they are told: proofs without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tuner import settings
from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.hardware import DEFAULT_GPU
from tuner.measure.gate import REFERENCE
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import Ask
from tuner.measurement import Resources, Status
from tuner.problem import AttentionProblem
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.selection.kernels import path_of, targets, update
from tuner.selection.portfolio import shipped
from tuner.tuning.proof import Prover

NVCC = "13.0.88"
TARGETS = targets(shipped()[0])[:3]
OK = CandidateOutcome(Status.OK)
Judge = Callable[[Ask], CandidateOutcome]


class Worker:
    """Answers as it is told, and remembers what it was asked."""

    def __init__(self, judge: Judge = lambda ask: OK) -> None:
        self.judge, self.asks = judge, list[Ask]()

    def measure(self, ask: Ask) -> list[CandidateOutcome]:
        self.asks.append(ask)
        return [self.judge(ask)]

    def renew(self) -> None: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...
    def facts(self) -> dict[str, str]:
        return {}


def put(key: str, text: str, used: Resources | None = None) -> Artifact:
    """An artifact whose library holds a text."""
    cache = ArtifactCache()
    cache.root.mkdir(parents=True, exist_ok=True)
    library = settings.cache_dir() / f"{key}-{len(text)}.so"
    library.write_text(text)
    facts = {"nvcc": NVCC}
    return cache.put(key, library, resources=used, compile_cpu_s=1.0, source="", facts=facts)


@pytest.fixture
def built_kernels() -> Path:
    """A list of three kernels and the gate's."""
    found = []
    specs = [REFERENCE, *(spec for target in TARGETS for spec in target.kernels.values())]
    for number, spec in enumerate(specs):
        artifact = put(f"key{number}", f"library {number}")
        found.append(Kernel.of(spec, artifact))
    known = KernelList(NVCC, "4.2.0", "9.0")
    path = path_of(NVCC, "9.0")
    path.parent.mkdir(parents=True, exist_ok=True)
    known.with_kernels(found).write(path)
    return path


def enter(path: Path, *kernels: Kernel) -> None:
    update(path, lambda known: known.with_kernels(kernels))


def prover(*workers: Worker, **more: object) -> Prover:
    return Prover(DEFAULT_GPU, "580.1", workers, problems=64, **more)  # type: ignore[arg-type]


def verdicts(path: Path) -> list[tuple[bool, str]]:
    known = KernelList.read(path)
    found = [known.find(spec) for target in TARGETS for spec in target.kernels.values()]
    return [(one.proof is not None, one.fault) for one in found if one is not None]


def wrong_at_one_query(ask: Ask) -> CandidateOutcome:
    """A kernel that is wrong where there is one query."""
    if isinstance(ask.problem, AttentionProblem) and ask.problem.seqlen_q == 1:
        return CandidateOutcome(Status.WRONG_RESULT, log="relative error 1.0")
    return OK
