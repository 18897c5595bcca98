"""``scripts/bench cliffs``: where a served call is slower than what the machine already has.

Calls are drawn from everything that is served, by turns over its domains (`cliffs_draws`), and each
is timed beside everything else that is installed. The tables have the share below 0.97 and the
worst by domain. A later run goes on with ``--json FILE``. ``--gpus 0,1`` measures on two GPUs, and
``--shard 0/2`` every other call. ``compiled`` has one in `COMPILED_EVERY` of the same calls also
beside FlexAttention and torch.compile, whose compilation takes far longer than the rest.

The other presets read such a file by ``--rows FILE``. ``failures`` measures its calls below 0.97
again, ``worst`` the ten slowest in three fresh processes. ``smallest`` halves one extent of a cliff
after another while it is still below 0.9, and says which call is left. ``kernels`` times every
built kernel of attention's selections: `tuner develop fit kernels` makes rates of its file.
``holes`` reads no file: its calls are listed (`cliffs_holes`), and ``neighbours`` draws one near
each.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import cliffs_holes, cliffs_kernels, rows
from benchmarks.cliffs_draws import Call, Draw, Plain, dense, draws, smaller
from benchmarks.harness import FAILURES, Bench, Preset, Row, add_answers
from tuner.cli import Parser
from tuner.problem import AttentionProblem, GroupedGemmProblem

COUNT, COMPILED_EVERY = 2000, 40
CLIFF = 0.9
"""A call below it is a cliff, which `smallest` makes smaller."""
WORST, RUNS = 10, 3
OWN = ("own", "own decision", "selection")
"""Kinds of answers by own kernels."""
ATTENTION, PRODUCTS = ("attention", "paged", "packed"), ("product", "e4m3", "experts")
"""Operations of the domains that own shares are of."""
SHRINK_S = 60.0
"""No smaller call is begun after this."""


def measure(case: Draw, args: Namespace) -> Row:
    """Times beside everything else, errors, and the kind of answer."""
    from benchmarks.cliffs_calls import measured

    return measured(case.call, args.preset == "compiled")


def drawn(args: Namespace) -> list[Draw]:
    """The draws of the seed, which is that of ``--rows`` where it is given."""
    if args.rows is None:
        return draws(args.seed, args.count)
    head, _ = rows.read(args.rows)
    return draws(head["options"]["seed"], int(head["options"]["count"]))


def below(args: Namespace, floor: float) -> list[Draw]:
    """The draws that a file has below a ratio, wrong or lost, slowest first; all without a file."""
    if args.rows is None:
        return drawn(args)
    _, measured = rows.read(args.rows)
    ratios = {row["case"]: rows.over_fastest(row) for row in measured}
    bad = {row["case"] for row in measured if rows.is_wrong(row)}
    cases = {case.label: case for case in drawn(args)}
    slow = {name: ratio for name, ratio in ratios.items() if ratio is not None and ratio < floor}
    slow |= dict.fromkeys(bad - set(slow), 0.0)
    return [cases[name] for name in sorted(slow, key=slow.__getitem__) if name in cases]


def worst(args: Namespace) -> list[Draw]:
    """The slowest calls of a file, each several times."""
    slowest = below(args, float("inf"))[:WORST]
    return [replace(case, run=run) for case in slowest for run in range(1, RUNS + 1)]


def shrunk(case: Draw, _: Namespace) -> Row:
    """The smallest call that is still below `CLIFF`, and its times."""
    from benchmarks.cliffs_calls import measured

    return smallest(case.call, measured, time.monotonic)


def smallest(call: Call, measured: Callable[[Call], Row], clock: Callable[[], float]) -> Row:
    """The row of the smallest call of a descent, with its label and the number of steps.

    Args:
        call: a call that was below `CLIFF`.
        measured: makes the row of a call.
        clock: seconds.
    """
    row, steps, end = measured(call), 0, clock() + SHRINK_S
    if (rows.over_fastest(row) or 1.0) >= CLIFF:
        return {**row, "smallest": "", "steps": 0}
    while clock() < end:
        for candidate in smaller(call):
            try:
                next_row = measured(candidate)
            except FAILURES:
                continue
            if (rows.over_fastest(next_row) or 1.0) < CLIFF:
                call, row, steps = candidate, next_row, steps + 1
                break
            if clock() >= end:
                break
        else:
            break
    return {**row, "smallest": call.label, "steps": steps}


def smallest_line(row: Row) -> str:
    """The call that is left of a cliff, and its times."""
    left = row["smallest"] or "no cliff any more"
    return f"{rows.ratio_line(row)}\n    {row['steps']} steps: {left}"


def table(measured: Sequence[Row]) -> list[str]:
    """Operations, totals, the slowest calls; then all domains, the worst first, and faults."""
    timed = [(ratio, row) for row in measured if (ratio := rows.over_fastest(row)) is not None]
    timed.sort(key=lambda pair: pair[0])
    lines = rows.ratio_table([{**row, "group": row["group"].partition(",")[0]} for row in measured])
    least: dict[str, float] = {}
    for ratio, row in timed:
        least.setdefault(row["group"], ratio)
    order = sorted(measured, key=lambda row: least.get(row["group"], float("inf")))
    share = sum(ratio < rows.FLOOR for ratio, _ in timed) / max(1, len(timed))
    lines += [f"{len(timed)} timed, {share:.1%} below {rows.FLOOR}, {own_share(measured)}", ""]
    for ratio, row in timed[: 2 * WORST]:
        left = f"; smallest: {row['smallest']}" if row.get("smallest") else ""
        lines.append(f"- {ratio:.3f} {row.get('answered', '')}: {row['case']}{left}")
    lines += ["", *rows.ratio_table(order), ""]
    lost = [row for row in measured if rows.is_wrong(row)]
    return lines + [f"- wrong or lost: {row['case']}: {_fault(row)}" for row in lost]


def own_share(measured: Sequence[Row]) -> str:
    """Parts of attention's calls and of products that own kernels answered."""
    shares = []
    for name, operations in (("attention", ATTENTION), ("products", PRODUCTS)):
        mine = [row for row in measured if row["group"].partition(",")[0] in operations]
        own = sum(row.get("answered") in OWN for row in mine)
        shares.append(f"{name} {own / max(1, len(mine)):.0%}")
    return f"own share: {', '.join(shares)}"


def _fault(row: Row) -> str:
    if "lost" in row:
        return str(row["lost"])
    return ", ".join(row.get("wrong", ())) or str(row["failed"].get(rows.TUNER))


def listing(cases: Sequence[Draw], _: Namespace) -> Iterable[str]:
    """Each call behind its domain."""
    return (f"{case.group}: {case.label}" for case in cases)


def options(parser: Parser) -> None:
    """Options of the draw and of the presets that read its file."""
    add_answers(parser)
    parser.add_argument("--count", type=int, default=COUNT, help=f"calls to draw ({COUNT})")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="file of the draws that the presets choose from"
    )


_ATTENTION = AttentionProblem.parse("B=2,H=4,HKV=2,SQ=1,SKV=40,D=16,dtype=bf16")
SMOKE = Draw("attention, one, D to 64", dense(_ATTENTION, "decoding"), 1)
GROUPED = Plain(GroupedGemmProblem(3, 24, 16, 32, dtype="bfloat16"))
DRAWS = Preset(
    "calls from everything that is served",
    drawn,
    measure,
    table=table,
    limit_s=120.0,
    smoke=SMOKE,
    listing=listing,
)
HOLES = Preset(
    "listed calls by every own kernel that may answer them",
    *(lambda _: cliffs_holes.HOLES, cliffs_holes.measured),
    table=cliffs_holes.table,
    limit_s=60.0,
    smoke=cliffs_holes.Hole("decoding", _ATTENTION),
    listing=cliffs_holes.listing,
    compile=lambda _: cliffs_holes.compile_holes(cliffs_holes.HOLES),
)
BENCH = Bench(
    "cliffs",
    __doc__,
    {
        "draws": DRAWS,
        "compiled": replace(
            DRAWS,
            text="some of them also beside FlexAttention and torch.compile",
            cases=lambda args: drawn(args)[::COMPILED_EVERY],
            limit_s=300.0,
        ),
        "failures": replace(
            DRAWS,
            text="calls of --rows below 0.97, wrong or lost",
            cases=lambda args: below(args, rows.FLOOR),
            smoke=Draw("experts, grouped, M to 256", GROUPED, 1),
        ),
        "worst": replace(
            DRAWS,
            text="the ten slowest calls of --rows in three fresh processes",
            cases=worst,
            smoke=replace(SMOKE, run=1),
            is_fresh=True,
        ),
        "smallest": replace(
            DRAWS,
            text="the smallest call that shows each cliff of --rows",
            cases=lambda args: below(args, CLIFF),
            measure=shrunk,
            line=smallest_line,
        ),
        "kernels": replace(
            DRAWS,
            text="calls of attention by every built kernel of their selections, for fits",
            cases=lambda args: [*filter(cliffs_kernels.takes_part, below(args, float("inf")))],
            measure=cliffs_kernels.measured,
        ),
        "holes": HOLES,
        "neighbours": replace(
            HOLES,
            text="a call near each of the listed ones, by --seed",
            cases=cliffs_holes.neighbours,
            compile=lambda args: cliffs_holes.compile_holes(cliffs_holes.neighbours(args)),
        ),
    },
    options,
)
