"""Results of a lookup, and the choice among several entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tuner.base.printable import printable
from tuner.families.peers import owner_of
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement
from tuner.store.entry import PROVENANCES, Entry, is_vendor

if TYPE_CHECKING:
    from tuner.selection.choice import Selection

SELECTED = "selected from a portfolio"
"""First words of the note on a portfolio's selection; its expected times follow."""


@dataclass(frozen=True)
class LookupResult:
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
    def answered_by(self) -> str:
        """Owner of the first kernel: a word of TUNER_ANSWERS, as ``own`` or ``flash3``."""
        config = self.entry.winner.config
        return owner_of(config.get("kernel")) if is_vendor(config) else "own"

    @property
    def kind(self) -> str:
        """``exact`` or ``portfolio``."""
        return "exact" if self.selected is None else "portfolio"

    @property
    def candidates(self) -> tuple[Measurement, ...]:
        """Configs that may be launched, best first: the winner, then the ranking."""
        winner = self.entry.winner
        return (winner, *(m for m in self.entry.ranking if m.config != winner.config))


def noted(answer: LookupResult, note: str) -> LookupResult:
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


def choose(candidates: Sequence[Entry], gpu: Gpu, allow_other_gpu: bool) -> LookupResult | None:
    """The best entry by provenance, then GPU, then source (the order of `candidates`).

    Another GPU's entry answers if it shares its decisions, or by `allow_other_gpu` if it has the
    same compute capability.
    """
    own = [e for e in candidates if e.gpu.identity == gpu.identity]
    elsewhere = [
        e
        for e in candidates
        if e.gpu.identity != gpu.identity
        and (gpu.shares_decisions(e.gpu) or (allow_other_gpu and gpu.shares_kernels(e.gpu)))
    ]
    elsewhere.sort(key=lambda e: (abs(e.gpu.sm_count - gpu.sm_count), e.gpu.identity))
    for provenance in PROVENANCES:
        for entry in own + elsewhere:
            if entry.provenance is provenance:
                return _answer(entry, gpu)
    return None


def _answer(entry: Entry, gpu: Gpu) -> LookupResult:
    notes, is_own = [], entry.gpu.identity == gpu.identity
    if not is_own:
        why = "another GPU was allowed"
        if gpu.shares_decisions(entry.gpu):
            why = f"the same kernels on as many multiprocessors ({gpu.sm_count})"
        notes.append(f"{entry.provenance} on {entry.gpu.name}, not on {gpu.name}: {why}")
    if entry.provenance is not PROVENANCES[0]:
        notes.append(f"{entry.provenance}, not measured")
    if entry.origin:
        notes.append(entry.origin)
    return LookupResult(entry, is_own, tuple(notes))
