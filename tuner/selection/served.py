"""The decision that serves a problem, for texts on a sweep that was timed in another way."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.hardware import Gpu
from tuner.measurement import Provenance, Regime
from tuner.problem import Problem
from tuner.selection.describe import against_fastest, microseconds, short_name
from tuner.selection.reader import lookup
from tuner.store.entry import Entry, is_vendor


def served_text(
    problem: Problem, gpu: Gpu, regime: Regime, among: Sequence[Entry] | None = None
) -> str:
    """One sentence on the measured decision in a stream; empty where there is none.

    A model's call is behind an ordinary kernel, as in a stream. Copies behind each other flatter
    kernels that start early.

    Args:
        problem: the problem.
        gpu: the GPU.
        regime: the sweep's own; a stream needs no such sentence.
        among: entries to choose from; None: the user's store and what ships.
    """
    usual = Regime.default(problem.op)
    if regime.launch == usual.launch:
        return ""
    answer = lookup(problem, gpu=gpu, regime=usual, among=among, with_portfolio=False)
    if answer is None or not answer.exact or answer.entry.provenance is not Provenance.MEASURED:
        return ""
    winner = answer.entry.winner
    own = "the best own kernel is " if is_vendor(winner.config) else ""
    return (
        f"Served is {short_name(winner)}: in a stream {microseconds(winner.latency_us)} us, "
        f"{own}{against_fastest(answer.entry)}."
    )
