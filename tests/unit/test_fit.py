"""Rules for untuned shapes: what they answer, and how they are judged."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gemm_configs import tile

from tuner.cli import main
from tuner.config import Config
from tuner.errors import ConfigError, StoreError
from tuner.families import family
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Measurement, Regime, Status
from tuner.problem import AttentionProblem, GemmProblem
from tuner.search import history
from tuner.search.fit import (
    Sample,
    _Table,
    _tree,
    fit,
)
from tuner.selection.nearest import doublings
from tuner.selection.rule import (
    KINDS,
    UNMEASURED,
    Rule,
    find,
)
from tuner.store import open_store

REGIME = Regime.default("gemm")
GEMM = family("gemm")
CUBLAS = Config("vendor_blas", {"kernel": "cublas"})
SMALL, LARGE = tile(64, 64), tile(128, 128)


def sample(size: int, small_us: float, large_us: float, vendor_us: float = 50.0) -> Sample:
    return Sample(
        GemmProblem(size, size, size), {SMALL: small_us, LARGE: large_us, CUBLAS: vendor_us}
    )


#: The small tile is best up to 512, the large one from 1024 on.
SAMPLES = [
    sample(256, 10, 15),
    sample(512, 10, 12),
    sample(1024, 15, 10),
    sample(2048, 20, 10),
    sample(4096, 20, 10),
]


def test_shapes_are_answered_on_their_side() -> None:
    rule = fit(SAMPLES, DEFAULT_GPU, REGIME)
    for size, wanted in ((128, SMALL), (384, SMALL), (1536, LARGE), (16384, LARGE)):
        answer = rule.answer(GemmProblem(size, size, size))
        assert answer is not None
        assert answer.config == wanted
        assert answer.source


def test_plain_products_and_epilogues_are_told_apart() -> None:
    fused = [
        Sample(replace(s.problem, epilogue="bias_gelu"), {SMALL: 10.0, LARGE: 30.0})
        for s in SAMPLES
    ]
    rule = fit([*SAMPLES, *fused], DEFAULT_GPU, REGIME)
    for epilogue, wanted in (("", LARGE), ("bias_gelu", SMALL)):
        answer = rule.answer(GemmProblem(2000, 2000, 2000, epilogue=epilogue))
        assert answer is not None and answer.config == wanted


def test_each_problem_is_judged_by_the_others() -> None:
    rule = fit(SAMPLES, DEFAULT_GPU, REGIME)
    # Without 1024 its nearest neighbours disagree; any answer there costs 0 or 50 %.
    found = {row["problem"]: row["regret"] for row in rule.regret.each}
    assert found["M=256,N=256,K=256,dtype=fp16"] == 0
    assert found["M=1024,N=1024,K=1024,dtype=fp16"] in (0, 0.5)
    assert rule.regret.answered == 5
    assert rule.regret.mean == pytest.approx(sum(found.values()) / 5)
    assert rule.regret.worst == pytest.approx(max(found.values()))


def test_what_was_left_out_does_not_answer_itself() -> None:
    """The odd one's own best config is bad at all others, so only it could name it."""
    odd = sample(8192, 10, 100)
    rule = fit([*SAMPLES[2:], odd], DEFAULT_GPU, REGIME)
    found = {row["problem"]: row["regret"] for row in rule.regret.each}
    assert found["M=8192,N=8192,K=8192,dtype=fp16"] > 1


def test_an_answer_that_was_not_measured_is_not_judged() -> None:
    lacking = Sample(GemmProblem(8192, 8192, 8192), {SMALL: 10.0})
    rule = fit([*SAMPLES[2:], lacking], DEFAULT_GPU, REGIME)
    assert (rule.regret.answered, rule.regret.unmeasured) == (3, 1)
    row = next(r for r in rule.regret.each if r["problem"].startswith("M=8192"))
    assert row["regret"] is None


def test_the_vendors_kernel_answers_where_nothing_else_is_legal() -> None:
    samples = [
        Sample(s.problem, s.times) for s in (sample(256, 10, 15, 99), sample(512, 10, 12, 99))
    ]
    rule = fit(samples, DEFAULT_GPU, REGIME)
    odd = GemmProblem(256, 257, 256)  # rows of 257 elements are not aligned for TMA
    assert GEMM.violations(odd, SMALL, DEFAULT_GPU)
    answer = rule.answer(odd)
    assert answer is not None and answer.config == CUBLAS


def test_a_package_of_its_own_is_never_the_answer_but_can_be_the_best() -> None:
    flash = Config("vendor_sdpa", {"kernel": "flash3"})
    samples = [replace(s, times={**s.times, flash: 5.0}) for s in SAMPLES]
    rule = fit(samples, DEFAULT_GPU, REGIME)
    answer = rule.answer(GemmProblem(4096, 4096, 4096))
    assert answer is not None and answer.config == LARGE
    assert rule.regret.mean >= 1


def test_what_a_package_of_its_own_is_faster_by_is_unavoidable() -> None:
    flash = Config("vendor_sdpa", {"kernel": "flash3"})
    samples = [replace(s, times={**s.times, flash: 8.0}) for s in SAMPLES]
    regret = fit(samples, DEFAULT_GPU, REGIME).regret
    assert regret.unavoidable == pytest.approx(0.25)
    assert all(row["unavoidable"] == 0.25 for row in regret.each)
    assert fit(SAMPLES, DEFAULT_GPU, REGIME).regret.unavoidable == 0


def test_times_are_those_of_the_final_pass() -> None:
    """Own finalists took 20 % and 10 % longer in it, the vendor's kernel 40 %."""
    third = tile(128, 192)
    problem = SAMPLES[0].problem
    passes: dict[bool, dict[Config, float]] = {
        False: {SMALL: 10.0, LARGE: 11.0, third: 12.0, CUBLAS: 10.0},
        True: {SMALL: 12.0, LARGE: 12.1, CUBLAS: 14.0},
    }
    measured = [
        Measurement(
            problem, config, DEFAULT_GPU, REGIME, Status.OK, latency_us=us, is_final=is_final
        )
        for is_final, times in passes.items()
        for config, us in times.items()
    ]
    found = Sample.of(problem, measured).times
    assert found == pytest.approx({**passes[True], third: 12.0 * 1.15})
    quick = Sample.of(problem, [m for m in measured if not m.is_final])
    assert quick.times == passes[False]


def weighted(rows: dict[int, dict[Config, float]], size: int) -> list[Config]:
    """What such a body answers to a square product, by regrets at others."""
    configs = list({config: None for row in rows.values() for config in row})
    body = {
        "configs": [config.to_json() for config in configs],
        "problems": [
            {
                "problem": GemmProblem(m, m, m).to_json(),
                "regrets": {str(configs.index(config)): r for config, r in row.items()},
            }
            for m, row in rows.items()
        ],
    }
    return find("weighted", body, GemmProblem(size, size, size), DEFAULT_GPU)[0]


def test_near_problems_weigh_more_than_far_ones() -> None:
    rows = {1024: {SMALL: 0.0, CUBLAS: 0.5}, 8192: {SMALL: 1.0, CUBLAS: 0.0}}
    assert weighted(rows, 1024)[0] == SMALL
    assert weighted(rows, 8192)[0] == CUBLAS


def test_the_twin_in_the_other_half_precision_is_nearer_than_half_the_rows() -> None:
    home = GemmProblem(1024, 1024, 1024)
    twin, half = (
        GemmProblem(1024, 1024, 1024, dtype="bfloat16", dtype_d="bfloat16"),
        replace(home, m=512),
    )
    assert doublings(home, twin) > doublings(home, half)
    for first, second in ((CUBLAS, LARGE), (LARGE, CUBLAS)):
        body = {
            "configs": [first.to_json(), second.to_json()],
            "problems": [
                {"problem": twin.to_json(), "regrets": {"0": 0.0, "1": 0.1}},
                {"problem": half.to_json(), "regrets": {"0": 0.1, "1": 0.0}},
            ],
        }
        assert find("weighted", body, home, DEFAULT_GPU)[0][0] == first


def test_what_was_measured_near_comes_before_what_was_not() -> None:
    """A small regret that is known is less than what an unknown one is taken for."""
    rows = {1024: {CUBLAS: UNMEASURED / 2}, 16384: {CUBLAS: 0.2, SMALL: 0.0}}
    assert weighted(rows, 1024)[0] == CUBLAS
    assert weighted(rows, 16384)[0] == SMALL


def test_estimates_carry_what_was_measured_to_other_sizes() -> None:
    """Equal at the one measured size, where a large tile leaves multiprocessors idle and a small
    one does not: where both fill the chip the estimate decides."""
    rows = {1024: {SMALL: 0.0, LARGE: 0.0}}
    large, small = (
        GEMM.predict_us(GemmProblem(m, m, m), config, DEFAULT_GPU)
        for m, config in ((8192, LARGE), (8192, SMALL))
    )
    assert large < small
    assert weighted(rows, 8192)[0] == LARGE


def test_what_is_not_legal_comes_last() -> None:
    odd = GemmProblem(256, 257, 256)
    assert GEMM.violations(odd, SMALL, DEFAULT_GPU)
    body = {
        "configs": [SMALL.to_json(), CUBLAS.to_json()],
        "problems": [{"problem": odd.to_json(), "regrets": {"1": 0.9}}],
    }
    assert find("weighted", body, odd, DEFAULT_GPU)[0] == [CUBLAS, SMALL]


def test_a_failed_config_is_the_worst() -> None:
    measured = [
        Measurement(SAMPLES[0].problem, SMALL, DEFAULT_GPU, REGIME, Status.OK, latency_us=3.0),
        Measurement(SAMPLES[0].problem, LARGE, DEFAULT_GPU, REGIME, Status.TIMEOUT),
    ]
    found = Sample.of(SAMPLES[0].problem, measured)
    assert found.regret(SMALL) == 0
    assert found.regret(LARGE) == math.log(4)
    assert found.regret(CUBLAS) is None


def test_a_tree_asks_for_windows_that_some_problems_have() -> None:
    """Narrow windows want the one config, wide ones and none the other."""
    fused = family("fused_attention")
    gpu = DEFAULT_GPU
    texts = ("window=64", "window=128", "window=2048", "softcap=0")
    problems = [AttentionProblem.parse(f"S=4096,D=64,causal=1,{text}") for text in texts]
    spaces = [set(fused.space(problem, gpu)) for problem in problems]
    one, other = sorted(set.intersection(*spaces), key=lambda config: config.digest)[:2]
    samples = [
        Sample(problem, {one: 1.0 + (i > 1), other: 2.0 - (i > 1)})
        for i, problem in enumerate(problems)
    ]
    tree = _tree(_Table(samples), range(len(samples)))
    for problem, wanted in zip(problems, (one, one, other, other), strict=True):
        configs, path = find("tree", tree, problem, gpu)
        assert configs[0] == wanted, path


def test_one_problem_makes_no_rule() -> None:
    with pytest.raises(ConfigError, match="1 problems were measured: a rule needs 2 or more"):
        fit(SAMPLES[:1], DEFAULT_GPU, REGIME)


def test_a_rule_is_what_was_written(tmp_path: Path) -> None:
    rule = fit(SAMPLES, DEFAULT_GPU, REGIME)
    rule.write(tmp_path / "rule.json")
    again = Rule.read(tmp_path / "rule.json")
    assert again.to_json() == rule.to_json()
    problem = GemmProblem(700, 900, 800)
    first, second = rule.answer(problem), again.answer(problem)
    assert first is not None and second is not None
    assert (first.config, first.source) == (second.config, second.source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "not a rule"),
        ({"version": 9}, "version 9"),
        ({"kind": "forest"}, r"kind=forest \(allowed: weighted, nearest, tree\)"),
        ({"regret": {}}, "damaged"),
        ({"problems": []}, "names no problem"),
        ({"op": "conv"}, r"op=conv \(allowed: attention, gemm"),
        ({"op": "attention"}, "a problem of gemm in a rule of attention"),
        ({"problems": [{"op": "gemm", "m": "64"}]}, "damaged: gemm.m='64' is not of type int"),
        ({"gpu": {"sm_count": "many"}}, "sm_count='many' is not a whole number"),
        ({"mean_regret_of_other_kinds": [1]}, "damaged"),
        ({"rule": None}, "damaged"),
        ({"rule": {}}, "damaged"),
    ],
)
def test_a_foreign_rule_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "rule.json"
    file.write_text(json.dumps({**fit(SAMPLES, DEFAULT_GPU, REGIME).to_json(), **change}))
    with pytest.raises(ConfigError, match=message):
        Rule.read(file)


CONFIGS = [SMALL.to_json(), LARGE.to_json()]
HOME = SAMPLES[0].problem.to_json()


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("weighted", {"configs": CONFIGS}, "KeyError 'problems'"),
        ("weighted", {"configs": CONFIGS, "problems": []}, "names no problem"),
        ("weighted", {"configs": [], "problems": [{}]}, "configs is empty"),
        ("weighted", {"configs": ["x"], "problems": [{}]}, "a config needs"),
        ("weighted", ("0", "x"), "'x' among its regrets is no finite number"),
        ("weighted", ("0", None), "None among its regrets"),
        ("weighted", ("0", True), "True among its regrets"),
        ("weighted", ("0", float("nan")), "nan among its regrets"),
        ("weighted", ("2", 0.1), "a regret names config 2 of 2"),
        ("weighted", ("-1", 0.1), "a regret names config -1 of 2"),
        ("weighted", ("first", 0.1), "ValueError invalid literal"),
        ("nearest", [], "names no problem"),
        ("nearest", [{"problem": HOME}], "KeyError 'configs'"),
        ("nearest", [{"problem": {"op": "softmax"}, "configs": CONFIGS}], "softmax"),
        ("tree", [], "TypeError"),
        ("tree", {"field": "m"}, "KeyError 'is'"),
        ("tree", {"field": "layout_a", "at_most": 3}, "TypeError"),
        ("tree", {"field": "m", "at_most": 3, "yes": {"configs": CONFIGS}}, "KeyError 'no'"),
    ],
)
def test_a_rule_s_body_is_looked_at(kind: str, body: Any, message: str) -> None:
    if isinstance(body, tuple):
        regrets = dict([body])
        body = {"configs": CONFIGS, "problems": [{"problem": HOME, "regrets": regrets}]}
    data = fit(SAMPLES, DEFAULT_GPU, REGIME).to_json()
    with pytest.raises(ConfigError, match=f"the rule is damaged: .*{message}"):
        Rule.from_json({**data, "kind": kind, "rule": body})


def test_a_tree_nested_too_deeply_is_no_rule() -> None:
    leaf = {"configs": CONFIGS}
    node: dict[str, Any] = leaf
    for _ in range(5000):
        node = {"field": "m", "at_most": 3, "yes": leaf, "no": node}
    data = fit(SAMPLES, DEFAULT_GPU, REGIME).to_json()
    with pytest.raises(ConfigError, match="the rule is damaged: RecursionError"):
        Rule.from_json({**data, "kind": "tree", "rule": node})


def test_from_the_store_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "_shipped", tuple)  # what ships alone would be enough
    url = f"sqlite:///{tmp_path}/s.sqlite"
    with open_store(url) as store:
        for one in SAMPLES:
            quick = [
                Measurement(one.problem, c, DEFAULT_GPU, REGIME, Status.OK, latency_us=us)
                for c, us in one.times.items()
            ]
            store.add(quick)
            finals = [m.but(is_final=True) for m in quick]
            store.decide(one.problem, DEFAULT_GPU, REGIME, finals, "sweep")
    out = tmp_path / "rule.json"
    arguments = ["fit", "--op", "gemm", "--store", url, "--output", str(out)]
    assert main(arguments) == 0
    out_text = capsys.readouterr().out
    assert "left out: mean" in out_text
    assert "too few to rely on it" in out_text
    named = {row["problem"] for row in Rule.read(out).regret.each}
    assert {s.problem.label() for s in SAMPLES} == named
    assert main(["fit", "--rule", str(out), "--shape", "M=300,N=300,K=304", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"]["family"] in ("gemm", "vendor_blas")
    assert answer["kind"] in KINDS
    assert main(["fit", "--rule", str(out)]) == 2


def test_the_rule_s_place_is_looked_at_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(history, "measured", None)  # would fail, were it asked
    assert main(["fit", "--op", "gemm", "--output", str(tmp_path / "none/rule.json")]) == 2
    said = f"tuner: {tmp_path}/none/rule.json: there is no folder {tmp_path}/none\n"
    assert capsys.readouterr().err == said


def test_a_rule_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule, path = fit(SAMPLES, DEFAULT_GPU, REGIME), tmp_path / "rule.json"
    rule.write(path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StoreError, match=r"rule\.json cannot be written: No space left"):
        rule.write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_ties_do_not_depend_on_the_order_of_the_problems() -> None:
    """Sums of equal regrets differ in their last digits with the order in which they are added."""
    configs = [Config("vendor_sdpa", {"kernel": name}) for name in ("cudnn", "flash2", "efficient")]
    samples = [
        Sample(
            AttentionProblem.parse(f"S={length},D={d}"),
            {c: 10.0 + (length * d * (i + 1)) % 7 / 3 for i, c in enumerate(configs)},
        )
        for length in (128, 384, 1024, 5000)
        for d in (64, 128)
    ]
    made = [fit(some, DEFAULT_GPU, REGIME) for some in (samples, samples[::-1])]
    assert made[0].regret.mean == pytest.approx(made[1].regret.mean, abs=1e-12)
    asked = [sample.problem for sample in samples]
    answers = [[rule.answer(problem) for problem in asked] for rule in made]
    assert [a and a.config for a in answers[0]] == [a and a.config for a in answers[1]]
