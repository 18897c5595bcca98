"""``tuner`` without a command: what this machine can do, and the next command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tuner.cli.doctor import MISSING, NOTE, Finding, conclude, examine

_SHAPE = "S=1024,D=64"


def run(args: argparse.Namespace) -> int:
    """Print what this machine can do. Returns 0."""
    findings = examine(is_quick=True)
    lines = [f.found for f in findings if f.name in ("GPU", "shipped data") and f.state != MISSING]
    missing = {f.name for f in findings if f.state == MISSING}
    lines += [conclude(missing), f"Next: {next_command(findings)}", "Commands: tuner --help"]
    print("\n".join(lines))
    return 0


def next_command(findings: Sequence[Finding]) -> str:
    """The command that leads a user of this machine on."""
    missing = {f.name for f in findings if f.state == MISSING}
    if missing & {"store", "artifact cache"}:
        return "tuner doctor"
    if missing & {"GPU", "driver", "cuda-python"}:
        return f"tuner lookup --shape {_SHAPE} --gpu H200"
    if any(f.name == "shipped data" and f.state == NOTE for f in findings):
        return "tuner quickstart"
    return f"tuner sweep --shape {_SHAPE}"
