"""Ranks by the families' own estimates where no GPU is. Everything it answers is *predicted*."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError, RenderError
from tuner.families import family as family_by_name
from tuner.families.base import Family, KernelSpec
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Status
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.artifacts import Artifact
    from tuner.compiler import Compiler

Kernels = dict[str, "Future[Artifact]"]


class PredictRunner:
    """Compiles candidates, so that only what builds is ranked, and estimates their times.

    Args:
        gpu: the GPU to estimate for.
        regime: what the estimates stand for; they do not depend on it.
        compiler: None where there is no nvcc: nothing is compiled then.
        catalogue: finds a family by name.
    """

    def __init__(
        self,
        gpu: Gpu,
        regime: Regime,
        compiler: Compiler | None,
        catalogue: Callable[[str], Family] = family_by_name,
    ) -> None:
        self.gpu = gpu
        self.provenance = Provenance.PREDICTED
        self.capacity = 1 if compiler is None else 2 * compiler.jobs
        self._regime = regime
        self._compiler = compiler
        self._catalogue = catalogue
        self._queue: deque[tuple[Problem, list[Config], Kernels]] = deque()
        self._is_cancelled = False
        self._built: dict[tuple[str, str], Measurement] = {}
        tools = compiler.toolchain if compiler is not None else None
        self.environment = Environment(
            {"nvcc": tools.nvcc_version, "cutlass": tools.cutlass_version} if tools else {}
        )

    @property
    def building(self) -> int:
        return sum(any(not f.done() for f in kernels.values()) for _, _, kernels in [*self._queue])

    def restrict(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """Vendors' kernels cannot be estimated, only measured."""
        return [] if family.is_vendor else space

    def compiled(
        self, problem: Problem, family: Family, space: Sequence[Config]
    ) -> Sequence[Config]:
        """All where there is no compiler."""
        return space if self._compiler is None else self._compiler.compiled(family, problem, space)

    def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
        """Have the compiler see the groups together: it puts several in one translation unit."""
        if self._compiler is not None:
            specs = [spec for group in groups for spec in self._specs(problem, group[0]).values()]
            self._compiler.submit(specs)

    def submit(self, problem: Problem, group: Sequence[Config]) -> None:
        kernels: Kernels = {}
        if self._compiler is not None:
            specs = self._specs(problem, group[0])
            found = self._compiler.submit(list(specs.values()))
            kernels = {name: future for name, (_, future) in zip(specs, found, strict=True)}
        self._is_cancelled = False
        self._queue.append((problem, list(group), kernels))

    def collect(self) -> list[Measurement]:
        """The oldest group, once its kernels are built.

        Raises:
            BenchmarkError: when nothing was submitted.
            StoreError: when the disk is full.
        """
        try:
            problem, group, kernels = self._queue.popleft()
        except IndexError:
            if self._is_cancelled:
                return []
            raise BenchmarkError("nothing was submitted to collect") from None
        built: dict[str, Artifact] = {}
        failure: CompileError | RenderError | None = None
        for name, future in kernels.items():
            try:
                built[name] = future.result()
            except (CompileError, RenderError) as exc:
                failure = exc
        measured = [self._measurement(problem, config, built, failure) for config in group]
        self._built.update({(problem.key, m.config.digest): m for m in measured})
        return measured

    def retime(
        self, problem: Problem, finalists: Sequence[Config], rounds: int
    ) -> list[Measurement]:
        """The estimates again; there is nothing to time."""
        return [
            (
                self._built.get((problem.key, c.digest)) or self._measurement(problem, c, {}, None)
            ).but(is_final=True)
            for c in finalists
        ]

    def cancel(self) -> None:
        self._is_cancelled = True
        self._queue.clear()

    def close(self) -> None:
        """The compiler belongs to whoever made it."""
        self.cancel()

    def _specs(self, problem: Problem, config: Config) -> dict[str, KernelSpec]:
        return self._catalogue(config.family).kernels(problem, config)

    def _measurement(
        self,
        problem: Problem,
        config: Config,
        built: dict[str, Artifact],
        failure: CompileError | RenderError | None,
    ) -> Measurement:
        family = self._catalogue(config.family)
        m = Measurement(
            problem,
            config,
            self.gpu,
            self._regime,
            Status.OK,
            self.provenance,
            self.environment,
            workspace_bytes=family.scratch_bytes(problem, config),
            artifacts={name: artifact.key for name, artifact in built.items()},
            resources={name: a.resources for name, a in built.items() if a.resources is not None},
            compile_cpu_s=sum(artifact.compile_cpu_s for artifact in built.values()),
        )
        if failure is not None:
            log = failure.log if isinstance(failure, CompileError) else ""
            return m.but(status=Status.COMPILE_ERROR, log=f"{failure}\n{log}".strip())
        return m.but(latency_us=family.predict_us(problem, config, self.gpu))
