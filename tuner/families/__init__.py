"""One file a kernel family. Every module here that defines a concrete `Family` is registered by
being there: a new family is one file and one template, and nothing else changes."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from tuner.errors import ConfigError
from tuner.families.base import Family


@cache
def families() -> dict[str, Family]:
    """All families by name, own ones and vendors', in alphabetical order."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        for value in vars(loaded).values():
            if (
                isinstance(value, type)
                and issubclass(value, Family)
                and value.__module__ == loaded.__name__
                and not value.__abstractmethods__
            ):
                found[value.name] = value()
    return dict(sorted(found.items()))


def family(name: str) -> Family:
    """One family by name.

    Raises:
        ConfigError: when there is none of that name; says which there are.
    """
    if name not in families():
        raise ConfigError(f"family '{name}' is not known (allowed: {', '.join(families())})")
    return families()[name]


def families_of(op: str) -> dict[str, Family]:
    """The families that serve an operation."""
    return {name: member for name, member in families().items() if member.op == op}
