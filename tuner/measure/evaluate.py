"""Compile, check and time candidates. Only here does an error become a candidate's status."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

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

#: Maximum characters of a log that are stored with a measurement.
LOG_LIMIT = 4096


@dataclass(eq=False)
class Pending:
    """Group of configs whose kernels are being compiled."""

    problem: Problem
    group: Sequence[Config]
    kernels: Sequence[Mapping[str, KernelSpec]]
    """Kernels of each config, by name within the family."""
    futures: Mapping[KernelSpec, Future[Artifact]]
    failures: dict[int, Measurement] = field(default_factory=dict)
    """Configs without kernels to compile, and the reasons."""

    @property
    def is_ready(self) -> bool:
        """True once no kernel of the group is compiling."""
        return all(future.done() for future in self.futures.values())

    def when_ready(self, then: Callable[[], None]) -> None:
        """Call `then` once no kernel of the group is compiling: now, or later in the compiler's
        thread.
        """
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
    """Evaluates candidates on GPUs of one model under one regime. `finish` may be called from any
    thread.

    Args:
        gpu: model of the workers' GPUs.
        regime: timing regime of the candidates.
        compiler: compiler of the candidates' kernels and the gate's.
        members: families by name.
        environment: function that returns the environment stored with every measurement; called at
            the first one.
        max_workspace: maximum bytes that a candidate may use beside its operands; None: no limit.
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
        """Seed of each problem's inputs in quick passes."""
        self._lock = threading.Lock()
        [(_, self._reference)] = compiler.submit([REFERENCE])

    def owner(self, problem: Problem) -> Hashable:
        """Owner name under which a problem's kernels are submitted to the compiler."""
        return self, problem

    def prefetch(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Compile without waiting. The evaluation that needs a kernel reports its failure."""
        self.start(problem, configs)

    def start(self, problem: Problem, group: Sequence[Config]) -> Pending:
        """Start compiling the kernels of a group in the background."""
        kernels: list[Mapping[str, KernelSpec]] = []
        failures: dict[int, Measurement] = {}
        for index, config in enumerate(group):
            try:
                kernels.append(self._members[config.family].kernels(problem, config))
            except INCOMPATIBLE_CONFIG_ERRORS as exc:
                kernels.append({})
                log = f"{config.family} cannot express this config: {type(exc).__name__}: {exc}"
                failures[index] = self._failed(problem, config, Status.COMPILE_ERROR, log)
        specs = list(dict.fromkeys(spec for named in kernels for spec in named.values()))
        owner = self.owner(problem)
        futures = dict(self._compiler.submit(specs, owner)) if specs else {}
        with self._lock:
            self._fresh |= {spec for spec, future in futures.items() if not future.done()}
        return Pending(problem, group, kernels, futures, failures)

    def finish(
        self, pending: Pending, worker: AnyWorker, *, mode: str = "quick", rounds: int = 0
    ) -> list[Measurement]:
        """Wait for the compiler, then check and time. Returns one measurement for each config, in
        order.

        Args:
            pending: result of `start`.
            worker: worker of the GPU to measure on.
            mode: quick (one by one), final (interleaved over `rounds`), probe (checks only),
                kernels (the profiler's durations, unchecked).
            rounds: minimum rounds of a final pass.

        Raises:
            CompileError: when the gate's own kernels cannot be compiled.
            BenchmarkError: when no worker can be started.
            StoreError: when the artifact cache cannot be written.
            concurrent.futures.CancelledError: when the worker is interrupted.
        """
        ended: dict[int, Measurement] = dict(pending.failures)
        ready: list[int] = []
        for index, config in enumerate(pending.group):
            if index in ended:
                continue
            error = self._compile_error(pending, index)
            if error is None:
                ready.append(index)
            else:
                log = _compile_log(error)
                ended[index] = self._failed(pending.problem, config, Status.COMPILE_ERROR, log)
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
                ended[index] = self._measurement(pending, index, outcome, is_final=mode == "final")
        return [ended[index] for index in range(len(pending.group))]

    def _seed(self, problem: Problem, mode: str) -> int:
        """Seed of a request's inputs. Quick requests of a problem share one seed, so that a worker
        computes its references once. Other modes draw a new seed, so finalists are checked again on
        new inputs.
        """
        drawn = secrets.randbits(62)
        if mode != "quick":
            return drawn
        with self._lock:
            return self._seeds.setdefault(problem, drawn)

    def _renew(self, problem: Problem) -> None:
        """Give the next quick request of a problem new inputs: a failed candidate may have written
        into the worker's references.
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
        """Error that kept a config's kernels from being compiled, or None.

        Raises:
            StoreError: when the cache cannot be written, which ends the whole evaluation.
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
            # A kernel's compile time is counted once, for the first measurement that uses it.
            with self._lock:
                fresh = {spec for spec in specs.values() if spec in self._fresh}
                self._fresh -= fresh
            compile_cpu_s = round(sum(pending.futures[s].result().compile_cpu_s for s in fresh), 3)
        return self._stored(
            pending.problem,
            config,
            outcome,
            is_final=is_final,
            artifacts={name: artifact.key for name, artifact in artifacts.items()},
            resources={n: a.resources for n, a in artifacts.items() if a.resources is not None},
            compile_cpu_s=compile_cpu_s,
        )

    def _failed(self, problem: Problem, config: Config, status: Status, log: str) -> Measurement:
        return self._stored(problem, config, CandidateOutcome(status, log=log))

    def _stored(
        self, problem: Problem, config: Config, outcome: CandidateOutcome, **facts: Any
    ) -> Measurement:
        """A worker's outcome and what the driver knows of it; their fields have the same names."""
        return Measurement(
            problem=problem,
            config=config,
            gpu=self._gpu,
            regime=self._regime,
            environment=self._environment(),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            **{**vars(outcome), "log": trim(outcome.log), **facts},
        )


def trim(log: str, limit: int = LOG_LIMIT) -> str:
    """Beginning and end of a log, `limit` characters at most."""
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
