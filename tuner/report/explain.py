"""Explanation of why a config won. Every claim names the number that it comes from.

Times, registers and memory beside the operands were measured, by the stopwatch and by ptxas. Tiles,
waves, occupancy, bytes and instructions are computed (`work`). Counters of Nsight Compute are shown
after `tuner develop profile`. Computed numbers are a config's demands on the chip; only times are
its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.config import Value
from tuner.measure.profile import CYCLES, CYCLES_ACTIVE, SHARES, STALLS, Profile
from tuner.measurement import Measurement, deviation, is_tie, latency
from tuner.report import analysis
from tuner.report.bounds import Work, floors, total, works
from tuner.report.subject import ReportSubject
from tuner.selection.describe import microseconds, short_name
from tuner.store.entry import is_vendor

MEASURED, COMPUTED, COUNTED = "measured", "computed", "counted"
BUSY = 0.75
"""Share of the time from which a unit counts as the limit of a kernel."""
WAITS = 3
"""Number of stall reasons that are named, the most frequent ones."""
MAX_CHANGES = 8
"""Maximum single changes that are named."""


@dataclass(frozen=True)
class Statement:
    """Sentence with the source of its numbers."""

    text: str
    source: str
    """`MEASURED`, `COMPUTED` or `COUNTED`."""


@dataclass(frozen=True)
class Contrast:
    """The winner against another candidate."""

    title: str
    changes: tuple[str, ...]
    """Parameters that differ, winner's value first."""
    claims: tuple[Statement, ...]


@dataclass(frozen=True)
class Explanation:
    """Complete explanation."""

    headline: str
    config: Measurement
    """Explained config: the best own kernel."""
    contrasts: tuple[Contrast, ...]
    single: tuple[Statement, ...]
    """Effects of changing only one parameter."""
    limits: tuple[Statement, ...]
    counted: tuple[Statement, ...] = ()
    """Counters of `tuner develop profile`; empty when it was not run."""

    def to_json(self) -> dict[str, Any]:
        """The account as one JSON object."""
        return {
            "headline": self.headline,
            "config": self.config.config.to_json(),
            "latency_us": self.config.latency_us,
            "contrasts": [
                {
                    "title": contrast.title,
                    "changes": list(contrast.changes),
                    "claims": [vars(claim) for claim in contrast.claims],
                }
                for contrast in self.contrasts
            ],
            "single_changes": [vars(claim) for claim in self.single],
            "limits": [vars(claim) for claim in self.limits],
            "counted": [vars(claim) for claim in self.counted],
        }


def explain(subject: ReportSubject) -> Explanation | None:
    """Explain the best own kernel; None if no own kernel passed."""
    entry = subject.entry
    own = entry.best_own
    if own is None:
        return None
    rivals: list[tuple[str, Measurement, Measurement]] = []
    runner_up = next(
        (m for m in entry.ranking if not is_vendor(m.config) and m.config != own.config), None
    )
    if runner_up is not None:
        rivals.append(("the runner-up", own, runner_up))
    quick, default = analysis.quick_of(subject, own.config), analysis.default_of(subject, own)
    # Against the default quick time stands against quick time: the final pass runs at lower clocks.
    if quick is not None and default is not None and default.config != own.config:
        rivals.append(("the default, which the cost estimate alone would choose", quick, default))
    contrasts = [_contrast(subject, *rival) for rival in rivals]
    if default is None or default.config == own.config:
        text = "The cost estimate alone, without measuring, would have chosen this configuration."
        if default is None:
            text = "None is known: nothing of this family was measured whose cost can be estimated."
        contrasts.append(Contrast("Against the default", (), (Statement(text, COMPUTED),)))
    return Explanation(
        analysis.verdict(subject),
        own,
        tuple(contrasts),
        _claims(MEASURED, _single(subject, own)),
        _claims(COMPUTED, _limits(subject, own)),
        _claims(COUNTED, _counted(subject.profile_of(own.config))),
    )


def _contrast(subject: ReportSubject, name: str, own: Measurement, other: Measurement) -> Contrast:
    pass_ = "final" if own.is_final else "quick"
    ratio = latency(other) / latency(own)
    mine_us, their_us = microseconds(own.latency_us), microseconds(other.latency_us)
    if is_tie(own, other):
        how = (
            f"this one {mine_us} us: equal within the noise of the two. Of equals the one with "
            "less memory beside the operands stands first, then the one with the smaller digest"
        )
    else:
        more = f"{abs(100 * (ratio - 1)):.1f} % {'more' if ratio > 1 else 'less'}"
        how = f"{more} than the {mine_us} us of this one"
    measured = [
        f"{short_name(other)} takes {their_us} us in the {pass_} pass, {how}.",
        *_compiled(own, other),
    ]
    mine, theirs = (works(m.problem, m.config, subject.gpu) for m in (own, other))
    computed = _computed(mine, theirs) if mine and theirs else []
    claims = (*_claims(MEASURED, measured), *_claims(COMPUTED, computed))
    return Contrast(f"Against {name}, {short_name(other)}", tuple(_changes(own, other)), claims)


def _claims(source: str, texts: Iterable[str]) -> tuple[Statement, ...]:
    return tuple(Statement(text, source) for text in texts)


def _changes(own: Measurement, other: Measurement) -> list[str]:
    texts = [
        f"{name} {_value(mine)} instead of {_value(theirs)}"
        for name, (mine, theirs) in analysis.differences(own.config, other.config).items()
    ]
    if own.config.family != other.config.family:
        return [f"family {own.config.family} instead of {other.config.family}"]
    return texts


def _value(value: Value | None) -> str:
    return "not set" if value is None else str(value)


def _compiled(own: Measurement, other: Measurement) -> Iterator[str]:
    """Reports of ptxas and the launch."""
    for kernel in sorted(set(own.resources) & set(other.resources)):
        mine, theirs = own.resources[kernel], other.resources[kernel]
        spills = [r.spill_store_bytes + r.spill_load_bytes for r in (mine, theirs)]
        if mine.registers != theirs.registers or spills[0] != spills[1]:
            yield (
                f"Registers: {mine.registers} a thread at launch, {spills[0]} bytes spilled, "
                f"against {theirs.registers} and {spills[1]} ({kernel}, by ptxas)."
            )
    if own.workspace_bytes != other.workspace_bytes:
        yield (
            f"Memory beside the operands: {size(own.workspace_bytes)} against "
            f"{size(other.workspace_bytes)}."
        )


def _computed(mine: Sequence[Work], theirs: Sequence[Work]) -> list[str]:
    """Waves, occupancy, bytes and instructions, where they differ."""
    texts = []
    if [w.kernel for w in mine] == [w.kernel for w in theirs]:
        for own, other in zip(mine, theirs, strict=True):
            texts += _placed(own, other, f" ({own.kernel})" if len(mine) > 1 else "")
    launches = [sum(w.launches for w in side) for side in (mine, theirs)]
    if launches[0] != launches[1]:
        texts.append(f"Launches of a call: {launches[0]} against {launches[1]}.")
    quantities: Mapping[str, tuple[str, Callable[[float], str]]] = {
        "l2_bytes": ("Between the L2 and the multiprocessors", size),
        "wgmma": ("Tensor-core instructions (WGMMA)", _count),
        "tensor_flops": ("Tensor-core operations, padding counted", _count),
        "exponentials": ("Exponentials on the special-function units", _count),
    }
    for name, (title, text) in quantities.items():
        here, away = total(mine, name), total(theirs, name)
        if here != away:
            more = f", {100 * (here / away - 1):+.0f} %" if away else ""
            texts.append(f"{title}: {text(here)} against {text(away)}{more}.")
    return texts or [
        "Waves, occupancy, bytes and instructions are the same for both: what differs is the "
        "order of the work."
    ]


def _placed(one: Work, other: Work, where: str) -> list[str]:
    texts = []
    if (one.tiles, one.slots) != (other.tiles, other.slots):
        mine, theirs = (
            f"{w.tiles} tiles on {w.slots} places, {w.waves:.2f} waves"
            + (f" ({100 * w.fill:.0f} % full)" if w.is_even else "")
            for w in (one, other)
        )
        texts.append(f"Waves{where}: {mine}, against {theirs}.")
    if one.warps_per_sm != other.warps_per_sm or one.blocks_per_sm != other.blocks_per_sm:
        mine, theirs = (
            f"{w.warps_per_sm} warps in {w.blocks_per_sm} block{'s' * (w.blocks_per_sm > 1)}"
            for w in (one, other)
        )
        texts.append(
            f"Occupancy{where}: {mine} on a multiprocessor ({100 * one.occupancy:.0f} % of 64 "
            f"warps), against {theirs} ({100 * other.occupancy:.0f} %)."
        )
    if one.smem_bytes != other.smem_bytes:
        texts.append(
            f"Shared memory of a block{where}: {size(one.smem_bytes)} against "
            f"{size(other.smem_bytes)}."
        )
    return texts


def _single(subject: ReportSubject, own: Measurement) -> Iterator[str]:
    for change in analysis.one_change(subject, own)[:MAX_CHANGES]:
        how = "slower" if change.ratio > 1 else "faster"
        yield (
            f"{change.name} {_value(change.other)} instead of {_value(change.winner)}: "
            f"{microseconds(change.measurement.latency_us)} us, "
            f"{abs(100 * (change.ratio - 1)):.1f} % {how} in the quick pass "
            f"(deviation {100 * deviation(change.measurement):.1f} %)."
        )


def limits(subject: ReportSubject, measurement: Measurement) -> dict[str, float]:
    """`work.floors` of a candidate at the clock of the subject's final pass."""
    work = works(measurement.problem, measurement.config, subject.gpu)
    return floors(measurement, subject.gpu, work, subject.clock_mhz)


def _limits(subject: ReportSubject, own: Measurement) -> Iterator[str]:
    busy = {name: us / latency(own) for name, us in limits(subject, own).items()}
    unit = max(busy, key=busy.__getitem__)
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in busy.items())
    yield f"Busy at least, of the measured time, at {subject.clock_mhz} MHz: {shares}."
    if busy[unit] >= BUSY:
        idle = 100 * (1 - busy[unit])
        yield f"Limited by: {unit}. With the same work no more than {idle:.0f} % could be gained."
    else:
        yield (
            f"Limited by no single unit; nearest: {unit}. The rest is waiting: latency, what does "
            "not overlap, and multiprocessors without work."
        )


def _counted(profile: Profile | None) -> Iterator[str]:
    """Utilisation of the units and stall reasons of the warps, in the longest launch."""
    if profile is None:
        return
    main = profile.main
    if shares := ", ".join(f"{c.label} {v.value:.0f} %" for c, v in main.shown(SHARES)):
        yield f"Of what each can do at most, {main.kernel}: {shares}."
    active, cycles = main.get(CYCLES_ACTIVE), main.get(CYCLES)
    if active and cycles:
        yield (
            f"A multiprocessor is active in {100 * active / cycles:.0f} % of the "
            f"{_count(cycles)} cycles from the kernel's start to its end."
        )
    waits = sorted(main.shown(STALLS), key=lambda item: -item[1].value)[:WAITS]
    if waits:
        named = ", ".join(f"{c.label} {v.value:.2f}" for c, v in waits)
        yield f"Warps waiting when an instruction is issued, by what for: {named}."


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def _count(number: float) -> str:
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f}"
