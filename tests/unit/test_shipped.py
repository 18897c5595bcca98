"""The data that ships: recorded sweeps replay, and the tuned configurations answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shipped_recordings import FILES, read_once, recording_of

from tuner.base import resources
from tuner.cli import main
from tuner.families import family
from tuner.hardware import GPUS
from tuner.measurement import Provenance, Regime
from tuner.problem import (
    E4M3,
    PROBLEMS,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)
from tuner.selection.reader import lookup, shipped
from tuner.selection.shipped import shipped_index
from tuner.store import open_store
from tuner.store.entry import Entry
from tuner.store.exchange import parse, to_text

H200 = GPUS["H200"]
ROOT = Path(__file__).parents[2]
ATTENTION = AttentionProblem.parse("S=1024,D=64")
WIDE = AttentionProblem.parse("B=16,H=16,S=2048,D=64")
GEMM = GemmProblem.parse("M=4096,N=4096,K=4096")


def test_every_decision_is_found_in_the_index() -> None:
    """Also those of files that were written before a problem had its newest fields."""
    index = shipped_index()
    assert sum(len(index[place]) for place in index) == len(shipped())
    for place, same in index.items():
        assert all((one.problem, one.regime) == place for one in same)
    problem, regime = next(place for place in index if isinstance(place[0], AttentionProblem))
    assert index.get((replace(problem, softcap=17.0), regime)) is None
    assert index.get((GemmProblem(1, 8, 8), regime)) is None


def baselines(problem: Problem) -> set[str]:
    """Vendors' kernels that a recording holds at least; none where torch has none on that GPU."""
    match problem:
        case AttentionProblem():
            if problem.dtype == E4M3:
                return set()
            return {"cudnn", "efficient"} if problem.bias else {"cudnn", "flash2"}
        case GroupedGemmProblem():
            return {"grouped_mm", "mm"}
        case SwigluProblem():
            return {"torch"}
        case GemmProblem():
            if problem.scales:
                return {"scaled_mm"}
            return {"addmm"} if problem.epilogue else {"cublas"}
        case SoftmaxProblem():
            return {"torch"}
    raise AssertionError(problem.op)


SURVEYS = [path for path in FILES if "-stream-" in path.name]
"""Recordings of `tuner develop survey`, whose kernels were each timed once, without a decision."""


def test_surveys_hold_own_kernels_beside_pytorch_s() -> None:
    for path in SURVEYS:
        recorded = read_once(path)
        assert not any(m.is_final for m in recorded.measurements), path.name
        good = [m for m in recorded.measurements if m.ok]
        kinds = {family(m.config.family).is_vendor for m in good}
        # PyTorch's are timed first: a survey that ended early has them alone, as one of a bias has.
        is_product = recorded.problem.op != "attention"
        one = recorded.problem
        if getattr(one, "softcap", 0) or getattr(one, "mask", ""):  # PyTorch has no fused kernel
            assert kinds == {False}, path.name
        elif getattr(recorded.problem, "is_windowed", False):  # its FlashAttention-2 takes some
            assert False in kinds, path.name
        else:
            assert kinds == {True, False} or (kinds == {True} and is_product), path.name
        assert all(m.latency_us is not None and m.latency_us > 0 for m in good), path.name
        assert recorded.environment.facts["driver"], path.name


def test_recordings_read_and_hold_their_baselines() -> None:
    decisions: dict[Any, list[Entry]] = {}
    for entry in shipped():
        decisions.setdefault((entry.problem, entry.gpu, entry.regime), []).append(entry)
    for path in [path for path in FILES if path not in SURVEYS]:
        recorded = read_once(path)
        finals = [m for m in recorded.measurements if m.is_final and m.ok]
        vendors = {m.config["kernel"] for m in finals if family(m.config.family).is_vendor}
        assert vendors >= baselines(recorded.problem), path.name
        assert any(not family(m.config.family).is_vendor for m in finals), path.name
        assert all(m.latency_us is not None and m.latency_us > 0 for m in finals), path.name
        assert recorded.environment.facts["driver"], path.name
        # One pass, the one that was decided by: times of two passes are not beside each other.
        (decided,) = decisions[recorded.problem, recorded.gpu, recorded.regime]
        times = {m.config.digest: m.latency_us for m in finals}
        assert len(times) == len(finals), path.name
        ranked = {m.config.digest: m.latency_us for m in decided.ranking}
        assert times == pytest.approx(ranked, rel=1e-3), path.name


@pytest.mark.parametrize("problem", [WIDE, GEMM], ids=lambda problem: problem.op)
def test_the_wide_recordings_are_wide(problem: Problem) -> None:
    assert recording_of(problem).kernels() >= 100


def test_recorded_configs_are_legal_still() -> None:
    for path in FILES:
        recorded = read_once(path)
        for measurement in recorded.measurements:
            member = family(measurement.config.family)
            reasons = member.violations(recorded.problem, measurement.config, H200)
            assert not reasons, (path.name, measurement.config.to_json(), reasons)


def test_a_quick_sweep_replays_to_within_two_percent_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TUNER_CACHE_DIR", str(tmp_path))
    assert main(["sweep", "--shape", "S=1024,D=64", "--replay", "--sampler", "tpe"]) == 0
    out = capsys.readouterr().out
    assert "REPLAYED" in out
    assert sum(line.startswith("baseline") for line in out.splitlines()) == 6
    with open_store() as store:
        entry = store.best(ATTENTION, H200, Regime.default("attention").chained)
    assert entry is not None and entry.provenance is Provenance.REPLAYED
    best = min(
        m.latency_us
        for m in recording_of(ATTENTION).measurements
        if m.latency_us is not None and not family(m.config.family).is_vendor
    )
    assert entry.best_own is not None and entry.best_own.latency_us is not None
    assert entry.best_own.latency_us <= 1.02 * best


def test_the_readme_shows_what_lookup_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", "--shape", "S=1024,D=64", "--gpu", "H200"]) == 0
    out, readme = capsys.readouterr().out, (ROOT / "README.md").read_text()
    shown = readme[readme.index("$ tuner lookup") :].split("```")[0].splitlines()[1:]
    printed = out.splitlines()
    for line in shown:
        part = line.removesuffix("...").removesuffix("...`)").rstrip()
        assert any(text.startswith(part) for text in printed), line


@pytest.mark.parametrize(
    "path", sorted((resources.cache() / "tuned").glob("*.json")), ids=lambda path: path.name
)
def test_what_is_tuned_ships_as_it_is_exported(path: Path) -> None:
    """A line a measurement, so that a first lookup parses those that it needs."""
    text = path.read_text()
    assert text == to_text(parse(text)), "write it with `tuner store export`"


def test_a_fresh_installation_answers(tmp_path: Path) -> None:
    answer = lookup(ATTENTION, gpu=H200, path=tmp_path / "none.sqlite")
    assert answer is not None and answer.entry.provenance is Provenance.MEASURED
    assert any("shipped" in note for note in answer.notes)
    assert answer.entry.best_own is not None and answer.entry.speedups["cudnn"] > 1.03


def test_an_h200_s_choice_serves_an_h100() -> None:
    """At problems that an H100 timed, it is close to that GPU's fastest."""
    chosen = {(e.problem, e.regime): e.winner.config for e in shipped() if e.gpu == H200}
    losses = []
    for entry in (e for e in shipped() if e.gpu == GPUS["H100"] and e.regime.launch == "chained"):
        times = {m.config: m.latency_us or 0 for m in entry.ranking}
        theirs = times.get(chosen[entry.problem, entry.regime])
        if theirs:
            losses.append(theirs / min(times.values()) - 1)
    assert len(losses) > 10
    assert sum(losses) / len(losses) < 0.0035 and max(losses) < 0.0155


@pytest.mark.parametrize(
    ("shape", "op", "kind"),
    [
        ("B=1,H=32,HKV=8,SQ=1,SKV=1057,D=128,layout=bshd", "attention", "portfolio"),
        ("B=1,H=16,S=777,D=64", "attention", "portfolio"),
        ("M=1,N=6144,K=4096,dtype=bf16", "gemm", "portfolio"),
        ("M=3000,N=6144,K=4096,dtype=bf16", "gemm", "portfolio"),
        ("M=100,N=6144,K=4096,dtype=bf16,epilogue=bias", "gemm", "portfolio"),
        ("M=600,N=12288,K=4096,dtype=bf16", "swiglu", "portfolio"),
    ],
)
def test_what_ships_serves_the_sizes_between(
    shape: str, op: str, kind: str, tmp_path: Path
) -> None:
    answer = lookup(PROBLEMS[op].parse(shape), gpu=H200, path=tmp_path / "none.sqlite")
    assert (answer.kind, answer.entry.origin) == (kind, "shipped")


@pytest.mark.parametrize(
    ("shape", "op"),
    [
        ("M=4505,N=14336,K=4096,dtype=e4m3,fast_accum=1", "gemm"),
        ("G=64,M=1843,N=1408,K=2048,sizes=zipf,dtype=bf16", "grouped_gemm"),
        ("M=1000,N=1024,B=16", "softmax"),
        ("S=1000,D=64,H=16", "attention_backward"),
    ],
)
def test_what_has_no_portfolio_is_served_where_it_was_tuned(
    shape: str, op: str, tmp_path: Path
) -> None:
    problem, none = PROBLEMS[op].parse(shape), tmp_path / "none.sqlite"
    assert lookup(problem, gpu=H200, path=none) is None
    tuned = [entry for entry in shipped() if entry.problem.op == op and entry.gpu == H200]
    for entry in tuned:
        answer = lookup(entry.problem, gpu=H200, path=none)
        assert answer is not None and answer.kind == "exact"
