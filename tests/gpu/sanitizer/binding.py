"""From a plan's JSON to a kernel that can be launched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tuner.compile.artifacts import Artifact
from tuner.compile.loading import load
from tuner.config import Config
from tuner.families import family
from tuner.families.base import LSE, KernelSpec
from tuner.measure.device import Device
from tuner.measure.subjects import CompiledSubject
from tuner.problem import Problem

Libraries = Mapping[str, tuple[str, str, str]]
"""Key of a spec -> key, library and SHA-256 of its artifact."""


def libraries(built: Mapping[KernelSpec, Artifact]) -> Libraries:
    return {
        spec.key: (artifact.key, str(artifact.library), artifact.sha256)
        for spec, artifact in built.items()
    }


def subject(
    device: Device, problem: Problem, config: Config, scale: float, known: Libraries
) -> CompiledSubject:
    """A config's kernels, loaded, for one problem."""
    member = family(config.family)
    kernels = {}
    for name, spec in member.kernels(problem, config).items():
        key, library, sha256 = known[spec.key]
        kernels[name] = load(Artifact(key, Path(library), sha256, None, 0.0))
    return CompiledSubject(device, member, problem, config, kernels, scale)


def writes_lse(problem: Problem, config: Config, scale: float) -> bool:
    """The config's launches take a log-sum-exp."""
    launches = family(config.family).launches(problem, config, scale)
    return any(ref.operand == LSE for launch in launches for ref in launch.tensors)
