"""Which runner serves a problem: the GPUs, else a recording, else prediction."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Self

from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners import recording_archive
from tuner.runners.base import Runner
from tuner.runners.predict import PredictRunner
from tuner.runners.replay import ReplayRunner

if TYPE_CHECKING:
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import Toolchain
    from tuner.runners.pool import WorkerPool


@dataclass(frozen=True)
class ClusterPlace:
    """Which part of which Ray cluster."""

    address: str | None = None
    """``HOST:PORT``, or ``local`` for one of this machine alone; None: ``RAY_ADDRESS``, else the
    cluster that this machine belongs to."""
    gpu_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that measure."""
    compile_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that compile; empty: those without GPUs, all where there are none."""
    gpus: int | None = None
    """GPUs to take at most."""


@dataclass(frozen=True)
class Machine:
    """Runners of a command."""

    devices: tuple[int, ...] | None = (0,)
    """CUDA devices of one kind; None: all that are alike and free (`gpus.choose`)."""
    jobs: int | None = None
    """nvcc processes at a time; by default one a core."""
    max_workspace: int | None = None
    """Bytes that a candidate may use beside its operands."""
    replay: bool = False
    """Replay or predict even where a GPU is."""
    cluster: ClusterPlace | None = None
    """Evaluate on a Ray cluster in this machine's place."""


class Runners:
    """The runners of one job, made when first needed. Runners of one regime are shared, and all
    measuring ones share the GPUs' worker processes. Thread-safe.

    Args:
        machine: machine, cluster or replay to evaluate on.
        note: receives each notice for the user once.
    """

    def __init__(self, machine: Machine, note: Callable[[str], None]) -> None:
        self._machine = machine
        self._note = note
        self._lock = threading.RLock()
        self._local: dict[Regime, Runner] = {}
        self._others: list[Runner] = []
        self._compiler: Compiler | None = None
        self._pool: WorkerPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started; what waits for a result gets none. From any thread."""
        for runner in [*self._local.values(), *self._others]:
            runner.close()
        # Requests of the pool may wait for the compiler.
        if self._compiler is not None:
            self._compiler.close(cancel=True)
        if self._pool is not None:
            self._pool.close()

    def of(self, problem: Problem, regime: Regime) -> Runner:
        """The runner of a problem.

        Raises:
            CompileError: when there is a GPU and no compiler.
        """
        with self._lock:
            if self.gpu is not None:
                if regime not in self._local:
                    self._local[regime] = self._create_local(self.gpu, regime)
                return self._local[regime]
            runner = self._create_other(problem, regime)
            self._others.append(runner)
            return runner

    def apart(self, problem: Problem, regime: Regime) -> Runner:
        """A runner for a sweep that runs beside others, whose results it must not collect. The
        caller closes it.

        Raises:
            CompileError: when there is a GPU and no compiler.
        """
        with self._lock:
            if self.gpu is not None:
                return self._create_local(self.gpu, regime)
            return self._create_other(problem, regime)

    @cached_property
    def devices(self) -> tuple[int, ...]:
        """The GPUs to measure on, detected at the first access, which also reports problems with
        them.

        Raises:
            ConfigError: when a chosen device does not exist, or differs from the first.
        """
        if self._machine.replay:
            return ()
        from tuner.runners import gpus

        return gpus.choose(self._machine.devices, self._note)

    @cached_property
    def gpu(self) -> Gpu | None:
        """GPUs to measure on; None when nothing is measured.

        Raises:
            ConfigError: as `devices`.
        """
        from tuner.measure import device

        return device.detect(self.devices[0]) if self.devices else None

    def _create_local(self, gpu: Gpu, regime: Regime) -> Runner:
        from tuner.runners.local import LocalRunner

        if self._pool is None:
            self._pool = self._create_pool()
        return LocalRunner(
            self.devices[0],
            regime,
            self.compiler(),
            max_workspace=self._machine.max_workspace,
            gpu=gpu,
            pool=self._pool,
            facts=self._facts(),
        )

    def _create_pool(self) -> WorkerPool:
        from tuner.measure.worker_client import WorkerClient
        from tuner.runners.pool import WorkerPool

        return WorkerPool([WorkerClient(index) for index in self.devices])

    def _facts(self) -> Mapping[str, str | int | float] | None:
        """Environment of the GPUs, when this machine does not have it."""
        return None

    def _create_other(self, problem: Problem, regime: Regime) -> Runner:
        label = f"{problem.label()} on {DEFAULT_GPU.name}"
        sweep = recording_archive.find(problem, DEFAULT_GPU, Regime.preferred(regime))
        if sweep is not None:
            other = "" if sweep.regime == regime else f" (none was recorded in {regime})"
            self._note(f"replaying the recorded sweep of {label}, {sweep.regime}{other}")
            return ReplayRunner(sweep)
        self._note(
            f"no recording of {label}, {regime}: ranking by predicted time, nothing is compiled"
        )
        return PredictRunner(DEFAULT_GPU, regime)

    def compiler(self) -> Compiler:
        """One compiler for the whole job.

        Raises:
            CompileError: when nvcc, the host compiler or CUTLASS is missing.
        """
        if self._compiler is None:
            from tuner.compile import toolchain
            from tuner.compile.artifacts import ArtifactCache

            capability = (self.gpu or DEFAULT_GPU).compute_capability
            tools = toolchain.find_toolchain()
            self._compiler = self._create_compiler(tools, ArtifactCache(), capability)
        return self._compiler

    def _create_compiler(
        self, tools: Toolchain, artifacts: ArtifactCache, capability: str
    ) -> Compiler:
        from tuner.compile.compiler import Compiler

        return Compiler(tools, artifacts, self._machine.jobs, capability=capability)
