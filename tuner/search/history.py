"""Measurements of similar problems on the same GPU, which warm-start the search of a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING

from tuner.families import families
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.problem.base import doublings
from tuner.runners import recording_archive
from tuner.runners.recording import Recording
from tuner.selection.shipped import with_shipped

if TYPE_CHECKING:
    from tuner.store import Store

MAX_PROBLEMS = 12
"""Number of the store's nearest problems that are read."""


def history(
    problem: Problem, gpu: Gpu, regime: Regime, environment: Callable[[], str], store: Store
) -> list[Measurement]:
    """Quick measurements of own kernels at similar problems.

    Sources: the store's nearest problems, this problem's sweeps in other environments, and shipped
    recordings of problems that the store lacks.

    Args:
        problem: problem to be searched; its own recording is left out.
        gpu: GPU whose identity the measurements have.
        regime: regime of the measurements. A problem without any has chained ones of the same
            inputs.
        environment: function that returns the digest of the environment whose measurements of
            `problem` are left out: the search gets them from the store.
        store: store to read.
    """
    measurements: list[Measurement] = []
    for one in Regime.preferred(regime):
        excluded = {problem, *(m.problem for m in measurements)}
        # The search gets this environment's measurements in this regime, but no chained ones.
        digest_of = environment if one == regime else str
        measurements += _stored(problem, gpu, one, store, excluded - {problem}, digest_of)
        excluded |= {m.problem for m in measurements}
        for part in _shipped(gpu, one):
            if part.problem.op == problem.op and part.problem not in excluded:
                measurements += [m for m in part.measurements if not m.is_final]
    return [m for m in measurements if _is_own(m)]


def _stored(
    problem: Problem,
    gpu: Gpu,
    regime: Regime,
    store: Store,
    known: Collection[Problem],
    environment: Callable[[], str],
) -> list[Measurement]:
    """Quick measurements of the store's nearest problems that are not `known`, and of this problem
    in other environments.
    """
    decided = store.entries(op=problem.op, gpu=gpu, regime=regime, provenance=Provenance.MEASURED)
    near = sorted(
        {entry.problem for entry in decided} - {problem, *known},
        key=lambda p: (doublings(problem, p), p.key),
    )
    return [
        m
        for one in [problem, *near][: MAX_PROBLEMS + 1]
        for m in store.measurements(
            problem=one, gpu=gpu, regime=regime, provenance=Provenance.MEASURED, final=False
        )
        if one != problem or m.environment.digest != environment()
    ]


def measured(
    op: str, gpu: Gpu, regime: Regime, store: Store, with_finals: bool = False
) -> dict[Problem, list[Measurement]]:
    """The quick pass of every problem of an operation, vendors' kernels included.

    Measurements come from the store, in the environment of the decision, or else from the shipped
    recordings, all of a problem together. The final pass is added on request.
    """
    by_problem: dict[Problem, list[Measurement]] = {}
    for entry in store.entries(op=op, gpu=gpu, regime=regime, provenance=Provenance.MEASURED):
        by_problem[entry.problem] = store.measurements(
            problem=entry.problem,
            gpu=gpu,
            regime=regime,
            environment=entry.winner.environment.digest,
            provenance=Provenance.MEASURED,
            final=None if with_finals else False,
        )
    stored = frozenset(by_problem)
    for part in _shipped(gpu, regime):
        if part.problem.op == op and part.problem not in stored:
            rows = [m for m in part.measurements if with_finals or not m.is_final]
            by_problem.setdefault(part.problem, []).extend(rows)
    return {problem: quick for problem, quick in by_problem.items() if any(m.ok for m in quick)}


def measured_in(
    op: str, gpu: Gpu, regimes: Sequence[Regime], store: Store
) -> tuple[Regime, dict[Problem, list[Measurement]]]:
    """`measured` over several regimes, and the regime of most problems.

    Each problem's times are of the first regime that has some: of the quick pass, else of the final
    pass of a decision. Two problems' times may be of different regimes.
    """
    by_problem: dict[Problem, list[Measurement]] = {}
    counts: Counter[Regime] = Counter()
    decided = with_shipped(store.entries(op=op, gpu=gpu, provenance=Provenance.MEASURED))
    for one in regimes:
        finals = {
            entry.problem: list(entry.ranking)
            for entry in decided
            if (entry.problem.op, entry.gpu.identity) == (op, gpu.identity) and entry.regime == one
        }
        for problem, rows in {**finals, **measured(op, gpu, one, store)}.items():
            if problem not in by_problem:
                by_problem[problem] = rows
                counts[one] += 1
    return max(regimes, key=counts.__getitem__), by_problem


def _is_own(m: Measurement) -> bool:
    """True for a kernel that this version has; old stores and recordings hold others."""
    family = families().get(m.config.family)
    if family is None or family.is_vendor:
        return False
    return family.accepts(m.problem, m.config, m.gpu)


@cache
def _shipped(gpu: Gpu, regime: Regime) -> tuple[Recording, ...]:
    return tuple(part for one in recording_archive.taken(gpu, regime) for part in one.walk())
