"""Entries as text and as JSON, for the commands that show them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tuner.config import Config
from tuner.families.peers import BESIDE_PYTORCH
from tuner.hardware import Gpu
from tuner.measurement import Environment, Measurement, Provenance, versus
from tuner.problem import Problem
from tuner.problem.base import doublings
from tuner.selection.choice import Selection
from tuner.selection.reader import Entry, LookupResult
from tuner.selection.result import SELECTED
from tuner.store.entry import is_vendor, ratios_json, vendor_name

if TYPE_CHECKING:
    from tuner.families.rule import RuleSelection

WIDTH = 100
"""Columns of a sweep's result and of a printed lookup result, at most."""
FEW = 3
"""Items of a list that a message of one line names."""
_LABEL = 13
_SHORT_DIGEST = 6


def config_lines(config: Config, width: int = WIDTH) -> list[str]:
    """The family and its parameters, wrapped; each stage on lines of its own below."""
    lines = wrapped(str(Config(config.family, config.params)), width)
    for name, stage in sorted(config.stages.items()):
        first, *more = config_lines(stage, width - len(name) - 4)
        lines += [f"  {name}: {first}", *(" " * (len(name) + 4) + line for line in more)]
    return lines


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns, broken at spaces only; those after the first indented."""
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def cut(text: str, width: int) -> str:
    """The words of one line that fit, with ``...`` in place of the others."""
    return textwrap.shorten(text, width, placeholder=" ...", break_on_hyphens=False)


def short_name(measurement: Measurement) -> str:
    """A vendor kernel's name, or the family and the beginning of the config's digest."""
    name = kernel_name(measurement)
    if is_vendor(measurement.config):
        return name
    return f"{name} {measurement.config.digest[:_SHORT_DIGEST]}"


def microseconds(latency_us: float | None) -> str:
    """Text of a time with three digits or more, as in ``13.5`` and ``1800``."""
    if latency_us is None:
        return "-"
    return f"{latency_us:.2f}" if latency_us < 10 else f"{latency_us:.1f}"


def speedups_text(entry: Entry) -> str:
    """The best own kernel against every vendor's, as ``1.29x cudnn; 0.95x flash3, slower``."""
    if entry.best_own is None:
        return "no own kernel passed"
    own, vendors = entry.best_own, entry.vendors
    leads = "; ".join(versus(own, vendors[name], name) for name in entry.speedups)
    return leads or "no vendor kernel was measured"


def against_fastest(entry: Entry) -> str:
    """The best own kernel against the fastest vendor's, as ``1.29x cudnn``; ``-`` without both."""
    return entry.standing.text if entry.standing else "-"


def caveats(provenance: Provenance, gpu: Gpu, pass_name: str = "final") -> list[str]:
    """Remarks of a headline on times that were not measured on this machine or in a final pass.

    Args:
        provenance: provenance of the times.
        gpu: GPU that they hold for.
        pass_name: `Entry.pass_name` of the ranking.
    """
    remarks = []
    if provenance is Provenance.REPLAYED:
        remarks.append(
            f"REPLAYED from a recorded sweep: measured on {gpu.name}, not on this machine"
        )
    if provenance is Provenance.PREDICTED:
        remarks.append(f"PREDICTED for {gpu.name}: estimates, nothing was measured")
    if pass_name == "quick":
        is_measured = provenance is Provenance.MEASURED
        why = "the recorded final pass has none of these own kernels"
        why = "the time limit left no final pass" if is_measured else why
        remarks.append(f"QUICK PASS: {why}; all times are of the quick pass")
    return remarks


def where_from(entry: Entry) -> str:
    """Provenance, pin and origin, as in ``measured, pinned, shipped``."""
    marks = [str(entry.provenance)]
    marks += ["quick pass"] if entry.pass_name == "quick" else []
    marks += ["pinned"] if entry.pinned else []
    marks += [entry.origin] if entry.origin else []
    return ", ".join(marks)


def table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Table with aligned columns under a heading, the first row; `right` ones are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def counted(number: int, noun: str) -> str:
    """``1 entry`` and ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"


def first_few(texts: Sequence[str], separator: str = "; ") -> str:
    """The first `FEW` of a list and the count of the rest, for a message of one line."""
    further = len(texts) - FEW
    return separator.join(texts[:FEW]) + (f" and {further} more" if further > 0 else "")


def nearest_labels(problem: Problem, entries: Iterable[Entry]) -> list[str]:
    """Labels of the decided problems of the same operation, nearest first."""
    problems = {e.problem for e in entries if e.problem.op == problem.op}
    return [p.label() for p in sorted(problems, key=lambda p: (doublings(problem, p), p.key))]


def order_of(entry: Entry) -> tuple[Any, ...]:
    """Sort key of a list: operation, GPU and regime, then the shape's sizes as numbers."""
    label = re.split(r"(\d+)", entry.problem.label())  # text and digits by turns
    sizes = [int(part) if number % 2 else part for number, part in enumerate(label)]
    return entry.problem.op, entry.gpu.name, str(entry.regime), sizes, str(entry.provenance)


def list_text(entries: Sequence[Entry]) -> str:
    """A table for each operation, GPU, regime and provenance, in the order of `order_of`."""
    by_place: dict[str, list[tuple[str, ...]]] = {}
    for entry in sorted(entries, key=order_of):
        place = f"{entry.problem.op} on {entry.gpu.name}, {entry.regime}: {where_from(entry)}"
        by_place.setdefault(place, []).append(
            (
                entry.problem.label(),
                kernel_name(entry.winner),
                microseconds(entry.winner.latency_us),
                against_fastest(entry),
            )
        )
    heading = ("shape", "serves", "us", "own speed")
    return "\n\n".join(
        f"{place}\n{table([heading, *rows], right=frozenset({2}))}"
        for place, rows in by_place.items()
    )


def kernel_name(measurement: Measurement) -> str:
    """An own kernel's family, or a vendor kernel's name."""
    config = measurement.config
    return vendor_name(config) if is_vendor(config) else config.family


def answer_text(answer: LookupResult, problem: Problem, source: str, served: str = "") -> str:
    """A few lines: the kernel that serves the problem, its time, its rivals, and the source.

    Args:
        answer: lookup result; a portfolio's choice has an expected time.
        problem: the problem that was looked up.
        source: name of the store.
        served: text of its availability on this machine; empty: not shown.
    """
    entry = answer.entry
    width = WIDTH - _LABEL
    by = "" if answer.answered_by == "own" else f", by {answer.answered_by}"
    rows = [("answer", [answer.kind + by])]
    rows += _winner_rows(answer, width)
    rows += [("served here", wrapped(served, width))] if served else []
    decided = f", {entry.decided_at}" if entry.decided_at else ""
    # Rows of their own have the origin and a selection's expected times.
    shown = {entry.origin}
    if answer.selected is not None:
        shown.add(f"{SELECTED}: {answer.selected.source}")
    rows.append(("provenance", [where_from(entry) + decided]))
    if entry.winner.environment.facts:
        rows.append(("environment", wrapped(facts_text(entry.winner.environment), width)))
    if entry.origin != "shipped":
        rows.append(("from", [source]))
    rows += [
        *(("note", wrapped(note, width)) for note in answer.notes if note not in shown),
    ]
    return "\n".join([*_answer_head(answer, problem), *_labelled(rows)])


def rule_text(problem: Problem, gpu: Gpu, selected: RuleSelection, served: str) -> str:
    """As `answer_text`, of the kernel that a rule names.

    Args:
        problem: the problem that was looked up.
        gpu: GPU that the expected time holds for.
        selected: the rule's kernels.
        served: as of `answer_text`.
    """
    width = WIDTH - _LABEL
    expected_us, config = selected.expected[0]
    rows = [
        ("answer", ["rule"]),
        ("winner", config_lines(config, width)),
        ("expected", [f"{microseconds(expected_us)} us"]),
        ("served here", wrapped(served, width)),
        *(("note", wrapped(doubt, width)) for doubt in selected.doubts),
    ]
    head = f"{problem.op} {problem.label()} on {gpu.name}, {selected.regime}"
    return "\n".join([head, *_labelled(rows)])


def _labelled(rows: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Lines of rows, the first of each behind its label."""
    return [
        f"{name if number == 0 else '':<{_LABEL}}{line}"
        for name, texts in rows
        for number, line in enumerate(texts)
    ]


def _winner_rows(answer: LookupResult, width: int) -> list[tuple[str, list[str]]]:
    """The serving kernel, its measured or expected time, and the best own kernel beside it."""
    winner, own = answer.entry.winner, answer.entry.best_own
    is_tied = answer.entry.is_tied and winner is own
    rows = [("tied first" if is_tied else "winner", config_lines(winner.config, width))]
    if answer.selected is not None:
        rows.append(("kernels of", [answer.selected.domain.label()]))
        rows.append(("expected", wrapped(answer.selected.expected_text, width)))
        rows.append(("regret", wrapped(answer.selected.regret.text(), width)))
        rows.append(("over PyTorch", wrapped(answer.selected.regret.speed_text(), width)))
    else:
        rows.append(("time", [_time(winner)]))
    if own and own.config != winner.config:
        rows.append(("best own", [*config_lines(own.config, width), _time(own)]))
    return rows + _speed_rows(answer.entry, width)


def _speed_rows(entry: Entry, width: int) -> list[tuple[str, list[str]]]:
    """Own speed over PyTorch's kernels, and over those of peers that PyTorch does not call."""
    if (own := entry.best_own) is None:
        return []
    rows = []
    for label, are_peers in (("over PyTorch", False), ("over peers", True)):
        names = [name for name in entry.speedups if (name in BESIDE_PYTORCH) == are_peers]
        if texts := [versus(own, entry.vendors[name], name) for name in names]:
            rows.append((label, wrapped("; ".join(texts), width)))
    return rows


def _answer_head(answer: LookupResult, problem: Problem) -> list[str]:
    """Heading: the shape that was looked up, and remarks on the times below."""
    entry = answer.entry
    lines = [f"{problem.op} {problem.label()} on {entry.gpu.name}, {entry.regime}"]
    if not answer.is_predicted:
        lines += caveats(entry.provenance, entry.gpu, entry.pass_name)
    return lines


def _time(measurement: Measurement) -> str:
    text = f"{microseconds(measurement.latency_us)} us"
    if measurement.latency_us and measurement.std_us is not None and measurement.rounds > 1:
        deviation = 100 * measurement.std_us / measurement.latency_us
        text += f" (deviation {deviation:.1f} % over {measurement.rounds} rounds)"
    if measurement.tflops is not None:
        text += f", {measurement.tflops:.0f} TFLOP/s"
    return text + (f", {', '.join(measurement.flags)}" if measurement.flags else "")


def facts_text(environment: Environment) -> str:
    """The environment's facts on one line."""
    facts = sorted(environment.facts.items())
    return ", ".join(f"{name} {value}" for name, value in facts) or "not recorded"


def ranking_text(entry: Entry) -> str:
    """The final pass, best first, and below it every own config in full."""
    rows = [("", "kernel", "digest", "us", "TFLOP/s", "deviation", "error", "workspace")]
    for place, m in enumerate(entry.ranking, 1):
        deviation = m.std_us / m.latency_us if m.std_us is not None and m.latency_us else None
        rows.append(
            (
                str(place),
                kernel_name(m),
                m.config.digest,
                microseconds(m.latency_us),
                "-" if m.tflops is None else f"{m.tflops:.0f}",
                "-" if deviation is None else f"{100 * deviation:.1f} %",
                "-" if m.error is None else f"{m.error:.1e}",
                str(m.workspace_bytes),
            )
        )
    lines = [table(rows, right=frozenset({0, 3, 4, 5, 6, 7})), ""]
    for place, m in enumerate(entry.ranking, 1):
        if not is_vendor(m.config):
            label = f"{place}  "
            first, *more = config_lines(m.config, WIDTH - len(label))
            lines += [label + first, *(" " * len(label) + line for line in more)]
    return "\n".join(lines).rstrip()


def kernels_text(measurement: Measurement) -> str:
    """Report of ptxas on each compiled kernel, and its artifact.

    ptxas counts static shared memory only, not the dynamic part of a launch.
    """
    rows = [("kernel", "registers", "spills", "stack", "static smem", "artifact")]
    for name in sorted({*measurement.artifacts, *measurement.resources}):
        resources = measurement.resources.get(name)
        numbers = ("-",) * 4
        if resources is not None:
            spills = resources.spill_store_bytes + resources.spill_load_bytes
            numbers = (
                str(resources.registers),
                str(spills),
                str(resources.stack_bytes),
                str(resources.smem_bytes),
            )
        rows.append((name, *numbers, measurement.artifacts.get(name, "not built here")))
    return table(rows, right=frozenset({1, 2, 3, 4}))


def entry_json(entry: Entry) -> dict[str, Any]:
    """An entry as one JSON object, without its ranking."""
    winner = entry.winner
    return {
        "op": entry.problem.op,
        "shape": entry.problem.label(),
        "problem": entry.problem.to_json(),
        "gpu": entry.gpu.name,
        "regime": str(entry.regime),
        "provenance": str(entry.provenance),
        "origin": entry.origin,
        "pinned": entry.pinned,
        "config": winner.config.to_json(),
        "config_digest": winner.config.digest,
        "latency_us": winner.latency_us,
        "tflops": winner.tflops,
        "own_us": entry.best_own.latency_us if entry.best_own else None,
        "vendors_us": {name: m.latency_us for name, m in entry.vendors.items()},
        **ratios_json(entry),
        "pass": entry.pass_name or None,
        "environment": dict(winner.environment.facts),
        "sweep": entry.sweep,
        "decided_at": entry.decided_at,
    }


def _selection_json(selection: Selection) -> dict[str, Any]:
    return {
        "domain": selection.domain._asdict(),
        "expected_us": round(selection.first[0], 3),
        "vendor": selection.vendor or None,
        "vendor_expected_us": round(selection.vendor_us, 3) if selection.vendor else None,
        "regret": asdict(selection.regret),
        "doubts": list(selection.doubts),
    }


def answer_json(answer: LookupResult, problem: Problem, *, ranking: bool) -> dict[str, Any]:
    """A lookup result as one JSON object."""
    data = {
        **entry_json(answer.entry),
        "kind": answer.kind,
        "answered_by": answer.answered_by,
        "asked": {"shape": problem.label(), "problem": problem.to_json()},
        "exact": answer.exact,
        "notes": list(answer.notes),
    }
    if answer.selected is not None:
        data["selection"] = _selection_json(answer.selected)
    if ranking:
        data["winner"] = answer.entry.winner.to_json()
        data["ranking"] = [m.to_json() for m in answer.entry.ranking]
    return data
