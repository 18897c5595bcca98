"""Peers' kernels that ``TUNER_BENCHMARK`` times beside own ones on the call's tensors.

They need no rates. Before it is timed, a peer's output is compared with PyTorch's.
"""

from __future__ import annotations

import torch

from tuner.config import Config
from tuner.errors import BenchmarkError
from tuner.families import families_of
from tuner.families.base import Family
from tuner.families.peers import ANSWERS, FAILURES, may_answer
from tuner.hardware import Gpu
from tuner.problem import Problem
from tuner.runtime.call import counters, native
from tuner.runtime.call.benchmark import Run
from tuner.runtime.call.plan import Plan

LISTED = 8
"""Most candidates of a library's list, by its own order: as many as cuBLASLt returns."""
ROUNDINGS = 2
"""PyTorch's output and a peer's may each be off by the gate's limit."""


def contending(problem: Problem, gpu: Gpu) -> list[Config]:
    """Peers' kernels that may answer a problem, by the order of their families."""
    every = [member for member in families_of(problem.op).values() if member.is_vendor]
    peers: list[Config] = []
    for member in every:
        if not member.supports(problem, gpu) and not member.lacks():
            space = [c for c in member.space(problem, gpu) if c.get("kernel") in ANSWERS]
            if space and may_answer(space[0]["kernel"]):
                peers += _listed(problem, member) if member.is_listed else space
    return [c for c in peers if may_answer(c["kernel"])]


def _listed(problem: Problem, member: Family) -> list[Config]:
    """The first candidates of a library's list; none where it has none for the problem."""
    try:
        return list(native.call(member.listing, problem, None))[:LISTED]
    except FAILURES as exc:
        counters.count_error(f"{member.name} lists nothing: {problem.label()}: {exc!r:.200}")
        return []


def agrees(problem: Problem, plan: Plan, run: Run) -> bool:
    """True if a plan's output is PyTorch's within the gate's limits."""
    # Its imports would be part of every program's first call.
    from tuner.measure.tolerance import limits_of

    limits = limits_of(problem)
    try:
        out, due = run(plan), run(None)
    except BenchmarkError:
        return False
    if not isinstance(out, torch.Tensor) or not isinstance(due, torch.Tensor):
        return False
    theirs = due.reshape(out.shape).float()
    error = (out.float() - theirs).norm()
    return bool(error <= ROUNDINGS * limits.frobenius * theirs.norm())
