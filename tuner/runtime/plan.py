"""From a looked-up answer to something that can be called: an own kernel or a vendor's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch

from tuner.artifacts import ArtifactCache, LoadedKernel, load
from tuner.config import Config
from tuner.errors import BenchmarkError, ConfigError
from tuner.families import family
from tuner.families.base import SCRATCH, Family, Launch
from tuner.lookup import Answer
from tuner.measurement import Measurement, Provenance
from tuner.problem import Operand, Problem

#: Workspaces start at multiples of this, as an allocation of their own would.
_ALIGNMENT = 256


@dataclass(frozen=True)
class Plan:
    """A resolved call for one problem, scale and device."""

    config: Config
    run: Callable[..., torch.Tensor]
    """run(*inputs) -> output, on the current stream of the current device."""


@dataclass(frozen=True)
class _Step:
    kernel: LoadedKernel
    launch: Launch
    workspace_at: int
    """Offset in the call's workspace."""


def resolve(
    problem: Problem, answer: Answer, scale: float, withdrawn: Collection[Config]
) -> Plan | str:
    """The best measured entry of `answer` that this machine can run, or why there is none.

    Predicted and replayed entries, failed ones and `withdrawn` configs are never taken.
    """
    reasons: list[str] = []
    for measurement in _candidates(answer):
        config = measurement.config
        if measurement.provenance is not Provenance.MEASURED:
            reasons.append(f"{config.family} is {measurement.provenance}, not measured")
        elif not measurement.ok or measurement.problem != problem:
            reasons.append(f"{config.family} did not pass for this problem")
        elif config in withdrawn:
            reasons.append(f"{config.family} failed in this process")
        else:
            run = _connect(problem, measurement, scale)
            if not isinstance(run, str):
                return Plan(config, run)
            reasons.append(run)
    return "; ".join(dict.fromkeys(reasons)) or "the entry has no candidates"


def _candidates(answer: Answer) -> Iterator[Measurement]:
    """The winner (the pinned one, if any), then the ranking."""
    yield answer.entry.winner
    yield from (m for m in answer.entry.ranking if m.config != answer.entry.winner.config)


def _connect(
    problem: Problem, measurement: Measurement, scale: float
) -> Callable[..., torch.Tensor] | str:
    try:
        member = family(measurement.config.family)
        if member.is_vendor:
            return member.vendor_call(problem, measurement.config, scale)
        return _own_call(problem, member, measurement, scale)
    except (BenchmarkError, ConfigError) as exc:
        return str(exc)


def _own_call(
    problem: Problem, member: Family, measurement: Measurement, scale: float
) -> Callable[..., torch.Tensor] | str:
    """The launches of an own config; a reason when one of its artifacts is not here."""
    cache = ArtifactCache()
    kernels: dict[str, LoadedKernel] = {}
    for name, key in measurement.artifacts.items():
        artifact = cache.find(key)
        if artifact is None:
            return f"artifact {key} of {member.name} is not in the cache (tuner build makes it)"
        kernels[name] = load(artifact)
    config = measurement.config
    steps: list[_Step] = []
    offset = _aligned(member.scratch_bytes(problem, config))
    for launch in member.launches(problem, config, scale):
        if launch.kernel not in kernels:
            return f"{member.name} names no artifact for its kernel '{launch.kernel}'"
        kernel = kernels[launch.kernel]
        # One workspace a launch: with programmatic dependent launch two are alive at once.
        steps.append(_Step(kernel, launch, offset))
        offset += _aligned(kernel.workspace_bytes(launch.integers))
    if not steps:
        return f"{member.name} has no launches for {problem.label()}"
    return _caller(problem, steps, offset)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


def _caller(
    problem: Problem, steps: list[_Step], workspace_bytes: int
) -> Callable[..., torch.Tensor]:
    output: Operand = problem.output
    names = [operand.name for operand in problem.operands]
    dtype = getattr(torch, output.dtype)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        device = inputs[0].device
        out = torch.empty_strided(output.shape, output.strides, dtype=dtype, device=device)
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=device)
        base = workspace.data_ptr()
        addresses = dict(zip(names, (t.data_ptr() for t in (*inputs, out)), strict=True))
        addresses[SCRATCH] = base
        stream = torch.cuda.current_stream(device).cuda_stream
        for step in steps:
            tensors = [addresses[r.operand] + r.offset_bytes for r in step.launch.tensors]
            step.kernel.launch(
                tensors,
                step.launch.integers,
                step.launch.scalars,
                base + step.workspace_at,
                stream,
            )
        return out

    return run
