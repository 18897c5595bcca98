"""Final pass of a sweep: interleaved timing of the finalists, and the decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tuner.config import Config
from tuner.errors import BenchmarkError, NoValidConfigError
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Provenance, Regime
from tuner.search import ranking
from tuner.selection.shipped import shipped_index
from tuner.store import Store
from tuner.store.entry import Entry, is_vendor, vendor_name
from tuner.tuning.budget import Budget, round_seconds
from tuner.tuning.competition import Competition
from tuner.tuning.outcome import summary
from tuner.tuning.progress import Interruption

BRIEF_FINALISTS = 2
"""Own finalists of a brief pass."""
MIN_ROUNDS = 20
"""Rounds of a brief pass and of a provisional decision; of long calls as many as `BRIEF_S` has."""
BRIEF_ROUNDS, BRIEF_S = 3, 0.5
"""Fewest rounds of such a pass, and the seconds of rounds from which on there are fewer than
`MIN_ROUNDS`."""
PROVISIONAL = "provisional"
"""Flag of measurements of a provisional decision, which its sweep may replace."""
PROVISIONAL_GAIN = 0.05
"""Relative gain by which a kernel replaces a provisional decision."""


@dataclass
class FinalPass:
    """Final passes of one sweep.

    Args:
        competition: families with their measurements.
        store: store for failures and decisions.
        budget: time budget of the sweep.
        interruption: interruption that ends waits early.
        sign: function that completes a measurement before it is stored.
        write: function that writes to the store, with retries while it is locked.
        show: callback for the number of timed subjects.
        sweep: function that returns the id of the sweep.
        note: callback for messages to the user.
    """

    competition: Competition
    store: Store
    budget: Budget
    interruption: Interruption
    sign: Callable[[Measurement], Measurement]
    write: Callable[[Callable[[], object]], None]
    show: Callable[[int], None]
    note: Callable[[str], None]
    sweep: Callable[[], str]
    unranked: list[Measurement] = field(default_factory=list)
    """Quick measurements of finalists that are not in the ranking."""
    provided: list[Measurement] = field(default_factory=list)
    """Ranking of the provisional decision; empty if there is none."""
    undecided: list[Measurement] = field(default_factory=list)
    """Ranking by quick times, of a sweep that ends with neither a final pass nor a decision. It is
    not stored."""
    first_s: float | None = None
    """Seconds from the start of the sweep to the first checked time that it showed, an own kernel's
    or a vendor's."""
    first_own_s: float | None = None
    """Seconds to the first one that timed an own kernel."""
    _provided_us: float | None = None

    def rank(self, notes: Sequence[str], again: bool = False) -> list[Measurement]:
        """Time the finalists interleaved, and rank them, best first.

        If the time limit ends the pass, the result is the ranking of the provisional decision.
        Without one, it is that of the quick times.

        Args:
            notes: messages about the competition, for the error.
            again: True if the last pass was already brief.

        Raises:
            NoValidConfigError: when no candidate passed.
            BenchmarkError: when the pass was abandoned, except to be repeated as a brief one.
        """
        interrupted, problem = self.interruption.requested, self.competition.problem
        entrants, rounds = self._chosen(brief=interrupted)
        if not entrants:
            if interrupted:
                return []
            raise NoValidConfigError(self.competition.why_nothing(notes))
        self.show(len(entrants))
        with self.budget.part("final pass"):
            finals = self._retime([*(m.config for m in entrants), *self._standing()], rounds)
        timed = {m.config for m in finals}
        self.unranked = [m for m in entrants if m.config not in timed]
        if not finals:
            left_s = self.budget.left_s()
            if left_s is not None and left_s <= 0:
                return self._best_so_far()
            if again or not self.interruption.requested:
                raise BenchmarkError(
                    f"the final pass of {problem.label()} was given up: its runner was "
                    "cancelled or closed"
                )
            # The first Ctrl-C came during the pass, or a job abandoned a brief one after it.
            return self.rank(notes, again=interrupted)
        quick = {m.config: m for m in entrants}
        # Quick times, which a replay may return, are already stored.
        finals = [m if m.is_final else quick.get(m.config, m) for m in finals]
        ranked = ranking.rank([m for m in finals if self.competition.fits(m)])
        self.write(lambda: self.store.add([m for m in finals if not m.ok]))
        if not ranked:
            raise NoValidConfigError(
                f"none of the {len(entrants)} finalists for {self.competition.problem.label()} "
                f"passed again: {summary(finals)}"
            )
        return ranked

    def _chosen(self, brief: bool) -> tuple[list[Measurement], int]:
        """Finalists and rounds of the pass; few if little time is left."""
        effort = self.competition.effort
        is_measured = self.competition.runner.provenance is Provenance.MEASURED
        near = effort.finalists if is_measured else 0  # a recording has no final times of them
        usual = [(effort.finalists, near, effort.rounds), (effort.finalists, 0, effort.rounds)]
        left_s = self.budget.left_s()
        for count, most_near, rounds in usual if not brief else ():
            entrants = self._fitting(count, most_near)
            if left_s is None or left_s >= self.budget.final_s(_times(entrants), rounds):
                return entrants, rounds
        entrants = self._fitting(BRIEF_FINALISTS, 0)
        return entrants, brief_rounds(_times(entrants))

    def _fitting(self, count: int, near: int) -> list[Measurement]:
        """Finalists whose workspace is small enough."""
        tried = self.competition.seen(self.competition.problem)
        best = ranking.finalists(tried, count, self.competition.kernel, near)
        return [m for m in best if self.competition.fits(m)]

    def _best_so_far(self) -> list[Measurement]:
        label, limit = self.competition.problem.label(), self.budget.limit_s
        self.unranked = []
        if self.provided:
            text = f"the final pass of {label} did not fit into {limit:g} s: the best so far stands"
            self.note(text)
            return self.provided
        tried = self.competition.seen(self.competition.problem)
        checked = [m for m in tried if m.ok and not m.is_final and self.competition.fits(m)]
        self.note(
            f"no final pass of {label} did fit into {limit:g} s: checked candidates are ranked by "
            "their quick times, and no decision is stored"
        )
        ranked = ranking.rank(checked)
        self.undecided = [m.but(flags=(*m.flags, PROVISIONAL)) for m in ranked]
        return self.undecided

    def provide(self) -> None:
        """Make a provisional decision between the best own candidate and the fastest vendor kernel.

        Does nothing if there is a final decision, or a provisional one that is nearly as good. If
        only a vendor's kernel was timed and an own one is decided, under this regime or the chained
        one, that decision stands. The vendor's quick time is shown, and not stored as a decision.
        """
        problem = self.competition.problem
        passed = sorted(
            (m for m in self.competition.seen(problem) if m.ok and self.competition.fits(m)),
            key=ranking.by_latency,
        )
        own = next((m for m in passed if not is_vendor(m.config)), None)
        vendor = next((m for m in passed if is_vendor(m.config)), None)
        timed = [m for m in (own, vendor) if m is not None]
        if not timed or not self._is_wanted(own, vendor):
            return
        self._provided_us = None if own is None else own.latency_us
        began = self.budget.now()
        configs = [m.config for m in timed]
        with self.budget.part("provisional decisions"):
            finals = self._retime(configs, brief_rounds(_times(timed)))
            passing = [m for m in finals if m.ok and m.is_final]
        self.budget.pass_s = self.budget.now() - began
        if not any(m.config == configs[0] for m in passing):
            return
        flagged = [m.but(flags=(*m.flags, PROVISIONAL)) for m in ranking.rank(passing)]
        self.provided = flagged
        self.decide(flagged)
        spent_s = self._tell(flagged[0], PROVISIONAL)
        if own is not None and self.first_own_s is None:
            self.first_own_s = spent_s

    def show_first(self) -> None:
        """Show the first checked time of a vendor's kernel, while no own one is compiled. It is not
        a decision yet: others may follow, or an earlier decision stands.
        """
        runner, problem = self.competition.runner, self.competition.problem
        if self.first_s is not None or runner.provenance is not Provenance.MEASURED:
            return
        passed = [m for m in self.competition.seen(problem) if m.ok and self.competition.fits(m)]
        if not passed or self._is_decided:
            return
        standing = self.standing()
        state = "not a decision yet"
        if standing is not None:
            state = f"{standing.family} stays the decision until it is timed"
        self._tell(min(passed, key=ranking.by_latency), state)

    def _tell(self, best: Measurement, state: str) -> float:
        """Show a checked time, and return the seconds from the start of the sweep to it."""
        spent_s = self.budget.spent_s
        self.first_s = spent_s if self.first_s is None else self.first_s
        name = vendor_name(best.config) if is_vendor(best.config) else best.config.family
        self.note(
            f"{best.problem.label()}: {best.latency_us or 0.0:.4g} us by {name} verified after "
            f"{spent_s:.1f} s, {state}"
        )
        return spent_s

    def _is_wanted(self, own: Measurement | None, vendor: Measurement | None) -> bool:
        """True if these candidates are worth a provisional decision."""
        if self.competition.runner.provenance is not Provenance.MEASURED or self._is_decided:
            return False
        if own is None or own.latency_us is None:
            return not self.provided and self.standing() is None
        if self._provided_us is None:
            return True
        if vendor is not None and vendor.config not in {m.config for m in self.provided}:
            speed = own.speedup(vendor)
            if speed is not None and speed < 1:
                return True
        return own.latency_us <= (1 - PROVISIONAL_GAIN) * self._provided_us

    @cached_property
    def _is_decided(self) -> bool:
        """True if the store has more than a provisional decision."""
        place = self.competition.problem, self.competition.runner.gpu, self.competition.regime
        entry = self.store.best(*place)
        if entry is None or entry.provenance is not Provenance.MEASURED:
            return False
        return not any(PROVISIONAL in m.flags for m in entry.ranking)

    def decide(self, ranked: Sequence[Measurement]) -> None:
        """Store a ranking as the decision."""
        place = self.competition.problem, self.competition.runner.gpu, self.competition.regime
        self.write(lambda: self.store.decide(*place, ranked, self.sweep()))

    def standing(self) -> Config | None:
        """Best own config of the current decision, if it is still legal.

        Without a decision under regime `stream` the chained one is used.
        """
        problem = self.competition.problem
        regimes = Regime.preferred(self.competition.regime)
        entries = filter(None, map(self._decided, regimes))
        best = next(filter(None, (entry.best_own for entry in entries)), None)
        family = None if best is None else self.competition.family(best.config.family)
        if best is None or family is None:
            return None
        return best.config if family.accepts(problem, best.config, self._gpu) else None

    def _standing(self) -> list[Config]:
        """Current config that this sweep did not try, so that a search of fewer candidates cannot
        replace it untimed. Under a time limit only a compiled one.
        """
        config, problem = self.standing(), self.competition.problem
        family = None if config is None else self.competition.family(config.family)
        if config is None or family is None:
            return []
        if config in {m.config for m in self.competition.seen(problem)}:
            return []
        is_hasty = self.competition.options.compiled_only or self.budget.limit_s is not None
        if is_hasty and not self.competition.runner.compiled(problem, family, [config]):
            return []
        return [config]

    @property
    def _gpu(self) -> Gpu:
        return self.competition.runner.gpu

    def _decided(self, regime: Regime) -> Entry | None:
        """Decision of the store under a regime, else the shipped one."""
        problem, provenance = self.competition.problem, self.competition.runner.provenance
        entries = self.store.entries(
            problem=problem, gpu=self._gpu, regime=regime, provenance=provenance
        )
        if not entries and provenance is Provenance.MEASURED:
            shipped_ones = (row.entry for row in shipped_index().get((problem, regime), ()))
            entries = [entry for entry in shipped_ones if entry.gpu == self._gpu]
        return entries[0] if entries else None

    def _retime(self, configs: Sequence[Config], rounds: int) -> list[Measurement]:
        """Run one final pass. Empty if the first Ctrl-C or the time limit ended it."""
        runner, problem = self.competition.runner, self.competition.problem
        left_s = self.budget.left_s()
        if left_s is not None and left_s <= 0:
            return []
        if self.interruption.requested:
            return [self.sign(m) for m in runner.retime(problem, configs, rounds, left_s)]
        finals: list[Measurement] = []
        with self.interruption.waiting():
            finals = runner.retime(problem, configs, rounds, left_s)
        return [self.sign(m) for m in finals]


def brief_rounds(times_us: Sequence[float]) -> int:
    """Rounds of a brief pass over calls of these microseconds."""
    fitting = int(BRIEF_S / round_seconds(times_us)) if times_us else MIN_ROUNDS
    return max(BRIEF_ROUNDS, min(MIN_ROUNDS, fitting))


def _times(measurements: Sequence[Measurement]) -> list[float]:
    return [m.latency_us for m in measurements if m.latency_us is not None]
