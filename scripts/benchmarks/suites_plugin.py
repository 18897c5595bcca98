"""pytest plug-in of ``scripts/bench suites``: one process's share of a suite, recorded.

`VARIABLE` holds a `Share` as JSON. Each test adds a line to the record at its start and at its end.
So the work of a killed process is known and not repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TUNER_SUITE"
ALONE, FORCED = "alone", "forced"
LOST = ("CUDA error", "AcceleratorError", "unspecified launch failure", "illegal memory access")
"""Texts of an error after which nothing else of the process can be believed."""
OUT_OF_MEMORY = "CUDA out of memory"
"""Text of an error that another process's memory can cause: the test is run again."""
MAX_MESSAGE = 300
COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Types of values that pytest names by their text, others by argument and place."""
BEGIN, AGAIN, END = "begin", "again", "end"
"""Keys of lines: a test begins, is to be run again, the share is complete."""


@dataclass(frozen=True)
class Share:
    """Part of a suite that one process runs."""

    mode: str
    """`ALONE`: PyTorch answers every call; `FORCED`: forced kernels where they can."""
    record: str
    """File of one JSON object a line."""
    number: int = 0
    of: int = 1
    """Processes; each test belongs to one by the hash of its name."""
    sample: float = 1.0
    """Part of the tests that are run, the same ones in every run and mode."""
    forcing: str = "benchmarks.forced"
    """Module whose ``install(built_only=...)`` forces the kernels."""
    built_only: bool = False
    """Only kernels that are compiled already are forced."""
    limit_s: int = 0
    """Seconds after which a test, or the way to the first one, ends its process; 0: never."""

    def wants(self, name: str) -> bool:
        """True for a test of the sample and of this share."""
        rank = rank_of(name)
        return rank % 10**6 < self.sample * 10**6 and rank // 10**6 % self.of == self.number

    def environment(self) -> dict[str, str]:
        """Variables of the process."""
        # The switch that a user has: the same calls, answered by PyTorch.
        off = {"TUNER_DISABLE": "1"} if self.mode == ALONE else {}
        return {VARIABLE: json.dumps(asdict(self)), **off}


def rank_of(name: str) -> int:
    """A test's place in a random order that is the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a record; a line that was cut off is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def tests_of(path: Path) -> dict[str, dict[str, Any]]:
    """The tests of a record by name."""
    return {row["id"]: row for row in rows_of(path) if "id" in row}


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a row to a record, also behind one that was cut off."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(row))


def row_of(name: str, outcome: str, message: str, **counts: Any) -> dict[str, Any]:
    """Row of a test that ended: `passed`, `failed` or `skipped`."""
    counts = {"hits": 0, "fallbacks": {}, **counts}
    return {"id": name, "outcome": outcome, "message": message, **counts}


class Recorder:
    """Chooses the tests and writes what became of each."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._path = Path(share.record)
        self._outcomes: dict[str, tuple[str, str]] = {}
        self._is_complete = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the share's tests without a result, in a random order. So a run that is ended early
        is a sample, and both modes begin with the same tests.
        """
        known = tests_of(self._path)
        wanted = [i for i in items if self._share.wants(i.nodeid) and i.nodeid not in known]
        wanted.sort(key=lambda item: rank_of(item.nodeid))
        kept = set(wanted)
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = wanted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        from tuner.runtime import stats

        append(self._path, {BEGIN: item.nodeid})
        signal.alarm(self._share.limit_s)
        before = stats()
        result = yield
        after = stats()
        _free_memory()
        outcome, message = self._outcomes.pop(item.nodeid, ("failed", "nothing was reported"))
        if outcome == "failed" and OUT_OF_MEMORY in message:
            append(self._path, {AGAIN: item.nodeid})
            self._is_complete = False
            return result
        fallbacks = Counter(after.fallbacks)
        fallbacks.subtract(before.fallbacks)
        new = {reason: count for reason, count in fallbacks.items() if count}
        hits = after.hits - before.hits
        append(self._path, row_of(item.nodeid, outcome, message, hits=hits, fallbacks=new))
        if outcome == "failed" and any(text in message for text in LOST):
            item.session.shouldstop = "the CUDA context is lost"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The worst of setup, call and teardown."""
        before, _ = self._outcomes.get(report.nodeid, ("passed", ""))
        if report.outcome != "passed" and before != "failed":
            self._outcomes[report.nodeid] = (report.outcome, _message(report))
        else:
            self._outcomes.setdefault(report.nodeid, ("passed", ""))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        signal.alarm(0)
        # Neither after a lost context, nor where the tests cannot be imported.
        if exitstatus in COMPLETE and self._is_complete:
            append(self._path, {END: True})


def _free_memory() -> None:
    """Give what this process caches to those beside it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _message(report: pytest.TestReport) -> str:
    """One line of what went wrong, or why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:MAX_MESSAGE]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:MAX_MESSAGE]


def pytest_configure(config: pytest.Config) -> None:
    """Force the kernels, and record."""
    share = Share(**json.loads(os.environ[VARIABLE]))
    signal.alarm(share.limit_s)  # by default that ends the process, wherever it is
    if share.mode == FORCED:
        importlib.import_module(share.forcing).install(built_only=share.built_only)
    config.pluginmanager.register(Recorder(share), "tuner-suites")
