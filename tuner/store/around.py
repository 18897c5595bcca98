"""What a decision's kernels did at shapes around its problem, as a document has it. Standard
library only.

`tuner.selection.nearest` needs a verdict and a time of each config at each shape; sixteen shapes of
five configs as whole measurements are 100 kB a decision, as rows of this room 2. A row is what one
sweep found:

``entry``         number of the decision in the document
``sweep``, ``environment``    of its measurements
``configs``       numbers of ranked measurements, whose configs and kernels were run
``shapes``        of each shape the sizes in which it differs from the decision's problem; of each
                  config its microseconds a call, how it failed, or null where it did not run; when
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tuner.measurement import Environment, Measurement, Status
from tuner.problem import Problem, problem_from_json
from tuner.store.evidence import counts

_DIGITS = 3
"""Nanoseconds: a quick time is no better."""


def rows(
    entry: int, ranked: Mapping[int, Measurement], evidence: Iterable[Measurement]
) -> Iterator[dict[str, Any]]:
    """The rows of one decision, in a fixed order.

    Args:
        entry: the decision's number.
        ranked: what it ranks, and pins, by number.
        evidence: measurements. What does not count for the decision is left out
            (`tuner.store.evidence`); of one config at one shape the newest is told.
    """
    newest: dict[tuple[str, str], tuple[int, Measurement]] = {}
    for m in sorted(evidence, key=lambda m: m.created_at):
        at = next((n for n, one in sorted(ranked.items()) if counts(m, one)), None)
        if at is not None:
            newest[m.problem.key, m.config.digest] = at, m
    sweeps: dict[tuple[str, str], dict[tuple[str, str], dict[int, Measurement]]] = {}
    places = {(key, at): m for (key, _), (at, m) in newest.items()}
    for (key, at), m in sorted(places.items()):
        shapes = sweeps.setdefault((m.sweep, m.environment.digest), {})
        shapes.setdefault((key, m.created_at), {})[at] = m
    for _, shapes in sorted(sweeps.items()):
        yield _row(entry, next(iter(ranked.values())).problem.to_json(), list(shapes.values()))


def _row(
    entry: int, home: Mapping[str, Any], shapes: Sequence[Mapping[int, Measurement]]
) -> dict[str, Any]:
    configs = sorted({at for shape in shapes for at in shape})
    firsts = [next(iter(shape.values())) for shape in shapes]
    return {
        "entry": entry,
        "sweep": firsts[0].sweep,
        "environment": dict(firsts[0].environment.facts),
        "configs": configs,
        "shapes": [
            [_sizes(m.problem, home), [_value(shape.get(at)) for at in configs], m.created_at]
            for m, shape in zip(firsts, shapes, strict=True)
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
    for sizes, values, created_at in row["shapes"]:
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
                    created_at=created_at,
                )
            )
    return found
