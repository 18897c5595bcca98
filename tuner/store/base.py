"""The contract of a store, and what passes through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from tuner.config import Config
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Regimes
from tuner.problem import Problem
from tuner.store.entry import Entry
from tuner.store.jobs import Jobs, Lease

SWEEP_STATES = ("running", "done", "interrupted")

Check = Callable[[Measurement], Sequence[str]]
"""Reasons why an imported measurement cannot be served, beyond what the schema can see."""


@dataclass(frozen=True)
class SweepRecord:
    """One sweep of one problem. A sweep that was killed stays ``running``."""

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
    """UTC, ISO 8601; filled in by the store."""
    finished_at: str = ""

    def but(self, **changes: Any) -> SweepRecord:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class EnvironmentRecord:
    """An environment that final passes were measured in."""

    environment: Environment
    newest: str
    """Time of its newest final measurement, UTC, ISO 8601."""


@dataclass(frozen=True)
class ImportReport:
    """Counts of an import; every line of the file is in one of them."""

    measurements_added: int = 0
    measurements_known: int = 0
    """Rows that were stored already."""
    entries_added: int = 0
    entries_known: int = 0
    """Decisions that were stored already."""
    entries_replaced: int = 0
    """Older imported decisions that a newer one replaced."""
    entries_kept: tuple[str, ...] = field(default=())
    """Decisions of this store that were kept in place of the file's, by label."""
    entries_dropped: int = 0
    """Mirrored decisions that the service no longer has."""
    entries_refused: tuple[str, ...] = field(default=())
    """Decisions of the service that cannot be served here, by label, each with the reason."""


class Store(ABC):
    """Measurements, sweeps and decisions.

    Measurements are immutable: adding an equal one again gives the id of the first. A decision
    is kept for each problem, GPU identity, regime and provenance. So a replayed or predicted one
    never displaces a measured one. The newest of its kind stands. Every method that writes
    is one transaction. All methods raise `StoreError` when the database fails.
    """

    @abstractmethod
    def add(self, measurements: Iterable[Measurement]) -> list[int]:
        """Store measurements; returns their ids in order."""

    @abstractmethod
    def measurements(
        self,
        *,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regimes | None = None,
        environment: str | None = None,
        provenance: Provenance | None = None,
        final: bool | None = None,
    ) -> list[Measurement]:
        """The stored measurements that match, oldest first.

        Args:
            problem: only of this problem.
            gpu: only of GPUs with this identity.
            regime: only of this regime or of these.
            environment: only of the environment with this digest.
            provenance: only of this provenance.
            final: only final ones (True) or only the others (False).
        """

    @abstractmethod
    def decide(
        self,
        problem: Problem,
        gpu: Gpu,
        regime: Regime,
        ranking: Sequence[Measurement],
        sweep: str,
    ) -> None:
        """Store final measurements and the decision that ranks them.

        A pin stays; it moves to the new measurement of the pinned config where there is one. A
        mirrored decision's pin is the service's, and goes with the decision that is replaced.

        Args:
            problem: what was tuned.
            gpu: where.
            regime: how it was timed.
            ranking: final ones that passed, own and vendors', best first; one provenance.
            sweep: identity of the deciding sweep.

        Raises:
            StoreError: when the ranking is empty or holds a measurement that does not belong.
        """

    @abstractmethod
    def best(self, problem: Problem, gpu: Gpu, regime: Regime) -> Entry | None:
        """The decision: the measured entry, else the replayed, else the predicted one."""

    @abstractmethod
    def entries(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regime | None = None,
        provenance: Provenance | None = None,
    ) -> list[Entry]:
        """All decisions that match, of every provenance, in a fixed order."""

    @abstractmethod
    def environments(self) -> list[EnvironmentRecord]:
        """Those of measured final passes, newest first."""

    @abstractmethod
    def begin_sweep(self, sweep: SweepRecord) -> SweepRecord:
        """Record a sweep as running, or take up the one of this id; returns what is stored."""

    @abstractmethod
    def end_sweep(self, id: str, state: str) -> None:
        """Record that a sweep ended as ``done`` or ``interrupted``.

        Raises:
            StoreError: when there is no sweep of this id.
        """

    @abstractmethod
    def find_sweep(
        self, problem: Problem, gpu: Gpu, regime: Regime, environment: str, settings: str
    ) -> SweepRecord | None:
        """The newest sweep of a problem in an environment with equal settings."""

    @abstractmethod
    def pin(self, problem: Problem, gpu: Gpu, regime: Regime, config: Config) -> Entry:
        """Serve `config` whatever sweeps decide, until `unpin`; returns the entry.

        Raises:
            ConfigError: when the config has no measurement here that passed.
            StoreError: when nothing measured is decided for the problem.
        """

    @abstractmethod
    def unpin(self, problem: Problem, gpu: Gpu, regime: Regime) -> bool:
        """Serve the decided winner again; False when nothing was pinned."""

    @abstractmethod
    def record_build(self, problem: Problem, config: Config, artifacts: Mapping[str, str]) -> None:
        """Name the artifacts made here for a config that was measured elsewhere or pruned.

        Entries then answer with these; an imported measurement has none before.
        """

    @abstractmethod
    def forget(
        self, problem: Problem, gpu: Gpu | None = None, regime: Regimes | None = None
    ) -> tuple[int, int]:
        """Delete a problem's decisions, sweeps and measurements, damaged rows among them.

        Returns:
            How many decisions and how many measurements were deleted.
        """

    @abstractmethod
    def export(
        self,
        *,
        op: str | None = None,
        problem: Problem | None = None,
        gpu: Gpu | None = None,
        regime: Regimes | None = None,
        provenance: Provenance | None = None,
        trials: bool = False,
    ) -> dict[str, Any]:
        """Decisions and their measurements as the document that `import_` reads.

        Args:
            op: only of this operation.
            problem: only of this problem.
            gpu: only of GPUs with this identity.
            regime: only of this regime or of these.
            provenance: only of this provenance.
            trials: every measurement, not only those that decisions rank.
        """

    @abstractmethod
    def import_(
        self, document: Mapping[str, Any], *, origin: str = "imported", check: Check | None = None
    ) -> ImportReport:
        """Store an exported document, all of it or nothing. It holds data only.

        A decision made by this store stands against an imported one; of two imported ones the
        newer stands.

        Args:
            document: what `export` gave.
            origin: where it comes from, kept with each new measurement.
            check: further reasons to refuse a measurement that a decision serves.

        Raises:
            ConfigError: when a row does not fit; names every such row with its reason.
        """

    @abstractmethod
    def mirror(
        self, document: Mapping[str, Any], *, url: str, etag: str, check: Check
    ) -> ImportReport:
        """Hold just those decisions of a service that its snapshot holds, all or none.

        Decisions mirrored from there before follow the service, pins included; those that it no
        longer has are dropped. A decision of this store's own, or from elsewhere and newer, stands.

        Args:
            document: the snapshot, as `export` writes it.
            url: of the service.
            etag: of the snapshot; `mirrored` gives it back.
            check: reasons why a measurement must not be served here.

        Raises:
            ConfigError: when a row does not fit; names every such row with its reason.
        """

    @abstractmethod
    def mirrored(self, url: str) -> str | None:
        """The ETag of the snapshot that was mirrored last from a service."""

    @property
    @abstractmethod
    def jobs(self) -> Jobs:
        """The jobs that this store holds."""

    @abstractmethod
    def under(self, lease: Lease) -> Store:
        """This store for the holder of a lease: once it is lost, each method that writes raises
        `LeaseLostError` and writes nothing.
        """

    @abstractmethod
    def decisions_version(self) -> int:
        """A number that every change of what is decided, pinned or built raises."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
