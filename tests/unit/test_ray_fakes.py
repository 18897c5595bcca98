"""The recording that tests of Ray clusters replay, where Ray is not installed."""

from __future__ import annotations

import ray_fakes as fakes

from tuner.runners.replay import ReplayRunner
from tuner.store import open_store
from tuner.tuning.sweep import Sweep, SweepOptions


def test_the_recording_of_the_clusters_ships_and_decides() -> None:
    recorded = fakes.recorded()
    options = SweepOptions((fakes.FAMILY,), "full", trials=100, sampler="random")
    with open_store("sqlite://") as store:
        sweep = Sweep(fakes.PROBLEM, fakes.REGIME, ReplayRunner(recorded), store, options)
        ranking = sweep.run().ranking
    assert len([m for m in recorded.measurements if not m.is_final]) > 20
    assert ranking[0].config.family == fakes.FAMILY
