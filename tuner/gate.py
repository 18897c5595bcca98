"""The compulsory numerics check, wholly on the GPU: inputs, reference, comparison, guards.

Every check runs a candidate on freshly drawn inputs into a poisoned output between guard bands
and compares all of it with a reference computed in fp64 (products of up to 32 elements summed in
fp32 first) by the kernels of ``templates/reference.cu.j2``. PyTorch and numpy take no part. A time
that the chip cannot reach is a failure too (`too_fast`).
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tuner.artifacts import LoadedKernel
from tuner.device import Device, Pool
from tuner.errors import BenchmarkError, GateError
from tuner.families.base import KernelSpec
from tuner.families.gemm_shape import PROMOTED_K
from tuner.hardware import Gpu
from tuner.measurement import Status
from tuner.problem import (
    ACTIVATIONS,
    DTYPE_BYTES,
    E4M3,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Operand,
    Problem,
    SoftmaxProblem,
    SwigluProblem,
    rows_of,
)

REFERENCE = KernelSpec("reference.cu.j2")
"""The kernels that this module runs; compiled like a candidate's."""

POISON = 0x7FA5
"""A NaN in fp16 and bf16, and twice over in fp32, with a payload that arithmetic never makes."""
GUARD_BYTES = 1 << 20
"""Poisoned on both sides of every buffer; a stray tile (at most 256 x 256 x 4 bytes) fits."""

#: Kinds of inputs. `random` comes last: its inputs stay in the buffers for the timing.
KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("dominant", "large_scores", "random"),
    "gemm": ("planted", "random"),
    "swiglu": ("planted", "random"),
    "grouped_gemm": ("planted", "random"),
    "softmax": ("dominant", "large_scores", "random"),
}
#: `large_scores`: standard deviation of the scaled scores, which random inputs have at 1.
LARGE = 30.0
#: `dominant`: a query is this many times its key, so that with D = 64 its score stands 32 above
#: the mean of the others, whose deviation is 4.5; or minus this where every score is to be low.
DOMINANCE = 4.0
#: Mean of the keys under `dominant`, which makes all scores of a negative query negative.
KEY_MEAN = 0.5
#: Mean of ALiBi's slopes, a quarter of it their deviation: near keys outweigh far ones. Under
#: `dominant` the farthest key loses no more than `DOMINANCE`, so that what is planted shows.
SLOPE = 2.0**-4
#: `planted`: what the columns of A at the borders of k-tiles are multiplied by.
COLUMN_FACTOR = 16.0
#: The same of e4m3: a column's largest stays below 448 up to seven deviations.
E4M3_COLUMN_FACTOR = 4.0
#: A softmax alone works on scores of deviation 8, as raw scores of D = 64 have.
SOFTMAX_SCALE = 0.125
#: `dominant` uses a scale other than the default, so that a kernel ignoring its scale is seen.
SCALE_FACTOR = 0.75

#: Standard deviation of e4m3 elements: `dominant`, `DOMINANCE` times six deviations, stays below
#: 448. Its inverse is the mean of the descale factors, so that what they stand for is as normal as
#: other inputs; their deviation over their mean makes heads unlike.
E4M3_DEVIATION = 16.0
DESCALE_SPREAD = 1 / 8

_DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, E4M3: 3}
_FILL, _PLANT_ATTENTION, _SCALE_COLUMNS, _PLANT_SOFTMAX = 0, 1, 2, 3
_ATTENTION, _GEMM, _SOFTMAX, _COMPARE, _COUNT_CHANGED, _CHECKSUM = 4, 5, 6, 7, 8, 9
_GATE_PAIRS = 10
_RESULT_BYTES = 64
#: Operands that hold no data of a random kind.
_STARTS = ("cu_seqlens_q", "cu_seqlens_kv", "offsets")
#: Attention's operands beside the matrices as the reference takes them; null where there is none.
_ATTENTION_OTHERS = ("descale_q", "descale_k", "descale_v", "bias", "slopes")
#: Spacing of fp16 below its normal numbers: values there cannot be rounded any better.
_FP16_SUBNORMAL_STEP = 2.0**-24


@dataclass(frozen=True)
class Limits:
    """What an output may be off by."""

    frobenius: float
    """Relative Frobenius norm of the error."""
    absolute: float
    relative: float
    """Every element: ``absolute + relative * |reference|``."""


#: By the output's type. bf16 has 3 mantissa bits fewer than fp16: 8 times as much. fp32 results
#: of 16-bit operands differ from the reference by accumulation only and meet fp16's with ease.
LIMITS = {
    "float16": Limits(1e-3, 2e-3, 2e-3),
    "bfloat16": Limits(8e-3, 1.6e-2, 1.6e-2),
    "float32": Limits(1e-3, 2e-3, 2e-3),
}


#: Relative error of a probability that is rounded to e4m3: uniform within a spacing of 2^-3 to
#: 2^-4 of it, its logarithm uniform over an octave, 2^-3 / sqrt(12) * sqrt(3 / (8 ln 2)).
E4M3_ROUNDING = 0.0266
#: WGMMA adds the products of 8-bit operands to an accumulator of 13 mantissa bits and cuts off the
#: rest: half a unit on average each time, once for every `E4M3_DEPTH` keys.
E4M3_TRUNCATION, E4M3_DEPTH = 2.0**-14, 32
#: What is allowed over what is expected of a sound kernel.
E4M3_MARGIN = 1.25
#: An element: a probability is off by 2^-4 of itself at most, a row's largest not at all, so that
#: with two keys to a row an element is off by 2^-5 of a value; and no value exceeds 8 deviations.
E4M3_ABSOLUTE = 2.0**-5 * 8


#: Error of a sum of e4m3 products in the tensor cores' accumulators, relative to the sum, over the
#: root of the number of products: the bits that their alignment cuts off have either sign. One
#: H200, 22 November 2026, errors of random inputs without bf16's rounding: 1.3e-3 over 4096
#: products, 2.1e-3 over 8192, 2.9e-3 over 14336, 4.7e-3 over 32768 (the margin covers its 2.6e-5);
#: own kernels' and `torch._scaled_mm`'s are alike to three digits, and 13 bits kept below the
#: largest of 32 products and their sum give the same (`tests/unit/test_e4m3_arithmetic.py`).
E4M3_SUM = 2.1e-5
#: What an element's error may be of that, which is the deviation of all.
E4M3_DEVIATIONS = 8


def limits_of(problem: Problem) -> Limits:
    """What the output of `problem` may be off by.

    e4m3 products may be off by what the accumulators lose over the products that stay in them, on
    top of what 16-bit ones may. e4m3 attention is judged against the exact result of its quantised
    inputs: what is left is the rounding of the probabilities and the accumulators' truncation,
    which grows with the keys.
    """
    usual = LIMITS[problem.output.dtype]
    if isinstance(problem, GemmProblem) and problem.dtype == E4M3:
        kept = problem.k if problem.fast_accum else min(problem.k, PROMOTED_K)
        lost = E4M3_MARGIN * E4M3_SUM * math.sqrt(kept)
        return Limits(
            math.hypot(usual.frobenius, lost),
            usual.absolute + E4M3_DEVIATIONS * lost,
            usual.relative,
        )
    if not isinstance(problem, AttentionProblem) or problem.dtype != E4M3:
        return usual
    truncation = E4M3_TRUNCATION * math.ceil(problem.seqlen_kv / E4M3_DEPTH)
    frobenius = E4M3_MARGIN * (E4M3_ROUNDING + truncation)
    return Limits(frobenius, E4M3_ABSOLUTE, 2 * truncation)


@dataclass(frozen=True)
class Comparison:
    """An output against its reference."""

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
        """False where the reference is not finite: elements that differ from it are not seen."""
        return math.isfinite(self.error_squares + self.reference_squares)

    @classmethod
    def unpack(cls, data: bytes, elements: int) -> Comparison:
        """Read the eight words that the compare command of the template fills."""
        error, reference, beyond, not_finite, poisoned, worst, last, _ = struct.unpack(
            "<2d3Qd2Q", data
        )
        first = ~last & (2**64 - 1)
        return cls(elements, error, reference, beyond, not_finite, poisoned, worst, first)


@dataclass(frozen=True)
class Verdict:
    """What a check found; `status` OK passes."""

    status: Status
    error: float | None = None
    """Relative Frobenius error of the finite elements."""
    log: str = ""


def judge(
    comparison: Comparison,
    operand: Operand,
    strayed: Mapping[str, int],
    changed: Sequence[str],
    limits: Limits | None = None,
) -> Verdict:
    """Turn what was seen into a verdict.

    Args:
        comparison: the output against the reference.
        operand: the output.
        strayed: 16-bit words of each buffer's guard bands that were written.
        changed: inputs whose contents changed.
        limits: of the problem (`limits_of`); those of the output's type when None.

    Raises:
        GateError: when the reference is not finite: nothing can be said of the output.
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
    if operand.dtype == "float16":
        allowed += _FP16_SUBNORMAL_STEP / math.sqrt(12) * math.sqrt(comparison.elements)
    if comparison.beyond or not math.sqrt(comparison.error_squares) <= allowed:
        text = (
            f"relative error {error:.2e} (allowed {limits.frobenius:.0e}), {comparison.beyond} of "
            f"{comparison.elements} elements beyond {limits.absolute} + {limits.relative} x "
            f"|reference|, worst {comparison.worst:.2e}"
        )
        return Verdict(
            Status.WRONG_RESULT, error, f"{text}, {where}" if comparison.beyond else text
        )
    return Verdict(Status.OK, error)


def floor_work(problem: Problem) -> tuple[int, int]:
    """Tensor-core operations, at the rate of 16-bit ones, and bytes that no kernel can avoid.

    Under a mask only the visible pairs count, exactly, and keys that the last query does not reach
    are never read. A softmax has no tensor-core work.
    """
    if isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        return problem.flops // problem.tensor_rate, problem.bytes
    if not isinstance(problem, AttentionProblem):
        return 0, 0 if getattr(problem, "is_causal", False) else problem.bytes
    if problem.is_varlen:
        each = [floor_work(sequence) for sequence in problem.sequences]
        return sum(flops for flops, _ in each), sum(moved for _, moved in each)
    keys = problem.seqlen_kv
    seen = min(problem.seqlen_q + problem.visible[1], keys)
    unread = (keys - seen) * problem.head_dim * problem.heads_kv * problem.batch
    flops = 4 * problem.batch * problem.heads_q * problem.head_dim * problem.pairs
    unread *= 2
    for bias in problem.operands[3:-1]:
        if bias.name == "bias":  # one element for each visible pair
            unread += bias.elements - bias.shape[0] * bias.shape[1] * problem.pairs
    return flops // problem.tensor_rate, problem.bytes - unread * DTYPE_BYTES[problem.dtype]


def too_fast(problem: Problem, gpu: Gpu, latency_us: float) -> str:
    """Why a time cannot be true, or an empty text."""
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


def scale_of(problem: Problem, kind: str = "random") -> float:
    """The scale (alpha of a GEMM) that a problem is checked with; `random`'s is the timed one."""
    if isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        return 1.0
    base = SOFTMAX_SCALE
    if isinstance(problem, AttentionProblem):
        base = 1 / math.sqrt(problem.head_dim)
    return base * SCALE_FACTOR if kind == "dominant" else base


def reference_seconds(problem: Problem) -> float:
    """Upper estimate of a reference's time, to allow for: 1 TFLOP/s of three products."""
    return 3 * problem.flops * (2 if getattr(problem, "is_causal", False) else 1) / 1e12


def border_columns(k: int, seed: int) -> list[int]:
    """Up to ten distinct columns of A: the first, the last, and both sides of tile borders."""
    draw = random.Random(f"{seed}:columns")
    columns = {0, k - 1}
    for tile in (16, 32, 64, 128):
        if k > tile:
            border = tile * draw.randint(1, (k - 1) // tile)
            columns |= {border - 1, border}
    return sorted(columns)


@dataclass(frozen=True)
class Guarded:
    """A buffer between two guard bands."""

    name: str
    pointer: int
    bytes: int


class Gate:
    """Checks candidates on one device.

    The operands' buffers belong to the gate and are allocated once a problem; references are kept
    for the latest problem and seed.
    """

    def __init__(self, device: Device, kernel: LoadedKernel) -> None:
        """Args: device: where to run; kernel: `REFERENCE`, compiled and loaded."""
        self._device, self._kernel = device, kernel
        self._result = device.allocate(_RESULT_BYTES)
        self._problem: Problem | None = None
        self._seed: int | None = None
        self._buffers = Pool(device)
        self._references = Pool(device)
        self._operands: dict[str, Guarded] = {}
        self._known: dict[str, tuple[int, dict[str, int]]] = {}
        self._kind = ""

    @property
    def pointers(self) -> dict[str, int]:
        """Device address of each operand."""
        return {name: guarded.pointer for name, guarded in self._operands.items()}

    def open(self, problem: Problem, seed: int) -> None:
        """Allocate a problem's buffers and forget the references of another problem or seed."""
        if (problem, seed) != (self._problem, self._seed):
            self._references.close()
            self._known.clear()
            self._kind = ""
        if problem != self._problem:
            self.close()
            self._operands = {
                operand.name: self.allocate(self._buffers, operand.name, operand.bytes)
                for operand in problem.operands
            }
        self._problem, self._seed = problem, seed

    def close(self) -> None:
        """Free everything that depends on the problem."""
        self._references.close()
        self._buffers.close()
        self._known.clear()
        self._operands, self._problem, self._kind = {}, None, ""

    def allocate(self, pool: Pool, name: str, size: int) -> Guarded:
        """A buffer of `pool` with guard bands, 256-byte aligned, an even number of bytes."""
        size += size % 2
        return Guarded(name, pool.allocate(size + 2 * GUARD_BYTES) + GUARD_BYTES, size)

    def load(self, kind: str) -> None:
        """Put the inputs of `kind` into the buffers; computes the reference when it is new."""
        problem, seed = self._opened()
        self._fill(problem, kind, seed)
        if kind not in self._known:
            reference = self._references.allocate(4 * problem.output.elements)
            self._compute(problem, kind, reference)
            sums = {operand.name: self._checksum(operand) for operand in problem.operands[:-1]}
            self._known[kind] = (reference, sums)
        self._kind = kind

    def arm(self, extra: Sequence[Guarded] = ()) -> None:
        """Poison the output, the candidate's own buffers, and every guard band."""
        problem, _ = self._opened()
        output = self._operands[problem.output.name]
        for buffer in (output, *extra):
            self._device.fill16(buffer.pointer, POISON, buffer.bytes)
        for buffer in (*self._operands.values(), *extra):
            self._device.fill16(buffer.pointer - GUARD_BYTES, POISON, GUARD_BYTES)
            self._device.fill16(buffer.pointer + buffer.bytes, POISON, GUARD_BYTES)

    def examine(self, extra: Sequence[Guarded] = ()) -> Verdict:
        """Wait for the candidate and judge what it left.

        A reference that is not finite is computed again: what strays far may have written there.

        Raises:
            BenchmarkError: when the candidate's work failed on the device.
            GateError: when the reference is not finite either way.
        """
        self._device.wait()
        problem, _ = self._opened()
        reference, sums = self._known[self._kind]
        strayed = {
            buffer.name: self._count(buffer.pointer - GUARD_BYTES)
            + self._count(buffer.pointer + buffer.bytes)
            for buffer in (*self._operands.values(), *extra)
        }
        changed = [
            operand.name
            for operand in problem.operands[:-1]
            if self._checksum(operand) != sums[operand.name]
        ]
        limits, output = limits_of(problem), problem.output
        written = self._operands[output.name].pointer
        comparison = self.compare(written, reference, output, limits)
        if not comparison.is_sound and not changed:
            self._compute(problem, self._kind, reference)
            comparison = self.compare(written, reference, output, limits)
        verdict = judge(comparison, output, strayed, changed, limits)
        log = verdict.log and f"{self._kind} inputs: {verdict.log}"
        return Verdict(verdict.status, verdict.error, log)

    def compare(self, output: int, reference: int, operand: Operand, limits: Limits) -> Comparison:
        """Compare an output's memory with fp32 reference memory of the same order."""
        data = self._ask(
            (output, reference, self._result),
            (_COMPARE, _DTYPES[operand.dtype], operand.elements),
            (limits.absolute, limits.relative),
        )
        return Comparison.unpack(data, operand.elements)

    def reference(self, kind: str) -> int:
        """Address of the fp32 reference of inputs that were loaded before."""
        return self._known[kind][0]

    def _opened(self) -> tuple[Problem, int]:
        if self._problem is None or self._seed is None:
            raise BenchmarkError("the numerics gate has no problem open")
        return self._problem, self._seed

    def _run(
        self, tensors: Sequence[int], integers: Sequence[int], scalars: Sequence[float] = ()
    ) -> None:
        self._kernel.launch(tensors, integers, scalars, 0, self._device.stream)

    def _ask(
        self, tensors: Sequence[int], integers: Sequence[int], scalars: Sequence[float] = ()
    ) -> bytes:
        self._device.fill8(self._result, 0, _RESULT_BYTES)
        self._run(tensors, integers, scalars)
        return self._device.read(self._result, _RESULT_BYTES)

    def _count(self, band: int) -> int:
        data = self._ask((band, self._result), (_COUNT_CHANGED, GUARD_BYTES))
        return int.from_bytes(data[:8], "little")

    def _checksum(self, operand: Operand) -> int:
        pointer = self._operands[operand.name].pointer
        data = self._ask((pointer, self._result), (_CHECKSUM, operand.bytes))
        return int.from_bytes(data[:8], "little")

    def _fill(self, problem: Problem, kind: str, seed: int) -> None:
        means, deviations = moments(problem, kind)
        draw = random.Random(f"{seed}:{kind}")
        for operand in problem.operands[:-1]:
            if operand.name in _STARTS:
                self._device.write(
                    self._operands[operand.name].pointer, starts_of(problem, operand, kind)
                )
                continue
            self._run(
                (self._operands[operand.name].pointer,),
                (_FILL, _DTYPES[operand.dtype], operand.elements, draw.getrandbits(62)),
                (means.get(operand.name, 0.0), deviations.get(operand.name, 1.0)),
            )
        if kind == "dominant" or kind == "planted":
            self._plant(problem, seed, draw.getrandbits(62))

    def _plant(self, problem: Problem, seed: int, row_seed: int) -> None:
        at = self.pointers
        if isinstance(problem, AttentionProblem):
            for one, shift in _parts(problem):
                self._run(
                    (at["query"] + shift["query"], at["key"] + shift["key"]),
                    (
                        _PLANT_ATTENTION,
                        _DTYPES[one.dtype],
                        *_attention_integers(one, 2),
                        *one.visible,
                        row_seed,
                    ),
                    (DOMINANCE,),
                )
        elif isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
            columns = border_columns(problem.k, seed)
            batch, rows, strides = _matrices(problem.operands[0])
            self._run(
                (at["a"],),
                (
                    *(_SCALE_COLUMNS, _DTYPES[problem.dtype], batch, rows),
                    *(*strides, len(columns), *columns),
                ),
                (E4M3_COLUMN_FACTOR if problem.dtype == E4M3 else COLUMN_FACTOR,),
            )
        else:
            self._run(
                (at["scores"],),
                (_PLANT_SOFTMAX, *_softmax_integers(problem), row_seed),
                (LARGE / SOFTMAX_SCALE,),
            )

    def _compute(self, problem: Problem, kind: str, reference: int) -> None:
        at = self.pointers
        inputs = [at[operand.name] for operand in problem.operands[:-1]]
        scale = scale_of(problem, kind)
        if isinstance(problem, GemmProblem):
            a, b, *_, d = problem.operands
            extents = (problem.batch, problem.m, problem.n, problem.k)
            activation = ("", *ACTIVATIONS).index(problem.activation)
            integers = (
                *(_GEMM, _DTYPES[problem.dtype], *extents, *a.strides, *b.strides, *d.strides),
                *(activation, _DTYPES[d.dtype], int(problem.scales == "row")),
            )
            others = ("bias", "residual", "scale_a", "scale_b")
            tensors = (at["a"], at["b"], reference, *(at.get(name, 0) for name in others))
            self._run(tensors, integers, (scale, 1.0))
        elif isinstance(problem, SwigluProblem):
            self._compute_swiglu(problem, scale, reference)
        elif isinstance(problem, GroupedGemmProblem):
            self._compute_groups(problem, kind, scale, reference)
        elif isinstance(problem, AttentionProblem):
            self._compute_attention(problem, scale, reference)
        else:
            integers = (_SOFTMAX, *_softmax_integers(problem))
            self._run((*inputs, reference), integers, (scale,))
        self._device.wait()

    def _compute_attention(self, problem: AttentionProblem, scale: float, reference: int) -> None:
        """One sequence after the other where their lengths vary; else all at once."""
        at = self.pointers
        others = [at.get(name, 0) for name in _ATTENTION_OTHERS]
        with Pool(self._device) as pool:
            rows = problem.batch * problem.heads_q * problem.seqlen_q
            statistics = pool.allocate(16 * rows)
            for one, shift in _parts(problem):
                matrices = [at[name] + shift[name] for name in ("query", "key", "value")]
                self._run(
                    (*matrices, reference + shift["reference"], statistics, *others),
                    (
                        _ATTENTION,
                        _DTYPES[one.dtype],
                        *_attention_integers(one, 4),
                        *one.visible,
                        *one.bias_strides,
                    ),
                    (scale, one.softcap),
                )
            self._device.wait()

    def _compute_groups(
        self, problem: GroupedGemmProblem, kind: str, scale: float, reference: int
    ) -> None:
        """One group that has rows after the other."""
        n, k, width = problem.n, problem.k, DTYPE_BYTES[problem.dtype]
        start = 0
        for group, rows in enumerate(_group_rows(problem, kind)):
            a = self.pointers["a"] + start * k * width
            b = self.pointers["b"] + group * n * k * width
            strides = (rows * k, k, 1, n * k, 1, k, rows * n, n, 1)
            integers = (_GEMM, _DTYPES[problem.dtype], 1, rows, n, k, *strides, 0, 0, 0)
            if rows:
                self._run((a, b, reference + 4 * start * n, 0, 0, 0, 0), integers, (scale, 1.0))
            start += rows

    def _compute_swiglu(self, problem: SwigluProblem, scale: float, reference: int) -> None:
        """Both projections in the order of the weights' rows, then the pairs."""
        m, n, k = problem.m, problem.n, problem.k
        at = self.pointers
        with Pool(self._device) as pool:
            both = pool.allocate(4 * m * 2 * n)
            extents = (1, m, 2 * n, k)
            strides = (m * k, k, 1, 2 * n * k, 1, k, m * 2 * n, 2 * n, 1)
            integers = (_GEMM, _DTYPES[problem.dtype], *extents, *strides, 0, 0, 0)
            self._run((at["a"], at["weights"], both, 0, 0, 0, 0), integers, (scale, 1.0))
            steps = [stride // k for stride in problem.operands[1].strides[:-1]]
            self._run((both, reference), (_GATE_PAIRS, m, n, *steps))
            self._device.wait()


def _matrices(operand: Operand) -> tuple[int, int, tuple[int, int, int]]:
    """Batch, rows, and strides of batch, row and column of an operand with or without a batch."""
    *batch, rows, _ = operand.shape
    *outer, row, column = operand.strides
    return math.prod(batch), rows, (outer[0] if outer else operand.elements, row, column)


def moments(problem: Problem, kind: str) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and standard deviation of each input that are not 0 and 1."""
    large = LARGE if kind == "large_scores" else 1.0
    if isinstance(problem, AttentionProblem) and problem.dtype == E4M3:
        return _e4m3_moments(kind == "dominant", large)
    if isinstance(problem, AttentionProblem):
        slope = SLOPE
        if kind == "dominant":
            slope = DOMINANCE / max(problem.seqlen_q, problem.seqlen_kv)
        means = {"slopes": slope, "key": KEY_MEAN if kind == "dominant" else 0.0}
        return means, {"query": large, "bias": large, "slopes": slope / 4}
    if isinstance(problem, SwigluProblem):
        return {}, {"weights": 1 / math.sqrt(problem.k)}
    if isinstance(problem, GemmProblem | GroupedGemmProblem):
        # Outputs of deviation 1: the bound of 2e-3 an element then speaks of rounding, while with
        # N(0,1) operands it would judge how a sum of size sqrt(K) is accumulated in fp32.
        # What is added to them is smaller: a sum must not cancel a product which a vendor rounded.
        deviations = {"b": 1 / math.sqrt(problem.k), "bias": 0.5, "residual": 0.5}
        if problem.dtype != E4M3:
            return _scaled({"scale_a": 1.0, "scale_b": 1.0}, deviations)
        factors = {"scale_a": 1 / E4M3_DEVIATION, "scale_b": deviations["b"] / E4M3_DEVIATION}
        return _scaled(factors, dict.fromkeys("ab", E4M3_DEVIATION))
    return {}, {"scores": large / SOFTMAX_SCALE}


def _e4m3_moments(has_mean: bool, large: float) -> tuple[dict[str, float], dict[str, float]]:
    """`moments` of quantised tensors and their factors, which make them what others are."""
    factors = {f"descale_{name}": 1 / E4M3_DEVIATION for name in "qkv"}
    factors["descale_q"] *= large
    means, deviations = _scaled(factors, dict.fromkeys(("query", "key", "value"), E4M3_DEVIATION))
    return {**means, "key": KEY_MEAN * E4M3_DEVIATION if has_mean else 0.0}, deviations


def _scaled(
    factors: dict[str, float], deviations: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Means and deviations of factors, and of the elements that they scale."""
    return factors, {
        **{name: mean * DESCALE_SPREAD for name, mean in factors.items()},
        **deviations,
    }


def starts_of(problem: Problem, operand: Operand, kind: str) -> bytes:
    """Where each of the packed sequences or groups starts, and the last one's end."""
    lengths = _lengths(problem, operand, kind)
    return struct.pack(f"<{operand.elements}i", 0, *accumulate(lengths))


def _lengths(problem: Problem, starts: Operand, kind: str) -> tuple[int, ...]:
    if isinstance(problem, GroupedGemmProblem):
        return _group_rows(problem, kind)
    if not isinstance(problem, AttentionProblem):
        raise BenchmarkError(f"'{problem.op}' has no sequences of variable lengths")
    return problem.lengths_q if starts.name == _STARTS[0] else problem.lengths_kv


def _group_rows(problem: GroupedGemmProblem, kind: str) -> tuple[int, ...]:
    """Rows of each group. A kernel that is timed on one distribution serves any: planted inputs
    come with the first group empty and the others unlike.
    """
    if kind != "planted" or problem.groups == 1:
        return problem.rows
    return 0, *rows_of("zipf", problem.m, problem.groups - 1)


def _parts(problem: AttentionProblem) -> Iterator[tuple[AttentionProblem, Mapping[str, int]]]:
    """What the reference is given at once, and where that lies: bytes beyond each tensor's start.

    Sequences of variable lengths one by one; any other problem is whole.
    """
    starts = dict.fromkeys(("query", "key", "value", "reference"), 0)
    if not problem.is_varlen:
        yield problem, starts
        return
    for one in problem.sequences:
        yield one, dict(starts)
        query, key, value, out = one.matrices
        for operand in (query, key, value):
            starts[operand.name] += operand.bytes
        starts["reference"] += 4 * out.elements


def _attention_integers(problem: AttentionProblem, tensors: int) -> list[int]:
    strides = [s for matrix in problem.matrices[:tensors] for s in matrix.strides[:3]]
    extents = [problem.batch, problem.heads_q, problem.heads_kv]
    return [*extents, problem.seqlen_q, problem.seqlen_kv, problem.head_dim, *strides]


def _softmax_integers(problem: Problem) -> list[int]:
    if not isinstance(problem, SoftmaxProblem):
        raise BenchmarkError(f"the numerics gate has no reference for '{problem.op}'")
    rows = problem.batch * problem.rows
    return [rows, problem.cols, problem.query_rows, int(problem.is_causal)]
