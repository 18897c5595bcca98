"""Long causal attention under two loads: what is subtracted, chosen and printed; exact outputs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import own_kernels, sustained
from benchmarks.call_times import Contender
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("first", [0, 570])
def test_the_exact_output_is_sdpa_s_in_float64(is_causal: bool, first: int) -> None:
    """Over more than one chunk of queries, with grouped heads."""
    torch.manual_seed(1)
    shape = (2, 4, own_kernels.CHUNK + 70, 16)
    query, key, value = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    key, value = key[:, :2], value[:, :2]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    found = own_kernels.exact(query, key, value, 0.3, is_causal=is_causal, first=first)
    assert found.shape[2] == shape[2] - first
    assert own_kernels.relative_error(wanted, found) < 1e-12
    zeroed = wanted.clone()
    zeroed[1, 3, -1] = 0
    assert own_kernels.relative_error(zeroed, found) > 1e-3


def test_its_problems_have_eight_query_heads_a_key_head_and_are_dense() -> None:
    problems = [AttentionProblem.parse(shape) for shape in sustained.SHAPES]
    assert {p.seqlen_q for p in problems} == {8192, 16384, 32768}
    assert all(p.heads_q == 8 * p.heads_kv and p.is_causal for p in problems)
    assert all(map(own_kernels.is_dense, problems))
    other = AttentionProblem.parse("S=1024,D=64,causal=1,left=10")
    assert not own_kernels.is_dense(other)


def test_the_predecessors_time_is_taken_off_under_each_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Graph:
        def __init__(self, us: float) -> None:
            self.us = us

        def replay(self) -> None: ...

    made: list[tuple[str, int]] = []

    def captured(before: Any, one: Contender | None, count: int) -> Graph:
        made.append((one.name if one else "", count))
        return Graph({"own": 2000.0, "flash3": 2200.0}[one.name] * count + 50 if one else 50.0)

    monkeypatch.setattr(sustained, "captured", captured)
    monkeypatch.setattr(sustained, "cooler", lambda: lambda: None)
    monkeypatch.setattr(sustained, "_behind", lambda cool, graph: graph.us)
    monkeypatch.setattr(sustained, "_held", lambda graph: (2 * graph.us, {"sm_mhz": 1400}))
    chosen = [Contender(name, lambda i: i) for name in ("own", "flash3")]
    found = sustained.loaded(chosen, lambda i: i, {"own": 1000.0})
    assert made == [("own", 4), ("flash3", 4), ("", 4)], "graphs of about the length of a burst"
    assert found["bursts_us"] == {"own": 2000.0, "flash3": 2200.0}
    assert found["sustained_us"] == {"own": 4000.0, "flash3": 4400.0}
    assert sustained.leads({**found, "own": ["own"]}) == {
        "bursts_us": 1.1,
        "sustained_us": 1.1,
    }


def test_a_wrong_kernel_does_not_take_part() -> None:
    problem = AttentionProblem.parse("S=64,D=16,causal=1,dtype=bf16")
    tensors: Any = object.__new__(sustained.Tensors)
    tensors.problem, tensors.wanted = problem, torch.ones(1, 16, 8, 16, dtype=torch.float64)
    every = [
        Contender("right", lambda i: torch.ones(1, 16, 64, 16)),
        Contender("wrong", lambda i: torch.ones(1, 16, 64, 16) * 1.1),
    ]
    refused: dict[str, str] = {}
    assert [one.name for one in tensors.right(every, refused)] == ["right"]
    assert refused["wrong"] == "relative error 1.0e-01"


def test_lines_name_both_loads_the_clock_and_what_is_missing() -> None:
    found = {
        "label": "S=8192",
        "flops": 10**12,
        "own": ["fused_attention 2531c0"],
        "bursts_us": {"fused_attention 2531c0": 1500.0, "flash3": 1470.0},
        "sustained_us": {"fused_attention 2531c0": 1600.0, "flash3": 1616.0},
        "clocks": {
            name: {"sm_mhz": 1410, "power_w": 699.6}
            for name in ("fused_attention 2531c0", "flash3")
        },
        "no": {"flash3_serving": "not here"},
    }
    said = sustained.text(found)
    assert "bursts    1500.0 us   667 TFLOP/s  sustained    1600.0 us   625 TFLOP/s" in said
    assert "1410 MHz 700 W  fused_attention 2531c0" in said
    assert "own speed of FlashAttention-3's: bursts 0.980, sustained 1.010" in said
    assert said.endswith("not measured: flash3_serving: not here")
