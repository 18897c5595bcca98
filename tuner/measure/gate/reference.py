"""References of the numerics gate: fp64 results of the inputs in the buffers."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tuner.errors import BenchmarkError
from tuner.families.arguments import WINDOW
from tuner.measure.device import Pool
from tuner.measure.gate.chunks import RowChunk, chunks_of, is_sampled
from tuner.measure.gate.commands import ATTENTION_OTHERS, MASK_STRIDES, Command
from tuner.measure.gate.inputs import group_rows, parts_of, scale_of
from tuner.measure.gate.kernels import (
    DTYPES,
    Buffers,
    Kernels,
    attention_integers,
    matrix_strides,
    softmax_integers,
)
from tuner.measure.log_sum_exp import lse_of, score_rows
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

LANES = 32
"""Streams of sampled chunks. A worker has as many hardware queues (`worker_client.QUEUES`)."""
_PLAIN_TENSORS = dict.fromkeys(("bias", "residual", "scale_a", "scale_b"), 0)
"""Tensors that a product of two matrices alone does not have: null."""


def reference_seconds(problem: Problem) -> float:
    """Upper estimate of a reference's time in seconds, used as an allowance: three products at 1
    TFLOP/s.
    """
    return 3 * problem.flops * (2 if getattr(problem, "is_causal", False) else 1) / 1e12


class References:
    """References of one problem and seed, by kind of inputs.

    Args:
        kernels: kernels that compute them.
        buffers: operands of the problem.
        sample: seed of the sampled chunks; None: compute the whole.
    """

    def __init__(self, kernels: Kernels, buffers: Buffers, sample: int | None = None) -> None:
        self._kernels, self._buffers, self._sample = kernels, buffers, sample
        self._pool = Pool(kernels.memory)
        self._outputs: dict[str, dict[str, int]] = {}
        """Address of each output's fp32 reference."""
        self._kept: dict[str, tuple[int, int]] = {}
        """Inputs of gradients: attention's exact output and its row statistics."""
        self._statistics: dict[str, int] = {}
        """Maximum and sum of exponentials of each row of attention, if kept."""
        self._temporary: dict[str, tuple[int, int]] = {}
        """Address and size of one computation's memory by its use; the next one takes it over."""

    def outputs(self, kind: str) -> Mapping[str, int]:
        """Address of each output's fp32 reference."""
        return self._outputs[kind]

    def chunks(self, kind: str) -> list[RowChunk]:
        """Sampled chunks of a kind of inputs; empty if the whole is computed."""
        problem = self._buffers.problem
        if self._sample is None or not isinstance(problem, AttentionProblem):
            return []
        return chunks_of(problem, kind, self._sample) if is_sampled(problem) else []

    def statistics(self, kind: str) -> int | None:
        """Address of attention's row statistics; None if they were not requested."""
        return self._statistics.get(kind)

    def load(self, kind: str, with_lse: bool) -> bool:
        """Compute the reference of the inputs in the buffers, unless it is known.

        Args:
            kind: kind of the inputs.
            with_lse: True to keep the row statistics of attention.

        Returns:
            True if it was computed.
        """
        problem = self._buffers.problem
        if kind in self._outputs and (kind in self._statistics or not with_lse):
            return False
        sizes = [16 * score_rows(problem) if with_lse else 0]
        sizes += [4 * output.elements for output in problem.outputs]
        first, *starts = itertools.accumulate(sizes, initial=self._pool.allocate(sum(sizes)))
        if with_lse:
            self._statistics[kind] = first
        names = (output.name for output in problem.outputs)
        self._outputs[kind] = dict(zip(names, starts, strict=False))
        try:
            self.compute(kind)
        except BenchmarkError:
            del self._outputs[kind]
            raise
        return True

    def close(self) -> None:
        """Free them."""
        self._pool.close()

    def keep_attention(self, problem: AttentionBackwardProblem, kind: str) -> None:
        """Write attention's output and log-sum-exp to the inputs that hold them."""
        forward, at = problem.forward, self._buffers.pointers
        if kind not in self._kept:
            exact = self._pool.allocate(4 * forward.output.elements)
            statistics = self._pool.allocate(16 * score_rows(forward))
            self._kept[kind] = (exact, statistics)
        exact, statistics = self._kept[kind]
        scale = scale_of(problem, kind)
        self._run_attention(forward, kind, (exact, statistics), {}, scale)
        rows = forward.heads_q * forward.total_q
        self._kernels.run(
            Command.KEEP_ATTENTION,
            {
                **{"exact": exact, "statistics": statistics},
                **{"out": at["out"], "logsumexp": at["logsumexp"]},
            },
            {
                "dtype": DTYPES[problem.dtype],
                # Packed sequences have their statistics one after the other, rows of heads do not.
                **{"n": forward.output.elements, "rows": 0 if forward.is_varlen else rows},
            },
        )
        if forward.is_varlen:
            exact_rows = array("d", self._kernels.device.read(statistics, 16 * rows))
            lse = array("f", lse_of(forward, exact_rows))
            self._kernels.write(at["logsumexp"], lse.tobytes())

    def compute(self, kind: str) -> None:
        """Compute the reference of the inputs in the buffers, on the device's stream."""
        problem, references = self._buffers.problem, self._outputs[kind]
        at = self._buffers.pointers
        reference = references[problem.output.name]
        scale = scale_of(problem, kind)
        if isinstance(problem, GemmProblem):
            a, b, *_, d = map(self._buffers.lying, problem.operands)
            is_blocks = problem.scales == "block"
            integers = {
                "dtype": DTYPES[problem.dtype],
                **{"batch": problem.batch, "m": problem.m, "n": problem.n, "k": problem.k},
                **matrix_strides({"a": a.strides, "b": b.strides, "d": d.strides}),
                "activation": ("", *ACTIVATIONS).index(problem.activation),
                "residual_dtype": DTYPES[d.dtype],
                "scales_each": int(problem.scales == "row"),
                "scale_a_block": problem.operands[2].strides[0] if is_blocks else 0,
            }
            if problem.has_output_scale:
                (factor,) = array("f", self._kernels.device.read(at["scale_d"], 4))
                scale *= factor
            names = ("bias", "residual", "scale_a", "scale_b")
            tensors = {
                **{"a": at["a"], "b": at["b"], "d": reference},
                **{name: at.get(name, 0) for name in names},
            }
            self._kernels.run(Command.GEMM, tensors, integers, {"alpha": scale, "beta": 1.0})
        elif isinstance(problem, SwigluProblem):
            self._compute_swiglu(problem, scale, reference)
        elif isinstance(problem, GroupedGemmProblem):
            self._compute_groups(problem, kind, scale, reference)
        elif isinstance(problem, AttentionProblem):
            self._compute_attention(problem, kind, scale, reference)
        elif isinstance(problem, AttentionBackwardProblem):
            self._compute_gradients(problem, kind, scale, references)
        else:
            self._kernels.run(
                Command.SOFTMAX,
                {"scores": at["scores"], "out": reference},
                softmax_integers(problem),
                {"scale": scale},
            )

    def _temporarily(self, use: str, size: int) -> int:
        """Memory for `use`, the same for all kinds of inputs unless one needs more."""
        if size > self._temporary.get(use, (0, 0))[1]:
            self._temporary[use] = self._pool.allocate(size), size
        return self._temporary[use][0]

    def _compute_attention(
        self, problem: AttentionProblem, kind: str, scale: float, reference: int
    ) -> None:
        if chunks := self.chunks(kind):
            self._compute_chunks(problem, chunks, scale, reference)
            return
        at = self._buffers.sources
        extra = {name: at[name] for name in ATTENTION_OTHERS if name in at}
        statistics = self._statistics.get(kind)
        statistics = statistics or self._temporarily("statistics", 16 * score_rows(problem))
        self._run_attention(problem, kind, (reference, statistics), extra, scale)

    def _compute_chunks(
        self, problem: AttentionProblem, chunks: Sequence[RowChunk], scale: float, reference: int
    ) -> None:
        """Compute the chunks side by side: the kernel has two blocks for each, and its time grows
        with the keys.
        """
        at, width = self._buffers.sources, DTYPE_BYTES[problem.dtype]
        rows = max(c.rows * c.heads for c in chunks)
        sums = self._temporarily("chunks", 16 * rows * LANES)
        with self._lanes(LANES) as lanes:
            for number, one in enumerate(chunks):
                shifts, lane = one.shifts(problem), number % LANES
                self._kernels.run(
                    Command.ATTENTION,
                    {
                        **{n: at[n] + width * shifts[n] for n in ("query", "key", "value")},
                        **{"out": reference + 4 * shifts["out"]},
                        **{"statistics": sums + 16 * rows * lane},
                        **dict.fromkeys(ATTENTION_OTHERS, 0),
                    },
                    {"dtype": DTYPES[problem.dtype], **one.integers(problem)},
                    {"scale": scale, "softcap": problem.softcap},
                    stream=lanes[lane],
                )

    @contextmanager
    def _lanes(self, parts: int) -> Iterator[Sequence[int]]:
        """Streams for parts that are computed side by side, at most `LANES`."""
        count = min(parts, LANES)
        yield self._kernels.device.fork(count)
        self._kernels.device.join(count)

    def _run_attention(
        self,
        problem: AttentionProblem,
        kind: str,
        results: tuple[int, int],
        extra: Mapping[str, int],
        scale: float,
    ) -> None:
        """Run attention: a launch for each sequence if their lengths vary, else one.

        Args:
            problem: attention over the operands `query`, `key` and `value`.
            kind: kind of the inputs.
            results: addresses of the fp32 output, and of each row's maximum and sum.
            extra: addresses of those of `ATTENTION_OTHERS` that there are.
            scale: scale of the scores.
        """
        at = self._buffers.sources
        reference, statistics = results
        parts = [(one, {**shift}, sides) for one, shift, sides in parts_of(problem, kind)]
        with self._lanes(len(parts)) as lanes:
            for (one, shift, sides), lane in zip(parts, itertools.cycle(lanes), strict=False):
                self._kernels.run(
                    Command.ATTENTION,
                    {
                        **{name: at[name] + shift[name] for name in ("query", "key", "value")},
                        **{"out": reference + shift["reference"], "statistics": statistics},
                        **{name: extra.get(name, 0) for name in ATTENTION_OTHERS},
                    },
                    {
                        "dtype": DTYPES[one.dtype],
                        **attention_integers(one, 4),
                        **dict(zip(WINDOW, sides, strict=True)),
                        **dict(zip(MASK_STRIDES, one.mask_strides, strict=True)),
                        "value_dim": one.value_width,
                    },
                    {"scale": scale, "softcap": one.softcap},
                    stream=lane,
                )
                statistics += 16 * score_rows(one)

    def _compute_gradients(
        self,
        problem: AttentionBackwardProblem,
        kind: str,
        scale: float,
        references: Mapping[str, int],
    ) -> None:
        """Compute gradients as functions of the inputs, the rounded output among them.

        Where one key has nearly all of a row's probability, a derivative is the difference of two
        nearly equal sums, and from the exact output it would be another number.
        """
        forward, at = problem.forward, self._buffers.pointers
        delta = self._temporarily("delta", 8 * score_rows(forward))
        _, statistics = self._kept[kind]
        for one, shift, sides in parts_of(forward, kind):
            shift = {**shift, "out": shift["query"], "grad_out": shift["query"]}
            inputs = ("query", "key", "value", "out", "grad_out")
            self._kernels.run(
                Command.GRADIENTS,
                {
                    **{name: at[name] + shift[name] for name in inputs},
                    **{"statistics": statistics, "delta": delta},
                    # fp32 beside tensors of 16 bits
                    **{f"grad_{n}": references[f"grad_{n}"] + 2 * shift[n] for n in inputs[:3]},
                },
                {
                    "dtype": DTYPES[problem.dtype],
                    **attention_integers(one, 4),
                    **dict(zip(WINDOW, sides, strict=True)),
                },
                {"scale": scale, "softcap": problem.softcap},
            )
            statistics += 16 * score_rows(one)

    def _compute_groups(
        self, problem: GroupedGemmProblem, kind: str, scale: float, reference: int
    ) -> None:
        """Compute a grouped GEMM, a launch for each group with rows."""
        n, k, width = problem.n, problem.k, DTYPE_BYTES[problem.dtype]
        factors = {operand.name: operand for operand in problem.operands[3:-1]}
        step = factors["scale_a"].strides[0] if factors else 0
        start, at = 0, self._buffers.pointers
        with self._lanes(problem.groups) as lanes:
            for group, rows in enumerate(group_rows(problem, kind)):
                a, b = at["a"] + start * k * width, at["b"] + group * n * k * width
                scales = {"scale_a": 0, "scale_b": 0}
                if factors:
                    shift = 4 * group * factors["scale_b"].strides[0]
                    shifts = {"scale_a": 4 * start, "scale_b": shift}
                    scales = {name: at[name] + shift for name, shift in shifts.items()}
                if rows:
                    self._kernels.run(
                        Command.GEMM,
                        {
                            **_PLAIN_TENSORS,
                            "a": a,
                            "b": b,
                            "d": reference + 4 * start * n,
                            **scales,
                        },
                        {**_plain_product(problem.dtype, rows, n, k), "scale_a_block": step},
                        {"alpha": scale, "beta": 1.0},
                        stream=lanes[group % len(lanes)],
                    )
                start += rows

    def _compute_swiglu(self, problem: SwigluProblem, scale: float, reference: int) -> None:
        """Compute both projections in the order of the weights' rows, then SwiGLU of the pairs."""
        m, n, k = problem.m, problem.n, problem.k
        at, halves = self._buffers.pointers, self._temporarily("halves", 4 * m * 2 * n)
        self._kernels.run(
            Command.GEMM,
            {**_PLAIN_TENSORS, "a": at["a"], "b": at["weights"], "d": halves},
            _plain_product(problem.dtype, m, 2 * n, k),
            {"alpha": scale, "beta": 1.0},
        )
        steps = [stride // k for stride in problem.operands[1].strides[:-1]]
        pair, group, lane, chunk = steps
        self._kernels.run(
            Command.GATE_PAIRS,
            {"both": halves, "out": reference},
            {
                **{"rows": m, "n": n},
                **{"pair": pair, "group": group, "lane": lane, "chunk": chunk},
            },
        )


def _plain_product(dtype: str, m: int, n: int, k: int) -> dict[str, int]:
    """Integers of a product of dense matrices, B with K contiguous, that nothing is added to."""
    return {
        "dtype": DTYPES[dtype],
        **{"batch": 1, "m": m, "n": n, "k": k},
        **matrix_strides({"a": (m * k, k, 1), "b": (n * k, 1, k), "d": (m * n, n, 1)}),
        **dict.fromkeys(("activation", "residual_dtype", "scales_each", "scale_a_block"), 0),
    }
