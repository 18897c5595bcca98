"""``tuner store import``: entries of an exported file, and hints of other tuners' files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tuner.cli.arguments import url_of
from tuner.errors import ConfigError
from tuner.measurement import Measurement
from tuner.selection import describe
from tuner.store import open_store

if TYPE_CHECKING:
    from tuner.store import ImportReport


def import_file(args: argparse.Namespace) -> int:
    """Import an exported file, as a whole or not at all; or hints of another tuner's file."""
    from tuner.search import hints
    from tuner.store.exchange import load

    if hints.is_hints(args.file):
        named = hints.read(args.file)
        hints.add(named)
        text = f"{describe.counted(len(named), 'hint')} added: sweeps try and measure them first"
        print(json.dumps({"hints": len(named)}) if args.json else text)
        return 0
    document = load(args.file)
    with open_store(url_of(args)) as store:
        try:
            report = store.import_(document, check=unservable)
        except ConfigError as exc:
            raise ConfigError(f"{args.file}: {exc}") from exc
    if args.json:
        print(json.dumps(vars(report)))
        return 0
    added = describe.counted(report.measurements_added, "measurement")
    print(imported_text(report, f"{added} added, {report.measurements_known} known already"))
    if report.entries_added + report.entries_replaced:
        print("their kernels are not compiled here yet: `tuner build` makes them")
    return 0


def imported_text(report: ImportReport, beside: str) -> str:
    """Text of an import: the entries, and the others that came with them."""
    text = (
        f"{describe.counted(report.entries_added, 'entry')} added, "
        f"{report.entries_replaced} replaced, {report.entries_known} known already, "
        f"{len(report.entries_kept)} not taken; {beside}"
    )
    refused = (
        f"not taken: {label}: this store has its own or a newer decision"
        for label in report.entries_kept
    )
    return "\n".join([text, *refused])


def unservable(measurement: Measurement) -> Sequence[str]:
    """Reason why an imported measurement must not be served, by its family's legality predicate."""
    from tuner.families import RETIRED, family, note_retired

    if measurement.config.family in RETIRED:
        note_retired(measurement.config.family)
        return []
    try:
        member = family(measurement.config.family)
        if member.op != measurement.problem.op:
            return [f"config: {member.name} serves {member.op}, not {measurement.problem.op}"]
        reasons = member.violations(measurement.problem, measurement.config, measurement.gpu)
    except ConfigError as exc:
        return [f"config: {exc}"]
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        # The predicate is defined only on its family's configs; an imported config may not be one.
        return [f"config: not one of {measurement.config.family} ({type(exc).__name__}: {exc})"]
    return [f"config: {reason}" for reason in reasons]
