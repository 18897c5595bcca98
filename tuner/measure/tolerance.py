"""Limits of an output's error, and verdicts on comparisons and times. Pure functions.

A time that the chip cannot reach is also a failure (`too_fast`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.errors import GateError
from tuner.families.collective import PROMOTED_K
from tuner.hardware import Gpu
from tuner.measurement import Status
from tuner.problem import (
    DTYPE_BYTES,
    E4M3,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Operand,
    Problem,
    SwigluProblem,
)

#: Spacing of fp16's subnormal numbers, the best precision of rounding there.
_FP16_SUBNORMAL_STEP = 2.0**-24


@dataclass(frozen=True)
class Limits:
    """Limits of an output's error against the fp64 reference."""

    frobenius: float
    """Relative Frobenius norm of the error."""
    absolute: float
    relative: float
    row: float = 0.0
    """Every element: `allowed`."""
    whole: float = 0.0
    """Part of the reference's root mean square that is added to `absolute`: `resolved`."""
    floor: float = 0.0
    """Root mean square of an error that is allowed beside `frobenius`."""

    def allowed(self, reference: float, row_rms: float = 0.0) -> float:
        """Limit of an element's absolute error, as the gate's compare kernel computes it.

        Args:
            reference: reference value of the element.
            row_rms: root mean square of the reference over its row: the output's elements along
                the axis of unit stride, the head dimension of attention.
        """
        return self.absolute + self.relative * abs(reference) + self.row * row_rms

    def times(self, factor: float) -> Limits:
        """Limits of an error that is larger by a factor than that of rounding the output."""
        grown = {name: factor * value for name, value in vars(self).items() if name != "relative"}
        return replace(self, **grown)

    def resolved(self, rms: float) -> Limits:
        """Limits for a reference of this root mean square, with the whole's part in `absolute`."""
        return replace(self, absolute=self.absolute + self.whole * rms, whole=0.0)

    @property
    def lifted(self) -> Limits:
        """No limits, for an error that is only reported."""
        return replace(self, frobenius=math.inf, absolute=math.inf)

    @property
    def text(self) -> str:
        """Formula of `allowed`, as text."""
        row = f" + {self.row:.3g} x row's RMS" if self.row else ""
        return f"{self.absolute:.3g} + {self.relative:.3g} x |reference|{row}"


#: Parts of the root mean squares of a gradient's row and of the whole gradient that an element may
#: be off by, beside the usual limits, which are for outputs of deviation 1. A gradient of few keys
#: is a sum over thousands of queries. Kernels round its terms, so that an element's error scales
#: with the terms and not with their sum.
GRADIENT_PART = {"float16": 2e-3, "bfloat16": 1.6e-2}
#: Error of a sum of products in fp32, relative to their number: units in the last place of 2^-23,
#: for each of two sums, the row's and the score's.
FP32_SUMS = 2.0**-22


#: Standard deviation of the relative error of a probability rounded to e4m3: uniform within a
#: spacing of 2^-3 to 2^-4 of it, its logarithm uniform over an octave, 2^-3 / sqrt(12) * sqrt(3 /
#: (8 ln 2)).
E4M3_ROUNDING = 0.0266
#: WGMMA adds the products of 8-bit operands to an accumulator of 13 mantissa bits and cuts off the
#: rest: half a unit on average each time, once for every `E4M3_DEPTH` keys.
E4M3_TRUNCATION, E4M3_DEPTH = 2.0**-14, 32
#: Allowed error over the expected error of a correct kernel.
E4M3_MARGIN = 1.25
#: An element of e4m3 attention, relative to the root mean square of its row (`limits_of`).
E4M3_ROW = 2.0**-4 * 8


#: Error of a sum of e4m3 products in the tensor cores' accumulators, relative to the sum, over the
#: root of the number of products. Bits more than 13 below the largest of 32 products and their sum
#: are cut off, and such errors have either sign. Source: the emulation in
#: `tests/unit/test_e4m3_arithmetic.py`.
E4M3_SUM = 2.1e-5
#: Limit of an element's error in units of that standard deviation.
E4M3_DEVIATIONS = 8
#: Mean factor of outputs of e4m3, whose elements it makes as wide. Six deviations of planted ones
#: stay below 448, and hardly any is subnormal.
E4M3_OUTPUT = 4.0
#: Largest error of a number rounded to e4m3, relative to it: half of a unit of three mantissa bits.
#: Numbers below 2^-6 are multiples of 2^-9.
E4M3_HALF_UNIT, E4M3_SUBNORMAL_HALF = 2.0**-4, 2.0**-10

#: Limits by the output's type. fp16's are chosen. Its rounding makes a relative error of 2.1e-4, by
#: the formula of `E4M3_ROUNDING` with 10 mantissa bits. The first limit is five times that, for
#: roundings on the way, such as attention's probabilities. bf16 has 3 mantissa bits fewer than
#: fp16, so its limits are 8 times as large. fp32 results of 16-bit operands differ from the
#: reference only by accumulation, well within fp16's limits. e4m3's are those of its rounding.
LIMITS = {
    "float16": Limits(1e-3, 2e-3, 2e-3),
    "bfloat16": Limits(8e-3, 1.6e-2, 1.6e-2),
    "float32": Limits(1e-3, 2e-3, 2e-3),
    E4M3: Limits(E4M3_MARGIN * E4M3_ROUNDING, E4M3_SUBNORMAL_HALF, E4M3_HALF_UNIT),
}


def limits_of(
    problem: Problem,
    output: str = "",
    deviation: float = 1.0,
    query_offset: float = 1.0,
    key_offset: float = 1.0,
) -> Limits:
    """Limits of the error of an output of `problem`, by default its only one.

    The gradient of keys is linear in the queries, so its absolute limit grows with their
    `deviation`. Planted queries of few columns have a large one.

    The derivatives of a row add up to zero, so the mean of the keys has no part in the gradient of
    its query. It has one in the error: the sum of the derivatives' roundings times that mean. The
    limits of that gradient grow with `key_offset`, the keys' root mean square over their deviation.

    The gradient of a key is the sum of its column's derivatives times the queries' mean, but for
    what queries differ by. Columns of few keys may nearly add up to zero, and roundings do not. The
    limits of that gradient grow with `query_offset`.

    e4m3 GEMMs have the limits of 16-bit ones, plus the accumulators' truncation over the products
    that stay in them. Outputs of e4m3 have its rounding in place of 16 bits', and the truncation
    times their factor. e4m3 attention is judged against the exact result of its quantised inputs.
    Its remaining error is the rounding of the probabilities, and the accumulators' truncation,
    which grows with the keys.

    An element of that attention is ``sum(p_j * v_j)``, and its error ``sum(d_j * p_j * v_j)``. The
    relative roundings d_j are at most 2^-4: e4m3 has three mantissa bits (Micikevicius et al., "FP8
    Formats for Deep Learning", 2022, table 1). They are independent from key to key.

    - Many keys have weight: the error over the row's root mean square is normal with the deviation
      `E4M3_ROUNDING`, for both grow alike with the keys. Eight deviations are 0.21.
    - One key has all the weight: the row is its value, and an element is off by 2^-4 of itself. No
      element exceeds eight times the row's root mean square: 0.5. Kernels that scale the largest
      probability to a power of two round it exactly; vendors' need not.

    The limit is the larger, `E4M3_ROW`. A row that a kernel left out is off by its own elements,
    and 62 % of normal elements exceed the limit.
    """
    if isinstance(problem, AttentionBackwardProblem):
        part, floor = GRADIENT_PART[problem.dtype], _gradient_floor(problem, output)
        limits = replace(LIMITS[problem.dtype], row=part, whole=part, floor=floor)
        if output == "grad_query":
            return limits.times(key_offset)
        factor = deviation if output == "grad_key" else 1.0
        limits = limits.times(query_offset) if output == "grad_key" else limits
        return replace(limits, absolute=factor * limits.absolute, floor=factor * limits.floor)
    usual = LIMITS[problem.output.dtype]
    wide = E4M3_OUTPUT if problem.output.dtype == E4M3 else 1.0
    if isinstance(problem, GemmProblem | GroupedGemmProblem) and problem.dtype == E4M3:
        depth = min(problem.k, PROMOTED_K)
        if isinstance(problem, GemmProblem) and problem.fast_accum and problem.scales != "block":
            depth = problem.k
        lost = E4M3_MARGIN * E4M3_SUM * math.sqrt(depth)
        return Limits(
            math.hypot(usual.frobenius, lost),
            usual.absolute + wide * E4M3_DEVIATIONS * lost,
            usual.relative,
        )
    if not isinstance(problem, AttentionProblem) or problem.dtype != E4M3:
        return usual
    truncation = E4M3_TRUNCATION * math.ceil(problem.seqlen_kv / E4M3_DEPTH)
    frobenius = E4M3_MARGIN * (E4M3_ROUNDING + truncation)
    return Limits(frobenius, _FP16_SUBNORMAL_STEP, 2 * truncation, E4M3_ROW)


def _gradient_floor(problem: AttentionBackwardProblem, output: str) -> float:
    """Root mean square of a correct kernel's error where the exact gradient is zero, for inputs of
    deviation 1.

    A query that sees one key has no derivatives: the products of the value and of the output with
    the output's gradient are equal. In fp32 their difference is up to `FP32_SUMS` times D, times
    the probability. In fp16 derivatives and probabilities may be subnormal. Keys and queries take
    these errors on to the gradients, where those of different pairs are independent.
    """
    left, right = problem.visible
    queries = min(problem.seqlen_q, problem.seqlen_kv + left)
    keys = min(problem.seqlen_kv, problem.seqlen_q + right)
    pairs = problem.forward.pairs
    probability = min(1.0, queries / pairs)
    sums = 0.0 if output == "grad_value" else FP32_SUMS * problem.head_dim * probability
    step = _FP16_SUBNORMAL_STEP / math.sqrt(12) if problem.dtype == "float16" else 0.0
    terms = pairs / queries
    if output != "grad_query":
        terms = pairs / keys * problem.heads_q / problem.heads_kv
    scale = 1.0 if output == "grad_value" else 1 / math.sqrt(problem.head_dim)
    return scale * math.hypot(sums, step) * math.sqrt(terms)


@dataclass(frozen=True)
class OutputComparison:
    """Result of comparing an output with its reference."""

    elements: int
    error_squares: float = 0.0
    reference_squares: float = 0.0
    beyond: int = 0
    not_finite: int = 0
    poisoned: int = 0
    worst: float = 0.0
    first: int = 0

    @property
    def is_sound(self) -> bool:
        """False if the reference is not finite, since differences from it cannot be detected."""
        return math.isfinite(self.error_squares + self.reference_squares)

    @classmethod
    def unpack(cls, data: bytes, elements: int) -> OutputComparison:
        """Read the eight words that the template's compare command writes."""
        error, reference, beyond, not_finite, poisoned, worst, last, _ = struct.unpack(
            "<2d3Qd2Q", data
        )
        first = ~last & (2**64 - 1)
        return cls(elements, error, reference, beyond, not_finite, poisoned, worst, first)


@dataclass(frozen=True)
class Verdict:
    """Result of a check. A candidate passes if `status` is OK."""

    status: Status
    error: float | None = None
    """Relative Frobenius error of the finite elements."""
    log: str = ""


def judge(
    comparison: OutputComparison,
    operand: Operand,
    strayed: Mapping[str, int],
    changed: Sequence[str],
    limits: Limits | None = None,
) -> Verdict:
    """Make a verdict from a comparison and the checks of the buffers.

    Args:
        comparison: result of comparing the output with the reference.
        operand: operand that is the output.
        strayed: number of 16-bit words written in each buffer's guard bands.
        changed: names of inputs whose contents changed.
        limits: limits of the problem (`limits_of`); None: those of the output's type.

    Raises:
        GateError: when the reference is not finite, so that the output cannot be judged.
    """
    limits = limits or LIMITS[operand.dtype]
    error: float | None = None
    if comparison.is_sound:
        error = math.sqrt(comparison.error_squares / max(comparison.reference_squares, 1e-300))
    if any(strayed.values()) or changed:
        texts = [f"{2 * n} bytes beside '{name}' were written" for name, n in strayed.items() if n]
        texts += [f"input '{name}' was changed" for name in changed]
        return Verdict(Status.OUT_OF_BOUNDS, error, "; ".join(texts))
    if error is None:
        raise GateError(f"the reference of '{operand.name}' {operand.shape} is not finite")
    where = f"first at {_position(comparison.first, operand)} of {operand.shape}"
    if comparison.not_finite:
        text = f"{comparison.not_finite} of {comparison.elements} elements are NaN or infinite"
        return Verdict(Status.NOT_FINITE, None, f"{text}, {where}")
    if comparison.poisoned:
        text = (
            f"{comparison.poisoned} of {comparison.elements} elements were never written, {where}"
        )
        return Verdict(Status.WRONG_RESULT, None, text)
    allowed = limits.frobenius * math.sqrt(comparison.reference_squares)
    allowed += limits.floor * math.sqrt(comparison.elements)
    if operand.dtype == "float16":
        allowed += _FP16_SUBNORMAL_STEP / math.sqrt(12) * math.sqrt(comparison.elements)
    if comparison.beyond or not math.sqrt(comparison.error_squares) <= allowed:
        text = (
            f"relative error {error:.2e} (allowed {limits.frobenius:.0e}), {comparison.beyond} of "
            f"{comparison.elements} elements beyond {limits.text}, worst {comparison.worst:.2e}"
        )
        return Verdict(
            Status.WRONG_RESULT, error, f"{text}, {where}" if comparison.beyond else text
        )
    return Verdict(Status.OK, error)


def floor_work(problem: Problem) -> tuple[int, int]:
    """Lower bounds of any kernel's work: tensor-core operations at the rate of 16-bit ones, and
    bytes of memory traffic.

    Under a mask exactly the visible pairs count, and keys beyond the reach of the last query are
    not read. A softmax does not use tensor cores.
    """
    if isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        return problem.flops // problem.tensor_rate, problem.bytes
    if isinstance(problem, AttentionBackwardProblem):
        flops, _ = floor_work(problem.forward)
        return flops * 5 // 2, 0 if problem.is_causal else problem.bytes
    if not isinstance(problem, AttentionProblem):
        return 0, 0 if getattr(problem, "is_causal", False) else problem.bytes
    if problem.is_varlen:
        works = [floor_work(sequence) for sequence in problem.sequences]
        return sum(flops for flops, _ in works), sum(moved for _, moved in works)
    keys = problem.seqlen_kv
    visible = min(problem.seqlen_q + problem.visible[1], keys)
    if problem.is_paged:  # whole pages, without the slots behind a sequence's end
        keys = sum(problem.pages) // problem.batch * problem.page_size
        visible = len(problem.keys_of(0, problem.seqlen_q - 1))
    _, key, value, _ = problem.matrices
    row = DTYPE_BYTES[key.dtype] * key.shape[-1]
    row += 0 if problem.is_latent else DTYPE_BYTES[value.dtype] * value.shape[-1]
    unread = (keys - visible) * row * problem.heads_kv * problem.batch
    flops = 2 * problem.batch * problem.heads_q * problem.widths * problem.pairs
    for bits in problem.operands[3:-1]:
        if bits.name == "block_bits":  # masks of full and empty blocks are not read
            unread += bits.bytes
    for bias in problem.operands[3:-1]:
        if bias.name == "bias":  # one element for each visible pair
            absent = bias.elements - bias.shape[0] * bias.shape[1] * problem.pairs
            unread += absent * DTYPE_BYTES[problem.dtype]
    return flops // problem.tensor_rate, problem.bytes - unread


def too_fast(problem: Problem, gpu: Gpu, latency_us: float) -> str:
    """Reason why a time is impossible, or an empty string."""
    floor = gpu.floor_us(*floor_work(problem))
    if latency_us >= floor:
        return ""
    return f"{latency_us:.3f} us is below {floor:.3f} us, the floor of {gpu.name}"


def _position(index: int, operand: Operand) -> tuple[int, ...]:
    """Logical position of element `index` of a dense tensor's memory."""
    position = {}
    for axis in sorted(range(len(operand.shape)), key=lambda axis: -operand.strides[axis]):
        if operand.shape[axis] > 1:
            position[axis], index = divmod(index, operand.strides[axis])
    return tuple(position.get(axis, 0) for axis in range(len(operand.shape)))
