"""What rounding probabilities to e4m3 costs: FlashAttention-3's arithmetic, emulated, against the
limits of the numerics gate and of the GPU tests.
"""

from __future__ import annotations

import pytest

from tuner.gate import E4M3_ROUNDING, limits_of
from tuner.problem import AttentionProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
from fused_attention_proof import e4m3, reference  # noqa: E402
from fused_attention_proof.cases import Case  # noqa: E402


def error(text: str, kind: str, tile_n: int) -> tuple[float, float]:
    """Of the emulation, and what the gate allows."""
    problem = AttentionProblem.parse(f"{text},dtype=e4m3")
    case = Case("e4m3", problem, kind)
    drawn = {m.name: torch.empty(m.shape) for m in problem.matrices[:3]}
    reference.draw_inputs(case, drawn)
    restored = {name: e4m3.restored(*e4m3.quantise(tensor)) for name, tensor in drawn.items()}
    out = e4m3.flash_attention_3(case, restored, tile_n)
    found = reference.difference(out, reference.attention(case, restored))
    assert found.not_finite == 0
    return found.frobenius, limits_of(problem).frobenius


def test_rounding_is_what_the_gate_expects() -> None:
    found, allowed = error("H=2,SQ=128,SKV=2048,D=64", "random", 224)
    assert 0.9 * E4M3_ROUNDING < found < 1.1 * E4M3_ROUNDING < allowed


@pytest.mark.parametrize("kind", ["random", "dominant", "large_scores"])
@pytest.mark.parametrize("text", ["H=4,HKV=2,S=200,D=64,causal=1", "H=2,SQ=65,SKV=333,D=128"])
def test_sound_arithmetic_passes_the_gate(text: str, kind: str) -> None:
    found, allowed = error(text, kind, 96)
    assert 0 < found < allowed


def test_quantised_tensors_are_near_what_they_were() -> None:
    tensor = torch.randn(2, 3, 50, 64) * torch.tensor([0.01, 1.0, 100.0])[:, None, None]
    quantised, factors = e4m3.quantise(tensor)
    assert (quantised.dtype, factors.shape) == (torch.float8_e4m3fn, (2, 3))
    assert quantised.float().abs().amax((2, 3)).eq(e4m3.LARGEST).all()
    off = (e4m3.restored(quantised, factors) - tensor).norm() / tensor.norm()
    assert 0.02 < off < 0.04
