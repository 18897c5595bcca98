"""Kernels over the sequence length: the fastest at each length, and their memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tuner.families import find
from tuner.hardware import Gpu
from tuner.measurement import Measurement, Regime, latency, speedup_text
from tuner.problem import AttentionProblem, Problem
from tuner.report.subject import ReportSubject
from tuner.selection.describe import kernel_name
from tuner.store.entry import is_vendor

MIN_LENGTHS = 3
"""Minimum sequence lengths for a curve."""


@dataclass(frozen=True)
class Length:
    """The fastest of one kernel at one sequence length."""

    seqlen: int
    kernel: str
    """A vendor's kernel or an own family."""
    is_vendor: bool
    measurement: Measurement

    @property
    def bytes(self) -> int:
        """Memory of the operands and of the kernel beside them."""
        return self.measurement.problem.bytes + self.measurement.workspace_bytes

    @property
    def tokens_per_s(self) -> float:
        problem = self.measurement.problem
        tokens = problem.total_q if isinstance(problem, AttentionProblem) else 0
        return tokens * 1e6 / latency(self.measurement)


def scaling(subject: ReportSubject) -> list[Length]:
    """Fastest of each kernel for problems that differ from this one only in their sequence length;
    empty if there are fewer than `MIN_LENGTHS` of them.
    """
    points: list[Length] = []
    for seqlen, measured in sorted(_runs(subject).items()):
        kernels: dict[str, Measurement] = {}
        for m in sorted(measured, key=latency):
            kernels.setdefault(kernel_name(m), m)
        points += [Length(seqlen, name, is_vendor(m.config), m) for name, m in kernels.items()]
    return points if len({length.seqlen for length in points}) >= MIN_LENGTHS else []


def lengths_known(subject: ReportSubject) -> list[int]:
    """Sequence lengths at which problems that differ in nothing else are timed; this one's too."""
    return sorted(_runs(subject))


def _runs(subject: ReportSubject) -> dict[int, list[Measurement]]:
    """By sequence length what one interleaved run timed there: a bench's row, the earliest named
    first, for it has all lengths of one run; else the final pass of a sweep.
    """
    grouped: dict[int, list[Measurement]] = {}
    for entry in subject.known:
        if _is_sibling(subject, entry.problem, entry.gpu, entry.regime):
            grouped[_length(entry.problem)] = list(entry.ranking)
    for bench in reversed(subject.benches):
        for row in bench.rows:
            if _is_sibling(subject, row.problem, bench.gpu, row.regime):
                passed = [m for m in row.measurements(bench) if m.ok]
                if passed:
                    grouped[_length(row.problem)] = passed
    return grouped


def _length(problem: Problem) -> int:
    return problem.seqlen_kv if isinstance(problem, AttentionProblem) else 0


def _is_sibling(subject: ReportSubject, theirs: Problem, gpu: Gpu, regime: Regime) -> bool:
    mine = subject.problem
    if not isinstance(mine, AttentionProblem) or not isinstance(theirs, AttentionProblem):
        return False
    if (subject.gpu.identity, subject.regime) != (gpu.identity, regime):
        return False
    # Self-attention at another length, or as many queries over another length.
    square = mine.seqlen_q == mine.seqlen_kv
    queries = theirs.seqlen_kv if square else mine.seqlen_q
    return theirs == replace(mine, seqlen_q=queries, seqlen_kv=theirs.seqlen_kv)


def crossings(lengths: Sequence[Length]) -> list[tuple[float, str, str]]:
    """Lengths at which a different kernel becomes the fastest.

    Returns:
        (sequence length, the one before, the one after); between two measured lengths it is
        where straight lines through their logarithms meet.
    """
    times: dict[int, dict[str, float]] = {}
    for length in lengths:
        times.setdefault(length.seqlen, {})[length.kernel] = latency(length.measurement)
    places = []
    for (short, at_short), (long, at_long) in zip(
        list(times.items())[:-1], list(times.items())[1:], strict=True
    ):
        before, after = (min(at, key=at.__getitem__) for at in (at_short, at_long))
        if before == after:
            continue
        place = float(long)
        if after in at_short and before in at_long:
            start = math.log(at_short[after] / at_short[before])
            end = math.log(at_long[after] / at_long[before])
            place = _meeting(short, long, start, end)
        places.append((place, before, after))
    return places


def _kind(name: str) -> str:
    """Kind of attention of an own family, else its own name."""
    member = find(name)
    return (member.kind if member else "") or name


def fastest_of_kinds(lengths: Sequence[Length]) -> dict[str, str]:
    """Comparison of each kind of own kernel with the fastest vendor's: lengths at which it is
    faster, and where that changes.
    """
    best: dict[str, dict[int, float]] = {}
    for length in lengths:
        kind = "" if length.is_vendor else _kind(length.kernel)
        times = best.setdefault(kind, {})
        times[length.seqlen] = min(latency(length.measurement), times.get(length.seqlen, math.inf))
    vendors = best.pop("", {})
    return {kind: _against(times, vendors) for kind, times in best.items() if {*times} & {*vendors}}


MAX_SERIES = 6
"""Kernels that one picture shows."""


def drawn(lengths: Sequence[Length]) -> list[str]:
    """The kernels of a picture, at most `MAX_SERIES`, own ones first.

    The order: the fastest at some length, the best own one of each `Family.kind`, the fastest
    vendor's at some length, the others. Among equals the one with the least mean loss against the
    fastest at its lengths comes first.
    """
    vendors = {length.kernel for length in lengths if length.is_vendor}
    losses = _losses(lengths)
    ordered = sorted(losses, key=lambda name: (sum(losses[name]) / len(losses[name]), name))
    best_of_kind: dict[str, str] = {}
    for name in ordered:
        if name not in vendors:
            best_of_kind.setdefault(_kind(name), name)
    leaders = [name for name in ordered if min(losses[name]) == 0]
    theirs = _losses([length for length in lengths if length.is_vendor])
    leading_vendors = [name for name in ordered if min(theirs.get(name, [1.0])) == 0]
    slower = [name for name in ordered if name in vendors]
    names = dict.fromkeys([*leaders, *best_of_kind.values(), *leading_vendors, *slower, *ordered])
    return sorted(list(names)[:MAX_SERIES], key=lambda name: (name in vendors, ordered.index(name)))


def _losses(lengths: Sequence[Length]) -> dict[str, list[float]]:
    """Logarithm of each kernel's time over the fastest's, at each of its lengths."""
    fastest: dict[int, float] = {}
    for length in lengths:
        us = latency(length.measurement)
        fastest[length.seqlen] = min(us, fastest.get(length.seqlen, math.inf))
    losses: dict[str, list[float]] = {}
    for length in lengths:
        loss = math.log(latency(length.measurement) / fastest[length.seqlen])
        losses.setdefault(length.kernel, []).append(loss)
    return losses


def _against(times: Mapping[int, float], vendors: Mapping[int, float]) -> str:
    """Ratios at the ends and the crossings in between."""
    common = sorted({*times} & {*vendors})
    ratios = [vendors[n] / times[n] for n in common]
    ends = [
        speedup_text(ratio, f"the fastest vendor at {n}")
        for n, ratio in ((common[0], ratios[0]), (common[-1], ratios[-1]))
    ]
    places = [
        _meeting(short, long, math.log(at_short), math.log(at_long))
        for (short, at_short), (long, at_long) in pairwise(zip(common, ratios, strict=True))
        if (at_short > 1) != (at_long > 1)
    ]
    meets = ", ".join(f"{place:.0f}" for place in places)
    crossing = f"as fast near {meets}" if places else "which of the two is faster never changes"
    return "; ".join([*dict.fromkeys(ends), crossing])


def _meeting(short: int, long: int, start: float, end: float) -> float:
    """Zero of a straight line over the length's logarithm, between two lengths."""
    return math.exp(math.log(short) + start / (start - end) * math.log(long / short))
