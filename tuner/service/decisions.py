"""All decisions of a store in memory, kept up to date by a thread."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from tuner.errors import StoreError
from tuner.hardware import Gpu
from tuner.measurement import Regime, launch_named
from tuner.problem import PROBLEMS, Problem
from tuner.selection.describe import answer_json, entry_json
from tuner.selection.reader import (
    Entry,
    find_gpu,
    lookup,
    with_shipped,
)
from tuner.service.packed import PackedText
from tuner.store import Store

_LOG = logging.getLogger(__name__)

REFRESH_S = 1.0
"""Seconds between two checks for new decisions; ten times the last read's duration if that is
more."""
STALE_S = 15.0
"""Seconds without a successful check after which the service reports itself unhealthy."""
_MAX_ANSWERS = 65536
_COMPRESSION = 1
"""Level for the snapshot: the fastest already shrinks a table of 10,000 entries to a twentieth."""


class Question(NamedTuple):
    """One lookup, as it came."""

    op: str
    shape: str
    gpu: str | None
    regime: str | None
    l2: str | None
    allow_other_gpu: bool


@dataclass(frozen=True, eq=False)
class DecisionTable:
    """Snapshot of the decisions; another one at each change of them."""

    version: int
    entries: Sequence[Entry]
    """The store's and those shipped that it lacks, in a fixed order."""
    index: dict[tuple[Problem, Regime], list[Entry]]
    gpus: Sequence[Gpu]
    """One entry of each GPU."""
    snapshot: PackedText
    """The store's own decisions as `Store.export` writes them, as JSON."""
    answers: dict[Question, bytes] = field(default_factory=dict)
    """JSON answers of questions asked so far."""

    @classmethod
    def read(cls, store: Store) -> DecisionTable:
        """Read every decision."""
        # The version is read first, so that later changes cause another read.
        version = store.decisions_version()
        entries = with_shipped(store.entries())
        index: dict[tuple[Problem, Regime], list[Entry]] = {}
        for entry in entries:
            index.setdefault((entry.problem, entry.regime), []).append(entry)
        snapshot = json.dumps(store.export(), separators=(",", ":"), allow_nan=False).encode()
        gpus = list(dict.fromkeys(entry.gpu for entry in entries))
        return cls(version, entries, index, gpus, PackedText.of(snapshot, _COMPRESSION))

    def answer(self, question: Question) -> bytes:
        """Answer of a question as JSON; ``null`` if there is none.

        Raises:
            ConfigError: when the question is not valid; names the allowed values.
        """
        cached = self.answers.get(question)
        if cached is None:
            cached = self._find(question)
            if len(self.answers) >= _MAX_ANSWERS:
                self.answers.clear()
            self.answers[question] = cached
        return cached

    def _find(self, question: Question) -> bytes:
        problem = PROBLEMS[question.op].parse(question.shape)
        regimes = Regime.choices(question.op, question.regime, question.l2)
        answer = lookup(
            problem,
            gpu=find_gpu(question.gpu, self.gpus) if question.gpu else None,
            regime=regimes,
            allow_other_gpu=question.allow_other_gpu,
            among=[e for r in regimes for e in self.index.get((problem, r), [])],
            with_portfolio=False,  # what ships answers wherever it is installed
        )
        if answer is None:
            return b"null"
        return _encode(answer_json(answer, problem, ranking=False))

    def matching(
        self,
        *,
        op: str | None,
        shape: str | None,
        gpu: str | None,
        regime: str | None,
        l2: str | None,
        provenance: str | None,
    ) -> list[Entry]:
        """The entries that match every filter that is given.

        Raises:
            ConfigError: when the shape or the GPU is wrong.
        """
        problem = PROBLEMS[op or "attention"].parse(shape) if shape is not None else None
        model = find_gpu(gpu, self.gpus) if gpu is not None else None
        launch = launch_named(regime) if regime else None
        return [
            entry
            for entry in self.entries
            if entry.matches(op=op, problem=problem, gpu=model)
            and launch in (None, entry.regime.launch)
            and l2 in (None, entry.regime.l2)
            and provenance in (None, str(entry.provenance))
        ]


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def entries_json(entries: Sequence[Entry], total: int) -> bytes:
    """Some of the entries that match, as JSON."""
    return _encode({"total": total, "entries": [entry_json(entry) for entry in entries]})


class ServedDecisions:
    """Holds the newest `DecisionTable` of a store; a thread renews it when a decision changes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.table = DecisionTable.read(store)
        self._checked = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="served", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def age_s(self) -> float:
        """Seconds since the last successful check of the store."""
        return time.monotonic() - self._checked

    @property
    def is_healthy(self) -> bool:
        return self.age_s < STALE_S

    def refresh(self) -> None:
        """Read the decisions again if they changed.

        Raises:
            StoreError: when the store cannot be read.
        """
        if self._store.decisions_version() != self.table.version:
            self.table = DecisionTable.read(self._store)
        self._checked = time.monotonic()

    def _renew(self) -> None:
        pause = REFRESH_S
        while not self._ended.wait(pause):
            started = time.monotonic()
            try:
                self.refresh()
            except StoreError as exc:
                _LOG.warning("the decisions could not be read again: %s", exc)
            pause = max(REFRESH_S, 10 * (time.monotonic() - started))
