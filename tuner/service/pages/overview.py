"""The landing page's figures: what is tuned, where own kernels win and lose, and who works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import geometric_mean

from tuner.measurement import Provenance, speedup_text
from tuner.selection.shipped import in_use
from tuner.service.decisions import DecisionTable
from tuner.service.pages.table import standing_of
from tuner.store.entry import Entry
from tuner.store.jobs import Task
from tuner.store.sql_jobs import Jobs

MAX_LOSSES = 5
"""Problems that the page names."""


@dataclass(frozen=True)
class Coverage:
    """Measured decisions of one operation, GPU and regime."""

    op: str
    gpu: str
    regime: str
    entries: Sequence[Entry]

    def count(self, standing: str) -> int:
        """Entries of an `Outcome`."""
        return sum(standing_of(entry) == standing for entry in self.entries)

    @property
    def bar(self) -> dict[str, int]:
        """Counts by the classes of the bar that shows them."""
        classes = {"done": "ahead", "cancelled": "tied", "failed": "behind"}
        counts = {name: self.count(standing) for name, standing in classes.items()}
        return {name: count for name, count in counts.items() if count}

    @property
    def mean(self) -> str:
        """Geometric mean of own speed in words; ``-`` without a comparison."""
        ratios = [entry.standing.ratio for entry in self.entries if entry.standing]
        return speedup_text(geometric_mean(ratios)) if ratios else "-"


@dataclass(frozen=True)
class Overview:
    """Coverage of a table of decisions."""

    parts: Sequence[Coverage]
    losses: Sequence[Entry]
    """The largest, first; ties are none."""

    @property
    def total(self) -> int:
        return sum(len(part.entries) for part in self.parts)

    @property
    def gpus(self) -> list[str]:
        return sorted({part.gpu for part in self.parts})

    def count(self, standing: str) -> int:
        """Entries of an `Outcome`, of all parts."""
        return sum(part.count(standing) for part in self.parts)


@lru_cache(1)
def overview_of(table: DecisionTable) -> Overview:
    """Overview of the decisions that lookups return: in a stream, where there is one."""
    return overview(in_use(table.entries))


def overview(entries: Sequence[Entry]) -> Overview:
    """Sum up the measured ones of some decisions."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        if entry.provenance is Provenance.MEASURED:
            place = entry.problem.op, entry.gpu.name, str(entry.regime)
            groups.setdefault(place, []).append(entry)
    parts = [Coverage(*place, cells) for place, cells in sorted(groups.items())]
    every = [(entry.standing, entry) for part in parts for entry in part.entries]
    lost = [(s.ratio, entry) for s, entry in every if s and s.outcome == "behind"]
    lost.sort(key=lambda pair: pair[0])
    return Overview(parts, [entry for _, entry in lost[:MAX_LOSSES]])


def workers(jobs: Jobs) -> list[tuple[str, Task]]:
    """(job, task) of everything that is worked on, by who works.

    Raises:
        StoreError: when the store cannot be read.
    """
    running = [job.id for job in jobs.all() if job.counts.get("running")]
    tasks = [(id, task) for id in running for task in jobs.tasks(id, state="running")]
    return sorted(tasks, key=lambda pair: (pair[1].holder, pair[1].id))
