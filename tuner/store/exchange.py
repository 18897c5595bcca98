"""Export and import: a JSON document of measurements, and the decisions that rank them.

A document holds only data. `to_text` writes it with one line a measurement. `read` is for untrusted
documents: it checks everything, and accepts the whole document or nothing. `tuner.store.trusted` is
for documents that ship with the package.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.base import resources
from tuner.base.document import check_extent
from tuner.base.printable import printable
from tuner.errors import ConfigError, StoreError
from tuner.measurement import Measurement, Provenance, Status
from tuner.store.entry import Entry, digest_of, ranking_fault, to_row
from tuner.store.newer import unknown_problem

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

FORMAT = "cutlass-tuner-entries"
VERSION = 3
"""Version of the format. Version 2, whose rows hold their GPU and environment, is also read. So is
version 1, except its rows ``around`` decisions."""

TABLES = {"gpus": "gpu", "environments": "environment"}
"""Tables of a document, and the field of a measurement that is a row's number in each."""

MAX_AHEAD = timedelta(days=1)
"""How far a time may lie ahead of this machine's clock. A decision from the far future would never
be replaced."""

HEAD = f'{{\n "format": "{FORMAT}",\n "version": {VERSION},\n "gpus": [\n'
_TABLE = '\n ],\n "%s": [\n'
MEASURED = _TABLE % "measurements"
BETWEEN = _TABLE % "entries"
END = "\n ]\n}\n"
COMMA = ",\n"
"""Separator in the layout of `to_text`: a line break ends a row, since JSON escapes line breaks in
texts."""

MAX_TOKENS, MAX_DEPTH = 1 << 25, 32
"""Limits of an untrusted document (`check_extent`); a table of 10,000 entries of ten measurements
has two thirds of the tokens."""

#: Maximum faults reported for a row; most others follow from the first ones.
_FAULTS_PER_ROW = 3


@dataclass
class Decision:
    """Decision that refers to measurements by number: a row of the document, or an id of a
    store.
    """

    ranking: list[int]
    pinned: int | None
    sweep: str
    decided_at: str

    @property
    def numbers(self) -> list[int]:
        """Numbers of its ranked and pinned measurements."""
        return [*self.ranking, *([] if self.pinned is None else [self.pinned])]

    def entry(self, measured: Callable[[int], Measurement], origin: str = "") -> Entry:
        """The entry that it makes.

        Args:
            measured: measurement of a number.
            origin: as `Entry.origin`.
        """
        return Entry.of(
            [measured(number) for number in self.ranking],
            pin=None if self.pinned is None else measured(self.pinned),
            origin=origin,
            sweep=self.sweep,
            decided_at=self.decided_at,
        )

    def renumbered(self, ids: Sequence[int] | Mapping[int, int]) -> Decision:
        """The same decision with other numbers."""
        pinned = None if self.pinned is None else ids[self.pinned]
        return Decision([ids[n] for n in self.ranking], pinned, self.sweep, self.decided_at)


def write(measured: Mapping[int, Measurement], decisions: Sequence[Decision]) -> dict[str, Any]:
    """Make the document of measurements and decisions. Equal content gives an equal document.

    Args:
        measured: measurements by number.
        decisions: decisions that refer to these numbers.
    """
    order = sorted(measured, key=lambda id: _order(measured[id]))
    row = {id: number for number, id in enumerate(order)}
    entries = sorted((d.renumbered(row) for d in decisions), key=lambda d: d.ranking)
    rows = [_row(measured[id]) for id in order]
    return {
        "format": FORMAT,
        "version": VERSION,
        **{table: _numbered(rows, field) for table, field in TABLES.items()},
        "measurements": rows,
        "entries": [asdict(decision) for decision in entries],
    }


def _numbered(rows: Sequence[dict[str, Any]], field: str) -> list[Any]:
    """The distinct values of a field, whose numbers take their place in the rows."""
    numbers: dict[str, int] = {}
    for row in rows:
        row[field] = numbers.setdefault(_text(row[field]), len(numbers))
    return [json.loads(text) for text in numbers]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def to_text(document: Mapping[str, Any]) -> str:
    """Format a document as JSON, with one line a row."""
    gpus, environments, measurements, entries = (
        COMMA.join(map(_text, document[name])) for name in (*TABLES, "measurements", "entries")
    )
    tables = f"{HEAD}{gpus}{_TABLE % 'environments'}{environments}"
    return f"{tables}{MEASURED}{measurements}{BETWEEN}{entries}{END}"


def _order(measurement: Measurement) -> tuple[Any, ...]:
    """Sort key: problem and regime, then final before quick, then the fastest first, then the
    digest.
    """
    m = measurement
    place = (m.problem.op, m.problem.key, m.gpu.identity, m.regime.key, m.provenance.value)
    time = math.inf if m.latency_us is None else m.latency_us
    return *place, not m.is_final, time, digest_of(m)


def _row(measurement: Measurement) -> dict[str, Any]:
    row = measurement.to_json()
    # Numbers in the store's form: 14 and 14.0 are one latency.
    row.update({k: v for k, v in to_row(measurement).items() if isinstance(v, float)})
    return {"config_digest": measurement.config.digest, **row}


def is_ahead(time: str) -> bool:
    """True if a time (UTC, ISO 8601, or empty) lies more than `MAX_AHEAD` in the future."""
    limit = datetime.now(UTC) + MAX_AHEAD
    return time[:19] > limit.isoformat(timespec="seconds")[:19]


def _ahead_faults(name: str, times: Iterable[str]) -> list[str]:
    return [
        f"{name}: {time} is more than a day ahead of this machine's clock"
        for time in times
        if is_ahead(time)
    ]


def parse(text: str) -> Any:
    """Parse strict JSON: without NaN, infinity or repeated keys.

    Raises:
        ConfigError: names the position at which the text is not JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}") from exc
    except RecursionError as exc:
        raise ConfigError("not a document of entries: it is nested too deeply") from exc
    except ConfigError:
        raise
    except ValueError as exc:  # an integer of thousands of digits
        raise ConfigError(f"not JSON: {exc}") from exc


def parse_untrusted(text: bytes) -> Any:
    """`parse` of a document of any origin, whose extent is checked first.

    Raises:
        ConfigError: when it is not UTF-8, not strict JSON, or holds too much.
    """
    check_extent(text, tokens=MAX_TOKENS, depth=MAX_DEPTH)
    try:
        return parse(text.decode())
    except UnicodeDecodeError as exc:
        raise ConfigError("not UTF-8 text") from exc


def _refuse_constant(name: str) -> Any:
    raise ConfigError(f"{name} is not allowed: every number must be finite")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the key '{repeated}' is given twice in one object")
    return unique


def load(path: Path) -> Any:
    """Parse a file of JSON.

    Raises:
        ConfigError: when it cannot be read or is not strict JSON.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text") from exc
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc}") from exc


@cache
def _validators() -> dict[str, Draft202012Validator]:
    from jsonschema import Draft202012Validator

    path = resources.cache() / "schema" / "entries.schema.json"
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise StoreError(f"the schema of imports is missing: {path}") from exc
    # The document's schema covers its outline; rows are checked one by one.
    outline = {**schema, "properties": {**schema["properties"]}}
    for name in ("measurements", "entries"):
        outline["properties"][name] = {"type": "array"}
    parts = {"outline": outline}
    for name in ("measurement", "entry"):
        parts[name] = {"$defs": schema["$defs"], "$ref": f"#/$defs/{name}"}
    return {name: Draft202012Validator(part) for name, part in parts.items()}


def _schema_faults(kind: str, value: Any) -> Iterator[str]:
    errors = sorted(_validators()[kind].iter_errors(value), key=lambda e: str(e.absolute_path))
    for error in errors:
        path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
        message = error.message if len(error.message) <= 160 else error.message[:157] + "..."
        yield f"{path.removeprefix('.')}: {message}" if path else message


def read(
    document: Any,
    check: Callable[[Measurement], Sequence[str]] | None = None,
    newer: list[str] | None = None,
) -> tuple[list[Measurement], list[Decision]]:
    """Check an untrusted document and return its content.

    Args:
        document: parsed JSON.
        check: further reasons to refuse a measurement that a decision serves.
        newer: list that gets a reason for each decision that is left out, because its problem is
            not known here. None: such a document is refused.

    Raises:
        ConfigError: when a row is not valid; names every such row with its reasons.
    """
    if isinstance(document, Mapping) and document.get("format") == FORMAT:
        version = document.get("version")
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(
                f"the document has version {version}, this program reads {VERSION}: "
                "update cutlass-tuner"
            )
    if outline := list(_schema_faults("outline", document)):
        listed = "; ".join(outline[:_FAULTS_PER_ROW])
        raise ConfigError(f"not a document of entries: {printable(listed)}")
    faults: list[str] = []
    measured: list[Measurement | None] = []
    tables = {field: document.get(table, []) for table, field in TABLES.items()}
    unknown: dict[int, str] = {}
    for number, row in enumerate(document["measurements"]):
        if newer is not None and (reason := unknown_problem(row)):
            unknown[number] = reason
            measured.append(None)
            continue
        measurement, reasons = _measurement(row, tables)
        faults += [f"measurements[{number}]: {reason}" for reason in reasons[:_FAULTS_PER_ROW]]
        measured.append(measurement)
    decisions: list[Decision] = []
    for number, row in enumerate(document["entries"]):
        reasons = list(_schema_faults("entry", row))
        if newer is not None and not reasons:
            if absent := [unknown[n] for n in Decision(**row).numbers if n in unknown]:
                newer.append(absent[0])
                continue
        reasons = reasons or _entry_faults(row, measured)
        faults += [f"entries[{number}]: {reason}" for reason in reasons[:_FAULTS_PER_ROW]]
        if not reasons:
            decisions.append(Decision(**row))
    faults += _repeated(decisions, measured)
    if check is not None:
        served = {n for d in decisions for n in d.numbers}
        for number in sorted(served):
            if measurement := measured[number]:
                faults += [f"measurements[{number}]: {r}" for r in check(measurement)]
    if faults:
        raise _refused(faults)
    places = (number for number, m in enumerate(measured) if m is not None)
    ids = {number: place for place, number in enumerate(places)}
    return [m for m in measured if m is not None], [d.renumbered(ids) for d in decisions]


def _refused(faults: Sequence[str]) -> ConfigError:
    count = len({fault.partition(":")[0] for fault in faults})
    rows = "row does" if count == 1 else "rows do"
    lines = [f"nothing was imported, {count} {rows} not fit:", *map(printable, faults)]
    return ConfigError("\n  ".join(lines))


def whole(row: Any, tables: Mapping[str, Sequence[Any]]) -> Any:
    """A measurement with what its numbers stand for.

    Raises:
        ConfigError: when a number is not in its table.
    """
    if not isinstance(row, Mapping):
        return row
    full = dict(row)
    for name, table in tables.items():
        number = row.get(name)
        if isinstance(number, int) and not isinstance(number, bool):
            if not 0 <= number < len(table):
                raise ConfigError(f"{name}: number {number} is missing")
            full[name] = table[number]
    return full


def _measurement(
    row: Any, tables: Mapping[str, Sequence[Any]]
) -> tuple[Measurement | None, list[str]]:
    try:
        row = whole(row, tables)
        reasons = list(_schema_faults("measurement", row))
        if reasons:
            return None, reasons
        values = dict(row)
        digest = values.pop("config_digest")
        measurement = Measurement.from_json(values)
        # JSON can escape half of a surrogate pair, which databases reject.
        json.dumps(row, ensure_ascii=False).encode()
    except RecursionError:
        return None, ["config: it is nested too deeply"]
    except (ConfigError, UnicodeEncodeError) as exc:
        return None, [str(exc)]
    if measurement.config.digest != digest:
        reasons.append(f"config_digest: {digest} given, the config has {measurement.config.digest}")
    if (measurement.status is Status.OK) != (measurement.latency_us is not None):
        reasons.append(
            f"latency_us: {measurement.latency_us} does not go with status {measurement.status}"
        )
    reasons += [f"{name}: it is not finite" for name in _infinite(row)]
    reasons += _ahead_faults("created_at", [measurement.created_at])
    return measurement, reasons


def _infinite(value: Any, name: str = "") -> Iterator[str]:
    """Numbers such as 1e999, which JSON allows but a float cannot hold."""
    if isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
        yield name
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _infinite(inner, f"{name}.{key}".removeprefix("."))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _infinite(inner, f"{name}[{number}]")


def _entry_faults(row: Mapping[str, Any], measured: Sequence[Measurement | None]) -> list[str]:
    if faults := _ahead_faults("decided_at", [row["decided_at"]]):
        return faults
    pinned = row["pinned"]
    numbers = Decision(**row).numbers
    if missing := [n for n in numbers if n >= len(measured)]:
        return [f"there is no measurements[{missing[0]}]"]
    if unfit := [n for n in numbers if measured[n] is None]:
        return [f"measurements[{unfit[0]}] does not fit"]
    ranking = [m for n in row["ranking"] if (m := measured[n]) is not None]
    if fault := ranking_fault(ranking):
        return [f"ranking: {fault}"]
    pin = None if pinned is None else measured[pinned]
    if pin is None:
        return []
    if not pin.ok or pin.provenance is not Provenance.MEASURED:
        return ["pinned: it is not a measurement that passed"]
    if fault := ranking_fault([ranking[0], pin.but(is_final=True)]):
        return [f"pinned: {fault}"]
    return []


def _repeated(decisions: Sequence[Decision], measured: Sequence[Measurement | None]) -> list[str]:
    keys: set[tuple[Any, ...]] = set()
    faults = []
    for decision in decisions:
        m = measured[decision.ranking[0]]
        if m is None:
            continue
        of = (m.problem, m.gpu.identity, m.regime, m.provenance)
        if of in keys:
            faults.append(
                f"entries: {m.problem.label()} on {m.gpu.name} ({m.regime}) is decided twice"
            )
        keys.add(of)
    return faults


def servable(
    measured: Sequence[Measurement],
    decisions: Iterable[Decision],
    check: Callable[[Measurement], Sequence[str]],
) -> tuple[list[Decision], list[str]]:
    """Decisions whose measurements may all be served, and the other decisions' labels and
    reasons.
    """
    allowed, refused = [], []
    for decision in decisions:
        if reasons := [reason for n in decision.numbers for reason in check(measured[n])]:
            first = measured[decision.ranking[0]]
            label = f"{first.problem.label()} on {first.gpu.name} ({first.regime})"
            refused.append(printable(f"{label}: {reasons[0]}"))
        else:
            allowed.append(decision)
    return allowed, refused
