"""Five figures of a tuner from rows of problems: regret, top-1, flips, replay fidelity, transfer.

``docs/pages/figures.md`` defines them.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import rows
from benchmarks.call_times import CONTROL
from benchmarks.harness import Row
from benchmarks.tuner_sweeps import TIE
from benchmarks.tuner_truth import ENABLED, is_truth, own_name
from tuner.config import Config

NEAR_TIE = 0.02
"""Distance from the best at a neighbour that counts as as good as a choice of its own there."""
WORST = 8
HEAD = (
    *("kind", "problems", "regret", "worst", "top-1 or tie", "over peers also", "worst"),
    *("flips", "replayed", "transfer", "worst", "within 2 %", "moved", "worst", "within 2 %"),
    *("kernels beside", "s", "CPU-s", "evaluations", "MiB", "promised"),
)
"""``promised``: what the sets left were expected to save when the sweeps ended; ``regret`` is what
they had to save."""


def regret(row: Row, counts: Callable[[str], bool] = is_truth) -> float | None:
    """The choice's time over the shortest, less 1; None without a time. A call as served has a
    twin, the same kernel once more, and counts by the mean of both.

    Args:
        row: row of a problem.
        counts: True for contenders that count; the tuner's answers by default.
    """
    us: Mapping[str, float] = row.get("us", {})
    name = row.get("judged", rows.TUNER)
    if name not in us:
        return None
    twins = {rows.TUNER, _name(row)} if name == rows.TUNER and "choice" in row else {name}
    chosen = statistics.fmean(us[twin] for twin in twins & us.keys())
    others = (time for other, time in us.items() if counts(other) and other not in twins)
    return chosen / min([chosen, *others]) - 1


def over_everything(row: Row) -> float | None:
    """The regret where peers count also, which the tuner answers with only where it is told to."""
    return regret(row, lambda name: name not in (CONTROL, ENABLED))


def transfers(row: Row) -> list[float]:
    """The time of what the tuner serves over the shortest at each neighbour, less 1."""
    return _near(row, rows.TUNER)


def moves(row: Row) -> list[float]:
    """The time of the choice's kernel over the shortest at each neighbour, less 1."""
    return _near(row, _name(row))


def _near(row: Row, name: str) -> list[float]:
    near = row.get("near", {}).values()
    return [us[name] / min(us.values()) - 1 for us in near if name in us]


def flips(measured: Sequence[Row]) -> tuple[int, int]:
    """Later tunings of a problem whose choice is slower than the first one's by more than a tie,
    and all later ones. Both times are of the later pass.
    """
    pairs = list(_repeated(measured))
    return sum(_is_flipped(first, later) for first, later in pairs), len(pairs)


def _is_flipped(first: Row, later: Row) -> bool:
    us, names = later["us"], [_name(row) for row in (first, later)]
    return all(name in us for name in names) and us[names[1]] > us[names[0]] * (1 + TIE)


def _name(row: Row) -> str:
    choice = row.get("choice")
    return rows.PYTORCH if choice is None else own_name(Config.from_json(choice))


def replays(measured: Sequence[Row]) -> tuple[int, int]:
    """Choices that are the same kernel when they are read again, and all that were read. A sweep's
    decision is read from another store, a selection made again in another run on this GPU model.
    """
    again = [row["replayed"] for row in measured if "replayed" in row]
    for first, later in _repeated(measured):
        if "replayed" not in later:
            same = [json.dumps([row["choice"], row["artifacts"]]) for row in (first, later)]
            again.append(same[0] == same[1])
    return sum(again), len(again)


def _repeated(measured: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Rows of equal problems: the first and each later one."""
    by_problem = defaultdict(list)
    for row in measured:
        if "us" in row and "choice" in row:
            by_problem[json.dumps(row["problem"], sort_keys=True)].append(row)
    for first, *others in by_problem.values():
        yield from ((first, later) for later in others)


def line(row: Row) -> str:
    """A problem's regret and how many kernels it had."""
    value = regret(row)
    shown = "no time" if value is None else f"regret {value:.1%}"
    transfer = max(transfers(row), default=0.0)
    cost = f"; {row['elapsed_s']:.0f} s, {row['cpu_s']:.0f} CPU-s" if "elapsed_s" in row else ""
    return f"{row['case']}: {shown} of {row['kernels']} built, transfer {transfer:.1%}{cost}"


def table(measured: Sequence[Row]) -> list[str]:
    """The figures by kind and of all, then the worst problems."""
    lines: list[Sequence[str]] = [HEAD]
    for kind in (*dict.fromkeys(row["group"] for row in measured), "all"):
        mine = [row for row in measured if kind in (row["group"], "all")]
        if any(regret(row) is not None for row in mine):
            lines.append((kind, *_cells(mine)))
    ranked = sorted(measured, key=lambda row: -(regret(row) or 0.0))[:WORST]
    worst = [f"- {regret(row) or 0:.1%} {row['case']}: {_fastest(row)}" for row in ranked]
    lost = [f"- lost: {row['case']}: {row['lost']}" for row in measured if "lost" in row]
    return [*rows.markdown(lines), "", *worst, *lost]


def first_over_fastest(row: Row) -> float | None:
    """Time of the own kernel that the selection ranks first over the fastest own one, less 1."""
    own = {name: us for name, us in row.get("us", {}).items() if name in row["configs"]}
    return own[row["first"]] / min(own.values()) - 1 if row["first"] in own else None


def survey_line(row: Row) -> str:
    """How many kernels a problem has, and by what part the first one is slower."""
    value = first_over_fastest(row)
    shown = "not built" if value is None else f"{value:.1%} over the fastest"
    return f"{row['case']}: the first of {row['kernels']} {shown}"


def survey_table(measured: Sequence[Row]) -> list[str]:
    """By kind, how far the first kernels are from the fastest own ones."""
    lines: list[Sequence[str]] = [("kind", "problems", "kernels", "over the fastest", "worst")]
    for kind in dict.fromkeys(row["group"] for row in measured):
        mine = [row for row in measured if row["group"] == kind and "us" in row]
        over = rows.values(mine, first_over_fastest)
        lines.append((kind, str(len(mine)), _mean(mine, "kernels"), *_mean_and_worst(over)))
    return rows.markdown(lines)


def rival_line(rival: str, row: Row) -> str:
    """A product's regret by the untuned call and by another tuner, and the seconds."""
    both = ", ".join(f"{name} {_shown(row, name)}" for name in (rows.TUNER, rival))
    return f"{row['case']}: {both}, {row['elapsed_s']:.0f} s"


def rival_table(rival: str, measured: Sequence[Row]) -> list[str]:
    """Regrets of the untuned call and of another tuner's choice over the fastest of all."""
    lines: list[Sequence[str]] = [("product", "us", "regret", f"by {rival}", "regret", "s")]
    for row in (row for row in measured if "us" in row):
        cells = [
            cell
            for name in (rows.TUNER, rival)
            for cell in (f"{row['us'].get(name, 0.0):.1f}", _shown(row, name))
        ]
        lines.append((row["case"], *cells, f"{row['elapsed_s']:.0f}"))
    lost = [f"- lost: {row['case']}: {row['lost']}" for row in measured if "lost" in row]
    return [*rows.markdown(lines), "", *lost]


def _shown(row: Row, name: str) -> str:
    value = regret({**row, "judged": name}, lambda other: other != CONTROL)
    return "no time" if value is None else f"{value:.1%}"


def _fastest(row: Row) -> str:
    us = {name: time for name, time in row.get("us", {}).items() if is_truth(name)}
    return f"fastest {min(us, key=us.__getitem__)}" if us else ""


def _cells(mine: Sequence[Row]) -> list[str]:
    regrets = rows.values(mine, regret)
    peers = rows.values(mine, over_everything)
    near = [[value for row in mine for value in of(row)] for of in (transfers, moves)]
    ties = sum(value <= TIE for value in regrets)
    flipped, replayed = flips(mine), replays(mine)
    return [
        *(str(len(mine)), *_mean_and_worst(regrets), f"{ties / len(regrets):.0%}"),
        *_mean_and_worst(peers),
        *(f"{count} of {all_}" if all_ else "" for count, all_ in (flipped, replayed)),
        *(cell for values in near for cell in (*_mean_and_worst(values), _near_ties(values))),
        _mean(mine, "kernels"),
        *(_mean(mine, name) for name in ("elapsed_s", "cpu_s", "evaluations")),
        f"{max((row.get('extra_mib') or 0.0) for row in mine):.0f}",
        _mean_and_worst(rows.values(mine, lambda row: row.get("expected_loss")))[0],
    ]


def _near_ties(values: Sequence[float]) -> str:
    return f"{sum(value <= NEAR_TIE for value in values)} of {len(values)}"


def _mean_and_worst(shares: Sequence[float]) -> tuple[str, str]:
    return (f"{statistics.fmean(shares):.1%}", f"{max(shares):.1%}") if shares else ("", "")


def _mean(mine: Sequence[Row], name: str) -> str:
    values: list[Any] = [row[name] for row in mine if name in row]
    return f"{statistics.fmean(values):.0f}" if values else ""
