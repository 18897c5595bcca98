"""Which runner serves a problem: the GPUs, else a recording, else prediction."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tuner import recording
from tuner.errors import CompileError
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.runners.predict import PredictRunner
from tuner.runners.replay import ReplayRunner

if TYPE_CHECKING:
    from tuner.compiler import Compiler
    from tuner.runners.pool import WorkerPool


@dataclass(frozen=True)
class Machine:
    """Where to evaluate."""

    devices: tuple[int, ...] | None = (0,)
    """CUDA devices of one kind; None: all that are alike and free (`gpus.choose`)."""
    jobs: int | None = None
    """nvcc processes at a time; by default one a core."""
    max_workspace: int | None = None
    """Bytes that a candidate may use beside its operands."""
    replay: bool = False
    """Replay or predict even where a GPU is."""


class Runners:
    """The runners of one job, made when first needed; runners of one regime are shared, and all
    that measure share the GPUs' worker processes. Safe between threads.

    Args:
        machine: where to evaluate.
        note: told once what a person should know.
    """

    def __init__(self, machine: Machine, note: Callable[[str], None]) -> None:
        self._machine = machine
        self._note = note
        self._lock = threading.RLock()
        self._local: dict[str, Runner] = {}
        self._others: list[Runner] = []
        self._compiler: Compiler | None = None
        self._pool: WorkerPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started; what waits for a result gets none. From any thread."""
        for runner in [*self._local.values(), *self._others]:
            runner.close()
        if self._pool is not None:
            self._pool.close()
        if self._compiler is not None:
            self._compiler.close(cancel=True)

    def of(self, problem: Problem, regime: Regime) -> Runner:
        """The runner of a problem.

        Raises:
            CompileError: when there is a GPU and no compiler.
        """
        with self._lock:
            if self.gpu is not None:
                if str(regime) not in self._local:
                    self._local[str(regime)] = self._create_local(self.gpu, regime)
                return self._local[str(regime)]
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
        """The GPUs to measure on, looked for when first asked; says what is wrong with them.

        Raises:
            ConfigError: when a device was chosen that is not there, or differs from the first.
        """
        if self._machine.replay:
            return ()
        from tuner.runners import gpus

        return gpus.choose(self._machine.devices, self._note)

    @cached_property
    def gpu(self) -> Gpu | None:
        """What the GPUs to measure on are; None where nothing is measured.

        Raises:
            ConfigError: as `devices`.
        """
        from tuner import device

        return device.detect(self.devices[0]) if self.devices else None

    def _create_local(self, gpu: Gpu, regime: Regime) -> Runner:
        from tuner.runners.local import LocalRunner
        from tuner.runners.pool import WorkerPool
        from tuner.worker_client import WorkerClient

        if self._pool is None:
            self._pool = WorkerPool([WorkerClient(index) for index in self.devices])
        return LocalRunner(
            self.devices[0],
            regime,
            self.compiler(),
            max_workspace=self._machine.max_workspace,
            gpu=gpu,
            pool=self._pool,
        )

    def _create_other(self, problem: Problem, regime: Regime) -> Runner:
        found = recording.find(problem, DEFAULT_GPU, regime)
        label = f"{problem.label()} on {DEFAULT_GPU.name}, {regime}"
        if found is not None:
            self._note(f"replaying the recorded sweep of {label}")
            return ReplayRunner(found)
        try:
            compiler: Compiler | None = self.compiler()
        except CompileError as exc:
            compiler = None
            self._note(f"nothing is compiled: {exc}")
        self._note(f"no recording of {label}: ranking by predicted time")
        return PredictRunner(DEFAULT_GPU, regime, compiler)

    def compiler(self) -> Compiler:
        """One compiler for the whole job.

        Raises:
            CompileError: when nvcc, the host compiler or CUTLASS is missing.
        """
        if self._compiler is None:
            from tuner import settings
            from tuner.artifacts import ArtifactCache
            from tuner.compiler import Compiler
            from tuner.toolchain import find_toolchain

            artifacts = ArtifactCache(settings.artifacts_dir())
            capability = (self.gpu or DEFAULT_GPU).compute_capability
            self._compiler = Compiler(
                find_toolchain(), artifacts, self._machine.jobs, capability=capability
            )
        return self._compiler
