"""Commands that the numerics gate gives its kernels, its inputs and its limits. The kernels
themselves are compared with numpy in tests/gpu/test_gate_gpu.py.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, cast

import pytest
from gate_fakes import (
    ATTENTION,
    BIASED,
    LATENT,
    PACKED,
    PAGED,
    FakeDevice,
    FakeKernel,
    answer_of,
    opened,
)

from tuner.base import resources
from tuner.compile.render import render
from tuner.errors import BenchmarkError, GateError
from tuner.measure.gate import REFERENCE, Gate, inputs
from tuner.measure.gate.commands import COMMANDS as DECLARED
from tuner.measure.gate.commands import Command
from tuner.measure.gate.inputs import KINDS, border_columns, kinds_of, scale_of
from tuner.measure.gate.kernels import E4M3_POISON, POISON, Answer, Guarded
from tuner.measure.gate.reference import References
from tuner.measure.log_sum_exp import judge_lse, lost_of, lse_of, tops_of
from tuner.measure.tolerance import (
    GRADIENT_PART,
    Limits,
    OutputComparison,
    floor_work,
    judge,
    limits_of,
)
from tuner.measurement import Status
from tuner.problem import (
    E4M3,
    AttentionBackwardProblem,
    AttentionProblem,
    DType,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
)

GEMM = GemmProblem(m=4, n=8, k=64)
SCALED = GemmProblem(4, 8, 64, dtype=E4M3, scales="row")
OUTPUT = GemmProblem(4, 16, 64, dtype=E4M3, dtype_d=E4M3)
BLOCKS = GemmProblem(300, 264, 400, dtype=E4M3, scales="block")
QUANTISED = AttentionProblem.parse("H=4,HKV=2,SQ=70,SKV=90,D=64,dtype=e4m3")
BACKWARD = AttentionBackwardProblem.parse("H=4,HKV=2,SQ=70,SKV=90,D=64,dtype=bf16")
GROUPED = GroupedGemmProblem(3, 7, 8, 64, sizes="sparse")
NAN = float("nan")
GOOD = OutputComparison(elements=32, error_squares=32e-8, reference_squares=32.0)


@pytest.mark.parametrize("kind", set(KINDS["attention"]) - {"huge_scores"})
def test_quantised_inputs_stand_for_what_others_are(kind: str) -> None:
    """Element times factor has the moments of the unquantised kind; nothing saturates."""
    means, deviations = inputs.moments(QUANTISED, kind)
    plain_means, plain_deviations = inputs.moments(ATTENTION, kind)
    for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
        factor = means[f"descale_{short}"]
        assert factor * deviations[name] == pytest.approx(plain_deviations.get(name, 1.0))
        assert factor * means.get(name, 0.0) == pytest.approx(plain_means.get(name, 0.0))
        assert 0 < deviations[f"descale_{short}"] < factor / 6  # positive, and not all alike
        # Planted queries are DOMINANCE times a key of at most five and a half deviations.
        most = inputs.DOMINANCE * (means.get("key", 0.0) + 5.5 * deviations["key"])
        assert most < 448


def test_the_template_and_the_gate_agree_on_the_poison() -> None:
    text = (resources.templates() / "reference.cu.j2").read_text()
    assert f"kPoison = 0x{POISON:X}" in text
    assert POISON & 0x7C00 == 0x7C00 and POISON & 0x3FF  # a NaN in fp16
    assert POISON & 0x7F80 == 0x7F80 and POISON & 0x7F  # and in bf16, so in the upper half of fp32


def test_the_template_has_a_case_for_each_command() -> None:
    """Commands with a kernel for each type, commands whose integers name it, and the others."""
    text = (resources.templates() / "reference.cu.j2").read_text()
    typed, _, plain = text.partition("int run_typed(")[2].partition("inline int run(")
    cases = [re.findall(r"case Command::(\w+):", part) for part in (typed, plain)]
    kinds: tuple[list[str], list[str]] = ([], [])
    for command in Command:
        kinds["dtype" not in DECLARED[command].integers].append(command.name.lower())
    assert [sorted(one) for one in cases] == [sorted(one) for one in kinds]


def test_commands_count_from_zero_as_the_enum_of_the_template_does() -> None:
    assert [*Command] == [*range(len(DECLARED))] and {*DECLARED} == {*Command}
    names = ", ".join(command.name.lower() for command in Command)
    assert f"enum class Command : int64_t {{ {names} }};" in render(REFERENCE, "gate")


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


@pytest.mark.parametrize(
    ("dtype", "largest", "score"),
    [("float16", 65504.0, 1e9), ("bfloat16", 3e38, 1e12), ("float8_e4m3fn", 448.0, 5e8)],
)
def test_huge_scores_are_as_large_as_the_type_allows(
    dtype: str, largest: float, score: float
) -> None:
    """Nothing planted overflows, and scores run from 1e4 up; they are exact in fp32."""
    problem = AttentionProblem(64, 64, 64, dtype=cast(DType, dtype))
    exponents, key = inputs.HUGE_EXPONENTS[dtype]
    means, deviations = inputs.moments(problem, "huge_scores")
    assert means["key"] == 2.0**key
    assert deviations["key"] == 0
    assert 2.0 ** exponents[-1] <= largest
    assert 2.0 ** (key + 1) <= largest
    factor = 64 * scale_of(problem, "huge_scores")
    factor *= means.get("descale_q", 1.0) * means.get("descale_k", 1.0)
    assert 2.0 ** (exponents[0] + key) * factor <= 2e4 or dtype == "float8_e4m3fn"
    assert 2.0 ** (exponents[-1] + key) * factor >= score


def test_few_rows_of_long_attention_have_huge_scores() -> None:
    """Kernels compute such rows once more, at a thousandth of their usual speed."""
    short = AttentionProblem.parse("H=16,S=1024,D=64")
    long = AttentionProblem.parse("H=40,HKV=8,S=16384,D=128,dtype=bf16")
    assert inputs.huge_every(short) == inputs.huge_every(BACKWARD) == 1
    every = inputs.huge_every(long)
    assert 2 <= every <= 128, "at least one row of a kernel's tile"
    assert long.flops / 4 / every <= inputs.HUGE_PRODUCTS


def test_nothing_is_added_to_huge_scores() -> None:
    """In fp32 it would be lost beside them, in the reference it would not."""
    problem = AttentionProblem.parse("H=2,S=64,D=64,bias=h")
    means, deviations = inputs.moments(problem, "huge_scores")
    assert (means.get("bias", 0.0), deviations["bias"]) == (0, 0)


def test_own_kernels_are_checked_on_every_kind_and_vendors_on_usual_ones() -> None:
    e4m3 = GemmProblem.parse("M=16,N=16,K=32,dtype=e4m3")
    for problem in (ATTENTION, BACKWARD, e4m3):
        assert kinds_of(problem) == KINDS[problem.op]
    for problem in (ATTENTION, BACKWARD):
        spared = set(KINDS[problem.op]) - set(kinds_of(problem, is_vendor=True))
        assert spared == {"huge_scores"}
    assert kinds_of(e4m3, is_vendor=True) == KINDS["gemm"]
    assert kinds_of(GEMM) == ("planted", "random"), "signs matter to sums of e4m3 alone"


def test_a_kernel_that_ignores_its_scale_is_seen() -> None:
    assert scale_of(ATTENTION) == pytest.approx(64**-0.5)
    assert scale_of(ATTENTION, "dominant") != scale_of(ATTENTION)


#: Command, tensors, integers and scalars as the template's opening comment lists them.
COMMANDS = {
    "gemm": [*[(0, 1, 4, 2)] * 2, (2, 1, None, 1), (5, 7, 19, 2), *[(9, 2, 2, 0)] * 2],
    "scaled": [*[(0, 1, 4, 2)] * 4, (2, 1, None, 1), (5, 7, 19, 2), *[(9, 2, 2, 0)] * 4],
    "blocks": [*[(0, 1, 4, 2)] * 4, *[(2, 1, None, 1)] * 3, (5, 7, 19, 2), *[(9, 2, 2, 0)] * 4],
    "attention": [
        *[(0, 1, 4, 2)] * 3, (1, 2, 17, 1), (4, 12, 26, 2), *[(9, 2, 2, 0)] * 3,
    ],
    "biased": [
        *[(0, 1, 4, 2)] * 4, (1, 2, 17, 1), (4, 12, 26, 2), *[(9, 2, 2, 0)] * 4,
    ],
    "swiglu": [
        *[(0, 1, 4, 2)] * 2, (2, 1, None, 1), (5, 7, 19, 2), (10, 2, 7, 0), *[(9, 2, 2, 0)] * 2,
    ],
    "grouped_gemm": [
        *[(0, 1, 4, 2)] * 2, (2, 1, None, 1), *[(5, 7, 19, 2)] * 2, *[(9, 2, 2, 0)] * 3,
    ],
    "backward": [
        *[(0, 1, 4, 2)] * 6, (1, 2, 17, 1), (4, 12, 26, 2), (16, 4, 4, 0), (15, 10, 22, 2),
        *[(9, 2, 2, 0)] * 6,
    ],
    "softmax": [(0, 1, 4, 2), (3, 1, 6, 1), (6, 2, 5, 1), (9, 2, 2, 0)],
    "e4m3": [
        *[(0, 1, 4, 2)] * 6, (1, 2, 17, 1), (4, 12, 26, 2), *[(9, 2, 2, 0)] * 6,
    ],
    "varlen": [
        *[(0, 1, 4, 2)] * 3, *[(1, 2, 17, 1)] * 3, *[(4, 12, 26, 2)] * 3, *[(9, 2, 2, 0)] * 5,
    ],
    "paged": [
        *[(0, 1, 4, 2)] * 4, *[(1, 2, 17, 1)] * 2, *[(14, 3, 8, 0)] * 4, *[(4, 12, 26, 2)] * 3,
        *[(9, 2, 2, 0)] * 7,
    ],
    "latent": [
        *[(0, 1, 4, 2)] * 2, *[(1, 2, 17, 1)] * 2, *[(14, 3, 8, 0)] * 2, *[(4, 12, 26, 2)] * 3,
        *[(9, 2, 2, 0)] * 5,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (GEMM, "gemm"),
        (SCALED, "scaled"),
        (BLOCKS, "blocks"),
        (SwigluProblem(4, 32, 64), "swiglu"),
        (GROUPED, "grouped_gemm"),
        (ATTENTION, "attention"),
        (BIASED, "biased"),
        (BACKWARD, "backward"),
        (SoftmaxProblem(rows=6, cols=9), "softmax"),
        (QUANTISED, "e4m3"),
        (PACKED, "varlen"),
        (PAGED, "paged"),
        (LATENT, "latent"),
    ],
)
def test_arguments_have_the_template_s_lengths(problem: Problem, name: str) -> None:
    made, _, kernel = opened(problem)
    made.load(KINDS[problem.op][0])
    assert len(kernel.calls) == len(COMMANDS[name])
    for seen, wanted in zip(kernel.calls, COMMANDS[name], strict=True):
        assert [s for s, w in zip(seen, wanted, strict=True) if w is not None and s != w] == []


def test_latent_values_are_read_from_the_keys() -> None:
    made, _, kernel = opened(LATENT)
    made.load("random")
    names = DECLARED[Command.ATTENTION]
    launches = [(t, n) for t, n in kernel.given if n[0] == Command.ATTENTION]
    for tensors, integers in launches:
        at = dict(zip(names.tensors, tensors, strict=True))
        n = dict(zip(names.integers, integers, strict=True))
        assert at["value"] == at["key"]
        assert (n["value_row"], n["key_row"], n["value_dim"]) == (576, 576, 512)
    starts = [tensors[1] for tensors, _ in launches]
    assert [b - a for a, b in pairwise(starts)] == [2 * 576 * 40] * 2, "rows of each sequence"


def test_gradients_are_checked_on_huge_scores_that_give_zero() -> None:
    """Keys alike but one a head, queries of one value each, an output's gradient of zero: an
    infinite probability makes NaN of it, any other makes zero.
    """
    made, _, kernel = opened(BACKWARD)
    made.load("huge_scores")
    at = made.pointers
    given = list(zip(kernel.given, kernel.scalars, strict=True))
    fills = {tensors[0]: scalars for (tensors, (command, *_)), scalars in given if command == 0}
    exponents, exponent = inputs.HUGE_EXPONENTS["bfloat16"]
    assert fills[at["grad_out"]] == (0.0, 0.0)
    assert fills[at["key"]] == (2.0**exponent, 0.0)
    assert fills[at["value"]] == (0.0, 1.0)
    [(tensors, integers, scalars)] = [(*call, s) for call, s in given if call[1][0] == 11]
    assert tensors == [at["query"], at["key"]]
    assert integers[2:8] == [1, 4, 2, 70, 90, 64]
    assert scalars == (exponents.start, len(exponents))
    assert scale_of(BACKWARD, "huge_scores") == scale_of(BACKWARD)


def test_gradients_have_the_rounded_output_and_limits_of_their_own_scale() -> None:
    made, _, kernel = opened(BACKWARD)
    made.load("random")
    [(tensors, _)] = [given for given in kernel.given if given[1][0] == 15]
    assert tensors[4] == made.pointers["out"]
    kernel.calls.clear()
    kernel.scalars.clear()
    assert made.examine().status is Status.OK
    limits = [s for s, call in zip(kernel.scalars, kernel.calls, strict=True) if call[0] == 7]
    count = len(BACKWARD.outputs)
    assert len(limits) == 2 * count
    pairs = zip(limits[:count], limits[count:], BACKWARD.outputs, strict=True)
    for first, second, output in pairs:
        rms = 1 / output.elements**0.5  # of a reference whose squares add up to one
        assert second[0] - first[0] == pytest.approx(GRADIENT_PART["bfloat16"] * rms)
        assert second[1:] == first[1:]


def test_gradients_of_packed_sequences_are_computed_one_by_one() -> None:
    problem = AttentionBackwardProblem.parse("B=2,H=1,S=2,D=8,varlen=1,dtype=bf16")
    first, second = problem.forward.lengths_q
    made, device, kernel = opened(problem)
    made.load("random")
    at = made.pointers
    assert device.written[at["cu_seqlens_q"]] == struct.pack("<3i", 0, first, first + second)
    given = [given for given in kernel.given if given[1][0] == 15]
    assert [integers[5:7] for _, integers in given] == [[first] * 2, [second] * 2]
    names = "query", "key", "value", "grad_out", "out"
    for (tensors, _), row in zip(given, (0, first), strict=True):
        assert tensors[:5] == [at[name] + 16 * row for name in names]
        grads = [made.reference("random", operand.name) for operand in problem.outputs]
        assert tensors[7:] == [grad + 32 * row for grad in grads]
    # The device's statistics are a maximum of zero, and sums of one and of zero.
    assert struct.unpack("<3f", device.written[at["logsumexp"]]) == (0, -math.inf, -math.inf)
    [(_, integers)] = [given for given in kernel.given if given[1][0] == 16]
    assert integers[2:] == [3 * 8, 0]


def test_planted_e4m3_columns_do_not_saturate() -> None:
    _, deviations = inputs.moments(SCALED, "planted")
    assert 7 * inputs.E4M3_COLUMN_FACTOR * deviations["a"] <= 448
    made, _, kernel = opened(SCALED)
    made.load("planted")
    assert (inputs.E4M3_COLUMN_FACTOR,) in kernel.scalars
    assert (inputs.COLUMN_FACTOR,) not in kernel.scalars


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_a_product_s_reference_is_given_its_factors(scales: Any) -> None:
    made, _, kernel = opened(replace(SCALED, scales=scales))
    made.load("random")
    [(tensors, integers)] = [given for given in kernel.given if given[1][0] == 5]
    at = made.pointers
    assert tensors == [
        *(at["a"], at["b"], made.reference("random"), 0, 0, at["scale_a"], at["scale_b"])
    ]
    stride = 4 if scales == "block" else 0  # four rows side by side
    assert (integers[1], *integers[-2:]) == (3, int(scales == "row"), stride)
    made, _, kernel = opened(GEMM)
    made.load("random")
    [(tensors, _)] = [given for given in kernel.given if given[1][0] == 5]
    assert tensors[3:] == [0, 0, 0, 0]


def test_an_output_of_e4m3_is_all_nan_before_and_its_factor_the_reference_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, device, kernel = opened(OUTPUT)
    factor = made.pointers["scale_d"]
    monkeypatch.setattr(device, "read", lambda at, size: struct.pack("<f", 3.0) * (at == factor))
    made.load("random")
    pairs = zip(kernel.given, kernel.scalars, strict=True)
    [scalars] = [scalars for (_, integers), scalars in pairs if integers[0] == 5]
    assert scalars == (3.0, 1.0)
    made.arm()
    assert device.patterns[made.pointers["d"]] == E4M3_POISON


@pytest.mark.parametrize("kind", ["random", "planted"])
@pytest.mark.parametrize("k", [16, 128, 4096])
def test_rounding_to_e4m3_passes_and_a_factor_left_out_does_not(kind: str, k: int) -> None:
    """Outputs of the gate's moments, rounded by PyTorch, or by another unit or factor."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(k)
    problem = replace(OUTPUT, m=256, n=256, k=k)
    means, deviations = inputs.moments(problem, kind)
    a = torch.randn(256, k).mul(deviations["a"])
    if kind == "planted":
        a[:, inputs.border_columns(k, 7)] *= inputs.E4M3_COLUMN_FACTOR
    a, b = a.to(torch.float8_e4m3fn), torch.randn(k, 256).mul(deviations["b"])
    factors = means["scale_a"] * means["scale_b"] * means["scale_d"]
    exact = a.double() @ b.to(torch.float8_e4m3fn).double() * factors
    assert exact.abs().max() < 448

    def verdict(found: Any) -> Status:
        limits, off = limits_of(problem), (found.double() - exact).abs()
        beyond = off > limits.absolute + limits.relative * exact.abs()
        squares = float(off.square().sum()), float(exact.square().sum())
        seen = OutputComparison(exact.numel(), *squares, int(beyond.sum()), worst=float(off.max()))
        return judge(seen, problem.output, {}, [], limits).status

    small = exact.float().to(torch.float8_e4m3fn)
    assert verdict(small) is Status.OK
    assert verdict((exact * 0.9).float().to(torch.float8_e4m3fn)) is Status.WRONG_RESULT
    assert verdict(exact.float().to(torch.float8_e5m2)) is Status.WRONG_RESULT
    cut = (small.view(torch.uint8) - (small.double().abs() > exact.abs()).byte()).view(small.dtype)
    assert verdict(cut) is Status.WRONG_RESULT  # towards zero


def test_some_factors_of_blocks_are_unlike_their_neighbours() -> None:
    made, _, kernel = opened(BLOCKS)
    made.load("planted")
    at, planted = made.pointers, [given for given in kernel.given if given[1][0] == 2]
    [_, (of_a, rows), (of_b, columns)] = planted
    assert (of_a, of_b) == ([at["scale_a"]], [at["scale_b"]])
    # fp32, four blocks of K, one row or block of columns each of those that are named.
    borders = inputs.border_columns(300, 7)
    assert rows[1:] == [2, 1, 4, 4 * 300, 300, 1, len(borders), *borders]
    assert columns[1:] == [2, 1, 4, 3 * 4, 1, 4, 1, 2]
    assert kernel.scalars.count((inputs.SMALL_FACTOR,)) == 2


@pytest.mark.parametrize("dtype", ["float16", E4M3])
def test_scaled_products_have_a_deviation_of_one(dtype: Any) -> None:
    problem = GemmProblem(64, 64, 4096, dtype=dtype, scales="row")
    means, deviations = inputs.moments(problem, "random")
    product = deviations.get("a", 1.0) * deviations["b"] * means["scale_a"] * means["scale_b"]
    assert product * problem.k**0.5 == pytest.approx(1)
    for name in ("scale_a", "scale_b"):
        assert deviations[name] == inputs.DESCALE_SPREAD * means[name]


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
    assert floor_work(GROUPED)[1] == GROUPED.bytes < sum(o.bytes for o in GROUPED.operands)


def test_rows_that_lie_apart_are_checked_where_they_lie() -> None:
    """All of the memory between the first and the last element is filled, and must not change."""
    m, n, k = GEMM.m, GEMM.n, GEMM.k
    strides = {"a": (m * k, k + 8, 1), "b": (n * k, 1, k + 24)}
    device, kernel = FakeDevice(), FakeKernel()
    made = Gate(device, kernel)  # type: ignore[arg-type]
    made.open(GEMM, 7, strides)
    made.load("planted")
    sizes = {name: guarded.bytes for name, guarded in made.operands.items()}
    assert sizes["a"] == 2 * ((m - 1) * (k + 8) + k) and sizes["b"] == 2 * ((n - 1) * (k + 24) + k)
    of = {integers[0]: integers for _, integers in kernel.given}
    assert of[2][4:7] == [m * k, k + 8, 1], "columns of A are scaled where they are"
    assert of[5][6:12] == [*strides["a"], *strides["b"]]
    filled = [integers[2] for _, integers in kernel.given if integers[0] == 0]
    assert filled == [sizes["a"] // 2, sizes["b"] // 2]
    made.open(GEMM, 7)
    assert made.operands["a"].bytes == 2 * m * k, "another layout has buffers of its own"


def test_a_log_sum_exp_of_e4m3_may_lose_what_tensor_cores_cut_off() -> None:
    plain = AttentionProblem.parse("S=64,D=64")
    quantised = AttentionProblem.parse("S=64,D=64,dtype=e4m3")
    tops = [150.0, -3.0, -math.inf]
    assert lost_of(plain, 30.0, tops) is None
    unit = 8 * 1.25 * 2.1e-5 * 8
    assert lost_of(quantised, 30.0, tops) == pytest.approx([150 * unit, 30 * unit, math.inf])
    lost = lost_of(quantised, 1.0, [1.0])
    assert judge_lse([1.0 + lost[0]], [1.0], lost).status is Status.OK
    assert judge_lse([1.0 + lost[0]], [1.0]).status is Status.WRONG_RESULT
    assert judge_lse([1.01 + lost[0]], [1.0], lost).status is Status.WRONG_RESULT
    assert judge_lse([0.0], [-math.inf], [math.inf]).status is Status.WRONG_RESULT


def test_largest_scores_of_packed_sequences_lie_as_the_log_sum_exp() -> None:
    problem = AttentionProblem.parse("B=2,S=4,D=8,H=2,varlen=1")
    rows = 2 * sum(problem.lengths_q)
    statistics = [value for row in range(rows) for value in (float(row), 1.0)]
    assert tops_of(problem, statistics) == lse_of(problem, statistics)
    assert tops_of(problem, statistics) != sorted(tops_of(problem, statistics))


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


def test_a_reference_whose_memory_ran_out_is_not_taken_for_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, _, kernel = opened(SwigluProblem(4, 32, 64))

    def refuse(references: References, use: str, size: int) -> int:
        raise BenchmarkError("no memory", status=Status.OUT_OF_MEMORY)

    with monkeypatch.context() as patched:
        patched.setattr(References, "_temporarily", refuse)
        with pytest.raises(BenchmarkError, match="no memory"):
            made.load("random")
    made.load("random")
    assert [call[0] for call in kernel.calls].count(5) == 1


@pytest.mark.parametrize("is_overwritten", [True, False])
def test_a_reference_that_is_not_finite_is_computed_once_more(
    monkeypatch: pytest.MonkeyPatch, is_overwritten: bool
) -> None:
    made, _, kernel = opened(GEMM)
    made.load("random")
    compared: list[OutputComparison] = []

    def compare(*_: Any) -> Answer:
        times = [call[0] for call in kernel.calls].count(5)
        broken = times == 1 or not is_overwritten
        compared.append(OutputComparison(32, NAN, NAN) if broken else GOOD)
        return answer_of(compared[-1])

    monkeypatch.setattr(made._kernels, "compare", compare)
    if is_overwritten:
        assert made.examine().status is Status.OK
    else:
        with pytest.raises(GateError, match="not finite"):
            made.examine()
    assert len(compared) == 2
    written = [tensors[2] for tensors, integers in kernel.given if integers[0] == 5]
    assert written == [made.reference("random")] * 2


def test_a_gate_without_a_problem_says_so() -> None:
    made = Gate(FakeDevice(), FakeKernel())  # type: ignore[arg-type]
    with pytest.raises(BenchmarkError, match="no problem open"):
        made.load("random")


class TestLogSumExp:
    ROWS = ATTENTION.batch * ATTENTION.heads_q * ATTENTION.seqlen_q

    def loaded(self, with_lse: bool) -> tuple[Gate, FakeDevice, FakeKernel]:
        gate, device, kernel = opened(ATTENTION)
        gate.load("random", with_lse=with_lse)
        return gate, device, kernel

    def test_statistics_are_kept_where_they_are_wanted(self) -> None:
        for with_lse in (False, True):
            gate, device, kernel = self.loaded(with_lse)
            (given,) = [tensors for tensors, integers in kernel.given if integers[0] == 4]
            assert given[4] in device.live
            assert (gate._opened()[1].references.statistics("random") == given[4]) == with_lse
            gate.close()
            assert given[4] not in device.live

    def test_a_reference_without_statistics_is_computed_again(self) -> None:
        gate, _, kernel = self.loaded(False)
        gate.load("random", with_lse=True)
        gate.load("random", with_lse=True)
        assert [call[0] for call in kernel.calls].count(4) == 2

    @pytest.mark.parametrize("is_wrong", [False, True])
    def test_every_row_is_compared(self, monkeypatch: pytest.MonkeyPatch, is_wrong: bool) -> None:
        gate, _, _ = self.loaded(True)
        lse = Guarded("lse", 64, 4 * self.ROWS)
        last = 4.0 if is_wrong else 3.0

        def fetch(pointer: int, size: int) -> Answer:
            answer = Answer()
            answer.data = struct.pack("<2d", 3.0, 1.0) * (size // 16)
            if pointer == lse.pointer:
                answer.data = struct.pack(f"<{self.ROWS}f", *[3.0] * (self.ROWS - 1), last)
            return answer

        monkeypatch.setattr(gate._kernels, "fetch", fetch)
        verdict = gate.examine(lse=lse)
        assert verdict.status is (Status.WRONG_RESULT if is_wrong else Status.OK)
        assert (f"first row {self.ROWS - 1}" in verdict.log) == is_wrong

    def test_it_must_be_asked_for(self) -> None:
        gate, *_ = self.loaded(False)
        with pytest.raises(BenchmarkError, match="no log-sum-exp to compare with"):
            gate.examine(lse=Guarded("lse", 64, 4 * self.ROWS))


@pytest.mark.parametrize(
    ("label", "is_judged"),
    [
        ("scales=row,fast_accum=0", True),
        ("scales=row,fast_accum=1", False),
        ("scales=tensor,fast_accum=1", False),
        ("scales=block", True),
    ],
)
def test_all_positive_inputs_judge_sums_that_are_to_be_exact(label: str, is_judged: bool) -> None:
    """The others' loss is in the verdict's error, and no limit judges it."""
    problem = GemmProblem.parse(f"M=16,N=128,K=128,dtype=e4m3,{label}")
    made, _, _ = opened(problem)
    limits: list[Limits] = []

    def compared(*arguments: Any) -> Answer:
        limits.append(arguments[3])
        return answer_of(OutputComparison(16 * 128, error_squares=0.25, reference_squares=1.0))

    made._kernels.compare = compared  # type: ignore[assignment,method-assign]
    for kind in kinds_of(problem):
        made.load(kind)
        made.arm()
        verdict = made.examine()
        is_lifted = kind == "positive" and not is_judged
        assert verdict.status is (Status.OK if is_lifted else Status.WRONG_RESULT)
        assert verdict.error == pytest.approx(0.5)
        assert (limits[-1].absolute == math.inf) is is_lifted
