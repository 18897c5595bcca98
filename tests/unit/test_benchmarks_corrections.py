"""``scripts/bench corrections``: fits by least absolute errors, models left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import corrections
from benchmarks.corrections import GROUPS, Correction, Timed
from benchmarks.population import read
from tuner.errors import BenchmarkError
from tuner.hardware import GPUS
from tuner.search.corrections import LIBRARIES, ONE_QUERY, ONE_QUERY_OF_PYTORCH, OWN

H200 = GPUS["H200"]
EVIDENCE = Path(corrections.__file__).parent / "evidence"
FILES = [
    EVIDENCE / f"{name}-h200.jsonl.gz"
    for name in ("making-layers", "own-calls-products", "own-calls-attention")
]
FEW = GROUPS["few"]


def timed(model: str, k: int, vendor_us: float, own_us: float = 5.0, doubt: float = 1.0) -> Timed:
    return Timed(model, 0, k**0.25, 4.0, own_us, 5.0, vendor_us, doubt)


def test_one_outlier_does_not_move_the_fit() -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    calls = [timed("a", k, 5.0 - 2.0 + 0.5 * k**0.25) for k in (256, 625, 1296, 2401, 4096)]
    found = corrections.fitted("few", [*calls, timed("b", 1296, 60.0, 40.0)])
    assert (*found.own, *found.vendor) == pytest.approx((1.0, -2.0, 0.5), abs=0.02)


def test_attention_of_one_query_gets_a_factor() -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    times = [(128, own, own * 1.1, own + 1.0, own + 1.0) for own in (4.0, 8.0, 200.0)]
    times += [(64, own, own * 1.1, own + 1.0, own + 0.6) for own in (4.0, 8.0, 16.0)]
    calls = [
        Timed("a", head_dim, 0.0, own, own_us, vendor, vendor_us)
        for head_dim, own, own_us, vendor, vendor_us in times
    ]
    found = corrections.fitted("one query", calls)
    assert found.own == pytest.approx((0.1,)) and found.vendor == pytest.approx((-0.4,))
    assert found.own_of(calls[2]) == pytest.approx(220.0)
    assert [found.vendor_of(one) for one in calls[2:4]] == pytest.approx([201.0, 4.6])


def test_both_estimates_are_corrected_and_the_margin_counts() -> None:
    one = timed("a", 256, 5.0)
    assert Correction(FEW, (0.9,), (0.0, 0.0)).is_own(one)
    assert not Correction(FEW, (1.1,), (0.0, 0.0)).is_own(one)
    assert not Correction(FEW, (0.9,), (-0.4, 0.05)).is_own(one)
    assert Correction(FEW, (1.1,), (-0.2, 0.1)).is_own(one)
    assert not Correction(FEW, (0.9,), (0.0, 0.0)).is_own(timed("a", 256, 5.0, doubt=1.05))


def test_a_model_is_decided_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [timed("a", 256, 4.0), timed("b", 256, 5.0, 4.0)]
    seen = []

    def fitted(name: str, rest: list[Timed]) -> Correction:
        seen.append((name, {one.model for one in rest}))
        return Correction(FEW, (2.0 if rest[0].model == "b" else 0.0,), (0.0, 0.0))

    monkeypatch.setattr(corrections, "fitted", fitted)
    judged = corrections.left_out("few", calls)
    assert [correction.is_own(one) for one, correction in judged] == [False, True]
    assert seen == [("few", {"b"}), ("few", {"a"})]
    with pytest.raises(BenchmarkError, match="all calls are of a"):
        corrections.left_out("few", calls[:1])


def test_what_ships_is_the_fit_to_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy", reason="numpy is not installed")
    rows = [row for file in FILES for row in read(file).values()]
    found = {
        name: corrections.fitted(name, timed)
        for name, timed in corrections.calls(rows, H200).items()
    }
    own, libraries = OWN[H200.name], LIBRARIES[H200.name]
    assert found["few"].own == pytest.approx((own["few"],), abs=0.02)
    assert found["few"].vendor[0] == pytest.approx(libraries["launch"], abs=0.05)
    assert found["few"].vendor[1] == pytest.approx(libraries["depth"], abs=0.01)
    assert found["narrow"].own == pytest.approx((own["narrow"],), abs=0.02)
    assert own["tall"] == own["narrow"] and not found["wide"].own
    assert found["one query"].own == pytest.approx((ONE_QUERY[H200.name] - 1,), abs=0.01)
    pytorchs = ONE_QUERY_OF_PYTORCH[H200.name][64]
    assert found["one query"].vendor == pytest.approx((pytorchs,), abs=0.03)
    assert corrections.main(list(map(str, FILES))) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: corrected, models left out" in said for name in found)


def test_a_file_without_such_calls_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="no call of these files"):
        corrections.calls([], H200)
