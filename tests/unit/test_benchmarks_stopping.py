"""The simulated clock over recordings: what it counts, and that a price ends a search sooner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shipped_recordings import FILES

from benchmarks import search, stopping
from tuner.errors import ConfigError
from tuner.problem import GemmProblem
from tuner.runners import recording
from tuner.runners.recording import Recording
from tuner.search import expectation
from tuner.search.fits import cost_fit as cost
from tuner.search.study import EFFORTS

pytest.importorskip("scipy", reason="fits need scipy")

FILE = next(f for f in FILES if f.name.startswith("gemm-M8192_N8192_K8192_dtypefp16-"))


def short(part: Recording, every: int) -> Recording:
    """Every n-th quick measurement, without deviation."""
    quick = [m for m in part.measurements if not m.is_final and m.config.family == "gemm"]
    return replace(part, measurements=tuple(m.but(std_us=0.0) for m in quick[::every]), stages=())


def at(part: Recording, size: int) -> Recording:
    """The same sweep as if of another problem."""
    problem = GemmProblem(size, size, size)
    return replace(
        part, problem=problem, measurements=tuple(m.but(problem=problem) for m in part.measurements)
    )


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    part = short(recording.read(FILE), 6)
    return [part, at(part, 4096)]


@pytest.fixture
def case(recordings: list[Recording], monkeypatch: pytest.MonkeyPatch) -> search.Case:
    monkeypatch.setattr(cost, "STEPS", 2)
    return search.cases(recordings)[0]


def simulated(
    case: search.Case, price: float, cores: int = 4, seconds: float = 10.0
) -> stopping.End:
    return stopping.simulate(case, 0, price, cores, {"gemm": [seconds]})


def test_without_a_price_everything_is_waited_for(case: search.Case) -> None:
    end = simulated(case, 0.0)
    assert end.cancelled == 0
    assert end.seconds >= 10.0 * -(-end.compiled // 4), "four cores compile four at a time"
    assert end.first_s >= 10.0 and end.first_s <= end.best_s <= end.seconds


def test_more_cores_and_faster_compiles_end_sooner(case: search.Case) -> None:
    slow = simulated(case, 0.0)
    assert simulated(case, 0.0, cores=16).seconds < slow.seconds
    assert simulated(case, 0.0, seconds=1.0).seconds < slow.seconds


def test_a_price_ends_it_sooner(case: search.Case) -> None:
    ends = [simulated(case, price) for price in (0.0, 5e-4, 1e-2, 1.0)]
    seconds = [end.seconds for end in ends]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < seconds[0]
    assert ends[-1].cancelled > 0 and ends[-1].compiled < ends[0].compiled
    assert all(end.loss >= 0 for end in ends)


def test_a_recorded_duration_goes_before_a_drawn_one(case: search.Case) -> None:
    changed = {c: m.but(compile_cpu_s=2.0) for c, m in case.recorded.items()}
    case = replace(case, recorded=changed, prepared={})
    assert simulated(case, 0.0, cores=64).first_s < 10.0


def test_the_command_writes_every_price(
    tmp_path: Path,
    recordings: list[Recording],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cost, "STEPS", 2)
    for number, one in enumerate(recordings):
        recording.write(tmp_path / f"{number}{recording.SUFFIX}", one)
    out = tmp_path / "out.json"
    arguments = ["--recordings", str(tmp_path), "--seeds", "1", "--jobs", "1", "--json", str(out)]
    assert stopping.main([*arguments, "--least-groups", "1", "--prices", "0,0.001"]) == 0
    document = json.loads(out.read_text())
    assert document["what"] == "times simulated, losses replayed"
    assert list(document["prices"]) == ["0.0", "0.001"]
    assert all(len(found["cases"]) == 2 for found in document["prices"].values())
    assert "Simulated seconds" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="prices: 'x' is not a number"):
        stopping.main([*arguments, "--prices", "x"])


def test_what_each_effort_takes_is_stored_as_it_ships(
    tmp_path: Path, recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "STEPS", 2)
    monkeypatch.setattr(expectation, "file", lambda: tmp_path / "effort" / "expected.json")
    folder = tmp_path / "recordings"
    for number, one in enumerate(recordings):
        recording.write(folder / f"{number}{recording.SUFFIX}", one)
    arguments = ["--recordings", str(folder), "--seeds", "1", "--jobs", "1", "--write"]
    assert stopping.main([*arguments, "--least-groups", "1"]) == 0
    expectation.shipped.cache_clear()
    found = expectation.shipped()
    expectation.shipped.cache_clear()
    assert [(one.effort, one.cores) for one in found] == [
        (effort, cores) for effort in EFFORTS for cores in stopping.LEARNT_CORES
    ]
    quick, full = (next(one for one in found if one.effort == effort) for effort in EFFORTS)
    assert {one.op for one in found} == {"gemm"} and quick.recordings == 2
    assert quick.seconds < full.seconds and full.loss == 0 <= quick.loss
