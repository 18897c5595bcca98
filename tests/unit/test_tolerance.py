"""Verdicts from a comparison with the reference, and floors of times."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from tuner.errors import GateError
from tuner.hardware import DEFAULT_GPU
from tuner.measure import tolerance
from tuner.measure.tolerance import E4M3_ROUNDING, LIMITS, OutputComparison, judge
from tuner.measurement import Status
from tuner.problem import (
    E4M3,
    AttentionProblem,
    GemmProblem,
    SoftmaxProblem,
)

GEMM = GemmProblem(m=4, n=8, k=64)
ATTENTION = AttentionProblem(seqlen_q=70, seqlen_kv=90, head_dim=64, heads_q=2, layout="bshd")
QUANTISED = AttentionProblem.parse("H=4,HKV=2,SQ=70,SKV=90,D=64,dtype=e4m3")
BIASED = AttentionProblem.parse("B=2,H=4,HKV=2,SQ=70,SKV=90,D=64,bias=h,causal=1")
GOOD = OutputComparison(elements=32, error_squares=32e-8, reference_squares=32.0)


def test_a_good_result_passes_with_its_error() -> None:
    verdict = judge(GOOD, GEMM.output, {"d": 0}, [])
    assert verdict.status is Status.OK
    assert verdict.error == pytest.approx(1e-4)
    assert verdict.log == ""


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"error_squares": 32 * 1.1e-3**2}, Status.WRONG_RESULT, "relative error 1.10e-03"),
        ({"beyond": 1, "first": 9, "worst": 0.5}, Status.WRONG_RESULT, "first at (0, 1, 1)"),
        ({"poisoned": 3, "first": 31}, Status.WRONG_RESULT, "3 of 32 elements were never written"),
        ({"not_finite": 2}, Status.NOT_FINITE, "2 of 32 elements are NaN or infinite"),
    ],
)
def test_a_bad_result_says_what_and_where(
    changes: dict[str, Any], status: Status, words: str
) -> None:
    values = {"elements": 32, "error_squares": 0.0, "reference_squares": 32.0, **changes}
    verdict = judge(OutputComparison(**values), GEMM.output, {}, [])
    assert verdict.status is status
    assert words in verdict.log


def test_a_stray_write_outweighs_everything() -> None:
    verdict = judge(
        OutputComparison(elements=32, not_finite=4), GEMM.output, {"a": 0, "d": 2}, ["b"]
    )
    assert verdict.status is Status.OUT_OF_BOUNDS
    assert verdict.log == "4 bytes beside 'd' were written; input 'b' was changed"


@pytest.mark.parametrize(
    ("dtype", "error", "passes"),
    [
        ("float16", 0.9e-3, True),
        ("float16", 2e-3, False),
        ("bfloat16", 7e-3, True),
        ("bfloat16", 9e-3, False),
    ],
)
def test_limits_by_type(dtype: Any, error: float, passes: bool) -> None:
    output = GemmProblem(m=4, n=8, k=64, dtype=dtype).output
    seen = OutputComparison(elements=32, error_squares=32 * error**2, reference_squares=32.0)
    assert (judge(seen, output, {}, []).status is Status.OK) == passes


def test_values_that_fp16_cannot_hold_better_are_no_error() -> None:
    """Probabilities of 131072 columns are subnormal: their rounding is no fault of a kernel."""
    output = SoftmaxProblem(rows=1, cols=131072).output
    squares = 131072 * (1 / 131072) ** 2
    rounding = 131072 * (2**-24) ** 2 / 12
    assert (rounding / squares) ** 0.5 > LIMITS["float16"].frobenius
    seen = OutputComparison(131072, error_squares=rounding * 1.001, reference_squares=squares)
    assert judge(seen, output, {}, []).status is Status.OK


def test_e4m3_is_judged_by_its_own_limits() -> None:
    # The spacing of 8 values an octave, rounded to nearest, by the square mean of 1 / x over it.
    assert pytest.approx(2**-3 / 12**0.5 * (3 / 8 / math.log(2)) ** 0.5, rel=5e-3) == E4M3_ROUNDING
    short, long = (
        tolerance.limits_of(AttentionProblem.parse(f"SQ=64,SKV={keys},D=64,dtype=e4m3"))
        for keys in (32, 8192)
    )
    assert E4M3_ROUNDING < short.frobenius < 1.3 * E4M3_ROUNDING
    assert short.frobenius < long.frobenius < 2 * short.frobenius
    assert tolerance.limits_of(ATTENTION) == LIMITS["float16"]
    seen = OutputComparison(elements=32, error_squares=32 * 0.03**2, reference_squares=32.0)
    assert judge(seen, QUANTISED.output, {}, [], short).status is Status.OK
    assert judge(seen, QUANTISED.output, {}, []).status is Status.WRONG_RESULT  # for bf16


def test_a_zero_reference_does_not_divide_by_zero() -> None:
    verdict = judge(OutputComparison(4, error_squares=1.0), GEMM.output, {}, [])
    assert verdict.status is Status.WRONG_RESULT


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("sums", [(NAN, NAN), (INFINITE, INFINITE), (0.0, NAN), (0.0, INFINITE)])
def test_nothing_passes_where_the_reference_is_not_finite(sums: tuple[float, float]) -> None:
    """Nor is the output blamed, whatever it is: the comparison with NaN is always false."""
    for seen in (OutputComparison(32, *sums), OutputComparison(32, *sums, not_finite=2)):
        with pytest.raises(GateError, match=r"reference of 'd' \(1, 4, 8\) is not finite"):
            judge(seen, GEMM.output, {"d": 0}, [])
    verdict = judge(OutputComparison(32, *sums), GEMM.output, {"d": 2}, [])
    assert (verdict.status, verdict.error) == (Status.OUT_OF_BOUNDS, None)


def test_a_limit_that_is_no_number_lets_nothing_pass() -> None:
    limits = replace(LIMITS["float16"], frobenius=NAN)
    assert judge(GOOD, GEMM.output, {}, [], limits).status is Status.WRONG_RESULT


def test_unpacks_what_the_kernel_writes() -> None:
    data = struct.pack("<2d3Qd2Q", 1.5, 2.5, 3, 4, 5, 6.5, 2**64 - 1 - 77, 0)
    assert len(data) == 64
    assert OutputComparison.unpack(data, 9) == OutputComparison(9, 1.5, 2.5, 3, 4, 5, 6.5, 77)


def test_position_follows_the_strides() -> None:
    operand = ATTENTION.output  # bshd: position (b, h, s, d) lies at ((b * S + s) * H + h) * D + d
    assert tolerance._position((5 * 2 + 1) * 64 + 7, operand) == (0, 1, 5, 7)


#: K, and the error of e4m3 sums over it that one H200 made with `fast_accum`.
MEASURED_SUMS = [
    (512, 3.2e-4),
    (4096, 1.32e-3),
    (8192, 2.05e-3),
    (14336, 2.87e-3),
    (32768, 4.73e-3),
]


@pytest.mark.parametrize(("k", "seen"), MEASURED_SUMS)
def test_e4m3_products_are_allowed_what_their_accumulators_lose(k: int, seen: float) -> None:
    for dtype_d in ("bfloat16", "float16"):
        fast = GemmProblem(64, 64, k, dtype=E4M3, dtype_d=dtype_d)  # type: ignore[arg-type]
        usual, limits = LIMITS[dtype_d], tolerance.limits_of(fast)
        assert math.hypot(usual.frobenius, seen / 2) < limits.frobenius
        assert limits.frobenius < math.hypot(usual.frobenius, 2 * seen)
        assert usual.absolute < limits.absolute < usual.absolute + 16 * seen
        assert limits.relative == usual.relative
        summed = tolerance.limits_of(replace(fast, fast_accum=False))
        assert summed == tolerance.limits_of(replace(fast, k=128))
        assert limits.frobenius > summed.frobenius < 1.1 * usual.frobenius
    blocks = GemmProblem(64, 64, k, dtype=E4M3, scales="block")
    summed = GemmProblem(64, 64, k, dtype=E4M3, fast_accum=False)
    assert tolerance.limits_of(blocks) == tolerance.limits_of(summed)
    assert tolerance.limits_of(GEMM) == LIMITS["float16"]


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 8), (8, 3), (1, 16)])
def test_a_causal_floor_counts_the_visible_pairs(queries: int, keys: int) -> None:
    problem = AttentionProblem(queries, keys, 64, heads_q=2, is_causal=True)
    flops, moved = tolerance.floor_work(problem)
    pairs = sum(min(query + 1, keys) for query in range(queries))
    assert flops == 4 * 2 * 64 * pairs
    seen = min(queries, keys)
    assert moved == 2 * 64 * 2 * (2 * queries + 2 * seen)


def test_the_floor_of_e4m3_is_that_of_its_rate_and_its_bytes() -> None:
    for causal in ("", ",causal=1"):
        half, quantised = (
            AttentionProblem.parse(f"SQ=64,SKV=96,D=64{causal},dtype={dtype}")
            for dtype in ("fp16", "e4m3")
        )
        flops, moved = tolerance.floor_work(half)
        factors, out = 3 * 16 * 4, half.output.bytes
        assert tolerance.floor_work(quantised) == (flops // 2, (moved - out) // 2 + out + factors)


def test_the_floor_of_e4m3_products_is_that_of_their_rate() -> None:
    half, quantised = (GemmProblem.parse(f"M=64,N=96,K=32,dtype={d}") for d in ("bf16", "e4m3"))
    assert tolerance.floor_work(quantised) == (tolerance.floor_work(half)[0] // 2, quantised.bytes)


def test_a_window_s_floor_counts_what_it_lets_through() -> None:
    problem = AttentionProblem(40, 64, 64, heads_q=2, window_left=3, window_right=5)
    flops, moved = tolerance.floor_work(problem)
    pairs = sum(min(query + 5, 63) - max(query - 3, 0) + 1 for query in range(40))
    assert flops == 4 * 2 * 64 * pairs
    assert moved == 2 * 64 * 2 * (2 * 40 + 2 * 45)


def test_a_bias_s_floor_is_what_the_mask_lets_through() -> None:
    plain = replace(BIASED, bias="")
    (flops, moved), (flops_plain, moved_plain) = map(tolerance.floor_work, (BIASED, plain))
    seen = 70 * 71 // 2  # of each head; the batch shares them
    assert (flops, moved - moved_plain) == (flops_plain, 2 * 4 * seen)


def test_the_floor() -> None:
    problem = GemmProblem(m=8192, n=8192, k=8192)
    floor = DEFAULT_GPU.floor_us(problem.flops, problem.bytes)
    assert "below" in tolerance.too_fast(problem, DEFAULT_GPU, floor * 0.99)
    assert tolerance.too_fast(problem, DEFAULT_GPU, floor * 1.01) == ""
    # No tensor-core work: 5 operations an element at the tensor cores' rate would be no floor.
    assert tolerance.floor_work(SoftmaxProblem(rows=64, cols=64))[0] == 0
