"""Text of a sweep's outcome."""

from __future__ import annotations

from tuner.measurement import Measurement, is_tie, versus
from tuner.problem import AttentionProblem
from tuner.selection.describe import (
    WIDTH,
    caveats,
    config_lines,
    microseconds,
    short_name,
    speedups_text,
    table,
    wrapped,
)
from tuner.selection.served import served_text
from tuner.store.entry import Entry, is_vendor, vendor_name
from tuner.tuning.finals import PROVISIONAL
from tuner.tuning.outcome import Outcome


def outcome_text(outcome: Outcome, store: str) -> str:
    """Table of a sweep's outcome, and the lines under it.

    Args:
        outcome: outcome of the sweep.
        store: name of the store.
    """
    head = f"{outcome.problem.op} {outcome.problem.label()} on {outcome.gpu.name}, {outcome.regime}"
    entry = outcome.entry
    pass_name = entry.pass_name if entry else "final"
    lines = [head, *caveats(outcome.provenance, outcome.gpu, pass_name)]
    if entry is None:
        return "\n".join([*lines, "interrupted before any candidate passed"])
    configs = _config_lines(entry)
    lines += wrapped(served_text(outcome.problem, outcome.gpu, outcome.regime))
    lines += ["", _ranking_table(entry), "", *configs, *([""] if configs else [])]
    lines += wrapped(f"own speed: {speedups_text(entry)}")
    lines += _unranked_lines(outcome)
    lines += [f"flagged: {short_name(m)}: {', '.join(m.flags)}" for m in _shown(entry) if m.flags]
    for name, why in outcome.unavailable.items():
        lines += wrapped(f"not measured: {name}: {why}")
    lines += wrapped(_effort_text(outcome))
    if outcome.failures:
        counts = sorted(outcome.failures.items(), key=lambda item: (-item[1], item[0]))
        lines += wrapped("failed: " + ", ".join(f"{n} {status}" for status, n in counts))
    if outcome.interrupted:
        lines.append("interrupted: this is the best so far")
    is_decided = pass_name != "quick" or PROVISIONAL not in entry.ranking[0].flags
    stored = f"stored as {outcome.provenance} in {store}"
    lines.append(stored if is_decided else f"trials {stored}; no decision")
    return "\n".join(lines)


def _unranked_lines(outcome: Outcome) -> list[str]:
    """Finalists without a final time, and their quick times against the fastest vendor's quick
    time.
    """
    lines, vendor = [], outcome.quick_vendor
    for m in outcome.unranked:
        text = f"not ranked, without a final time: {short_name(m)}: "
        text += f"{microseconds(m.latency_us)} us in the quick pass"
        if vendor and (speed := versus(m, vendor, f"{short_name(vendor)} there")):
            text += f", {speed}"
        lines += wrapped(text)
    return lines


def _effort_text(outcome: Outcome) -> str:
    minutes, seconds = divmod(round(outcome.elapsed_s), 60)
    resumed = f", {outcome.resumed} sets known before" if outcome.resumed else ""
    given_up = f", {outcome.given_up} sets not waited for" if outcome.given_up else ""
    loss, saves = outcome.expected_loss, ""
    if loss is not None and outcome.expected_loss_p90 is not None:
        saves = f"; the sets left are expected to save {100 * loss:.1f} %, "
        saves += f"{100 * outcome.expected_loss_p90:.1f} % in one of ten"
    first = outcome.first_answer_s
    answered = "" if first is None else f", the first answer after {first:.0f} s"
    own_s = outcome.first_own_s
    if first is not None and own_s is not None and own_s > first:
        answered += f", the first own kernel's after {own_s:.0f} s"
    return (
        f"{outcome.candidates} own candidates of {outcome.kernels} sets of kernels in "
        f"{minutes} min {seconds:02d} s{answered}{resumed}{given_up}{saves}"
    )


def _ranking_table(entry: Entry) -> str:
    """Table of winner, runner-up, best own kernel and every baseline, each once."""
    heading = ("role", "kernel", "us", "us/head", "TFLOP/s", "deviation", "workspace")
    rows: list[tuple[str, ...]] = [heading]
    rows += [(_roles(entry, m), short_name(m), *_numbers(m)) for m in _shown(entry)]
    if not isinstance(entry.problem, AttentionProblem):
        rows = [row[:3] + row[4:] for row in rows]
    return table(rows, right=frozenset(range(2, len(rows[0]))))


def _config_lines(entry: Entry) -> list[str]:
    """Own configs of the table in full, under the table's names."""
    lines = []
    for m in _shown(entry):
        if not is_vendor(m.config):
            lines.append(f"{short_name(m)} ({_roles(entry, m)})")
            lines += [f"  {line}" for line in config_lines(m.config, WIDTH - 2)]
    return lines


def _shown(entry: Entry) -> list[Measurement]:
    return [m for m in entry.ranking if _roles(entry, m)]


def _roles(entry: Entry, m: Measurement) -> str:
    first, roles = entry.ranking[0], []
    is_tied = entry.is_tied and first is entry.best_own
    if is_tied and (m is first or (is_vendor(m.config) and is_tie(first, m))):
        roles.append("tied first")
    elif m is first:
        roles.append("winner")
    elif m is entry.ranking[1]:
        roles.append("runner-up")
    if m is entry.best_own:
        roles.append("best own")
    if m is entry.vendors.get(vendor_name(m.config)):  # of a library's list the best
        roles.append("baseline")
    return ", ".join(roles)


def _numbers(m: Measurement) -> tuple[str, str, str, str, str]:
    problem, latency = m.problem, m.latency_us or 0.0
    heads = problem.batch * problem.heads_q if isinstance(problem, AttentionProblem) else 1
    deviation = "-" if m.std_us is None or not latency else f"{100 * m.std_us / latency:.1f} %"
    return (
        microseconds(m.latency_us),
        f"{latency / heads:.3f}",
        "-" if m.tflops is None else f"{m.tflops:.0f}",
        deviation,
        _bytes(m.workspace_bytes),
    )


def _bytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{size} B"
