"""Copies of a sweep's studies in an Optuna storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.search.family_search import FamilySearch
from tuner.tuning.competition import Competition

if TYPE_CHECKING:
    from tuner.search.storage import StudyStorage


class Studies:
    """Copies the finished trials of own families.

    Args:
        competition: competition whose searches are copied.
        storage: storage for the copies; None: no copies.
    """

    def __init__(self, competition: Competition, storage: StudyStorage | None) -> None:
        self._competition, self._storage = competition, storage

    def copy(self, member: FamilySearch) -> None:
        """Copy the finished trials of an own family."""
        if self._storage is None or member.family.is_vendor:
            return
        from tuner.search.storage import StudySubject

        competition = self._competition
        runner = competition.runner
        subject = StudySubject(
            member.problem,
            runner.gpu,
            competition.regime,
            runner.environment,
            runner.provenance,
            member.family.name,
            competition.sampler,
            competition.options.seed,
        )
        self._storage.copy(member.trials, subject)

    def end(self, reason: str) -> None:
        """Mark trials without a result as failed, and close the copies.

        Args:
            reason: reason of each failed trial.
        """
        for member in self._competition.members.values():
            member.trials.abandon(reason)
            if member.started:
                self.copy(member)
            if self._storage is not None:
                self._storage.forget(member.trials)
