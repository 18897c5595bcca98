"""Sweeps against a clock: compiles that are not waited for, a time limit that is kept, and an
answer before anything is waited for. Every second is the test's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from timed_runner import TimedRunner
from toys import BEST, GEMM, REGIME, Clock, Toy, catalogue, latency, ok, recording

from tuner.config import Config
from tuner.errors import NoValidConfigError
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Provenance, Regime
from tuner.problem import Problem
from tuner.search import expectation, history
from tuner.search.storage import open_storage
from tuner.search.study import EFFORTS
from tuner.store import Store
from tuner.store.entry import Entry
from tuner.tuning import competition, finals
from tuner.tuning.budget import Budget
from tuner.tuning.finals import PROVISIONAL
from tuner.tuning.progress import Watcher
from tuner.tuning.sweep import GIVEN_UP, Sweep, SweepOptions

GOOD = Config("toy", {"m": 128, "n": 128, "k": 32, "raster": "n"})
"""Not the best, and not much slower."""


class Notes(Watcher):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(history, "_shipped", lambda *_: ())
    monkeypatch.setattr(expectation, "credits", lambda: ())
    return Clock(monkeypatch)


def portfolio(monkeypatch: pytest.MonkeyPatch, *configs: Config) -> None:
    timed = [(20.0 + place, config) for place, config in enumerate(configs)]
    monkeypatch.setattr(competition, "promising", lambda problem, gpu: iter(timed))


def swept(
    runner: TimedRunner, store: Store, notes: Notes | None = None, **options: object
) -> Sweep:
    chosen = SweepOptions(**{"sampler": "model", "trials": 27, **options})  # type: ignore[arg-type]
    return Sweep(GEMM, REGIME, runner, store, chosen, watcher=notes, catalogue=catalogue)


def slow_tail(config: Config) -> float:
    """Deep small tiles, none of which is among the best, compile for a quarter of an hour."""
    return 900.0 if config["k"] == 64 and config["n"] < 256 else 20.0


class TestStragglers:
    def test_they_are_not_waited_for(self, store: Store, clock: Clock) -> None:
        runner = TimedRunner(recording(), clock, slow_tail)
        made = swept(runner, store)
        outcome = made.run()
        assert clock.now < 200
        assert {config["k"] for config in runner.abandoned} == {64}
        assert outcome.given_up == len(runner.abandoned) > 0
        assert not outcome.interrupted
        assert outcome.ranking[0].latency_us == pytest.approx(10.0, rel=0.06)
        (member,) = (m for m in made.competition.members.values() if m.family.name == "toy")
        reasons = {trial.user_attrs.get("reason") for trial in member.trials.study.trials}
        assert GIVEN_UP in reasons
        assert outcome.expected_loss is not None and 0 <= outcome.expected_loss < 0.1

    def test_the_whole_effort_waits_for_them(self, store: Store, clock: Clock) -> None:
        runner = TimedRunner(recording(), clock, slow_tail)
        outcome = swept(runner, store, effort="full").run()
        assert clock.now > 900
        assert (outcome.given_up, outcome.kernels, runner.abandoned) == (0, 27, [])

    def test_what_may_still_win_is_waited_for(self, store: Store, clock: Clock) -> None:
        """The tiles that the estimates put first compile longest; they are the best indeed."""

        def faster(m: Measurement) -> Measurement:
            return m.but(latency_us=0.6 * (m.latency_us or 0.0)) if m.config.get("m") == 64 else m

        def seconds(config: Config) -> float:
            return 60.0 if config["m"] == 64 else 10.0

        runner = TimedRunner(recording(change=faster), clock, seconds)
        outcome = swept(runner, store).run()
        assert clock.now > 60
        assert outcome.ranking[0].config["m"] == 64

    def test_their_trials_fail_with_the_reason_where_studies_are_kept(
        self, store: Store, clock: Clock, tmp_path: Path
    ) -> None:
        journal = str(tmp_path / "journal")
        runner = TimedRunner(recording(), clock, slow_tail)
        with open_storage(journal, print) as studies:
            chosen = SweepOptions(sampler="model", trials=27)
            made = Sweep(GEMM, REGIME, runner, store, chosen, catalogue=catalogue, studies=studies)
            outcome = made.run()
        (study,) = JournalStorage(JournalFileBackend(journal)).get_all_studies()
        trials = JournalStorage(JournalFileBackend(journal)).get_all_trials(study._study_id)
        left = [t for t in trials if t.user_attrs.get("reason") == GIVEN_UP]
        assert len(left) == outcome.given_up > 0
        assert {t.state for t in left} == {TrialState.FAIL}
        assert {t.params["k"] for t in left} == {64}
        assert {t.user_attrs["provenance"] for t in trials} == {"measured"}


class TestCompiledKernels:
    """They cost no compile, so that all compete that may win, whatever the budget."""

    @pytest.fixture(autouse=True)
    def small_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quick = replace(EFFORTS["quick"], trials={"gemm": 4}, min_gain=0.05)
        monkeypatch.setitem(EFFORTS, "quick", quick)

    def test_they_are_timed_beside_the_budget(self, store: Store, clock: Clock) -> None:
        runner = TimedRunner(recording(), clock, lambda config: 20.0, compiled=[BEST, GOOD])
        made = swept(runner, store, trials=None)
        outcome = made.run()
        (member,) = (m for m in made.competition.members.values() if m.family.name == "toy")
        beside = [member.groups[key][0].params for key in member.extra]
        assert (128, 256, 32) in [(p["m"], p["n"], p["k"]) for p in beside]
        assert member.started <= 4
        assert outcome.ranking[0].latency_us == pytest.approx(10.0)
        assert clock.now < 60, "they do not wait for a compile"

    def test_trials_of_the_user_are_a_limit_of_both(self, store: Store, clock: Clock) -> None:
        runner = TimedRunner(recording(), clock, lambda config: 20.0, compiled=[BEST, GOOD])
        made = swept(runner, store, trials=2)
        made.run()
        (member,) = (m for m in made.competition.members.values() if m.family.name == "toy")
        assert (member.extra, member.finished) == (set(), 2)

    def test_an_interrupted_sweep_goes_on_with_its_whole_budget(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(competition, "PORTFOLIO_FIRST", 1)
        runner = TimedRunner(recording(), clock, lambda config: 20.0, compiled=[BEST, GOOD])
        first = swept(runner, store, trials=None)
        store.begin_sweep(first._record)
        kernels = {tuple(config[name] for name in "mnk") for config in (BEST, GOOD)}
        known = [
            m.but(sweep=first.id, provenance=Provenance.MEASURED)
            for m in recording().measurements
            if m.config.family == "toy" and tuple(m.config[name] for name in "mnk") in kernels
        ]
        store.add(known)
        search = swept(runner, store, trials=None).competition.plain_search()
        assert (search.told, search.total - search.spent) == (2, 3)


class TestTimeLimit:
    def test_it_is_kept_with_the_final_pass(self, store: Store, clock: Clock) -> None:
        runner = TimedRunner(recording(), clock, lambda config: 25.0, cores=2)
        outcome = swept(runner, store, time_limit_s=60, effort="full").run()
        assert 40 < clock.now <= 60
        assert all(m.is_final for m in outcome.ranking) and outcome.ranking
        assert not any(PROVISIONAL in m.flags for m in outcome.ranking)
        assert outcome.given_up == len(runner.abandoned) > 0

    def test_a_compile_that_never_ends_costs_no_second_of_it(
        self, store: Store, clock: Clock
    ) -> None:
        def seconds(config: Config) -> float:
            return 10.0 if config["m"] == 64 else 1e9

        runner = TimedRunner(recording(), clock, seconds, cores=27)
        outcome = swept(runner, store, time_limit_s=60, effort="full").run()
        assert clock.now <= 60
        own = {m.config["m"] for m in outcome.ranking if m.config.family == "toy"}
        assert own == {64}

    def test_a_final_pass_that_does_not_fit_leaves_the_best_so_far(
        self, store: Store, clock: Clock
    ) -> None:
        notes = Notes()
        runner = TimedRunner(recording(), clock, lambda config: 5.0)
        retime = runner.retime

        def slower(*arguments: object) -> object:
            """The third pass hangs."""
            runner._finalist_s = 0.5 if len(runner.events) < 8 else 1e6
            return retime(*arguments)  # type: ignore[arg-type]

        runner.retime = slower  # type: ignore[method-assign, assignment]
        outcome = swept(runner, store, notes, time_limit_s=60, effort="full").run()
        assert clock.now <= 65
        assert [PROVISIONAL in m.flags for m in outcome.ranking] == [True] * len(outcome.ranking)
        assert any("did not fit into 60 s: the best so far stands" in text for text in notes.texts)
        stored = store.best(GEMM, DEFAULT_GPU, REGIME)
        assert stored is not None and stored.ranking == outcome.ranking

    def test_without_any_final_pass_the_checked_candidates_answer(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        portfolio(monkeypatch, GOOD)
        notes = Notes()
        runner = TimedRunner(
            recording(), clock, lambda config: 5.0, compiled=[GOOD], finalist_s=1e6
        )
        made = swept(runner, store, notes, time_limit_s=30, effort="full")
        outcome = made.run()
        assert clock.now <= 35
        again = swept(runner, store, time_limit_s=30, effort="full")
        assert again.id == made.id, "it goes on, and is not taken for tuned"
        own = [m for m in outcome.ranking if m.config.family == "toy"]
        assert own and not any(m.is_final for m in outcome.ranking)
        assert all(PROVISIONAL in m.flags for m in outcome.ranking)
        assert store.best(GEMM, DEFAULT_GPU, REGIME) is None
        assert any("quick times, and no decision is stored" in text for text in notes.texts)
        assert outcome.to_json()["pass"] == "quick"

    def test_nothing_checked_within_it_is_said(self, store: Store, clock: Clock) -> None:
        made = swept(TimedRunner(recording(), clock, lambda config: 5.0), store, time_limit_s=30)
        clock.pass_by(31)
        with pytest.raises(NoValidConfigError):
            made.run(began=0.0)
        assert clock.now <= 35

    def test_it_counts_from_when_the_job_began(self, store: Store, clock: Clock) -> None:
        made = swept(
            TimedRunner(recording(), clock, lambda config: 25.0, cores=2),
            store,
            time_limit_s=60,
            effort="full",
        )
        clock.pass_by(20)
        outcome = made.run(began=0.0)
        assert clock.now <= 60 and outcome.elapsed_s == clock.now


class TestFinalists:
    """Kernels that are nearly as fast as the best take part where time allows."""

    def own_finals(self, store: Store, clock: Clock, **options: object) -> int:
        def alike(m: Measurement) -> Measurement:
            return m.but(latency_us=10.0 + 1e-3 * m.config.get("m", 100), std_us=0.5)

        runner = TimedRunner(recording(change=alike), clock, lambda config: 1.0, cores=27)
        outcome = swept(runner, store, **options).run()  # type: ignore[arg-type]
        return sum(m.config.family == "toy" for m in outcome.ranking)

    def test_of_short_calls_many(self, store: Store, clock: Clock) -> None:
        assert self.own_finals(store, clock) > 2 * EFFORTS["quick"].finalists

    def test_the_usual_ones_where_these_do_not_fit(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usual = EFFORTS["quick"].finalists

        def seconds(_: Budget, times_us: Sequence[float], rounds: int) -> float:
            return 1e6 if len(times_us) > usual + 1 else 1.0  # one vendor's

        monkeypatch.setattr(Budget, "final_s", seconds)
        assert self.own_finals(store, clock, time_limit_s=60) == usual


class TestFirstAnswer:
    def test_the_portfolio_s_kernels_answer_before_any_compile(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missing = Config("toy", {**GOOD.params, "n": 64})
        portfolio(monkeypatch, missing, GOOD)
        notes, found = Notes(), []
        runner = TimedRunner(recording(), clock, lambda config: 25.0, compiled=[GOOD])
        decide = store.decide

        def watched(*arguments: object) -> None:
            decide(*arguments)  # type: ignore[arg-type]
            entry = store.best(GEMM, DEFAULT_GPU, REGIME)
            found.append((clock.now, entry.winner))

        monkeypatch.setattr(store, "decide", watched)
        outcome = swept(runner, store, notes).run()
        when, first = found[0]
        assert when < 15 and first.config == GOOD and PROVISIONAL in first.flags
        assert first.is_final and first.ok
        assert runner.events[0][1] == "timed toy", "before the vendors' kernels"
        assert outcome.resumed == 0, "nothing was known before"
        assert any(
            "us by toy verified after" in text and "provisional" in text for text in notes.texts
        )
        _, last = found[-1]
        assert PROVISIONAL not in last.flags and last == outcome.ranking[0]
        assert last.latency_us == pytest.approx(10.0, rel=0.06)

    def test_a_vendor_s_kernel_answers_while_the_first_own_one_compiles(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        portfolio(monkeypatch)
        notes = Notes()
        decided: list[tuple[float, list[str]]] = []
        decide = store.decide

        def watched(*arguments: object) -> None:
            decide(*arguments)  # type: ignore[arg-type]
            decided.append((clock.now, [m.config.family for m in arguments[3]]))  # type: ignore[attr-defined]

        monkeypatch.setattr(store, "decide", watched)
        runner = TimedRunner(recording(vendor_us=30.0), clock, lambda config: 25.0)
        outcome = swept(runner, store, notes).run()
        (when, first), (later, second), *_ = decided
        assert first == ["vendor_toy"] and second == ["toy", "vendor_toy"]
        assert when < 10 < 25 < later
        assert outcome.first_own_s == later
        assert outcome.first_answer_s is not None and outcome.first_answer_s <= when, "it is shown"
        found = outcome.to_json()
        assert found["first_answer_s"] < found["first_own_s"]
        shown, provisional = (text for text in notes.texts if "30 us by " in text)
        assert "verified after" in shown and shown.endswith("not a decision yet")
        assert provisional.endswith("provisional")

    @pytest.mark.parametrize("regime", [REGIME, REGIME.chained], ids=str)
    def test_a_vendor_s_kernel_does_not_replace_what_ships(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, regime: Regime
    ) -> None:
        portfolio(monkeypatch)
        shipped = Entry.of([ok(BEST, 10.0).but(regime=regime, is_final=True)])
        known = {(GEMM, regime): [SimpleNamespace(entry=shipped)]}
        monkeypatch.setattr(finals, "shipped_index", lambda: known)
        notes, families = Notes(), []
        decide = store.decide
        store.decide = lambda *a: (families.append([m.config.family for m in a[3]]), decide(*a))  # type: ignore[method-assign, assignment]
        begun: list[list[list[Config]]] = []
        runner = TimedRunner(recording(vendor_us=30.0), clock, lambda config: 25.0)
        runner.prefetch = lambda problem, groups: begun.append([list(g) for g in groups])  # type: ignore[method-assign, assignment]
        asked: list[Config] = []
        submit = runner.submit
        runner.submit = lambda p, group: (asked.extend(group), submit(p, group))[1]  # type: ignore[method-assign, assignment]
        timed: list[list[str]] = []
        retime = runner.retime
        runner.retime = lambda p, found, *a: (  # type: ignore[method-assign, assignment]
            timed.append([one.family for one in found]), retime(p, found, *a)
        )[1]  # fmt: skip
        outcome = swept(runner, store, notes).run()
        own = [config for config in asked if config.family == "toy"]
        assert Toy().compile_digest(own[0]) == Toy().compile_digest(BEST), "it is timed first"
        assert families and all("toy" in names for names in families)
        assert timed and all("toy" in names for names in timed), "no pass is timed for nothing"
        assert outcome.first_own_s is not None and outcome.first_own_s > 25
        assert outcome.first_answer_s is not None and outcome.first_answer_s < 10, "it is shown"
        (shown,) = (text for text in notes.texts if "30 us by" in text)
        assert "verified after" in shown and "provisional" not in shown
        assert "toy stays the decision until it is timed" in shown
        assert begun[0] == [[BEST]], "what ships is compiled before the others are chosen"

    def test_a_vendor_s_decision_does_not_hide_an_own_one_behind_copies(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shipped = Entry.of([ok(BEST, 10.0).but(regime=REGIME.chained, is_final=True)])
        known = {(GEMM, REGIME.chained): [SimpleNamespace(entry=shipped)]}
        monkeypatch.setattr(finals, "shipped_index", lambda: known)
        runner = TimedRunner(recording(), clock, lambda config: 25.0)
        made = swept(runner, store)
        assert made._finals.standing() == BEST
        vendor = next(m for m in recording().measurements if m.config.family == "vendor_toy")
        vendors = vendor.but(regime=REGIME, is_final=True, environment=runner.environment)
        store.decide(GEMM, DEFAULT_GPU, REGIME, [vendors], "a sweep")
        assert made._finals.standing() == BEST

    def test_a_kernel_that_the_space_leaves_out_answers_too(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        space, recorded = Toy().space(GEMM, DEFAULT_GPU), recording()
        rest = [c for c in space if Toy().compile_digest(c) != Toy().compile_digest(GOOD)]
        monkeypatch.setattr(Toy, "space", lambda *_: rest)
        missing = Config("toy", {**GOOD.params, "n": 512})
        portfolio(monkeypatch, missing, GOOD)
        runner = TimedRunner(recorded, clock, lambda config: 25.0, compiled=[GOOD])
        outcome = swept(runner, store).run()
        assert outcome.first_answer_s is not None and outcome.first_answer_s < 15
        assert runner.events[0][1] == "timed toy", "before the vendors' kernels"
        assert outcome.kernels <= len({Toy().compile_digest(c) for c in space})

    def test_what_is_not_compiled_is_compiled_first(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recorded, space = recording(), Toy().space(GEMM, DEFAULT_GPU)
        monkeypatch.setattr(Toy, "space", lambda *_: [c for c in space if c["m"] != GOOD["m"]])
        portfolio(monkeypatch, GOOD)
        prefetched: list[Config] = []

        class Noting(TimedRunner):
            def prefetch(self, problem: Problem, groups: Sequence[Sequence[Config]]) -> None:
                prefetched.extend(config for group in groups for config in group)
                super().prefetch(problem, groups)

        outcome = swept(Noting(recorded, clock, lambda config: 25.0), store).run()
        assert prefetched[0] == GOOD
        assert GOOD in [m.config for m in outcome.ranking]

    def test_the_current_decision_is_timed_first_though_the_space_leaves_it_out(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        space, recorded = Toy().space(GEMM, DEFAULT_GPU), recording()
        rest = [c for c in space if Toy().compile_digest(c) != Toy().compile_digest(GOOD)]
        monkeypatch.setattr(Toy, "space", lambda *_: rest)
        portfolio(monkeypatch)
        shipped = Entry.of([ok(GOOD, 11.0).but(regime=REGIME, is_final=True)])
        known = {(GEMM, REGIME): [SimpleNamespace(entry=shipped)]}
        monkeypatch.setattr(finals, "shipped_index", lambda: known)
        asked: list[Config] = []

        class Noting(TimedRunner):
            def submit(self, problem: Problem, group: Sequence[Config]) -> None:
                asked.extend(group)
                super().submit(problem, group)

        outcome = swept(Noting(recorded, clock, lambda config: 25.0), store).run()
        own = [config for config in asked if config.family == "toy"]
        assert own[0] == GOOD
        assert outcome.first_own_s is not None and 25 < outcome.first_own_s < 30
        standing = Sweep(
            GEMM, REGIME, TimedRunner(recorded, clock, lambda config: 25.0), store,
            SweepOptions(sampler="model", compiled_only=True), catalogue=catalogue,
        )  # fmt: skip
        assert not standing.competition.plain_search().members, "nothing is compiled"

    def test_the_seconds_of_its_parts_are_those_of_all(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        portfolio(monkeypatch, GOOD)
        runner = TimedRunner(recording(), clock, lambda config: 25.0, compiled=[GOOD])
        outcome = swept(runner, store).run()
        names = ["first answer", "provisional decisions", "baselines", "search", "final pass"]
        assert sorted(outcome.seconds) == sorted(names)
        assert sum(outcome.seconds.values()) == pytest.approx(outcome.elapsed_s)
        assert outcome.seconds["search"] > 20 > outcome.seconds["first answer"]
        assert outcome.to_json()["first_answer_s"] == round(outcome.first_answer_s or 0.0, 2)

    def test_the_first_own_kernel_answers_though_others_are_compiled_too(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        portfolio(monkeypatch)
        runner = TimedRunner(recording(), clock, lambda config: 25.0)
        swept(runner, store).run()
        own = [i for i, (_, what) in enumerate(runner.events) if what == "timed toy"]
        assert runner.events[own[0] + 1][1] == "final pass of 2"
        assert runner.events[own[1]][1] == "timed toy", "the others come after it"

    def test_a_better_one_replaces_it_while_others_compile(
        self, store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        portfolio(monkeypatch)
        decided: list[tuple[float, float]] = []
        decide = store.decide

        def watched(*arguments: object) -> None:
            decide(*arguments)  # type: ignore[arg-type]
            ranked = arguments[3]
            decided.append((clock.now, ranked[0].latency_us))  # type: ignore[index]

        monkeypatch.setattr(store, "decide", watched)
        runner = TimedRunner(recording(vendor_us=99.0), clock, lambda config: 25.0, cores=2)
        swept(runner, store, effort="full").run()
        times = [us for _, us in decided]
        assert len(times) > 2 and times == sorted(times, reverse=True)

    def test_a_vendor_s_faster_kernel_is_not_forgotten(self, store: Store, clock: Clock) -> None:
        runner = TimedRunner(recording(vendor_us=1.0), clock, lambda config: 25.0, cores=2)
        decide = store.decide
        winners = []
        store.decide = lambda *a: (winners.append(a[3][0].config.family), decide(*a))  # type: ignore[method-assign, assignment]
        swept(runner, store, effort="full").run()
        assert set(winners) == {"vendor_toy"}

    def test_a_decision_is_not_replaced_by_a_provisional_one(
        self, store: Store, clock: Clock
    ) -> None:
        swept(TimedRunner(recording(), clock, lambda config: 25.0), store).run()
        notes = Notes()
        decided = store.best(GEMM, DEFAULT_GPU, REGIME)
        assert decided is not None and not any(PROVISIONAL in m.flags for m in decided.ranking)
        runner = TimedRunner(recording(), clock, lambda config: 25.0)
        made = swept(runner, store, notes, effort="full")
        made.run()
        assert not any("provisional" in text for text in notes.texts)

    def test_what_is_decided_is_tried_first(self, store: Store, clock: Clock) -> None:
        swept(TimedRunner(recording(), clock, lambda config: 25.0), store, effort="full").run()
        other = store.best(GEMM, DEFAULT_GPU, REGIME)
        assert other is not None and other.winner.config == BEST
        changed = recording(change=lambda m: m.but(latency_us=1.01 * latency(m.config)))
        runner = TimedRunner(changed, clock, lambda config: 25.0)
        runner.environment = type(runner.environment)({"driver": "2"})
        asked: list[Config] = []
        submit = runner.submit
        runner.submit = lambda p, group: (asked.extend(group), submit(p, group))[1]  # type: ignore[method-assign, assignment]
        swept(runner, store).run()
        own = [config for config in asked if config.family == "toy"]
        assert Toy().compile_digest(own[0]) == Toy().compile_digest(BEST)
