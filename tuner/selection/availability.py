"""Availability on this machine of kernels that a lookup names, and the command that is missing."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from tuner.base import document
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance
from tuner.problem import AttentionProblem, Problem
from tuner.selection.kernels import lists
from tuner.selection.result import LookupResult


class Availability(NamedTuple):
    """Verdict for calls on this machine."""

    is_served: bool
    reason: str
    """Reason why not, with the command that mends it; empty when it is served."""

    @property
    def text(self) -> str:
        """``yes``, or ``no:`` with the reason."""
        return "yes" if self.is_served else f"no: {self.reason}"


def of_answer(answer: LookupResult) -> Availability:
    """Availability of the kernel that a lookup names.

    Args:
        answer: a measured decision, whose kernels need to be built, or a portfolio's choice, whose
            kernels need a proof, too.
    """
    entry = answer.entry
    if answer.is_predicted:
        return of_kernel(entry.problem, entry.winner.config, entry.gpu)
    if entry.provenance is not Provenance.MEASURED:
        reason = f"{entry.provenance} times are not served"
        return Availability(False, f"{reason} (on a GPU: `tuner sweep {_shape(entry.problem)}`)")
    return _of_decision(entry.winner)


def of_kernel(problem: Problem, config: Config, gpu: Gpu) -> Availability:
    """Availability of a kernel that nothing was measured of here, by the kernel lists.

    Args:
        problem: problem that it is to compute.
        config: config of an own family or a vendor's.
        gpu: GPU that it is to run on.
    """
    specs = _kernels(problem, config)
    if isinstance(specs, str):
        return Availability(False, specs)
    if not specs:
        return Availability(True, "")  # a vendor's, by the caller's own library
    proven = lists.proven(specs, gpu.compute_capability)
    return Availability(False, proven) if isinstance(proven, str) else Availability(True, "")


def _of_decision(winner: Measurement) -> Availability:
    specs = _kernels(winner.problem, winner.config)
    if isinstance(specs, str):
        return Availability(False, specs)
    cache = ArtifactCache()
    keys = [winner.artifacts.get(name) for name in specs]
    if all(key is not None and cache.find(key) is not None for key in keys):
        return Availability(True, "")
    command = f"tuner build {_shape(winner.problem)} --gpu {shlex.quote(winner.gpu.name)}"
    return Availability(False, f"its kernel is not built (`{command}`)")


def _kernels(problem: Problem, config: Config) -> dict[str, KernelSpec] | str:
    """Kernels of a config, or the reason why this program has none: a family that was removed."""
    try:
        return family(config.family).kernels(problem, config)
    except ConfigError as exc:
        return str(exc)
    except document.FAULTS as exc:
        return f"{config.family} here is another version than the entry's ({exc!r})"


def _shape(problem: Problem) -> str:
    op = "" if isinstance(problem, AttentionProblem) else f"--op {problem.op} "
    return f"{op}--shape {problem.label()}"
