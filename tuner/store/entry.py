"""What a decision answers, and how it is read from the `best` view. Standard library only.

The SQLAlchemy store and the standard-library reader share this module, so a row means the same
to both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from tuner.config import Config
from tuner.hardware import Gpu
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
    Status,
)
from tuner.problem import Problem, problem_from_json

PINNED = -1
"""Position of a pinned measurement in a ranking; the decided ones count from 0."""

VENDOR_PREFIX = "vendor_"
"""Families of vendors' kernels are named so."""

MEASUREMENT_COLUMNS = (
    "problem",
    "config",
    "gpu",
    "regime",
    "status",
    "provenance",
    "environment",
    "latency_us",
    "std_us",
    "rounds",
    "is_final",
    "flags",
    "error",
    "workspace_bytes",
    "artifacts",
    "resources",
    "compile_cpu_s",
    "clocks",
    "log",
    "sweep",
    "created_at",
)
"""Columns that make one measurement, of the table's joins as of the view."""

BEST_COLUMNS = (
    "winner_id",
    "position",
    "decided_by",
    "decided_at",
    "origin",
    *MEASUREMENT_COLUMNS,
)
"""Columns of the `best` view, one row a ranked measurement."""

#: Best first: how `Store.best` and `lookup` choose between decisions for one problem.
PROVENANCES = (Provenance.MEASURED, Provenance.REPLAYED, Provenance.PREDICTED)


@dataclass(frozen=True)
class Entry:
    """The decision for one problem, GPU, regime and provenance."""

    winner: Measurement
    """The pinned measurement, else the first of the ranking."""
    ranking: tuple[Measurement, ...]
    """Final measurements of one run, best first: own kernels and vendors'."""
    best_own: Measurement | None
    """The first of the ranking that is not a vendor's."""
    vendors: Mapping[str, Measurement]
    """Each vendor kernel of the ranking by `vendor_name`."""
    pinned: bool
    provenance: Provenance
    origin: str = ""
    """Empty where it was made here; else ``imported``, ``bundle`` or ``shipped``."""
    sweep: str = ""
    decided_at: str = ""
    """UTC, ISO 8601."""

    @classmethod
    def of(
        cls,
        ranking: Sequence[Measurement],
        *,
        pin: Measurement | None = None,
        origin: str = "",
        sweep: str = "",
        decided_at: str = "",
    ) -> Entry:
        """Derive the entry from its ranking, best first and not empty."""
        winner = pin or ranking[0]
        own = [m for m in ranking if not is_vendor(m.config)]
        vendors: dict[str, Measurement] = {}
        for measurement in ranking:
            if is_vendor(measurement.config):
                vendors.setdefault(vendor_name(measurement.config), measurement)
        return cls(
            winner=winner,
            ranking=tuple(ranking),
            best_own=own[0] if own else None,
            vendors=vendors,
            pinned=pin is not None,
            provenance=ranking[0].provenance,
            origin=origin,
            sweep=sweep,
            decided_at=decided_at,
        )

    @property
    def problem(self) -> Problem:
        return self.ranking[0].problem

    @property
    def gpu(self) -> Gpu:
        return self.ranking[0].gpu

    @property
    def regime(self) -> Regime:
        return self.ranking[0].regime

    @property
    def ratios(self) -> dict[str, float]:
        """Time of the best own kernel over each vendor kernel's; under 1 the own one is faster."""
        if self.best_own is None or not self.best_own.latency_us:
            return {}
        own = self.best_own.latency_us
        return {name: own / m.latency_us for name, m in self.vendors.items() if m.latency_us}


def is_vendor(config: Config) -> bool:
    """Whether a config calls a vendor's kernel."""
    return config.family.startswith(VENDOR_PREFIX)


def vendor_name(config: Config) -> str:
    """Short name of a vendor kernel: its parameters' values, else its family's name."""
    values = [str(value) for _, value in sorted(config.params.items())]
    return "/".join(values) or config.family.removeprefix(VENDOR_PREFIX)


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def to_row(measurement: Measurement) -> dict[str, Any]:
    """A measurement as `MEASUREMENT_COLUMNS`: numbers, text, and canonical JSON text."""
    data = measurement.to_json()
    row = {name: data[name] for name in MEASUREMENT_COLUMNS}
    for name in (
        "problem",
        "config",
        "gpu",
        "environment",
        "flags",
        "artifacts",
        "resources",
        "clocks",
    ):
        row[name] = canonical(data[name])
    for name in ("latency_us", "std_us", "error", "compile_cpu_s"):
        row[name] = _float(data[name])
    # A kernel may print anything; PostgreSQL takes no NUL in a text.
    row["log"] = row["log"].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return row


def digest_of(measurement: Measurement) -> str:
    """SHA-256 of everything in a measurement: equal ones are stored once."""
    return row_digest(to_row(measurement))


def row_digest(row: Mapping[str, Any]) -> str:
    """The same of what `to_row` made."""
    return hashlib.sha256(canonical(row).encode()).hexdigest()


# Many rows share these: each distinct text is parsed once.
@lru_cache(16384)
def problem_from_row(text: str) -> Problem:
    """The problem of a row's key."""
    return problem_from_json(json.loads(text))


@lru_cache(64)
def gpu_from_row(text: str) -> Gpu:
    """The GPU of a row's facts."""
    return Gpu(**json.loads(text))


@lru_cache(64)
def environment_from_row(text: str) -> Environment:
    """The environment of a row's facts."""
    return Environment(json.loads(text))


def from_row(row: Mapping[str, Any]) -> Measurement:
    """The inverse of `to_row`.

    Raises:
        ConfigError, ValueError, TypeError, KeyError: when a row was damaged.
    """
    clocks = json.loads(row["clocks"])
    return Measurement(
        problem=problem_from_row(row["problem"]),
        config=Config.from_json(json.loads(row["config"])),
        gpu=gpu_from_row(row["gpu"]),
        regime=Regime.parse(row["regime"]),
        status=Status(row["status"]),
        provenance=Provenance(row["provenance"]),
        environment=environment_from_row(row["environment"]),
        latency_us=row["latency_us"],
        std_us=row["std_us"],
        rounds=row["rounds"],
        is_final=bool(row["is_final"]),
        flags=tuple(json.loads(row["flags"])),
        error=row["error"],
        workspace_bytes=row["workspace_bytes"],
        artifacts=json.loads(row["artifacts"]),
        resources={k: Resources(**v) for k, v in json.loads(row["resources"]).items()},
        compile_cpu_s=row["compile_cpu_s"],
        clocks=Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])}),
        log=row["log"],
        sweep=row["sweep"],
        created_at=row["created_at"],
    )


def entries_from_rows(rows: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Entries of rows of the `best` view, which come sorted by winner and position."""
    entries = []
    for _, group in groupby(rows, key=lambda row: row["winner_id"]):
        ranked = list(group)
        pin = from_row(ranked.pop(0)) if ranked[0]["position"] == PINNED else None
        ranking = [from_row(row) for row in ranked]
        first = ranked[0]
        entries.append(
            Entry.of(
                ranking,
                pin=pin,
                origin=first["origin"],
                sweep=first["decided_by"],
                decided_at=first["decided_at"],
            )
        )
    return entries


def sort_key(entry: Entry) -> tuple[str, str, str, str, int]:
    """The fixed order of entries: problem, GPU, regime, then measured before the others."""
    order = PROVENANCES.index(entry.provenance)
    return entry.problem.op, entry.problem.key, entry.gpu.identity, str(entry.regime), order
