"""Records of a store. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Regime
from tuner.problem import Problem

SWEEP_STATES = ("running", "done", "interrupted")

Check = Callable[[Measurement], Sequence[str]]
"""Function that returns why an imported measurement cannot be served, beyond the schema's
checks."""


@dataclass(frozen=True)
class SweepRecord:
    """Sweep of one problem. A sweep that was killed stays ``running``."""

    id: str
    problem: Problem
    gpu: Gpu
    regime: Regime
    environment: str
    """`Environment.digest` of the measuring machine."""
    settings: str
    """Digest of the options that decide what a sweep measures."""
    state: str = "running"
    created_at: str = ""
    """Time of creation, UTC, ISO 8601; filled in by the store."""
    finished_at: str = ""

    def but(self, **changes: Any) -> SweepRecord:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class EnvironmentRecord:
    """Environment that final passes were measured in."""

    environment: Environment
    newest: str
    """Time of its newest final measurement, UTC, ISO 8601."""


@dataclass(frozen=True)
class ImportReport:
    """Counts of an import. Every row of the file is in one of them."""

    measurements_added: int = 0
    measurements_known: int = 0
    """Measurements that were already stored."""
    entries_added: int = 0
    entries_known: int = 0
    """Decisions that were already stored."""
    entries_replaced: int = 0
    """Older imported decisions that a newer one replaced."""
    entries_kept: tuple[str, ...] = field(default=())
    """Decisions of this store that were kept instead of the file's, by label."""
    entries_dropped: int = 0
    """Mirrored decisions that the service no longer has."""
    entries_refused: tuple[str, ...] = field(default=())
    """Decisions of the service that cannot be served here, by label, each with the reason."""
