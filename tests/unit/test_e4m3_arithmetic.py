"""What e4m3 costs, emulated: FlashAttention-3's rounding of probabilities, and the accumulators
that products are summed in, against the limits of the numerics gate and of the GPU tests.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tuner.measure.gate.inputs import (
    DOMINANCE,
    E4M3_DEVIATION,
    KEY_MEAN,
    is_reported,
    kinds_of,
    moments,
)
from tuner.measure.log_sum_exp import lost_of
from tuner.measure.tolerance import (
    E4M3_MARGIN,
    E4M3_ROUNDING,
    E4M3_ROW,
    E4M3_SUM,
    Limits,
    OutputComparison,
    Verdict,
    judge,
    limits_of,
)
from tuner.measurement import Status
from tuner.problem import E4M3, AttentionProblem, GemmProblem

torch = pytest.importorskip("torch", reason="torch is not installed")
import e4m3  # noqa: E402


def emulated(
    problem: AttentionProblem, kind: str, tile_n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention-3's output and its reference, of one draw of inputs."""
    query, key, value = e4m3.drawn(problem, kind)
    exact = e4m3.scores_of(problem, query, key).softmax(-1) @ value
    return e4m3.flash_attention_3(problem, query, key, value, tile_n), exact


def error(text: str, kind: str, tile_n: int) -> tuple[float, float]:
    """Of the emulation, and what the gate allows."""
    problem = AttentionProblem.parse(f"{text},dtype=e4m3")
    out, expected = (tensor.double() for tensor in emulated(problem, kind, tile_n))
    assert out.isfinite().all()
    return float((out - expected).norm() / expected.norm()), limits_of(problem).frobenius


def compared(out: torch.Tensor, expected: torch.Tensor, limits: Limits) -> OutputComparison:
    """What the gate's compare kernel sees; rows are those of the last dimension."""
    out, expected = out.double(), expected.double()
    rows = expected.square().mean(-1, keepdim=True).sqrt().expand_as(expected)
    off = (out - expected).abs()
    pairs = zip(expected.flatten().tolist(), rows.flatten().tolist(), strict=True)
    allowed = torch.tensor([limits.allowed(*pair) for pair in pairs], dtype=torch.float64)
    return OutputComparison(
        expected.numel(),
        float(off.square().sum()),
        float(expected.square().sum()),
        beyond=int((off.flatten() > allowed).sum()),
        worst=float(off.max()),
    )


def test_rounding_is_what_the_gate_expects() -> None:
    found, allowed = error("H=2,SQ=128,SKV=2048,D=64", "random", 224)
    assert 0.9 * E4M3_ROUNDING < found < 1.1 * E4M3_ROUNDING < allowed


@pytest.mark.parametrize("kind", ["random", "dominant", "large_scores"])
@pytest.mark.parametrize("text", ["H=4,HKV=2,S=200,D=64,causal=1", "H=2,SQ=65,SKV=333,D=128"])
def test_sound_arithmetic_passes_the_gate(text: str, kind: str) -> None:
    found, allowed = error(text, kind, 96)
    assert 0 < found < allowed


#: The limit of an element before it followed its row.
ONE_FOR_ALL = Limits(limits_of(AttentionProblem.parse("S=64,D=64,dtype=e4m3")).frobenius, 0.25, 0.0)


@pytest.mark.parametrize("kind", ["random", "dominant", "large_scores"])
def test_elements_of_sound_arithmetic_are_near_their_rows_scale(kind: str) -> None:
    problem = AttentionProblem.parse("H=2,SQ=96,SKV=1100,D=64,dtype=e4m3")
    out, expected = emulated(problem, kind, 224)
    seen = compared(out, expected, limits_of(problem))
    assert seen.beyond == 0
    assert judge(seen, problem.output, {}, [], limits_of(problem)).status is Status.OK
    rows = expected.double().square().mean(-1, keepdim=True).sqrt()
    worst = float(((out.double() - expected.double()).abs() / rows).max())
    assert 0.05 < worst < E4M3_ROW  # not a limit that nothing comes near


def test_a_row_that_was_left_out_is_seen_where_outputs_are_small() -> None:
    problem = AttentionProblem.parse("H=1,SQ=3000,SKV=4000,D=64,dtype=e4m3")
    out, expected = emulated(problem, "random", 224)
    assert 0.005 < float(expected.double().square().mean().sqrt()) < 0.05
    out[0, 0, 137] = 0
    seen = compared(out, expected, ONE_FOR_ALL)
    assert judge(seen, problem.output, {}, [], ONE_FOR_ALL).status is Status.OK
    limits = limits_of(problem)
    verdict = judge(compared(out, expected, limits), problem.output, {}, [], limits)
    assert verdict.status is Status.WRONG_RESULT
    assert "row's RMS" in verdict.log


def accumulated(a: torch.Tensor, b: torch.Tensor, part: int) -> torch.Tensor:
    """a @ b^T as WGMMA sums 8-bit products, 32 at a time: what lies more than 13 bits below the
    largest of them and of the sum so far is cut off. Each `part` of K is added to an fp32 sum.

    Relative errors of this emulation: 3.4e-4 over 512 products, 1.34e-3 over 4096, 2.05e-3 over
    8192, 2.86e-3 over 14336, 4.81e-3 over 32768.
    """
    total = kept = torch.zeros(a.shape[0], b.shape[0])
    for k in range(0, a.shape[1], 32):
        products = a[:, None, k : k + 32] * b[None, :, k : k + 32]
        largest = torch.maximum(products.abs().amax(-1), kept.abs())
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 14)
        kept = (torch.trunc(products / unit[..., None]).sum(-1) + torch.trunc(kept / unit)) * unit
        if (k + 32) % part == 0:
            total, kept = total + kept, torch.zeros_like(kept)
    return total + kept


@pytest.mark.parametrize("fast_accum", [True, False])
def test_sums_of_products_are_off_by_what_the_gate_expects(fast_accum: bool) -> None:
    torch.manual_seed(0)
    problem = GemmProblem(16, 24, 1024, dtype=E4M3, dtype_d="float16", fast_accum=fast_accum)
    a, b = (
        (E4M3_DEVIATION * torch.randn(rows, problem.k)).to(torch.float8_e4m3fn).float()
        for rows in (problem.m, problem.n)
    )
    exact = a.double() @ b.double().T
    kept = problem.k if fast_accum else 128
    out = accumulated(a, b, kept)
    lost = (out - exact).norm() / exact.norm()
    assert 0.4 < lost / (E4M3_SUM * kept**0.5) < E4M3_MARGIN
    scale = 1 / (E4M3_DEVIATION**2 * problem.k**0.5)
    limits, off = limits_of(problem), ((scale * out).half() - scale * exact).abs()
    assert (off <= limits.absolute + limits.relative * scale * exact.abs()).all()
    assert off.norm() <= limits.frobenius * (scale * exact).norm()


def product_verdict(problem: GemmProblem, kind: str, part: int) -> Verdict:
    """The gate's on an emulated product whose sums stay in the accumulators for `part` of K."""
    torch.manual_seed(0)
    means, deviations = moments(problem, kind)
    a, b = (
        (means.get(name, 0.0) + deviations[name] * torch.randn(rows, problem.k))
        .to(torch.float8_e4m3fn)
        .float()
        for name, rows in (("a", problem.m), ("b", problem.n))
    )
    factor = means["scale_a"] * means["scale_b"]
    exact = factor * (a.double() @ b.double().T)
    out = (factor * accumulated(a, b, part)).to(getattr(torch, problem.dtype_d))
    limits = limits_of(problem)
    limits = limits.lifted if is_reported(problem, kind) else limits
    return judge(compared(out, exact, limits), problem.output, {}, [], limits)


def test_all_positive_operands_are_positive_and_their_products_are_of_size_one() -> None:
    for scales in ("tensor", "row", "block"):
        problem = GemmProblem(16, 24, 4096, dtype=E4M3, scales=scales)
        means, deviations = moments(problem, "positive")
        for operand in problem.inputs:
            # The fill's normal numbers stay within sqrt(2 ln 2^24).
            assert means[operand.name] > 5.77 * deviations[operand.name]
        size = problem.k * means["a"] * means["b"] * means["scale_a"] * means["scale_b"]
        assert size == pytest.approx(1.0)
        assert "positive" in kinds_of(problem) and "positive" in kinds_of(problem, is_vendor=True)
    assert "positive" not in kinds_of(GemmProblem(16, 24, 4096))


@pytest.mark.parametrize("dtype_d", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [1024, 16384])
def test_all_positive_operands_pass_where_parts_of_128_are_added_in_fp32(
    dtype_d: Any, k: int
) -> None:
    problem = GemmProblem(8, 8, k, dtype=E4M3, dtype_d=dtype_d, scales="row", fast_accum=False)
    for kind in kinds_of(problem):
        if kind != "planted":
            assert product_verdict(problem, kind, 128).status is Status.OK, kind


def test_only_all_positive_operands_show_sums_that_stay_in_the_accumulators() -> None:
    """For a problem that asks for exact ones. One H200 was 9.6 % low at K = 16384."""
    problem = GemmProblem(8, 8, 16384, dtype=E4M3, scales="row", fast_accum=False)
    assert product_verdict(problem, "random", problem.k).status is Status.OK
    verdict = product_verdict(problem, "positive", problem.k)
    assert verdict.status is Status.WRONG_RESULT and (verdict.error or 0) > 0.05


def test_the_loss_of_fast_accumulation_is_not_judged() -> None:
    """Other kinds of inputs and other problems are judged."""
    problem = GemmProblem(8, 8, 16384, dtype=E4M3, scales="row")
    verdict = product_verdict(problem, "positive", problem.k)
    assert verdict.status is Status.OK and (verdict.error or 0) > 0.05
    assert [kind for kind in kinds_of(problem) if is_reported(problem, kind)] == ["positive"]
    for other in (replace(problem, fast_accum=False), replace(problem, scales="block")):
        assert not is_reported(other, "positive")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["large_scores", "dominant"])
def test_largest_scores_are_off_by_what_the_gate_expects(kind: str, head_dim: int) -> None:
    """A row's largest score loses more than a score of usual size, and one whose products all have
    one sign loses most.
    """
    torch.manual_seed(0)
    problem = AttentionProblem.parse(f"S=64,D={head_dim},dtype=e4m3")
    if kind == "dominant":
        drawn = KEY_MEAN + torch.randn(2048, head_dim)
        keys = (E4M3_DEVIATION * drawn).to(torch.float8_e4m3fn).float()
        queries = (DOMINANCE * keys).to(torch.float8_e4m3fn).float()
    else:
        queries, keys = (
            (E4M3_DEVIATION * torch.randn(2048, head_dim)).to(torch.float8_e4m3fn).float()
            for _ in range(2)
        )
        keys = keys[(queries @ keys[:512].T).argmax(1)]
    scale = 1 / (E4M3_DEVIATION**2 * head_dim**0.5)
    pairs = zip(queries.split(8), keys.split(8), strict=True)
    found = torch.cat([accumulated(*pair, head_dim).diagonal() for pair in pairs])
    exact = (queries.double() * keys.double()).sum(-1)
    off, tops = (scale * (found - exact)).abs().tolist(), (scale * exact).tolist()
    limits = lost_of(problem, 1.0, tops)
    assert limits is not None
    shares = [one / limit for one, limit in zip(off, limits, strict=True)]
    assert 0.2 < max(shares) < 1.0
    usual = lost_of(problem, 1.0, [0.0])
    assert usual is not None
    if head_dim == 128:
        assert max(off) > 0.7 * usual[0]  # a limit without the score's size, of one head's factors
