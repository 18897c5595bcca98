"""``tuner report``: a sweep as one page that needs no network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tuner.cli.subject import add_subject, subject_of
from tuner.errors import ConfigError

DESCRIPTION = """Writes one self-contained HTML page of a measured sweep: the verdict, the kernel
against its peers, what limits it and why it won, the course and the cost of the search, its space,
which parameters matter, a roofline, memory, and scaling where enough lengths are known. Of the
store, else of the shipped recordings; no GPU is needed."""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report", help="a sweep as one HTML page", description=DESCRIPTION
    )
    add_subject(parser)
    parser.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE")
    parser.add_argument(
        "--bench",
        type=Path,
        action="append",
        metavar="FILE",
        help="of `tuner bench --json`: its rows that differ in their sequence length only make the "
        "scaling curves; may be repeated",
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="DIR", help="write the pictures as SVG instead of the page"
    )
    parser.add_argument(
        "--only", metavar="NAMES", help="of --pictures these, as standing,ranking,progress"
    )
    parser.add_argument("--json", action="store_true", help="say what was written as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        ConfigError: when the extra is not installed or the file cannot be written.
        NoValidConfigError: when nothing was measured.
    """
    from tuner.report.analysis import verdict
    from tuner.report.page import render

    if args.pictures is not None:
        return _pictures(args)
    if args.only is not None:
        raise ConfigError("--only chooses among --pictures DIR")
    path: Path = args.out
    if path.is_dir():
        raise ConfigError(f"report {path} cannot be written: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"report {path} cannot be written: no folder {path.parent}")
    subject = subject_of(args)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(render(subject), encoding="utf-8")
        partial.replace(path)
    except OSError as exc:
        raise ConfigError(f"report {path} cannot be written: {exc.strerror}") from exc
    if args.json:
        facts = {"path": str(path), "bytes": path.stat().st_size, "source": subject.source}
        print(json.dumps({**facts, "verdict": verdict(subject)}))
    else:
        print(verdict(subject))
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, from {subject.source}")
    return 0


def _pictures(args: argparse.Namespace) -> int:
    from tuner.report import pictures

    if args.pictures.exists() and not args.pictures.is_dir():
        raise ConfigError(f"--pictures {args.pictures} is a file; name a folder")
    only = [name.strip() for name in (args.only or "").split(",") if name.strip()]
    subject = subject_of(args)
    written = pictures.write(pictures.specs(subject, only), args.pictures)
    if args.json:
        print(json.dumps({"paths": [str(path) for path in written], "source": subject.source}))
    else:
        print(f"{len(written)} pictures in {args.pictures}, from {subject.source}")
    return 0
