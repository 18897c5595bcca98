"""Groups of commands, as `tuner entries list`. Former names, as `tuner list`, run them too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

MEMBERS: Mapping[str, tuple[str, ...]] = {
    "entries": ("list", "show", "pin", "unpin", "forget", "revalidate"),
    "jobs": ("worker",),
    "store": ("export", "import", "sync", "compare", "cache"),
    "develop": ("record", "survey", "fit", "legality", "profile"),
}
"""Commands that each group has beside its own."""

_ABOUT = {
    "entries": "entries of the store: list, show, pin, unpin, forget, revalidate",
    "develop": "for authors of kernels: record, survey, fit, legality, profile",
}


def gather(commands: Any) -> None:
    """Put commands that are registered into their groups.

    Args:
        commands: the action of all commands.
    """
    about = {action.dest: action for action in commands._get_subactions()}
    for group, names in MEMBERS.items():
        members = _members(commands, group)
        for name in names:
            parser = commands.choices[name]
            parser.prog = f"tuner {group} {name}"
            members.choices[name] = parser
            members._choices_actions.append(about[name])


def hidden() -> frozenset[str]:
    """Former names of commands that are in a group now."""
    return frozenset(name for names in MEMBERS.values() for name in names)


def _members(commands: Any, group: str) -> Any:
    """The action of a group's commands."""
    if group not in commands.choices:
        about = _ABOUT[group]
        parser = commands.add_parser(group, help=about, description=about)
        return parser.add_subparsers(dest=f"{group}_command", required=True, metavar="COMMAND")
    [members] = (
        action
        for action in commands.choices[group]._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return members
