"""What is evaluated next: seeds, enumeration, suggestions, shares, resumption."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, ClassVar

import optuna
import pytest
from optuna.trial import TrialState

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families.base import Domain, Family
from tuner.hardware import DEFAULT_GPU, Gpu
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import GemmProblem, Problem
from tuner.search import expectation, samplers
from tuner.search import study as module
from tuner.search.expectation import Credit
from tuner.search.family_search import LEADING, FamilySearch
from tuner.search.samplers import ABSENT, KERNEL, STARTUP, ModelSampler, choices_of
from tuner.search.study import NEEDED, SAMPLERS, TOGETHER, Search, sampler_name
from tuner.search.surrogate import Surrogate, features_of

PROBLEM = GemmProblem(512, 512, 512)
REGIME = Regime.default("gemm")


@pytest.fixture(autouse=True)
def whole_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "credits", lambda: ())


class Toy(Family):
    """A space with a conditional parameter (`splits`), an optional one (`stages`), a run-time one
    (`raster`) and a rule across parameters."""

    name = "toy"
    op = "gemm"
    runtime_parameters = frozenset({"raster"})
    domains: ClassVar[Mapping[str, Domain]] = {
        "m": (32, 64, 128, 256),
        "n": (32, 64, 128, 256),
        "schedule": ("a", "b"),
        "stages": (2, 3, 4),
        "splits": (1, 2),
        "raster": ("m", "n"),
    }
    optional = frozenset({"stages", "splits"})

    def conflicts(self, problem: Problem, config: Config, gpu: Gpu) -> list[str]:
        return ["too large"] if config["m"] * config["n"] > 128 * 128 else []

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        found = []
        for m, n, schedule, stages, raster in product(
            (32, 64, 128, 256), (32, 64, 128, 256), ("a", "b"), (None, 2, 3, 4), ("m", "n")
        ):
            for splits in (1, 2) if schedule == "b" else (None,):
                params = {"m": m, "n": n, "schedule": schedule, "raster": raster}
                params |= {} if stages is None else {"stages": stages}
                params |= {} if splits is None else {"splits": splits}
                found.append(Config(self.name, params))
        return [c for c in found if not self.violations(problem, c, gpu)]

    def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
        return 10 + abs(math.log2(config["m"] / 64))


class Small(Toy):
    name = "small"

    def space(self, problem: Problem, gpu: Gpu) -> Sequence[Config]:
        return [Config(self.name, {"m": m, "n": 32}) for m in (32, 64, 128)]


def latency(config: Config) -> float:
    """Fastest at m=128, n=64, schedule b, splits 2, stages 3, raster n."""
    off = abs(math.log2(config["m"] / 128)) + abs(math.log2(config["n"] / 64))
    off += 0.5 * (config.get("schedule") != "b") + 0.3 * (config.get("splits") != 2)
    off += 0.2 * abs(config.get("stages", 6) - 3) + 0.1 * (config.get("raster") != "n")
    return 10 * (1 + 0.3 * off)


def measure(group: Sequence[Config], status: Status = Status.OK) -> list[Measurement]:
    ok = status is Status.OK
    return [
        Measurement(PROBLEM, c, DEFAULT_GPU, REGIME, status, latency_us=latency(c) if ok else None)
        for c in group
    ]


def member(
    family: Family,
    *,
    seeds: int = 4,
    sampler: str = "tpe",
    seed: int = 0,
    problem: Problem = PROBLEM,
    history: Sequence[Measurement] = (),
    expected_us: Mapping[Config, float] | None = None,
) -> FamilySearch:
    space = family.space(problem, DEFAULT_GPU)
    return FamilySearch(
        family,
        problem,
        DEFAULT_GPU,
        space,
        seeds=seeds,
        sampler=sampler,
        seed=seed,
        history=history,
        expected_us=expected_us,
    )


def run(search: Search) -> list[list[Config]]:
    """Ask and tell one by one until the end."""
    asked = []
    while (group := search.ask()) is not None:
        asked.append(group)
        search.tell(measure(group))
    return asked


def test_groups_are_sets_of_compiled_kernels() -> None:
    groups = member(Toy()).groups
    assert all({c["raster"] for c in group} == {"m", "n"} for group in groups.values())
    assert sum(map(len, groups.values())) == len(Toy().space(PROBLEM, DEFAULT_GPU))


def test_a_space_that_fits_is_enumerated_once_without_a_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the ranking is enough")

    monkeypatch.setattr(optuna.samplers.TPESampler, "sample_relative", refuse)
    toy = member(Toy())
    asked = run(Search([toy], total=500, seeds=4))
    digests = [config.digest for group in asked for config in group]
    assert sorted(digests) == sorted(c.digest for c in Toy().space(PROBLEM, DEFAULT_GPU))
    assert toy.best_us == pytest.approx(10.0)


def test_seeds_come_first_and_in_order() -> None:
    toy = member(Toy(), seeds=5)
    asked = run(Search([toy], total=5, seeds=5))
    wanted = Toy().seeds(PROBLEM, DEFAULT_GPU, Toy().space(PROBLEM, DEFAULT_GPU), 5)
    assert [Toy().compile_digest(g[0]) for g in asked] == [Toy().compile_digest(c) for c in wanted]


@pytest.mark.parametrize(("sampler", "seed"), [("tpe", 0), ("model", 0)])
def test_suggestions_are_legal_distinct_and_find_the_optimum(sampler: str, seed: int) -> None:
    toy = member(Toy(), sampler=sampler, seed=seed)
    assert len(toy.groups) > 100
    asked = run(Search([toy], total=60, seeds=4))
    digests = [Toy().compile_digest(group[0]) for group in asked]
    assert len(asked) == len(set(digests)) == 60
    assert set(digests) <= set(toy.groups)
    assert toy.best_us <= 10.0 * 1.05


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name not in NEEDED])
def test_equal_seeds_ask_equally(sampler: str) -> None:
    first, second = (
        run(Search([member(Toy(), sampler=sampler, seed=7)], total=25, seeds=4)) for _ in range(2)
    )
    assert len(first) == 25
    assert first == second


def test_model_reads_conditions_from_the_space() -> None:
    features = [features_of(Toy(), c) for c in Toy().space(PROBLEM, DEFAULT_GPU)]
    choices = choices_of(features)
    assert choices["stages"] == (2, 3, 4, ABSENT)  # nothing else says whether it is there
    assert choices["splits"] == (1, 2)  # the schedule does


def test_infeasible_suggestions_are_told_and_cost_nothing() -> None:
    toy = member(Toy())
    asked = run(Search([toy], total=40, seeds=4))
    assert len(asked) == 40
    illegal = [t for t in toy.trials.study.trials if KERNEL not in t.user_attrs and t.constraints]
    assert illegal, "256 x 256 is illegal and must have been suggested in 34 trials"
    assert {t.user_attrs["reason"] for t in illegal} == {"no legal config has these values"}
    infeasible = [t for t in toy.trials.study.trials if t.constraints.get("runs", 0) > 0]
    worst = max(math.log(latency(c)) for group in asked for c in group)
    assert all(t.value <= worst for t in infeasible), "no huge sentinel"


def test_failures_are_told_as_infeasible() -> None:
    toy = member(Toy())
    search = Search([toy], total=30, seeds=4)
    statuses = [Status.TIMEOUT, Status.OK]
    failed = 0
    while (group := search.ask()) is not None:
        status = statuses[search.spent % 2]
        failed += status is Status.TIMEOUT
        search.tell(measure(group, status))
    trials = toy.trials.study.trials
    evaluated = [t for t in trials if KERNEL in t.user_attrs]
    assert sum(t.constraints["runs"] > 0 for t in evaluated) == failed
    assert {t.user_attrs.get("reason") for t in evaluated} == {None, "timeout"}
    assert all(t.value < 5 for t in trials if t.value is not None)


def test_known_groups_are_not_asked_again_and_count() -> None:
    toy = member(Toy())
    first = run(Search([toy], total=20, seeds=4))
    known = [m for group in first for m in measure(group)]
    again = member(Toy())
    search = Search([again], total=30, seeds=4)
    search.tell_known(known)
    assert search.told == search.spent == 20
    more = run(search)
    assert len(more) == 10
    assert not {c.digest for g in first for c in g} & {c.digest for g in more for c in g}


def test_a_half_known_group_is_asked_for_its_rest() -> None:
    toy = member(Small())
    group = next(iter(member(Toy()).groups.values()))
    toy = member(Toy())
    toy.tell(measure(group[:1]))
    asked = run(Search([toy], total=500, seeds=4))
    assert group[1:] in asked
    assert group not in asked


def test_foreign_measurements_are_ignored() -> None:
    toy = member(Toy())
    toy.tell(measure([Config("toy", {"m": 8, "n": 8, "schedule": "z", "raster": "m"})]))
    assert toy.started == 0
    assert math.isinf(toy.best_us)


def test_every_family_gets_its_seeds_and_the_faster_one_the_rest() -> None:
    class Slow(Toy):
        name = "slow"

    def tell(group: Sequence[Config]) -> list[Measurement]:
        factor = 2.0 if group[0].family == "slow" else 1.0
        return [m.but(latency_us=factor * latency(m.config)) for m in measure(group)]

    toy, slow = member(Toy()), member(Slow())
    search = Search([slow, toy], total=40, seeds=4)
    while (group := search.ask()) is not None:
        search.tell(tell(group))
    assert slow.started >= 4
    assert toy.started > 3 * slow.started


def test_a_small_family_is_enumerated_beside_a_large_one() -> None:
    toy, small = member(Toy()), member(Small())
    run(Search([small, toy], total=20, seeds=4))
    assert small.started == 3
    assert toy.started == 17


def test_ahead_is_what_will_be_asked_first() -> None:
    search = Search([member(Toy())], total=20, seeds=4)
    first = search.first_groups()
    assert [search.ask() for _ in range(4)] == first
    assert search.first_groups() == []


def test_budget_of_one_and_no_family() -> None:
    assert len(run(Search([member(Toy()), member(Small())], total=1, seeds=4))) == 1
    empty = Search([], total=10, seeds=4)
    assert empty.ask() is None
    assert empty.goal == 0
    assert empty.first_groups() == []


def test_sampler_is_one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sampler_name("tpe") == "tpe"
    monkeypatch.setenv("TUNER_SAMPLER", "tpe")
    assert sampler_name(None) == "tpe"
    with pytest.raises(
        ConfigError,
        match=r"sampler=cma is not known \(allowed: model, tpe, gp, cmaes, cost, random\)",
    ):
        sampler_name("cma")


def test_sampler_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert sampler_name(None) == "model"
    with pytest.raises(ConfigError, match=r"sampler=gp needs torch and scipy: .*pip install torch"):
        sampler_name("gp")
    with pytest.raises(ConfigError, match=r"sampler=cmaes needs cmaes: .*pip install cmaes"):
        sampler_name("cmaes")


def test_the_cost_models_order_and_nothing_else() -> None:
    asked = run(Search([member(Toy(), sampler="cost")], total=40, seeds=4))
    predicted = [min(Toy().predict_us(PROBLEM, c, DEFAULT_GPU) for c in group) for group in asked]
    assert predicted == sorted(predicted)


def test_random_knows_no_seeds() -> None:
    first = [
        run(Search([member(Toy(), sampler="random", seed=s)], total=1, seeds=4)) for s in range(3)
    ]
    assert len({group[0][0].digest for group in first}) > 1


def test_model_goes_on_where_the_cost_model_is_wrong() -> None:
    """The toy's estimate knows m alone and has its optimum elsewhere."""
    toy = member(Toy(), sampler="model")
    asked = run(Search([toy], total=24, seeds=4))
    assert toy.best_us <= 10.0 * 1.05
    assert asked[0][0]["m"] == 64, "the estimate leads"


def test_model_learns_from_like_problems() -> None:
    near = GemmProblem(1024, 512, 512)
    history = [
        m.but(problem=near)
        for group in member(Toy(), problem=near).groups.values()
        for m in measure(group)
    ]
    asked = run(Search([member(Toy(), sampler="model", history=history)], total=1, seeds=4))
    assert min(latency(c) for c in asked[0]) <= 10.0 * 1.05
    untaught = run(Search([member(Toy(), sampler="model")], total=1, seeds=4))
    assert min(latency(c) for c in untaught[0]) > 10.0 * 1.05


def test_model_ends_when_no_gain_is_expected() -> None:
    endless, frugal = (member(Toy(), sampler="model") for _ in range(2))
    assert len(run(Search([endless], total=200, seeds=4))) == len(endless.groups)
    asked = run(Search([frugal], total=200, seeds=4, min_gain=0.005))
    assert len(asked) < len(endless.groups) / 2
    assert frugal.best_us <= 10.0 * 1.05


@pytest.mark.parametrize(("gain", "goes_on"), [(0.05, True), (0.005, True), (0.001, False)])
def test_a_quick_search_goes_on_while_half_a_percent_is_expected(
    gain: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Surrogate, "gains", lambda self, keys, *_: dict.fromkeys(keys, gain))
    quick = module.effort("quick")
    search = Search([member(Toy(), sampler="model")], 40, quick.seeds, quick.min_gain)
    assert (search.ask() is not None) == goes_on


def test_model_spends_nothing_on_a_family_without_hope() -> None:
    class Slow(Toy):
        name = "slow"

        def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
            return 4 * super().predict_us(problem, config, gpu)

    toy, slow = member(Toy(), sampler="model"), member(Slow(), sampler="model")
    run(Search([slow, toy], total=60, seeds=4, min_gain=0.001))
    assert slow.started == 0
    assert toy.started > 10


def test_model_begins_with_the_least_expected_times_and_spreads_what_follows() -> None:
    toy = member(Toy(), sampler="model")
    search = Search([toy], total=40, seeds=4)
    expected, first = toy.open, search.first_groups()
    assert [search.ask() for _ in range(2 * LEADING)] == first
    assert first[:LEADING] == [toy.groups[key][: len(first[0])] for key in expected[:LEADING]]
    assert len({group[0].digest for group in first}) == 2 * LEADING
    kinds = {group[0]["n"] for group in first[:LEADING]}
    assert kinds < {group[0]["n"] for group in first}, "not all of the same kind"


@pytest.mark.parametrize(("total", "count"), [(40, LEADING), (20, LEADING), (8, 4)])
def test_model_compiles_ahead_what_is_asked_before_any_result(total: int, count: int) -> None:
    search = Search([member(Toy(), sampler="model")], total=total, seeds=8, min_gain=1e-9)
    first = search.first_groups()
    assert len(first) == count == search.at_once
    assert [search.ask() for _ in range(count)] == first


def test_further_groups_are_begun_several_together() -> None:
    search = Search([member(Toy(), sampler="model")], total=40, seeds=8, min_gain=1e-9)
    groups = [search.ask() for _ in range(LEADING)]
    for count, group in enumerate(groups, 1):
        assert group is not None
        search.tell(measure(group))
        later = [search.ask() for _ in range(TOGETHER)]
        assert all(later) if count % TOGETHER == 0 else not any(later)


def test_of_the_gain_of_further_groups_the_recorded_part_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Surrogate, "gains", lambda self, keys, *_: dict.fromkeys(keys, 0.05))
    for share, goes_on in ((0.1, True), (0.01, False)):
        monkeypatch.setattr(expectation, "credits", lambda s=share: (Credit(1, s, s, 9),))
        search = Search([member(Toy(), sampler="model")], total=40, seeds=8, min_gain=0.002)
        groups = [search.ask() for _ in range(LEADING)]
        for group in groups:
            assert group is not None
            search.tell(measure(group))
        assert (search.ask() is not None) is goes_on


def test_a_portfolio_s_rates_lead() -> None:
    """They are not measured times: the estimate of 12 us counts, too."""
    toy = member(Toy(), sampler="model")
    key = next(key for key, (first, *_) in toy.groups.items() if first["m"] == 256)
    taught = member(Toy(), sampler="model", expected_us={toy.groups[key][1]: 9.0})
    assert taught.open.index(key) < toy.open.index(key) - LEADING
    assert taught.surrogate is not None
    assert math.log(9.0) < taught.surrogate.mean(key) < math.log(10.0)


def test_model_leads_with_the_best_of_all_families() -> None:
    class Other(Toy):
        name = "other"

        def predict_us(self, problem: Problem, config: Config, gpu: Gpu) -> float:
            factor = 0.99 if config["n"] == 32 and config["schedule"] == "a" else 1.01
            return factor * super().predict_us(problem, config, gpu)

    members = [member(Other(), sampler="model"), member(Toy(), sampler="model")]
    asked = [group[0] for group in Search(members, total=40, seeds=4).first_groups()][:LEADING]
    estimates = {m.family.name: m.family for m in members}
    times = [estimates[c.family].predict_us(PROBLEM, c, DEFAULT_GPU) for c in asked]
    assert times == sorted(times) and {c.family for c in asked} == {"toy", "other"}


def test_model_takes_failures_for_the_worst() -> None:
    toy = member(Toy(), sampler="model")
    search = Search([toy], total=20, seeds=4)
    while (group := search.ask()) is not None:
        failed = group[0]["schedule"] == "a"
        search.tell(measure(group, Status.TIMEOUT if failed else Status.OK))
    tried = [toy.seen[c.digest] for g in toy.groups.values() for c in g if c.digest in toy.seen]
    assert any(not m.ok for m in tried)
    assert sum(m.ok for m in tried) > 2 * sum(not m.ok for m in tried)


def test_gp_sampler_where_torch_is() -> None:
    pytest.importorskip("torch", reason="GPSampler needs torch")
    pytest.importorskip("scipy", reason="GPSampler needs scipy")
    toy = member(Toy(), sampler="gp")
    asked = run(Search([toy], total=10, seeds=4))
    assert len({Toy().compile_digest(g[0]) for g in asked}) == 10


def test_cmaes_sampler_where_it_is() -> None:
    pytest.importorskip("cmaes", reason="CmaEsSampler needs cmaes")
    toys = [member(Toy(), sampler="cmaes", seed=7) for _ in range(2)]
    first, second = (run(Search([toy], total=30, seeds=4)) for toy in toys)
    assert first == second and len({Toy().compile_digest(g[0]) for g in first}) == 30


class Positions(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Draws the last position of each parameter, as CMA-ES might."""

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return {}

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
        return {}

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> float:
        return float(distribution.high)


def test_a_position_study_takes_the_nearest_open_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "library_sampler", lambda *arguments: Positions())
    toy = member(Toy(), sampler="cmaes")
    ranked = toy.open
    asked = run(Search([toy], total=10, seeds=4))
    keys = [Toy().compile_digest(group[0]) for group in asked]
    assert keys[:STARTUP] == ranked[:STARTUP] and len(set(keys)) == 10
    study = toy.trials
    assert isinstance(study, samplers.PositionStudy)
    last = study._last
    left = [key for key in toy.groups if key not in keys[:STARTUP]]

    def distance(key: str) -> float:
        return sum((last[n] - position) / last[n] for n, position in study._positions[key].items())

    assert distance(keys[STARTUP]) == min(map(distance, left))


def test_unknown_effort() -> None:
    with pytest.raises(ConfigError, match=r"effort=max is not known \(allowed: quick, full\)"):
        module.effort("max")


class Wide(Toy):
    """One kernel a pair of m and n, many run-time variants of each."""

    name = "wide"
    runtime_parameters = frozenset({"raster", "schedule", "stages", "splits"})


def race(raced: int) -> tuple[FamilySearch, list[list[Config]]]:
    space = Wide().space(PROBLEM, DEFAULT_GPU)
    wide = FamilySearch(
        Wide(), PROBLEM, DEFAULT_GPU, space, seeds=4, sampler="cost", seed=0, raced=raced
    )
    return wide, run(Search([wide], total=100, seeds=4))


def test_a_race_times_less_and_finds_the_same() -> None:
    everything, _ = race(0)
    raced, asked = race(3)
    assert raced.best_us == everything.best_us
    assert len(raced.seen) < len(everything.seen) / 2
    assert raced.finished == everything.finished == len(raced.groups)
    assert max(map(len, asked)) > 3, "survivors are timed in full"


def test_a_race_compiles_nothing_twice() -> None:
    wide = race(3)[0]
    search = Search([wide], total=100, seeds=4)
    assert search.spent == len(wide.groups)
    assert search.ask() is None


def test_what_survived_a_heat_counts_until_it_is_finished() -> None:
    space = Wide().space(PROBLEM, DEFAULT_GPU)
    wide = FamilySearch(
        Wide(), PROBLEM, DEFAULT_GPU, space, seeds=4, sampler="model", seed=0, raced=3
    )
    search = Search([wide], total=1, seeds=4)
    first = search.ask()
    assert first is not None and len(first) == 3
    search.tell(measure(first))
    assert (search.pending, search.spent) == (0, 1)
    rest = search.ask()
    assert rest is not None and len(rest) > 3
    assert {Wide().compile_digest(c) for c in (*first, *rest)} == {Wide().compile_digest(first[0])}
    search.tell(measure(rest))
    assert (wide.finished, search.ask()) == (1, None)


def test_a_lost_heat_stays_lost_after_a_restart() -> None:
    raced, _ = race(3)
    again = FamilySearch(
        Wide(),
        PROBLEM,
        DEFAULT_GPU,
        Wide().space(PROBLEM, DEFAULT_GPU),
        seeds=4,
        sampler="cost",
        seed=0,
        raced=3,
    )
    search = Search([again], total=100, seeds=4)
    search.tell_known(sorted(raced.seen.values(), key=lambda m: m.latency_us or 0))
    assert search.ask() is None


def test_every_group_is_a_trial_of_an_optuna_study() -> None:
    toy = member(Toy(), sampler="model")
    asked = run(Search([toy], total=12, seeds=4))
    study = toy.trials.study
    assert isinstance(study.sampler, ModelSampler)
    assert [t.user_attrs[KERNEL] for t in study.trials] == [
        Toy().compile_digest(group[0]) for group in asked
    ]
    assert {t.state for t in study.trials} == {TrialState.COMPLETE}
    assert math.exp(study.best_value) == pytest.approx(toy.best_us)
    for trial, group in zip(study.trials, asked, strict=True):
        row = features_of(Toy(), group[0])
        assert {name: value for name, value in trial.params.items() if value != ABSENT} == row
        assert [v["latency_us"] for v in trial.user_attrs["variants"]] == list(map(latency, group))


def test_the_model_is_an_optuna_sampler_by_itself() -> None:
    """Asked through the study and no search, it finds what the search finds."""
    toy, other = member(Toy(), sampler="model"), member(Toy(), sampler="model")
    for _ in range(24):
        key = toy.trials.start()
        value = math.log(min(map(latency, toy.groups[key])))
        toy.trials.finish(key, value, {})
    asked = run(Search([other], total=24, seeds=4))
    assert list(toy.trials.groups.values) == [Toy().compile_digest(group[0]) for group in asked]


def test_trials_from_the_store_are_marked_and_those_given_up_fail() -> None:
    toy = member(Toy(), sampler="model")
    search = Search([toy], total=20, seeds=4)
    search.tell_known(measure(next(iter(toy.groups.values()))))
    search.tell(measure(search.ask() or []))
    assert search.ask() is not None
    toy.trials.abandon("interrupted")
    known, told, given_up = toy.trials.study.trials
    assert (known.user_attrs["from_store"], told.user_attrs["from_store"]) == (True, False)
    assert (known.state, told.state) == (TrialState.COMPLETE, TrialState.COMPLETE)
    assert (given_up.state, given_up.user_attrs["reason"]) == (TrialState.FAIL, "interrupted")
