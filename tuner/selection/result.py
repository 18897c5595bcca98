"""Results of a lookup, and the choice among several entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tuner.base.printable import printable
from tuner.measurement import Environment, Measurement
from tuner.store.entry import PROVENANCES, Entry

if TYPE_CHECKING:
    from tuner.selection.portfolio import Selection


@dataclass(frozen=True)
class Answer:
    """Result of `lookup`."""

    entry: Entry
    """Entry for the problem; a portfolio's entry has no measured time (`kind`)."""
    exact: bool
    """False when the entry is a portfolio's, another GPU's, or from another environment than the
    caller's."""
    notes: tuple[str, ...] = ()
    """Notes for the caller: not measured, another environment, another GPU, shipped."""
    selected: Selection | None = None
    """Selection of a portfolio and its reason, if nothing was measured."""

    @property
    def is_predicted(self) -> bool:
        """True when a portfolio chose the entry, which then has no measured time."""
        return self.selected is not None

    @property
    def kind(self) -> str:
        """``exact`` or ``portfolio``."""
        return "exact" if self.selected is None else "portfolio"

    @property
    def candidates(self) -> tuple[Measurement, ...]:
        """Configs that may be launched, best first: the winner, then the ranking."""
        winner = self.entry.winner
        return (winner, *(m for m in self.entry.ranking if m.config != winner.config))


def noted(answer: Answer, note: str) -> Answer:
    """An answer with one more note."""
    return replace(answer, notes=(*answer.notes, note))


def differences(entry: Entry, environment: Environment) -> list[str]:
    """Facts that both environments have and that differ, each as text."""
    theirs = entry.winner.environment.facts
    return [
        f"{name} {printable(str(theirs[name]))}, here {value}"
        for name, value in sorted(environment.facts.items())
        if name in theirs and theirs[name] != value
    ]


def choose(candidates: Sequence[Entry], identity: str, allow_other_gpu: bool) -> Answer | None:
    """The best entry by provenance, then GPU, then source (the order of `candidates`)."""
    _, capability, sms = identity.rsplit("|", 2)
    others = [
        e
        for e in candidates
        if e.gpu.identity != identity and e.gpu.compute_capability == capability
    ]
    others.sort(key=lambda e: (abs(e.gpu.sm_count - int(sms)), e.gpu.identity))
    own = [e for e in candidates if e.gpu.identity == identity]
    for provenance in PROVENANCES:
        for entry in own + (others if allow_other_gpu else []):
            if entry.provenance is provenance:
                return _answer(entry, identity)
    return None


def _answer(entry: Entry, identity: str) -> Answer:
    notes = []
    if entry.gpu.identity != identity:
        name = identity.partition("|")[0]
        notes.append(
            f"{entry.provenance} on {entry.gpu.name}, not on {name}: another GPU was allowed"
        )
    if entry.provenance is not PROVENANCES[0]:
        notes.append(f"{entry.provenance}, not measured")
    if entry.origin:
        notes.append(entry.origin)
    return Answer(entry, entry.gpu.identity == identity, tuple(notes))
