"""Inputs of the numerics gate: kinds, distributions and planted elements. Pure functions."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from tuner.errors import BenchmarkError
from tuner.measure import pages
from tuner.measure.tolerance import E4M3_OUTPUT
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
    rows_of,
)

#: Kinds of inputs. `random` comes last, because its inputs stay in the buffers for the timing.
KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("dominant", "large_scores", "huge_scores", "random"),
    "attention_backward": ("planted", "huge_scores", "low_scores", "random"),
    "gemm": ("planted", "positive", "random"),
    "swiglu": ("planted", "random"),
    "grouped_gemm": ("planted", "positive", "random"),
    "softmax": ("dominant", "large_scores", "huge_scores", "random"),
}
#: `huge_scores`: exponents of the elements of queries, and of those of keys. Scores are D times
#: their product: from 1e4 to 1e10 in fp16, whose largest power is 2^15, and to 1e12 in bf16. e4m3's
#: elements stay below 448, and the factors of its queries do the rest.
HUGE_EXPONENTS: Mapping[str, tuple[range, int]] = {
    "float16": (range(-4, 15), 14),
    "bfloat16": (range(-8, 21), 18),
    E4M3: (range(2, 8), 7),
}
HUGE_DESCALE = 2.0**20
#: The same for a softmax on its own, whose scores are fp32.
HUGE_SOFTMAX = range(14, 41)
#: Products of the rows with huge scores. Kernels compute such rows once more in plain arithmetic:
#: 1.6e11 products a second on an H200, a thousandth of their usual speed.
HUGE_PRODUCTS = 2**34
#: `large_scores`: standard deviation of the scaled scores, which is 1 for random inputs.
LARGE = 30.0
#: `dominant`: a query is this many times its key, so that with D = 64 its score stands 32 above
#: the mean of the others, whose deviation is 4.5; or minus this where every score is to be low.
DOMINANCE = 4.0
#: Mean of the keys under `dominant`, which makes all scores of a negative query negative.
KEY_MEAN = 0.5
#: `low_scores`, of gradients: mean of the scaled scores. The log-sum-exp of every row is then far
#: below -88.7, the logarithm of the largest fp32 number. A padded key that is read as zeros, and
#: not hidden, has an infinite probability there.
LOW = -175.0
#: Mean and deviation of the queries under it. Scores of a row deviate by about the mean, as
#: those of random inputs do: a more peaked row has gradients that rounding outweighs.
LOW_QUERY, LOW_QUERY_DEVIATION = 1.0, 0.25
#: `planted`: factor of A's columns at the borders of k-tiles.
COLUMN_FACTOR = 16.0
#: The same for e4m3: elements up to seven deviations stay below 448.
E4M3_COLUMN_FACTOR = 4.0
#: Multiplier of block factors that must differ from their neighbours'.
SMALL_FACTOR = 1 / 16
#: `positive`, of e4m3 products: mean of all elements over their deviation. Normal numbers of the
#: gate stay within 5.8 deviations, so none is below zero. Sums then grow with every product, and an
#: accumulator cuts off ever more of each.
POSITIVE_MEAN = 6.0
#: Standard deviation of a softmax's own scores: 8, as of raw scores with D = 64.
SOFTMAX_SCALE = 0.125
#: `dominant` uses a scale other than the default, to detect a kernel that ignores its scale.
SCALE_FACTOR = 0.75

#: Standard deviation of e4m3 elements: `dominant`, `DOMINANCE` times six deviations, stays below
#: 448. Its inverse is the mean of the descale factors, so that what they stand for is as normal as
#: other inputs; their deviation over their mean makes heads unlike.
E4M3_DEVIATION = 16.0
DESCALE_SPREAD = 1 / 8


STARTS = ("cu_seqlens_q", "cu_seqlens_kv", "offsets")
"""Operands that hold the starts of sequences or groups."""


def kinds_of(problem: Problem, *, is_vendor: bool = False) -> tuple[str, ...]:
    """Kinds of inputs that a candidate for `problem` must pass, but for what `is_reported`.

    Vendors' kernels skip `huge_scores`: if one overflows there, PyTorch's own result does too.
    Operands of 16 bits have fp32 sums, which do not depend on signs.
    """
    skipped = {"huge_scores"} if is_vendor else set()
    if not (isinstance(problem, GemmProblem | GroupedGemmProblem) and problem.dtype == E4M3):
        skipped.add("positive")
    return tuple(kind for kind in KINDS[problem.op] if kind not in skipped)


def is_reported(problem: Problem, kind: str) -> bool:
    """True where the error of a kind of inputs is reported, and no limit judges it.

    It is that of all-positive operands whose sums stay in the tensor cores' accumulators, as the
    problem asks. Every kernel loses a part of them, the vendors' too.
    """
    return (
        kind == "positive"
        and isinstance(problem, GemmProblem)
        and problem.fast_accum
        and problem.scales != "block"
    )


def scale_of(problem: Problem, kind: str = "random") -> float:
    """Scale (alpha of a GEMM) that a problem is checked with. `random` has the timed one."""
    if isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        return 1.0
    base = SOFTMAX_SCALE
    if isinstance(problem, AttentionProblem | AttentionBackwardProblem):
        base = 1 / math.sqrt(problem.head_dim)
    return base * SCALE_FACTOR if kind in ("dominant", "planted") else base


def border_columns(k: int, seed: int) -> list[int]:
    """Up to ten distinct columns of A: the first, the last, and those on both sides of tile
    borders.
    """
    draw = random.Random(f"{seed}:columns")
    columns = {0, k - 1}
    for tile in (16, 32, 64, 128):
        if k > tile:
            border = tile * draw.randint(1, (k - 1) // tile)
            columns |= {border - 1, border}
    return sorted(columns)


def moments(problem: Problem, kind: str) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and standard deviation of each input for which they are not 0 and 1."""
    large = LARGE if kind == "large_scores" else 1.0
    if kind == "huge_scores":
        return _huge_moments(problem)
    if isinstance(problem, AttentionProblem) and problem.dtype == E4M3:
        return _e4m3_moments(kind == "dominant", large)
    if isinstance(problem, AttentionProblem):
        means = {"key": KEY_MEAN if kind == "dominant" else 0.0, "descale_k": 1.0}
        return means, {"query": large, "bias": large, "descale_k": DESCALE_SPREAD}
    if isinstance(problem, AttentionBackwardProblem):
        return _gradient_moments(problem, kind)
    if isinstance(problem, SwigluProblem):
        return {}, {"weights": 1 / math.sqrt(problem.k)}
    if isinstance(problem, GemmProblem | GroupedGemmProblem):
        # Outputs get deviation 1, so that the limit of 2e-3 an element judges rounding. With N(0,1)
        # operands it would judge the fp32 accumulation of a sum of size sqrt(K). Addends are
        # smaller: a sum must not cancel a product that a vendor has rounded.
        deviations = {"b": 1 / math.sqrt(problem.k), "bias": 0.5, "residual": 0.5}
        if problem.dtype != E4M3:
            return _scaled({"scale_a": 1.0, "scale_b": 1.0}, deviations)
        factors = {"scale_a": 1 / E4M3_DEVIATION, "scale_b": deviations["b"] / E4M3_DEVIATION}
        factors["scale_d"] = E4M3_OUTPUT
        if kind != "positive":
            return _scaled(factors, dict.fromkeys("ab", E4M3_DEVIATION))
        factors["scale_b"] /= math.sqrt(problem.k)  # outputs of mean 1
        means, scaled = _scaled(factors, dict.fromkeys("ab", E4M3_DEVIATION / POSITIVE_MEAN))
        return {**means, **dict.fromkeys("ab", E4M3_DEVIATION)}, scaled
    return {}, {"scores": large / SOFTMAX_SCALE}


def _gradient_moments(
    problem: AttentionBackwardProblem, kind: str
) -> tuple[dict[str, float], dict[str, float]]:
    if kind != "low_scores":
        return {"key": KEY_MEAN if kind == "planted" else 0.0}, {}
    # A cap bounds scores from below, and where it does they have no derivative.
    low = max(LOW, -problem.softcap / 2) if problem.softcap else LOW
    means = {"query": LOW_QUERY, "key": low / (LOW_QUERY * math.sqrt(problem.head_dim))}
    return means, {"query": LOW_QUERY_DEVIATION}


def _huge_moments(problem: Problem) -> tuple[dict[str, float], dict[str, float]]:
    """Moments for `huge_scores`: all keys are equal, and nothing is added to their scores.

    A bias would be lost beside such scores in fp32, but not in the reference.

    For gradients the output's gradient is zero, and so are the results. A log-sum-exp of 1e12 in
    fp32 cannot distinguish a probability of one from another, but it must not give infinity or NaN.
    """
    means: dict[str, float] = {}
    if isinstance(problem, AttentionBackwardProblem):
        return {"key": 2.0 ** HUGE_EXPONENTS[problem.dtype][1]}, {"key": 0.0, "grad_out": 0.0}
    if not isinstance(problem, AttentionProblem):
        return {}, {}
    deviations: dict[str, float] = {"descale_k": 0.0}
    means = {"descale_k": 1.0}
    if problem.dtype == E4M3:
        means, deviations = _e4m3_moments(False, HUGE_DESCALE)
    _, exponent = HUGE_EXPONENTS[problem.dtype]
    return (
        {**means, "key": 2.0**exponent},
        {**deviations, "key": 0.0, "bias": 0.0},
    )


def huge_every(problem: Problem) -> int:
    """Consecutive queries of which one has huge scores under `huge_scores`: 1 if all have them.

    More for long attention, so that such rows have `HUGE_PRODUCTS` together. Gradients and a
    softmax do not compute them once more.
    """
    if not isinstance(problem, AttentionProblem):
        return 1
    return max(1, math.ceil(problem.flops / 4 / HUGE_PRODUCTS))


def _e4m3_moments(has_mean: bool, large: float) -> tuple[dict[str, float], dict[str, float]]:
    """`moments` of quantised tensors and their factors, whose products are distributed like other
    inputs.
    """
    factors = {f"descale_{name}": 1 / E4M3_DEVIATION for name in "qkv"}
    factors["descale_q"] *= large
    means, deviations = _scaled(factors, dict.fromkeys(("query", "key", "value"), E4M3_DEVIATION))
    return {**means, "key": KEY_MEAN * E4M3_DEVIATION if has_mean else 0.0}, deviations


def _scaled(
    factors: dict[str, float], deviations: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Means and deviations of scale factors, and of the elements that they scale."""
    return factors, {
        **{name: mean * DESCALE_SPREAD for name, mean in factors.items()},
        **deviations,
    }


def starts_of(problem: Problem, operand: Operand, kind: str) -> bytes:
    """Starts of the packed sequences or groups, followed by the end of the last."""
    lengths = _lengths(problem, operand, kind)
    return struct.pack(f"<{operand.elements}i", 0, *accumulate(lengths))


def _lengths(problem: Problem, starts: Operand, kind: str) -> tuple[int, ...]:
    if isinstance(problem, GroupedGemmProblem):
        return group_rows(problem, kind)
    if isinstance(problem, AttentionBackwardProblem):
        problem = problem.forward
    if not isinstance(problem, AttentionProblem):
        raise BenchmarkError(f"'{problem.op}' has no sequences of variable lengths")
    return problem.lengths_q if starts.name == STARTS[0] else problem.lengths_kv


def group_rows(problem: GroupedGemmProblem, kind: str) -> tuple[int, ...]:
    """Rows of each group. A kernel that is timed on one distribution of rows serves any. So planted
    inputs have an empty first group, and others of unequal size.
    """
    if kind != "planted" or problem.groups == 1:
        return problem.rows
    return 0, *rows_of("zipf", problem.m, problem.groups - 1)


def prominence(problem: AttentionBackwardProblem) -> float:
    """Ratio of a query to its key at which the key has about a quarter of the row's probability.

    If it had nearly all, as under `dominant`, derivatives would be differences of nearly equal
    numbers: only the output's rounding would be left.
    """
    keys = max(4, problem.seqlen_kv)
    return math.log(keys / 2) / (SCALE_FACTOR * math.sqrt(problem.head_dim))


def query_deviation(problem: Problem, kind: str) -> float:
    """Root mean square of the elements of queries of gradients, 1 or more: planted ones are
    multiples of keys.
    """
    if not isinstance(problem, AttentionBackwardProblem):
        return 1.0
    if kind == "low_scores":
        return math.hypot(LOW_QUERY, LOW_QUERY_DEVIATION)
    return max(1.0, prominence(problem) * math.hypot(1.0, KEY_MEAN)) if kind == "planted" else 1.0


class Offsets(NamedTuple):
    """Root mean square over deviation of the elements of an operand of gradients."""

    query: float = 1.0
    key: float = 1.0


def offsets(problem: Problem, kind: str) -> Offsets:
    """Offsets of queries and keys: large where their mean outweighs what they differ by."""
    if kind != "low_scores" or not isinstance(problem, AttentionBackwardProblem):
        return Offsets()
    means, deviations = _gradient_moments(problem, kind)
    return Offsets(
        *(math.hypot(1.0, means[name] / deviations.get(name, 1.0)) for name in Offsets._fields)
    )


def parts_of(
    problem: AttentionProblem, kind: str
) -> Iterator[tuple[AttentionProblem, Mapping[str, int], tuple[int, int]]]:
    """Parts that the reference computes at once: problem, byte offset in each tensor, and left and
    right of the mask.

    Sequences of variable lengths and of a paged cache are parts of their own. Any other problem is
    one part.
    """
    starts = dict.fromkeys(("query", "key", "value", "reference"), 0)
    if not problem.is_packed:
        yield problem, starts, problem.visible
        return
    if problem.is_paged:
        every = [(one, keys, sides) for one, keys, *sides in pages.parts(problem, kind)]
    else:
        every = [(one, one.seqlen_kv, [*one.visible]) for one in problem.sequences]
    for one, keys, (left, right) in every:
        # For a sequence without keys an existing row is read, which no query sees.
        first = {} if keys else {"key": 0, "value": 0}
        yield one, {**starts, **first}, (left, right)
        query, key, value, out = one.matrices
        starts["query"] += query.bytes
        for operand in (key, value):
            starts[operand.name] += DTYPE_BYTES[operand.dtype] * operand.strides[2] * keys
        starts["reference"] += 4 * out.elements


def sees_nothing(sequence: AttentionProblem, sides: tuple[int, int]) -> bool:
    """True if not even the last query of a part sees a key.

    Args:
        sequence: part from `parts_of`.
        sides: left and right of the part's mask.
    """
    return sequence.seqlen_q - 1 + sides[1] < 0
