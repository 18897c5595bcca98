"""The verdicts of the numerics gate and what it asks its kernels for; the kernels themselves are
compared with numpy in tests/gpu/test_gate_gpu.py."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from tuner import gate, resources, verdict
from tuner.errors import BenchmarkError, GateError
from tuner.gate import KINDS, POISON, Gate, border_columns, scale_of
from tuner.hardware import DEFAULT_GPU
from tuner.measurement import Status
from tuner.problem import (
    E4M3,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)
from tuner.verdict import E4M3_ROUNDING, LIMITS, Comparison, judge

GEMM = GemmProblem(m=4, n=8, k=64)
SCALED = GemmProblem(4, 8, 64, dtype=E4M3, scales="row")
ATTENTION = AttentionProblem(seqlen_q=70, seqlen_kv=90, head_dim=64, heads_q=2, layout="bshd")
QUANTISED = AttentionProblem.parse("H=4,HKV=2,SQ=70,SKV=90,D=64,dtype=e4m3")
BIASED = AttentionProblem.parse("B=2,H=4,HKV=2,SQ=70,SKV=90,D=64,bias=h,alibi=1,causal=1")
PACKED = AttentionProblem.parse("B=3,H=4,HKV=2,SQ=8,SKV=16,D=64,varlen=1")
GROUPED = GroupedGemmProblem(3, 7, 8, 64, sizes="sparse")
GOOD = Comparison(elements=32, error_squares=32e-8, reference_squares=32.0)


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
    verdict = judge(Comparison(**values), GEMM.output, {}, [])
    assert verdict.status is status
    assert words in verdict.log


def test_a_stray_write_outweighs_everything() -> None:
    verdict = judge(Comparison(elements=32, not_finite=4), GEMM.output, {"a": 0, "d": 2}, ["b"])
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
    seen = Comparison(elements=32, error_squares=32 * error**2, reference_squares=32.0)
    assert (judge(seen, output, {}, []).status is Status.OK) == passes


def test_values_that_fp16_cannot_hold_better_are_no_error() -> None:
    """Probabilities of 131072 columns are subnormal: their rounding is no fault of a kernel."""
    output = SoftmaxProblem(rows=1, cols=131072).output
    squares = 131072 * (1 / 131072) ** 2
    rounding = 131072 * (2**-24) ** 2 / 12
    assert (rounding / squares) ** 0.5 > LIMITS["float16"].frobenius
    seen = Comparison(131072, error_squares=rounding * 1.001, reference_squares=squares)
    assert judge(seen, output, {}, []).status is Status.OK


def test_e4m3_is_judged_by_its_own_limits() -> None:
    # The spacing of 8 values an octave, rounded to nearest, by the square mean of 1 / x over it.
    assert pytest.approx(2**-3 / 12**0.5 * (3 / 8 / math.log(2)) ** 0.5, rel=5e-3) == E4M3_ROUNDING
    short, long = (
        verdict.limits_of(AttentionProblem.parse(f"SQ=64,SKV={keys},D=64,dtype=e4m3"))
        for keys in (32, 8192)
    )
    assert E4M3_ROUNDING < short.frobenius < 1.3 * E4M3_ROUNDING
    assert short.frobenius < long.frobenius < 2 * short.frobenius
    assert verdict.limits_of(ATTENTION) == LIMITS["float16"]
    seen = Comparison(elements=32, error_squares=32 * 0.03**2, reference_squares=32.0)
    assert judge(seen, QUANTISED.output, {}, [], short).status is Status.OK
    assert judge(seen, QUANTISED.output, {}, []).status is Status.WRONG_RESULT  # for bf16


@pytest.mark.parametrize("kind", KINDS["attention"])
def test_quantised_inputs_stand_for_what_others_are(kind: str) -> None:
    """Element times factor has the moments of the unquantised kind; nothing saturates."""
    means, deviations = gate.moments(QUANTISED, kind)
    plain_means, plain_deviations = gate.moments(ATTENTION, kind)
    for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
        factor = means[f"descale_{short}"]
        assert factor * deviations[name] == pytest.approx(plain_deviations.get(name, 1.0))
        assert factor * means.get(name, 0.0) == pytest.approx(plain_means.get(name, 0.0))
        assert 0 < deviations[f"descale_{short}"] < factor / 6  # positive, and not all alike
        # Planted queries are DOMINANCE times a key of at most five and a half deviations.
        most = gate.DOMINANCE * (means.get("key", 0.0) + 5.5 * deviations["key"])
        assert most < 448


def test_a_zero_reference_does_not_divide_by_zero() -> None:
    verdict = judge(Comparison(4, error_squares=1.0), GEMM.output, {}, [])
    assert verdict.status is Status.WRONG_RESULT


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("sums", [(NAN, NAN), (INFINITE, INFINITE), (0.0, NAN), (0.0, INFINITE)])
def test_nothing_passes_where_the_reference_is_not_finite(sums: tuple[float, float]) -> None:
    """Nor is the output blamed, whatever it is: the comparison with NaN is always false."""
    for seen in (Comparison(32, *sums), Comparison(32, *sums, not_finite=2)):
        with pytest.raises(GateError, match=r"reference of 'd' \(1, 4, 8\) is not finite"):
            judge(seen, GEMM.output, {"d": 0}, [])
    verdict = judge(Comparison(32, *sums), GEMM.output, {"d": 2}, [])
    assert (verdict.status, verdict.error) == (Status.OUT_OF_BOUNDS, None)


def test_a_limit_that_is_no_number_lets_nothing_pass() -> None:
    limits = replace(LIMITS["float16"], frobenius=NAN)
    assert judge(GOOD, GEMM.output, {}, [], limits).status is Status.WRONG_RESULT


def test_unpacks_what_the_kernel_writes() -> None:
    data = struct.pack("<2d3Qd2Q", 1.5, 2.5, 3, 4, 5, 6.5, 2**64 - 1 - 77, 0)
    assert len(data) == 64
    assert Comparison.unpack(data, 9) == Comparison(9, 1.5, 2.5, 3, 4, 5, 6.5, 77)


def test_position_follows_the_strides() -> None:
    operand = ATTENTION.output  # bshd: position (b, h, s, d) lies at ((b * S + s) * H + h) * D + d
    assert verdict._position((5 * 2 + 1) * 64 + 7, operand) == (0, 1, 5, 7)


def test_the_template_and_the_gate_agree_on_the_poison() -> None:
    text = (resources.templates() / "reference.cu.j2").read_text()
    assert f"kPoison = 0x{POISON:X}" in text
    assert POISON & 0x7C00 == 0x7C00 and POISON & 0x3FF  # a NaN in fp16
    assert POISON & 0x7F80 == 0x7F80 and POISON & 0x7F  # and in bf16, so in the upper half of fp32


@pytest.mark.parametrize("k", [1, 8, 16, 17, 64, 129, 4096])
def test_border_columns_are_distinct_and_inside(k: int) -> None:
    for seed in range(20):
        columns = border_columns(k, seed)
        assert len(set(columns)) == len(columns) <= 16
        assert min(columns) == 0 and max(columns) == k - 1
    if k > 128:
        assert any(c % 128 == 0 for c in border_columns(k, 3)[1:])


def test_random_inputs_come_last_because_timing_uses_them() -> None:
    assert {kinds[-1] for kinds in KINDS.values()} == {"random"}


def test_a_kernel_that_ignores_its_scale_is_seen() -> None:
    assert scale_of(ATTENTION) == pytest.approx(64**-0.5)
    assert scale_of(ATTENTION, "dominant") != scale_of(ATTENTION)


class FakeDevice:
    """Memory as numbers, and what was done with it."""

    stream = 0

    def __init__(self) -> None:
        self.free_at, self.live, self.filled = 1 << 20, set[int](), list[tuple[int, int]]()
        self.written: dict[int, bytes] = {}

    def allocate(self, size: int) -> int:
        pointer, self.free_at = self.free_at, self.free_at + size + 4096
        self.live.add(pointer)
        return pointer

    def free(self, pointer: int) -> None:
        self.live.remove(pointer)

    def fill16(self, pointer: int, pattern: int, size: int) -> None:
        assert pattern == POISON and size % 2 == 0
        self.filled.append((pointer, size))

    def fill8(self, pointer: int, value: int, size: int) -> None:
        pass

    def write(self, pointer: int, data: bytes) -> None:
        self.written[pointer] = data

    def read(self, pointer: int, size: int) -> bytes:
        return struct.pack("<2d6Q", 0.0, 1.0, 0, 0, 0, 0, 0, 0)[:size]

    def wait(self) -> None:
        pass


class FakeKernel:
    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int, int]] = []
        self.given: list[tuple[list[int], list[int]]] = []
        self.scalars: list[tuple[float, ...]] = []

    def launch(
        self, tensors: Any, integers: Any, scalars: Any, workspace: int, stream: int
    ) -> None:
        assert all(isinstance(i, int) and -(2**63) <= i < 2**63 for i in integers)
        self.calls.append((integers[0], len(tensors), len(integers), len(scalars)))
        self.given.append((list(tensors), list(integers)))
        self.scalars.append(tuple(scalars))


def opened(problem: Problem) -> tuple[Gate, FakeDevice, FakeKernel]:
    device, kernel = FakeDevice(), FakeKernel()
    made = Gate(device, kernel)  # type: ignore[arg-type]
    made.open(problem, 7)
    return made, device, kernel


#: Command, tensors, integers and scalars as the template's opening comment lists them.
COMMANDS = {
    "gemm": [*[(0, 1, 4, 2)] * 2, (2, 1, None, 1), (5, 7, 18, 2), *[(9, 2, 2, 0)] * 2],
    "scaled": [*[(0, 1, 4, 2)] * 4, (2, 1, None, 1), (5, 7, 18, 2), *[(9, 2, 2, 0)] * 4],
    "attention": [
        *[(0, 1, 4, 2)] * 3, (1, 2, 17, 1), (4, 10, 25, 2), *[(9, 2, 2, 0)] * 3,
    ],
    "biased": [
        *[(0, 1, 4, 2)] * 5, (1, 2, 17, 1), (4, 10, 25, 2), *[(9, 2, 2, 0)] * 5,
    ],
    "swiglu": [
        *[(0, 1, 4, 2)] * 2, (2, 1, None, 1), (5, 7, 18, 2), (10, 2, 7, 0), *[(9, 2, 2, 0)] * 2,
    ],
    "grouped_gemm": [
        *[(0, 1, 4, 2)] * 2, (2, 1, None, 1), *[(5, 7, 18, 2)] * 2, *[(9, 2, 2, 0)] * 3,
    ],
    "softmax": [(0, 1, 4, 2), (3, 1, 6, 1), (6, 2, 5, 1), (9, 2, 2, 0)],
    "e4m3": [
        *[(0, 1, 4, 2)] * 6, (1, 2, 17, 1), (4, 10, 25, 2), *[(9, 2, 2, 0)] * 6,
    ],
    "varlen": [
        *[(0, 1, 4, 2)] * 3, *[(1, 2, 17, 1)] * 3, *[(4, 10, 25, 2)] * 3, *[(9, 2, 2, 0)] * 5,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (GEMM, "gemm"),
        (SCALED, "scaled"),
        (SwigluProblem(4, 32, 64), "swiglu"),
        (GROUPED, "grouped_gemm"),
        (ATTENTION, "attention"),
        (BIASED, "biased"),
        (SoftmaxProblem(rows=6, cols=9), "softmax"),
        (QUANTISED, "e4m3"),
        (PACKED, "varlen"),
    ],
)
def test_arguments_have_the_template_s_lengths(problem: Problem, name: str) -> None:
    made, _, kernel = opened(problem)
    made.load(KINDS[problem.op][0])
    assert len(kernel.calls) == len(COMMANDS[name])
    for seen, wanted in zip(kernel.calls, COMMANDS[name], strict=True):
        assert [s for s, w in zip(seen, wanted, strict=True) if w is not None and s != w] == []


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
        usual, limits = LIMITS[dtype_d], verdict.limits_of(fast)
        assert math.hypot(usual.frobenius, seen / 2) < limits.frobenius
        assert limits.frobenius < math.hypot(usual.frobenius, 2 * seen)
        assert usual.absolute < limits.absolute < usual.absolute + 16 * seen
        assert limits.relative == usual.relative
        summed = verdict.limits_of(replace(fast, fast_accum=False))
        assert summed == verdict.limits_of(replace(fast, k=128))
        assert limits.frobenius > summed.frobenius < 1.1 * usual.frobenius
    assert verdict.limits_of(GEMM) == LIMITS["float16"]


def test_planted_e4m3_columns_do_not_saturate() -> None:
    _, deviations = gate.moments(SCALED, "planted")
    assert 7 * gate.E4M3_COLUMN_FACTOR * deviations["a"] <= 448
    made, _, kernel = opened(SCALED)
    made.load("planted")
    assert (gate.E4M3_COLUMN_FACTOR,) in kernel.scalars
    assert (gate.COLUMN_FACTOR,) not in kernel.scalars


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_product_s_reference_is_given_its_factors(scales: Any) -> None:
    made, _, kernel = opened(replace(SCALED, scales=scales))
    made.load("random")
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 5]
    at = made.pointers
    assert tensors == [
        *(at["a"], at["b"], made.reference("random"), 0, 0, at["scale_a"], at["scale_b"])
    ]
    assert (integers[1], integers[-1]) == (3, int(scales == "row"))
    made, _, kernel = opened(GEMM)
    made.load("random")
    [(tensors, _)] = [given for given in kernel.given if given[1][0] == 5]
    assert tensors[3:] == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["float16", E4M3])
def test_scaled_products_have_a_deviation_of_one(dtype: Any) -> None:
    problem = GemmProblem(64, 64, 4096, dtype=dtype, scales="row")
    means, deviations = gate.moments(problem, "random")
    product = deviations.get("a", 1.0) * deviations["b"] * means["scale_a"] * means["scale_b"]
    assert product * problem.k**0.5 == pytest.approx(1)
    for name in ("scale_a", "scale_b"):
        assert deviations[name] == gate.DESCALE_SPREAD * means[name]


def test_groups_are_computed_one_by_one_and_planted_ones_lie_otherwise() -> None:
    made, device, kernel = opened(GROUPED)
    at = made.pointers
    for kind, rows in (("planted", (0, 5, 2)), ("random", (4, 0, 3))):
        kernel.given.clear()
        made.load(kind)
        starts = [0, *accumulate(rows)]
        assert device.written[at["offsets"]] == struct.pack("<4i", *starts)
        given = [(t, n) for t, n in kernel.given if n[0] == 5]
        busy = [group for group in range(3) if rows[group]]
        for group, (tensors, integers) in zip(busy, given, strict=True):
            assert integers[2:6] == [1, rows[group], 8, 64]
            assert tensors[0] == at["a"] + 2 * 64 * starts[group]
            assert tensors[1] == at["b"] + 2 * 64 * 8 * group
            assert tensors[2] == made.reference(kind) + 4 * 8 * starts[group]
    assert verdict.floor_work(GROUPED)[1] == GROUPED.bytes < sum(o.bytes for o in GROUPED.operands)


def test_packed_sequences_are_planted_and_computed_one_by_one() -> None:
    made, device, kernel = opened(PACKED)
    made.load("dominant")
    at = made.pointers
    starts = {name: [0, *accumulate(PACKED.lengths_q)] for name in ("query", "cu_seqlens_q")}
    starts |= {name: [0, *accumulate(PACKED.lengths_kv)] for name in ("key", "cu_seqlens_kv")}
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        assert device.written[at[name]] == struct.pack("<4i", *starts[name])
    of_queries, of_keys = 4 * 64, 2 * 64  # elements a row
    for command in (1, 4):
        given = [(t, n) for t, n in kernel.given if n[0] == command]
        for i, (tensors, integers) in enumerate(given):
            assert tensors[0] == at["query"] + 2 * of_queries * starts["query"][i]
            assert tensors[1] == at["key"] + 2 * of_keys * starts["key"][i]
            assert integers[2:8] == [1, 4, 2, PACKED.lengths_q[i], PACKED.lengths_kv[i], 64]
            assert integers[9:11] == [64, of_queries]
            if command == 4:
                assert tensors[2] == at["value"] + 2 * of_keys * starts["key"][i]
                reference = made.reference("dominant")
                assert tensors[3] == reference + 4 * of_queries * starts["query"][i]
    assert verdict.floor_work(PACKED) == tuple(
        map(sum, zip(*(verdict.floor_work(one) for one in PACKED.sequences), strict=True))
    )


def test_a_reference_is_computed_once_a_kind_and_seed() -> None:
    made, device, kernel = opened(GEMM)
    for _ in range(2):
        made.load("random")
    assert [call[0] for call in kernel.calls].count(5) == 1
    made.open(GEMM, 8)
    made.load("random")
    assert [call[0] for call in kernel.calls].count(5) == 2
    made.close()
    assert len(device.live) == 1  # the result words


@pytest.mark.parametrize("is_overwritten", [True, False])
def test_a_reference_that_is_not_finite_is_computed_once_more(
    monkeypatch: pytest.MonkeyPatch, is_overwritten: bool
) -> None:
    made, _, kernel = opened(GEMM)
    made.load("random")
    compared: list[Comparison] = []

    def compare(*_: Any) -> Comparison:
        times = [call[0] for call in kernel.calls].count(5)
        broken = times == 1 or not is_overwritten
        compared.append(Comparison(32, NAN, NAN) if broken else GOOD)
        return compared[-1]

    monkeypatch.setattr(made, "compare", compare)
    monkeypatch.setattr(made, "_count", lambda band: 0)
    if is_overwritten:
        assert made.examine().status is Status.OK
    else:
        with pytest.raises(GateError, match="not finite"):
            made.examine()
    assert len(compared) == 2
    written = [tensors[2] for tensors, integers in kernel.given if integers[0] == 5]
    assert written == [made.reference("random")] * 2


def test_everything_is_armed() -> None:
    made, device, _ = opened(GEMM)
    made.load("random")
    device.filled.clear()
    made.arm()
    output = made.pointers["d"]
    assert (output, GEMM.output.bytes) in device.filled
    for operand in GEMM.operands:
        pointer = made.pointers[operand.name]
        assert (pointer - gate.GUARD_BYTES, gate.GUARD_BYTES) in device.filled
        assert (pointer + operand.bytes, gate.GUARD_BYTES) in device.filled
    assert (made.pointers["a"], GEMM.operands[0].bytes) not in device.filled


def test_a_gate_without_a_problem_says_so() -> None:
    made = Gate(FakeDevice(), FakeKernel())  # type: ignore[arg-type]
    with pytest.raises(BenchmarkError, match="no problem open"):
        made.load("random")


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 8), (8, 3), (1, 16)])
def test_a_causal_floor_counts_the_visible_pairs(queries: int, keys: int) -> None:
    problem = AttentionProblem(queries, keys, 64, heads_q=2, is_causal=True)
    flops, moved = verdict.floor_work(problem)
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
        flops, moved = verdict.floor_work(half)
        factors, out = 3 * 16 * 4, half.output.bytes
        assert verdict.floor_work(quantised) == (flops // 2, (moved - out) // 2 + out + factors)


def test_the_floor_of_e4m3_products_is_that_of_their_rate() -> None:
    half, quantised = (GemmProblem.parse(f"M=64,N=96,K=32,dtype={d}") for d in ("bf16", "e4m3"))
    assert verdict.floor_work(quantised) == (verdict.floor_work(half)[0] // 2, quantised.bytes)


def test_a_window_s_floor_counts_what_it_lets_through() -> None:
    problem = AttentionProblem(40, 64, 64, heads_q=2, window_left=3, window_right=5)
    flops, moved = verdict.floor_work(problem)
    pairs = sum(min(query + 5, 63) - max(query - 3, 0) + 1 for query in range(40))
    assert flops == 4 * 2 * 64 * pairs
    assert moved == 2 * 64 * 2 * (2 * 40 + 2 * 45)


def test_a_bias_s_floor_is_what_the_mask_lets_through() -> None:
    plain = replace(BIASED, bias="", is_alibi=False)
    (flops, moved), (flops_plain, moved_plain) = map(verdict.floor_work, (BIASED, plain))
    seen = 70 * 71 // 2  # of each head; the batch shares them, and slopes have four bytes
    assert (flops, moved - moved_plain) == (flops_plain, 2 * 4 * seen + 4 * 4)


def test_the_reference_is_given_bias_and_slopes() -> None:
    made, _, kernel = opened(BIASED)
    made.load("random")
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 4]
    at = made.pointers
    assert tensors[5:] == [0, 0, 0, at["bias"], at["slopes"]]
    assert integers[-3:] == [0, 70 * 90, 90]
    made, _, kernel = opened(ATTENTION)
    made.load("random")
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 4]
    assert (tensors[5:], integers[-3:]) == ([0] * 5, [0] * 3)


def test_slopes_leave_what_is_planted_on_top() -> None:
    means, _ = gate.moments(BIASED, "dominant")
    assert means["slopes"] * 90 <= gate.DOMINANCE
    means, deviations = gate.moments(BIASED, "random")
    assert means["slopes"] * 16 >= 1
    assert 0 < deviations["slopes"] < means["slopes"] / 3  # positive, and not all alike
    assert gate.moments(BIASED, "large_scores")[1]["bias"] == gate.LARGE


def test_the_floor() -> None:
    problem = GemmProblem(m=8192, n=8192, k=8192)
    floor = DEFAULT_GPU.floor_us(problem.flops, problem.bytes)
    assert "below" in verdict.too_fast(problem, DEFAULT_GPU, floor * 0.99)
    assert verdict.too_fast(problem, DEFAULT_GPU, floor * 1.01) == ""
    # No tensor-core work: 5 operations an element at the tensor cores' rate would be no floor.
    assert verdict.floor_work(SoftmaxProblem(rows=64, cols=64))[0] == 0
