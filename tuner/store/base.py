"""Contract of a store, and its records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tuner.config import Config
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, Regime, Regimes
from tuner.problem import Problem
from tuner.store.entry import Entry
from tuner.store.jobs import Jobs, Lease

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


class Store(ABC):
    """Measurements, sweeps and decisions.

    Measurements are immutable: adding an equal one again returns the id of the first. There is one
    decision, the newest, for each problem, GPU identity, regime and provenance. So a replayed or
    predicted one never replaces a measured one. Every method that writes is one transaction. All
    methods raise `StoreError` when the database fails.
    """

    @abstractmethod
    def add(self, measurements: Iterable[Measurement]) -> list[int]:
        """Store measurements. Returns their ids in order."""

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
        """Stored measurements that match, oldest first.

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

        A pin stays, and moves to the pinned config's new measurement if there is one. The pin of a
        mirrored decision belongs to the service, and is removed with the replaced decision.

        Args:
            problem: problem that was tuned.
            gpu: GPU that it was measured on.
            regime: regime of the times.
            ranking: final measurements that passed, own and vendors', best first, of one
                provenance.
            sweep: id of the deciding sweep.

        Raises:
            StoreError: when the ranking is empty or contains a measurement of something else.
        """

    @abstractmethod
    def best(self, problem: Problem, gpu: Gpu, regime: Regime) -> Entry | None:
        """Decision of a problem: the measured entry, else the replayed, else the predicted one."""

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
        """All decisions that match, in a fixed order.

        Args:
            op: only this operation; None: all of them.
            problem: only this problem; None: all of them.
            gpu: only this GPU, by its identity; None: all of them.
            regime: only this regime; None: all of them.
            provenance: only such times; None: measured, replayed and predicted ones.
        """

    @abstractmethod
    def environments(self) -> list[EnvironmentRecord]:
        """Environments of measured final passes, newest first."""

    @abstractmethod
    def begin_sweep(self, sweep: SweepRecord) -> SweepRecord:
        """Record a sweep as running, or resume the one of this id. Returns the stored record."""

    @abstractmethod
    def end_sweep(self, id: str, state: str) -> None:
        """Record that a sweep ended as ``done`` or ``interrupted``.

        Raises:
            StoreError: when no sweep has this id.
        """

    @abstractmethod
    def find_sweep(
        self, problem: Problem, gpu: Gpu, regime: Regime, environment: str, settings: str
    ) -> SweepRecord | None:
        """Newest sweep of a problem in an environment with equal settings; None if there is none.

        Args:
            problem: problem of the sweep.
            gpu: GPU of the sweep.
            regime: regime of its times.
            environment: digest of the environment.
            settings: text of the options that a resumed sweep must share.
        """

    @abstractmethod
    def pin(self, problem: Problem, gpu: Gpu, regime: Regime, config: Config) -> Entry:
        """Serve `config` until `unpin`, whatever later sweeps decide. Returns the entry.

        Args:
            problem: problem of the decision.
            gpu: GPU of the decision.
            regime: regime of the decision.
            config: config with a passing measurement of the three.

        Raises:
            ConfigError: when the config has no passing measurement in this store.
            StoreError: when the problem has no measured decision.
        """

    @abstractmethod
    def unpin(self, problem: Problem, gpu: Gpu, regime: Regime) -> bool:
        """Serve the decided winner again. Returns False if no config was pinned."""

    @abstractmethod
    def record_build(self, problem: Problem, config: Config, artifacts: Mapping[str, str]) -> None:
        """Record the artifacts built on this machine for a config that was measured elsewhere or
        pruned.

        Entries then name these artifacts. An imported measurement does not name any before.
        """

    @abstractmethod
    def forget(
        self, problem: Problem, gpu: Gpu | None = None, regime: Regimes | None = None
    ) -> tuple[int, int]:
        """Delete a problem's decisions, sweeps and measurements, damaged rows included.

        Returns:
            Numbers of deleted decisions and measurements.
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
        """Export decisions and their measurements as a document for `import_`.

        Args:
            op: only of this operation.
            problem: only of this problem.
            gpu: only of GPUs with this identity.
            regime: only of this regime or of these.
            provenance: only of this provenance.
            trials: True for every measurement, not only those that decisions rank.
        """

    @abstractmethod
    def import_(
        self, document: Mapping[str, Any], *, origin: str = "imported", check: Check | None = None
    ) -> ImportReport:
        """Import an exported document, as a whole or not at all. It holds only data.

        A decision made by this store is kept over an imported one. The newer of two imported ones
        is kept.

        Args:
            document: result of `export`.
            origin: source of the document, stored with each new measurement.
            check: further checks of measurements that a decision serves.

        Raises:
            ConfigError: when a row does not fit; names every such row with its reason.
        """

    @abstractmethod
    def mirror(
        self, document: Mapping[str, Any], *, url: str, etag: str, check: Check
    ) -> ImportReport:
        """Replace the decisions mirrored from a service by those of its snapshot, as a whole or not
        at all.

        Mirrored decisions follow the service, pins included, and those that it no longer has are
        dropped. A decision of this store, or a newer one from elsewhere, is kept.

        Args:
            document: the snapshot, as `export` writes it.
            url: URL of the service.
            etag: ETag of the snapshot, which `mirrored` returns.
            check: checks of measurements to be served here.

        Raises:
            ConfigError: when a row does not fit; names every such row with its reason.
        """

    @abstractmethod
    def mirrored(self, url: str) -> str | None:
        """ETag of the snapshot that was last mirrored from a service."""

    @property
    @abstractmethod
    def jobs(self) -> Jobs:
        """Jobs of this store."""

    @abstractmethod
    def under(self, lease: Lease) -> Store:
        """This store for the holder of a lease. Once the lease is lost, each method that writes
        raises `LeaseLostError` instead.
        """

    @abstractmethod
    def decisions_version(self) -> int:
        """Number that rises with every change of decisions, pins and builds."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
