"""``scripts/bench corrections``: fits by least absolute errors, models left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import corrections
from benchmarks.corrections import Correction, Timed
from benchmarks.population import read
from tuner.errors import BenchmarkError
from tuner.hardware import GPUS
from tuner.search.corrections import LIBRARIES, OWN

H200 = GPUS["H200"]
EVIDENCE = Path(corrections.__file__).parent / "evidence" / "making-layers-h200.jsonl.gz"


def timed(model: str, k: int, vendor_us: float, own_us: float = 5.0) -> Timed:
    return Timed(model, k, 4.0, own_us, 5.0, vendor_us)


def test_one_outlier_does_not_move_the_fit() -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    calls = [timed("a", k, 5.0 - 2.0 + 0.5 * k**0.25) for k in (256, 625, 1296, 2401, 4096)]
    found = corrections.fitted([*calls, timed("b", 1296, 60.0, 40.0)])
    assert (found.own, found.launch, found.depth) == pytest.approx((1.0, -2.0, 0.5), abs=0.02)


def test_both_estimates_are_corrected() -> None:
    one = timed("a", 256, 5.0)
    assert Correction(0.9, 0.0, 0.0).is_own(one)
    assert not Correction(1.1, 0.0, 0.0).is_own(one)
    assert not Correction(0.9, -0.4, 0.05).is_own(one)
    assert Correction(1.1, -0.2, 0.1).is_own(one)


def test_a_model_is_decided_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    calls = [timed("a", 256, 4.0), timed("b", 256, 5.0, 4.0)]
    seen = []

    def fitted(rest: list[Timed]) -> Correction:
        seen.append({one.model for one in rest})
        return Correction(2.0 if rest[0].model == "b" else 0.0, 0.0, 0.0)

    monkeypatch.setattr(corrections, "fitted", fitted)
    assert corrections.left_out(calls) == [1.0, 1.25]
    assert seen == [{"b"}, {"a"}]
    with pytest.raises(BenchmarkError, match="all calls are of a"):
        corrections.left_out(calls[:1])


def test_what_ships_is_the_fit_to_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    found = corrections.fitted(corrections.calls(read(EVIDENCE).values(), H200))
    assert found.own == pytest.approx(OWN[H200.name]["few"], abs=0.02)
    assert found.launch == pytest.approx(LIBRARIES[H200.name]["launch"], abs=0.02)
    assert found.depth == pytest.approx(LIBRARIES[H200.name]["depth"], abs=0.005)
    assert corrections.main([str(EVIDENCE)]) == 0
    assert "corrected, models left out" in capsys.readouterr().out


def test_a_file_without_such_products_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="no product of 16 rows"):
        corrections.calls([], H200)
