"""The page: one file that needs no network, made of the specifications and of tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tuner
from tuner.base.install import extra_command
from tuner.bench.results import half_width_us
from tuner.errors import ConfigError
from tuner.measure.profile import COUNTERS, STALLS
from tuner.measurement import Measurement, speedup_text
from tuner.problem import AttentionProblem
from tuner.report import analysis, assets, charts, counters, course
from tuner.report.explain import Explanation, explain, size
from tuner.report.heat import heat_panels
from tuner.report.lengths import (
    LEAST_LENGTHS,
    crossings,
    fastest_of_kinds,
    lengths_known,
    scaling,
)
from tuner.report.palette import colours
from tuner.report.spec import Spec
from tuner.report.subject import Subject
from tuner.selection.describe import (
    config_text,
    facts_text,
    microseconds,
    short_name,
)
from tuner.store.entry import is_vendor

TEMPLATE = Path(__file__).with_name("page.html.j2")
EXTRA = "report"
MOST_ROWS = 1000
"""Candidates in the table of all; the fastest."""

Row = Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A picture and the numbers under it."""

    name: str
    title: str
    spec: Spec


@dataclass(frozen=True)
class Table:
    """A heading and rows."""

    columns: Row
    rows: Sequence[Row]


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    words: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    table: Table | None = None
    table_title: str = "The numbers"
    is_table_open: bool = False
    explanation: Explanation | None = None
    level: int = 2
    """Of its heading; 3 belongs to the 2 before it."""


def render(subject: Subject) -> str:
    """The page's HTML.

    Raises:
        ConfigError: when the extra ``report`` is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    script = _library()
    parts = sections(subject)
    specs = {figure.name: figure.spec for s in parts for figure in s.figures}
    environment = Environment(
        undefined=StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=subject.label,
        verdict=analysis.verdict(subject),
        facts=_facts(subject),
        sections=parts,
        colours=colours(),
        library=script,
        figures=assets.figures(),
        specs=_in_script(specs),
        data=_in_script(data(subject)),
        version=tuner.__version__,
    )


def sections(subject: Subject) -> list[Section]:
    """The parts of the page, in order."""
    return list(_sections(subject))


def _library() -> str:
    try:
        import sklearn  # noqa: F401  # what Optuna's fANOVA stands on
        import vl_convert  # noqa: F401
    except ImportError as exc:
        raise ConfigError(
            f"a report needs the extra '{EXTRA}' ({exc.name}): `{extra_command(EXTRA)}`"
        ) from exc
    return assets.library().replace("</script", "<\\/script")


def _in_script(value: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def data(subject: Subject) -> dict[str, Any]:
    """Every number that the page draws from, with its environment."""
    own = subject.entry.best_own
    counted = subject.profile_of(own.config) if own else None
    return {
        "source": subject.source,
        "problem": subject.problem.to_json(),
        "gpu": asdict(subject.gpu),
        "regime": str(subject.regime),
        "environment": dict(subject.environment.facts),
        "counted": counted and counted.to_json(),
        "measurements": [
            {
                "problem": part.problem.label(),
                "config": m.config.to_json(),
                "status": m.status.value,
                "latency_us": m.latency_us,
                "std_us": m.std_us,
                "rounds": m.rounds,
                "is_final": m.is_final,
                "flags": list(m.flags),
                "error": m.error,
                "workspace_bytes": m.workspace_bytes,
                "compile_cpu_s": m.compile_cpu_s,
                "clocks": asdict(m.clocks),
                "created_at": m.created_at,
            }
            for part in subject.recording.walk()
            for m in part.measurements
        ],
        "lengths": [
            {
                "seqlen": length.seqlen,
                "kernel": length.kernel,
                "config": length.measurement.config.to_json(),
                "latency_us": length.measurement.latency_us,
                "std_us": length.measurement.std_us,
                "rounds": length.measurement.rounds,
                "workspace_bytes": length.measurement.workspace_bytes,
                "environment": dict(length.measurement.environment.facts),
                "created_at": length.measurement.created_at,
            }
            for length in scaling(subject)
        ],
    }


def _facts(subject: Subject) -> list[tuple[str, str]]:
    cost = course.cost(subject)
    return [
        ("problem", f"{subject.problem.op} {subject.problem.label()}"),
        ("GPU", f"{subject.gpu.name}, {subject.gpu.sm_count} multiprocessors"),
        ("timed", f"{subject.regime}, measured {subject.measured_on}"),
        ("from", subject.source),
        ("candidates", f"{cost.candidates} own, {cost.kernel_sets} sets of kernels"),
    ]


def _sections(subject: Subject) -> Iterable[Section]:
    yield _peers(subject)
    if (account := explain(subject)) is not None:
        own = account.config
        yield Section(
            "limits",
            "What limits it",
            [
                f"What {short_name(own)} must do over what the chip can do, as a share of the "
                f"{microseconds(own.latency_us)} us measured. The units work side by side: the "
                "longest bar is nearest to a limit, and their sum means nothing. Computed, not "
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
    yield _all(subject)


PER_TOKEN = ("us a head", "Mtokens/s", "tokens/s/MB")


def _peers(subject: Subject) -> Section:
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
            f"{100 * (m.std_us or 0) / analysis.latency(m):.1f} %",
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
    return Section("peers", "Against the peers", words, [figure], Table(columns, rows))


def _per_token(m: Measurement) -> Iterable[str]:
    """Figures of `PER_TOKEN`; none where the problem has no tokens."""
    if isinstance(m.problem, AttentionProblem):
        tokens = m.problem.total_q * 1e6 / analysis.latency(m)
        yield f"{analysis.latency(m) / (m.problem.batch * m.problem.heads_q):.3g}"
        yield f"{tokens / 1e6:.2f}"
        yield f"{tokens / ((m.problem.bytes + m.workspace_bytes) / 1e6):.0f}"


def _counted(subject: Subject, account: Explanation) -> Iterable[Section]:
    """What `tuner profile` counted of the best own kernel, a part of the section before."""
    found = subject.profile_of(account.config.config)
    if found is None:
        return
    rows = [
        (kernel.kernel, counter.label, f"{value.value:,.6g}", value.unit, counter.says)
        for kernel in found.kernels
        for counter, value in kernel.shown(COUNTERS)
    ]
    ncu = found.environment.facts.get("ncu", "of an unknown version")
    figures = [Figure("counters", "Share of what each can do", counters.shares(found.main))]
    if found.main.shown(STALLS):
        figures.append(Figure("stalls", "What warps wait for", counters.stalls(found.main)))
    yield Section(
        "counted",
        "What the profiler counted",
        [
            f"One call under Nsight Compute {ncu}, {found.created_at[:10]}, clocks not locked; "
            f"of {found.main.kernel}, the launch that takes longest. It ran by itself: times above "
            "are the stopwatch's.",
            *(claim.text for claim in account.counted[1:]),
        ],
        figures,
        Table(("kernel", "counter", "value", "unit", "says"), rows),
        level=3,
    )


def _search(subject: Subject) -> Iterable[Section]:
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
    rows = [
        (
            str(stop.candidates),
            microseconds(stop.best_us),
            f"{100 * stop.loss:.1f} %",
            f"{stop.compile_cpu_s:.0f}",
            f"{stop.worked_s:.0f}",
        )
        for stop in stopping
    ]
    columns = ("stopped after", "best so far, us", "lost", "CPU-seconds compiling", "seconds")
    table = Table(columns, rows)
    figure = Figure("progress", "Time over trial", charts.progress(steps))
    title = "What stopping earlier would have lost"
    yield Section("search", "The search", words, [figure], table, title, is_table_open=True)


def _passes(subject: Subject) -> str:
    """How the best own kernel's two times differ; empty where it has one."""
    own = subject.entry.best_own
    quick = own and analysis.quick_of(subject, own.config)
    if own is None or quick is None or not own.is_final:
        return ""
    return (
        f" Compare within a pass: {short_name(own)} took {microseconds(quick.latency_us)} us in "
        f"the quick pass and {microseconds(own.latency_us)} us in the final one, which runs longer "
        "and beside the vendors' kernels."
    )


def _space(subject: Subject) -> Iterable[Section]:
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
        columns = (heat.row, heat.column, heat.panel or "-", "best us", "passed", "failed")
        rows = [
            (
                str(cell.row),
                str(cell.column),
                "-" if cell.panel is None else str(cell.panel),
                microseconds(cell.passed[0].latency_us) if cell.passed else "-",
                str(len(cell.passed)),
                str(len(cell.failed)),
            )
            for cell in sorted(heat.cells, key=lambda c: (str(c.panel), str(c.row), str(c.column)))
        ]
        yield Section(
            f"space-{number}",
            f"{heat.family}{of}",
            level=3,
            figures=[
                Figure(f"space-{number}-{place}", title, spec)
                for place, (title, spec) in enumerate(panels)
            ],
            table=Table(columns, rows),
        )
    if found := analysis.importances(subject):
        yield Section(
            "importance",
            "Which parameters matter",
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
                for i in found
            ],
        )


def _scaling(subject: Subject) -> Iterable[Section]:
    found = scaling(subject)
    if not found:
        if isinstance(subject.problem, AttentionProblem):
            known = ", ".join(map(str, lengths_known(subject))) or "none"
            text = (
                f"Not drawn: it takes {LEAST_LENGTHS} problems, tuned or benched, that differ in "
                f"their sequence length only (known: {known}). `tuner sweep` of other lengths, the "
                "rest as here, adds them, with memory and with where one kernel overtakes another."
            )
            yield Section("scaling", "Sequence length", [text])
        return
    changes = [f"{a} to {b} near {place:.0f}" for place, a, b in crossings(found)]
    days = sorted({length.measurement.created_at[:10] for length in found})
    words = [
        "Problems that differ in their sequence length only; each point is the fastest of its "
        f"kernel in that problem's own interleaved run ({', '.join(filter(None, days))}).",
        f"The fastest changes: {'; '.join(changes)}."
        if changes
        else "One kernel is the fastest at every length.",
        *(f"{kind}: {text}." for kind, text in fastest_of_kinds(found).items()),
    ]
    rows = [
        (
            str(length.seqlen),
            length.kernel,
            microseconds(length.measurement.latency_us),
            f"{length.measurement.tflops or 0:.0f}",
            f"{length.tokens_per_s / 1e6:.2f}",
            size(length.bytes),
            f"{length.tokens_per_s / (length.bytes / 1e6):.0f}",
        )
        for length in found
    ]
    figures = [
        Figure("scaling", "TFLOP/s over sequence length", charts.scaling(found)),
        Figure("memory-scaling", "Memory over sequence length", charts.memory_scaling(found)),
    ]
    columns = ("sequence length", "kernel", "us", "TFLOP/s", "Mtokens/s", "memory", "tokens/s/MB")
    yield Section("scaling", "Sequence length", words, figures, Table(columns, rows))


def _standing(subject: Subject) -> Iterable[Section]:
    """Every tuned problem of the operation, this one among them."""
    found = analysis.standing(subject)
    if len(found) < 2:
        return
    mean = math.exp(sum(math.log(s.ratio) for s in found) / len(found))
    ahead = sum(s.ratio > 1 for s in found)
    words = [
        f"Speed of the best own kernel as a multiple of the fastest vendor's, in each problem's "
        f"final pass, of all {len(found)} that are known for {subject.gpu.name}, "
        f"{subject.regime}: own kernels are ahead in {ahead}; geometric mean "
        f"{speedup_text(mean, 'the fastest vendor')}.",
    ]
    rows = [
        (
            s.problem.label(),
            short_name(s.own),
            microseconds(s.own.latency_us),
            short_name(s.vendor),
            microseconds(s.vendor.latency_us),
            s.speed,
        )
        for s in found
    ]
    columns = ("problem", "best own", "us", "fastest vendor", "us", "own speed")
    figure = Figure(
        "standing", "Own speed against the fastest vendor", charts.standing(found, subject)
    )
    yield Section("standing", "All tuned problems", words, [figure], Table(columns, rows))


def _all(subject: Subject) -> Section:
    measured: list[Measurement] = sorted(
        subject.recording.measurements, key=lambda m: (not m.is_final, analysis.latency(m))
    )
    rows = [
        (
            "final" if m.is_final else "quick",
            microseconds(m.latency_us),
            m.status.value,
            "vendor" if is_vendor(m.config) else "own",
            config_text(m.config),
        )
        for m in measured[:MOST_ROWS]
    ]
    words = [
        f"Environment: {facts_text(subject.environment)}.",
        "The page holds all of it, stages included, as JSON in its element with the id data.",
    ]
    if len(measured) > MOST_ROWS:
        words.append(f"The table shows {MOST_ROWS} of {len(measured)} measurements.")
    table = Table(("pass", "us", "status", "whose", "config"), rows)
    return Section("all", "Every measurement", words, table=table)
