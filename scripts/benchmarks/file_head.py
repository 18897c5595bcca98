"""Facts at the head of a result file: GPU, driver, PyTorch, CUDA and day."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from tuner.families.peers import installed_versions
from tuner.measure import device

DATE = "date"
KEYS = ("gpu", "driver", "torch", "cuda", DATE)
"""Facts that every head has; one that is not known is the empty text."""


def complete(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts, behind those of `KEYS` that they lack.

    Args:
        facts: a benchmark's own; they are not replaced.
    """
    missing = [key for key in KEYS if key not in facts]
    found = _found() if missing else {}
    return {**{key: found[key] for key in missing}, **facts}


def is_same(first: Any, heading: Mapping[str, Any]) -> bool:
    """True if a file's first line is this heading on any day, so that a run may go on with it."""
    return isinstance(first, Mapping) and _undated(first) == _undated(heading)


def _undated(heading: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in heading.items() if key != DATE}


def _found() -> dict[str, Any]:
    gpu = device.detect()
    known = device.environment().facts if gpu else {}
    return {
        "gpu": gpu.name if gpu else "",
        "driver": known.get("driver", ""),
        "torch": installed_versions().get("torch", ""),
        "cuda": known.get("cuda", ""),
        DATE: datetime.date.today().isoformat(),
    }
