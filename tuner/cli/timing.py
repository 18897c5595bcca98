"""The options that say how something is timed."""

from __future__ import annotations

import argparse

from tuner.measurement import LAUNCHES, Regime, launch_named


def add_launch(parser: argparse.ArgumentParser, about: str = "how it is launched") -> None:
    """``--regime``: behind an ordinary kernel, behind copies of itself, or eagerly."""
    parser.add_argument("--regime", type=launch_named, choices=LAUNCHES, help=about)


def regimes_of(args: argparse.Namespace, op: str) -> tuple[Regime, ...]:
    """The regimes that ``--regime`` and ``--l2`` leave, the preferred one first."""
    return Regime.choices(op, args.regime, args.l2)


def usual_inputs(args: argparse.Namespace, op: str) -> tuple[Regime, ...]:
    """The same with the operation's usual inputs, where ``--l2`` names none."""
    return Regime.choices(op, args.regime, args.l2 or Regime.default(op).l2)
