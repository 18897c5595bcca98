"""Availability on this machine of kernels that a lookup names, and the command that is missing."""

from __future__ import annotations

import shlex
from typing import NamedTuple

from tuner import settings
from tuner.base import document
from tuner.compile.artifacts import ArtifactCache
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import family
from tuner.families.base import KernelSpec
from tuner.families.peers import FLEX, MEASURED_ONLY, installed, may_answer, owner_of
from tuner.families.rule import RuleSelection
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance
from tuner.problem import AttentionProblem, Problem
from tuner.selection.describe import short_name
from tuner.selection.kernels import lists
from tuner.selection.result import LookupResult
from tuner.store.entry import is_vendor

PYTORCH = owner_of("")
"""Owner of the kernels that PyTorch chooses by itself."""


class Availability(NamedTuple):
    """Verdict for calls on this machine."""

    is_served: bool
    reason: str
    """Reason why not, with the command that mends it; empty when it is served."""
    instead: str = "PyTorch"
    """Owner of the calls until then."""

    @property
    def text(self) -> str:
        """``yes``, or ``no:`` with the reason and the name of the kernel in its place."""
        return "yes" if self.is_served else f"no: {self.reason}; {self.instead} answers"


def switched(verdict: Availability) -> Availability:
    """The verdict, or that everything is switched off."""
    return Availability(False, "TUNER_DISABLE is set") if settings.disabled() else verdict


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
    verdict = _of_decision(entry.winner)
    if verdict.is_served:
        return verdict
    is_own_named = not is_vendor(entry.winner.config)
    for second in answer.candidates[1:]:
        after, config = _of_decision(second), second.config
        if after.is_served:
            is_pytorchs = is_vendor(config) and owner_of(config.get("kernel")) == PYTORCH
            return verdict._replace(instead="PyTorch" if is_pytorchs else short_name(second))
        if not is_own_named and not is_vendor(config):
            is_own_named = True
            reason = f"{verdict.reason}; {short_name(second)}: {after.reason}"
            verdict = verdict._replace(reason=reason)
    return verdict


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
        return _of_vendor(problem, config)
    proven = lists.proven(specs, gpu.compute_capability)
    return Availability(False, proven) if isinstance(proven, str) else Availability(True, "")


def without_absent(problem: Problem, selected: RuleSelection, gpu: Gpu) -> RuleSelection:
    """A rule's kernels without those of peers that are not installed here, if others are left."""
    left = tuple(
        (us, config)
        for us, config in selected.expected
        if not is_vendor(config) or of_kernel(problem, config, gpu).is_served
    )
    return selected._replace(expected=left) if left else selected


def _of_decision(winner: Measurement) -> Availability:
    specs = _kernels(winner.problem, winner.config)
    if isinstance(specs, str):
        return Availability(False, specs)
    if not specs:
        return _of_vendor(winner.problem, winner.config)
    cache = ArtifactCache()
    keys = [winner.artifacts.get(name) for name in specs]
    if all(key is not None and cache.find(key) is not None for key in keys):
        return Availability(True, "")
    command = f"tuner build {_shape(winner.problem)} --gpu {shlex.quote(winner.gpu.name)}"
    return Availability(False, f"its kernel is not built (`{command}`)")


def _of_vendor(problem: Problem, config: Config) -> Availability:
    """Availability of a kernel of PyTorch's, or of a peer's that is installed."""
    kernel = str(config.get("kernel"))
    is_pytorchs = kernel == FLEX and bool(getattr(problem, "block_mask", ""))
    reason = family(config.family).lacks()
    if kernel in MEASURED_ONLY and not is_pytorchs:
        reason = f"{kernel} takes part in measurements only"
    elif (owner := owner_of(kernel)) in installed.PEERS and not installed.build_of(kernel):
        reason = f"{owner} is not installed here (`tuner doctor`)"
    elif not may_answer(kernel):
        reason = f"TUNER_ANSWERS leaves out {owner}"
    return Availability(not reason, reason)


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
