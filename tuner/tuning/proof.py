"""Proofs of built kernels (`tuner prove`): the numerics gate on problems drawn from a kernel's
whole domain.

A kernel either passes all of its trials, or has a fault, which names the first failed one. The
verdict is written to the kernel list before the next kernel starts, so that an interrupted run
continues there. Several workers prove side by side on one GPU: correctness does not depend on what
else runs there, time does.

A proof is about machine code. `carry` gives it to an artifact of another text with equal code,
`adopt` to the same artifact on another machine. `export` writes the files that ship.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from tuner.compile.artifacts import Artifact, ArtifactCache
from tuner.errors import BenchmarkError, ConfigError
from tuner.families.target import Target
from tuner.families.trials import Trial, trials
from tuner.hardware import Gpu
from tuner.measure.gate import REFERENCE
from tuner.measure.worker import LSE_PROBE
from tuner.measure.worker_client import AnyWorker, Ask
from tuner.measurement import Regime, Status
from tuner.selection.kernel_list import Kernel, KernelList, Proof
from tuner.selection.kernels import BUILD, artifact_of, read, update
from tuner.tuning.outcome import first_line

PROBLEMS = 64
"""Minimum trials of a kernel."""
_REGIME = Regime()
"""Regime of the requests, which are not timed."""
_FAULT_CHARACTERS = 400
MAX_STACK_BYTES = 512
"""Most local memory of a thread. A kernel with 1168 bytes has its accumulators there: it took 40 ms
on an H100 in place of an expected 0.5."""


_Queue = deque[tuple[Target, Mapping[str, Artifact]]]
"""Kernels to prove, with their artifacts."""


class _TimedOut(Exception):
    """A kernel took too long, in the words of a fault: beside others that may be theirs."""


@dataclass(frozen=True)
class ProofPlan:
    """Kernels of one list that need a proof."""

    path: Path
    kernels: KernelList
    reference: Artifact
    """Artifact of the gate's kernels."""
    waiting: Sequence[tuple[Target, Mapping[str, Artifact]]]
    """Kernels to prove, with their artifacts."""
    missing: int
    """Kernels of the targets that are not built, or were removed."""
    proven: int
    carried: int
    """Kernels among the proven whose proofs were carried over."""
    failed: Sequence[str]
    """Kernels that failed in an earlier run."""


@dataclass
class ProofProgress:
    """Progress of a run."""

    kernels: int
    """Number of kernels to prove in this run."""
    done: int = 0
    at_work: dict[int, int] = field(default_factory=dict)
    """Passed trials of each worker's kernel."""
    faults: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def left_s(self) -> float | None:
        """Estimated seconds to the end, from the kernels that are done; None before the first."""
        if not self.done:
            return None
        return (time.monotonic() - self.started) / self.done * (self.kernels - self.done)


def _stack_fault(artifacts: Iterable[Artifact]) -> str:
    """Fault of a kernel that keeps its accumulators in local memory; empty for others."""
    used = max((a.resources.stack_bytes for a in artifacts if a.resources), default=0)
    if used <= MAX_STACK_BYTES:
        return ""
    return f"{used} bytes of local memory a thread (at most {MAX_STACK_BYTES})"


def plan(path: Path, targets: Sequence[Target], *, again: bool = False) -> ProofPlan:
    """Find the kernels of a list that lack a proof.

    Args:
        path: path of the list.
        targets: kernels to prove if they are built.
        again: True to include kernels that have a verdict.

    Raises:
        ConfigError: when the list cannot be read, or the gate's kernels are not built.
    """
    kernel_list = read(path)
    gate = kernel_list.find(REFERENCE)
    reference = None if gate is None else artifact_of(kernel_list, gate)
    if reference is None:
        raise ConfigError(f"{path}: the numerics gate's kernels are not built ({BUILD})")
    waiting, missing, proven, carried = [], 0, 0, 0
    failed: list[str] = []
    for target in targets:
        kernels = [kernel_list.find(spec) for spec in target.kernels.values()]
        artifacts = [None if k is None else artifact_of(kernel_list, k) for k in kernels]
        if any(artifact is None for artifact in artifacts):
            missing += 1
            continue
        built = [k for k in kernels if k is not None]
        if not again and (fault := next((k.fault for k in built if k.fault), "")):
            failed.append(f"{target.label()}: {fault}")
        elif not again and all(k.proof is not None for k in built):
            proven += 1
            carried += any(k.proof is not None and k.proof.carried for k in built)
        else:
            named = zip(target.kernels, artifacts, strict=True)
            waiting.append((target, {name: k for name, k in named if k is not None}))
    return ProofPlan(path, kernel_list, reference, waiting, missing, proven, carried, failed)


@dataclass
class CarriedProofs:
    """Numbers of a list's kernels that had no verdict."""

    carried: int = 0
    other_code: int = 0
    """Kernels whose machine code is not the one that was checked."""
    unknown: int = 0
    """Kernels whose spec was never proven, or whose checked machine code is not known."""


def carry(path: Path, earlier: Iterable[Kernel]) -> CarriedProofs:
    """Carry proofs of equal spec and machine code over to a list's kernels without a verdict.

    Args:
        path: file of the list.
        earlier: proven kernels, of other texts. If a proof does not name its machine code, the
            artifact that was checked must be in the cache.

    Raises:
        ConfigError: when the list cannot be read.
        StoreError: when it cannot be written.
    """
    counts, carried = CarriedProofs(), dict[str, Kernel]()
    proofs = EarlierProofs(earlier)
    for kernel in read(path).kernels.values():
        if kernel.is_judged or kernel.spec == REFERENCE.key:
            continue
        code = _code_of(kernel.artifact) if proofs.has(kernel.spec) else ""
        if (same := proofs.find(kernel.spec, kernel.artifact, code)) is not None:
            carried[kernel.spec] = replace(kernel, proof=same, code=code)
        elif code:
            counts.other_code += 1
        else:
            counts.unknown += 1

    def change(kernels: KernelList) -> KernelList:
        named = kernels.with_kernels(replace(k, proof=None) for k in carried.values())
        is_free = {spec: not named.kernels[spec].is_judged for spec in carried}
        counts.carried = sum(is_free.values())
        return named.with_kernels(k for spec, k in carried.items() if is_free[spec])

    update(path, change)
    return counts


class EarlierProofs:
    """Proofs of earlier kernels, by spec and machine code.

    Args:
        earlier: kernels, some of them proven or failed.
    """

    def __init__(self, earlier: Iterable[Kernel]) -> None:
        self._kernels: dict[str, list[Kernel]] = {}
        for kernel in earlier:
            if kernel.is_judged:
                self._kernels.setdefault(kernel.spec, []).append(kernel)

    def has(self, spec: str) -> bool:
        """True where an earlier kernel of the spec has a proof of known machine code."""
        return any(
            k.proof is not None and bool(_checked_code(k)) for k in self._kernels.get(spec, ())
        )

    def find(self, spec: str, artifact: str, code: str) -> Proof | None:
        """Proof for an artifact of a spec and machine code; None if it failed or is unknown."""
        earlier = self._kernels.get(spec, ())
        if not code or any(k.fault and k.artifact == artifact for k in earlier):
            return None
        alike = [k for k in earlier if k.proof is not None and _checked_code(k) == code]
        if not alike:
            return None
        kernel = next((k for k in alike if k.artifact == artifact), alike[0])
        assert kernel.proof is not None
        if kernel.artifact == artifact:
            return kernel.proof
        return replace(kernel.proof, carried=kernel.proof.carried or kernel.artifact)


def _checked_code(kernel: Kernel) -> str:
    """Machine code that a kernel's proof is about; empty where it is not known."""
    return kernel.code or _code_of(kernel.artifact)


def _code_of(key: str) -> str:
    artifact = ArtifactCache().find(key)
    return "" if artifact is None else artifact.code


@dataclass
class AdoptedVerdicts:
    """Numbers of a kernel list's entries that another machine judged."""

    proofs: int = 0
    faults: int = 0
    unknown: int = 0
    """Artifacts with a verdict that are not in the list."""


def adopt(
    path: Path, judged: Sequence[Kernel], faults: Mapping[str, str] | None = None
) -> AdoptedVerdicts:
    """Take the verdicts of other machines over to equal kernels of a list.

    Args:
        path: file of the list.
        judged: kernels with verdicts.
        faults: failures as in `KernelList.faults`.

    Raises:
        ConfigError: when the list cannot be read.
        StoreError: when it cannot be written.
    """
    verdicts = [k for k in judged if k.is_judged]
    before = read(path)
    after = update(path, lambda ks: ks.with_verdicts(verdicts, faults))
    changed = [k for spec, k in after.kernels.items() if k != before.kernels.get(spec)]
    here = {k.artifact for k in before.kernels.values()}
    return AdoptedVerdicts(
        proofs=sum(k.proof is not None for k in changed),
        faults=sum(bool(k.fault) for k in changed),
        unknown=len({k.artifact for k in verdicts} - here),
    )


@dataclass(frozen=True)
class ExportedProofs:
    """A written file of proofs, with numbers of its kernels."""

    path: Path
    kernels: int
    added: int
    """Kernels that the file did not have, or had with another artifact or proof."""
    removed: int


def export(folder: Path, known: KernelList, specs: Collection[str]) -> list[ExportedProofs]:
    """Write a list's proofs as the files that ship, one for each model of GPU and compiler.

    A file that is there keeps its proofs of kernels that the list does not prove, unless the list
    has a fault for the artifact. A kernel is in one file only.

    Args:
        folder: place of the files, as ``cache/proofs``.
        known: kernels of this machine.
        specs: keys of the specs that are wanted; others are left out and removed.

    Raises:
        ConfigError: when a file that is there cannot be read.
        StoreError: when a file cannot be written.
    """
    before = {
        path: KernelList.read(path).kernels
        for path in sorted(folder.glob(f"*-nvcc-{known.nvcc}.json"))
    }
    former = [k for kernels in before.values() for k in kernels.values()]
    built = [k for k in known.kernels.values() if k.is_current]
    after: dict[Path, dict[str, Kernel]] = {path: {} for path in before}
    proven = {
        k.spec: (replace(k, source=""), k.proof.gpu)
        for k in [*former, *built]
        if k.proof is not None and k.spec in specs and known.faults.keys().isdisjoint(k.identities)
    }
    for spec, (kernel, gpu) in proven.items():
        model = "-".join(gpu.lower().split()[:2])
        after.setdefault(folder / f"{model}-nvcc-{known.nvcc}.json", {})[spec] = kernel
    written = []
    for path, kernels in after.items():
        old = before.get(path, {})
        replace(known, kernels=kernels, faults={}).write(path)
        added = sum(old.get(spec) != k for spec, k in kernels.items())
        written.append(ExportedProofs(path, len(kernels), added, len(old.keys() - kernels)))
    return written


class Prover:
    """Proves the kernels of one list, as many at a time as there are workers.

    Args:
        gpu: GPU to check on.
        driver: driver version, recorded in the proofs.
        workers: each checks one candidate at a time in a process of its own, on one GPU.
        problems: minimum trials of a kernel.
        seed: random seed of the trials and of the inputs.
        changed: callback for progress after each trial.
        is_over: called before each trial; True ends the run, and the current kernel gets no
            verdict.
    """

    def __init__(
        self,
        gpu: Gpu,
        driver: str,
        workers: Sequence[AnyWorker],
        *,
        problems: int = PROBLEMS,
        seed: int = 0,
        changed: Callable[[ProofProgress], None] = lambda progress: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._gpu, self._driver, self._workers = gpu, driver, workers
        self._problems, self._seed = problems, seed
        self._changed, self._is_over = changed, is_over
        self._lock, self._is_stopped = threading.Lock(), threading.Event()

    def run(self, todo: ProofPlan) -> ProofProgress:
        """Prove the waiting kernels, and write each verdict at once. A kernel that timed out beside
        others is proven again, alone.

        Raises:
            BenchmarkError: when no worker can be started, the gate fails, or memory is short.
            StoreError: when the list cannot be written.
            concurrent.futures.CancelledError: after the worker's `interrupt`.
        """
        progress, waiting = ProofProgress(len(todo.waiting)), deque(todo.waiting)
        if len(self._workers) > 1:
            late: _Queue = deque()
            with ThreadPoolExecutor(len(self._workers)) as threads:
                running = [
                    threads.submit(self._work, number, waiting, late, todo, progress)
                    for number in range(len(self._workers))
                ]
                try:
                    for future in as_completed(running):
                        future.result()
                except BaseException:
                    self._is_stopped.set()
                    for worker in self._workers:
                        worker.interrupt()
                    raise
            waiting = late
        self._work(0, waiting, None, todo, progress)
        return progress

    def _work(
        self,
        number: int,
        waiting: _Queue,
        late: _Queue | None,
        todo: ProofPlan,
        progress: ProofProgress,
    ) -> None:
        """Prove with one worker until nothing waits.

        Args:
            number: the worker's number.
            waiting: kernels that no worker has taken yet.
            late: receives kernels that timed out beside others; None: the worker is alone.
            todo: plan of the run.
            progress: progress that all workers share.
        """
        while True:
            try:
                target, artifacts = waiting.popleft()
            except IndexError:
                return
            try:
                verdict = self._prove(number, target, artifacts, todo, progress)
            except _TimedOut as timeout:
                if late is not None:
                    late.append((target, artifacts))
                    progress.at_work.pop(number, None)
                    continue
                verdict = str(timeout)
            if verdict is None:
                return
            with self._lock:
                if isinstance(verdict, str):
                    progress.faults.append(f"{target.label()}: {verdict}")
                self._enter(todo, target, artifacts, verdict)
                progress.done += 1
                progress.at_work.pop(number, None)
                self._changed(progress)

    def _prove(
        self,
        number: int,
        target: Target,
        artifacts: Mapping[str, Artifact],
        todo: ProofPlan,
        progress: ProofProgress,
    ) -> Proof | str | None:
        """Prove one kernel. Returns its proof or fault, or None if the run is over.

        Raises:
            _TimedOut: the fault, where the worker was too slow.
        """
        if fault := _stack_fault(artifacts.values()):
            return fault
        drawn = trials(target, self._gpu, self._problems, self._seed)
        if len(drawn) < max(1, self._problems):
            return f"only {len(drawn)} problems could be drawn (needed: {self._problems})"
        for passed, trial in enumerate(drawn):
            if self._is_over() or self._is_stopped.is_set():
                return None
            ask = self._ask(target, trial, passed, artifacts, todo.reference)
            outcome = self._workers[number].measure(ask)[0]
            if outcome.status is Status.OUT_OF_MEMORY:
                raise BenchmarkError(
                    f"memory is short on {self._gpu.name}: {trial.label()}: {outcome.log}"
                )
            if outcome.status is not Status.OK:
                log = first_line(outcome.log)
                fault = f"{outcome.status} at {trial.label()}: {log}"[:_FAULT_CHARACTERS]
                if outcome.status is Status.TIMEOUT:
                    raise _TimedOut(fault)
                return fault
            with self._lock:
                progress.at_work[number] = passed + 1
                self._changed(progress)
        today = datetime.now(UTC).date().isoformat()
        return Proof(len(drawn), self._seed, self._gpu.name, self._driver, today)

    def _ask(
        self,
        target: Target,
        trial: Trial,
        number: int,
        artifacts: Mapping[str, Artifact],
        reference: Artifact,
    ) -> Ask:
        # Different inputs for each trial; the worker's seeds are integers.
        text = f"{self._seed}:{target.config.digest}:{number}"
        return Ask(
            problem=trial.problem,
            regime=_REGIME,
            mode=LSE_PROBE if trial.with_lse and target.family.writes_lse else "probe",
            seed=int(hashlib.sha256(text.encode()).hexdigest()[:12], 16),
            reference=reference,
            candidates=[(trial.config, artifacts)],
            strides=trial.strides,
        )

    @staticmethod
    def _enter(
        todo: ProofPlan, target: Target, artifacts: Mapping[str, Artifact], verdict: Proof | str
    ) -> None:
        """Write a verdict to the list, for all kernels of the target."""
        judged = []
        for name, spec in target.kernels.items():
            kernel = replace(
                todo.kernels.kernels[spec.key],
                proof=None if isinstance(verdict, str) else verdict,
                fault=verdict if isinstance(verdict, str) else "",
                code=artifacts[name].code,
            )
            judged.append(kernel)
        update(todo.path, lambda ks: ks.with_kernels(judged))
