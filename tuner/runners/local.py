"""Evaluate on this machine: compile in the background, time on its GPU."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tuner import device
from tuner.compiler import Compiler
from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.evaluate import Evaluator, Pending
from tuner.families import families, families_in
from tuner.families.base import Family
from tuner.hardware import HOPPER, Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.worker_client import TIMEOUT_S, WorkerClient


class LocalRunner:
    """One GPU under one regime. The compiler is the caller's to close.

    Args:
        device_index: CUDA device.
        regime: how candidates are timed.
        compiler: works in the background while `collect` times what is ready.
        max_workspace: bytes that a candidate may use beside its operands; None: no limit.
        timeout_s: longest silence of the worker beyond what a phase announces.
        family_modules: Python files that define further families, for tests.
        gpu: what the device is, where that is known (default: ask it).
        worker: what measures (default: a worker process on the device).

    Raises:
        BenchmarkError: when there is no such GPU.
    """

    provenance = Provenance.MEASURED

    def __init__(
        self,
        device_index: int,
        regime: Regime,
        compiler: Compiler,
        *,
        max_workspace: int | None = None,
        timeout_s: float = TIMEOUT_S,
        family_modules: Sequence[Path] = (),
        gpu: Gpu | None = None,
        worker: WorkerClient | None = None,
    ) -> None:
        found = gpu or device.detect(device_index)
        if found is None:
            raise BenchmarkError(f"CUDA device {device_index} is not there")
        self.gpu = found
        self.regime = regime
        # Full translation units on every core; a search that learns submits fewer.
        self.capacity = compiler.batch * compiler.jobs
        self._index, self._compiler = device_index, compiler
        members: dict[str, Family] = dict(families())
        for path in family_modules:
            members |= families_in(path)
        self._worker = worker or WorkerClient(
            device_index, family_modules=family_modules, timeout_s=timeout_s
        )
        self._evaluator = Evaluator(
            found,
            regime,
            compiler,
            self._worker,
            members,
            lambda: self.environment,
            max_workspace,
        )
        self._pending: list[Pending] = []

    @cached_property
    def environment(self) -> Environment:
        """Facts of this machine, the compiler and the vendors' libraries; starts the worker."""
        tools = self._compiler.toolchain
        facts = dict(device.environment(self._index).facts)
        facts |= {"nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version}
        if self.gpu.compute_capability != HOPPER and tools.triton_version:
            # Where its kernels compete. Hopper's times have nothing of it.
            facts["triton"] = tools.triton_version
        facts |= self._worker.facts()
        return Environment(facts)

    @property
    def building(self) -> int:
        return sum(not pending.is_ready for pending in [*self._pending])

    def restrict(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        return space

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        self._evaluator.prefetch(problem, [config for group in groups for config in group])

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        self._pending.append(self._evaluator.start(problem, group))

    def collect(self) -> list[Measurement]:
        """Time whichever group is compiled first, while the others compile on.

        Raises:
            BenchmarkError: when nothing was submitted, or the GPU cannot be used.
        """
        if not self._pending:
            raise BenchmarkError("nothing was submitted to collect")
        while True:
            for pending in self._pending:
                if pending.is_ready:
                    self._pending.remove(pending)
                    return self._evaluator.finish(pending)
            running = [f for p in self._pending for f in p.futures.values() if not f.done()]
            concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)

    def retime(
        self, problem: Problem, finalists: Sequence[Config], rounds: int
    ) -> list[Measurement]:
        pending = self._evaluator.start(problem, finalists)
        return self._evaluator.finish(pending, mode="final", rounds=rounds)

    def close(self) -> None:
        self._pending.clear()
        self._worker.close()
