"""Compile, check and time candidates: the only place where an error becomes a status."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tuner.compile.artifacts import Artifact
from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, RenderError, StoreError
from tuner.families.base import INCOMPATIBLE_CONFIG_ERRORS, Family, KernelSpec
from tuner.hardware import Gpu
from tuner.measure.gate import REFERENCE
from tuner.measure.request import CandidateOutcome
from tuner.measure.worker_client import AnyWorker, Ask
from tuner.measurement import Environment, Measurement, Regime, Status
from tuner.problem import Problem

#: Characters of a log that are stored with a measurement.
LOG_LIMIT = 4096


@dataclass(eq=False)
class Pending:
    """A group whose kernels are being compiled."""

    problem: Problem
    group: Sequence[Config]
    kernels: Sequence[Mapping[str, KernelSpec]]
    """For each config, its kernels by name within the family."""
    futures: Mapping[KernelSpec, Future[Artifact]]
    failures: dict[int, Measurement] = field(default_factory=dict)
    """Configs that have no kernels to compile for a reason of their own."""

    @property
    def is_ready(self) -> bool:
        """Nothing is compiling any more."""
        return all(future.done() for future in self.futures.values())

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call `then` once nothing is compiling any more: now, or in the compiler's thread."""
        building = set(self.futures.values())
        if not building:
            then()
        finished = itertools.count(1)

        def count(_: Future[Artifact]) -> None:
            if next(finished) == len(building):
                then()

        for future in building:
            future.add_done_callback(count)


class Evaluator:
    """Evaluates on GPUs of one kind under one regime; `finish` from any thread.

    Args:
        gpu: what the workers measure on.
        regime: how candidates are timed.
        compiler: for the candidates' kernels and the gate's.
        members: families by name.
        environment: stored with every measurement; asked for when the first is made.
        max_workspace: bytes that a candidate may use beside its operands; None: no limit.
    """

    def __init__(
        self,
        gpu: Gpu,
        regime: Regime,
        compiler: Compiler,
        members: Mapping[str, Family],
        environment: Callable[[], Environment],
        max_workspace: int | None = None,
    ) -> None:
        self._gpu, self._regime, self._compiler = gpu, regime, compiler
        self._members, self._environment, self._max_workspace = members, environment, max_workspace
        self._fresh: set[KernelSpec] = set()
        self._seeds: dict[Problem, int] = {}
        """Seed of the inputs of each problem's quick pass."""
        self._lock = threading.Lock()
        [(_, self._reference)] = compiler.submit([REFERENCE])

    def owner(self, problem: Problem) -> Hashable:
        """Names to the compiler what is submitted for a problem here."""
        return self, problem

    def prefetch(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Compile without waiting; what fails is reported by the evaluation that needs it."""
        self.start(problem, configs)

    def start(self, problem: Problem, group: Sequence[Config]) -> Pending:
        """Have the kernels of a group compiled in the background."""
        kernels: list[Mapping[str, KernelSpec]] = []
        failures: dict[int, Measurement] = {}
        for index, config in enumerate(group):
            try:
                kernels.append(self._members[config.family].kernels(problem, config))
            except INCOMPATIBLE_CONFIG_ERRORS as exc:
                kernels.append({})
                log = f"{config.family} cannot express this config: {type(exc).__name__}: {exc}"
                failures[index] = self._failed(problem, config, Status.COMPILE_ERROR, log)
        wanted = list(dict.fromkeys(spec for named in kernels for spec in named.values()))
        owner = self.owner(problem)
        futures = dict(self._compiler.submit(wanted, owner)) if wanted else {}
        with self._lock:
            self._fresh |= {spec for spec, future in futures.items() if not future.done()}
        return Pending(problem, group, kernels, futures, failures)

    def finish(
        self, pending: Pending, worker: AnyWorker, *, mode: str = "quick", rounds: int = 0
    ) -> list[Measurement]:
        """Wait for the compiler, then check and time: one measurement a config, in order.

        Args:
            pending: from `start`.
            worker: of the GPU to measure on.
            mode: quick (one by one), final (interleaved over `rounds`), probe (checks only),
                kernels (the profiler's durations, unchecked).
            rounds: of a final pass.

        Raises:
            CompileError: when the gate's own kernels cannot be compiled.
            BenchmarkError: when no worker can be started.
            StoreError: when the artifact cache cannot be written.
            concurrent.futures.CancelledError: when the worker was interrupted.
        """
        found: dict[int, Measurement] = dict(pending.failures)
        ready: list[int] = []
        for index, config in enumerate(pending.group):
            if index in found:
                continue
            error = self._compile_error(pending, index)
            if error is None:
                ready.append(index)
            else:
                log = _compile_log(error)
                found[index] = self._failed(pending.problem, config, Status.COMPILE_ERROR, log)
        if ready:
            ask = Ask(
                problem=pending.problem,
                regime=self._regime,
                mode=mode,
                seed=self._seed(pending.problem, mode),
                reference=self._reference_artifact(),
                candidates=[(pending.group[i], _artifacts(pending, i)) for i in ready],
                rounds=rounds,
                max_workspace=self._max_workspace,
            )
            outcomes = worker.measure(ask)
            if any(outcome.status not in (Status.OK, Status.UNAVAILABLE) for outcome in outcomes):
                self._renew(pending.problem)
            for index, outcome in zip(ready, outcomes, strict=True):
                found[index] = self._measurement(pending, index, outcome, is_final=mode == "final")
        return [found[index] for index in range(len(pending.group))]

    def _seed(self, problem: Problem, mode: str) -> int:
        """Seed of a request's inputs. Quick requests of a problem share one, so that a worker
        computes its references once; other modes draw their own: finalists are checked anew.
        """
        drawn = secrets.randbits(62)
        if mode != "quick":
            return drawn
        with self._lock:
            return self._seeds.setdefault(problem, drawn)

    def _renew(self, problem: Problem) -> None:
        """Have the next quick request of a problem draw its inputs anew: what failed may have
        written into the references that a worker keeps.
        """
        with self._lock:
            self._seeds.pop(problem, None)

    def _reference_artifact(self) -> Artifact:
        try:
            return self._reference.result()
        except CompileError as exc:
            raise CompileError(
                f"the numerics gate cannot be compiled: {exc}", command=exc.command, log=exc.log
            ) from exc
        except CancelledError as exc:
            raise BenchmarkError("compiling was cancelled") from exc

    def _compile_error(self, pending: Pending, index: int) -> CompileError | RenderError | None:
        """Why a config's kernels are not there, or None.

        Raises:
            StoreError: when the cache cannot be written, which no other candidate survives.
            BenchmarkError: when the compiler was closed.
        """
        for spec in pending.kernels[index].values():
            try:
                pending.futures[spec].result()
            except (CompileError, RenderError) as exc:
                return exc
            except StoreError:
                raise
            except CancelledError as exc:
                raise BenchmarkError("compiling was cancelled") from exc
        return None

    def _measurement(
        self, pending: Pending, index: int, outcome: CandidateOutcome, *, is_final: bool
    ) -> Measurement:
        config = pending.group[index]
        artifacts = _artifacts(pending, index)
        specs = pending.kernels[index]
        compile_cpu_s = None
        if not self._members[config.family].is_vendor:
            # A kernel is paid for once, by the first measurement that uses it.
            with self._lock:
                fresh = {spec for spec in specs.values() if spec in self._fresh}
                self._fresh -= fresh
            compile_cpu_s = round(sum(pending.futures[s].result().compile_cpu_s for s in fresh), 3)
        return Measurement(
            problem=pending.problem,
            config=config,
            gpu=self._gpu,
            regime=self._regime,
            status=outcome.status,
            environment=self._environment(),
            latency_us=outcome.latency_us,
            std_us=outcome.std_us,
            rounds=outcome.rounds,
            is_final=is_final,
            flags=outcome.flags,
            error=outcome.error,
            workspace_bytes=outcome.workspace_bytes,
            artifacts={name: artifact.key for name, artifact in artifacts.items()},
            resources={n: a.resources for n, a in artifacts.items() if a.resources is not None},
            compile_cpu_s=compile_cpu_s,
            clocks=outcome.clocks,
            log=trim(outcome.log),
            created_at=_now(),
        )

    def _failed(self, problem: Problem, config: Config, status: Status, log: str) -> Measurement:
        return Measurement(
            problem=problem,
            config=config,
            gpu=self._gpu,
            regime=self._regime,
            status=status,
            environment=self._environment(),
            log=trim(log),
            created_at=_now(),
        )


def trim(log: str, limit: int = LOG_LIMIT) -> str:
    """The beginning and the end of a log, `limit` characters at most."""
    if len(log) <= limit:
        return log
    mark = f"\n... {len(log)} characters in all ...\n"
    half = (limit - len(mark)) // 2
    return log[:half] + mark + log[-half:]


def _artifacts(pending: Pending, index: int) -> dict[str, Artifact]:
    named = pending.kernels[index]
    return {name: pending.futures[spec].result() for name, spec in named.items()}


def _compile_log(error: CompileError | RenderError) -> str:
    if isinstance(error, RenderError):
        return str(error)
    return "\n".join(filter(None, (str(error), error.command, error.log)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
