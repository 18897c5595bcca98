"""Numerics gate, the mandatory check of every candidate, entirely on the GPU: inputs, reference,
comparison, guard bands.

Every check fills the inputs again from the request's seed. The candidate writes to a poisoned
output between guard bands, and every element is compared with an fp64 reference. Kernels of
``templates/reference.cu.j2`` compute the reference. Products of up to 32 elements are summed in
fp32 first. Neither PyTorch nor numpy is used. If the reference takes long, a final pass compares a
sample of the rows (`chunks`).

`inputs` defines the inputs, `filling` writes them on the device, `reference` computes the
references, `chunks` draws samples, and `measure.tolerance` has the limits.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tuner.compile.loading import LoadedKernel
from tuner.errors import BenchmarkError
from tuner.families.base import KernelSpec, Strides
from tuner.measure.device import Device, Pool
from tuner.measure.gate import chunks as sampling
from tuner.measure.gate.commands import COMMANDS, Command
from tuner.measure.gate.filling import fill
from tuner.measure.gate.inputs import (
    DOMINANCE,
    LARGE,
    is_reported,
    offsets,
    query_deviation,
)
from tuner.measure.gate.kernels import (
    ARENA_BYTES,
    POISON,
    Answer,
    Arena,
    Buffers,
    Guarded,
    Kernels,
    guarded,
    poison_of,
)
from tuner.measure.gate.reference import References
from tuner.measure.log_sum_exp import judge_lse, lost_of, lse_of, tops_of
from tuner.measure.subjects import Call
from tuner.measure.tolerance import Limits, OutputComparison, Verdict, judge, limits_of
from tuner.measurement import Status
from tuner.problem import (
    DTYPE_BYTES,
    AttentionBackwardProblem,
    AttentionProblem,
    Operand,
    Problem,
)

REFERENCE = KernelSpec(
    "reference.cu.j2",
    arguments={command.name.lower(): COMMANDS[command] for command in Command},
)
"""Spec of the kernels that compute references. They are compiled like a candidate's."""


_REST = "all buffers"
"""Name of memory that no buffer has, in a verdict."""


@dataclass(frozen=True)
class _Known:
    """References of one seed of the inputs."""

    seed: int
    references: References
    sums: dict[str, dict[str, Answer]] = field(default_factory=dict)
    """Checksums of the inputs by kind and operand."""


class _Comparison(NamedTuple):
    """Comparison of an output, or of a chunk of it, whose answer is on its way."""

    name: str
    """Its name in a verdict."""
    output: Operand
    at: tuple[int, int]
    """Addresses of the output and its reference."""
    limits: Limits
    answer: Answer

    def result(self) -> OutputComparison:
        return OutputComparison.unpack(self.answer.data, self.output.elements)


@dataclass(frozen=True)
class Examination:
    """Checks of one run of a candidate, whose results are there after `Gate.collect`."""

    kind: str
    strayed: Mapping[str, Answer]
    sums: Mapping[str, Answer]
    comparisons: Sequence[_Comparison]
    lse: tuple[Answer, Answer] | None = None
    """Row statistics of the reference, and the candidate's log-sum-exp."""

    @property
    def is_sound(self) -> bool:
        """False if a reference is not finite: the candidate may have overwritten it."""
        return all(one.result().is_sound for one in self.comparisons)


class Gate:
    """Checks candidates on one device.

    The gate owns the operands' buffers, and allocates them once a problem. References are kept for
    the latest problem and seed.

    Args:
        device: device to run on.
        kernel: loaded kernel of `REFERENCE`.
        arena: bytes of memory that is allocated once, for short problems.
    """

    def __init__(self, device: Device, kernel: LoadedKernel, arena: int = ARENA_BYTES) -> None:
        self._device, self._kernels = device, Kernels(device, kernel, arena)
        self._buffers: Buffers | None = None
        self._known: dict[bool, _Known] = {}
        """References by whether they are sampled."""
        self._is_sampled = False
        self._kind = ""

    @property
    def operands(self) -> dict[str, Guarded]:
        """Buffer of each operand."""
        return self._buffers.operands if self._buffers else {}

    @property
    def pointers(self) -> dict[str, int]:
        """Device address of each operand."""
        return self._buffers.pointers if self._buffers else {}

    def open(
        self,
        problem: Problem,
        seed: int,
        strides: Strides | None = None,
        *,
        is_sampled: bool = False,
    ) -> None:
        """Allocate a problem's buffers and forget the references of another problem or seed. A
        sampled pass does not forget the whole references, which take seconds to compute again.

        Args:
            problem: problem to check.
            seed: random seed of the inputs.
            strides: strides of a GEMM's matrices that differ from the problem's.
            is_sampled: True to compute and compare only `chunks`, for problems that have them.
        """
        buffers, strides = self._buffers, strides or {}
        if buffers is None or (buffers.problem, buffers.strides) != (problem, strides):
            self.close()
            self._buffers = buffers = Buffers(self._kernels.memory, problem, strides)
        self._is_sampled = is_sampled = is_sampled and sampling.is_sampled(problem)
        earlier = self._known.get(is_sampled)
        if earlier is None or earlier.seed != seed:
            self._forget(is_sampled)
            references = References(self._kernels, buffers, seed if is_sampled else None)
            self._known[is_sampled] = _Known(seed, references)
        self._kind = ""

    def close(self) -> None:
        """Free all memory that depends on the problem."""
        self._forget(*self._known)
        if self._buffers is not None:
            self._buffers.close()
        self._buffers = None
        self._kind = ""

    def _forget(self, *flags: bool) -> None:
        for is_sampled in flags:
            if cached := self._known.pop(is_sampled, None):
                cached.references.close()

    @property
    def memory(self) -> Arena:
        """Memory for a candidate's own buffers."""
        return self._kernels.memory

    def allocate(self, pool: Pool, name: str, size: int) -> Guarded:
        """Allocate a buffer between guard bands from `pool`: 256-byte aligned, an even number of
        bytes.
        """
        return guarded(pool, [(name, size)])[name]

    def load(self, kind: str, with_lse: bool = False) -> None:
        """Write the inputs of `kind` into the buffers. Computes their reference if it is not known.

        Args:
            kind: one of `inputs.KINDS`.
            with_lse: True if attention's log-sum-exp will be judged.
        """
        buffers, known = self._opened()
        references, seed = known.references, known.seed
        fill(self._kernels, buffers, kind, seed)
        if isinstance(buffers.problem, AttentionBackwardProblem):
            references.keep_attention(buffers.problem, kind)
        if self._compute(references, kind, with_lse):
            known.sums[kind] = {operand.name: self._checksum(operand) for operand in buffers.inputs}
        self._kind = kind

    def _compute(self, references: References, kind: str, with_lse: bool) -> bool:
        """`References.load`, without the other pass's references where memory is short."""
        try:
            return references.load(kind, with_lse)
        except BenchmarkError as exc:
            other = not self._is_sampled
            if exc.status is not Status.OUT_OF_MEMORY or other not in self._known:
                raise
            self._forget(other)
            return references.load(kind, with_lse)

    def arm(self, extra: Sequence[Guarded] = ()) -> None:
        """Fill the outputs, the candidate's own buffers and every guard band with poison."""
        buffers, _ = self._opened()
        operands, problem = buffers.operands, buffers.problem
        outputs = [(operands[x.name], poison_of(x.dtype)) for x in problem.outputs]
        for buffer, poison in (*outputs, *((buf, POISON) for buf in extra)):
            self._device.fill16(buffer.pointer, poison, buffer.bytes)
        for buffer in (*operands.values(), *extra):
            self._kernels.poison(buffer)
        self._kernels.memory.poison_rest()

    def examine(self, extra: Sequence[Guarded] = (), lse: Guarded | None = None) -> Verdict:
        """Wait for the candidate and judge its output; arguments as of `watch`.

        Raises:
            BenchmarkError: when the candidate's work failed on the device.
            GateError: when the reference is not finite.
        """
        examination = self.watch(extra, lse)
        self.collect()
        return self.judge(examination)

    def watch(self, extra: Sequence[Guarded] = (), lse: Guarded | None = None) -> Examination:
        """Enqueue the checks of the candidate's run. Several runs may be checked before `collect`.

        Args:
            extra: the candidate's own buffers.
            lse: the log-sum-exp of an attention kernel, if it is to be judged: fp32 (B, H, SQ), or
                (H, total_q) for packed sequences.

        Raises:
            BenchmarkError: when `lse` is to be judged, and `load` was called without `with_lse`.
        """
        buffers, cached = self._opened()
        statistics = cached.references.statistics(self._kind)
        if lse is not None and statistics is None:
            raise BenchmarkError("the numerics gate has no log-sum-exp to compare with")
        fetch, probed = self._kernels.fetch, None
        if lse is not None and statistics is not None:
            probed = fetch(statistics, 4 * lse.bytes), fetch(lse.pointer, lse.bytes)
        watched = (*buffers.operands.values(), *extra)
        strayed = {buffer.name: self._kernels.strayed(buffer) for buffer in watched}
        if (rest := self._kernels.memory.rest())[1]:
            strayed[_REST] = self._kernels.changed(rest)
        return Examination(
            self._kind,
            strayed,
            {operand.name: self._checksum(operand) for operand in buffers.inputs},
            self._comparisons(),
            probed,
        )

    def collect(self) -> None:
        """Wait for the device, and read what it was asked.

        Raises:
            BenchmarkError: when work failed on the device.
        """
        self._kernels.collect()

    def judge(self, examination: Examination) -> Verdict:
        """Verdict of a run, after `collect`; an error that `is_reported` has no limit.

        A reference that is not finite is computed again: the candidate may have overwritten it. The
        run must then be the latest.

        Raises:
            GateError: when the reference is still not finite.
        """
        buffers, cached = self._opened()
        problem, kind, sums = buffers.problem, examination.kind, cached.sums[examination.kind]
        strayed = {name: answer.number for name, answer in examination.strayed.items()}
        changed = [
            name for name, now in examination.sums.items() if now.number != sums[name].number
        ]
        if not examination.is_sound and not changed and kind == self._kind:
            cached.references.compute(kind)
            examination = replace(examination, comparisons=self._comparisons())
            self.collect()
        worst = 0.0
        for compared in examination.comparisons:
            verdict = judge(compared.result(), compared.output, strayed, changed, compared.limits)
            if verdict.status is not Status.OK:
                log = verdict.log and f"{kind} inputs: {compared.name}{verdict.log}"
                return Verdict(verdict.status, verdict.error, log)
            worst = max(worst, verdict.error or 0.0)
        if examination.lse is not None and isinstance(problem, AttentionProblem):
            verdict = _judge_lse(problem, kind, *examination.lse)
            if verdict.status is not Status.OK:
                return verdict
        return Verdict(Status.OK, worst)

    def _comparisons(self) -> list[_Comparison]:
        """Compare the outputs with their references. Limits by a whole reference's root mean square
        wait for that.
        """
        comparisons = list(self._compared())
        if not any(one.limits.whole for one in comparisons):
            return comparisons
        self.collect()
        return [self._resolved(one) for one in comparisons]

    def _compared(self) -> Iterator[_Comparison]:
        """Compare the outputs, or chunks of them."""
        buffers, cached = self._opened()
        references, drawn = cached.references, (buffers.problem, self._kind)
        problem, exact = buffers.problem, references.outputs(self._kind)
        for output in problem.outputs:
            limits = limits_of(problem, output.name, query_deviation(*drawn), *offsets(*drawn))
            limits = limits.lifted if is_reported(*drawn) else limits
            written, reference = buffers.operands[output.name].pointer, exact[output.name]
            chunks = references.chunks(self._kind)
            if not chunks or not isinstance(problem, AttentionProblem):
                name = "" if len(problem.outputs) == 1 else f"{output.name}: "
                yield self._comparison(name, output, (written, reference), limits)
                continue
            for chunk in chunks:
                shift = chunk.shifts(problem)[output.name]
                at = written + DTYPE_BYTES[output.dtype] * shift, reference + 4 * shift
                yield self._comparison(f"{chunk.text}: ", chunk.output(problem), at, limits)

    def _comparison(
        self, name: str, output: Operand, at: tuple[int, int], limits: Limits
    ) -> _Comparison:
        return _Comparison(name, output, at, limits, self._kernels.compare(*at, output, limits))

    def _resolved(self, compared: _Comparison) -> _Comparison:
        """A comparison once more, by the whole's root mean square."""
        result = compared.result()
        if not compared.limits.whole or not result.is_sound:
            return compared
        rms = math.sqrt(result.reference_squares / max(1, result.elements))
        limits = compared.limits.resolved(rms)
        return compared._replace(
            answer=self._kernels.compare(*compared.at, compared.output, limits)
        )

    def copying(self, source: int, target: int, size: int, stream: Callable[[], int]) -> Call:
        """Bound launch of the element-wise kernel that copies `size` bytes, on the stream at that
        time.
        """
        return self._kernels.copying(source, target, size, stream)

    def reference(self, kind: str, output: str = "") -> int:
        """Device address of the fp32 reference of inputs that were loaded before.

        Args:
            kind: kind of the inputs.
            output: name of the output operand; empty: the last one.
        """
        buffers, cached = self._opened()
        references = cached.references
        return references.outputs(kind)[output or buffers.problem.output.name]

    def _opened(self) -> tuple[Buffers, _Known]:
        cached = self._known.get(self._is_sampled)
        if self._buffers is None or cached is None:
            raise BenchmarkError("the numerics gate has no problem open")
        return self._buffers, cached

    def _checksum(self, operand: Operand) -> Answer:
        return self._kernels.checksum(self.pointers[operand.name], operand.bytes)


def _judge_lse(problem: AttentionProblem, kind: str, statistics: Answer, lse: Answer) -> Verdict:
    """Verdict of a log-sum-exp."""
    exact, values = array("d", statistics.data), array("f", lse.data)
    deviation = {"large_scores": LARGE, "dominant": DOMINANCE}.get(kind, 1.0)
    lost = lost_of(problem, deviation, tops_of(problem, exact))
    verdict = judge_lse(values, lse_of(problem, exact), lost)
    log = verdict.log and f"{kind} inputs: {verdict.log}"
    return Verdict(verdict.status, verdict.error, log)
