"""Results of a benchmark as text, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence

from tuner.bench.contenders import Role
from tuner.bench.results import Results, Row, Summary, TimedKernel
from tuner.hardware import Gpu
from tuner.measurement import Resources, speedup_text
from tuner.problem import AttentionProblem, GemmProblem, Problem
from tuner.selection.describe import (
    config_lines,
    microseconds,
    table,
    wrapped,
)

FEW_ROWS = 64
"""Number of rows up to which a GEMM takes as long as reading its weights."""

FIGURES = (
    "half_width_us",
    "us_per_head",
    "tflops",
    "share_of_peak",
    "tb_per_s",
    "tokens_per_s",
    "memory_mb",
    "tokens_per_s_per_mb",
    "gaps_us",
    "over_own",
    "again_us",
    "kernel_us",
)
"""Columns of the CSV that are computed from a time, in the order of `Row.figures`' names."""


def text(results: Results, details: Collection[str | None]) -> str:
    """Tables for a terminal.

    Args:
        results: results of a run.
        details: suites whose rows are first shown kernel by kernel.
    """
    parts = [_environment(results)]
    for rows in results.sections:
        if rows[0].suite in details:
            parts += [_kernels(row, results.gpu) for row in rows]
        parts.append(f"{_heading(rows)}\n{table(_cells(rows, results), _numbers(rows))}")
        parts += ["\n".join(missing)] if (missing := _missing(rows)) else []
    parts.append("\n".join(summary_text(summary) for summary in results.summaries))
    return "\n\n".join(parts)


def markdown(results: Results, details: Collection[str | None] = ()) -> str:
    """The same tables as Markdown."""
    parts = [_environment(results)]
    for rows, summary in zip(results.sections, results.summaries, strict=True):
        grid = _grid(_cells(rows, results), _numbers(rows))
        parts += [f"## {_heading(rows)}", grid, summary_text(summary)]
        for row in rows if rows[0].suite in details else ():
            cells = _kernel_cells(row, results.gpu)
            parts += [f"### {_row_heading(row)}", _grid(cells, _after_two(cells))]
            if stages := _stage_cells(row, results.gpu):
                parts += [STAGES_SAY, _grid(stages, _after_one(stages))]
        parts += ["\n".join(f"- {line}" for line in missing)] if (missing := _missing(rows)) else []
    return "\n\n".join(parts) + "\n"


def _grid(cells: Sequence[Sequence[str]], right: Collection[int]) -> str:
    heading, *lines = cells
    rule = ["--:" if i in right else "---" for i in range(len(heading))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heading, rule, *lines))


def csv_text(results: Results) -> str:
    """CSV with one line a kernel, numbers in full, clocks and environment; `stages_us` as
    ``qk=20.1;softmax=9.8``.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heading = ("suite", "problem", "regime", "role", "kernel", "config", "status", "latency_us")
    last = ("stages_us", "sm_mhz", "power_w", "created_at", "gpu", *results.environment.facts)
    writer.writerow((*heading, "std_us", "rounds", "error", "workspace_bytes", *FIGURES, *last))
    for row in results.rows:
        for timed in row.timed:
            figures = row.figures(timed, results.gpu)
            what = (row.suite, row.problem.label(), row.regime, timed.role, timed.name)
            facts = (timed.config.digest, timed.status, timed.latency_us, timed.std_us)
            checked = (timed.rounds, timed.error, timed.workspace_bytes)
            stages = ";".join(f"{name}={us}" for name, us in timed.stages_us.items())
            under = (row.clocks.sm_mhz, row.clocks.power_w, row.created_at, results.gpu.name)
            numbers = (figures.get(name) for name in FIGURES)
            where = (stages, *under, *results.environment.facts.values())
            writer.writerow((*what, *facts, *checked, *numbers, *where))
    return out.getvalue()


def summary_text(summary: Summary) -> str:
    """Summary of a suite's ratios: overall, and by problem size."""
    count = f"{summary.count} problem{'' if summary.count == 1 else 's'}"
    head = f"{summary.suite}, {summary.regime}: {count}"
    head += f", {summary.missing} without a ratio" if summary.missing else ""
    if summary.geometric_mean is None or summary.worst is None:
        return head
    if summary.ties:
        head += f", {summary.ties} tie{'' if summary.ties == 1 else 's'}"
    lines = [
        f"{head}, own speed: geometric mean "
        f"{speedup_text(summary.geometric_mean, 'the fastest peer')}; "
        f"worst {speedup_text(summary.worst, f'at {summary.worst_label}')}"
    ]
    lines += [
        f"  {part.size} keys or rows: {part.count}, {speedup_text(part.geometric_mean)}"
        for part in summary.parts
    ]
    if summary.control is not None:
        lines.append(f"  one kernel timed twice in a pass: within {100 * summary.control:.1f} %")
    return "\n".join(lines)


def _environment(results: Results) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results.environment.facts.items())
    return "\n".join(wrapped(f"{results.gpu.name}: {facts}"))


def _heading(rows: Sequence[Row]) -> str:
    return f"{rows[0].suite}, {rows[0].regime}, microseconds"


def _peers(rows: Sequence[Row]) -> list[str]:
    """Column names: every peer of any row, in the order of the rows."""
    return list(dict.fromkeys(t.name for row in rows for t in row.timed if t.role is Role.PEER))


def _is_decoding(rows: Sequence[Row]) -> bool:
    """True if reading keys and values, or weights, takes longer than the arithmetic."""
    return all(map(_reads, (row.problem for row in rows)))


def _reads(problem: Problem) -> bool:
    if isinstance(problem, GemmProblem):
        return problem.m <= FEW_ROWS
    return isinstance(problem, AttentionProblem) and 8 * problem.seqlen_q < problem.seqlen_kv


def _numbers(rows: Sequence[Row]) -> frozenset[int]:
    return frozenset(range(1, len(_peers(rows)) + 6))


CHAINED, KERNELS = "chained", "kernel alone"
"""Columns of a table of regime `stream`: the ratio behind copies of the call, and the profiler's
durations."""


def _cells(rows: Sequence[Row], results: Results) -> list[list[str]]:
    """Heading and one row a problem: text, numbers, then the kernel's name."""
    peers = _peers(rows)
    speed, name = ("TB/s", "tb_per_s") if _is_decoding(rows) else ("TFLOP/s", "tflops")
    heading = ["problem", "own", *peers, "own speed", speed, "us/head", "error", "own kernel"]
    cells = [heading, *(_line(row, results.gpu, peers, name) for row in rows)]
    beside = [results.beside(row) for row in rows]
    if any(beside):
        _append(cells, CHAINED, [row.verdict if row else "-" for row in beside])
    if any(timed.kernel_us for row in rows for timed in row.timed):
        _append(cells, KERNELS, [_durations(row) for row in rows])
    return cells


def _append(cells: list[list[str]], heading: str, column: Sequence[str]) -> None:
    for line, cell in zip(cells, (heading, *column), strict=True):
        line.append(cell)


def _durations(row: Row) -> str:
    """Microseconds of the fastest own kernel and peer, by the profiler."""
    return " / ".join(microseconds(t.kernel_us) if t else "-" for t in (row.own, row.peer))


def _line(row: Row, gpu: Gpu, peers: Sequence[str], speed: str) -> list[str]:
    own = row.own
    figures = row.figures(own, gpu) if own else {}
    by_name = {timed.name: timed for timed in row.timed}
    return [
        row.problem.label().replace(",dtype=fp16", ""),
        microseconds(own.latency_us if own else None),
        *(_cell(by_name.get(name)) for name in peers),
        row.verdict,
        f"{figures[speed]:.{2 if speed == 'tb_per_s' else 0}f}" if figures else "-",
        f"{figures['us_per_head']:.3f}" if "us_per_head" in figures else "-",
        f"{own.error:.1e}" if own and own.error is not None else "-",
        own.name if own else "-",
    ]


def _cell(timed: TimedKernel | None) -> str:
    return "-" if timed is None or timed.latency_us is None else microseconds(timed.latency_us)


def _missing(rows: Sequence[Row]) -> list[str]:
    """Kernels without a time with their reasons, each once, and further notes."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        label = row.problem.label()
        for note in row.notes:
            reasons.setdefault(note, []).append(label)
        if row.failure:
            reasons.setdefault(row.failure, []).append(label)
        for timed in row.timed:
            if timed.reason:
                reasons.setdefault(f"{timed.name}: {timed.reason}", []).append(label)
            for flag in timed.flags:
                reasons.setdefault(f"{timed.name} is {flag}", []).append(label)
    return [
        f"{reason} ({labels[0]}{f' and {len(labels) - 1} more' if labels[1:] else ''})"
        for reason, labels in reasons.items()
    ]


STAGES_SAY = (
    "Kernels of calls that launch several, us, each alone; gaps: the call less their sum, below 0 "
    "where they overlap, or where one finds in the L2 what in the call it does not"
)


def _after_one(cells: Sequence[Sequence[str]]) -> frozenset[int]:
    return frozenset(range(1, len(cells[0])))


def _after_two(cells: Sequence[Sequence[str]]) -> frozenset[int]:
    return frozenset(range(2, len(cells[0])))


def _row_heading(row: Row) -> str:
    clocks = f"{row.clocks.sm_mhz} MHz, {row.clocks.power_w:.0f} W"
    return f"{row.problem.op} {row.problem.label()}, {row.regime}; {clocks}"


def _stage_cells(row: Row, gpu: Gpu) -> list[list[str]]:
    """Heading and rows of the kernels' stages; empty if none has stages."""
    staged = [timed for timed in row.timed if timed.stages_us]
    names = list(dict.fromkeys(name for timed in staged for name in timed.stages_us))
    lines = [
        [
            timed.name,
            *(microseconds(timed.stages_us.get(name)) for name in names),
            f"{row.figures(timed, gpu)['gaps_us']:.1f}",
            microseconds(timed.latency_us),
        ]
        for timed in staged
    ]
    return [["kernel", *names, "gaps", "call"], *lines] if lines else []


def _kernel_cells(row: Row, gpu: Gpu) -> list[list[str]]:
    """Heading and rows of one problem's kernels, fastest first."""
    attention = isinstance(row.problem, AttentionProblem)
    heading = ["kernel", "role", "us", "+- 95 %", "own speed", "TFLOP/s", "of peak", "TB/s", "MB"]
    heading += ["error"]
    heading += ["us/head", "Mtokens/s", "tokens/s/MB"] if attention else []
    lines = [heading]
    for timed in sorted(row.timed, key=lambda t: (t.latency_us is None, t.latency_us or 0.0)):
        figures = row.figures(timed, gpu)
        if not figures:
            lines.append([timed.name, str(timed.role), *["-"] * (len(heading) - 2)])
            continue
        half = figures.get("half_width_us")
        cells = [
            timed.name,
            str(timed.role),
            microseconds(timed.latency_us),
            "-" if half is None else f"{half:.2g}",
            speedup_text(figures["over_own"]) if "over_own" in figures else "-",
            f"{figures['tflops']:.0f}",
            f"{100 * figures['share_of_peak']:.1f} %",
            f"{figures['tb_per_s']:.2f}",
            f"{figures['memory_mb']:.1f}",
            "-" if timed.error is None else f"{timed.error:.1e}",
        ]
        if attention:
            cells += [
                f"{figures['us_per_head']:.3f}",
                f"{figures['tokens_per_s'] / 1e6:.2f}",
                f"{figures['tokens_per_s_per_mb']:.0f}",
            ]
        lines.append(cells)
    return lines


def _kernels(row: Row, gpu: Gpu) -> str:
    """Table of one problem's kernels, and the best own config."""
    cells = _kernel_cells(row, gpu)
    parts = [_row_heading(row), table(cells, _after_two(cells))]
    if stages := _stage_cells(row, gpu):
        parts += [*wrapped(f"{STAGES_SAY}:"), table(stages, _after_one(stages))]
    if row.own is not None:
        parts += config_lines(row.own.config)
        parts += [f"  {name}: {_said(resources)}" for name, resources in row.own.resources.items()]
    return "\n".join(parts)


def _said(used: Resources) -> str:
    spilled = used.spill_store_bytes + used.spill_load_bytes
    return f"{used.registers} registers, {spilled} bytes spilled"
