"""`tuner prove` of kernels that a test has compiled, in the worker's process."""

from __future__ import annotations

from pathlib import Path

from tuner.compile.compiler import Compiler
from tuner.config import Config
from tuner.families.target import Target
from tuner.hardware import DEFAULT_GPU
from tuner.measure.device import detect
from tuner.measure.gate import REFERENCE
from tuner.measure.worker_client import WorkerClient
from tuner.problem import AttentionProblem
from tuner.selection.kernel_list import Kernel, KernelList
from tuner.tuning.proof import Prover, plan


def attention_target(text: str, config: Config) -> Target:
    """The compiled part of a config of fused attention, with the usual launch."""
    problem = AttentionProblem.parse(f"S=512,{text}")
    at_run_time = Target(config, problem).family.runtime_parameters
    params = {name: value for name, value in config.params.items() if name not in at_run_time}
    return Target(Config(config.family, {**params, "splits": 1, "pdl": False}), problem)


def faults(
    compiler: Compiler,
    worker: WorkerClient,
    path: Path,
    target: Target,
    artifact_of: Target | None = None,
) -> list[str]:
    """Faults of a kernel in at least 64 drawn problems; without one its proof is in the list.

    Args:
        compiler: compiles it.
        worker: process that judges it.
        path: place of a kernel list.
        target: the kernel.
        artifact_of: another kernel, whose library stands in the list for the target's.
    """
    [spec] = target.kernels.values()
    wanted = [REFERENCE, *(artifact_of or target).kernels.values()]
    reference, built = (future.result() for _, future in compiler.submit(wanted))
    known = KernelList(compiler.toolchain.nvcc_version, "", compiler.capability)
    listed = ((REFERENCE, reference), (spec, built))
    known.with_kernels(Kernel.of(one, artifact) for one, artifact in listed).write(path)
    todo = plan(path, [target])
    assert len(todo.waiting) == 1
    found = Prover(detect() or DEFAULT_GPU, "", [worker]).run(todo).faults
    kernel = KernelList.read(path).find(spec)
    assert kernel is not None and (kernel.proof is None) == bool(kernel.fault) == bool(found)
    assert kernel.proof is None or kernel.proof.problems >= 64
    return list(found)
