"""Own kernels that no decision chose: those that are built, and plans of them."""

from __future__ import annotations

import math
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from tuner.base.processes import python_command, python_environment
from tuner.compile.loading import LoadedKernel, load
from tuner.config import Config
from tuner.errors import BenchmarkError, CompileError
from tuner.families.base import KernelSpec
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import Problem, listing

MAX_ESTIMATE = 2.5
"""Longest estimate of a kernel that is timed, over the shortest."""


def own_plan(
    problem: Problem, config: Config, artifacts: Mapping[str, str], scale: float = 1.0
) -> Any:
    """A plan (`tuner.runtime.call.plan`) of a config on this GPU, or a text why there is none.

    Args:
        problem: problem to compute.
        config: config of an own family.
        artifacts: keys of its compiled kernels by their names.
        scale: factor of attention's scores.
    """
    from tuner.runtime.call import devices
    from tuner.runtime.call.plan import Plan, Posed, plan_of

    measurement = Measurement(
        problem,
        config,
        devices.gpu_of(0),
        Regime(),
        Status.OK,
        Provenance.PREDICTED,
        artifacts=dict(artifacts),
    )
    plan = plan_of(Posed(problem, scale), measurement, 0)
    return plan if isinstance(plan, Plan) else plan.detail


def plans_of(problem: Any, selection: Any, *, unproven: bool) -> Iterator[tuple[Any, Any]]:
    """Kernels of a rule's selection that are proven here, as plans, in its order.

    Args:
        problem: problem to compute.
        selection: a `RuleSelection`, or None.
        unproven: also kernels that are only built.
    """
    from tuner.families import families
    from tuner.runtime.call import devices
    from tuner.selection.kernels import lists

    gpu, longest = devices.gpu_of(0), math.inf
    for us, config in selection.own() if selection is not None else ():
        longest = min(longest, us * MAX_ESTIMATE)
        if us > longest:
            return
        specs = families()[config.family].kernels(problem, config)
        found = built_artifacts(specs) if unproven else lists.proven(specs, gpu.compute_capability)
        if isinstance(found, str):
            continue
        plan = own_plan(problem, config, found)
        if not isinstance(plan, str):
            yield config, plan


@cache
def compiler() -> Any:
    """The compiler of this process."""
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain

    return Compiler(find_toolchain(), ArtifactCache(), jobs=1)


def built_artifacts(specs: Mapping[str, Any]) -> dict[str, str] | str:
    """Keys of the built artifacts of kernels, or why there are none."""
    found = {name: compiler().cached(spec) for name, spec in specs.items()}
    if None in found.values():
        return "a kernel is not built"
    return {name: artifact.key for name, artifact in found.items()}


@cache
def kernel_of(spec: KernelSpec) -> LoadedKernel:
    """A kernel, compiled where it is not yet.

    Raises:
        CompileError: without a compiler, or when it is refused.
    """
    ((_, future),) = compiler().submit([spec])
    return load(future.result())


def compile_specs(specs: Iterable[KernelSpec], *, serves: bool = False) -> None:
    """Compile kernels on all cores, for a run with a GPU.

    Args:
        specs: kernels.
        serves: True to enter them in the user's kernel list, so that proven ones serve.

    Raises:
        CompileError: without a compiler, or when a kernel is refused.
    """
    from tuner.cli.aot import compile_aot
    from tuner.cli.portfolio import starting_list
    from tuner.compile.artifacts import ArtifactCache
    from tuner.compile.compiler import Compiler
    from tuner.compile.toolchain import find_toolchain
    from tuner.selection.kernels import path_of, update
    from tuner.tuning.built import BuiltKernels

    with Compiler(find_toolchain(), ArtifactCache()) as every:

        def enter(spec: KernelSpec, artifact: Any) -> None:
            if entries is not None:
                entries.enter(spec, artifact)

        entries = None
        if serves:
            path = path_of(every.toolchain.nvcc_version, every.capability)
            update(path, lambda known: known, start=lambda: starting_list(path, every))
            entries = BuiltKernels(path, force=False)
        if compile_aot(list(dict.fromkeys(specs)), every, None, finished=enter):
            raise CompileError("not every kernel is compiled; the lines above say why")


def build(*arguments: str, **environment: str) -> None:
    """Run ``tuner build`` for the GPU that the portfolio is for.

    Args:
        arguments: its arguments.
        environment: variables of its process.

    Raises:
        BenchmarkError: when a kernel is not there at its end.
    """
    command = python_command("-m", "tuner", "build", *arguments, "--gpu", DEFAULT_GPU.name)
    if subprocess.run(command, env={**python_environment(), **environment}, check=False).returncode:
        raise BenchmarkError("not every kernel is built; the lines above say why")


def build_problems(problems: Iterable[Problem]) -> None:
    """Build what answers some problems.

    Raises:
        BenchmarkError: when a kernel is not there at its end.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(listing(dict.fromkeys(problems)))
        file.flush()
        build("--problems", file.name)
