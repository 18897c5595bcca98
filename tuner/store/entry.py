"""Entries of decisions, read from the `best` view. Standard library only.

The SQLAlchemy store and the standard-library reader share this module, so a row means the same
to both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from tuner.base import document
from tuner.base.printable import one_line
from tuner.config import Config
from tuner.errors import ConfigError, NewerRowError
from tuner.hardware import Gpu
from tuner.measurement import (
    Clocks,
    Environment,
    Measurement,
    Provenance,
    Regime,
    Resources,
    Status,
    is_tie,
    speedup_text,
)
from tuner.problem import Problem, problem_from_json
from tuner.store.newer import readable

PINNED = -1
"""Position of a pinned measurement in a ranking; the decided ones count from 0."""

VENDOR_PREFIX = "vendor_"
"""Prefix of the names of vendors' families."""

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
"""Columns of one measurement, in the joined tables as in the view."""

BEST_COLUMNS = (
    "winner_id",
    "position",
    "decided_by",
    "decided_at",
    "origin",
    *MEASUREMENT_COLUMNS,
)
"""Columns of the `best` view, one row a ranked measurement."""

STORED_COLUMNS = (*MEASUREMENT_COLUMNS, "digest")
_JOINED = {"problem": "problems.key", "gpu": "gpus.facts", "environment": "environments.facts"}
STORED = (
    f"SELECT {', '.join(_JOINED.get(name, f'measurements.{name}') for name in STORED_COLUMNS)} "
    "FROM measurements JOIN problems ON problems.id = measurements.problem_id "
    "JOIN gpus ON gpus.id = measurements.gpu_id "
    "JOIN environments ON environments.id = measurements.environment_id"
)
"""Selects every measurement, as `checked_measurement` reads it."""

CHECKED_COLUMNS = ("digest", "measured_artifacts")
"""Columns beside the view's by which `entries_from_rows` checks a row. They are the measurement's
SHA-256, and its own artifacts where the view has later ones."""

#: Best first: how `Store.best` and `lookup` choose between decisions for one problem.
PROVENANCES = (Provenance.MEASURED, Provenance.REPLAYED, Provenance.PREDICTED)


@dataclass(frozen=True)
class Standing:
    """The best own kernel beside the fastest vendor's, of one pass."""

    own: Measurement
    vendor: Measurement
    ratio: float
    """Time of the vendor's kernel over the own one's; above 1 the own is faster."""

    @property
    def is_tied(self) -> bool:
        """True if the two are equal within their noise."""
        return is_tie(self.own, self.vendor)

    @property
    def outcome(self) -> str:
        """The own kernel is ``ahead``, ``tied`` or ``behind``."""
        if self.is_tied:
            return "tied"
        return "ahead" if self.ratio > 1 else "behind"

    @property
    def text(self) -> str:
        """The ratio in words, as ``1.29x cudnn``."""
        name = vendor_name(self.vendor.config)
        return speedup_text(self.ratio, name, is_tie=self.is_tied)


@dataclass(frozen=True)
class Entry:
    """Decision for one problem, GPU, regime and provenance."""

    winner: Measurement
    """Pinned measurement, else the first of the ranking."""
    ranking: tuple[Measurement, ...]
    """Measurements of one pass of one run, best first: own kernels and vendors'."""
    best_own: Measurement | None
    """First measurement of the ranking that is not a vendor's."""
    vendors: Mapping[str, Measurement]
    """Each vendor kernel of the ranking by `vendor_name`."""
    pinned: bool
    provenance: Provenance
    origin: str = ""
    """Empty if it was made by this store; else ``imported``, ``bundle`` or ``shipped``."""
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
        """Derive the entry from its ranking.

        Args:
            ranking: measurements of a final pass, best first, not empty.
            pin: measurement to serve in place of the first; None: not pinned.
            origin: as the field.
            sweep: id of the sweep that decided.
            decided_at: time of the decision, UTC, ISO 8601.
        """
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

    def matches(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Collection[Regime] | None = None,
        provenance: Provenance | None = None,
    ) -> bool:
        """True if it has every property that is given: of regimes one of these."""
        return (
            op in (None, self.problem.op)
            and problem in (None, self.problem)
            and (gpu is None or gpu.identity == self.gpu.identity)
            and (regime is None or self.regime in regime)
            and provenance in (None, self.provenance)
        )

    @property
    def problem(self) -> Problem:
        return self.ranking[0].problem

    @property
    def ranked(self) -> tuple[Measurement, ...]:
        """The winner, which may be pinned, followed by the ranking. A winner that is not pinned
        appears twice.
        """
        return self.winner, *self.ranking

    @property
    def gpu(self) -> Gpu:
        return self.ranking[0].gpu

    @property
    def regime(self) -> Regime:
        return self.ranking[0].regime

    @property
    def pass_name(self) -> str:
        """Deciding pass: ``final`` or ``quick``; empty for predictions.

        It is ``quick`` for a replay whose recording has no final time of an own kernel. It is also
        ``quick`` for a sweep whose time limit left no final pass.
        """
        if self.provenance is Provenance.PREDICTED:
            return ""
        return "final" if self.ranking[0].is_final else "quick"

    @property
    def speedups(self) -> dict[str, float]:
        """Time of each vendor's kernel over that of the best own one, above 1 if the own is faster;
        the fastest vendor first.
        """
        own = self.best_own
        ratios = {name: own.speedup(m) for name, m in self.vendors.items()} if own else {}
        fastest_first = sorted((ratio, name) for name, ratio in ratios.items() if ratio is not None)
        return {name: ratio for ratio, name in fastest_first}

    @property
    def fastest_vendor(self) -> tuple[str, Measurement] | None:
        """Name and measurement of the fastest vendor's kernel; None if none was measured."""
        times = {name: m.latency_us for name, m in self.vendors.items() if m.latency_us is not None}
        name = min(times, key=times.__getitem__, default=None)
        return None if name is None else (name, self.vendors[name])

    @property
    def standing(self) -> Standing | None:
        """The best own kernel beside the fastest vendor's; None without two times that compare."""
        vendor, own = self.fastest_vendor, self.best_own
        ratio = own.speedup(vendor[1]) if own and vendor else None
        if own is None or vendor is None or ratio is None:
            return None
        return Standing(own, vendor[1], ratio)

    @property
    def is_tied(self) -> bool:
        """True if the best own kernel and the fastest vendor's are equal within their noise."""
        return self.standing is not None and self.standing.is_tied


def ratios_json(entry: Entry | None) -> dict[str, dict[str, float]]:
    """Ratios of an entry by vendor's kernel, as in its JSON.

    ``vendor_over_own`` is the ratio that all commands show (`Entry.speedups`). Its inverse
    ``own_over_vendor`` is kept for programs that read it.
    """
    ratios = entry.speedups if entry else {}
    inverse = {name: 1 / ratio for name, ratio in ratios.items()}
    return {"vendor_over_own": ratios, "own_over_vendor": inverse}


def is_vendor(config: Config) -> bool:
    """True if a config calls a vendor's kernel."""
    return config.family.startswith(VENDOR_PREFIX)


def vendor_name(config: Config) -> str:
    """Short name of a vendor kernel: the words among its parameters, else its family's name.

    The numbers of a library's plan or algorithm are not a part of it.
    """
    values = [value for _, value in sorted(config.params.items()) if isinstance(value, str)]
    return "/".join(values) or config.family.removeprefix(VENDOR_PREFIX)


def is_of_quick_pass(measurement: Measurement) -> bool:
    """True when a time is of the quick pass. Older replays stored such times as final ones, with a
    flag, beside the vendors' final times.
    """
    return not measurement.is_final or "quick" in measurement.flags


def ranking_fault(ranking: Sequence[Measurement]) -> str:
    """Reason why a ranking cannot be a decision; empty if it can."""
    if not ranking:
        return "its ranking is empty"
    first = ranking[0]
    for measurement in ranking:
        name = f"{measurement.config.family} {measurement.config.digest}"
        if not measurement.ok:
            return f"{name} did not pass ({measurement.status})"
        if not measurement.is_final and measurement.provenance is not Provenance.REPLAYED:
            return f"{name} is not a final measurement"
        if measurement.is_final != first.is_final:
            return f"{name} is of another pass than the first of the ranking"
        of = (measurement.problem, measurement.gpu.identity, measurement.regime)
        if of != (first.problem, first.gpu.identity, first.regime):
            return f"{name} is of another problem, GPU or regime than the first of the ranking"
        if measurement.provenance is not first.provenance:
            return (
                f"{name} is {measurement.provenance}, the first of the ranking {first.provenance}"
            )
    return ""


def check_ranking(ranking: Sequence[Measurement]) -> None:
    """Check that stored rows make a valid decision.

    Raises:
        ValueError: when they do not.
    """
    if fault := ranking_fault(ranking):
        raise ValueError(f"of a decision: {fault}")


def as_text(value: Any) -> str:
    """A stored text. SQLite returns a damaged one as another type.

    Raises:
        TypeError: when it is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def as_object(text: Any) -> dict[str, Any]:
    """A stored JSON object.

    Raises:
        ValueError, TypeError: when the text is not one.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return data


def artifacts_from_row(text: str) -> dict[str, str]:
    """Artifacts of a row, by kernel.

    Raises:
        ValueError, TypeError: when the row was damaged.
    """
    return {name: as_text(key) for name, key in as_object(text).items()}


def canonical(value: Any) -> str:
    """JSON text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


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
        value = data[name]
        row[name] = None if value is None else float(value)
    # A kernel may print anything; PostgreSQL takes no NUL in a text.
    row["log"] = row["log"].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return row


def digest_of(measurement: Measurement) -> str:
    """SHA-256 of everything in a measurement: equal ones are stored once."""
    return row_digest(to_row(measurement))


def row_digest(row: Mapping[str, Any]) -> str:
    """The same of what `to_row` made."""
    return hashlib.sha256(canonical(row).encode()).hexdigest()


def check_digest(row: Mapping[str, Any]) -> None:
    """See that a stored row is the one that was written.

    Args:
        row: columns of a measurement, with `CHECKED_COLUMNS`: of a row that is not the view's,
            ``digest`` is enough.

    Raises:
        ValueError, TypeError: when a bit of it changed.
    """
    written = {name: row[name] for name in MEASUREMENT_COLUMNS}
    written["is_final"] = bool(row["is_final"])  # SQLite has numbers
    written["artifacts"] = row.get("measured_artifacts", row["artifacts"])
    if row_digest(written) != row["digest"]:
        raise ValueError("it was changed after it was written: its SHA-256 differs")


def checked_measurement(row: Mapping[str, Any]) -> Measurement:
    """The measurement of a stored row with its ``digest``.

    Raises:
        NewerRowError: when it is whole, and cannot be read.
        ValueError, TypeError, LookupError: when it was damaged.
    """
    check_digest(row)
    artifacts_from_row(row["artifacts"])  # the view's may be of `builds`, which no digest covers
    try:
        return from_row(row)
    except NewerRowError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as exc:  # ConfigError among them
        raise NewerRowError(f"{type(exc).__name__}: {one_line(str(exc))}") from exc


# Many rows share these, so each distinct text is parsed once.
@lru_cache(16384)
def problem_from_row(text: str) -> Problem:
    """Problem of a row's key.

    Raises:
        NewerRowError: when this program does not know such a problem.
        ValueError, TypeError: when it was damaged.
    """
    facts = as_object(text)
    try:
        return problem_from_json(facts)
    except ConfigError as exc:
        raise NewerRowError(one_line(str(exc))) from exc


@lru_cache(64)
def gpu_from_row(text: str) -> Gpu:
    """GPU of a row's facts."""
    return Gpu(**document.checked(Gpu, json.loads(text)))


@lru_cache(4096)
def _config_from_row(text: str) -> Config:
    return Config.from_json(json.loads(text))


_regime_from_row = lru_cache(64)(Regime.parse)


@lru_cache(64)
def environment_from_row(text: str) -> Environment:
    """Environment of a row's facts."""
    return Environment(as_object(text))


def from_row(row: Mapping[str, Any]) -> Measurement:
    """Inverse of `to_row`.

    Raises:
        ConfigError, ValueError, TypeError, LookupError, AttributeError: when a row was damaged.
    """
    clocks = json.loads(row["clocks"])
    return Measurement(
        problem=problem_from_row(row["problem"]),
        config=_config_from_row(row["config"]),
        gpu=gpu_from_row(row["gpu"]),
        regime=_regime_from_row(row["regime"]),
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
        artifacts=artifacts_from_row(row["artifacts"]),
        resources={k: Resources(**v) for k, v in json.loads(row["resources"]).items()},
        compile_cpu_s=row["compile_cpu_s"],
        clocks=Clocks(**{**clocks, "throttle": tuple(clocks["throttle"])}),
        log=row["log"],
        sweep=row["sweep"],
        created_at=row["created_at"],
    )


def entries_from_rows(where: str, rows: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Entries of rows of the `best` view with `CHECKED_COLUMNS`, sorted by winner and position.

    Decisions that ranked times of two passes together are skipped, and those of newer programs.

    Args:
        where: the store's path, or its URL without the password.
        rows: rows of the view.

    Raises:
        ValueError, TypeError, LookupError: when a row was damaged.
    """
    groups = (list(group) for _, group in groupby(rows, key=lambda row: row["winner_id"]))
    entries = readable(where, groups, _entry_from_rows)
    return [e for e in entries if len({is_of_quick_pass(m) for m in e.ranking}) == 1]


def _entry_from_rows(rows: Sequence[Mapping[str, Any]]) -> Entry:
    measured = [checked_measurement(row) for row in rows]
    pin = measured.pop(0) if rows[0]["position"] == PINNED else None
    check_ranking(measured)
    first = rows[0 if pin is None else 1]
    return Entry.of(
        measured,
        pin=pin,
        origin=as_text(first["origin"]),
        sweep=as_text(first["decided_by"]),
        decided_at=as_text(first["decided_at"]),
    )


def sort_key(entry: Entry) -> tuple[str, str, str, str, int]:
    """Sort key of entries: problem, GPU, regime, then measured before the others."""
    order = PROVENANCES.index(entry.provenance)
    return entry.problem.op, entry.problem.key, entry.gpu.identity, entry.regime.key, order
