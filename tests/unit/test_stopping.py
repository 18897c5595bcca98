"""End of a search: expected gain against the wait for it; and the simulated clock that judges
the rule.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from toys import GEMM, Toy, latency, ok

from tuner.config import Config
from tuner.hardware import DEFAULT_GPU
from tuner.search import expectation
from tuner.search.expectation import Credit
from tuner.search.family_search import LEADING, FamilySearch
from tuner.search.stopping import FALLBACK_S, CompileTimes, Stopping, queued
from tuner.search.study import EFFORTS, Search


@pytest.fixture(autouse=True)
def whole_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "credits", lambda: ())


def searched(sampler: str = "model", measured: int = 3) -> Search:
    """A search of the toys of which some groups are measured and four are under way."""
    toy = Toy()
    space = toy.space(GEMM, DEFAULT_GPU)
    member = FamilySearch(toy, GEMM, DEFAULT_GPU, space, seeds=4, sampler=sampler, seed=0)
    found = Search([member], 27, 4)
    for _ in range(measured):
        group = found.ask()
        assert group is not None
        found.tell([ok(config, latency(config)) for config in group])
    for _ in range(4):
        found.ask()
    return found


def timed(family: str, seconds: float | None) -> object:
    return ok(Config(family, {"m": 1}), 1.0).but(compile_cpu_s=seconds)


class TestCompileTimes:
    def test_an_unknown_family_has_the_fallback(self) -> None:
        assert CompileTimes().left_s("toy") == FALLBACK_S
        assert CompileTimes().left_s("toy", 20.0) == 10.0

    def test_the_rest_is_that_of_the_longer_ones(self) -> None:
        times = CompileTimes([timed("toy", s) for s in (10.0, 20.0, 60.0, None)])  # type: ignore[misc]
        assert times.left_s("toy") == 30.0
        assert times.left_s("toy", 15.0) == 25.0
        assert times.left_s("toy", 70.0) == 35.0, "longer than all: half as long again"
        assert times.left_s("other") == FALLBACK_S

    def test_what_this_sweep_saw_counts(self) -> None:
        times = CompileTimes([timed("toy", 10.0)])  # type: ignore[list-item]
        times.observe([timed("toy", 30.0)])  # type: ignore[list-item]
        assert times.left_s("toy") == 20.0


class TestRule:
    def left(self, search: Search, seconds: float) -> dict[tuple[str, str], float]:
        return {("toy", key): seconds for key in search.members[0].pending}

    def test_it_is_over_where_the_wait_costs_more_than_it_saves(self) -> None:
        search = searched()
        (*_, gain) = search.joint_gains(list(self.left(search, 1.0)))
        assert gain > 0
        for seconds in (2.0, 20.0, 200.0):
            pays = gain >= 0.001 * seconds
            left = self.left(search, seconds)
            assert Stopping(search, 0.001).is_over(left) is not pays
        assert not gain >= 0.2, "the longest wait does not pay"

    def test_one_that_is_soon_done_is_waited_for(self) -> None:
        search = searched()
        left = self.left(search, 1e6)
        stopping = Stopping(search, 1e-4)
        assert stopping.is_over(left)
        (best, *_) = sorted(left, key=lambda place: -search.joint_gains([place])[0])
        assert not stopping.is_over({**left, best: 1.0})

    @pytest.mark.parametrize(("gain", "waits"), [(0.015, True), (0.005, False)])
    def test_a_quick_search_waits_ten_seconds_for_one_and_a_half_percent(
        self, gain: float, waits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        search = searched()
        monkeypatch.setattr(search, "joint_gains", lambda places: [gain] * len(places))
        quick = Stopping(search, EFFORTS["quick"].price)
        assert quick.is_over(self.left(search, 10.0)) is not waits

    @pytest.mark.parametrize(
        ("elapsed_s", "wait_s", "waits"),
        [(0.0, 20.0, True), (0.0, 40.0, False), (30.0, 20.0, True), (32.0, 20.0, True),
         (33.0, 20.0, False), (49.0, 3.0, True), (49.0, 5.0, False), (70.0, 3.0, True),
         (70.0, 4.0, False)],
    )  # fmt: skip
    def test_a_second_after_the_target_costs_ten_times_the_price(
        self, elapsed_s: float, wait_s: float, waits: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        search, begun = searched(measured=LEADING), searched(measured=LEADING - 1)
        assert not search.leads and begun.leads
        for one in (search, begun):
            monkeypatch.setattr(one, "joint_gains", lambda places: [0.039] * len(places))
        quick = Stopping(search, 0.001, target_s=50.0)
        assert quick.is_over(self.left(search, wait_s), elapsed_s) is not waits
        quick = Stopping(begun, 0.001, target_s=50.0)
        assert quick.is_over(self.left(begun, wait_s), elapsed_s) is (wait_s == 40.0)

    def test_of_a_gain_after_the_first_groups_the_recorded_part_counts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        search, begun = searched(measured=LEADING), searched(measured=LEADING - 1)
        monkeypatch.setattr(expectation, "credits", lambda: (Credit(5, 0.1, 0.2, 9),))
        for one, waits in ((search, False), (begun, True)):
            monkeypatch.setattr(one, "joint_gains", lambda places: [0.05] * len(places))
            assert Stopping(one, 0.001).is_over(self.left(one, 10.0)) is not waits
        assert not Stopping(search, 0.001).is_over(self.left(search, 4.0))

    def test_a_quick_search_has_a_target_and_a_full_one_waits(self) -> None:
        assert EFFORTS["quick"].target_s == 55.0
        assert EFFORTS["full"].price == 0.0 and math.isinf(EFFORTS["full"].target_s)

    def test_nothing_is_over_before_something_passed(self) -> None:
        search = searched(measured=0)
        assert not Stopping(search, 1.0).is_over(self.left(search, 1e6))

    @pytest.mark.parametrize(("sampler", "price"), [("cost", 1.0), ("model", 0.0)])
    def test_without_a_model_or_a_price_it_waits(self, sampler: str, price: float) -> None:
        search = searched(sampler)
        assert not Stopping(search, price).is_over(self.left(search, 1e6))


def test_joint_gains_are_those_of_the_surrogate() -> None:
    search = searched()
    (member,) = search.members
    assert member.surrogate is not None
    keys = member.pending
    best = math.log(search.best_us)
    gains = search.joint_gains([("toy", key) for key in keys])
    alone = member.surrogate.gains(keys, best)
    drawn = member.surrogate.draws(keys, 0)
    error = (best - drawn[:, 0]).clip(min=0.0).std() / math.sqrt(len(drawn))
    assert gains[0] == pytest.approx(alone[keys[0]], abs=2 * error)
    assert gains == sorted(gains), "one more never loses"
    assert gains[-1] <= sum(alone.values()) + 1e-3
    assert np.allclose(drawn.mean(axis=0), [member.surrogate.mean(key) for key in keys])
    assert np.array_equal(drawn, member.surrogate.draws(keys, 0))


def test_the_saving_that_is_told_is_the_part_of_the_promised_one_that_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = searched(measured=LEADING)
    monkeypatch.setattr(expectation, "credits", lambda: (Credit(5, 0.1, 0.25, 9),))
    saving = search.expected_saving()
    assert saving is not None and saving.promised > 0
    assert saving.mean == pytest.approx(0.1 * saving.promised)
    assert saving.p90 == pytest.approx(0.25 * saving.promised)
    for other in (searched(measured=0), searched("cost")):
        assert other.expected_saving() is None, "without a time or a model nothing is told"


def test_what_waits_for_a_core_begins_where_one_is_free() -> None:
    assert queued([5.0, 2.0], [10.0, 1.0]) == [12.0, 6.0]
    assert queued([], [3.0, 4.0]) == [3.0, 7.0]
