"""pytest plug-in of ``scripts/bench suites``: one process's share of a suite, recorded.

`VARIABLE` holds a `Share` as JSON. Each test adds a line to the record when it ends, so that what a
killed process did is known and is not done again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
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
MAX_MESSAGE = 300
COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
END = "end"
"""Key of the line that says that the share is complete."""


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
    """Module whose ``install()`` forces the kernels."""
    flash_attention: str = ""
    """Checkout of FlashAttention, whose functions are then stood in for."""

    def wants(self, name: str) -> bool:
        """True for a test of the sample and of this share."""
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        return digest % 10**6 < self.sample * 10**6 and digest // 10**6 % self.of == self.number

    def environment(self) -> dict[str, str]:
        """Variables of the process."""
        # The switch that a user has: the same calls, answered by PyTorch.
        off = {"TUNER_DISABLE": "1"} if self.mode == ALONE else {}
        return {VARIABLE: json.dumps(asdict(self)), **off}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The tests of a record by name; a line that was cut off is none."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if "id" in row:
            found[row["id"]] = row
    return found


def is_complete(path: Path) -> bool:
    """True if the last process of a record came to its end."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return bool(lines) and lines[-1].startswith(f'{{"{END}"')


class Recorder:
    """Chooses the tests and writes what became of each."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._path = Path(share.record)
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        known = read(self._path)
        wanted = [i for i in items if self._share.wants(i.nodeid) and i.nodeid not in known]
        kept = set(wanted)
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = wanted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        from tuner.runtime import stats

        before = stats()
        result = yield
        after = stats()
        outcome, message = self._outcomes.pop(item.nodeid, ("failed", "nothing was reported"))
        fallbacks = Counter(after.fallbacks)
        fallbacks.subtract(before.fallbacks)
        row = {
            "id": item.nodeid,
            "outcome": outcome,
            "message": message,
            "hits": after.hits - before.hits,
            "fallbacks": {reason: count for reason, count in fallbacks.items() if count},
        }
        self._write(row)
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
        # Neither after a lost context, nor where the tests cannot be imported.
        if exitstatus in COMPLETE:
            self._write({END: True})

    def _write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _message(report: pytest.TestReport) -> str:
    """One line of what went wrong, or why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:MAX_MESSAGE]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return " ".join(text.split())[:MAX_MESSAGE]


def pytest_configure(config: pytest.Config) -> None:
    """Force the kernels, stand in for FlashAttention, and record."""
    share = Share(**json.loads(os.environ[VARIABLE]))
    if share.flash_attention:
        from benchmarks import flash_attention_adapter

        flash_attention_adapter.install(Path(share.flash_attention))
    if share.mode == FORCED:
        importlib.import_module(share.forcing).install()
    config.pluginmanager.register(Recorder(share), "tuner-suites")
