"""What was measured of like problems on the same chip: it warm-starts the search of a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache

from tuner.families import families
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.problem.base import doublings
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.store import Store

MOST_PROBLEMS = 12
"""Problems of the store that are read, the nearest ones."""


def history(
    problem: Problem, gpu: Gpu, regime: Regime, environment: str, store: Store
) -> list[Measurement]:
    """Quick measurements of own kernels from the store's nearest problems, from this one's sweeps
    in other environments, and from the shipped recordings of problems that the store has not.

    Args:
        problem: what is to be searched; its own recording is left out.
        gpu: measured on GPUs with this identity.
        regime: timed so; of a problem without such measurements, chained ones of the same inputs.
        environment: digest of the one whose measurements of `problem` the search is told anyway.
        store: where to look.
    """
    found: list[Measurement] = []
    for one in Regime.preferred(regime):
        known = {problem, *(m.problem for m in found)}
        # What was timed so in this environment is told anyway, what was chained is not.
        told = environment if one == regime else ""
        found += _stored(problem, gpu, one, store, known - {problem}, told)
        known |= {m.problem for m in found}
        for part in _shipped():
            here = (part.gpu.identity, part.regime) == (gpu.identity, one)
            if here and part.problem.op == problem.op and part.problem not in known:
                found += [m for m in part.measurements if not m.is_final]
    return [m for m in found if _is_own(m)]


def _stored(
    problem: Problem,
    gpu: Gpu,
    regime: Regime,
    store: Store,
    known: Collection[Problem],
    environment: str,
) -> list[Measurement]:
    """Quick measurements of the store's nearest problems that are not `known`, and of this one
    in other environments.
    """
    decided = store.entries(op=problem.op, gpu=gpu, regime=regime, provenance=Provenance.MEASURED)
    near = sorted(
        {entry.problem for entry in decided} - {problem, *known},
        key=lambda p: (doublings(problem, p), p.key),
    )
    return [
        m
        for one in [problem, *near][: MOST_PROBLEMS + 1]
        for m in store.measurements(
            problem=one, gpu=gpu, regime=regime, provenance=Provenance.MEASURED, final=False
        )
        if one != problem or m.environment.digest != environment
    ]


def measured(
    op: str, gpu: Gpu, regime: Regime, store: Store, with_finals: bool = False
) -> dict[Problem, list[Measurement]]:
    """The quick pass of every problem of an operation, vendors' kernels among it, and the final one
    where that is wanted: of the store, in the environment of its decision, else of the shipped
    recordings.
    """
    found: dict[Problem, list[Measurement]] = {}
    for entry in store.entries(op=op, gpu=gpu, regime=regime, provenance=Provenance.MEASURED):
        found[entry.problem] = store.measurements(
            problem=entry.problem,
            gpu=gpu,
            regime=regime,
            environment=entry.winner.environment.digest,
            provenance=Provenance.MEASURED,
            final=None if with_finals else False,
        )
    for part in _shipped():
        here = (part.problem.op, part.gpu.identity, part.regime) == (op, gpu.identity, regime)
        if here and part.problem not in found:
            found[part.problem] = [m for m in part.measurements if with_finals or not m.is_final]
    return {problem: quick for problem, quick in found.items() if any(m.ok for m in quick)}


def measured_in(
    op: str, gpu: Gpu, regimes: Sequence[Regime], store: Store
) -> tuple[Regime, dict[Problem, list[Measurement]]]:
    """`measured` under several regimes: of each problem what the first that has some says, and the
    regime of most problems. Times of one problem are of one regime, those of two need not be.
    """
    found: dict[Problem, list[Measurement]] = {}
    counts: Counter[Regime] = Counter()
    for one in regimes:
        for problem, rows in measured(op, gpu, one, store).items():
            if problem not in found:
                found[problem] = rows
                counts[one] += 1
    return max(regimes, key=counts.__getitem__), found


def _is_own(m: Measurement) -> bool:
    """True if it is of a kernel that exists still; an old store or recording may hold others."""
    family = families().get(m.config.family)
    if family is None or family.is_vendor:
        return False
    return family.accepts(m.problem, m.config, m.gpu)


@cache
def _shipped() -> tuple[Recording, ...]:
    paths = sorted(recording.folder().glob(f"*{recording.SUFFIX}"))
    return tuple(part for path in paths for part in recording.read(path).walk())
