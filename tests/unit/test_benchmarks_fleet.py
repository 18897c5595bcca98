"""The simulated fleet: kills lose nothing, and every part of a trial's cost is counted once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from eager_crew import EagerCrew

from benchmarks import fleet
from benchmarks.fleet import Clock
from tuner.errors import ConfigError
from tuner.families import families_of


def burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_time_is_counted_once_however_it_is_nested() -> None:
    clock = Clock()
    with clock.spent("own"):
        burn(0.02)
        clock.counted("search", burn)(0.05)
        with clock.spent("store"):
            clock.counted("search", burn)(0.03)
        time.sleep(0.05)
    found = clock.seconds
    assert found["search"] == pytest.approx(0.08, abs=0.02)
    assert found["own"] == pytest.approx(0.02, abs=0.02)
    assert found["store"] == pytest.approx(0.0, abs=0.02)


def test_problems_take_every_recorded_kernel() -> None:
    recorded = fleet.recorded_sweep()
    members = families_of("attention")
    own = [m.config for m in recorded.measurements if m.config.family in fleet.FAMILIES]
    problems = fleet.problems_like(recorded, 40)
    assert len(set(problems)) == 40 and own
    for problem in problems[::13]:
        assert all(members[c.family].accepts(problem, c, recorded.gpu) for c in own)
        assert fleet.due(recorded, problem, 5) == 5
        assert fleet.due(recorded, problem, 1000) > 20
    with pytest.raises(ConfigError, match=r"problems=1000000 is out of range"):
        fleet.problems_like(recorded, 1_000_000)


def test_a_fleet_of_which_many_are_killed_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "Crew", EagerCrew)
    found = tmp_path / "fleet.json"
    size = ("--workers", "6", "--processes", "2", "--problems", "8", "--trials", "6")
    pace = ("--kill", "0.5", "--lease", "2", "--speed", "100")
    assert fleet.main([*size, *pace, "--json", str(found)]) == 0
    seen = json.loads(found.read_text())
    assert json.loads(capsys.readouterr().out) == seen
    assert (seen["killed_processes"], seen["killed_workers"]) == (1, 3)
    assert seen["tasks"] == {"done": 8} and seen["decisions"] == 8
    assert (seen["trials"], seen["lost_trials"], seen["repeated_trials"]) == (48, 0, 0)
    parts = seen["cpu_ms_per_trial"]
    assert parts.keys() == {"own", "search", "simulation", "space", "store", "queue", "leases"}
    own = sum(cost for on, cost in parts.items() if on not in fleet.NOT_OWN)
    assert seen["controller_ms_per_trial"] == pytest.approx(own, abs=0.001)
    assert seen["store_ms"]["add"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "workers=0 is out of range"),
        (["--kill", "2"], "kill must be between 0 and 1"),
        (["--json", "/nowhere/f.json"], "there is no folder"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fleet.main(arguments)
