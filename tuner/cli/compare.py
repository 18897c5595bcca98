"""``tuner store compare``: compare two stores, exported files or recordings."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from tuner.cli import DONE, FAILED
from tuner.errors import ConfigError, StoreError
from tuner.selection.describe import kernel_name, microseconds, table, wrapped

if TYPE_CHECKING:
    from tuner.report.changes import DecisionComparison

DESCRIPTION = """Compares what two sources decided for the same problems, GPUs and regimes: the
kernel that is served and the best own one. A source is a store (SQLAlchemy URL or SQLite file), an
exported .json, a recording .json.gz, a folder of recordings, or the word 'shipped'. A time is
faster or slower if it differs by more than the tolerance and by more than the noise of both.
Speeds are A's time over B's: above 1 where B is faster."""

EXIT_CODES = """exit codes:
  0  nothing got slower
  1  something got slower
  2  wrong input, or nothing in common"""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "compare",
        help="compare two stores or recordings: faster, slower, changed",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="the earlier store, file or recording")
    parser.add_argument("b", metavar="B", help="the later store, file or recording")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="PERCENT",
        help="least difference that counts (default 3)",
    )
    parser.add_argument(
        "--relative",
        action="store_true",
        help="judge times as parts of the vendors' that both measured: takes out clocks and power",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare. Returns 1 if a problem became slower.

    Raises:
        ConfigError: when a source cannot be read, or the two share no problem.
    """
    from tuner.report.changes import TOLERANCE, compare, load_entries

    tolerance = TOLERANCE if args.tolerance is None else args.tolerance / 100
    if not (0 <= tolerance < 1 and math.isfinite(tolerance)):
        raise ConfigError(f"tolerance={args.tolerance} is out of range (allowed: 0 to below 100)")
    try:
        before, after = load_entries(args.a), load_entries(args.b)
    except StoreError as exc:
        # An unreadable source is wrong input here: exit code 1 means that a problem became slower.
        raise ConfigError(str(exc)) from exc
    comparison = compare(before, after, tolerance=tolerance, is_relative=args.relative)
    print(json.dumps(comparison.to_json()) if args.json else comparison_text(comparison))
    return FAILED if any(pair.is_slower for pair in comparison.pairs) else DONE


def comparison_text(compared: DecisionComparison) -> str:
    """Table of all pairs, and of the entries that only one side has."""
    heading = ("problem", "GPU", "regime", "kernel", "A us", "B us", "B's speed", "vendors'")
    rows = [(*heading, "verdict")]
    lines = []
    for pair in compared.pairs:
        roles = [("served", pair.served)]
        if pair.own and pair.own != pair.served:
            roles.append(("best own", pair.own))
        for role, times in roles:
            rows.append(
                (
                    f"{pair.a.problem.op} {pair.a.problem.label()}",
                    pair.a.gpu.name.removeprefix("NVIDIA "),
                    str(pair.a.regime),
                    f"{role}: {kernel_name(times[1])}",
                    microseconds(times[0].latency_us),
                    microseconds(times[1].latency_us),
                    pair.speed(times),
                    pair.drift_text,
                    pair.change(times).value,
                )
            )
        if pair.new_winner:
            name = f"{pair.a.problem.op} {pair.a.problem.label()}"
            lines += wrapped(f"new winner: {name}: {pair.new_winner}")
    for side, entries in (("A", compared.only_a), ("B", compared.only_b)):
        for e in entries:
            name = f"{e.problem.op} {e.problem.label()} on {e.gpu.name}, {e.regime}"
            lines += wrapped(f"only in {side}: {name}")
    if compared.environment:
        changed = (f"{name} {a} -> {b}" for name, (a, b) in compared.environment.items())
        lines += wrapped(f"environment: {', '.join(changed)}")
    slower = sum(pair.is_slower for pair in compared.pairs)
    lines.append(f"{len(compared.pairs)} compared, {slower} slower")
    return "\n".join([table(rows, right=frozenset({4, 5, 6, 7})), "", *lines])
