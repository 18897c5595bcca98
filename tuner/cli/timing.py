"""Options of the timing regime."""

from __future__ import annotations

import argparse

from tuner.measurement import LAUNCHES, Regime, launch_named


def add_launch(parser: argparse.ArgumentParser, about: str = "how it is launched") -> None:
    """Add ``--regime``: behind an ordinary kernel, behind copies of itself, or eagerly."""
    parser.add_argument("--regime", type=launch_named, choices=LAUNCHES, help=about)


def regimes_of(args: argparse.Namespace, op: str) -> tuple[Regime, ...]:
    """Regimes that match ``--regime`` and ``--l2``, the preferred one first."""
    return Regime.choices(op, args.regime, args.l2)


def usual_inputs(args: argparse.Namespace, op: str) -> tuple[Regime, ...]:
    """`regimes_of` with the operation's usual inputs, unless ``--l2`` names a state."""
    return Regime.choices(op, args.regime, args.l2 or Regime.default(op).l2)
