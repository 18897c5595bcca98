"""The comparison of e4m3 attention: cuDNN's graph, and what is printed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import fp8_attention
from tuner.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("B=2,H=4,S=256,D=128,causal=1,dtype=e4m3,layout=bshd")


def test_nvidia_s_frontend_takes_the_graph() -> None:
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    made = fp8_attention.Fp8Graph(cudnn, PROBLEM, 0.1, "AUTO", None)
    assert len(made.graph.nodes) == 1
    assert {t.uid for t in made.graph.get_outputs()} == {10, 11, 12}


def test_its_problems_are_of_equal_heads_and_e4m3() -> None:
    problems = [AttentionProblem.parse(shape) for shape in fp8_attention.SHAPES]
    assert {(p.dtype, p.head_dim) for p in problems} == {("float8_e4m3fn", 128)}
    assert all(p.heads_q == p.heads_kv for p in problems), "FlashAttention-3 takes no others"
    assert {p.seqlen_q for p in problems if p.is_causal} == {2048, 4096, 8192, 16384}


@pytest.mark.parametrize("causal", ["", ",causal=1"])
def test_each_width_of_tiles_is_compiled(causal: str) -> None:
    """Those that the page's rows of 2048 tokens are of are among them."""
    problem = AttentionProblem.parse(f"B=2,H=16,S=2048,D=128,dtype=e4m3,layout=bshd{causal}")
    found = fp8_attention.by_tile(problem)
    kinds = [(c["tile_n"], c["ping_pong"], c.get("skips_masked")) for c in found]
    assert len(set(kinds)) == len(kinds) and {c["warp_groups"] for c in found} == {2}
    assert {(n, p, None) for n in (128, 160, 192, 224) for p in (True, False)} <= set(kinds)
    assert ((128, True, "halves") in kinds) == bool(causal)


def rows(own_us: float, own_error: float) -> list[dict[str, Any]]:
    """Rows of a problem, the fastest first."""
    made = [
        {"name": "flash3_serving", "is_own": False, "us": 150.0, "tflops": 460.0, "error": 0.031},
        {"name": "own 1e383e", "is_own": True, "us": own_us, "tflops": 500.0, "error": own_error},
        {"name": "own c5bcd5", "is_own": True, "us": 170.0, "tflops": 400.0, "error": 0.01},
    ]
    return sorted(made, key=lambda row: float(str(row["us"])))


def test_a_problem_s_lines_name_times_errors_and_absences() -> None:
    found = {"label": "S=2048", "rows": rows(120.0, 0.028), "no": ["cudnn: not installed"]}
    said = fp8_attention.text(found)
    assert "150.00 us    460 TFLOP/s  error 3.10e-02  flash3_serving" in said
    assert "own speed 1.250 of the fastest peer, error no larger" in said
    assert said.endswith("not measured: cudnn: not installed")


def test_the_lead_is_the_fastest_own_kernel_s_with_its_error() -> None:
    assert fp8_attention.lead({"rows": rows(120.0, 0.04)}) == (1.25, False)
    assert fp8_attention.lead({"rows": rows(200.0, 0.04)}) == (150 / 170, True)
    alone = [row for row in rows(120.0, 0.02) if row["is_own"]]
    assert fp8_attention.lead({"rows": alone}) is None
