"""The rule for which measurements count as evidence for another shape. Standard library only.

A decision ranks configs at one problem. Quick measurements of the same compiled kernels at other
problems tell whether these kernels may serve there. `counts` is that rule; every reader applies
it. `query` and `QUICK_AND_MEASURED` are the part of it that SQL can state, so that a database does
not hand out every trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuner.measurement import Measurement, Provenance, same_kernels
from tuner.problem import Problem

QUICK_AND_MEASURED = (
    f"NOT measurements.is_final AND measurements.provenance = '{Provenance.MEASURED.value}'"
)
"""SQL condition on a row of ``measurements``."""


def counts(measurement: Measurement, ranked: Measurement) -> bool:
    """Whether a measurement tells how the kernels of a ranked one do at another problem: it is
    `comparable`, and ran the ranked measurement's config and machine code.
    """
    return (
        measurement.config == ranked.config
        and comparable(measurement, ranked)
        and same_kernels(measurement, ranked)
    )


def comparable(measurement: Measurement, ranked: Measurement) -> bool:
    """Whether a measurement of any config stands beside the evidence for a ranked one: measured at
    another problem in the quick pass, on the same GPU and under the same regime, and passed or
    failed by a fault of its kernels.
    """
    return (
        (measurement.ok or measurement.is_fault)
        and not measurement.is_final
        and measurement.provenance is ranked.provenance is Provenance.MEASURED
        and measurement.problem != ranked.problem
        and measurement.gpu.identity == ranked.gpu.identity
        and measurement.regime == ranked.regime
    )


def counted(
    measurements: Iterable[Measurement], ranked: Sequence[Measurement]
) -> list[Measurement]:
    """The measurements that count for one of the ranked ones, in their order."""
    return [m for m in measurements if any(counts(m, one) for one in ranked)]


def newest(measurements: Iterable[Measurement], ranked: Measurement) -> dict[Problem, Measurement]:
    """What counts for a ranked measurement, by problem; of several the newest."""
    found = (m for m in measurements if counts(m, ranked))
    return {m.problem: m for m in sorted(found, key=lambda m: m.created_at)}


def query(ranked: Sequence[Measurement], shapes: Sequence[Problem]) -> tuple[str, dict[str, str]]:
    """An SQL condition that every measurement at `shapes` meets which counts for a decision.

    Args:
        ranked: what the decision ranks and pins; not empty.
        shapes: the other problems.

    Returns:
        The condition, on the tables ``measurements``, ``problems`` and ``gpus``, and the values of
        its named parameters. Rows that meet it still go through `counted`.
    """
    keys = {f"shape_{i}": problem.key for i, problem in enumerate(shapes)}
    digests = {f"config_{i}": m.config.digest for i, m in enumerate(ranked)}
    condition = (
        f"{QUICK_AND_MEASURED} AND problems.key IN ({_listed(keys)}) "
        f"AND measurements.config_digest IN ({_listed(digests)}) "
        "AND measurements.regime = :regime AND gpus.identity = :gpu"
    )
    first = ranked[0]
    return condition, {**keys, **digests, "regime": first.regime.key, "gpu": first.gpu.identity}


def _listed(names: Iterable[str]) -> str:
    """Named parameters for ``IN``, which PostgreSQL does not take empty."""
    return ", ".join(f":{name}" for name in names) or "NULL"
