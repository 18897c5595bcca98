"""Shipped rules: what they answer, what they say of their regret, and what is never launched."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fused_configs import maker
from shipped_recordings import FILES, read_once

from tuner.cli import main
from tuner.config import Config
from tuner.errors import StoreError
from tuner.families import families
from tuner.hardware import DEFAULT_GPU, GPUS
from tuner.measurement import Measurement, Provenance, Regime, Status
from tuner.problem import AttentionProblem, problem_from_json
from tuner.search.fit import Sample, fit
from tuner.selection import portfolio, rule
from tuner.selection.nearest import doublings
from tuner.selection.reader import close, lookup
from tuner.selection.rule import LEAST_JUDGED, Rule
from tuner.store import open_store

LOOKUP = importlib.import_module("tuner.selection.reader")
REGIME = Regime.default("attention")
UNTUNED = AttentionProblem.parse("S=1999,D=64,H=1")
CUDNN, FLASH = (Config("vendor_sdpa", {"kernel": name}) for name in ("cudnn", "flash2"))


def sample(length: int, cudnn_us: float, flash_us: float) -> Sample:
    return Sample(AttentionProblem.parse(f"S={length},D=64"), {CUDNN: cudnn_us, FLASH: flash_us})


@pytest.fixture
def ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rule]:
    """A rule over four lengths, whose regret is the 50 % of the middle ones: alone in a folder."""
    samples = [sample(256, 10, 15), sample(512, 10, 15), sample(2048, 15, 10), sample(4096, 15, 10)]
    made = fit(samples, DEFAULT_GPU, REGIME)
    folder = tmp_path / "rules"
    folder.mkdir()
    made.write(folder / "a.json")
    monkeypatch.setattr(rule, "_folder", lambda: folder)
    monkeypatch.setattr(portfolio, "shipped", lambda: ())
    rule.shipped.cache_clear()
    close()
    yield made
    rule.shipped.cache_clear()


def test_a_shape_nobody_tuned_is_answered_with_kind_and_regret(ships: Rule, tmp_path: Path) -> None:
    answer = lookup(UNTUNED, gpu="H200", path=tmp_path / "none")
    assert answer is not None and answer.ruled is not None
    assert (answer.kind, answer.exact) == ("rule", False)
    assert answer.entry.problem == UNTUNED
    assert answer.entry.provenance is Provenance.PREDICTED
    assert answer.entry.winner.latency_us is None
    assert answer.entry.winner.config == FLASH
    assert answer.ruled.regret == ships.regret
    assert any(note.startswith("by a rule (") for note in answer.notes)


def test_what_is_decided_comes_before_a_rule(ships: Rule, tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    found = Measurement(
        UNTUNED, CUDNN, DEFAULT_GPU, REGIME, Status.OK, latency_us=9.0, is_final=True
    )
    with open_store(str(path)) as store:
        store.decide(UNTUNED, DEFAULT_GPU, REGIME, [found], "sweep")
    answer = lookup(UNTUNED, gpu="H200", path=path)
    assert answer is not None
    assert (answer.kind, answer.entry.winner.config) == ("exact", CUDNN)


def test_another_regime_operation_or_gpu_has_no_rule(ships: Rule, tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert lookup(UNTUNED, gpu="H200", regime=Regime("eager", "warm"), path=path) is None
    assert lookup(UNTUNED, gpu="H100", path=path) is None
    assert lookup(UNTUNED, gpu="H200", path=path, with_rules=False) is None
    answer = lookup(UNTUNED, gpu="H100", path=path, allow_other_gpu=True)
    assert answer is not None
    assert answer.entry.gpu == GPUS["H100"]
    assert any("made on NVIDIA H200, not on" in note for note in answer.notes)


def test_of_two_regimes_the_rule_of_nearer_problems_answers(ships: Rule, tmp_path: Path) -> None:
    """Decoding is tuned with cold inputs: its rule knows nothing nearer than a prompt's."""
    texts = ("SQ=1,SKV=1024,D=64", "SQ=1,SKV=8192,D=64")
    decoding = [Sample(AttentionProblem.parse(text), {CUDNN: 10.0, FLASH: 12.0}) for text in texts]
    fit(decoding, DEFAULT_GPU, Regime("stream", "cold")).write(rule._folder() / "cold.json")
    rule.shipped.cache_clear()
    path = tmp_path / "none"

    def regime(text: str, asked: Regime | None = None) -> Regime:
        problem = AttentionProblem.parse(text)
        answer = lookup(problem, gpu="H200", path=path, regime=asked)
        assert answer is not None
        first = asked or Regime.default("attention")
        note = f"timed {answer.entry.regime}: the rule of {first} knows nothing nearer"
        assert (note in answer.notes) == (answer.entry.regime.l2 == "cold")
        return answer.entry.regime

    assert regime("SQ=1,SKV=2048,D=64").l2 == "cold"
    assert str(regime("S=2048,D=64")) == "chained-warm"  # a decision that ships
    assert regime("SQ=1,SKV=2048,D=64", ships.regime) == ships.regime


def test_a_choice_among_equal_heads_serves_grouped_ones() -> None:
    """`packed_heads` comes with grouped heads, and is 1 for kernels without; where a head's queries
    fill no tile, nothing is known, and the vendor's kernel answers."""
    own = Config("fused_attention", fused_params())
    times = {own: 8.0, CUDNN: 10.0}
    made = fit(
        [Sample(AttentionProblem.parse(f"S={length},D=64"), times) for length in (1024, 2048)],
        DEFAULT_GPU,
        REGIME,
    )
    grouped = made.answer(AttentionProblem.parse("H=32,HKV=8,S=1024,D=64"))
    assert grouped is not None
    assert grouped.config == Config("fused_attention", {**own.params, "packed_heads": 1})
    assert grouped.doubts[0] == "carried over from problems where its parameters are others"
    one = made.answer(AttentionProblem.parse("H=32,HKV=8,SQ=1,SKV=1024,D=64"))
    assert one is not None and one.config == CUDNN
    assert one.doubts[0] == "no own config of the rule is legal there: the vendor's kernel"


def fused_params() -> dict[str, Any]:
    """A good kernel's at (1,16,1024,64)."""
    return dict(maker()(1, 128, blocks_per_sm=2, pdl=True).params)


def test_what_the_regret_does_not_reach_is_said(ships: Rule) -> None:
    """Judged across 4 doublings at most (512 and 2048, in queries and in keys), on 4 problems."""
    assert ships.regret.farthest == 2
    near, far = (AttentionProblem.parse(f"S={length},D=64") for length in (4096, 65536))
    few = "judged on 4 problems only"
    assert [few in d for d in ships.answer(near).doubts] == [True]  # type: ignore[union-attr]
    doubts = ships.answer(far).doubts  # type: ignore[union-attr]
    assert "8.0 doublings from the nearest measured problem" in doubts[1]
    assert doublings(near, far) == 8


def test_a_feature_that_was_never_measured_is_said(ships: Rule) -> None:
    plain = {d for d in ships.answer(UNTUNED).doubts}  # type: ignore[union-attr]
    for extra, wanted in (
        (",dtype=bf16", "has dtype=bfloat16"),
        (",causal=1,window=256", "has window_left=256"),
    ):
        asked = AttentionProblem.parse(f"S=1999,D=64{extra}")
        doubts = {d for d in ships.answer(asked).doubts}  # type: ignore[union-attr]
        assert any(d.endswith(wanted) for d in doubts - plain), doubts


def test_the_command_says_it(ships: Rule, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lookup", "--shape", "S=1999,D=64,H=1", "--gpu", "H200"]) == 0
    out = capsys.readouterr().out
    assert "answer       rule" in out
    assert "regret       left out: mean" in out
    assert "time " not in out
    assert main(["lookup", "--shape", "S=1999,D=64,H=1", "--gpu", "H200", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "rule"
    assert answer["provenance"] == "predicted"
    assert answer["rule"]["regret"]["mean"] == pytest.approx(ships.regret.mean, abs=1e-4)
    assert answer["rule"]["doubts"]


def test_a_damaged_rule_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.json").write_text("{")
    monkeypatch.setattr(rule, "_folder", lambda: tmp_path)
    rule.shipped.cache_clear()
    with pytest.raises(StoreError, match=r"a shipped file cannot be read: rule .*bad\.json"):
        rule.shipped()


@pytest.mark.parametrize("path", sorted(rule._folder().glob("*.json")), ids=lambda p: p.stem)
def test_what_ships_is_judged_on_enough_recorded_problems(path: Path) -> None:
    """Made by `tuner fit` from the shipped recordings alone; its configs are this version's."""
    shipped = Rule.read(path)
    assert shipped.regret.answered >= LEAST_JUDGED
    known = {read_once(path).problem for path in FILES}
    problems = [problem_from_json(data) for data in shipped.problems]
    assert set(problems) <= known
    for problem in problems:
        choice = shipped.answer(problem)
        assert choice is not None
        assert families()[choice.config.family].accepts(problem, choice.config, shipped.gpu)


def test_something_ships() -> None:
    assert [r.op for r in rule.shipped()] == ["gemm"]
