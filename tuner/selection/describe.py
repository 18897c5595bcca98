"""Entries as text and as JSON, for the commands that show them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tuner.config import Config
from tuner.lookup import Answer, Entry
from tuner.measurement import Environment, Measurement
from tuner.rule import Choice
from tuner.store.entry import is_vendor, vendor_name

WIDTH = 100
"""Columns that a sweep's result and an answer keep to."""
_LABEL = 13
_SHORT_DIGEST = 6


def config_text(config: Config) -> str:
    """One line: the family and its parameters, those of stages in brackets."""
    parts = [config.family, *(f"{name}={value}" for name, value in sorted(config.params.items()))]
    parts += [f"{name}[{config_text(stage)}]" for name, stage in sorted(config.stages.items())]
    return " ".join(parts)


def config_lines(config: Config, width: int = WIDTH) -> list[str]:
    """The family and its parameters, wrapped; each stage on lines of its own below."""
    lines = wrapped(config_text(Config(config.family, config.params)), width)
    for name, stage in sorted(config.stages.items()):
        first, *more = config_lines(stage, width - len(name) - 4)
        lines += [f"  {name}: {first}", *(" " * (len(name) + 4) + line for line in more)]
    return lines


def wrapped(text: str, width: int = WIDTH) -> list[str]:
    """Lines of at most `width` columns, broken at spaces only; those after the first indented."""
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def short_name(measurement: Measurement) -> str:
    """A vendor kernel's name, or the family and the beginning of the config's digest."""
    name = kernel_name(measurement)
    if is_vendor(measurement.config):
        return name
    return f"{name} {measurement.config.digest[:_SHORT_DIGEST]}"


def microseconds(latency_us: float | None) -> str:
    """Three digits or more, as in ``13.5`` and ``1800``."""
    if latency_us is None:
        return "-"
    return f"{latency_us:.2f}" if latency_us < 10 else f"{latency_us:.1f}"


def ratio_text(entry: Entry) -> str:
    """Time of the best own kernel against every vendor kernel's."""
    return ", ".join(f"{ratio:.3f} of {name}" for name, ratio in entry.ratios.items())


def where_from(entry: Entry) -> str:
    """Provenance, pin and origin, as in ``measured, pinned, shipped``."""
    marks = [str(entry.provenance)]
    marks += ["pinned"] if entry.pinned else []
    marks += [entry.origin] if entry.origin else []
    return ", ".join(marks)


def table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Columns of equal width under a heading (the first row); `right` ones end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def counted(number: int, one: str) -> str:
    """``1 entry`` and ``2 entries``."""
    if number == 1:
        return f"1 {one}"
    return f"{number} {one[:-1] + 'ies' if one.endswith('y') else one + 's'}"


def list_text(entries: Sequence[Entry]) -> str:
    """A table of all entries."""
    rows = [("op", "shape", "GPU", "regime", "winner", "us", "own / vendor", "provenance")]
    for entry in entries:
        ratios = entry.ratios
        nearest = max(ratios, key=ratios.__getitem__) if ratios else ""
        rows.append(
            (
                entry.problem.op,
                entry.problem.label(),
                entry.gpu.name,
                str(entry.regime),
                kernel_name(entry.winner),
                microseconds(entry.winner.latency_us),
                f"{ratios[nearest]:.3f} {nearest}" if nearest else "-",
                where_from(entry),
            )
        )
    return table(rows, right=frozenset({5}))


def kernel_name(measurement: Measurement) -> str:
    """An own kernel's family, or a vendor kernel's name."""
    config = measurement.config
    return vendor_name(config) if is_vendor(config) else config.family


def answer_text(answer: Answer, source: str) -> str:
    """A few lines: what serves the problem, how fast, against what, and where that is known from.

    Args:
        answer: what was found; a nearest one shows the tuned problem's entry, and first the
            configs that it lends; a rule's choice has a regret in a time's place.
        source: the store's name.
    """
    entry = answer.entry
    winner, own = entry.winner, entry.best_own
    width = WIDTH - _LABEL
    head = f"{entry.problem.op} {entry.problem.label()} on {entry.gpu.name}, {entry.regime}"
    rows = [("answer", [answer.kind])]
    rows += [("lends", config_lines(m.config, width)) for m in answer.lent]
    rows.append(("winner", config_lines(winner.config, width)))
    if answer.ruled is not None:
        rows.append(("regret", [answer.ruled.regret.text()]))
    else:
        rows.append(("time", [_time(winner)]))
    if own and own.config != winner.config:
        rows.append(("best own", [*config_lines(own.config, width), _time(own)]))
    if entry.ratios:
        rows.append(("own/vendor", wrapped(ratio_text(entry), width)))
    decided = f", {entry.decided_at}" if entry.decided_at else ""
    rows += [
        ("provenance", [where_from(entry) + decided]),
        ("environment", wrapped(facts_text(winner.environment), width)),
        ("from", [entry.origin if entry.origin == "shipped" else source]),
        *(("note", wrapped(note, width)) for note in answer.notes if note != entry.origin),
    ]
    lines = [
        f"{name if number == 0 else '':<{_LABEL}}{line}"
        for name, texts in rows
        for number, line in enumerate(texts)
    ]
    return "\n".join([head, *lines])


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
    """What ptxas said of each compiled kernel, and its artifact.

    Its shared memory is the static one: what is asked for at the launch ptxas does not see.
    """
    rows = [("kernel", "registers", "spills", "stack", "static smem", "artifact")]
    for name in sorted({*measurement.artifacts, *measurement.resources}):
        seen = measurement.resources.get(name)
        numbers = ("-",) * 4
        if seen is not None:
            spills = seen.spill_store_bytes + seen.spill_load_bytes
            numbers = (
                str(seen.registers),
                str(spills),
                str(seen.stack_bytes),
                str(seen.smem_bytes),
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
        "own_over_vendor": entry.ratios,
        "environment": dict(winner.environment.facts),
        "sweep": entry.sweep,
        "decided_at": entry.decided_at,
    }


def _rule_json(choice: Choice) -> dict[str, Any]:
    regret = choice.regret.to_json()
    del regret["each"]
    facts = {"kind": choice.kind, "source": choice.source, "doubts": list(choice.doubts)}
    return {**facts, "regret": regret}


def answer_json(answer: Answer, *, ranking: bool) -> dict[str, Any]:
    """An answer as one JSON object."""
    data = {
        **entry_json(answer.entry),
        "kind": answer.kind,
        "lent": [m.config.to_json() for m in answer.lent],
        "exact": answer.exact,
        "notes": list(answer.notes),
    }
    if answer.ruled is not None:
        data["rule"] = _rule_json(answer.ruled)
    if ranking:
        data["winner"] = answer.entry.winner.to_json()
        data["ranking"] = [m.to_json() for m in answer.entry.ranking]
    return data
