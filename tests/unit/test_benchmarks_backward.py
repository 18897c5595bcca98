"""The comparison of gradients of attention: its shapes, its variants, what is printed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from benchmarks import backward, backward_errors
from tuner.config import Config
from tuner.families import family
from tuner.families.fused_attention_backward.rule import KERNELS, kind_of
from tuner.hardware import DEFAULT_GPU

PROBLEMS = backward.acceptance()


def test_the_shapes_are_the_acceptance_suite_s_in_bf16() -> None:
    assert len(set(PROBLEMS)) == 22
    assert {p.dtype for p in PROBLEMS} == {"bfloat16"}
    assert sum(p.is_causal for p in PROBLEMS) == 11


def test_own_kernels_are_the_rule_s() -> None:
    member = family("fused_attention_backward")
    for problem in PROBLEMS:
        configs = backward.variants(problem)
        assert set(configs) == set(backward.specs_of(problem)) == {"own", "own, ordered"}
        for name, config in configs.items():
            posed = replace(problem, is_deterministic=name != "own")
            assert not member.violations(posed, config, DEFAULT_GPU)


def test_a_problem_s_lines_name_times_and_how_the_own_kernels_stand() -> None:
    rows = [
        {"name": name, "us": us, "tflops": 500.0, "away": 0.003}
        for name, us in (
            *(("own", 90.0), ("served", 91.0), ("flash3", 99.0), ("own, ordered", 100.0)),
            *(("flash3, deterministic", 130.0), ("cudnn", 140.0)),
        )
    ]
    said = backward.text(
        {"label": "S=2048", "against": "flash2", "rows": rows, "no": ["flash4: not here"]}
    )
    assert "90.00 us    500 TFLOP/s  from flash2 3.0e-03  own" in said
    assert "own speed: 1.100 of flash3" in said
    assert "served speed: 0.989 of the fastest" in said
    assert "own deterministic speed: 1.300 of flash3, deterministic" in said
    assert said.endswith("not measured: flash4: not here")


def test_errors_are_of_problems_that_flash2_computes_too() -> None:
    problems = backward_errors.drawn(160, "0")
    assert problems == backward_errors.drawn(160, "0") != backward_errors.drawn(160, "1")
    kinds = Counter(kind_of(problem) for problem in problems)
    assert set(kinds) == {kind for kind in KERNELS if not kind.has_softcap}
    assert min(kinds.values()) >= 5
    member, peer = family("fused_attention_backward"), family("sdpa_backward")
    for problem in problems:
        assert not member.violations(problem, backward.own_config(problem), DEFAULT_GPU)
        assert not peer.violations(problem, Config(peer.name, {"kernel": "flash2"}), DEFAULT_GPU)


def test_the_errors_are_summed_up_by_their_largest_ratio() -> None:
    rows = [
        {"problem": "S=2", "ratios": [1.0, 1.1, 0.9]},
        {"problem": "S=3", "ratios": [1.0, 1.1, math.nan]},
        {"problem": "S=4", "refused": "no"},
    ]
    said = backward_errors.text(rows)
    assert "2 problems beside FlashAttention-2, 1 refused" in said
    assert "gradient of key: median 1.100, largest 1.100" in said
    assert "1 beyond 1.2" in said and "S=3: ['1.000', '1.100', 'nan']" in said
