"""Kernel families. A module here, or in a folder here, that defines a concrete `Family` is
registered. README.md shows how to add one.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from tuner.errors import ConfigError
from tuner.families.base import Family


@cache
def families() -> dict[str, Family]:
    """All families by name, own ones and vendors', in alphabetical order."""
    found: dict[str, Family] = {}
    for module in _modules():
        found |= _members(module)
    return dict(sorted(found.items()))


@cache
def _modules() -> tuple[str, ...]:
    """Modules below this package, by dotted name; nothing is imported to find them."""
    return tuple(_below(Path(__file__).parent))


def _below(folder: Path, prefix: str = "") -> Iterator[str]:
    for module in pkgutil.iter_modules([str(folder)]):
        yield prefix + module.name
        if module.ispkg:
            yield from _below(folder / module.name, f"{prefix}{module.name}.")


@cache
def _members(module: str) -> dict[str, Family]:
    """The families of one module: the same objects at every call."""
    return _defined_in(importlib.import_module(f"{__name__}.{module}"))


def families_in(path: Path) -> dict[str, Family]:
    """Families that a file outside the package defines, by name; not registered by this.

    Raises:
        ConfigError: when it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(f"tuner_families_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, OSError, SyntaxError, TypeError) as exc:
        raise ConfigError(f"'{path}' cannot be imported: {exc}") from exc
    return _defined_in(module)


def _defined_in(module: ModuleType) -> dict[str, Family]:
    return {
        value.name: value()
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Family)
        and value.__module__ == module.__name__
        and not value.__abstractmethods__
    }


def family(name: str) -> Family:
    """One family by name, without loading the others where `find` does.

    Raises:
        ConfigError: when there is none of that name; says which there are.
    """
    found = find(name)
    if found is None:
        raise ConfigError(f"family '{name}' is not known (allowed: {', '.join(families())})")
    return found


@cache
def find(name: str) -> Family | None:
    """One family by name, or None. When its module has the same name (``gemm.swiglu`` for
    `gemm_swiglu`), no other module is imported.
    """
    for module in _modules():
        if module.replace(".", "_") == name and (member := _members(module).get(name)):
            return member
    return families().get(name)


def families_of(op: str) -> dict[str, Family]:
    """The families that serve an operation."""
    return {name: member for name, member in families().items() if member.op == op}
