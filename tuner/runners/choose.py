"""Which runner serves a problem: the GPU, else a recording, else prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tuner import recording
from tuner.errors import BenchmarkError, CompileError, ConfigError
from tuner.hardware import DEFAULT_GPU, OLDEST_CAPABILITY, Gpu
from tuner.measurement import Regime
from tuner.problem import Problem
from tuner.runners.base import Runner
from tuner.runners.predict import PredictRunner
from tuner.runners.replay import ReplayRunner

if TYPE_CHECKING:
    from tuner.compiler import Compiler
    from tuner.worker_client import WorkerClient


@dataclass(frozen=True)
class Machine:
    """Where to evaluate."""

    device: int = 0
    """CUDA device."""
    jobs: int | None = None
    """nvcc processes at a time; by default one a core."""
    max_workspace: int | None = None
    """Bytes that a candidate may use beside its operands."""
    replay: bool = False
    """Replay or predict even where a GPU is."""


class Runners:
    """The runners of one job, made when first needed; runners of one regime are shared, and all
    that measure on the GPU share one worker process.

    Args:
        machine: where to evaluate.
        note: told once what a person should know.
    """

    def __init__(self, machine: Machine, note: Callable[[str], None]) -> None:
        self._machine = machine
        self._note = note
        self._local: dict[str, Runner] = {}
        self._others: list[Runner] = []
        self._compiler: Compiler | None = None
        self._worker: WorkerClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for runner in [*self._local.values(), *self._others]:
            runner.close()
        if self._compiler is not None:
            self._compiler.close(cancel=True)

    def of(self, problem: Problem, regime: Regime) -> Runner:
        """The runner of a problem.

        Raises:
            CompileError: when there is a GPU and no compiler.
        """
        if self.gpu is not None:
            if str(regime) not in self._local:
                self._local[str(regime)] = self._create_local(regime)
            return self._local[str(regime)]
        runner = self._create_other(problem, regime)
        self._others.append(runner)
        return runner

    @cached_property
    def gpu(self) -> Gpu | None:
        """The GPU to measure on, looked for when first asked; says what is wrong with it.

        Raises:
            ConfigError: when a device was chosen that is not there.
        """
        if self._machine.replay:
            return None
        try:
            from tuner import device

            gpu = device.detect(self._machine.device)
        except ImportError:
            gpu = None
        if gpu is None and self._machine.device:
            raise ConfigError(f"device={self._machine.device} is no CUDA device of this machine")
        if gpu is None:
            self._note("no GPU found: nothing is measured here")
            return None
        if not gpu.is_served:
            self._note(
                f"{gpu.name} has compute capability {gpu.compute_capability}, the kernels need "
                f"{OLDEST_CAPABILITY} or newer: nothing is measured here"
            )
            return None
        try:
            for occupant in device.occupants(self._machine.device):
                self._note(f"the GPU is used by {occupant}: times will be unsteady")
        except BenchmarkError as exc:
            self._note(f"whether others use the GPU is not known: {exc}")
        return gpu

    def _create_local(self, regime: Regime) -> Runner:
        from tuner.runners.local import LocalRunner
        from tuner.worker_client import WorkerClient

        if self._worker is None:
            self._worker = WorkerClient(self._machine.device)
        return LocalRunner(
            self._machine.device,
            regime,
            self.compiler(),
            max_workspace=self._machine.max_workspace,
            worker=self._worker,
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
