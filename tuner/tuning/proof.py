"""`tuner prove`: built kernels through the numerics gate, on problems drawn from all they serve.

A kernel passes all of its trials, or it has a fault, which names the first that it failed. The
verdict is written into the kernel list before the next kernel's turn, so that a run that ended
early goes on where it was.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tuner.compile.artifacts import Artifact
from tuner.errors import BenchmarkError, ConfigError
from tuner.hardware import Gpu
from tuner.measure.gate import REFERENCE
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker import LSE_PROBE
from tuner.measure.worker_client import AnyWorker, Ask
from tuner.measurement import Regime, Status
from tuner.selection.kernels import (
    BUILD,
    KernelList,
    Proof,
    Target,
    artifact_of,
    update,
)
from tuner.tuning.outcome import first_line
from tuner.tuning.trials import Trial, trials

PROBLEMS = 64
"""Trials of a kernel, at least."""
_REGIME = Regime()
"""Regime of a request; nothing is timed."""
_FAULT_CHARACTERS = 400


@dataclass(frozen=True)
class ProofPlan:
    """Kernels of one list that need a proof."""

    path: Path
    kernels: KernelList
    reference: Artifact
    """The gate's own kernels."""
    waiting: Sequence[tuple[Target, Mapping[str, Artifact]]]
    """Kernels to prove, with their artifacts."""
    missing: int
    """Kernels of the targets that are not built, or not there any more."""
    proven: int
    failed: Sequence[str]
    """Failures of an earlier run."""


@dataclass
class ProofProgress:
    """How far a run is."""

    kernels: int
    """To be proven in this run."""
    done: int = 0
    trials: int = 0
    """Passed trials of the kernel at work."""
    faults: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left_s(self) -> float | None:
        """Seconds to the end, by the kernels that are done; None before the first."""
        if not self.done:
            return None
        return (time.monotonic() - self.started) / self.done * (self.kernels - self.done)


def plan(path: Path, targets: Sequence[Target], *, again: bool = False) -> ProofPlan:
    """See what a list lacks.

    Args:
        path: of the list.
        targets: kernels that are to be proven, where they are built.
        again: also those that have a verdict.

    Raises:
        ConfigError: when the list cannot be read, or the gate's kernels are not built.
    """
    known = KernelList.read(path)
    gate = known.find(REFERENCE)
    reference = None if gate is None else artifact_of(known, gate)
    if reference is None:
        raise ConfigError(f"{path}: the numerics gate's kernels are not built ({BUILD})")
    waiting, missing, proven = [], 0, 0
    failed: list[str] = []
    for target in targets:
        kernels = [known.find(spec) for spec in target.kernels.values()]
        found = [None if one is None else artifact_of(known, one) for one in kernels]
        if any(artifact is None for artifact in found):
            missing += 1
            continue
        built = [one for one in kernels if one is not None]
        if not again and (fault := next((one.fault for one in built if one.fault), "")):
            failed.append(f"{target.label()}: {fault}")
        elif not again and all(one.proof is not None for one in built):
            proven += 1
        else:
            named = zip(target.kernels, found, strict=True)
            waiting.append((target, {name: one for name, one in named if one is not None}))
    return ProofPlan(path, known, reference, waiting, missing, proven, failed)


class Prover:
    """Proves the kernels of one list, one after the other.

    Args:
        gpu: where.
        driver: its version, which the proofs name.
        worker: checks a candidate in a process of its own.
        problems: trials of a kernel, at least.
        seed: of the draws and of the inputs.
        changed: told how far it is after each trial.
        is_over: asked before each trial whether to end; what is at work then has no verdict.
    """

    def __init__(
        self,
        gpu: Gpu,
        driver: str,
        worker: AnyWorker,
        *,
        problems: int = PROBLEMS,
        seed: int = 0,
        changed: Callable[[ProofProgress], None] = lambda progress: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._gpu, self._driver, self._worker = gpu, driver, worker
        self._problems, self._seed = problems, seed
        self._changed, self._is_over = changed, is_over

    def run(self, todo: ProofPlan) -> ProofProgress:
        """Prove what waits, and write each verdict at once.

        Raises:
            BenchmarkError: when no worker can be started, the gate fails, or memory is short.
            StoreError: when the list cannot be written.
            concurrent.futures.CancelledError: after the worker's `interrupt`.
        """
        progress = ProofProgress(len(todo.waiting))
        for target, artifacts in todo.waiting:
            progress.trials = 0
            verdict = self._prove(target, artifacts, todo.reference, progress)
            if verdict is None:
                break
            if isinstance(verdict, str):
                progress.faults.append(f"{target.label()}: {verdict}")
            self._enter(todo, target, verdict)
            progress.done += 1
            self._changed(progress)
        return progress

    def _prove(
        self,
        target: Target,
        artifacts: Mapping[str, Artifact],
        reference: Artifact,
        progress: ProofProgress,
    ) -> Proof | str | None:
        """The proof, the fault, or None where the run is over."""
        drawn = trials(target, self._gpu, self._problems, self._seed)
        if len(drawn) < self._problems:
            return f"only {len(drawn)} problems could be drawn (needed: {self._problems})"
        for number, trial in enumerate(drawn):
            if self._is_over():
                return None
            outcome = self._check(target, trial, number, artifacts, reference)
            if outcome.status is Status.OUT_OF_MEMORY:
                raise BenchmarkError(
                    f"memory is short on {self._gpu.name}: {trial.label()}: {outcome.log}"
                )
            if outcome.status is not Status.OK:
                log = first_line(outcome.log)
                return f"{outcome.status} at {trial.label()}: {log}"[:_FAULT_CHARACTERS]
            progress.trials = number + 1
            self._changed(progress)
        today = datetime.now(UTC).date().isoformat()
        return Proof(len(drawn), self._seed, self._gpu.name, self._driver, today)

    def _check(
        self,
        target: Target,
        trial: Trial,
        number: int,
        artifacts: Mapping[str, Artifact],
        reference: Artifact,
    ) -> CandidateOutcome:
        # Unlike inputs for each trial; the worker's seeds are whole numbers.
        text = f"{self._seed}:{target.config.digest}:{number}"
        ask = Ask(
            problem=trial.problem,
            regime=_REGIME,
            mode=LSE_PROBE if trial.with_lse and target.family.writes_lse else "probe",
            seed=int(hashlib.sha256(text.encode()).hexdigest()[:12], 16),
            reference=reference,
            candidates=[(trial.config, artifacts)],
            strides=trial.strides,
        )
        return self._worker.measure(ask)[0]

    @staticmethod
    def _enter(todo: ProofPlan, target: Target, verdict: Proof | str) -> None:
        """Write a verdict into the list, for all kernels of the target."""
        proof, fault = (None, verdict) if isinstance(verdict, str) else (verdict, "")
        built = (todo.kernels.kernels[spec.key] for spec in target.kernels.values())
        update(todo.path, [replace(kernel, proof=proof, fault=fault) for kernel in built])
