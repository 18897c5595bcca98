"""Recorded sweeps: real measurements of one problem, read where no GPU is.

The format is described in ``cache/README.md``. Reading checks everything it uses, so that a
damaged or foreign file is one clear error and never a wrong answer. `recording_archive` finds
recordings in folders and archives.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base import document, output
from tuner.config import Config
from tuner.errors import ConfigError, NoValidConfigError
from tuner.families import RETIRED, families, families_of, note_retired
from tuner.hardware import Gpu
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Regimes,
    Resources,
    Status,
    listed,
)
from tuner.problem import Problem, problem_from_json

if TYPE_CHECKING:
    from tuner.store import Store

FORMAT = "cutlass-tuner recording"
VERSION = 1
SUFFIX = ".json.gz"


@dataclass(frozen=True)
class Member:
    """A recording in a block of an archive."""

    archive: Path
    name: str
    block: Callable[[], Sequence[bytes]]
    """Reads the documents of the block."""
    place: int
    """Position in the block."""

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}"

    def read_bytes(self) -> bytes:
        """The document's text."""
        return self.block()[self.place]


Source = Path | zipfile.Path | Member
"""A recording's file, or a member of an archive: of its blocks, or a file of former archives."""
LOG_CHARACTERS = 400
"""Length of a failure's log. Its end is kept, which has the compiler's or CUDA's reason."""
ROW = (
    "config",
    "status",
    "latency_us",
    "std_us",
    "rounds",
    "is_final",
    "flags",
    "error",
    "workspace_bytes",
    "compile_cpu_s",
    "resources",
    "clocks",
    "log",
    "created_at",
)
"""Columns of a measurement; `config` is a position in the file's list of configs."""
_CLOCKS = asdict(Clocks())


@dataclass(frozen=True)
class Recording:
    """Measurements of one problem on one GPU, environment and regime, and of its stages."""

    problem: Problem
    gpu: Gpu
    regime: Regime
    environment: Environment
    measurements: tuple[Measurement, ...]
    """The quick pass, then the final pass (`is_final`)."""
    stages: tuple[Recording, ...] = field(default=())
    """Recordings of the sub-problems of composite families."""

    def walk(self) -> Iterator[Recording]:
        """This recording, then those of its stages."""
        yield self
        for stage in self.stages:
            yield from stage.walk()

    def kernels(self) -> int:
        """Distinct compiled kernels that were measured, stages' included."""
        members = families()
        distinct = {
            spec
            for part in self.walk()
            for m in part.measurements
            if m.config.family in members
            for spec in members[m.config.family].kernels(part.problem, m.config).values()
        }
        return len(distinct)


def from_store(store: Store, problem: Problem, gpu: Gpu, regimes: Regimes) -> Recording:
    """Recording of a problem's sweeps in a store, in the first regime that was measured.

    It has the environment of the newest decision or measurement, each config's newest quick time,
    and the final pass of the decision.

    Raises:
        NoValidConfigError: when nothing was measured.
    """
    choices = listed(regimes)
    for regime in choices:
        measured = store.measurements(
            problem=problem, gpu=gpu, regime=regime, provenance=Provenance.MEASURED
        )
        if measured:
            entries = store.entries(
                problem=problem, gpu=gpu, regime=regime, provenance=Provenance.MEASURED
            )
            finals = entries[0].ranking if entries else ()
            return _from_store(store, problem, (finals or measured)[-1], finals)
    raise NoValidConfigError(
        f"nothing was measured for {problem.label()} on {gpu.name}, {choices[0]}: `tuner sweep` "
        "measures it"
    )


def _from_store(
    store: Store, problem: Problem, like: Measurement, finals: Sequence[Measurement]
) -> Recording:
    quick = store.measurements(
        problem=problem,
        gpu=like.gpu,
        regime=like.regime,
        environment=like.environment.digest,
        provenance=Provenance.MEASURED,
        final=False,
    )
    newest = {m.config: m for m in quick}
    stages = {
        sub: _from_store(store, sub, like, ())
        for family in families_of(problem.op).values()
        for sub in family.stages(problem).values()
        if not family.supports(problem, like.gpu)
    }
    return Recording(
        problem,
        like.gpu,
        like.regime,
        like.environment,
        (*newest.values(), *finals),
        tuple(stage for stage in stages.values() if stage.measurements),
    )


def read(path: Source) -> Recording:
    """Read and check a recording.

    Raises:
        ConfigError: when it cannot be read, is not a recording, or a field is wrong.
    """
    return decode(path, read_document(path))


def write(path: Path, recording: Recording) -> int:
    """Write a recording; equal recordings make equal bytes. Returns how many.

    Raises:
        StoreError: when the file cannot be written.
    """
    text = json.dumps(_encode(recording), sort_keys=True, separators=(",", ":"))
    packed = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    return output.write(path, packed, make_folder=True)


def content_of(path: Source) -> bytes:
    """The text of a recording's document, in one line.

    Raises:
        ConfigError: when it cannot be read.
    """
    try:
        content = path.read_bytes()
    except (OSError, zipfile.BadZipFile, lzma.LZMAError, EOFError, LookupError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"recording {path} cannot be read: {reason}") from exc
    try:
        return content if isinstance(path, Member) else gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as exc:
        raise ConfigError(f"recording {path} is damaged: {exc}") from exc


def read_document(path: Source) -> dict[str, Any]:
    """The JSON document of a recording; only its format and version are checked.

    Raises:
        ConfigError: when it cannot be read, or is not a recording.
    """
    try:
        data = document.parse(content_of(path))
    except ValueError as exc:
        raise ConfigError(f"recording {path} is damaged: {exc}") from exc
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a recording (its 'format' is not '{FORMAT}')")
    if data.get("version") != VERSION:
        raise ConfigError(
            f"recording {path} has version {data.get('version')!r} (this tuner reads {VERSION})"
        )
    return data


def decode(path: Source, data: Mapping[str, Any]) -> Recording:
    """The recording that a document holds.

    Raises:
        ConfigError: when a field is wrong.
    """
    try:
        gpu = Gpu(**document.checked(Gpu, data["gpu"]))
        environment = Environment(dict(data["environment"]))
        return _decode_part(data, gpu, environment, Regime.parse(data["regime"]))
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as exc:
        raise ConfigError(f"recording {path} is damaged: {type(exc).__name__}: {exc}") from exc


def _decode_part(
    data: Mapping[str, Any], gpu: Gpu, environment: Environment, regime: Regime
) -> Recording:
    problem = problem_from_json(data["problem"])
    configs = _decode_configs(data["configs"])
    if tuple(data["columns"]) != ROW:
        raise ConfigError(f"columns are {data['columns']} (allowed: {list(ROW)})")
    measurements = tuple(
        _decode_row(dict(zip(ROW, row, strict=True)), configs, problem, gpu, environment, regime)
        for row in data["rows"]
    )
    for name in RETIRED.keys() & {config.family for config in configs}:
        note_retired(name)
    stages = tuple(_decode_part(part, gpu, environment, regime) for part in data["stages"])
    return Recording(problem, gpu, regime, environment, measurements, stages)


def _decode_row(
    row: Mapping[str, Any],
    configs: Sequence[Config],
    problem: Problem,
    gpu: Gpu,
    environment: Environment,
    regime: Regime,
) -> Measurement:
    if not 0 <= row["config"] < len(configs):
        raise ConfigError(f"a measurement names config {row['config']} of {len(configs)}")
    document.checked(Measurement, row)
    status, latency = Status(row["status"]), row["latency_us"]
    if (status is Status.OK) != (isinstance(latency, int | float) and latency > 0):
        raise ConfigError(f"a measurement has status {status} and latency_us {latency!r}")
    clocks = dict(zip(_CLOCKS, row["clocks"] or _CLOCKS.values(), strict=True))
    document.checked(Clocks, clocks)
    return Measurement(
        problem=problem,
        config=configs[row["config"]],
        gpu=gpu,
        regime=regime,
        status=status,
        provenance=Provenance.MEASURED,
        environment=environment,
        latency_us=latency,
        std_us=row["std_us"],
        rounds=int(row["rounds"]),
        is_final=bool(row["is_final"]),
        flags=tuple(row["flags"]),
        error=row["error"],
        workspace_bytes=int(row["workspace_bytes"]),
        compile_cpu_s=row["compile_cpu_s"],
        resources={name: Resources(*values) for name, values in row["resources"].items()},
        clocks=Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])}),
        log=str(row["log"]),
        created_at=str(row["created_at"]),
    )


def _decode_configs(tables: Sequence[Mapping[str, Any]]) -> list[Config]:
    """Configs in order; a composite one names its stages by positions before its own."""
    configs: list[Config] = []
    for table in tables:
        for row in table["rows"]:
            values = dict(zip(table["names"], row, strict=True))
            stages = {name: values.pop(f"stage {name}") for name in table["stages"]}
            if any(not 0 <= position < len(configs) for position in stages.values()):
                raise ConfigError("a composite config names a stage that is not before it")
            params = {name: value for name, value in values.items() if value is not None}
            named = {name: configs[position].to_json() for name, position in stages.items()}
            configs.append(
                Config.from_json({"family": table["family"], "params": params, "stages": named})
            )
    return configs


def _encode(recording: Recording) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "gpu": asdict(recording.gpu),
        "environment": dict(recording.environment.facts),
        "regime": recording.regime.key,
        **_encode_part(recording),
    }


def _encode_part(recording: Recording) -> dict[str, Any]:
    configs: dict[Config, int] = {}
    for measurement in recording.measurements:
        _number(measurement.config, configs)
    # Runs of configs of one kind as tables: the names once, then a row of values each.
    tables: list[dict[str, Any]] = []
    for config in configs:
        stages = sorted(config.stages)
        names = [*sorted(config.params), *(f"stage {name}" for name in stages)]
        kind = {"family": config.family, "stages": stages, "names": names}
        if not tables or {k: tables[-1][k] for k in kind} != kind:
            tables.append({**kind, "rows": []})
        row = [config.params[name] for name in sorted(config.params)]
        tables[-1]["rows"].append(row + [configs[config.stages[name]] for name in stages])
    return {
        "problem": recording.problem.to_json(),
        "configs": tables,
        "columns": list(ROW),
        "rows": [_encode_row(m, configs[m.config]) for m in recording.measurements],
        "stages": [_encode_part(stage) for stage in recording.stages],
    }


def _number(config: Config, configs: dict[Config, int]) -> None:
    """Number a config after its stages."""
    for name in sorted(config.stages):
        _number(config.stages[name], configs)
    configs.setdefault(config, len(configs))


def _encode_row(measurement: Measurement, position: int) -> list[Any]:
    clocks = asdict(measurement.clocks)
    values = {
        "config": position,
        "status": measurement.status.value,
        "latency_us": _round(measurement.latency_us),
        "std_us": _round(measurement.std_us),
        "rounds": measurement.rounds,
        "is_final": measurement.is_final,
        "flags": list(measurement.flags),
        "error": None if measurement.error is None else float(f"{measurement.error:.3g}"),
        "workspace_bytes": measurement.workspace_bytes,
        "compile_cpu_s": _round(measurement.compile_cpu_s, 2),
        "resources": {n: list(r.to_json().values()) for n, r in measurement.resources.items()},
        "clocks": None if measurement.clocks == Clocks() else list(clocks.values()),
        "log": measurement.log[-LOG_CHARACTERS:],
        "created_at": measurement.created_at,
    }
    return [values[name] for name in ROW]


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
