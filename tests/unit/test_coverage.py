"""Few configurations for many shapes: what covers what, and which numbers are measured."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from gemm_configs import tile

from tuner.cli import main
from tuner.config import Config
from tuner.families import family
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.search.coverage import CoveragePlan, plan, times
from tuner.search.history import measured
from tuner.store import open_store

REGIME = Regime.default("gemm")
CUBLAS = Config("vendor_blas", {"kernel": "cublas"})
MEASURED, PREDICTED = Provenance.MEASURED, Provenance.PREDICTED
SMALL, MIDDLE, LARGE = tile(64, 64), tile(64, 128), tile(128, 128)


def gemm(size: int) -> GemmProblem:
    return GemmProblem(size, size, size)


def quick(problem: Problem, by_config: Mapping[Config, float | None]) -> list[Measurement]:
    """Of a config without a time it is known that it failed."""
    return [
        Measurement(
            problem,
            config,
            DEFAULT_GPU,
            REGIME,
            Status.OK if us else Status.WRONG_RESULT,
            latency_us=us,
        )
        for config, us in by_config.items()
    ]


def planned(rows: Mapping[int, Mapping[Config, float | None]], within: float) -> CoveragePlan:
    found = {gemm(size): quick(gemm(size), row) for size, row in rows.items()}
    return plan(times(found, DEFAULT_GPU, found, predict=False), within)


def served(made: CoveragePlan) -> dict[Config, set[int]]:
    return {c.config: {s.problem.m for s in c.served} for c in made.choices}


def test_one_in_the_middle_serves_all_where_it_may() -> None:
    rows = {
        512: {SMALL: 10.0, MIDDLE: 10.2, LARGE: 15.0},
        1024: {SMALL: 11.0, MIDDLE: 10.0, LARGE: 11.0},
        2048: {SMALL: 15.0, MIDDLE: 10.2, LARGE: 10.0},
    }
    made = planned(rows, within=0.03)
    assert served(made) == {MIDDLE: {512, 1024, 2048}}
    assert made.choices[0].worst_loss == pytest.approx(0.02)
    assert made.choices[0].measured == 3
    assert made.choices[0].kernels == 1
    assert served(planned(rows, within=0.01)) == {SMALL: {512}, MIDDLE: {1024}, LARGE: {2048}}


def test_each_shape_goes_to_the_least_loss_among_the_chosen() -> None:
    made = planned(
        {
            512: {SMALL: 10.0, LARGE: 10.2},
            1024: {SMALL: 10.0, LARGE: 12.0},
            2048: {SMALL: 12.0, LARGE: 10.0},
        },
        within=0.03,
    )
    assert served(made) == {SMALL: {512, 1024}, LARGE: {2048}}


def test_what_later_choices_make_needless_is_dropped() -> None:
    """Greedy takes the one of four shapes first; the two that cover the rest cover those too."""
    a, b = tile(128, 64), tile(128, 192)
    good, bad = 10.0, 20.0
    rows = {
        size: {a: good if size in left else bad, b: good if size in right else bad, SMALL: us}
        for left, right in [({512, 1024, 1536}, {2048, 2560, 3072})]
        for size, us in zip(
            (512, 1024, 1536, 2048, 2560, 3072), (bad, 9.9, 9.9, 9.9, 9.9, bad), strict=True
        )
    }
    made = planned(rows, within=0.03)
    assert served(made) == {a: {512, 1024, 1536}, b: {2048, 2560, 3072}}


def test_what_failed_at_a_shape_does_not_serve_it() -> None:
    made = planned({512: {SMALL: 10.0, LARGE: 10.0}, 1024: {SMALL: None, LARGE: 10.0}}, within=0.1)
    assert served(made) == {LARGE: {512, 1024}}


def test_a_vendors_kernel_is_a_choice_that_compiles_nothing() -> None:
    made = planned({512: {SMALL: 10.0, CUBLAS: 8.0}}, within=0.03)
    assert served(made) == {CUBLAS: {512}}
    assert made.choices[0].kernels == 0


def test_a_package_of_its_own_is_named_not_chosen() -> None:
    problem = AttentionProblem.parse("S=1024,D=64")
    own = family("fused_attention").space(problem, DEFAULT_GPU)[0]
    flash = Config("vendor_sdpa", {"kernel": "flash3"})
    found = {problem: quick(problem, {own: 10.0, flash: 8.0})}
    (choice,) = plan(times(found, DEFAULT_GPU, found, predict=False), 0.03).choices
    assert choice.config == own
    assert choice.served[0].loss == 0
    assert choice.served[0].elsewhere == ("flash3", 8.0)


def test_nothing_known_is_said() -> None:
    made = plan(times([gemm(512)], DEFAULT_GPU, {}, predict=False), 0.03)
    assert made.unserved == (gemm(512),)
    assert made.choices == ()


def test_measured_times_stand_and_the_rest_is_marked_predicted() -> None:
    """A time measured at one shape corrects what is believed at the others."""
    at_home = {SMALL: 30.0, LARGE: 10.0}
    known = {gemm(1024): quick(gemm(1024), at_home)}
    home, away = times([gemm(1024), gemm(2048)], DEFAULT_GPU, known)
    assert {c: (t.us, t.provenance) for c, t in home.by_config.items() if c in at_home} == {
        SMALL: (30.0, MEASURED),
        LARGE: (10.0, MEASURED),
    }
    assert home.best_us == 10.0
    others = [t for c, t in home.by_config.items() if c not in at_home]
    assert others and all(t.provenance is PREDICTED for t in others)
    assert {t.provenance for t in away.by_config.values()} == {PREDICTED}
    (blind,) = times([gemm(2048)], DEFAULT_GPU, {})
    legal = [c for c in blind.by_config if c in away.by_config]
    assert any(away.by_config[c].us != blind.by_config[c].us for c in legal)


def test_a_spare_family_is_not_planned_with() -> None:
    """A sweep would not try its kernels unless it was named."""
    problem = AttentionProblem.parse("S=256,D=64")
    assert family("two_kernel_attention").is_fallback
    (known,) = times([problem], DEFAULT_GPU, {})
    assert {config.family for config in known.by_config} == {"fused_attention"}


def test_predictions_of_a_shape_left_out_are_near_what_was_recorded(tmp_path: Path) -> None:
    """The belief's first choice among what was recorded, against the recorded best."""
    regime = Regime.default("attention").chained
    with open_store(f"sqlite:///{tmp_path}/s.sqlite") as store:
        found = measured("attention", DEFAULT_GPU, regime, store)
    problem = AttentionProblem.parse("S=1024,D=64")
    recorded = {m.config: m.latency_us for m in found.pop(problem) if m.ok and m.latency_us}
    (believed,) = times([problem], DEFAULT_GPU, found)
    both = [c for c in believed.by_config if c in recorded]
    pick = min(both, key=lambda c: believed.by_config[c].us)
    assert recorded[pick] <= 1.06 * min(recorded[c] for c in both)


def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/s.sqlite"
    with open_store(url) as store:
        for size, row in {
            512: {SMALL: 10.0, LARGE: 12.0},
            1024: {SMALL: 12.0, LARGE: 10.0},
        }.items():
            found = quick(gemm(size), row)
            store.add(found)
            finals = [m.but(is_final=True) for m in found]
            store.decide(gemm(size), DEFAULT_GPU, REGIME, finals, "sweep")
    arguments = ["plan", "--op", "gemm", "--store", url, "--measured"]
    shape = ["--shape", "M=512,1024,N=512,K=512"]
    assert main([*arguments, *shape]) == 1
    assert "nothing is known of M=1024,N=512,K=512" in capsys.readouterr().out
    file = tmp_path / "problems.json"
    file.write_text(json.dumps(["M=512,N=512,K=512", "M=1024,N=1024,K=1024"]))
    monkeypatch.setattr("tuner.cli.aot.FIRST_PROGRESS_S", math.inf)
    assert main([*arguments, "--problems", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == "planning 2 problems on NVIDIA H200; nothing is measured\n"
    assert "2 configurations for 2 shapes, each within 3 % of the best known" in out
    assert "measured" in out
    for name in ("FIRST_PROGRESS_S", "PROGRESS_S"):
        monkeypatch.setattr(f"tuner.cli.aot.{name}", 0.0)
    assert main([*arguments, "--problems", str(file), "--within", "25", "--json"]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"planning .*\n1 of 2 shapes, \d+ s\n2 of 2 shapes, \d+ s\n", err)
    answer = json.loads(out)
    assert len(answer["configurations"]) == 1
    assert {s["from"] for s in answer["configurations"][0]["shapes"]} == {"measured"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "S=1024"], "attention needs D"),
    ],
)
def test_wrong_input_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_is_for_one_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problems.json"
    file.write_text(json.dumps(["op=gemm,M=512,N=512,K=512", "S=512,D=64"]))
    assert main(["plan", "--problems", str(file)]) == 2
    assert "a plan is for one operation" in capsys.readouterr().err


def test_the_command_says_what_is_only_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--shape", "S=1024,3000,D=64"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "loss predicted, not measured" in out or "losses predicted, not measured" in out
    assert "tuner plan --measured" in out
