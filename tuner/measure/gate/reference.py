"""References of the numerics gate: fp64 results of the inputs that are in the buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.measure.device import Pool
from tuner.measure.gate.chunks import Chunk, chunks_of, is_sampled
from tuner.measure.gate.inputs import group_rows, parts_of, scale_of
from tuner.measure.gate.kernels import (
    DTYPES,
    Buffers,
    Command,
    Kernels,
    attention_integers,
    softmax_integers,
)
from tuner.measure.log_sum_exp import score_rows
from tuner.problem import (
    ACTIVATIONS,
    DTYPE_BYTES,
    AttentionBackwardProblem,
    AttentionProblem,
    GemmProblem,
    GroupedGemmProblem,
    Problem,
    SwigluProblem,
)

#: Attention's operands beside the matrices as the reference takes them; null where there is none.
_ATTENTION_OTHERS = ("descale_q", "descale_k", "descale_v", "bias", "slopes", "sinks", "mask")


def reference_seconds(problem: Problem) -> float:
    """Upper estimate of a reference's time, to allow for: 1 TFLOP/s of three products."""
    return 3 * problem.flops * (2 if getattr(problem, "is_causal", False) else 1) / 1e12


class References:
    """The references of one problem and seed, by kind of inputs.

    Args:
        kernels: that compute them.
        buffers: the problem's operands.
        sample: seed of the chunks that are computed in place of the whole; None: the whole.
    """

    def __init__(self, kernels: Kernels, buffers: Buffers, sample: int | None = None) -> None:
        self._kernels, self._buffers, self._sample = kernels, buffers, sample
        self._pool = Pool(kernels.device)
        self._outputs: dict[str, dict[str, int]] = {}
        """Address of each output's fp32 reference."""
        self._kept: dict[str, tuple[int, int]] = {}
        """Inputs of gradients: attention's exact output and row statistics."""
        self._statistics: dict[str, int] = {}
        """Maximum and sum of exponentials of each row of attention, where they are kept."""

    def outputs(self, kind: str) -> Mapping[str, int]:
        """Address of each output's fp32 reference."""
        return self._outputs[kind]

    def chunks(self, kind: str) -> list[Chunk]:
        """Chunks that are computed in place of the whole; empty where it is whole."""
        problem = self._buffers.problem
        if self._sample is None or not isinstance(problem, AttentionProblem):
            return []
        return chunks_of(problem, kind, self._sample) if is_sampled(problem) else []

    def statistics(self, kind: str) -> int | None:
        """Address of attention's row statistics; None where they were not asked for."""
        return self._statistics.get(kind)

    def load(self, kind: str, with_lse: bool) -> bool:
        """Compute what belongs to the inputs that are in the buffers, unless it is known.

        Args:
            kind: of the inputs.
            with_lse: of attention: keep the row statistics.

        Returns:
            True when it was computed.
        """
        problem = self._buffers.problem
        if with_lse and kind not in self._statistics:
            self._outputs.pop(kind, None)
            self._statistics[kind] = self._pool.allocate(16 * score_rows(problem))
        if kind in self._outputs:
            return False
        self._outputs[kind] = {
            output.name: self._pool.allocate(4 * output.elements) for output in problem.outputs
        }
        self.compute(kind)
        return True

    def close(self) -> None:
        """Free them."""
        self._pool.close()

    def keep_attention(self, problem: AttentionBackwardProblem, kind: str) -> None:
        """Put attention's output and log-sum-exp in their places among the inputs."""
        forward, at = problem.forward, self._buffers.pointers
        if kind not in self._kept:
            exact = self._pool.allocate(4 * forward.output.elements)
            statistics = self._pool.allocate(16 * score_rows(forward))
            self._kept[kind] = (exact, statistics)
        exact, statistics = self._kept[kind]
        scale = scale_of(problem, kind)
        self._run_attention(forward, kind, (exact, statistics), {}, scale)
        self._kernels.run(
            (exact, statistics, at["out"], at["logsumexp"]),
            (
                *(Command.KEEP_ATTENTION, DTYPES[problem.dtype]),
                *(forward.output.elements, score_rows(forward)),
            ),
        )

    def compute(self, kind: str) -> None:
        """Compute what belongs to the inputs that are in the buffers."""
        problem, references = self._buffers.problem, self._outputs[kind]
        at = self._buffers.pointers
        inputs = [at[operand.name] for operand in problem.inputs]
        reference = references[problem.output.name]
        scale = scale_of(problem, kind)
        if isinstance(problem, GemmProblem):
            a, b, *_, d = map(self._buffers.lying, problem.operands)
            extents = (problem.batch, problem.m, problem.n, problem.k)
            activation = ("", *ACTIVATIONS).index(problem.activation)
            integers = (
                *(
                    Command.GEMM,
                    DTYPES[problem.dtype],
                    *extents,
                    *a.strides,
                    *b.strides,
                    *d.strides,
                ),
                *(activation, DTYPES[d.dtype], int(problem.scales == "row")),
                problem.operands[2].strides[0] if problem.scales == "block" else 0,
            )
            others = ("bias", "residual", "scale_a", "scale_b")
            tensors = (at["a"], at["b"], reference, *(at.get(name, 0) for name in others))
            self._kernels.run(tensors, integers, (scale, 1.0))
        elif isinstance(problem, SwigluProblem):
            self._compute_swiglu(problem, scale, reference)
        elif isinstance(problem, GroupedGemmProblem):
            self._compute_groups(problem, kind, scale, reference)
        elif isinstance(problem, AttentionProblem):
            self._compute_attention(problem, kind, scale, reference)
        elif isinstance(problem, AttentionBackwardProblem):
            self._compute_gradients(problem, kind, scale, references)
        else:
            integers = (Command.SOFTMAX, *softmax_integers(problem))
            self._kernels.run((*inputs, reference), integers, (scale,))
        self._kernels.device.wait()

    def _compute_attention(
        self, problem: AttentionProblem, kind: str, scale: float, reference: int
    ) -> None:
        if chunks := self.chunks(kind):
            self._compute_chunks(problem, chunks, scale, reference)
            return
        at = self._buffers.sources
        others = {name: at[name] for name in _ATTENTION_OTHERS if name in at}
        with Pool(self._kernels.device) as pool:
            statistics = self._statistics.get(kind) or pool.allocate(16 * score_rows(problem))
            self._run_attention(problem, kind, (reference, statistics), others, scale)
            self._kernels.device.wait()

    def _compute_chunks(
        self, problem: AttentionProblem, chunks: Sequence[Chunk], scale: float, reference: int
    ) -> None:
        at, width = self._buffers.sources, DTYPE_BYTES[problem.dtype]
        with Pool(self._kernels.device) as pool:
            statistics = pool.allocate(16 * max(one.rows * one.heads for one in chunks))
            for one in chunks:
                shifts = one.shifts(problem)
                matrices = [at[n] + width * shifts[n] for n in ("query", "key", "value")]
                none = [0] * len(_ATTENTION_OTHERS)
                self._kernels.run(
                    (*matrices, reference + 4 * shifts["out"], statistics, *none),
                    (Command.ATTENTION, DTYPES[problem.dtype], *one.integers(problem)),
                    (scale, problem.softcap),
                )
            self._kernels.device.wait()

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
        at = self._buffers.sources
        reference, statistics = results
        for one, shift, sides in parts_of(problem, kind):
            matrices = [at[name] + shift[name] for name in ("query", "key", "value")]
            further = [others.get(name, 0) for name in _ATTENTION_OTHERS]
            self._kernels.run(
                (*matrices, reference + shift["reference"], statistics, *further),
                (
                    Command.ATTENTION,
                    DTYPES[one.dtype],
                    *attention_integers(one, 4),
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
        forward, at = problem.forward, self._buffers.pointers
        with Pool(self._kernels.device) as pool:
            delta = pool.allocate(8 * score_rows(forward))
            inputs = [at[name] for name in ("query", "key", "value", "grad_out")]
            self._kernels.run(
                (*inputs, *self._kept[kind], delta, *references.values()),
                (
                    *(Command.GRADIENTS, DTYPES[problem.dtype]),
                    *(*attention_integers(forward, 4), *forward.visible),
                ),
                (scale,),
            )
            self._kernels.device.wait()

    def _compute_groups(
        self, problem: GroupedGemmProblem, kind: str, scale: float, reference: int
    ) -> None:
        """One group that has rows after the other."""
        n, k, width = problem.n, problem.k, DTYPE_BYTES[problem.dtype]
        factors = {operand.name: operand for operand in problem.operands[3:-1]}
        step = factors["scale_a"].strides[0] if factors else 0
        start, at = 0, self._buffers.pointers
        for group, rows in enumerate(group_rows(problem, kind)):
            a, b = at["a"] + start * k * width, at["b"] + group * n * k * width
            strides = (rows * k, k, 1, n * k, 1, k, rows * n, n, 1)
            integers = (Command.GEMM, DTYPES[problem.dtype], 1, rows, n, k, *strides, 0, 0, 0, step)
            scales = (0, 0)
            if factors:
                shift = 4 * group * factors["scale_b"].strides[0]
                scales = at["scale_a"] + 4 * start, at["scale_b"] + shift
            if rows:
                outputs = (a, b, reference + 4 * start * n, 0, 0, *scales)
                self._kernels.run(outputs, integers, (scale, 1.0))
            start += rows

    def _compute_swiglu(self, problem: SwigluProblem, scale: float, reference: int) -> None:
        """Both projections in the order of the weights' rows, then the pairs."""
        m, n, k = problem.m, problem.n, problem.k
        at = self._buffers.pointers
        with Pool(self._kernels.device) as pool:
            both = pool.allocate(4 * m * 2 * n)
            extents = (1, m, 2 * n, k)
            strides = (m * k, k, 1, 2 * n * k, 1, k, m * 2 * n, 2 * n, 1)
            integers = (Command.GEMM, DTYPES[problem.dtype], *extents, *strides, 0, 0, 0, 0)
            self._kernels.run((at["a"], at["weights"], both, 0, 0, 0, 0), integers, (scale, 1.0))
            steps = [stride // k for stride in problem.operands[1].strides[:-1]]
            self._kernels.run((both, reference), (Command.GATE_PAIRS, m, n, *steps))
            self._kernels.device.wait()
