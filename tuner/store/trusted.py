"""Documents that ship with the package, of which only the requested parts are parsed. Standard
library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime
from tuner.problem import PROBLEMS, Problem, problem_from_json
from tuner.store.entry import Entry
from tuner.store.exchange import (
    BETWEEN,
    COMMA,
    END,
    HEAD,
    MEASURED,
    TABLES,
    Decision,
    to_text,
    whole,
)


@cache
def _regime(text: bytes) -> Regime:
    return Regime.parse(text.decode())


_OP = b'{"op":"'
PlaceKey = tuple[bytes, bytes]
"""Text of a problem up to the last field without a default, and of `Regime.key`."""


def place_key(problem: Problem, regime: Regime) -> PlaceKey:
    """Key of a problem and a regime; other problems may have it too."""
    text = json.dumps(problem.to_json(), separators=(",", ":"), allow_nan=False).encode()
    return _head(text, problem.op), regime.key.encode()


def _head(problem: bytes, op: str) -> bytes:
    """The first fields of a problem's text, which are those without a default."""
    count = _required(op) + 1
    return b",".join(problem.removesuffix(b"}").split(b",", count)[:count])


@cache
def _required(op: str) -> int:
    """Number of an operation's fields without a default.

    Raises:
        KeyError: on an unknown operation.
    """
    return sum(field.default is MISSING for field in fields(PROBLEMS[op]))


class Trusted:
    """Document that ships with the package. A measurement is parsed when it is requested.

    Standard library only. If the text is damaged, its methods raise ValueError (ConfigError is a
    subclass), KeyError, IndexError or TypeError.

    Args:
        text: output of `to_text` as bytes, because decoding megabytes takes longer than splitting
            lines. JSON of another layout is read more slowly.
    """

    def __init__(self, text: bytes) -> None:
        try:
            self._cut(text)
        except ValueError:
            self._cut(to_text(json.loads(text)).encode())

    def _cut(self, text: bytes) -> None:
        """Find the rows of a text in the layout of `to_text`. Raises ValueError for another
        layout.
        """
        if not text.startswith(HEAD.encode()):
            raise ValueError("another layout")
        head = text.index(MEASURED.encode())
        start, end = head + len(MEASURED), text.rindex(BETWEEN.encode())
        breaks = re.compile(COMMA.encode()).finditer(text, start, end)
        self._text = text
        self._starts = [start, *(m.end() for m in breaks), end + len(COMMA)]
        tables = json.loads(text[:head] + END.encode())
        self._tables = {field: tables[table] for table, field in TABLES.items()}
        self._gpus = [Gpu(**gpu) for gpu in tables["gpus"]]
        entries = text[end + len(BETWEEN) :].removesuffix(END.encode())
        self.decisions = [Decision(**row) for row in json.loads(b"[%b]" % entries)]

    def _line(self, number: int) -> bytes:
        return self._text[self._starts[number] : self._starts[number + 1] - len(COMMA)]

    def place(self, number: int) -> tuple[Problem, Gpu, Regime]:
        """Problem, GPU and regime of a measurement, without parsing the rest of it."""
        problem, gpu, regime = self._cuts(number)
        return problem_from_json(json.loads(problem)), self._gpus[int(gpu)], _regime(regime)

    def place_key(self, number: int) -> PlaceKey:
        """`place_key` of a measurement's problem and regime, which are not parsed for it."""
        problem, _, regime = self._cuts(number)
        op, comma, _ = problem.removeprefix(_OP).partition(b'",')
        if not (comma and problem.startswith(_OP)):  # another layout
            return place_key(*self.place(number)[::2])
        return _head(problem, op.decode()), regime

    def _cuts(self, number: int) -> tuple[bytes, bytes, bytes]:
        """Text of a measurement's problem, number of its GPU, and regime."""
        row = self._line(number)
        try:
            problem, more = row.split(b'"problem":', 1)[1].split(b',"config":', 1)
            gpu, more = more.split(b',"gpu":', 1)[1].split(b',"regime":"', 1)
        except (ValueError, IndexError):  # another order of fields than `Measurement.to_json`'s
            row = json.loads(self._line(number))
            problem, gpu = (json.dumps(row[name]).encode() for name in ("problem", "gpu"))
            return problem, gpu, str(row["regime"]).encode()
        return problem, gpu, more[: more.index(b'"')]

    def row(self, number: int) -> dict[str, Any]:
        """A measurement with its GPU and environment."""
        row: dict[str, Any] = whole(json.loads(self._line(number)), self._tables)
        return row

    def entry(self, decision: Decision, origin: str) -> Entry:
        """Entry of one of the decisions."""
        return decision.entry(self._measurement, origin)

    def _measurement(self, number: int) -> Measurement:
        row = self.row(number)
        del row["config_digest"]
        return Measurement.from_json(row)
