"""What replays say of the recordings that ship: no figure compares times of two passes."""

from __future__ import annotations

from shipped_recordings import FILES, read_once

from tuner.families import family
from tuner.measurement import Measurement
from tuner.runners.recording import Recording
from tuner.runners.replay import ReplayRunner
from tuner.search import ranking
from tuner.store import open_store
from tuner.store.entry import Entry, is_vendor
from tuner.tuning.sweep import Sweep, SweepOptions

FLATTERING = 1.02
"""A replay's ratio over the recorded final pass's from which on it flatters ours."""


def test_finalists_of_every_recording_come_back_in_one_pass() -> None:
    for path in FILES:
        check_finalists(read_once(path))


def check_finalists(recorded: Recording) -> None:
    problem = recorded.problem
    quick = [m for m in recorded.measurements if not m.is_final]
    final = {m.config for m in recorded.measurements if m.is_final}
    vendors = [m for m in quick if is_vendor(m.config)]
    recorded_us = {(m.config, m.is_final): m.latency_us for m in recorded.measurements}
    # The best of all, and the best of what the recorded final pass did not time.
    for own in (quick, [m for m in quick if m.config not in final]):
        seen = [*(m for m in own if not is_vendor(m.config)), *vendors]
        chosen = ranking.finalists(
            seen, 4, lambda config: family(config.family).compile_digest(config)
        )
        timed = ReplayRunner(recorded).retime(problem, [m.config for m in chosen], 20)
        assert timed or not chosen, problem
        assert len({m.is_final for m in timed}) <= 1, problem
        assert all(m.latency_us == recorded_us[m.config, m.is_final] for m in timed), problem


def fastest(measured: list[Measurement], *, vendors: bool) -> float:
    return min(m.latency_us for m in measured if m.ok and is_vendor(m.config) is vendors)


def recorded_ratio(recorded: Recording) -> float:
    """The fastest vendor's time over the best own kernel's in the recorded final pass."""
    final = [m for m in recorded.measurements if m.is_final]
    return fastest(final, vendors=True) / fastest(final, vendors=False)


def shown_ratio(entry: Entry) -> float:
    """The ratio that a replay's times give, whatever pass each is of."""
    return fastest([*entry.ranking], vendors=True) / fastest([*entry.ranking], vendors=False)


def test_replays_of_the_recorded_products_do_not_flatter() -> None:
    """Of 93 products 26 were shown more than 2 % better than their final pass, and 9 that lost or
    tied as wins, where quick times of ours stood against vendors' final ones (default sampler).
    """
    products = [path for path in FILES if path.name.startswith(("gemm-", "grouped_gemm-"))]
    read = [(path, read_once(path)) for path in products]
    swept = [one for one in read if any(m.is_final for m in one[1].measurements)]  # not surveyed
    mixed, flattering, wins = [], [], []
    with open_store("sqlite:///:memory:") as store:
        for path, recorded in swept:
            runner, options = ReplayRunner(recorded), SweepOptions(sampler="random")
            entry = Sweep(recorded.problem, recorded.regime, runner, store, options).run().entry
            assert entry is not None
            truth, shown = recorded_ratio(recorded), shown_ratio(entry)
            name = f"{path.name}: {shown:.3f}, final pass {truth:.3f}"
            mixed += [name] if len({m.is_final for m in entry.ranking}) > 1 else []
            flattering += [name] if shown > FLATTERING * truth else []
            wins += [name] if shown > 1 >= truth else []
    assert len(swept) == 93
    assert (mixed, flattering, wins) == ([], [], [])
