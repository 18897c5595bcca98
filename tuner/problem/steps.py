"""Steps of a model, as an engine or Transformers computes them: each problem with its calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tuner.problem import engines, shapes
from tuner.problem.architecture import Model
from tuner.problem.base import Problem

OPS = ("attention", "gemm", "grouped_gemm")
"""Operations that layers call: of gated ones both products, as engines and Transformers do."""
BATCHES, CONCURRENCIES = (1, 4, 16), (1, 4, 16, 64, 128)
"""Sequences at a time, in Transformers and in engines."""
SEQLENS = (128, 512, 2048, 8192)
"""Keys of a sequence."""
MAX_TOKENS = 16384
"""New tokens of a step of several sequences, at most."""


class ModelStep(NamedTuple):
    """One forward pass."""

    label: str
    calls: Mapping[Problem, int]
    """Number of calls by problem, each at least one."""
    left_out: Sequence[str]
    """Computations that have no problem."""
    tokens: int = 0
    """New tokens of all sequences."""


def steps(
    model: Model,
    engine: engines.Engine | None = None,
    batches: Sequence[int] | None = None,
    seqlens: Sequence[int] | None = None,
    *,
    dtype: str | None = None,
    ranks: int = 1,
) -> list[ModelStep]:
    """Decoding steps and prompts of a model.

    Args:
        model: layers of the model.
        engine: engine that runs it; None: Transformers' `generate`, or an encoder's passes.
        batches: sequences at a time; None: `BATCHES`, of an engine `CONCURRENCIES`.
        seqlens: keys of a sequence; None: those of `SEQLENS` that the model has positions for.
        dtype: data type; None: the model's own.
        ranks: tensor-parallel ranks; the problems are those of one of them.

    Raises:
        ConfigError: when nothing can be listed, or the ranks do not divide the model.
    """
    batches = batches or (CONCURRENCIES if engine else BATCHES)
    room = model.positions or max(SEQLENS)
    seqlens = seqlens or [n for n in SEQLENS if n <= room] or [room]
    if engine is not None:
        return [
            _step(call, engines.of_calls(model, engine, [call], dtype, ops=OPS, ranks=ranks))
            for call in engines.calls(engine, batches, seqlens)
        ]
    steps = []
    for is_decoding in (True, False) if model.is_causal else (False,):
        for seqlen in seqlens:
            for batch in batches:
                call = batch, 1 if is_decoding else seqlen, seqlen
                if batch > 1 and call[0] * call[1] > MAX_TOKENS:
                    continue
                listed = shapes.problems(
                    model, [batch], [seqlen], decode=is_decoding, dtype=dtype, ops=OPS, ranks=ranks
                )
                steps.append(_step(call, listed))
    return steps


def _step(call: tuple[int, int, int], listed: shapes.Listed) -> ModelStep:
    batch, queries, keys = call
    text = f"decode {batch}, {keys} keys" if queries == 1 else f"prompt {batch} x {queries}"
    text += f", {keys} keys" if 1 < queries < keys else ""
    calls = {problem: count for problem, count in listed.calls.items() if count}
    return ModelStep(text, calls, listed.left_out, batch * queries)


def left_out(every: Iterable[ModelStep]) -> list[str]:
    """Computations without a problem, of all steps, each once."""
    return list(dict.fromkeys(reason for step in every for reason in step.left_out))
