"""What a decision's kernels did at shapes around its problem, as a document has it. Standard
library only.

`tuner.nearest` needs a verdict and a time of each config at each shape; sixteen shapes of five
configs as whole measurements are 90 kB a decision, as rows of this room 2. A row is what one
sweep found:

``entry``         number of the decision in the document
``sweep``, ``created_at``, ``environment``    of its measurements
``configs``       numbers of ranked measurements, whose configs and kernels were run
``shapes``        pairs: the sizes in which the shape differs from the decision's problem, and of
                  each config its microseconds a call, how it failed, or null where it did not run
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tuner.measurement import Environment, Measurement, Provenance, Status
from tuner.problem import Problem, problem_from_json

_DIGITS = 3
"""Nanoseconds: a quick time is no better."""


def rows(
    entry: int, ranked: Mapping[int, Measurement], evidence: Iterable[Measurement]
) -> Iterator[dict[str, Any]]:
    """The rows of one decision, oldest first.

    Args:
        entry: the decision's number.
        ranked: what it ranks, and pins, by number.
        evidence: quick measurements, oldest first. What is of other configs, kernels or problems
            of the decision is left out; of one config at one shape the newest counts.
    """
    number = {m.config.digest: n for n, m in sorted(ranked.items(), reverse=True)}
    newest: dict[tuple[str, int], Measurement] = {}
    for m in evidence:
        at = number.get(m.config.digest)
        if at is not None and _speaks_for(m, ranked[at]):
            newest[m.problem.key, at] = m
    sweeps: dict[tuple[str, str], dict[tuple[str, int], Measurement]] = {}
    for place, m in sorted(newest.items()):
        sweeps.setdefault((m.sweep, m.environment.digest), {})[place] = m
    home = next(iter(ranked.values())).problem.to_json() if ranked else {}
    found = [_row(entry, home, of_sweep) for of_sweep in sweeps.values()]
    yield from sorted(found, key=lambda row: (row["created_at"], row["sweep"]))


def _speaks_for(m: Measurement, ranked: Measurement) -> bool:
    of = (m.gpu.identity, m.regime, dict(m.artifacts))
    return (
        not m.is_final
        and m.provenance is Provenance.MEASURED
        and m.problem != ranked.problem
        and of == (ranked.gpu.identity, ranked.regime, dict(ranked.artifacts))
    )


def _row(
    entry: int, home: Mapping[str, Any], found: Mapping[tuple[str, int], Measurement]
) -> dict[str, Any]:
    configs = sorted({at for _, at in found})
    problems = {key: m.problem for (key, _), m in found.items()}
    one = next(iter(found.values()))
    return {
        "entry": entry,
        "sweep": one.sweep,
        "created_at": max(m.created_at for m in found.values()),
        "environment": dict(one.environment.facts),
        "configs": configs,
        "shapes": [
            [_sizes(problem, home), [_value(found.get((key, at))) for at in configs]]
            for key, problem in problems.items()
        ],
    }


def _sizes(problem: Problem, home: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in problem.to_json().items() if home.get(name) != value}


def _value(m: Measurement | None) -> float | str | None:
    if m is None:
        return None
    return m.status.value if m.latency_us is None else round(m.latency_us, _DIGITS)


def measurements(row: Mapping[str, Any], ranked: Sequence[Measurement]) -> list[Measurement]:
    """What a row tells, each as a quick measurement that knows neither its error nor its clocks.

    Args:
        row: as `rows` makes it.
        ranked: what is at the numbers of ``configs``, in their order.

    Raises:
        ConfigError: when a shape is none.
        ValueError: when the row does not fit together; KeyError, TypeError likewise.
    """
    environment = Environment(row["environment"])
    found = []
    for sizes, values in row["shapes"]:
        if len(values) != len(ranked):
            raise ValueError(f"{len(values)} values of {len(ranked)} configs")
        problem = problem_from_json({**ranked[0].problem.to_json(), **sizes})
        for m, value in zip(ranked, values, strict=True):
            if value is None:
                continue
            is_time = not isinstance(value, str)
            found.append(
                Measurement(
                    problem,
                    m.config,
                    m.gpu,
                    m.regime,
                    Status.OK if is_time else Status(value),
                    environment=environment,
                    latency_us=float(value) if is_time else None,
                    artifacts=m.artifacts,
                    resources=m.resources,
                    sweep=row["sweep"],
                    created_at=row["created_at"],
                )
            )
    return found
