"""The data that ships: recorded sweeps replay, and the tuned configurations answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner import recording, resources
from tuner.cli import main
from tuner.families import family
from tuner.hardware import GPUS
from tuner.lookup import lookup
from tuner.measurement import Provenance, Regime
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.store import open_store

H200 = GPUS["H200"]
FILES = sorted((resources.cache() / "recordings").glob("*.json.gz"))
ATTENTION = AttentionProblem.parse("S=1024,D=64")
GEMM = GemmProblem.parse("M=4096,N=4096,K=4096")
BASELINES = {
    "attention": {"cudnn", "flash2"},
    "gemm": {"cublas"},
    "grouped_gemm": {"grouped_mm", "mm"},
}


def found(problem: Problem) -> recording.Recording:
    answer = recording.find(problem, H200, Regime.default(problem.op))
    assert answer is not None
    return answer


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.split("_dtype")[0])
def test_a_recording_reads_and_holds_its_baselines(path: Path) -> None:
    recorded = recording.read(path)
    finals = [m for m in recorded.measurements if m.is_final and m.ok]
    vendors = {m.config["kernel"] for m in finals if family(m.config.family).is_vendor}
    assert vendors >= BASELINES[recorded.problem.op]
    assert any(not family(m.config.family).is_vendor for m in finals)
    assert all(m.latency_us is not None and m.latency_us > 0 for m in finals)
    assert recorded.environment.facts["driver"]


@pytest.mark.parametrize("problem", [ATTENTION, GEMM], ids=lambda problem: problem.op)
def test_the_wide_recordings_are_wide(problem: Problem) -> None:
    assert found(problem).kernels() >= 120


def test_recorded_configs_are_legal_still() -> None:
    for path in FILES:
        recorded = recording.read(path)
        for measurement in recorded.measurements:
            member = family(measurement.config.family)
            reasons = member.violations(recorded.problem, measurement.config, H200)
            assert not reasons, (path.name, measurement.config.to_json(), reasons)


def test_a_quick_sweep_replays_to_within_two_percent_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    assert main(["sweep", "--shape", "S=1024,D=64", "--replay", "--sampler", "tpe"]) == 0
    assert "REPLAYED" in capsys.readouterr().out
    with open_store() as store:
        entry = store.best(ATTENTION, H200, Regime.default("attention"))
    assert entry is not None and entry.provenance is Provenance.REPLAYED
    best = min(
        m.latency_us
        for m in found(ATTENTION).measurements
        if m.latency_us is not None and not family(m.config.family).is_vendor
    )
    assert entry.best_own is not None and entry.best_own.latency_us is not None
    assert entry.best_own.latency_us <= 1.02 * best


def test_a_fresh_installation_answers(tmp_path: Path) -> None:
    answer = lookup(ATTENTION, gpu=H200, path=tmp_path / "none.sqlite")
    assert answer is not None and answer.entry.provenance is Provenance.MEASURED
    assert any("shipped" in note for note in answer.notes)
    assert answer.entry.best_own is not None and answer.entry.ratios["cudnn"] < 0.97
