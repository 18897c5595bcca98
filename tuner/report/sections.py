"""Sections of the page: text, charts and tables of each, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from tuner.bench.results import half_width_us
from tuner.measure.profile import COUNTERS, STALLS
from tuner.measurement import Measurement, latency, speedup_text
from tuner.problem import AttentionProblem
from tuner.report import analysis, charts, course, curves
from tuner.report.explain import Explanation, explain, size
from tuner.report.glossary import meanings
from tuner.report.heat import heat_panels
from tuner.report.lengths import (
    MIN_LENGTHS,
    crossings,
    drawn,
    fastest_of_kinds,
    lengths_known,
    scaling,
)
from tuner.report.spec import Spec
from tuner.report.subject import ReportSubject
from tuner.report.use import Use, use
from tuner.selection.describe import (
    facts_text,
    microseconds,
    short_name,
)
from tuner.store.entry import is_vendor

MAX_ROWS = 1000
"""Candidates in the table of all; the fastest."""

Row = Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A picture and the numbers under it."""

    name: str
    title: str
    spec: Spec


@dataclass(frozen=True)
class TableSection:
    """A heading and rows."""

    columns: Row
    rows: Sequence[Row]


def _table(items: Iterable[Any], *columns: tuple[str, Callable[[Any], str]]) -> TableSection:
    """A row an item; a column is its heading and the text of an item."""
    rows = [[text(item) for _, text in columns] for item in items]
    return TableSection([heading for heading, _ in columns], rows)


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    words: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    table: TableSection | None = None
    table_title: str = "The numbers"
    is_table_open: bool = False
    explanation: Explanation | None = None
    use: Use | None = None
    """Commands to copy."""
    terms: Sequence[tuple[str, str]] = ()
    """(name, meaning) of a glossary."""
    level: int = 2
    """Level of the heading; 3 is a part of the 2 before it."""


def sections(subject: ReportSubject) -> list[Section]:
    """The parts of the page, in order."""
    return list(_sections(subject))


def _sections(subject: ReportSubject) -> Iterable[Section]:
    yield _use(subject)
    yield _peers(subject)
    if (account := explain(subject)) is not None:
        own = account.config
        yield Section(
            "limits",
            "Limits",
            [
                f"Work of {short_name(own)} over the chip's peak rate, as a share of the measured "
                f"{microseconds(own.latency_us)} us. The units work side by side: the longest bar "
                "is nearest to a limit, and the sum of the bars means nothing. Computed, not "
                f"counted by a profiler; clock of the multiprocessors {subject.clock_mhz} MHz.",
                account.limits[-1].text,
            ],
            [Figure("limits", "Busy at the least", charts.busy(subject, own))],
        )
        yield from _counted(subject, account)
        yield Section("why", "Why this configuration", explanation=account)
    yield from _search(subject)
    yield from _space(subject)
    if (roofline := charts.roofline(subject)) is not None:
        intensity = subject.problem.flops / subject.problem.bytes
        allowed = intensity * subject.gpu.memory_gbs / 1e3
        yield Section(
            "roofline",
            "Roofline",
            [
                "Each point is a candidate: how many operations of the problem it does for a byte "
                "between the L2 and the multiprocessors (computed from its tiles), and how fast it "
                "was (measured). The ring marks the best own kernel.",
                f"The memory's roof is not drawn: the operands alone allow {intensity:.0f} FLOP a "
                f"byte, which at {subject.gpu.memory_gbs:.0f} GB/s is {allowed:.0f} TFLOP/s if "
                "nothing was in the L2 before.",
            ],
            [Figure("roofline", "TFLOP/s over FLOP a byte", roofline)],
        )
    yield from _scaling(subject)
    yield from _standing(subject)
    yield Section(
        "memory",
        "Memory",
        [f"The operands take {size(subject.problem.bytes)}; a kernel may need memory beside them."],
        [Figure("memory", "Memory of the finalists", charts.memory(subject))],
    )
    yield _glossary(subject)
    yield _all(subject)


def _use(subject: ReportSubject) -> Section:
    """Commands that put the decision to use, and the kernel that then answers the call."""
    first, own = subject.entry.ranking[0], subject.entry.best_own
    usage = use(subject.problem, subject.gpu)
    words = []
    if own is None:
        words.append(
            "No own kernel passed: there is nothing to build, and PyTorch answers the call."
        )
    elif is_vendor(first.config):
        words.append(
            f"{short_name(first)} is the fastest here, so PyTorch goes on answering the call. The "
            "build compiles the best own kernel, for comparisons."
        )
    else:
        words.append("Compile the kernel once, here or on any machine with nvcc; then call it.")
    if not usage.call:
        words.append(
            "`tuner` has no Python call for this problem: it is tuned as a part of others."
        )
    return Section("use", "Use it", words, use=usage)


def _glossary(subject: ReportSubject) -> Section:
    names = {
        name
        for m in subject.recording.measurements
        for config in (m.config, *m.config.stages.values())
        for name in config.params
    }
    words, terms = ["Names of the parameters on this page."], meanings(names)
    if len(terms) < len(names):
        words.append("Others are the vendors' own, of their libraries' plans and algorithms.")
    return Section("glossary", "Glossary", words, terms=terms)


PER_TOKEN = ("us a head", "Mtokens/s", "tokens/s/MB")


def _peers(subject: ReportSubject) -> Section:
    attention = isinstance(subject.problem, AttentionProblem)
    columns = (
        *("kernel", "us", "+- 95 %", "deviation", "TFLOP/s", "of peak", "error"),
        *(PER_TOKEN if attention else ()),
        "beside the operands",
    )
    peak = subject.gpu.peak_tflops * subject.problem.tensor_rate
    rows = [
        (
            short_name(m),
            microseconds(m.latency_us),
            "-" if (half := half_width_us(m.std_us, m.rounds)) is None else f"{half:.2g}",
            f"{100 * (m.std_us or 0) / latency(m):.1f} %",
            f"{m.tflops or 0:.0f}",
            f"{100 * (m.tflops or 0) / peak:.0f} %",
            "-" if m.error is None else f"{m.error:.1e}",
            *_per_token(m),
            size(m.workspace_bytes),
        )
        for m in subject.ranking
    ]
    rounds = max(m.rounds for m in subject.ranking)
    words = [
        f"One interleaved run of up to {rounds} rounds; whiskers are one standard deviation. In "
        "order of rank: times equal within their noise, at most 1 %, are a tie, and of these own "
        "kernels stand first."
    ]
    if not subject.has_finals:
        words = ["Quick times only: there was no final pass, in which all are timed side by side."]
    if flagged := [f"{short_name(m)}: {', '.join(m.flags)}" for m in subject.ranking if m.flags]:
        words.append(f"Flagged: {'; '.join(flagged)}.")
    figure = Figure("ranking", "Microseconds a call", charts.ranking(subject))
    return Section("peers", "Against the peers", words, [figure], TableSection(columns, rows))


def _per_token(m: Measurement) -> Iterable[str]:
    """Figures of `PER_TOKEN`; none where the problem has no tokens."""
    if isinstance(m.problem, AttentionProblem):
        tokens = m.problem.total_q * 1e6 / latency(m)
        yield f"{latency(m) / (m.problem.batch * m.problem.heads_q):.3g}"
        yield f"{tokens / 1e6:.2f}"
        yield f"{tokens / ((m.problem.bytes + m.workspace_bytes) / 1e6):.0f}"


def _counted(subject: ReportSubject, account: Explanation) -> Iterable[Section]:
    """Counters of the best own kernel (`tuner develop profile`), a part of the section before."""
    profile = subject.profile_of(account.config.config)
    if profile is None:
        return
    rows = [
        (kernel.kernel, counter.label, f"{value.value:,.6g}", value.unit, counter.says)
        for kernel in profile.kernels
        for counter, value in kernel.shown(COUNTERS)
    ]
    ncu = profile.environment.facts.get("ncu", "of an unknown version")
    figures = [Figure("counters", "Share of what each can do", charts.counted_shares(profile.main))]
    if profile.main.shown(STALLS):
        figures.append(Figure("stalls", "What warps wait for", charts.stalls(profile.main)))
    yield Section(
        "counted",
        "Profiler counters",
        [
            f"One call under Nsight Compute {ncu}, {profile.created_at[:10]}, clocks not locked; "
            f"of {profile.main.kernel}, the launch that takes longest. It ran by itself: times "
            "above are the stopwatch's.",
            *(claim.text for claim in account.counted[1:]),
        ],
        figures,
        TableSection(("kernel", "counter", "value", "unit", "says"), rows),
        level=3,
    )


def _search(subject: ReportSubject) -> Iterable[Section]:
    steps = course.progress(subject)
    stopping = course.stopping(steps)
    if not stopping:
        return
    cost = course.cost(subject)
    failed = ", ".join(f"{count} {status}" for status, count in cost.failures.items())
    words = [
        f"The fastest of the quick pass was candidate {course.found_at(steps)} of {len(steps)}."
        f"{_passes(subject)}",
        f"Compiling took {cost.compile_cpu_s:.0f} CPU-seconds for {cost.compiled} candidates "
        f"(others shared their kernels or found them compiled); compiling, checking and timing "
        f"went on for {cost.worked_s:.0f} s, breaks of more than {course.BREAK_S:.0f} s left out. "
        f"Failed: {failed or 'none'}.",
    ]
    table = _table(
        stopping,
        ("stopped after", lambda stop: str(stop.candidates)),
        ("best so far, us", lambda stop: microseconds(stop.best_us)),
        ("lost", lambda stop: f"{100 * stop.loss:.1f} %"),
        ("CPU-seconds compiling", lambda stop: f"{stop.compile_cpu_s:.0f}"),
        ("seconds", lambda stop: f"{stop.worked_s:.0f}"),
    )
    figure = Figure("progress", "Time over trial", charts.progress(steps))
    title = "Cost of stopping earlier"
    yield Section("search", "The search", words, [figure], table, title, is_table_open=True)


def _passes(subject: ReportSubject) -> str:
    """Difference of the best own kernel's two times; empty if it has only one."""
    own = subject.entry.best_own
    quick = own and analysis.quick_of(subject, own.config)
    if own is None or quick is None or not own.is_final:
        return ""
    return (
        f" Compare within a pass: {short_name(own)} took {microseconds(quick.latency_us)} us in "
        f"the quick pass and {microseconds(own.latency_us)} us in the final one, which runs longer "
        "and beside the vendors' kernels."
    )


def _space(subject: ReportSubject) -> Iterable[Section]:
    heats = list(analysis.heat_maps(subject))
    if heats:
        words = (
            "The best quick time, microseconds, of each place; brighter is faster, the darkest is "
            "twice the family's best or slower. An empty place was not measured; crosses count "
            "failures. Everything beside the parameters named is the best that was tried."
        )
        yield Section("space", "The space", [words])
    for number, heat in enumerate(heats):
        panels = heat_panels(heat)
        of = "" if heat.problem == subject.problem else f", stage {heat.problem.label()}"
        table = _table(
            sorted(heat.cells, key=lambda c: (str(c.panel), str(c.row), str(c.column))),
            (heat.row, lambda cell: str(cell.row)),
            (heat.column, lambda cell: str(cell.column)),
            (heat.panel or "-", lambda cell: "-" if cell.panel is None else str(cell.panel)),
            ("best us", lambda c: microseconds(c.passed[0].latency_us) if c.passed else "-"),
            ("passed", lambda cell: str(len(cell.passed))),
            ("failed", lambda cell: str(len(cell.failed))),
        )
        yield Section(
            f"space-{number}",
            f"{heat.family}{of}",
            level=3,
            figures=[
                Figure(f"space-{number}-{place}", title, spec)
                for place, (title, spec) in enumerate(panels)
            ],
            table=table,
        )
    if shares := analysis.importances(subject):
        yield Section(
            "importance",
            "Importance of parameters",
            [
                "Share of the spread of times (their logarithm) that a parameter explains by "
                "itself, of what single parameters explain (fANOVA, a forest fitted to the "
                "measured candidates; what only combinations explain is left out)."
            ],
            [
                Figure(
                    f"importance-{i.family}",
                    f"{i.family}, {i.candidates} candidates",
                    charts.importance(i),
                )
                for i in shares
            ],
        )


def _scaling(subject: ReportSubject) -> Iterable[Section]:
    points = scaling(subject)
    if not points:
        if isinstance(subject.problem, AttentionProblem):
            lengths = ", ".join(map(str, lengths_known(subject))) or "none"
            text = (
                f"Not drawn: it takes {MIN_LENGTHS} problems, tuned or benched, that differ in "
                f"their sequence length only (known: {lengths}). `tuner sweep` of other lengths, "
                "the rest as here, adds them, with memory and with where one overtakes another."
            )
            yield Section("scaling", "Sequence length", [text])
        return
    changes = [f"{a} to {b} near {place:.0f}" for place, a, b in crossings(points)]
    days = sorted({length.measurement.created_at[:10] for length in points})
    words = [
        "Problems that differ in their sequence length only; each point is the fastest of its "
        f"kernel in that problem's own interleaved run ({', '.join(filter(None, days))}).",
        f"The fastest changes: {'; '.join(changes)}."
        if changes
        else "One kernel is the fastest at every length.",
        *(f"{kind}: {text}." for kind, text in fastest_of_kinds(points).items()),
    ]
    table = _table(
        points,
        ("sequence length", lambda length: str(length.seqlen)),
        ("kernel", lambda length: length.kernel),
        ("us", lambda length: microseconds(length.measurement.latency_us)),
        ("TFLOP/s", lambda length: f"{length.measurement.tflops or 0:.0f}"),
        ("Mtokens/s", lambda length: f"{length.tokens_per_s / 1e6:.2f}"),
        ("memory", lambda length: size(length.bytes)),
        ("tokens/s/MB", lambda length: f"{length.tokens_per_s / (length.bytes / 1e6):.0f}"),
    )
    names = drawn(points)
    shown = [length for length in points if length.kernel in names]
    if left_out := sorted({length.kernel for length in points} - {*names}):
        words.append(f"In the table and not drawn: {', '.join(left_out)}.")
    figures = [
        Figure("scaling", "TFLOP/s over sequence length", curves.scaling(shown)),
        Figure("memory-scaling", "Memory over sequence length", curves.memory_scaling(shown)),
    ]
    yield Section("scaling", "Sequence length", words, figures, table)


def _standing(subject: ReportSubject) -> Iterable[Section]:
    """Every tuned problem of the operation, this one among them."""
    standings = analysis.standing(subject)
    if len(standings) < 2:
        return
    mean = geometric_mean(s.ratio for s in standings)
    counts = Counter(s.outcome for s in standings)
    words = [
        f"Speed of the best own kernel as a multiple of the fastest vendor's, in each problem's "
        f"final pass, of all {len(standings)} that are known for {subject.gpu.name}, "
        f"{subject.regime}: own kernels are ahead in {counts['ahead']}, tie in {counts['tied']} "
        f"and are behind in {counts['behind']}; geometric mean "
        f"{speedup_text(mean, 'the fastest vendor')}. The slowest stand first. A label leaves out "
        "what the axis names, unless it differs there.",
    ]
    table = _table(
        standings,
        ("problem", lambda s: s.own.problem.label()),
        ("best own", lambda s: short_name(s.own)),
        ("us", lambda s: microseconds(s.own.latency_us)),
        ("fastest vendor", lambda s: short_name(s.vendor)),
        ("us", lambda s: microseconds(s.vendor.latency_us)),
        ("own speed", lambda s: s.text),
    )
    figure = Figure(
        "standing", "Own speed against the fastest vendor", charts.standing(standings, subject)
    )
    yield Section("standing", "All tuned problems", words, [figure], table)


def _all(subject: ReportSubject) -> Section:
    measured: list[Measurement] = sorted(
        subject.recording.measurements, key=lambda m: (not m.is_final, latency(m))
    )
    table = _table(
        measured[:MAX_ROWS],
        ("pass", lambda m: "final" if m.is_final else "quick"),
        ("us", lambda m: microseconds(m.latency_us)),
        ("status", lambda m: m.status.value),
        ("whose", lambda m: "vendor" if is_vendor(m.config) else "own"),
        ("config", lambda m: str(m.config)),
    )
    words = [
        f"Environment: {facts_text(subject.environment)}.",
        "The page holds all of it, stages included, as JSON in its element with the id data.",
    ]
    if len(measured) > MAX_ROWS:
        words.append(f"The table shows {MAX_ROWS} of {len(measured)} measurements.")
    return Section("all", "Every measurement", words, table=table)
