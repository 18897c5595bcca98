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
from dataclasses import dataclass, field

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
from tuner.measure.gate.kernels import POISON, Buffers, Guarded, Kernels, guarded, poison_of
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


@dataclass(frozen=True)
class _Known:
    """References of one seed of the inputs."""

    seed: int
    references: References
    sums: dict[str, dict[str, int]] = field(default_factory=dict)
    """Checksums of the inputs by kind and operand."""


class Gate:
    """Checks candidates on one device.

    The gate owns the operands' buffers, and allocates them once a problem. References are kept for
    the latest problem and seed.

    Args:
        device: device to run on.
        kernel: loaded kernel of `REFERENCE`.
    """

    def __init__(self, device: Device, kernel: LoadedKernel) -> None:
        self._device, self._kernels = device, Kernels(device, kernel)
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
            self._buffers = buffers = Buffers(self._device, problem, strides)
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

    def allocate(self, pool: Pool, name: str, size: int) -> Guarded:
        """Allocate a buffer between guard bands from `pool`: 256-byte aligned, an even number of
        bytes.
        """
        return guarded(pool, name, size)

    def load(self, kind: str, with_lse: bool = False) -> None:
        """Write the inputs of `kind` into the buffers. Computes their reference if it is not known.

        Args:
            kind: one of `inputs.KINDS`.
            with_lse: True if `examine_lse` will be called, for attention.
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

    def examine(self, extra: Sequence[Guarded] = ()) -> Verdict:
        """Wait for the candidate and judge its output; an error that `is_reported` has no limit.

        A reference that is not finite is computed again: the candidate may have overwritten it.

        Raises:
            BenchmarkError: when the candidate's work failed on the device.
            GateError: when the reference is still not finite.
        """
        self._device.wait()
        buffers, cached = self._opened()
        problem, references, sums = buffers.problem, cached.references, cached.sums[self._kind]
        exact = references.outputs(self._kind)
        strayed = {
            buffer.name: self._kernels.strayed(buffer)
            for buffer in (*buffers.operands.values(), *extra)
        }
        changed = [
            operand.name
            for operand in buffers.inputs
            if self._checksum(operand) != sums[operand.name]
        ]
        worst, drawn = 0.0, (problem, self._kind)
        for name, output, written, reference in self._compared(exact):
            limits = limits_of(problem, output.name, query_deviation(*drawn), *offsets(*drawn))
            limits = limits.lifted if is_reported(*drawn) else limits
            comparison = self.compare(written, reference, output, limits)
            if not comparison.is_sound and not changed:
                references.compute(self._kind)
                comparison = self.compare(written, reference, output, limits)
            verdict = judge(comparison, output, strayed, changed, limits)
            if verdict.status is not Status.OK:
                log = verdict.log and f"{self._kind} inputs: {name}{verdict.log}"
                return Verdict(verdict.status, verdict.error, log)
            worst = max(worst, verdict.error or 0.0)
        return Verdict(Status.OK, worst)

    def _compared(self, counts: Mapping[str, int]) -> Iterator[tuple[str, Operand, int, int]]:
        """Parts to compare: name in a verdict, extent, and addresses of the output and its
        reference.
        """
        buffers, cached = self._opened()
        references = cached.references
        problem = buffers.problem
        for output in problem.outputs:
            written, reference = buffers.operands[output.name].pointer, counts[output.name]
            chunks = references.chunks(self._kind)
            if not chunks or not isinstance(problem, AttentionProblem):
                name = "" if len(problem.outputs) == 1 else f"{output.name}: "
                yield name, output, written, reference
                continue
            for chunk in chunks:
                shift = chunk.shifts(problem)[output.name]
                at = written + DTYPE_BYTES[output.dtype] * shift, reference + 4 * shift
                yield f"{chunk.text}: ", chunk.output(problem), *at

    def examine_lse(self, lse: Guarded) -> Verdict:
        """Judge the log-sum-exp of an attention kernel, after `examine`.

        Args:
            lse: device address of the log-sum-exp: fp32 (B, H, SQ), or (H, total_q) for packed
                sequences.

        Raises:
            BenchmarkError: when `load` was called without `with_lse`.
        """
        buffers, cached = self._opened()
        references = cached.references
        problem, stats = buffers.problem, references.statistics(self._kind)
        if not isinstance(problem, AttentionProblem) or stats is None:
            raise BenchmarkError("the numerics gate has no log-sum-exp to compare with")
        rows = lse.bytes // 4
        statistics = array("d", self._device.read(stats, 16 * rows))
        values = array("f", self._device.read(lse.pointer, lse.bytes))
        deviation = {"large_scores": LARGE, "dominant": DOMINANCE}.get(self._kind, 1.0)
        lost = lost_of(problem, deviation, tops_of(problem, statistics))
        verdict = judge_lse(values, lse_of(problem, statistics), lost)
        log = verdict.log and f"{self._kind} inputs: {verdict.log}"
        return Verdict(verdict.status, verdict.error, log)

    def compare(
        self, output: int, reference: int, operand: Operand, limits: Limits
    ) -> OutputComparison:
        """Compare an output with an fp32 reference of the same memory order.

        Args:
            output: device address of the output.
            reference: device address of the reference.
            operand: shape, strides and type of the output.
            limits: limits of each element.
        """
        result = self._kernels.compare(output, reference, operand, limits)
        if not limits.whole or not result.is_sound:
            return result
        rms = math.sqrt(result.reference_squares / max(1, result.elements))
        return self._kernels.compare(output, reference, operand, limits.resolved(rms))

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

    def _checksum(self, operand: Operand) -> int:
        return self._kernels.checksum(self.pointers[operand.name], operand.bytes)
