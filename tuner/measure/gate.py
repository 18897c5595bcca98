"""The compulsory numerics check, wholly on the GPU: inputs, reference, comparison, guards.

Every check runs a candidate on freshly drawn inputs into a poisoned output between guard bands
and compares all of it with a reference computed in fp64 (products of up to 32 elements summed in
fp32 first) by the kernels of ``templates/reference.cu.j2``. PyTorch and numpy take no part. What
an output may be off by is `verdict`'s.
"""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tuner.compile.artifacts import LoadedKernel
from tuner.errors import BenchmarkError
from tuner.families.base import KernelSpec, Strides
from tuner.measure import pages
from tuner.measure.device import Device, Pool
from tuner.measure.log_sum_exp import judge_lse, lse_of, score_rows
from tuner.measure.subjects import Call
from tuner.measure.tolerance import (
    Comparison,
    Limits,
    Verdict,
    judge,
    limits_of,
)
from tuner.measurement import Status
from tuner.problem import (
    ACTIVATIONS,
    DTYPE_BYTES,
    E4M3,
    AttentionBackwardProblem,
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
    "attention": ("dominant", "large_scores", "huge_scores", "random"),
    "attention_backward": ("planted", "random"),
    "gemm": ("planted", "random"),
    "swiglu": ("planted", "random"),
    "grouped_gemm": ("planted", "random"),
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
#: The same of a softmax alone, whose scores are fp32.
HUGE_SOFTMAX = range(14, 41)
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
#: What factors of blocks are multiplied by that are to be unlike their neighbours'.
SMALL_FACTOR = 1 / 16
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
_GATE_PAIRS, _PLANT_HUGE_ATTENTION, _PLANT_HUGE_SOFTMAX = 10, 11, 12
_COPY, _TO_PAGES, _GRADIENTS, _KEEP_ATTENTION, _PLANT_MASK = 13, 14, 15, 16, 17
_RESULT_BYTES = 64
#: Operands that hold no data of a random kind.
_STARTS = ("cu_seqlens_q", "cu_seqlens_kv", "offsets")
_TABLES = ("page_table", "seqused_k")
#: Attention's operands beside the matrices as the reference takes them; null where there is none.
_ATTENTION_OTHERS = ("descale_q", "descale_k", "descale_v", "bias", "slopes", "sinks", "mask")


def kinds_of(problem: Problem, *, is_vendor: bool = False) -> tuple[str, ...]:
    """Kinds of inputs that a candidate for `problem` is checked with.

    A vendor's kernel is spared `huge_scores`: where it overflows, PyTorch's own answer does.
    """
    kinds = KINDS[problem.op]
    return tuple(kind for kind in kinds if not (is_vendor and kind == "huge_scores"))


def scale_of(problem: Problem, kind: str = "random") -> float:
    """The scale (alpha of a GEMM) that a problem is checked with; `random`'s is the timed one."""
    if isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
        return 1.0
    base = SOFTMAX_SCALE
    if isinstance(problem, AttentionProblem | AttentionBackwardProblem):
        base = 1 / math.sqrt(problem.head_dim)
    return base * SCALE_FACTOR if kind in ("dominant", "planted") else base


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
        self._strides: Strides = {}
        self._seed: int | None = None
        self._buffers = Pool(device)
        self._references = Pool(device)
        self._operands: dict[str, Guarded] = {}
        self._rows: dict[str, Guarded] = {}
        """Of a paged cache keys and values as packed rows, which are copied to its pages."""
        self._known: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
        """Of each kind of inputs: references by output, and checksums of the inputs."""
        self._kept: dict[str, tuple[int, int]] = {}
        """Of each kind of inputs to gradients: attention's exact output and row statistics."""
        self._statistics: dict[str, int] = {}
        """Of each row of attention, maximum and sum of exponentials, where they are kept."""
        self._kind = ""

    @property
    def pointers(self) -> dict[str, int]:
        """Device address of each operand."""
        return {name: guarded.pointer for name, guarded in self._operands.items()}

    @property
    def _sources(self) -> dict[str, int]:
        """Device address of each operand as the reference reads it."""
        return {**self.pointers, **{name: rows.pointer for name, rows in self._rows.items()}}

    def open(self, problem: Problem, seed: int, strides: Strides | None = None) -> None:
        """Allocate a problem's buffers and forget the references of another problem or seed.

        Args:
            problem: what is checked.
            seed: of the inputs.
            strides: of a product's matrices that lie otherwise than the problem's.
        """
        opened = problem, strides or {}
        if (*opened, seed) != (self._problem, self._strides, self._seed):
            self._forget()
        if opened != (self._problem, self._strides):
            self.close()
            self._problem, self._strides = opened
            self._operands = {
                operand.name: self.allocate(self._buffers, operand.name, operand.bytes)
                for operand in self._memory()
            }
            if isinstance(problem, AttentionProblem) and problem.is_paged:
                size = pages.row_bytes(problem)
                self._rows = {
                    name: self.allocate(self._buffers, name, size) for name in ("key", "value")
                }
        self._seed = seed

    def _memory(self) -> list[Operand]:
        """The memory of each operand, the outputs' last."""
        problem, strides = self._problem, self._strides
        assert problem is not None
        return [
            one.apart(strides[one.name]) if one.name in strides else one for one in problem.operands
        ]

    def _inputs(self) -> list[Operand]:
        """The memory of what is read."""
        return [operand for operand in self._memory() if not operand.is_output]

    def close(self) -> None:
        """Free everything that depends on the problem."""
        self._forget()
        self._buffers.close()
        self._operands, self._rows, self._problem, self._strides = {}, {}, None, {}

    def _forget(self) -> None:
        self._references.close()
        self._known.clear()
        self._kept.clear()
        self._statistics.clear()
        self._kind = ""

    def allocate(self, pool: Pool, name: str, size: int) -> Guarded:
        """A buffer of `pool` with guard bands, 256-byte aligned, an even number of bytes."""
        size += size % 2
        return Guarded(name, pool.allocate(size + 2 * GUARD_BYTES) + GUARD_BYTES, size)

    def load(self, kind: str, with_lse: bool = False) -> None:
        """Put the inputs of `kind` into the buffers; computes the reference when it is new.

        Args:
            kind: of `KINDS`.
            with_lse: of attention: `examine_lse` will be called.
        """
        problem, seed = self._opened()
        self._fill(problem, kind, seed)
        if with_lse and kind not in self._statistics:
            self._known.pop(kind, None)
            self._statistics[kind] = self._references.allocate(16 * score_rows(problem))
        if kind not in self._known:
            references = {
                output.name: self._references.allocate(4 * output.elements)
                for output in problem.outputs
            }
            self._compute(problem, kind, references)
            sums = {operand.name: self._checksum(operand) for operand in self._inputs()}
            self._known[kind] = (references, sums)
        self._kind = kind

    def arm(self, extra: Sequence[Guarded] = ()) -> None:
        """Poison the outputs, the candidate's own buffers, and every guard band."""
        problem, _ = self._opened()
        outputs = [self._operands[output.name] for output in problem.outputs]
        for buffer in (*outputs, *extra):
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
        references, sums = self._known[self._kind]
        strayed = {
            buffer.name: self._count(buffer.pointer - GUARD_BYTES)
            + self._count(buffer.pointer + buffer.bytes)
            for buffer in (*self._operands.values(), *extra)
        }
        changed = [
            operand.name
            for operand in self._inputs()
            if self._checksum(operand) != sums[operand.name]
        ]
        limits = limits_of(problem)
        worst = 0.0
        for output in problem.outputs:
            written = self._operands[output.name].pointer
            comparison = self.compare(written, references[output.name], output, limits)
            if not comparison.is_sound and not changed:
                self._compute(problem, self._kind, references)
                comparison = self.compare(written, references[output.name], output, limits)
            verdict = judge(comparison, output, strayed, changed, limits)
            if verdict.status is not Status.OK:
                name = "" if len(problem.outputs) == 1 else f"{output.name}: "
                log = verdict.log and f"{self._kind} inputs: {name}{verdict.log}"
                return Verdict(verdict.status, verdict.error, log)
            worst = max(worst, verdict.error or 0.0)
        return Verdict(Status.OK, worst)

    def examine_lse(self, lse: Guarded) -> Verdict:
        """Judge the log-sum-exp that an attention kernel left, after `examine`.

        Args:
            lse: (B, H, SQ) fp32; of packed sequences (H, total_q).

        Raises:
            BenchmarkError: when it was not asked for by `load`.
        """
        problem, _ = self._opened()
        if not isinstance(problem, AttentionProblem) or self._kind not in self._statistics:
            raise BenchmarkError("the numerics gate has no log-sum-exp to compare with")
        rows = lse.bytes // 4
        statistics = array("d", self._device.read(self._statistics[self._kind], 16 * rows))
        found = array("f", self._device.read(lse.pointer, lse.bytes))
        verdict = judge_lse(found, lse_of(problem, statistics))
        log = verdict.log and f"{self._kind} inputs: {verdict.log}"
        return Verdict(verdict.status, verdict.error, log)

    def compare(self, output: int, reference: int, operand: Operand, limits: Limits) -> Comparison:
        """Compare an output's memory with fp32 reference memory of the same order."""
        width = max(
            extent
            for extent, stride in zip(operand.shape, operand.strides, strict=True)
            if stride == 1
        )
        data = self._ask(
            (output, reference, self._result),
            (_COMPARE, _DTYPES[operand.dtype], operand.elements, width),
            (limits.absolute, limits.relative, limits.row),
        )
        return Comparison.unpack(data, operand.elements)

    def copying(self, source: int, target: int, size: int, stream: Callable[[], int]) -> Call:
        """A launch of the element-wise kernel that copies `size` bytes, on the stream of then."""
        return lambda: self._kernel.launch((source, target), (_COPY, size), (), 0, stream())

    def reference(self, kind: str, output: str = "") -> int:
        """Address of the fp32 reference of inputs that were loaded before.

        Args:
            kind: of the inputs.
            output: name of the operand; empty: the last one.
        """
        problem, _ = self._opened()
        return self._known[kind][0][output or problem.output.name]

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
        for operand in self._inputs():
            if operand.name in _STARTS:
                self._device.write(
                    self._operands[operand.name].pointer, starts_of(problem, operand, kind)
                )
                continue
            if operand.dtype == "bool":
                *parts, rows, keys = operand.shape
                extents = math.prod(parts) * rows, rows, keys
                pointer = self._operands[operand.name].pointer
                self._run((pointer,), (_PLANT_MASK, *extents, draw.getrandbits(62)))
                continue
            if operand.name in _TABLES and isinstance(problem, AttentionProblem):
                data = pages.written(problem, operand.name, kind, seed)
                self._device.write(self._operands[operand.name].pointer, data)
                continue
            elements = operand.elements
            if operand.name in self._rows:
                elements = self._rows[operand.name].bytes // DTYPE_BYTES[operand.dtype]
            self._run(
                (self._sources[operand.name],),
                (_FILL, _DTYPES[operand.dtype], elements, draw.getrandbits(62)),
                (means.get(operand.name, 0.0), deviations.get(operand.name, 1.0)),
            )
        if kind == "dominant" or kind == "planted":
            self._plant(problem, kind, seed, draw.getrandbits(62))
        elif kind == "huge_scores":
            self._plant_huge(problem, kind, draw.getrandbits(62))
        if isinstance(problem, AttentionProblem) and problem.is_paged:
            self._fill_pages(problem, kind)
        if isinstance(problem, AttentionBackwardProblem):
            self._keep_attention(problem, kind)

    def _keep_attention(self, problem: AttentionBackwardProblem, kind: str) -> None:
        """Put attention's output and log-sum-exp in their places among the inputs."""
        forward, at = problem.forward, self.pointers
        if kind not in self._kept:
            exact = self._references.allocate(4 * forward.output.elements)
            statistics = self._references.allocate(16 * score_rows(forward))
            self._kept[kind] = (exact, statistics)
        exact, statistics = self._kept[kind]
        scale = scale_of(problem, kind)
        self._run_attention(forward, kind, (exact, statistics), {}, scale)
        self._run(
            (exact, statistics, at["out"], at["logsumexp"]),
            (
                *(_KEEP_ATTENTION, _DTYPES[problem.dtype]),
                *(forward.output.elements, score_rows(forward)),
            ),
        )

    def _lying(self, operand: Operand) -> Operand:
        """An operand with the strides that it has here."""
        return replace(operand, strides=self._strides.get(operand.name, operand.strides))

    def _fill_pages(self, problem: AttentionProblem, kind: str) -> None:
        """Copy keys and values to their pages; all other slots hold the poison."""
        heads, width = problem.heads_kv, problem.head_dim
        columns = max(problem.pages)
        for operand in problem.matrices[1:3]:
            cache = self._operands[operand.name]
            self._device.fill16(cache.pointer, POISON, cache.bytes)
            source, table = self._rows[operand.name].pointer, self.pointers["page_table"]
            for part in pages.parts(problem, kind):
                integers = (part.keys, heads, width, *operand.strides[:3], problem.page_size)
                if part.keys:
                    self._run((source, cache.pointer, table), (_TO_PAGES, *integers))
                source += 2 * part.keys * heads * width
                table += 4 * columns

    def _plant(self, problem: Problem, kind: str, seed: int, row_seed: int) -> None:
        at = self._sources
        if isinstance(problem, AttentionProblem | AttentionBackwardProblem):
            strength = DOMINANCE
            if isinstance(problem, AttentionBackwardProblem):
                strength, problem = _prominence(problem), problem.forward
            for one, shift, sides in _parts(problem, kind):
                self._run(
                    (at["query"] + shift["query"], at["key"] + shift["key"]),
                    (
                        _PLANT_ATTENTION,
                        _DTYPES[one.dtype],
                        *_attention_integers(one, 2),
                        *sides,
                        row_seed,
                    ),
                    (strength,),
                )
        elif isinstance(problem, GemmProblem | SwigluProblem | GroupedGemmProblem):
            columns = border_columns(problem.k, seed)
            batch, rows, strides = _matrices(self._lying(problem.operands[0]))
            self._run(
                (at["a"],),
                (
                    *(_SCALE_COLUMNS, _DTYPES[problem.dtype], batch, rows),
                    *(*strides, len(columns), *columns),
                ),
                (E4M3_COLUMN_FACTOR if problem.dtype == E4M3 else COLUMN_FACTOR,),
            )
            if isinstance(problem, GemmProblem) and problem.scales == "block":
                self._plant_factors(problem, seed)
        else:
            self._run(
                (at["scores"],),
                (_PLANT_SOFTMAX, *_softmax_integers(problem), row_seed),
                (LARGE / SOFTMAX_SCALE,),
            )

    def _plant_factors(self, problem: GemmProblem, seed: int) -> None:
        """Small factors of A's rows at the borders of tiles, and of the last block of B's columns:
        a neighbour's factor in their place makes a result 16 times too large.
        """
        _, _, scale_a, scale_b, _ = problem.operands
        (blocks, _), (columns, _) = scale_a.shape, scale_b.shape
        rows = border_columns(problem.m, seed)
        for operand, strides, chosen in (
            (scale_a, scale_a.strides, rows),
            (scale_b, scale_b.strides[::-1], [columns - 1]),
        ):
            self._run(
                (self.pointers[operand.name],),
                (
                    *(_SCALE_COLUMNS, _DTYPES[operand.dtype], 1, blocks, operand.elements),
                    *(*strides, len(chosen), *chosen),
                ),
                (SMALL_FACTOR,),
            )

    def _plant_huge(self, problem: Problem, kind: str, row_seed: int) -> None:
        """Scores that are all equal, and one that differs, as large as the type allows."""
        at = self._sources
        if not isinstance(problem, AttentionProblem):
            rows, cols, *_ = _softmax_integers(problem)
            limits = (HUGE_SOFTMAX.start, len(HUGE_SOFTMAX))
            self._run((at["scores"],), (_PLANT_HUGE_SOFTMAX, rows, cols, row_seed), limits)
            return
        exponents, _ = HUGE_EXPONENTS[problem.dtype]
        for one, shift, _ in _parts(problem, kind):
            self._run(
                (at["query"] + shift["query"], at["key"] + shift["key"]),
                (
                    *(_PLANT_HUGE_ATTENTION, _DTYPES[one.dtype]),
                    *_attention_integers(one, 2),
                    row_seed,
                ),
                (exponents.start, len(exponents)),
            )

    def _compute(self, problem: Problem, kind: str, references: Mapping[str, int]) -> None:
        at = self.pointers
        inputs = [at[operand.name] for operand in problem.inputs]
        reference = references[problem.output.name]
        scale = scale_of(problem, kind)
        if isinstance(problem, GemmProblem):
            a, b, *_, d = map(self._lying, problem.operands)
            extents = (problem.batch, problem.m, problem.n, problem.k)
            activation = ("", *ACTIVATIONS).index(problem.activation)
            integers = (
                *(_GEMM, _DTYPES[problem.dtype], *extents, *a.strides, *b.strides, *d.strides),
                *(activation, _DTYPES[d.dtype], int(problem.scales == "row")),
                problem.operands[2].strides[0] if problem.scales == "block" else 0,
            )
            others = ("bias", "residual", "scale_a", "scale_b")
            tensors = (at["a"], at["b"], reference, *(at.get(name, 0) for name in others))
            self._run(tensors, integers, (scale, 1.0))
        elif isinstance(problem, SwigluProblem):
            self._compute_swiglu(problem, scale, reference)
        elif isinstance(problem, GroupedGemmProblem):
            self._compute_groups(problem, kind, scale, reference)
        elif isinstance(problem, AttentionProblem):
            self._compute_attention(problem, kind, scale, reference)
        elif isinstance(problem, AttentionBackwardProblem):
            self._compute_gradients(problem, kind, scale, references)
        else:
            integers = (_SOFTMAX, *_softmax_integers(problem))
            self._run((*inputs, reference), integers, (scale,))
        self._device.wait()

    def _compute_attention(
        self, problem: AttentionProblem, kind: str, scale: float, reference: int
    ) -> None:
        at = self._sources
        others = {name: at[name] for name in _ATTENTION_OTHERS if name in at}
        with Pool(self._device) as pool:
            statistics = self._statistics.get(kind) or pool.allocate(16 * score_rows(problem))
            self._run_attention(problem, kind, (reference, statistics), others, scale)
            self._device.wait()

    def _run_attention(
        self,
        problem: AttentionProblem,
        kind: str,
        results: tuple[int, int],
        others: Mapping[str, int],
        scale: float,
    ) -> None:
        """One sequence after the other where their lengths vary; else all at once.

        Args:
            problem: what is computed of the operands `query`, `key` and `value`.
            kind: of the inputs.
            results: addresses of the fp32 output and of each row's maximum and sum.
            others: addresses of those of `_ATTENTION_OTHERS` that there are.
            scale: of the scores.
        """
        at = self._sources
        reference, statistics = results
        for one, shift, sides in _parts(problem, kind):
            matrices = [at[name] + shift[name] for name in ("query", "key", "value")]
            further = [others.get(name, 0) for name in _ATTENTION_OTHERS]
            self._run(
                (*matrices, reference + shift["reference"], statistics, *further),
                (
                    _ATTENTION,
                    _DTYPES[one.dtype],
                    *_attention_integers(one, 4),
                    *sides,
                    *one.mask_strides,
                ),
                (scale, one.softcap),
            )
            statistics += 16 * score_rows(one)

    def _compute_gradients(
        self,
        problem: AttentionBackwardProblem,
        kind: str,
        scale: float,
        references: Mapping[str, int],
    ) -> None:
        """From the exact output, not from the rounded one among the inputs."""
        forward, at = problem.forward, self.pointers
        with Pool(self._device) as pool:
            delta = pool.allocate(8 * score_rows(forward))
            inputs = [at[name] for name in ("query", "key", "value", "grad_out")]
            self._run(
                (*inputs, *self._kept[kind], delta, *references.values()),
                (
                    *(_GRADIENTS, _DTYPES[problem.dtype]),
                    *(*_attention_integers(forward, 4), *forward.visible),
                ),
                (scale,),
            )
            self._device.wait()

    def _compute_groups(
        self, problem: GroupedGemmProblem, kind: str, scale: float, reference: int
    ) -> None:
        """One group that has rows after the other."""
        n, k, width = problem.n, problem.k, DTYPE_BYTES[problem.dtype]
        factors = {operand.name: operand for operand in problem.operands[3:-1]}
        step = factors["scale_a"].strides[0] if factors else 0
        start = 0
        for group, rows in enumerate(_group_rows(problem, kind)):
            a = self.pointers["a"] + start * k * width
            b = self.pointers["b"] + group * n * k * width
            strides = (rows * k, k, 1, n * k, 1, k, rows * n, n, 1)
            integers = (_GEMM, _DTYPES[problem.dtype], 1, rows, n, k, *strides, 0, 0, 0, step)
            scales = (0, 0)
            if factors:
                shift = 4 * group * factors["scale_b"].strides[0]
                scales = self.pointers["scale_a"] + 4 * start, self.pointers["scale_b"] + shift
            if rows:
                outputs = (a, b, reference + 4 * start * n, 0, 0, *scales)
                self._run(outputs, integers, (scale, 1.0))
            start += rows

    def _compute_swiglu(self, problem: SwigluProblem, scale: float, reference: int) -> None:
        """Both projections in the order of the weights' rows, then the pairs."""
        m, n, k = problem.m, problem.n, problem.k
        at = self.pointers
        with Pool(self._device) as pool:
            both = pool.allocate(4 * m * 2 * n)
            extents = (1, m, 2 * n, k)
            strides = (m * k, k, 1, 2 * n * k, 1, k, m * 2 * n, 2 * n, 1)
            integers = (_GEMM, _DTYPES[problem.dtype], *extents, *strides, 0, 0, 0, 0)
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
    if kind == "huge_scores":
        return _huge_moments(problem)
    if isinstance(problem, AttentionProblem) and problem.dtype == E4M3:
        return _e4m3_moments(kind == "dominant", large)
    if isinstance(problem, AttentionProblem):
        slope = SLOPE
        if kind == "dominant":
            slope = DOMINANCE / max(problem.seqlen_q, problem.seqlen_kv)
        means = {"slopes": slope, "key": KEY_MEAN if kind == "dominant" else 0.0}
        return means, {"query": large, "bias": large, "slopes": slope / 4}
    if isinstance(problem, AttentionBackwardProblem):
        return {"key": KEY_MEAN if kind == "planted" else 0.0}, {}
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


def _huge_moments(problem: Problem) -> tuple[dict[str, float], dict[str, float]]:
    """Keys that are all alike, for `Gate._plant_huge`; nothing is added to their scores.

    What a bias or ALiBi adds would be lost beside them in fp32, and not in the reference.
    """
    if not isinstance(problem, AttentionProblem):
        return {}, {}
    means: dict[str, float] = {}
    deviations: dict[str, float] = {}
    if problem.dtype == E4M3:
        means, deviations = _e4m3_moments(False, HUGE_DESCALE)
    _, exponent = HUGE_EXPONENTS[problem.dtype]
    return (
        {**means, "key": 2.0**exponent},
        {**deviations, "key": 0.0, "bias": 0.0, "slopes": 0.0},
    )


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


def _prominence(problem: AttentionBackwardProblem) -> float:
    """What a query is times its key: the key then has about a quarter of the row's probability.

    Where it has nearly all, as under `dominant`, derivatives of the scores are differences of equal
    numbers, and all that is left of them is the rounding of the output.
    """
    keys = max(4, problem.seqlen_kv)
    return math.log(keys / 2) / (SCALE_FACTOR * math.sqrt(problem.head_dim))


def _parts(
    problem: AttentionProblem, kind: str
) -> Iterator[tuple[AttentionProblem, Mapping[str, int], tuple[int, int]]]:
    """What the reference is given at once; where that lies, bytes beyond each tensor's start; and
    left and right of its mask.

    Sequences of variable lengths, and those of a paged cache, one by one; any other problem is
    whole.
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
        yield one, dict(starts), (left, right)
        query, key, value, out = one.matrices
        starts["query"] += query.bytes
        for operand in (key, value):
            starts[operand.name] += operand.bytes // one.seqlen_kv * keys
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
