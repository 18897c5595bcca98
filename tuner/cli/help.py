"""``tuner help``: commands in groups, keys of ``--shape``, and a glossary."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import ConfigError
from tuner.problem import PROBLEMS
from tuner.selection.describe import table

SHAPES, GLOSSARY = "shapes", "glossary"
"""Topics beside the commands."""

WORDS: Mapping[str, str] = {
    "problem": "An operation with its shape, types and layouts: what is to be computed.",
    "family": "Kernels of one template, or of one vendor library; it knows its legal configs.",
    "config": "A family's parameters with their values; named by the digest of both.",
    "gate": "Check of a candidate's results against a reference; what fails it is never ranked.",
    "pass": "Run that times candidates: the quick one each alone, the final one all by turns.",
    "regime": "Way of timing: stream (behind an ordinary kernel), chained, eager; L2 warm or cold.",
    "decision": "Ranking of a final pass in the store, with the kernel that serves the problem.",
    "portfolio": "Few kernels with time models, which serve shapes that nobody tuned.",
    "regret": "A choice's time over the best one's, less 1; left out: at models not in the fit.",
    "provenance": "Source of a time: measured here, replayed from a recording, or predicted.",
    "tie": "Two times that are equal within their noise, at most 1 %.",
}
"""Glossary of words in the output of all commands."""


@dataclass(frozen=True)
class Group:
    """Group of commands with an example."""

    title: str
    example: str
    commands: tuple[str, ...]


GROUPS = (
    Group("first steps", "tuner quickstart", ("quickstart", "doctor", "help")),
    Group("tune", "tuner sweep --shape S=1024,D=64", ("sweep", "shapes", "plan", "jobs")),
    Group("look up", "tuner lookup --shape S=1024,D=64 --gpu H200", ("lookup", "entries")),
    Group(
        "compile and carry",
        "tuner build --shape S=1024,D=64 --gpu H200",
        ("build", "prove", "bundle", "store", "serve"),
    ),
    Group(
        "understand", "tuner explain --shape S=1024,D=64", ("report", "explain", "bench", "develop")
    ),
)
"""Groups that list once every command that is in no other (`groups`)."""


def register(subparsers: Any) -> None:
    """Add the command."""
    about = "this text, a command's, `tuner help shapes` or `tuner help glossary`"
    parser = subparsers.add_parser("help", help=about, description=f"Prints {about}.")
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="shapes, glossary, or a command")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the help of a topic.

    Args:
        args: the topic, and the parser of all commands as ``root``.

    Raises:
        ConfigError: when the topic does not exist.
    """
    if args.topic == SHAPES:
        print(shapes_text())
        return 0
    if args.topic == GLOSSARY:
        print(glossary_text())
        return 0
    if args.topic is None:
        args.root.print_help()
        return 0
    commands = commands_of(args.root)
    if args.topic not in commands:
        raise ConfigError(
            f"'{args.topic}' is not a topic (allowed: {SHAPES}, {GLOSSARY}, or a command: "
            f"{', '.join(commands)})"
        )
    commands[args.topic].print_help()
    return 0


def commands_of(root: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Parser of each command, by name."""
    [commands] = (a for a in root._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def groups_text(about: Mapping[str, str]) -> str:
    """List of the commands in groups.

    Args:
        about: help text of each command, by name.
    """
    width = max(len(name) for group in GROUPS for name in group.commands)
    parts = []
    for group in GROUPS:
        lines = [f"{group.title}, as `{group.example}`:"]
        lines += [f"  {name:<{width}}  {about[name]}" for name in group.commands]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def glossary_text() -> str:
    """Glossary, and the families' parameters."""
    from tuner.report.glossary import MEANINGS

    words = table([("word", "meaning"), *WORDS.items()])
    return f"{words}\n\nParameters of configs\n{table([('name', 'meaning'), *MEANINGS.items()])}"


def shapes_text() -> str:
    """Keys of ``--shape`` of every operation, with meaning, unit and default."""
    parts = ["Keys of --shape KEY=VALUE,... by operation. `tuner shapes` lists a model's problems."]
    for op, kind in PROBLEMS.items():
        rows = [("key", "meaning", "unit", "default")]
        rows += [(k.key, k.meaning, k.unit or "-", k.default) for k in kind.described_keys()]
        parts.append(f"--op {op}\n{table(rows)}")
    return "\n\n".join(parts)
