"""Triton, as its package is installed here."""

from __future__ import annotations

import importlib.metadata
import re

from tuner.base.install import extra_command

#: The release whose compiler's interface `tuner.compile.triton_compiler` is written against.
MIN_TRITON = (3, 6)


def version() -> str:
    """As in ``3.6.0``, without importing it; empty when there is none, or one that is too old."""
    try:
        release = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return release if tuple(map(int, re.findall(r"\d+", release)[:2])) >= MIN_TRITON else ""


def install() -> str:
    """The command that installs it."""
    return extra_command("triton")


def lacks() -> str:
    """The missing package; empty when it is installed."""
    oldest = ".".join(map(str, MIN_TRITON))
    return "" if version() else f"Triton {oldest} or newer is not installed"
