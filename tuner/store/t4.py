"""Measurements of one problem in T4, the results format that tuners share, and in T1 their space.
Kernel Tuner's cache file is a third format, which its simulation mode searches.

Kernel Tuner's wheel has the formats' JSON schemas, whose keys are used. Times are milliseconds, as
its own files have them; those that no measurement holds are left out.

A file holds one search space, so a document with several problems, GPUs or regimes is refused.
Times of quick and final passes do not compare, and T4 has no place for the difference. A
configuration's final time stands where it has one; ``pass`` says which it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tuner.config import Value
from tuner.errors import ConfigError
from tuner.measurement import Measurement, Status

SCHEMA_VERSION = "1.0.0"
FAILED = "RuntimeFailedConfig"
"""Kernel Tuner's time of a configuration that did not run."""
ABSENT = "(absent)"
"""Value of a parameter that a config does not have."""
INVALIDITY: Mapping[Status, str] = {
    Status.OK: "correct",
    Status.COMPILE_ERROR: "compile",
    Status.TIMEOUT: "timeout",
    Status.UNAVAILABLE: "constraints",
    **dict.fromkeys(
        (Status.WRONG_RESULT, Status.NOT_FINITE, Status.OUT_OF_BOUNDS, Status.TOO_FAST),
        "correctness",
    ),
    **dict.fromkeys(
        (
            *(Status.LAUNCH_ERROR, Status.OUT_OF_MEMORY),
            *(Status.WORKER_DIED, Status.ILLEGAL_ACCESS),
        ),
        "runtime",
    ),
}
"""T4's word for how an evaluation ended."""


def results(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """A T4 document of measurements, with each configuration once.

    Args:
        measurements: measurements of one problem, GPU and regime.

    Raises:
        ConfigError: when they are of several, which the message counts.
    """
    latest = _of_one_space(measurements)
    first = next(iter(latest.values()))
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "timeunit": "milliseconds",
            "operation": first.problem.op,
            "problem": first.problem.label(),
            "device": first.gpu.name,
            "regime": first.regime.key,
            "environment": dict(first.environment.facts),
        },
        "results": [_result(m) for m in latest.values()],
    }


def metadata(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """A T4 document of the machine of measurements.

    Raises:
        ConfigError: as of `results`.
    """
    first = next(iter(_of_one_space(measurements).values()))
    facts = dict(first.environment.facts)
    gpu = {"product_name": first.gpu.name, "multiprocessors": first.gpu.sm_count}
    return {
        "schema_version": SCHEMA_VERSION,
        "metadata": {
            "hardware": {"hardware_description": [gpu], "operating_system": "Linux"},
            "environment": {
                "device_query": {"gpu": gpu, **facts},
                "requirements": [f"{name}=={value}" for name, value in sorted(facts.items())],
            },
        },
    }


def space(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """A T1 document of the measured search space: each parameter's values, and as conditions the
    measured combinations of the first two, three, ... of them. A solver that reads them in turn
    sees few combinations; with one condition over all it sees millions.

    Raises:
        ConfigError: as of `results`.
    """
    (first, *_), names, rows = _table(measurements)
    parameters = [
        {
            "Name": name,
            "Type": "string" if any(isinstance(value, str) for value in values) else "int",
            "Values": repr(values),
        }
        for name, values in _values_of(names, rows).items()
    ]
    conditions = [
        {
            "Parameters": names[:count],
            "Expression": f"({', '.join(names[:count])},) in "
            f"{sorted({row[:count] for row in rows}, key=repr)!r}",
        }
        for count in range(min(2, len(names)), len(names) + 1)
    ]
    return {
        "General": {"FormatVersion": 1, "TimeUnit": "Milliseconds", "OutputFormat": "JSON"},
        "ConfigurationSpace": {
            "TuningParameters": parameters,
            "Conditions": conditions,
        },
        "KernelSpecification": {
            **{"Language": "CUDA", "KernelName": first.problem.op},
            "KernelFile": f"{first.problem.op}.cu",
            **{"GlobalSize": {"X": "1"}, "LocalSize": {"X": "1"}},
            **{"Device": {"Name": first.gpu.name}, "ProblemSize": [1], "Arguments": []},
        },
    }


def cache(measurements: Iterable[Measurement]) -> dict[str, Any]:
    """A cache file of Kernel Tuner, in which its simulation mode looks configurations up.

    Raises:
        ConfigError: as of `results`.
    """
    latest, names, rows = _table(measurements)
    parts = ("compile_time", "verification_time", "benchmark_time", "strategy_time")
    timings = dict.fromkeys((*parts, "framework_time"), 0.0)
    entries = {}
    for m, row in zip(latest, rows, strict=True):
        time_ms = _milliseconds(m.latency_us)
        entries[",".join(map(str, row))] = {
            **dict(zip(names, row, strict=True)),
            **timings,
            "compile_time": (m.compile_cpu_s or 0.0) * 1e3,
            "time": FAILED if time_ms is None else time_ms,
            "times": [] if time_ms is None else [time_ms],
            "timestamp": m.created_at,
        }
    return {
        "schema_version": SCHEMA_VERSION,
        **{"device_name": latest[0].gpu.name, "kernel_name": latest[0].problem.op},
        "problem_size": [1],
        **{"tune_params_keys": names, "tune_params": _values_of(names, rows)},
        **{"objective": "time", "cache": entries},
    }


FORMATS: Mapping[str, Callable[[Iterable[Measurement]], dict[str, Any]]] = {
    "t4": results,
    "t4-metadata": metadata,
    "t1": space,
    "kernel-tuner": cache,
}
"""Functions that make a document, by the name of its format."""


def _of_one_space(measurements: Iterable[Measurement]) -> dict[str, Measurement]:
    """Measurements of one search space by config, the final or the latest ones.

    Raises:
        ConfigError: when they are of several, which the message counts.
    """
    every = sorted(measurements, key=lambda m: (m.is_final, m.created_at))
    latest = {m.config.digest: m for m in every}
    for name, values in {
        "problems (choose by --shape)": {m.problem.key for m in every},
        "GPUs (choose by --gpu)": {m.gpu.identity for m in every},
        "regimes (choose by --regime and --l2)": {m.regime.key for m in every},
    }.items():
        if len(values) > 1:
            raise ConfigError(
                f"a T4 file holds one search space, and here are {len(values)} {name}"
            )
    return latest


def _table(
    measurements: Iterable[Measurement],
) -> tuple[list[Measurement], list[str], list[tuple[Value, ...]]]:
    """The measurements, the parameters' names, and their values of each measurement."""
    latest = list(_of_one_space(measurements).values())
    configs = [_values(m) for m in latest]
    names = sorted({name for config in configs for name in config})
    return latest, names, [tuple(c.get(name, ABSENT) for name in names) for c in configs]


def _values_of(names: Sequence[str], rows: Iterable[tuple[Value, ...]]) -> dict[str, list[Value]]:
    """Values of each parameter, numbers before words."""
    columns = zip(*rows, strict=True)
    return {
        name: sorted(set(column), key=lambda value: (isinstance(value, str), value))
        for name, column in zip(names, columns, strict=True)
    }


def _values(measurement: Measurement) -> dict[str, Value]:
    """Parameters of a config and its family, truths as numbers."""
    params = {"family": measurement.config.family, **measurement.config.params}
    return {name: int(v) if isinstance(v, bool) else v for name, v in params.items()}


def text(document: Mapping[str, Any]) -> str:
    """The document as JSON, a line each for its results."""
    if "cache" in document:  # must be last: Kernel Tuner reads how the file ends
        return json.dumps(document, indent=1) + "\n"
    if "results" not in document:
        return json.dumps(document, indent=1, sort_keys=True) + "\n"
    head = {name: value for name, value in document.items() if name != "results"}
    rows = ",\n".join(json.dumps(row, sort_keys=True) for row in document["results"])
    return f'{json.dumps(head, sort_keys=True)[:-1]}, "results": [\n{rows}\n]}}\n'


def _result(measurement: Measurement) -> dict[str, Any]:
    time_ms, deviation_ms = map(_milliseconds, (measurement.latency_us, measurement.std_us))
    timed = [] if time_ms is None else [time_ms]
    compile_ms = (measurement.compile_cpu_s or 0.0) * 1e3
    amounts = {
        "time": (time_ms, "ms"),
        "deviation": (deviation_ms, "ms"),
        "error": (measurement.error, ""),
        "throughput": (measurement.tflops, "TFLOP/s"),
        "pass": ("final" if measurement.is_final else "quick", ""),
    }
    return {
        "timestamp": measurement.created_at,
        "configuration": {"family": measurement.config.family, **measurement.config.params},
        "objectives": ["time"],
        "times": {  # the schema has the first name, Kernel Tuner and its readers the second
            **dict.fromkeys(("compilation_time", "compilation"), compile_ms),
            "runtimes": timed,
        },
        "invalidity": INVALIDITY[measurement.status],
        "correctness": float(measurement.status is Status.OK),
        "measurements": [
            {"name": name, "value": value, "unit": unit}
            for name, (value, unit) in amounts.items()
            if value is not None
        ],
    }


def _milliseconds(us: float | None) -> float | None:
    return None if us is None else us / 1e3
